"""Processes for a replay on this machine: started once, given programs, and ended whatever happens."""

import pickle
from collections.abc import Mapping
from typing import Any

from calibrate.processes import LateError, Processes, how_it_died
from calibrate.replay.steps import ReplayError
from calibrate.replay.worker import Job, serve
from simpar.trace.trace import IntColumn


class Workers(Processes):
    """``size`` processes that replay programs of up to so many ranks; use it as a context manager.

    Starting Python and torch takes seconds, so keep the workers for several programs. After a failure they are gone.

    Args:
        size: processes.
        timeout_s: seconds that a program may take, all its repeats together.

    Attributes:
        folder: where the processes find each other; removed when they are ended.
    """

    def __init__(self, size: int, *, timeout_s: float = 300.0) -> None:
        super().__init__(serve, size, purpose="replay", timeout_s=timeout_s)

    def run(self, job: Job) -> dict[int, IntColumn]:
        """Replays a job.

        Returns:
            Per rank what :func:`calibrate.replay.worker.execute` returns.

        Raises:
            ReplayError: a process failed, died or took too long; all of them are ended.
        """
        ranks = len(job.program.ranks)
        if ranks > self.size:
            raise ReplayError(
                f"the program has {ranks} ranks, but only {self.size} processes were started; start Workers({ranks})"
            )
        if self.ended:
            raise ReplayError("these workers were ended; start new ones")
        try:
            message = pickle.dumps(job)
        except Exception as error:
            raise ReplayError(
                f"the adapter {job.adapter!r} cannot be handed to another process ({error}); define it at the top of a "
                "module"
            ) from error
        try:
            answers = self.ask(message, success="times")
            failures = {rank: _sentence(rank, answer) for rank, answer in answers.items() if answer[0] != "times"}
            if failures:
                raise ReplayError(_cause(failures))
        except LateError as late:
            self.close(wait_s=0.0)
            raise ReplayError(
                f"ranks {', '.join(map(str, late.ranks))} did not finish within {self.timeout_s:g} s; check with a "
                "simulation that the program has no deadlock, replay fewer microbatches, or raise timeout_s"
            ) from None
        except BaseException:
            self.close(wait_s=0.0)
            raise
        return {rank: answer[1] for rank, answer in answers.items() if rank < ranks}


def _sentence(rank: int, answer: tuple[Any, ...]) -> str:
    match answer:
        case ("died", code):
            return (
                f"the process of rank {rank} {how_it_died(code)} during the replay; look at its output for the "
                "reason (memory may have run out; a script that replays needs its calls "
                "under `if __name__ == '__main__':`)"
            )
        case (_, text, True):
            return str(text)
        case _:
            return f"rank {rank} failed: {answer[1]}"


def _cause(failures: Mapping[int, str]) -> str:
    """The failure that explains the others: a death, else a sentence of ours, else what was heard of first."""
    deaths = [text for text in failures.values() if text.startswith("the process of rank")]
    ours = [text for rank, text in failures.items() if not text.startswith(f"rank {rank} failed")]
    return (deaths or ours or list(failures.values()))[0]
