"""How far does it pay to scale out the training of Llama 3 8B, by the time to a target loss?

More GPUs want larger batches. Tokens per second go on growing; but beyond the critical batch size a step of more tokens
saves ever fewer steps (McCandlish et al. 2018, arXiv:1812.06162). For each cluster the batch is chosen that reaches the
target first. Copy the file and edit what stands in capitals.

    python scenarios/critical_batch_size.py [chart.html]
"""

import sys

import simpar
from simpar import Plan
from simpar.convergence import TimeToTarget
from simpar.view.chart import write_chart

MODEL = "llama3-8b"
CLUSTERS = ("h100-sxm:8x8", "h100-sxm:32x8", "h100-sxm:128x8", "h100-sxm:512x8")
TP = 4
PRICE = 2.50  # for a GPU and hour
SEQ_LEN = 4_096  # tokens a sample
MICRO_BATCH = 1
CRITICAL_BATCH = 4e6  # tokens; a property of model, data and target that is measured, here an example
MINIMUM_STEPS = 25_000  # even with the largest batch, likewise; times the critical batch, 100 G tokens at the least
BATCHES = (64, 128, 256, 512, 1_024, 2_048)  # samples a step


def main(chart: str = "critical_batch_size.html") -> None:
    """Prints the batch sizes on one cluster, and the best one of each; draws the time to the target over the batch."""
    found = {cluster: records(cluster) for cluster in CLUSTERS}
    print(f"{MODEL} on {CLUSTERS[1]}, critical batch {CRITICAL_BATCH / 1e6:g} M tokens:\n")
    print_batches(found[CLUSTERS[1]])
    print("\nThe batch that reaches the target first, on each cluster:\n")
    print_scaling(found)
    answer = verdict(found)
    print(f"\n{answer}")
    write_chart(
        chart,
        {cluster: {f"{one.batch:,}": one.hours for one in records_} for cluster, records_ in found.items()},
        title=f"How long does {MODEL} train to its target?",
        answer=answer,
        across="batch (samples a step)",
        value="time to the target (h)",
    )
    print(f"\nchart: {chart}")


def records(cluster: str) -> tuple[TimeToTarget, ...]:
    """The time to the target with every batch that the cluster can run."""
    priced = simpar.Cluster.parse(cluster).replace(price_per_gpu_hour=PRICE)
    plan = Plan(tp=TP, sequence_parallel=True, zero=1, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH)
    return simpar.time_to_target(
        {"model": MODEL, "cluster": priced, "plan": plan},
        critical_batch_tokens=CRITICAL_BATCH,
        minimum_steps=MINIMUM_STEPS,
        batches=[batch for batch in BATCHES if batch * TP >= priced.gpus * MICRO_BATCH],
    )


def print_batches(found: tuple[TimeToTarget, ...]) -> None:
    """One line a batch size."""
    print("samples  M tokens  step      M tokens/s    steps  G tokens  hours     cost")
    for one in found:
        print(
            f"{one.batch:7,}  {one.batch_tokens / 1e6:8.2f}  {one.step_time_s:6.2f} s  {one.tokens_per_s / 1e6:10.2f}  "
            f"{one.steps:7,.0f}  {one.tokens / 1e9:8.0f}  {one.hours:5.1f}  {one.cost / 1e3:6.0f} k"
        )


def best(found: tuple[TimeToTarget, ...]) -> TimeToTarget:
    """The record of the batch that reaches the target first."""
    return min(found, key=lambda one: one.hours)


def print_scaling(found: dict[str, tuple[TimeToTarget, ...]]) -> None:
    """One line a cluster, against the smallest."""
    first = best(found[CLUSTERS[0]])
    print(" GPUs  M tokens/step  tokens/s   hours     cost  times faster: tokens/s  to the target")
    for records_ in found.values():
        one = best(records_)
        speed, sooner = one.tokens_per_s / first.tokens_per_s, first.hours / one.hours
        print(
            f"{one.gpus:5,}  {one.batch_tokens / 1e6:13.2f}  {one.tokens_per_s / 1e6:6.2f} M  {one.hours:6.1f}  "
            f"{one.cost / 1e3:5.0f} k  {speed:22.1f}  {sooner:13.1f}"
        )


def verdict(found: dict[str, tuple[TimeToTarget, ...]]) -> str:
    """What the largest cluster is worth by either measure."""
    first, last = best(found[CLUSTERS[0]]), best(found[CLUSTERS[-1]])
    speed, sooner = last.tokens_per_s / first.tokens_per_s, first.hours / last.hours
    return (
        f"{last.gpus / first.gpus:.0f} times the GPUs train {speed:.0f} times the tokens per second, but are at the "
        f"target only {sooner:.0f} times sooner, for {last.cost / first.cost:.1f} times the money."
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
