"""Processes for a replay on this machine: started once, given programs, and ended whatever happens."""

import pickle
import shutil
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from calibrate.replay.steps import ReplayError
from calibrate.replay.worker import Job, serve
from simpar.trace.trace import IntColumn

_GRACE_S = 1.0  # after the first failure, others get so long to report theirs: one may be the cause of the rest


class Workers:
    """``size`` processes that replay programs of up to so many ranks; use it as a context manager.

    Starting Python and torch takes seconds, so keep the workers for several programs. After a failure they are gone.

    Args:
        size: processes.
        timeout_s: seconds that a program may take, all its repeats together.

    Attributes:
        folder: where the processes find each other; removed when they are ended.
    """

    def __init__(self, size: int, *, timeout_s: float = 300.0) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self.folder = tempfile.mkdtemp(prefix="simpar-replay-")
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = get_context("spawn")
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, size, str(Path(self.folder) / "store"), timeout_s)
                process = context.Process(target=serve, args=arguments, daemon=True, name=f"replay rank {rank}")
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
        if not self._processes:
            raise ReplayError("these workers were ended; start new ones")
        try:
            message = pickle.dumps(job)
        except Exception as error:
            raise ReplayError(
                f"the adapter {job.adapter!r} cannot be handed to another process ({error}); define it at the top of a "
                "module"
            ) from error
        try:
            for connection in self._connections:
                with suppress(OSError):  # its end is found below
                    connection.send_bytes(message)
            answers = self._collect(time.monotonic() + self._timeout_s)
        except BaseException:
            self.close(wait_s=0.0)
            raise
        return {rank: answer for rank, answer in answers.items() if rank < ranks}

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

    def _collect(self, deadline: float) -> dict[int, IntColumn]:
        """Waits for every rank's answer; the first failure ends the wait."""
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting:
            left = deadline - time.monotonic()
            ready = wait(list(waiting), timeout=max(0.0, left))
            if not ready and failures:
                break
            if not ready:
                late = ", ".join(map(str, waiting.values()))
                raise ReplayError(
                    f"ranks {late} did not finish within {self._timeout_s:g} s; check with a simulation that the "
                    "program has no deadlock, replay fewer microbatches, or raise timeout_s"
                )
            for connection in ready:
                rank = waiting.pop(connection)
                answer = self._answer(rank)
                if answer[0] == "times":
                    answers[rank] = answer[1]
                else:
                    failures[rank] = _sentence(rank, answer)
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if failures:
            raise ReplayError(_cause(failures))
        return answers

    def _answer(self, rank: int) -> tuple[Any, ...]:
        """What a rank sent, or how it ended."""
        try:
            answer: tuple[Any, ...] = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            process = self._processes[rank]
            process.join(_GRACE_S)
            return ("died", process.exitcode)
        return answer


def _sentence(rank: int, answer: tuple[Any, ...]) -> str:
    match answer:
        case ("died", code):
            how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            return (
                f"the process of rank {rank} {how} during the replay; look at its output for the reason (memory may "
                "have run out; a script that replays needs its calls under `if __name__ == '__main__':`)"
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
