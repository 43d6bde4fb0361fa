"""Four nodes of H100 train a model, and four nodes of A100 stand idle: is it worth to let them join?

Data parallelism gives each GPU the same work, so the faster ones wait. A pipeline may give the slower ones fewer
layers. Compares the H100 alone with both kinds together, split evenly and unevenly.

    python scenarios/heterogeneous_gpus.py [chart.html]
"""

import sys
from typing import Any

import simpar
from simpar import Plan
from simpar.view.chart import write_chart

MODEL = "llama3-70b"
NODES = 4  # of 8 GPUs, of each kind; 400 Gb/s and 200 Gb/s a GPU
FAST = f"h100-sxm:{NODES}x8"
SLOW = f"a100-sxm:{NODES}x8"
TWICE = f"h100-sxm:{2 * NODES}x8"  # what would be if the others were H100 too
BOTH: dict[str, Any] = {
    "nodes": [
        {"device": "h100-sxm", "count": NODES},
        {"device": "a100-sxm", "count": NODES, "nic_gbps": 200},
    ],
    "gpus_per_node": 8,
}
LAYERS = 80
FIRST_HALF = (
    24,
    26,
    28,
    29,
    30,
    31,
    32,
)  # layers of each of the two stages on H100 that are tried; an even share is 20
PIPELINE = Plan(tp=8, pp=4, sequence_parallel=True, zero=1, global_batch=128, seq_len=4_096)
# the stages of a replica lie side by side, so that each kind holds whole replicas
REPLICAS = PIPELINE.replace(rank_order="tp-pp-dp")


def main(chart: str = "heterogeneous_gpus.html") -> None:
    """Prints a line for each cluster and split."""
    print(
        f"{MODEL}, tp {PIPELINE.tp}, pp {PIPELINE.pp}, {PIPELINE.global_batch} × {PIPELINE.seq_len:,} tokens a step\n"
    )
    results = {
        f"{NODES} H100 nodes": simulate(FAST, PIPELINE),
        f"{NODES} A100 nodes": simulate(SLOW, PIPELINE),
        "both, a replica each": simulate(BOTH, REPLICAS),
        "both, 20 layers a stage": simulate(BOTH, PIPELINE),
    }
    splits = {split: simulate(BOTH, PIPELINE.replace(layer_split=split)) for split in map(layers, FIRST_HALF)}
    best = min(splits, key=lambda split: splits[split].step_time_s)
    joined = f"both, {'/'.join(map(str, best))} layers"
    results[joined] = splits[best]
    results[f"{2 * NODES} H100 nodes"] = simulate(TWICE, PIPELINE)
    print(f"{'':30}{'step':>9}{'tokens/s':>12}{'bubble':>9}")
    for name, result in results.items():
        print(f"{name:30}{result.step_time_s:7.2f} s{result.tokens_per_s:12,.0f}{result.bubble_fraction:9.1%}")
    print("\nlayers of each stage on H100: " + ", ".join(f"{s[0]}: {r.step_time_s:.2f} s" for s, r in splits.items()))
    answer = verdict(results, joined)
    print(f"\n{answer}")
    series = {"tokens/s": {name: result.tokens_per_s for name, result in results.items()}}
    write_chart(
        chart, series, title="Let A100 join H100?", answer=answer, across="cluster", value="tokens/s", form="bars"
    )
    print(f"\nchart: {chart}")


def layers(first: int) -> tuple[int, int, int, int]:
    """Layers of each stage, where the first two have so many."""
    second = LAYERS // 2 - first
    return first, first, second, second


def simulate(cluster: Any, plan: Plan) -> simpar.Result:
    """The step."""
    return simpar.simulate(simpar.Job(model=MODEL, cluster=cluster, plan=plan))


def verdict(results: dict[str, simpar.Result], joined: str) -> str:
    """What joining gains, and how much of what is there it uses."""
    speed = {name: result.tokens_per_s for name, result in results.items()}
    fast, slow, replicas, even, *_ = speed.values()
    gain = speed[joined] / fast - 1
    return (
        f"Joined with {joined.removeprefix('both, ')}, the A100 add {gain:.0%} to the H100's throughput: "
        f"{speed[joined] / (fast + slow):.0%} of what both could do apart.\n"
        f"Split evenly, joining changes the throughput by {even / fast - 1:+.0%} (A100 as stages) or "
        f"{replicas / fast - 1:+.0%} (A100 as replicas)."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
