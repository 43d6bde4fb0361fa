"""How long does an epoch of a small perceptron take on this machine, and was it predicted?

Trains the 784-500-10 perceptron (MNIST's shape) with data parallelism: every process owns a block of the samples, takes
a batch of 64 from it in every step, and averages its gradients with the others'. The step is predicted, its program is
replayed on the real devices, and a real step with torch's DistributedDataParallel is timed. Measured times differ from
run to run. Needs torch; copy the file and edit what stands in capitals.

    simpar calibrate run --out profile.json     (once, so that predictions are of this machine)
    python scenarios/mlp_on_this_machine.py profile.json
"""

import sys
from math import ceil

import simpar
from calibrate.check import Outcome, case_of, check_cases
from calibrate.training import Perceptron, Recipe
from simpar.hardware.device import device
from simpar.hardware.profile import Profile, load_profile

LAYERS = (784, 500, 10)  # inputs, hidden units, outputs; ReLU between, mean squared error behind
SAMPLES = 60_000  # samples an epoch
BATCH = 64  # samples a process and step
LEARNING_RATE = 0.01  # of plain SGD
RANKS = 2  # processes, each with a device (or a share of the cores) of its own
ROUNDS = 5  # how often prediction and training are measured in turns


def main(path: str | None = None) -> None:
    """Prints predicted and measured step and epoch, on one process and on all.

    Args:
        path: profile of this machine; without it a generic CPU is predicted.
    """
    profile = load_profile(path) if path else Profile(name="cpu", device=device("cpu"))
    outcome = train(profile)
    print(f"{'-'.join(map(str, LAYERS))} perceptron, {SAMPLES:,} samples an epoch, {BATCH} a process and step\n")
    print("processes  steps/epoch      step      step      step     epoch     epoch")
    print("                       predicted  replayed   trained predicted   trained")
    for replayed, trained in zip(outcome.of("replay"), outcome.of("training"), strict=True):
        steps = ceil(SAMPLES / (BATCH * trained.ranks))
        step = (replayed.predicted_s, replayed.measured_s, trained.measured_s)
        epoch = (trained.predicted_s * steps, trained.measured_s * steps)
        print(
            f"{trained.ranks:9}  {steps:11,}  "
            + " ".join(f"{seconds * 1e3:6.2f} ms" for seconds in step)
            + "  "
            + " ".join(f"{seconds:7.2f} s" for seconds in epoch)
        )
    print()
    print(verdict(outcome))


def train(profile: Profile) -> Outcome:
    """One process and all of them, predicted and measured in turns."""
    network = Perceptron(LAYERS)
    recipes = [
        Recipe(
            network=network,
            strategy="one" if ranks == 1 else "dp",
            ranks=ranks,
            micro_batch=BATCH,
            learning_rate=LEARNING_RATE,
        )
        for ranks in (1, RANKS)
    ]
    return check_cases(profile, [case_of(recipe) for recipe in recipes], ranks=RANKS, rounds=ROUNDS)


def verdict(outcome: Outcome) -> str:
    """What a second process brings, and how good the prediction was."""
    alone, together = outcome.of("training")
    gain = alone.measured_s * RANKS / together.measured_s
    lines = [f"{RANKS} processes train {gain:.2f} times as fast as one."]
    lines += [f"{row.kind} on {row.ranks}: the prediction is off by {row.error:+.0%}" for row in outcome.rows]
    lines += [f"note: {note}" for note in outcome.notes]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except simpar.SimparError as error:
        sys.exit(str(error))
