"""Processes that train: started once, given orders round by round, and ended whatever happens."""

import pickle
from dataclasses import dataclass
from typing import Any

from calibrate.processes import LateError, Processes, how_it_died
from calibrate.training.recipe import Recipe, TrainingError
from calibrate.training.worker import Order, serve


@dataclass(frozen=True, slots=True)
class Trained:
    """What a round of training steps gave.

    Attributes:
        step_s: seconds of each timed step, from the common start to the end of the last rank.
        losses: mean loss over the replicas of each step, the untimed first ones included.
    """

    step_s: tuple[float, ...]
    losses: tuple[float, ...]


class Trainers(Processes):
    """``size`` processes that train on this machine; use it as a context manager. After a failure they are gone.

    Args:
        size: processes; recipes take all of them, or one.
        timeout_s: seconds that an order may take.
    """

    def __init__(self, size: int, *, timeout_s: float = 300.0) -> None:
        super().__init__(serve, size, purpose="training", timeout_s=timeout_s)

    def run(self, recipe: Recipe, *, steps: int = 3, warmup: int = 2) -> Trained:
        """Trains for a round.

        Args:
            recipe: what to train; the network of the last call goes on if it is the same.
            steps: timed steps.
            warmup: untimed steps of a network that is new.

        Raises:
            TrainingError: it cannot run here, or a process failed; all of them are ended.
        """
        if steps < 1 or warmup < 0:
            raise TrainingError(f"{steps} steps after {warmup} untimed ones measure nothing; take at least one step")
        if recipe.ranks not in (1, self.size):
            raise TrainingError(
                f"a recipe of {recipe.ranks} ranks needs as many processes, but there are {self.size}; start "
                f"Trainers({recipe.ranks})"
            )
        if self.ended:
            raise TrainingError("these processes were ended; start new ones")
        message = pickle.dumps(Order(recipe=recipe, steps=steps, warmup=warmup))
        try:
            found = self.ask(message, success="done")
            failures = [_sentence(rank, answer) for rank, answer in found.items() if answer[0] != "done"]
            if failures:
                raise TrainingError(min(failures)[1])
        except LateError as late:
            self.close(wait_s=0.0)
            raise TrainingError(
                f"ranks {', '.join(map(str, late.ranks))} did not finish training within {self.timeout_s:g} s; take "
                "fewer steps, a smaller network, or raise timeout_s"
            ) from None
        except BaseException:
            self.close(wait_s=0.0)
            raise
        answers = [found[rank] for rank in sorted(found)]
        times = zip(*(answer[1] for answer in answers), strict=True)
        losses = zip(*(answer[2] for answer in answers if answer[2] and answer[2][0] is not None), strict=True)
        return Trained(tuple(max(step) * 1e-9 for step in times), tuple(sum(step) / len(step) for step in losses))


def _sentence(rank: int, answer: tuple[Any, ...]) -> tuple[int, str]:
    """How well a failure explains the others (0 best), and its sentence."""
    match answer:
        case ("died", code):
            return 0, (
                f"the process of rank {rank} {how_it_died(code)} during training; look at its output for the "
                "reason (memory may have run out; a script that trains needs its calls "
                "under `if __name__ == '__main__':`)"
            )
        case (_, text, True):
            return 1, str(text)
        case _:
            return 2, f"rank {rank} failed to train: {answer[1]}"
