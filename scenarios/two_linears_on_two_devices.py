"""Does it pay to split a model of two linear layers over two devices?

The first layer lives on one device, the second on the other, as in torch's tutorial on model parallelism. With one
microbatch the devices only take turns; with several, one computes while the other does. Two sizes: the tutorial's, and
one that has something to compute. Each is predicted, replayed on the real devices, and trained with
torch.distributed.pipelining. Measured times differ from run to run. Needs torch; edit what stands in capitals.

    simpar calibrate run --out profile.json     (once, so that predictions are of this machine)
    python scenarios/two_linears_on_two_devices.py profile.json
"""

import sys

import simpar
from calibrate.check import Outcome, Row, case_of, check_cases
from calibrate.training import Perceptron, Recipe
from simpar.hardware.device import device
from simpar.hardware.profile import Profile, load_profile

MODELS = {(10, 10, 5): 20, (1024, 2048, 1024): 128}  # widths: samples a step
MICROBATCHES = (1, 4)  # of a step on two devices
LEARNING_RATE = 0.001  # of plain SGD
ROUNDS = 5  # how often prediction and training are measured in turns


def main(path: str | None = None) -> None:
    """Prints predicted and measured steps on one device and on two.

    Args:
        path: profile of this machine; without it a generic CPU is predicted.
    """
    profile = load_profile(path) if path else Profile(name="cpu", device=device("cpu"))
    outcome = train(profile)
    print("model            devices  microbatches  predicted   replayed    trained")
    ways = [(1, 1), *((2, microbatches) for microbatches in MICROBATCHES)]
    rows = list(zip(outcome.of("replay"), outcome.of("training"), strict=True))
    for number, widths in enumerate(MODELS):
        mine = rows[number * len(ways) : (number + 1) * len(ways)]
        for (devices, microbatches), (replayed, trained) in zip(ways, mine, strict=True):
            step = (replayed.predicted_s, replayed.measured_s, trained.measured_s)
            name = "-".join(map(str, widths))
            print(
                f"{name:15}  {devices:7}  {microbatches:12}  "
                + "  ".join(f"{seconds * 1e3:6.2f} ms" for seconds in step)
            )
        print(verdict([trained for _, trained in mine]) + "\n")
    print("\n".join(f"note: {note}" for note in outcome.notes))


def train(profile: Profile) -> Outcome:
    """Every model on one device and, in microbatches, on two."""
    recipes = []
    for widths, batch in MODELS.items():
        network = Perceptron(widths)
        recipes.append(Recipe(network=network, strategy="one", ranks=1, micro_batch=batch, learning_rate=LEARNING_RATE))
        recipes += [
            Recipe(
                network=network,
                strategy="gpipe",
                ranks=2,
                micro_batch=batch // microbatches,
                microbatches=microbatches,
                learning_rate=LEARNING_RATE,
            )
            for microbatches in MICROBATCHES
        ]
    return check_cases(profile, [case_of(recipe) for recipe in recipes], ranks=2, rounds=ROUNDS)


def verdict(trained: list[Row]) -> str:
    """Whether the best way on two devices beats one, predicted and measured."""
    alone, *split = trained
    predicted = alone.predicted_s / min(row.predicted_s for row in split)
    measured = alone.measured_s / min(row.measured_s for row in split)
    return f"two devices: {predicted:.2f} times as fast as one predicted, {measured:.2f} measured"


if __name__ == "__main__":
    try:
        main(*sys.argv[1:2])
    except simpar.SimparError as error:
        sys.exit(str(error))
