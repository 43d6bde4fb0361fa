"""How should the experts of a mixture be spread over the GPUs?

Mixtral-8x7B on 32 H100. Experts may be held by every GPU and sharded like all else (FSDP), cut like other layers
(tensor parallelism), spread over GPUs that tokens travel to (expert parallelism), or over pipeline stages. Then: what
uneven routing costs, and what expert parallelism costs once it leaves the node.

    python scenarios/mixture_of_experts.py [chart.html]
"""

import sys

import simpar
from simpar import Plan
from simpar.units import GIB
from simpar.view.chart import write_chart

MODEL = "mixtral-8x7b"
IN_NODES = "h100-sxm:4x8"  # NVLink between 8 GPUs; one 400 Gb/s NIC for each
ACROSS = "h100-sxm:32x1"  # the same GPUs one a node, so that all that experts exchange goes over NICs
SHAPE = Plan(recompute="full", global_batch=256, seq_len=4_096)
PLANS = {
    "FSDP": SHAPE.replace(zero=3),
    "TP8": SHAPE.replace(tp=8, sequence_parallel=True, zero=1),
    "TP4, EP8": SHAPE.replace(tp=4, sequence_parallel=True, ep=8, etp=1, zero=1),
    "PP4, EP2": SHAPE.replace(pp=4, ep=2, zero=1),
    "EP4, PP2": SHAPE.replace(pp=2, ep=4, zero=1),
    "EP8": SHAPE.replace(ep=8, zero=1),
}
SPREAD = PLANS["EP8"]
SKEWS = (0.0, 0.25, 0.5, 1.0)  # exponents of the power law by which tokens choose experts; 0 is balanced


def main(chart: str = "mixture_of_experts.html") -> None:
    """Prints every way to spread, then uneven routing and slower links."""
    print(f"{MODEL} on {IN_NODES}, {SHAPE.global_batch} × {SHAPE.seq_len:,} tokens a step\n")
    print(f"{'':16}{'step':>9}{'tokens/s/GPU':>14}{'MFU':>8}{'exposed':>9}{'bubble':>8}{'slowed':>8}{'memory':>11}")
    ways = {name: simulate(IN_NODES, plan) for name, plan in PLANS.items()}
    across = simulate(ACROSS, SPREAD)
    for name, result in (*ways.items(), ("EP8, no NVLink", across)):
        print(line(name, result))
    print(f"\n{'exponent of uneven routing':28}" + "".join(f"{skew:>9}" for skew in SKEWS))
    skewed = {skew: simulate(IN_NODES, SPREAD.replace(expert_skew=skew)) for skew in SKEWS}
    print(f"{'step time with EP8':28}" + "".join(f"{result.step_time_s:7.2f} s" for result in skewed.values()))
    answer = verdict(ways, across, skewed)
    print(f"\n{answer}")
    series = {
        "step": {name: result.step_time_s for name, result in ways.items()}
        | {"EP8, no NVLink": across.step_time_s}
        | {f"EP8, skew {skew}": result.step_time_s for skew, result in skewed.items() if skew}
    }
    write_chart(
        chart,
        series,
        title=f"How should the experts of {MODEL} be spread?",
        answer=answer,
        across="plan",
        value="step time (s)",
        form="bars",
    )
    print(f"\nchart: {chart}")


def simulate(cluster: str, plan: Plan) -> simpar.Result:
    """The step."""
    return simpar.simulate(simpar.Job(model=MODEL, cluster=cluster, plan=plan))


def line(name: str, result: simpar.Result) -> str:
    """A row of the table; ``slowed`` is compute that collectives beside it slow down."""
    gpus = sum(rank.replicas for rank in result.ranks)
    slowed = sum(rank.replicas * rank.interference_s for rank in result.ranks) / gpus / result.step_time_s
    return (
        f"{name:16}{result.step_time_s:7.2f} s{result.tokens_per_s_per_gpu:14,.0f}{result.mfu:8.1%}"
        f"{result.exposed_fraction:9.1%}{result.bubble_fraction:8.1%}{slowed:8.1%}"
        f"{result.peak_memory_bytes / GIB:7.1f} GiB"
    )


def verdict(ways: dict[str, simpar.Result], across: simpar.Result, skewed: dict[float, simpar.Result]) -> str:
    """The fastest way, what the network costs it, and what uneven routing does."""
    ranking = sorted(ways, key=lambda name: ways[name].step_time_s)
    best, second, *_, worst = ranking
    fastest = ways[best].step_time_s
    even, *_, steep = skewed
    return (
        f"{best} is fastest, {ways[second].step_time_s / fastest - 1:.0%} ahead of {second} and "
        f"{ways[worst].step_time_s / fastest - 1:.0%} ahead of {worst}. Without NVLink EP8 takes "
        f"{across.step_time_s / ways['EP8'].step_time_s - 1:.0%} longer.\n"
        f"With routing as uneven as an exponent of {steep:g}, all wait for the fullest expert: a step takes "
        f"{skewed[steep].step_time_s / skewed[even].step_time_s:.1f} times as long."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
