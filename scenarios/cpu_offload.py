"""What does it cost to keep optimizer states and activations on the hosts, and what does it buy?

Memory is bought with copies over PCIe (or NVLink-C2C) and with an update at the rate of the host's memory, both shared
by the GPUs of a node. Optimizer states cost the same for each step, so that larger batches hide them; activations come
and go with every token, so that only compute beside them can. Recomputation is what they compete with.

    python scenarios/cpu_offload.py [timeline.html]
"""

import sys

import simpar
from simpar import Plan

MODEL = "llama3-8b"
CLUSTERS = ("a100-sxm:8", "h100-sxm:8", "gh200:2x4")
SEQ_LEN = 8_192  # tokens a sample
BATCHES = (8, 128)  # samples a step, a few and many
BASE = Plan(zero=3, seq_len=SEQ_LEN, framework="torchtitan")
PLANS = {
    "all on the GPU": BASE,
    "full recomputation": BASE.replace(recompute="full"),
    "optimizer on the host": BASE.replace(offload="optimizer"),
    "activations on the host": BASE.replace(offload="activations"),
    "both on the host": BASE.replace(offload="both"),
}
LARGE = "llama3-70b"  # does not fit into one node otherwise
LARGE_PLANS = {
    "all on the GPU": BASE.replace(recompute="full"),
    "optimizer on the host": BASE.replace(recompute="full", offload="optimizer"),
    "both on the host": BASE.replace(recompute="full", offload="both"),
}
GIB = 2**30


def main(timeline: str = "cpu_offload.html") -> None:
    """Prints throughput and memory of every plan on every cluster, and draws the last one of a large model."""
    print(f"{MODEL}, {SEQ_LEN:,} tokens a sample, FSDP; tokens/s/GPU at {BATCHES[0]} and {BATCHES[1]} samples a step")
    for cluster in CLUSTERS:
        print(f"\n{cluster:26}{BATCHES[0]:>8}{BATCHES[1]:>8}{'exposed':>9}{'GPU GiB':>9}{'host GiB':>10}")
        for name, plan in PLANS.items():
            few, many = (run(MODEL, cluster, plan, batch) for batch in BATCHES)
            print(f"{name:26}{few.tokens_per_s_per_gpu:8,.0f}{many.tokens_per_s_per_gpu:8,.0f}{row(many)}")
    cluster = CLUSTERS[1]
    print(f"\n{LARGE} on {cluster}, {BATCHES[1]} samples a step, full recomputation")
    for name, plan in LARGE_PLANS.items():
        found = run(LARGE, cluster, plan, BATCHES[1])
        fits = "fits" if found.fits else "does not fit"
        print(f"{name:26}{'':8}{found.tokens_per_s_per_gpu:8,.0f}{row(found)}  {fits}")
    last = run(MODEL, cluster, PLANS["both on the host"], BATCHES[0])
    last.write_timeline(timeline)
    print(f"\ntimeline of {last.title}: {timeline}")


def run(model: str, cluster: str, plan: Plan, global_batch: int) -> simpar.Result:
    """The step, also where it does not fit."""
    job = simpar.Job(model=model, cluster=cluster, plan=plan.replace(global_batch=global_batch))
    return simpar.simulate(job, allow_oom=True)


def row(result: simpar.Result) -> str:
    """Share of the step in which the GPU waits for its host, and memory of both."""
    waits = result.ranks[0].exposed_s
    share = (waits.get("host", 0.0) + waits.get("cpu", 0.0)) / result.step_time_s
    return f"{share:9.1%}{result.peak_memory_bytes / GIB:9.1f}{result.host_bytes / GIB:10,.0f}"


if __name__ == "__main__":
    main(*sys.argv[1:])
