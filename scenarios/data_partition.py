"""Does it matter who gets which samples when they differ in length?

Fine-tunes Llama-3.1-8B on 8 H100 with dialogues of 16 to 4,096 tokens. A data set is often a row of sources, one after
the other, or sorted by length; if each rank then takes a block of it, some get the long samples and all others wait for
them in every step. Dealing samples out one by one (round-robin, ``ring``) evens that out, whatever the order. Packing
samples of a like length into one microbatch also saves padding.

    python scenarios/data_partition.py --html timeline.html
"""

import argparse
from typing import Any

import simpar
from simpar.plan.samples import Data, step_samples

MODEL = "llama3.1-8b"
GPUS = 8
CLUSTER = f"h100-sxm:1x{GPUS}"
SAMPLES, MEAN, SPREAD, SHORTEST, LONGEST = 4_096, 700.0, 0.9, 16, 4_096  # lognormal; tokens
SEED = 1
MICRO_BATCH, MICROBATCHES = 4, 4
MULTIPLE = 64  # tokens that microbatches are padded to
STEPS = (0, 15, 31)  # of the 32 of an epoch


def main(html: str = "data_partition.html") -> None:
    """Prints a line for each order and partition, and writes the timeline of the worst."""
    print(f"{MODEL} on {CLUSTER}; {SAMPLES:,} samples of {SHORTEST} to {LONGEST:,} tokens, seed {SEED}")
    print(f"{MICROBATCHES} × {MICRO_BATCH} samples a GPU and step; steps {', '.join(map(str, STEPS))} of an epoch\n")
    print(f"{'order':8}{'partition':11}{'step':>6}{'time':>10}{'tokens/s':>10}{'fullest':>9}{'padding':>9}{'waits':>8}")
    results = {
        (order, partition, step): run(order, partition, step)
        for order in ("random", "sorted")
        for partition in ("block", "ring")
        for step in STEPS
    }
    for (order, partition, step), result in results.items():
        samples = result.layout.samples
        assert samples is not None, "the plan has a data set"
        print(
            f"{order:8}{partition:11}{step:6}{result.step_time_s * 1e3:7,.0f} ms{result.tokens_per_s:10,.0f}"
            f"{samples.imbalance:+9.0%}{samples.padding:9.0%}{result.bubble_fraction:8.0%}"
        )
    print(f"\n{verdict()}")
    worst = max(results, key=lambda key: results[key].bubble_fraction)
    results[worst].write_timeline(html)
    print(f"timeline of {worst[0]} samples by {worst[1]}, step {worst[2]}: {html}")


def data(order: str, partition: str, step: int) -> dict[str, Any]:
    """The data set and who gets what of it."""
    lengths = {
        "distribution": "lognormal",
        "samples": SAMPLES,
        "mean": MEAN,
        "spread": SPREAD,
        "shortest": SHORTEST,
        "longest": LONGEST,
        "seed": SEED,
        "order": order,
    }
    return {"lengths": lengths, "partition": partition, "multiple": MULTIPLE, "step": step}


def run(order: str, partition: str, step: int) -> simpar.Result:
    """One step of the epoch."""
    plan: dict[str, Any] = {
        "zero": 3,
        "micro_batch": MICRO_BATCH,
        "grad_accum": MICROBATCHES,
        "recompute": "full",
        "seq_len": LONGEST,
        "data": data(order, partition, step),
    }
    return simpar.simulate(simpar.Job(model=MODEL, cluster=CLUSTER, plan=plan), allow_oom=True)


def verdict() -> str:
    """How many tokens the fullest rank of each step has in all over an epoch: that is what everybody waits for."""
    lines = []
    for order in ("random", "sorted"):
        paces = {partition: pace(order, partition) for partition in ("block", "ring")}
        change = paces["ring"] / paces["block"] - 1
        lines.append(
            f"{order} order: over an epoch the fullest ranks have {paces['block'] / 1e3:,.0f} thousand tokens by blocks"
            f", {paces['ring'] / 1e3:,.0f} thousand round-robin ({change:+.0%})."
        )
    return "\n".join(lines)


def pace(order: str, partition: str) -> int:
    """Tokens of the fullest rank, padding included, added up over the steps of an epoch."""
    steps = SAMPLES // (GPUS * MICRO_BATCH * MICROBATCHES)
    found = (
        step_samples(Data(**data(order, partition, step)), dp=GPUS, micro_batch=MICRO_BATCH, microbatches=MICROBATCHES)
        for step in range(steps)
    )
    return sum(max(samples.loads) for samples in found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--html", default="data_partition.html", help="where the timeline goes")
    main(parser.parse_args().html)
