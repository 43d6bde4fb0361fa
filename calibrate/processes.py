"""Processes on this machine that are started once, given orders, and ended whatever happens."""

import pickle
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_GRACE_S = 1.0  # after the first failure, others get so long to report theirs: one may be the cause of the rest

Answer = tuple[Any, ...]
"""What a process sent, its kind first; ``("died", exit code)`` where it ended instead."""


class LateError(Exception):
    """Ranks that did not answer in time."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(f"ranks {', '.join(map(str, ranks))} did not answer")
        self.ranks = ranks


class Processes:
    """``size`` processes that serve; use it as a context manager. After a failure they are gone.

    Args:
        serve: what a process runs: called with its connection, rank, size, path of a common store and ``timeout_s``.
        size: processes.
        purpose: what they do, for their names.
        timeout_s: seconds that an order may take.

    Attributes:
        folder: where the processes find each other; removed when they are ended.
    """

    def __init__(
        self, serve: Callable[[Connection, int, int, str, float], None], size: int, *, purpose: str, timeout_s: float
    ) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.folder = tempfile.mkdtemp(prefix=f"simpar-{purpose}-")
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []
        context = get_context("spawn")
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                arguments = (theirs, rank, size, str(Path(self.folder) / "store"), timeout_s)
                process = context.Process(target=serve, args=arguments, daemon=True, name=f"{purpose} rank {rank}")
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

    @property
    def ended(self) -> bool:
        """Whether there is nobody left to ask."""
        return not self._processes

    def ask(self, message: bytes, *, success: str) -> dict[int, Answer]:
        """Sends an order to all, and collects their answers; the first failure ends the wait after a grace period.

        Args:
            message: the order.
            success: kind of the answers that are none.

        Raises:
            LateError: some did not answer in time, and no other failure explains it.
        """
        for connection in self._connections:
            with suppress(OSError):  # its end is found below
                connection.send_bytes(message)
        waiting: dict[Any, int] = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + self.timeout_s
        answers: dict[int, Answer] = {}
        failed = False
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready and failed:
                break
            if not ready:
                raise LateError(tuple(waiting.values()))
            for heard in ready:
                rank = waiting.pop(heard)
                answers[rank] = self._answer(rank)
                if answers[rank][0] != success:
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers

    def _answer(self, rank: int) -> Answer:
        try:
            answer: Answer = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(_GRACE_S)
            return ("died", self._processes[rank].exitcode)
        return answer

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


def how_it_died(code: int | None) -> str:
    """The end of a process in words."""
    return f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
