"""How should replicas agree on their parameters when the network between nodes is slow?

Trains GPT-2 XL by data parallelism on four nodes of eight A100 that only have 25 Gb/s Ethernet between them, and
compares all-reduce algorithms, parameter servers (few and many), periodic averaging and compressed gradients. Then the
network is fast but one of two nodes slow, and servers may let the other run ahead. Time is not all: asynchrony, rare
averaging and compression also change what a step teaches the model, about which nothing is said here.

    python scenarios/parameter_server_vs_all_reduce.py --html timeline.html
"""

import argparse
from typing import Any

import simpar

MODEL = "gpt2-xl"
SEQ_LEN = 1024  # tokens
MICRO_BATCH, MICROBATCHES = 4, 2  # samples, and how many of them before an update
FABRIC = {"base": "ethernet25", "nics_per_node": 1}
CLUSTER: dict[str, Any] = {"device": "a100-sxm-80gb", "nodes": 4, "fabric": FABRIC}
MIXED: dict[str, Any] = {
    "nodes": [{"device": "h100-sxm", "count": 1}, {"device": "a100-sxm-80gb", "count": 1}],
    "gpus_per_node": 4,
    "fabric": "ndr400",
}
ALL_REDUCE = ("ring", "tree", "halving_doubling", "hierarchical", "reduce_broadcast")
PLANS: dict[str, dict[str, Any]] = {
    **{f"all-reduce, {name.replace('_', ' ')}": {"collective_algorithm": name} for name in ALL_REDUCE},
    "1 server on a host": {"sync": {"servers": 1, "on": "hosts"}},
    "4 servers on hosts": {"sync": {"servers": 4, "on": "hosts"}},
    "32 servers on the workers": {"sync": {"servers": 32, "on": "workers"}},
    "average every 8 steps": {"sync_every": 8},
    "DiLoCo, every 50 steps": {"sync_every": 50, "outer_optimizer": "nesterov"},
    "gradients in fp16": {"grad_compression": "fp16"},
    "gradients in 8 bits": {"grad_compression": "int8"},
    "1 % of the gradients": {"grad_compression": "topk", "compression_ratio": 0.01},
}
SERVERS = {"servers": 8, "on": "workers"}
MODES: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "servers, synchronous": {"sync": SERVERS},
    "servers, at most 2 steps apart": {"sync": {**SERVERS, "mode": "stale_synchronous", "bound": 2, "steps": 6}},
    "servers, asynchronous": {"sync": {**SERVERS, "mode": "asynchronous", "steps": 6}},
}


def main(html: str = "parameter_server_vs_all_reduce.html") -> None:
    """Prints both comparisons and writes a timeline of workers and servers."""
    gpus = CLUSTER["nodes"] * 8
    print(
        f"{MODEL} on {gpus} A100, 25 Gb/s between nodes; {MICROBATCHES} × {MICRO_BATCH} samples of {SEQ_LEN:,} tokens"
    )
    print(f"\n{'way':32}{'step':>9}{'tokens/s':>12}{'waits':>8}{'sent a GPU':>13}")
    results = {name: run(CLUSTER, plan) for name, plan in PLANS.items()}
    for name, result in results.items():
        print(line(name, result))
    print("\nthe same on four H100 and four A100, 400 Gb/s a GPU between the two nodes")
    mixed = {name: run(MIXED, plan) for name, plan in MODES.items()}
    for name, result in mixed.items():
        print(line(name, result))
    best = min(results, key=lambda name: results[name].step_time_s)
    ring = results["all-reduce, ring"].step_time_s
    print(f"\nFastest step: {best}, {ring / results[best].step_time_s:.1f} times as fast as a ring over all GPUs.")
    shown = "servers, synchronous"
    mixed[shown].write_timeline(html)
    print(f"timeline of {shown} on two kinds of GPU: {html}")


def run(cluster: dict[str, Any], plan: dict[str, Any]) -> simpar.Result:
    """One step of data parallelism, or the mean of several."""
    usual = {"seq_len": SEQ_LEN, "micro_batch": MICRO_BATCH, "grad_accum": MICROBATCHES}
    return simpar.simulate(simpar.Job(model=MODEL, cluster=cluster, plan={**usual, **plan}), allow_oom=True)


def line(name: str, result: simpar.Result) -> str:
    """A row of the table; a GPU waits for communication and for what others do first."""
    waits = result.exposed_fraction + result.bubble_fraction
    sent = sum(result.communication_bytes.values())
    return (
        f"{name:32}{result.step_time_s * 1e3:6,.0f} ms{result.tokens_per_s:12,.0f}{waits:8.0%}{sent / 2**20:9,.0f} MiB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--html", default="parameter_server_vs_all_reduce.html", help="where the timeline goes")
    main(parser.parse_args().html)
