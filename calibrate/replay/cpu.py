"""A CPU as a device: the compute stream is the process's main thread, every other stream a thread of its own.

Work is collected while the host issues it and runs afterwards, so that issuing takes no time from the cores that it
would be measured on; what an operator call costs on its host is part of the kernel's time.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import NamedTuple

from calibrate.replay.adapter import Call
from calibrate.replay.steps import ReplayError
from simpar.program.ir import COMPUTE

_RANKS_PER_CORE = 4


class _Run(NamedTuple):
    """Work."""

    call: Callable[[], None]


class _Set(NamedTuple):
    """The stream gets to an event."""

    event: threading.Event


class _Await(NamedTuple):
    """The stream waits for an event."""

    event: threading.Event


_Item = _Run | _Set | _Await


class CpuStream:
    """Work in order, collected for the next run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: list[_Item] = []


class CpuAdapter:
    """One process among ``count`` on this machine's cores; its kernels use ``cores // count`` threads."""

    backend = "gloo"

    def __init__(self, index: int, count: int) -> None:  # noqa: ARG002 - cores are not handed out one by one
        import torch  # noqa: PLC0415

        cores = usable_cores()
        if count > _RANKS_PER_CORE * cores:
            raise ReplayError(
                f"{count} ranks are too many for {cores} CPU cores, where at most {_RANKS_PER_CORE * cores} can be "
                "replayed; use a smaller cluster or a larger machine"
            )
        torch.set_num_threads(max(1, cores // count))
        self.device = torch.device("cpu")
        self._streams: list[CpuStream] = []
        self._times: list[int] = []
        self._events: list[threading.Event] = []
        self._failure: BaseException | None = None

    def stream(self, name: str) -> CpuStream:
        """A new stream; the first one is the compute stream."""
        self._streams.append(CpuStream(name))
        return self._streams[-1]

    def using(self, stream: CpuStream) -> AbstractContextManager[None]:  # noqa: ARG002 - torch has one CPU stream
        """Nothing to enter."""
        return nullcontext()

    def launch(self, stream: CpuStream, call: Call) -> tuple[int, int]:
        """Appends the work; communication is waited for in the stream's thread."""
        times, start, end = self._times, *self._marks(2)

        def item() -> None:
            times[start] = perf_counter_ns()
            work = call()
            if work is not None:
                work.wait()
            times[end] = perf_counter_ns()

        stream.items.append(_Run(item))
        return start, end

    def mark(self, stream: CpuStream) -> int:
        """Appends a look at the clock."""
        times, (number,) = self._times, self._marks(1)

        def item() -> None:
            times[number] = perf_counter_ns()

        stream.items.append(_Run(item))
        return number

    def record(self, stream: CpuStream) -> threading.Event:
        """Appends an event."""
        event = threading.Event()
        self._events.append(event)
        stream.items.append(_Set(event))
        return event

    def wait(self, stream: CpuStream, event: threading.Event) -> None:
        """Appends a wait."""
        stream.items.append(_Await(event))

    def wait_on_host(self, stream: CpuStream) -> None:
        """Nothing: here the host issues all work before any of it runs."""

    def run(self, issue: Callable[[], None], begin: Callable[[], None]) -> None:
        """Issues, begins, and then executes all streams at once.

        Raises:
            Exception: whatever work of any stream raised first.
        """
        self._times.clear()
        self._events.clear()
        for stream in self._streams:
            stream.items.clear()
        issue()
        compute = next(stream for stream in self._streams if stream.name == COMPUTE)
        beside = [stream for stream in self._streams if stream is not compute]
        take_over(compute, beside)
        started = threading.Event()
        threads = [threading.Thread(target=self._drain, args=(s, started), daemon=True) for s in beside if s.items]
        for thread in threads:
            thread.start()
        begin()
        started.set()
        self._drain(compute, started)
        for thread in threads:
            # a thread may hang in communication with a rank that another thread has failed to serve
            while thread.is_alive() and self._failure is None:
                thread.join(0.05)
        if self._failure is not None:
            raise self._failure

    def read_ns(self, mark: int) -> int:
        """The time that the mark looked up."""
        return self._times[mark]

    def _marks(self, count: int) -> range:
        first = len(self._times)
        self._times += [0] * count
        return range(first, first + count)

    def _drain(self, stream: CpuStream, started: threading.Event) -> None:
        try:
            started.wait()
            for item in stream.items:
                match item:
                    case _Run(call):
                        call()
                    case _Set(event):
                        event.set()
                    case _Await(event) if not event.is_set():
                        event.wait()
                if self._failure is not None:
                    return
        except BaseException as failure:  # the thread that called run raises it
            self._failure = self._failure or failure
            for event in self._events:
                event.set()


def take_over(compute: CpuStream, beside: Iterable[CpuStream]) -> None:
    """Moves work of other streams to the compute stream where it would do nothing but wait for it.

    A process that communicates synchronously waits for the communication itself; to hand it to a thread and be woken by
    it would cost two changes of threads, which is more than a small collective takes. Order and dependencies stay.
    """
    owners = {
        item.event: (stream, index)
        for stream in beside
        for index, item in enumerate(stream.items)
        if isinstance(item, _Set)
    }
    done = {stream: 0 for stream, _ in owners.values()}  # items that were moved
    kept: list[_Item] = []
    items = iter([*zip(compute.items, [*compute.items[1:], None], strict=True)])
    for item, following in items:
        kept.append(item)
        if not (isinstance(item, _Set) and isinstance(following, _Await) and following.event in owners):
            continue
        stream, index = owners[following.event]
        part = stream.items[done[stream] : index + 1]
        if part and part[0] == _Await(item.event) and all(isinstance(inner, _Run) for inner in part[1:-1]):
            kept += part[1:]
            done[stream] = index + 1
            next(items)  # what followed waited for the end of the part
    for stream, count in done.items():
        if count:
            last = stream.items[count - 1]
            assert isinstance(last, _Set), "a moved part ends with the event that was waited for"
            stream.items[:count] = [_Await(last.event)] if len(stream.items) > count else []
    compute.items[:] = kept


def usable_cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
