"""On a TPU torus, does the shape of the slice matter, and where should tensor parallelism lie?

The chips of a slice forward for each other, so a group is fast if it fills closed axes of the torus. Trains Llama-3-70B
on 256 TPU v5p in slices of several shapes, sharded over all chips (FSDP) alone and with tensor parallelism, beside the
same number of H100 behind switches. Ranks lie along the last axis first.

    python scenarios/tpu_torus.py [chart.html]
"""

import sys

import simpar
from simpar import Plan
from simpar.view.chart import write_chart

MODEL = "llama3-70b"
DEVICE = "tpu-v5p"
SHAPES = ("4x8x8", "4x4x16")  # chips along each axis; all axes are closed
SWITCHED = "h100-sxm:32x8"  # as many GPUs, NVLink in nodes of 8 and 400 Gb/s between them
SHAPE = Plan(zero=3, recompute="full", global_batch=256, seq_len=4_096)
PLANS = {
    "FSDP": SHAPE,
    "FSDP + TP4": SHAPE.replace(tp=4, micro_batch=4, sequence_parallel=True),
    "FSDP + TP8": SHAPE.replace(tp=8, micro_batch=8, sequence_parallel=True),
    "FSDP + TP16": SHAPE.replace(tp=16, micro_batch=16, sequence_parallel=True),
}


def main(chart: str = "tpu_torus.html") -> None:
    """Prints the step time of every plan on every slice."""
    clusters = {f"{DEVICE} {shape}": f"{DEVICE}:{shape}" for shape in SHAPES} | {SWITCHED: SWITCHED}
    print(f"{MODEL} on 256 chips, {SHAPE.global_batch} × {SHAPE.seq_len:,} tokens a step; step time (exposed)\n")
    print(f"{'':14}" + "".join(f"{name:>20}" for name in clusters))
    results: dict[str, dict[str, simpar.Result]] = {name: {} for name in clusters}
    for plan_name, plan in PLANS.items():
        for name, cluster in clusters.items():
            results[name][plan_name] = simpar.simulate(simpar.Job(model=MODEL, cluster=cluster, plan=plan))
        print(f"{plan_name:14}" + "".join(f"{cell(row[plan_name]):>20}" for row in results.values()))
    answer = verdict(results)
    print(f"\n{answer}")
    series = {name: {plan: r.step_time_s for plan, r in row.items()} for name, row in results.items()}
    write_chart(
        chart,
        series,
        title="Which slice of a TPU torus, and where does TP lie?",
        answer=answer,
        across="plan",
        value="step time (s)",
        form="bars",
    )
    print(f"\nchart: {chart}")


def cell(result: simpar.Result) -> str:
    """Time of a step, and how much of it waits for communication."""
    return f"{result.step_time_s:.2f} s ({result.exposed_fraction:.0%})"


def verdict(results: dict[str, dict[str, simpar.Result]]) -> str:
    """Where the shape matters most, and the best plan of all slices."""
    slices = {name: row for name, row in results.items() if name != SWITCHED}
    ratio = {
        plan: max(row[plan].step_time_s for row in slices.values())
        / min(row[plan].step_time_s for row in slices.values())
        for plan in PLANS
    }
    worst, least = max(ratio, key=lambda plan: ratio[plan]), min(ratio, key=lambda plan: ratio[plan])
    best = {plan: min(slices, key=lambda name: slices[name][plan].step_time_s) for plan in PLANS}
    name, plan = min(((n, p) for n in slices for p in PLANS), key=lambda pair: slices[pair[0]][pair[1]].step_time_s)
    return (
        f"The shape matters most for {worst}: {ratio[worst]:.2f} times as long on the worse one, and best on "
        f"{best[worst]}; least for {least} ({ratio[least]:.2f} times).\n"
        f"Fastest on a torus: {plan} on {name} with {slices[name][plan].step_time_s:.2f} s; the best on {SWITCHED}: "
        f"{min(result.step_time_s for result in results[SWITCHED].values()):.2f} s."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
