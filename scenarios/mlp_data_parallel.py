"""Does data parallelism on CPU ranks speed up a small perceptron, and what bounds it?

Trains the 784-500-10 perceptron (MNIST's shape) for one epoch on 1 to 8 ranks. Each rank owns a block of the samples
and takes a batch of 64 from it in every step; after the backward pass an all-reduce (gloo) averages the gradients.
Copy the file and edit what stands in capitals.

    python scenarios/mlp_data_parallel.py
"""

from itertools import pairwise
from math import ceil

import simpar

LAYERS = "784-500-10"  # inputs, hidden units, outputs; ReLU between, mean squared error behind
SAMPLES = 60_000  # samples an epoch
BATCH = 64  # samples a rank and step
LEARNING_RATE = 0.01  # of plain SGD; it takes part in the arithmetic, but not in its time
RANKS = (1, 2, 4, 8)
DEVICE = "cpu"  # a generic one; 'simpar clusters' lists what else there is

PARTS = {  # column of the table: what it means
    "compute": "the arithmetic of forward and backward",
    "update": "the update of the parameters",
    "launch": "the launch of kernels",
    "all-reduce": "the all-reduce of the gradients",
}


def main() -> None:
    """Prints one line for each number of ranks, and what bounds the largest."""
    model = simpar.mlp(LAYERS, loss="mse")
    gradients = model.trainable_parameters * 4  # bytes; fp32
    print(
        f"{LAYERS} perceptron, {model.parameters:,} parameters; {SAMPLES:,} samples an epoch, {BATCH} a rank and step"
    )
    print(f"SGD with learning rate {LEARNING_RATE}; {gradients / 1e6:.2f} MB of gradients a step; device '{DEVICE}'\n")
    print("ranks  samples/rank  steps/epoch  time/step  time/epoch  speed-up" + "".join(f"{p:>12}" for p in PARTS))
    results = {ranks: train(model, ranks) for ranks in RANKS}
    alone = None
    for ranks, result in results.items():
        block = blocks(SAMPLES, ranks)[0]
        steps = ceil(len(block) / BATCH)  # the last batch of an epoch may be smaller; it counts as a whole one
        epoch_s = steps * result.step_time_s
        alone = alone or epoch_s
        shares = "".join(f"{spent / result.step_time_s:12.1%}" for spent in seconds(result).values())
        print(
            f"{ranks:5}  {len(block):12,}  {steps:11,}  {result.step_time_s * 1e3:6.2f} ms  "
            f"{epoch_s * 1e3:7,.0f} ms  {alone / epoch_s:7.2f}x{shares}"
        )
    print(f"\n{verdict(results)}")
    device = results[RANKS[-1]].job.cluster.device
    if device.fit_from is not None:
        print(f"Caution: '{DEVICE}' is not calibrated ({device.fit_from}); trust the proportions more than the times.")
    print(f"torch: {compare_with_torch(model)}.")


def blocks(samples: int, ranks: int) -> list[range]:
    """Contiguous samples of each rank; where they do not divide, the first ranks get one more."""
    bounds = [rank * (samples // ranks) + min(rank, samples % ranks) for rank in range(ranks + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def train(model: simpar.ModuleModel, ranks: int) -> simpar.Result:
    """One step of plain data parallelism; all ranks are processes of one machine."""
    plan = simpar.Plan(dp=ranks, micro_batch=BATCH, precision="fp32", optimizer="sgd")
    return simpar.simulate(simpar.Job(model=model, cluster=f"{DEVICE}:1x{ranks}", plan=plan))


def seconds(result: simpar.Result) -> dict[str, float]:
    """The step of a rank, by part; all ranks are alike."""
    rank = result.ranks[0]
    spent = (sum(rank.compute_s.values()), rank.optimizer_s, rank.host_wait_s, rank.exposed_s.get("dp", 0.0))
    return dict(zip(PARTS, spent, strict=True))


def verdict(results: dict[int, simpar.Result]) -> str:
    """What takes most of a step on one rank and on many, and how far more ranks can help."""
    few, many = RANKS[0], RANKS[-1]
    first, last = seconds(results[few]), seconds(results[many])
    lines = []
    for ranks, parts in ((few, first), (many, last)):
        bound = max(parts, key=lambda part: parts[part])
        share = parts[bound] / results[ranks].step_time_s
        lines.append(f"On {ranks} rank{'s' * (ranks > 1)} {PARTS[bound]} bounds the step: {share:.0%} of it.")
    useful = first["compute"] + first["update"]
    lines.append(
        f"A step computes for {useful * 1e3:.2f} ms on any number of ranks, but the all-reduce grows from "
        f"{seconds(results[RANKS[1]])['all-reduce'] * 1e3:.2f} ms on {RANKS[1]} ranks to "
        f"{last['all-reduce'] * 1e3:.2f} ms on {many}."
    )
    return "\n".join(lines)


def compare_with_torch(model: simpar.ModuleModel) -> str:
    """Whether tracing the same network in torch gives the same kernels; torch is not needed for anything else."""
    try:
        import torch  # noqa: PLC0415 - optional
    except ImportError:
        return "not installed, so the kernels of the same torch module were not compared"
    widths = [int(width) for width in LAYERS.split("-")]
    layers: list[torch.nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [torch.nn.Linear(inner, outer), torch.nn.ReLU()]
    module = torch.nn.Sequential(*layers[:-1])
    inputs, target = torch.zeros(BATCH, widths[0]), torch.zeros(BATCH, widths[-1])
    traced = simpar.trace_module(module, inputs, loss=torch.nn.functional.mse_loss, target=target)
    kernels = [kernel for layer in traced.layers for kernel in (*layer.forward(BATCH), *layer.backward(BATCH))]
    written = [kernel for layer in model.layers for kernel in (*layer.forward(BATCH), *layer.backward(BATCH))]
    return f"tracing the same torch module finds {'the same' if kernels == written else 'other'} {len(kernels)} kernels"


if __name__ == "__main__":
    main()
