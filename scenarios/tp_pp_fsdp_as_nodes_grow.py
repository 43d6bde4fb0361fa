"""TP, PP or FSDP: which one still uses the GPUs as nodes are added to the same batch?

Trains Llama-3-70B on ever more nodes of 8 H100 with the global batch held fixed. Each strategy alone takes up all the
added nodes: tensor parallelism spreads each layer over them, pipelining adds stages of one node, FSDP shards over all
GPUs. Beside them a mix that keeps each of the three where it is cheap.

    python scenarios/tp_pp_fsdp_as_nodes_grow.py [chart.html]
"""

import sys

import simpar
from simpar import Plan
from simpar.view.chart import write_chart

MODEL = "llama3-70b"
NODES = (2, 4, 8, 16, 32)  # of 8 H100 with NVLink; one 400 Gb/s NIC for each GPU
GPUS_PER_NODE = 8
GLOBAL_BATCH = 128  # samples a step, about one million tokens
SEQ_LEN = 8_192  # tokens a sample
HEADS = 64  # of the model: tensor parallelism cannot split further
MIX_STAGES = 4  # pipeline stages of the mix
MOST_STAGES = 16  # of five layers each

STRATEGIES = ("TP", "TP8 + PP", "FSDP", "TP8 + PP4 + DP")


def plan(strategy: str, nodes: int) -> Plan | None:
    """The plan that uses all GPUs of so many nodes; None where the strategy cannot."""
    gpus = nodes * GPUS_PER_NODE
    if strategy == "TP":
        return Plan(tp=gpus, sequence_parallel=True) if gpus <= HEADS else None
    if strategy == "TP8 + PP":
        return Plan(tp=8, pp=nodes, sequence_parallel=True) if nodes <= MOST_STAGES else None
    if strategy == "FSDP":
        return Plan(zero=3) if gpus <= GLOBAL_BATCH else None
    if nodes < MIX_STAGES:
        return None
    return Plan(tp=8, pp=MIX_STAGES, sequence_parallel=True, zero=1, schedule="interleaved", vpp=5)


def fastest(strategy: str, nodes: int) -> simpar.Result | None:
    """Without recomputation where that fits, else with it; None if neither does."""
    bare = plan(strategy, nodes)
    if bare is None:
        return None
    for recompute in ("none", "full"):
        job = simpar.Job(
            model=MODEL,
            cluster=f"h100-sxm:{nodes}x{GPUS_PER_NODE}",
            plan=bare.replace(recompute=recompute, global_batch=GLOBAL_BATCH, seq_len=SEQ_LEN),
        )
        result = simpar.simulate(job, allow_oom=True)
        if result.fits:
            return result
    return None


def main(chart: str = "tp_pp_fsdp_as_nodes_grow.html") -> None:
    """Compares the strategies on every number of nodes."""
    print(f"{MODEL}, {GLOBAL_BATCH} samples of {SEQ_LEN:,} tokens a step; tokens/s/GPU (time of a step)\n")
    print("nodes  GPUs" + "".join(f"{strategy:>22}" for strategy in STRATEGIES))
    results: dict[str, dict[int, simpar.Result | None]] = {strategy: {} for strategy in STRATEGIES}
    for nodes in NODES:
        for strategy in STRATEGIES:
            results[strategy][nodes] = fastest(strategy, nodes)
        row = "".join(f"{cell(results[strategy][nodes]):>22}" for strategy in STRATEGIES)
        print(f"{nodes:5}  {nodes * GPUS_PER_NODE:4}{row}".rstrip())
    print("\n*: with full recomputation, as it does not fit without; -: does not fit, or nothing is left to split")
    answer = verdict(results)
    print(f"\n{answer}")
    series = {
        strategy: {str(nodes): None if result is None else result.tokens_per_s_per_gpu for nodes, result in row.items()}
        for strategy, row in results.items()
    }
    write_chart(
        chart, series, title="TP, PP or FSDP as nodes grow?", answer=answer, across="nodes", value="tokens/s/GPU"
    )
    print(f"\nchart: {chart}")


def cell(result: simpar.Result | None) -> str:
    """Throughput and time of a step."""
    if result is None:
        return "-"
    mark = "*" if result.job.plan.recompute == "full" else " "
    return f"{result.tokens_per_s_per_gpu:,.0f} ({result.step_time_s:.2f} s){mark}"


def verdict(results: dict[str, dict[int, simpar.Result | None]]) -> str:
    """What each loses from its first to its last number of nodes, and which one is the fastest at each end."""
    lines = []
    for strategy, row in results.items():
        ran = {nodes: result for nodes, result in row.items() if result is not None}
        if not ran:
            lines.append(f"{strategy} fits nowhere.")
            continue
        first, last = min(ran), max(ran)
        kept = ran[last].tokens_per_s_per_gpu / ran[first].tokens_per_s_per_gpu
        lost = {"bubble": ran[last].bubble_fraction, "communication": ran[last].exposed_fraction}
        most = max(lost, key=lambda part: lost[part])
        lines.append(
            f"{strategy} keeps {kept:.0%} of its throughput a GPU from {first} to {last} nodes; there it loses "
            f"{lost[most]:.1%} of the step to {most}."
        )
    winners: dict[str, list[str]] = {}
    for nodes in NODES:
        here = {name: result.step_time_s for name, row in results.items() if (result := row[nodes])}
        if here:
            winners.setdefault(min(here, key=lambda name: here[name]), []).append(str(nodes))
    best = "; ".join(f"{name} on {', '.join(nodes)} nodes" for name, nodes in winners.items())
    return "\n".join([*lines, f"Fastest: {best}."])


if __name__ == "__main__":
    main(*sys.argv[1:])
