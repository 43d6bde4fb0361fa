"""Processes for a measurement on this machine: started, heard, and ended whatever happens."""

import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from calibrate.errors import MeasurementError
from calibrate.measure.session import Assignment, Tell, serve

_GRACE_S = 1.0  # after the first failure, others get so long to report theirs: one may be the cause of the rest


def measure_here(assignment: Assignment, ranks: int, tell: Tell, *, silence_s: float = 180.0) -> None:
    """Measures with ``ranks`` processes on this machine.

    Args:
        assignment: what to do.
        ranks: processes.
        tell: hears of each measurement as it is made.
        silence_s: seconds without any news after which it is given up.

    Raises:
        MeasurementError: a process failed, died or hung; all of them are ended.
    """
    folder = tempfile.mkdtemp(prefix="simpar-measure-")
    context = get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: dict[Connection, int] = {}
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, assignment, rank, ranks, str(Path(folder) / "store"))
            process = context.Process(target=serve, args=arguments, daemon=True, name=f"measure rank {rank}")
            with _uninterrupted():
                process.start()
            theirs.close()  # so that the end of the process ends the connection
            processes.append(process)
            connections[ours] = rank
        _listen(dict(connections), processes, tell, silence_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
            process.close()
        for connection in connections:
            connection.close()
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A new process inherits that Ctrl-C is none of its business: its parent ends it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _listen(waiting: dict[Connection, int], processes: Sequence[BaseProcess], tell: Tell, silence_s: float) -> None:
    failures: dict[int, tuple[str, bool]] = {}
    while waiting:
        ready = wait(list(waiting), timeout=_GRACE_S if failures else silence_s)
        if not ready and not failures:
            raise MeasurementError(
                f"nothing was measured for {silence_s:g} s; end other work on this machine, or use fewer --ranks"
            )
        if not ready:
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting[connection]
            match _received(connection, processes[rank]):
                case ("event", event):
                    tell(event)
                    continue
                case ("error", text, ours):
                    failures[rank] = (text if ours else f"rank {rank} failed: {text}", ours)
                case ("died", code):
                    how = (
                        f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
                    )
                    text = f"the process of rank {rank} {how}; look at its output (memory may have run out)"
                    failures[rank] = (text, True)
            del waiting[connection]
    if failures:
        first = next(iter(failures.values()))[0]
        # what explains the others: a sentence of ours, else what was heard of first
        raise MeasurementError(next((text for text, ours in failures.values() if ours), first))


def _received(connection: Connection, process: BaseProcess) -> tuple[Any, ...]:
    """What a process sent, or how it ended."""
    try:
        message: tuple[Any, ...] = connection.recv()
    except (EOFError, OSError):
        process.join(_GRACE_S)
        return ("died", process.exitcode)
    return message
