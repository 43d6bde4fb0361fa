"""Is 800G worth it, and what does an oversubscribed spine cost?

Sweeps the rate of the NICs and the oversubscription between the leaf switches of a pod and the spine, for two models on
512 GPUs. What decides is how much of the traffic compute hides, and what else it must pass: eight NICs of 400G carry
about as much as an H100 passes on through NVLink, so that a ring over faster ones waits for NVLink; a B200 passes on
more. Rings cross the spine once a pod, while the all-to-alls of experts send most of their bytes through it.

    python scenarios/network_speed.py [chart.html]
"""

import sys

import simpar
from simpar import Plan
from simpar.view.chart import write_chart

NODES = 64  # of 8 GPUs, one NIC for each GPU, rail-optimised
POD_NODES = 4  # nodes below one group of leaf switches
NETWORKS = ((200, 1), (400, 1), (800, 1), (400, 2), (400, 4))  # Gb/s of a NIC; bandwidth below a leaf over that above
USUAL = (400, 1)  # what others are compared with
FASTER, BLOCKED = (800, 1), (400, 4)  # what the verdict compares
GLOBAL_BATCH = 512  # samples a step: one for each GPU with FSDP
WORTH = 0.05  # a gain below this is not worth the switches

FSDP = Plan(zero=3, recompute="full", seq_len=4_096)
THIN = FSDP.replace(seq_len=1_024)  # so few tokens that compute cannot hide the gathers
PIPELINED = Plan(tp=8, pp=4, sequence_parallel=True, zero=1, schedule="interleaved", vpp=5, seq_len=4_096)
EXPERTS = Plan(ep=64, zero=1, recompute="full", seq_len=4_096)  # experts of a layer on 8 nodes, that is, two pods
DENSE, MIXTURE = "llama3-70b", "qwen2-57b-a14b"
CASES = {  # name: model, device, plan
    "H100 FSDP": (DENSE, "h100-sxm", FSDP),
    "H100 FSDP, 1,024 tokens": (DENSE, "h100-sxm", THIN),
    "H100 TP8 PP4 DP16": (DENSE, "h100-sxm", PIPELINED),
    "H100 MoE EP64": (MIXTURE, "h100-sxm", EXPERTS),
    "B200 FSDP": (DENSE, "b200-sxm", FSDP),
}

Grid = dict[tuple[int, int], float]


def main(chart: str = "network_speed.html") -> None:
    """Prints the step time of every plan on every network."""
    print(f"{DENSE} and {MIXTURE} (MoE), {NODES * 8} GPUs in pods of {POD_NODES * 8}, {GLOBAL_BATCH} samples a step\n")
    grids = {name: measure(*case) for name, case in CASES.items()}
    print(f"{'step time':26}" + "".join(f"{f'{rate}G {over}:1':>12}" for rate, over in NETWORKS))
    for name, grid in grids.items():
        print(f"{name:26}" + "".join(f"{grid[network]:10.2f} s" for network in NETWORKS))
    answer = "\n".join(verdict(name, grid) for name, grid in grids.items())
    print(f"\n{answer}")
    series = {
        name: {f"{rate}G {over}:1": grid[USUAL] / grid[rate, over] for rate, over in NETWORKS}
        for name, grid in grids.items()
    }
    write_chart(
        chart,
        series,
        title="Is 800G worth it, and what does oversubscription cost?",
        answer=answer,
        across="NIC rate and oversubscription",
        value=f"speed relative to {USUAL[0]}G {USUAL[1]}:1",
        form="bars",
    )
    print(f"\nchart: {chart}")


def measure(model: str, device: str, plan: Plan) -> Grid:
    """Seconds of a step by NIC rate and oversubscription."""
    return {
        (rate, over): simpar.simulate(
            simpar.Job(
                model=model,
                cluster={
                    "base": f"{device}:{NODES}x8",
                    "fabric": {"pod_nodes": POD_NODES, "nic_gbps": rate, "oversubscription": over},
                },
                plan=plan.replace(global_batch=GLOBAL_BATCH),
            )
        ).step_time_s
        for rate, over in NETWORKS
    }


def verdict(name: str, grid: Grid) -> str:
    """What the fastest NIC gains over the usual one, and the worst spine loses."""
    gain, loss = grid[USUAL] / grid[FASTER] - 1, grid[BLOCKED] / grid[USUAL] - 1
    return (
        f"{name}: {FASTER[0]}G instead of {USUAL[0]}G makes a step {gain:.0%} faster, "
        f"{'worth a look' if gain > WORTH else 'not worth it'}; {BLOCKED[1]}:1 to the spine makes it {loss:.0%} slower."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
