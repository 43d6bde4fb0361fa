"""How many microbatches should a step accumulate before it updates the weights?

Accumulating spreads one reduction of the gradients (or one pipeline bubble) over more samples, so tokens per second
rise; but the batch grows with it, and beyond the critical batch size more tokens a step save ever fewer steps. What
counts is the time to the target. FSDP gathers parameters for every microbatch, so there is less to spread.

    python scenarios/gradient_accumulation.py [chart.html]
"""

import sys

import simpar
from simpar import Plan
from simpar.convergence import TimeToTarget
from simpar.view.chart import write_chart

MODEL = "llama3-8b"
CLUSTER = {"base": "h100-sxm:8x8", "fabric": {"nic_gbps": 50}}  # 50 Gb/s a GPU: 400 Gb/s for each node of 8 H100
SEQ_LEN = 4_096  # tokens a sample
ACCUMULATED = (1, 4, 16, 64)  # microbatches a step and replica
CRITICAL_BATCH = 4e6  # tokens; a property of model, data and target that is measured, here an example
MINIMUM_STEPS = 25_000  # with the largest batch, likewise
PLANS = {
    "ZeRO-1": Plan(zero=1, recompute="full"),
    "FSDP": Plan(zero=3, recompute="full"),
    "TP4 PP4": Plan(tp=4, pp=4, zero=1, sequence_parallel=True),
}


def main(chart: str = "gradient_accumulation.html") -> None:
    """Prints throughput and time to the target for every number of microbatches, and the best of each plan."""
    cluster = simpar.Job(model=MODEL, cluster=CLUSTER).cluster
    print(f"{MODEL} on {cluster.gpus} {cluster.device.name}, 50 Gb/s a GPU, critical batch {CRITICAL_BATCH / 1e6:g} M")
    print("\nmicrobatches" + "".join(f"{name:>36}" for name in PLANS))
    print(f"{'':12}" + f"{'M tokens':>12}{'tokens/s/GPU':>14}{'hours':>10}" * len(PLANS))
    found = {name: targets(plan) for name, plan in PLANS.items()}
    for accumulated in ACCUMULATED:
        cells = (found[name][accumulated] for name in PLANS)
        print(f"{accumulated:12}" + "".join(cell(one, cluster.gpus) for one in cells))
    answer = verdict(found)
    print(f"\n{answer}")
    series = {name: {str(n): one.hours for n, one in row.items()} for name, row in found.items()}
    write_chart(
        chart,
        series,
        title="How many microbatches should a step accumulate?",
        answer=answer,
        across="microbatches a step and replica",
        value="hours to the target",
    )
    print(f"\nchart: {chart}")


def targets(plan: Plan) -> dict[int, TimeToTarget]:
    """The time to the target by accumulated microbatches."""
    job = simpar.Job(model=MODEL, cluster=CLUSTER, plan=plan.replace(seq_len=SEQ_LEN))
    replicas = job.cluster.gpus // (plan.tp * plan.pp)
    batches = [replicas * accumulated * plan.micro_batch for accumulated in ACCUMULATED]
    records = simpar.time_to_target(
        job, critical_batch_tokens=CRITICAL_BATCH, minimum_steps=MINIMUM_STEPS, batches=batches
    )
    return dict(zip(ACCUMULATED, records, strict=True))


def cell(one: TimeToTarget, gpus: int) -> str:
    """Batch, throughput and time to the target."""
    return f"{one.batch_tokens / 1e6:12.2f}{one.tokens_per_s / gpus:14,.0f}{one.hours:10.1f}"


def verdict(found: dict[str, dict[int, TimeToTarget]]) -> str:
    """The best number of each plan, and what none and all of them cost."""
    lines = []
    few, many = ACCUMULATED[0], ACCUMULATED[-1]
    for name, row in found.items():
        best = min(row, key=lambda accumulated: row[accumulated].hours)
        faster = row[many].tokens_per_s / row[few].tokens_per_s
        later = ", ".join(
            f"{n} takes {row[n].hours / row[best].hours - 1:.0%} longer" for n in (few, many) if n != best
        )
        lines.append(
            f"{name}: {best} microbatch{'es' * (best > 1)} a step {'are' if best > 1 else 'is'} first at the target, "
            f"after {row[best].hours:.0f} hours; {later} ({many} has {faster:.2f} times the throughput of {few})."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
