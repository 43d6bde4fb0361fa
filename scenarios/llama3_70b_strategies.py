"""Which strategy trains Llama-3-70B fastest on 512 H100?

Simulates one step for each plan that teams use for this model, compares them, says why the fastest one wins, and
writes its timeline. Copy the file and edit what stands in capitals.

    python scenarios/llama3_70b_strategies.py [timeline.html]
"""

import sys

import simpar
from simpar import Plan

MODEL = "llama3-70b"
CLUSTER = "h100-sxm:64x8"  # 64 nodes of 8 GPUs with NVLink; one 400 Gb/s NIC for each GPU
GLOBAL_BATCH = 1_024  # samples a step
SEQ_LEN = 8_192  # tokens a sample
ROOMY = 0.90  # share of the memory above which allocators fragment

PLANS = {
    "FSDP": Plan(zero=3, micro_batch=2),
    "FSDP, recompute": Plan(zero=3, micro_batch=2, recompute="full"),
    "HSDP 64, recompute": Plan(zero=3, dp_shard=64, micro_batch=2, recompute="full"),
    "TP8 PP2": Plan(tp=8, pp=2, sequence_parallel=True, zero=1),
    "TP8 PP4, no SP": Plan(tp=8, pp=4, zero=1),
    "TP8 PP4": Plan(tp=8, pp=4, sequence_parallel=True, zero=1),
    "TP8 PP4, recompute": Plan(tp=8, pp=4, sequence_parallel=True, zero=1, recompute="full"),
    "TP8 PP4 interleaved": Plan(tp=8, pp=4, sequence_parallel=True, zero=1, schedule="interleaved", vpp=5),
    "TP4 PP4 interleaved": Plan(tp=4, pp=4, sequence_parallel=True, zero=1, schedule="interleaved", vpp=5),
    "TP4 PP8": Plan(tp=4, pp=8, sequence_parallel=True, zero=1),
    "TP4 PP8 interleaved": Plan(tp=4, pp=8, sequence_parallel=True, zero=1, schedule="interleaved", vpp=5),
}

PARTS = {  # column of the second table: what it means
    "compute": "compute",
    "recompute": "recomputation",
    "slowdown": "compute slowed by the collectives beside it",
    "TP": "exposed tensor-parallel communication",
    "DP": "exposed data-parallel communication",
    "PP": "waiting for messages between stages",
    "bubble": "pipeline bubble",
    "other": "optimizer and waiting for the host",
}


def main(timeline: str = "llama3_70b_strategies.html") -> None:
    """Compares all plans and writes the timeline of the fastest."""
    cluster = simpar.Cluster.parse(CLUSTER)
    print(f"{MODEL} on {cluster.gpus} {cluster.device.name}, {GLOBAL_BATCH:,} samples of {SEQ_LEN:,} tokens a step\n")
    results = compare(cluster)
    if not results:
        return
    print("\nWhere the step goes, in seconds on the mean GPU:\n")
    print_parts(results)
    print(f"\n{verdict(results)}")
    fastest = min(results.values(), key=lambda result: result.step_time_s)
    fastest.write_timeline(timeline)
    print(f"\ntimeline of the fastest: {timeline}")


def compare(cluster: simpar.Cluster) -> dict[str, simpar.Result]:
    """Simulates and prints every plan; returns those that fit."""
    width = max(map(len, PLANS))
    print(f"{'plan':{width}}  {'step':>7}  tokens/s/GPU  {'MFU':>6}  bubble  exposed  {'memory':>8}")
    results = {}
    for name, parallelism in PLANS.items():
        plan = parallelism.replace(global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN)
        try:
            result = simpar.simulate(simpar.Job(model=MODEL, cluster=cluster, plan=plan))
        except simpar.DoesNotFitError as error:
            print(f"{name:{width}}  does not fit: {str(error).partition(';')[0]}")
            continue
        results[name] = result
        parts = seconds(result)
        exposed = (parts["TP"] + parts["DP"] + parts["PP"]) / result.step_time_s
        print(
            f"{name:{width}}  {result.step_time_s:5.2f} s  {result.tokens_per_s_per_gpu:12,.0f}  {result.mfu:6.1%}  "
            f"{result.bubble_fraction:6.1%}  {exposed:7.1%}  {result.peak_memory_bytes / 2**30:4.1f} GiB"
        )
    return results


def seconds(result: simpar.Result) -> dict[str, float]:
    """The step of the mean GPU, by part.

    Recomputation is not told apart from other compute by the breakdown; it gets its share of the FLOP.
    """
    total = dict.fromkeys(PARTS, 0.0)
    gpus = sum(rank.replicas for rank in result.ranks)
    recomputed = result.recomputed_flop / (result.model_flop + result.recomputed_flop)
    for rank in result.ranks:
        weight = rank.replicas / gpus
        compute = sum(rank.compute_s.values())
        total["compute"] += weight * compute * (1 - recomputed)
        total["recompute"] += weight * compute * recomputed
        total["slowdown"] += weight * rank.interference_s  # collectives take SMs and memory bandwidth
        total["bubble"] += weight * rank.bubble_s
        total["other"] += weight * (rank.optimizer_s + rank.host_wait_s)
        for stream, exposed in rank.exposed_s.items():
            total[stream.upper()] += weight * exposed
    return total


def print_parts(results: dict[str, simpar.Result]) -> None:
    """One line a plan, fastest first."""
    width = max(map(len, results))
    print(f"{'plan':{width}}  " + "  ".join(f"{part:>9}" for part in PARTS))
    for name, result in sorted(results.items(), key=lambda item: item[1].step_time_s):
        print(f"{name:{width}}  " + "  ".join(f"{spent:9.2f}" for spent in seconds(result).values()))


def verdict(results: dict[str, simpar.Result]) -> str:
    """Which plan wins, over whom and by what; and which one wins without filling the memory."""
    ranking = sorted(results, key=lambda name: results[name].step_time_s)
    best = results[ranking[0]]
    lines = [f"{ranking[0]} wins with {best.step_time_s:.2f} s a step."]
    if len(ranking) > 1:
        lines += [f"{name} {loss(results[name], best)}." for name in dict.fromkeys((ranking[1], ranking[-1]))]
    capacity = best.job.cluster.device.memory_bytes
    if best.peak_memory_bytes > ROOMY * capacity:
        roomy = (name for name in ranking if results[name].peak_memory_bytes <= ROOMY * capacity)
        lines += [
            f"{ranking[0]} fills {best.peak_memory_bytes / capacity:.0%} of the memory, so it may run out in practice.",
            f"The fastest plan below {ROOMY:.0%} is {next(roomy, 'not among these')}.",
        ]
    return "\n".join(lines)


def loss(result: simpar.Result, best: simpar.Result) -> str:
    """By how much a plan is slower, and the part in which it loses most."""
    other, mine = seconds(result), seconds(best)
    part = max(PARTS, key=lambda name: other[name] - mine[name])
    slower = result.step_time_s / best.step_time_s - 1
    return f"is {slower:.0%} slower, mostly by {other[part] - mine[part]:.2f} s more {PARTS[part]}"


if __name__ == "__main__":
    main(*sys.argv[1:])
