"""How does one train on ever longer sequences, and which kind of context parallelism is fastest?

Llama-3-8B with FSDP on 32 H100, the tokens of a step held fixed while they are cut into fewer and longer samples. Each
sample is spread over as few GPUs as hold it (and over twice as many, to see what that costs), with keys and values
passed around a ring, gathered before attention, or heads traded for sequence (all-to-all).

    python scenarios/long_context.py [chart.html]
"""

import sys

import simpar
from simpar import Plan
from simpar.units import GIB
from simpar.view.chart import write_chart

MODEL = "llama3-8b"
CLUSTER = "h100-sxm:4x8"
TOKENS = 2**20  # a step
SEQ_LENS = (2**17, 2**18, 2**19, 2**20)  # tokens a sample
DEGREES = (1, 2, 4, 8, 16, 32)  # GPUs that share a sample
METHODS = ("ring", "all_gather", "all_to_all")
SHAPE = Plan(zero=3, recompute="full")


def main(chart: str = "long_context.html") -> None:
    """Prints, for every length, the methods at the least degree that fits, and the best one at twice that."""
    print(f"{MODEL} on {CLUSTER}, FSDP with full recomputation, {TOKENS:,} tokens a step\n")
    print(f"{'seq_len':>9}  {'cp':>4}" + "".join(f"{method:>14}" for method in METHODS) + f"{'MFU':>9}{'memory':>11}")
    series: dict[str, dict[str, float]] = {method: {} for method in METHODS}
    results: dict[int, dict[str, simpar.Result]] = {}
    twice: dict[int, float] = {}
    for seq_len in SEQ_LENS:
        degree = next((degree for degree in DEGREES if fits(seq_len, degree)), None)
        if degree is None:
            print(f"{seq_len:9,}  no degree fits")
            continue
        methods = METHODS if degree > 1 else METHODS[:1]
        found = {method: simulate(seq_len, degree, method) for method in methods}
        results[seq_len] = found
        print(row(seq_len, degree, found))
        if 2 * degree <= max(DEGREES) and degree > 1:
            wider = {method: simulate(seq_len, 2 * degree, method) for method in methods}
            twice[seq_len] = least(wider).step_time_s / least(found).step_time_s - 1
            print(row(seq_len, 2 * degree, wider))
        for method in methods:
            series[method][f"{seq_len:,}"] = found[method].tokens_per_s
    answer = verdict(results, twice)
    print(f"\n{answer}")
    write_chart(
        chart,
        series,
        title="Which context parallelism for long sequences?",
        answer=answer,
        across="tokens a sample, at the least degree that fits",
        value="tokens/s",
        form="bars",
    )
    print(f"\nchart: {chart}")


def job(seq_len: int, degree: int, method: str) -> simpar.Job:
    """A step of so many tokens with samples spread over ``degree`` GPUs."""
    cluster = simpar.Cluster.parse(CLUSTER)
    batch = max(TOKENS // seq_len, cluster.gpus // degree)
    plan = SHAPE.replace(seq_len=seq_len, cp=degree, cp_method=method, global_batch=batch)
    return simpar.Job(model=MODEL, cluster=cluster, plan=plan)


def fits(seq_len: int, degree: int) -> bool:
    """Whether there are samples for all GPUs, and memory for a sample."""
    if TOKENS // seq_len < simpar.Cluster.parse(CLUSTER).gpus // degree:
        return False
    try:
        simulate(seq_len, degree, METHODS[-1])
    except simpar.DoesNotFitError:
        return False
    return True


def simulate(seq_len: int, degree: int, method: str) -> simpar.Result:
    """The step."""
    return simpar.simulate(job(seq_len, degree, method))


def least(found: dict[str, simpar.Result]) -> simpar.Result:
    """The fastest."""
    return min(found.values(), key=lambda result: result.step_time_s)


def row(seq_len: int, degree: int, found: dict[str, simpar.Result]) -> str:
    """A line of the table; MFU and memory are those of the fastest method."""
    best = least(found)
    cells = "".join(f"{found[m].step_time_s:12.2f} s" if m in found else f"{'-':>14}" for m in METHODS)
    return f"{seq_len:9,}  {degree:4}{cells}{best.mfu:9.1%}{best.peak_memory_bytes / GIB:7.1f} GiB"


def verdict(results: dict[int, dict[str, simpar.Result]], twice: dict[int, float]) -> str:
    """Which method wins, by how much, and what a degree beyond the least costs."""
    lines = []
    compared = {seq_len: found for seq_len, found in results.items() if len(found) > 1}
    winners = {seq_len: min(found, key=lambda m: found[m].step_time_s) for seq_len, found in compared.items()}
    for method in dict.fromkeys(winners.values()):
        lengths = [f"{seq_len // 1024}k" for seq_len, winner in winners.items() if winner == method]
        spread = max(
            max(r.step_time_s for r in compared[s].values()) / compared[s][method].step_time_s - 1
            for s, winner in winners.items()
            if winner == method
        )
        lines.append(
            f"{method} is fastest at {', '.join(lengths)}; the slowest method is up to {spread:.0%} slower there."
        )
    if twice:
        worst = max(twice, key=lambda s: twice[s])
        lines.append(
            f"Spreading a sample over twice as many GPUs as it needs costs up to {twice[worst]:.0%} "
            f"(at {worst // 1024}k), so take the least degree that fits."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
