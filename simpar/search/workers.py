"""Runs many small tasks on any ``concurrent.futures.Executor``; a worker that dies costs a retry, never a task."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from concurrent.futures.process import ProcessPoolExecutor
from typing import Any, TypeVar

from simpar.errors import JobError

T = TypeVar("T")
R = TypeVar("R")

LATER: Any = object()  # in place of a task: there is none at the moment
ATTEMPTS = 3  # times that a task may take its worker down with it, alone
# How executors say that a worker is gone: their own classes of these names, without importing them.
_DEATHS = frozenset({"KilledWorker", "CommClosedError", "FutureCancelledError", "LostDependency"})


class WorkerLostError(JobError):
    """A task took its worker down each time that it was tried."""


class Workers:
    """Where tasks run: an executor of the caller's, or processes of this machine.

    Args:
        executor: anything with the interface of ``concurrent.futures``; it is not shut down here.
        count: processes if no executor is given (left open, one per core; 1 works in this process), else tasks that
            the executor is given at a time (left open, two per core).

    Raises:
        JobError: the count is below 1.
    """

    def __init__(self, executor: Executor | None = None, count: int | None = None) -> None:
        if count is not None and count < 1:
            raise JobError(f"workers={count} cannot work; give 1 or more")
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._given = executor
        self._processes = count or cores
        self._own: ProcessPoolExecutor | None = None
        # a task more than processes, so that none waits for this one to hand out the next
        self._slots = count or 2 * cores if executor is not None else self._processes + 1

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        self._drop()

    def run(self, function: Callable[[T], R], tasks: Iterable[T]) -> Generator[tuple[T, "R | WorkerLostError"]]:
        """Calls ``function`` with each task; yields task and answer as they come.

        Tasks are taken from their iterator only when one can run, so that it may react to earlier answers; where it has
        none before another answer is in, it gives :data:`LATER`. A task that takes its worker down is tried again,
        alone in a process; the third time its answer is a :class:`WorkerLostError`.
        """
        if self._given is None and self._processes == 1:
            yield from ((task, function(task)) for task in tasks if task is not LATER)
            return
        waiting, running = iter(tasks), dict[Future[R], T]()
        try:
            while True:
                suspects = self._submit(function, waiting, running)
                if not running and not suspects:
                    return
                done = wait(running, return_when=FIRST_COMPLETED).done if not suspects else set()
                for future in done:
                    task = running.pop(future)
                    try:
                        answer = future.result()
                    except Exception as error:
                        if not _is_death(error):
                            raise
                        suspects.append(task)
                    else:
                        yield task, answer
                if suspects:
                    # who of those that ran took the worker down is not known: each is tried alone
                    finished = [future for future in running if future.done() and _succeeded(future)]
                    for future in finished:
                        yield running.pop(future), future.result()
                    suspects += running.values()
                    running.clear()
                    self._drop()
                    for task in suspects:
                        yield task, self._alone(function, task)
        finally:
            for future in running:
                future.cancel()

    def _submit(self, function: Callable[[T], R], waiting: Any, running: dict[Future[R], T]) -> list[T]:
        """Fills the slots; returns tasks that could not even be submitted."""
        while len(running) < self._slots:
            try:
                task = next(waiting)
            except StopIteration:
                break
            if task is LATER:
                break
            try:
                running[self._executor().submit(function, task)] = task
            except BrokenExecutor:
                return [task]
        return []

    def _executor(self) -> Executor:
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = processes(self._processes)
        return self._own

    def _drop(self) -> None:
        if self._own is not None:
            self._own.shutdown(wait=True, cancel_futures=True)
            self._own = None

    def _alone(self, function: Callable[[T], R], task: T) -> "R | WorkerLostError":
        for _ in range(ATTEMPTS):
            with processes(1) as pool:
                try:
                    return pool.submit(function, task).result()
                except BrokenExecutor:
                    continue
        return WorkerLostError(
            f"its worker died {ATTEMPTS} times, last alone in a process of its own; it may need more memory than this "
            "machine has"
        )


def _is_death(error: Exception) -> bool:
    return isinstance(error, (BrokenExecutor, CancelledError)) or type(error).__name__ in _DEATHS


def _succeeded(future: "Future[Any]") -> bool:
    return not future.cancelled() and future.exception() is None


def processes(count: int, method: str | None = None) -> ProcessPoolExecutor:
    """Processes of this machine that end when this one does, however it ends.

    Args:
        count: how many.
        method: how they start, as :mod:`multiprocessing` calls it; left open, by a fork on Linux.
    """
    if method is None and sys.platform == "linux":
        method = "fork"  # it knows what this process has imported, and runs scripts that have no main guard
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context(method), initializer=_end_with_parent)


def _end_with_parent() -> None:
    """Lets a worker end with the process that started it, which cannot tell it to once it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has a parent"

    def follow() -> None:
        parent.join()
        os._exit(1)  # whoever waits for the task is gone, and so is whom an exception could be told

    threading.Thread(target=follow, name="end-with-parent", daemon=True).start()
