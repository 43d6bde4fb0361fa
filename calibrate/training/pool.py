"""Processes that train: started once, given orders round by round, and ended whatever happens."""

import pickle
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from calibrate.training.recipe import Recipe, TrainingError
from calibrate.training.worker import Order, serve

_GRACE_S = 1.0  # after the first failure, others get so long to report theirs: one may be the cause of the rest


@dataclass(frozen=True, slots=True)
class Trained:
    """What a round of training steps gave.

    Attributes:
        step_s: seconds of each timed step, from the common start to the end of the last rank.
        losses: mean loss over the replicas of each step, the untimed first ones included.
    """

    step_s: tuple[float, ...]
    losses: tuple[float, ...]


class Trainers:
    """``size`` processes that train on this machine; use it as a context manager. After a failure they are gone.

    Args:
        size: processes; recipes take all of them, or one.
        timeout_s: seconds that an order may take.
    """

    def __init__(self, size: int, *, timeout_s: float = 300.0) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self.folder = tempfile.mkdtemp(prefix="simpar-training-")
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = get_context("spawn")
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, size, str(Path(self.folder) / "store"), timeout_s)
                process = context.Process(target=serve, args=arguments, daemon=True, name=f"training rank {rank}")
                process.start()
                theirs.close()  # so that the end of the process ends the connection
                self._connections.append(ours)
                self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait_s=0.0 if error is not None else 5.0)

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Ids of the processes that are alive."""
        return tuple(p.pid for p in self._processes if p.is_alive() and p.pid is not None)

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
        if not self._processes:
            raise TrainingError("these processes were ended; start new ones")
        message = pickle.dumps(Order(recipe=recipe, steps=steps, warmup=warmup))
        try:
            for connection in self._connections:
                with suppress(OSError):  # its end is found below
                    connection.send_bytes(message)
            answers = self._collect(time.monotonic() + self._timeout_s)
        except BaseException:
            self.close(wait_s=0.0)
            raise
        times = zip(*(answer[1] for answer in answers), strict=True)
        losses = zip(*(answer[2] for answer in answers if answer[2] and answer[2][0] is not None), strict=True)
        return Trained(tuple(max(step) * 1e-9 for step in times), tuple(sum(step) / len(step) for step in losses))

    def close(self, *, wait_s: float = 5.0) -> None:
        """Ends all processes: asks them if there is time, and kills those that do not listen."""
        if wait_s:
            for connection in self._connections:
                with suppress(OSError):
                    connection.send_bytes(b"")
            deadline = time.monotonic() + wait_s
            for process in self._processes:
                process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        shutil.rmtree(self.folder, ignore_errors=True)

    def _collect(self, deadline: float) -> list[tuple[Any, ...]]:
        """Waits for every rank's answer; the first failure ends the wait."""
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, tuple[Any, ...]] = {}
        failures: list[tuple[int, str]] = []  # how well it explains the others (0 best), and the sentence
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                break
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                raise TrainingError(
                    f"ranks {late} did not finish training within {self._timeout_s:g} s; take fewer steps, a smaller "
                    "network, or raise timeout_s"
                )
            for connection in ready:
                rank = waiting.pop(connection)
                answers[rank] = self._answer(rank)
                if answers[rank][0] != "done":
                    failures.append(_sentence(rank, answers[rank]))
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:
            raise TrainingError(min(failures)[1])
        return [answers[rank] for rank in sorted(answers)]

    def _answer(self, rank: int) -> tuple[Any, ...]:
        try:
            answer: tuple[Any, ...] = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(_GRACE_S)
            return ("died", self._processes[rank].exitcode)
        return answer


def _sentence(rank: int, answer: tuple[Any, ...]) -> tuple[int, str]:
    match answer:
        case ("died", code):
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            return 0, (
                f"the process of rank {rank} {how} during training; look at its output for the reason (memory may have "
                "run out; a script that trains needs its calls under `if __name__ == '__main__':`)"
            )
        case (_, text, True):
            return 1, str(text)
        case _:
            return 2, f"rank {rank} failed to train: {answer[1]}"
