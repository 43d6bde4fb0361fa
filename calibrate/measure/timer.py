"""What differs between devices when something is timed: a clock, streams, and how work is kept back to back."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from calibrate.detect import usable_cores
from calibrate.errors import MeasurementError

if TYPE_CHECKING:
    import torch

Call = Callable[[], Any]

_RANKS_PER_CORE = 4
_HELD_PER_CALL_S = 20e-6  # longer than a host takes for a launch, so that the device never waits for one
_MOST_HELD_S = 0.02
_CYCLES_PER_S = 2e9  # about what GPUs run at; only the length of a pause depends on it
_BETWEEN = (32, 1024, 1024)  # its weights of 4 MiB displace what a core's own caches hold
_QUEUED = 500  # launches that fit the device's queue; beyond it the host would wait


class Timer(Protocol):
    """A device of this process.

    Attributes:
        backend: name of the ``torch.distributed`` back end that moves its tensors.
        device: where tensors live.
        cache_bytes: last-level cache that successive calls must not find their inputs in; 0 if a step would.
        queued: calls that can be given to it without waiting.
        apart_s: seconds that pass between two calls of a burst.
        shared_clock: whether all ranks of this machine can compare their times.
    """

    backend: str
    device: "torch.device"
    cache_bytes: int
    queued: int
    apart_s: float
    shared_clock: bool

    def pinned(self) -> AbstractContextManager[None]:
        """While entered, this thread stays on the rank's own cores."""

    def burst(self, calls: Sequence[Call]) -> list[float]:
        """Seconds of calls as they run in a step, one after the other: of each, or one mean of all."""

    def between(self) -> None:
        """What a step does between two calls that are timed one by one."""

    def stream(self) -> AbstractContextManager[Any]:
        """While entered, this thread's work goes to a stream of its own."""

    def mark(self) -> Any:
        """A moment of the current stream."""

    def settle(self, mark: Any) -> None:
        """Returns once the mark was passed."""

    def between_s(self, start: Any, end: Any) -> float:
        """Seconds between two settled marks."""

    def synchronize(self) -> None:
        """Waits for all work."""


class CpuTimer:
    """One process among ``count`` on this machine: ``cores // count`` threads, and a monotonic clock for all.

    A small kernel that is repeated back to back finds its operands, its code and torch's dispatch in the core's caches
    and runs several times faster than it ever does in a step, where products lie between. So a product runs before each
    call, untimed.
    """

    backend = "gloo"
    cache_bytes = 0  # the product between two calls displaces what they would find
    queued = 10_000
    shared_clock = True

    def __init__(self, index: int, count: int) -> None:
        import torch  # noqa: PLC0415

        self._cores = cores_of(index, count)
        torch.set_num_threads(threads_of_rank(count))
        self.device = torch.device("cpu")
        rows, columns, inner = _BETWEEN
        a, b = torch.ones(rows, inner), torch.ones(inner, columns)
        self._between = partial(torch.mm, a, b, out=torch.empty(rows, columns))
        self.between()
        start = perf_counter()
        self.between()
        self.apart_s = perf_counter() - start

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """Only the calling thread moves: the back end's own threads stay free, as they are in training."""
        if self._cores is None:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def burst(self, calls: Sequence[Call]) -> list[float]:
        """Seconds of each call."""
        times = []
        for call in calls:
            self._between()
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
        return times

    def between(self) -> None:
        """A product that takes the caches."""
        self._between()

    def stream(self) -> AbstractContextManager[None]:
        """A thread is a stream already."""
        return nullcontext()

    def mark(self) -> float:
        """Now."""
        return perf_counter()

    def settle(self, mark: float) -> None:
        """It has passed."""

    def between_s(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

    def synchronize(self) -> None:
        """Nothing is under way."""


class CudaTimer:
    """The GPU number ``index`` of this machine, timed by events.

    Args:
        index: of this process.
        count: processes on this machine.
        cuda: what stands for ``torch.cuda``.
        device: what stands for the device.
    """

    backend = "nccl"
    queued = _QUEUED
    apart_s = 0.0
    shared_clock = False

    def __init__(self, index: int, count: int, cuda: Any = None, device: Any = None) -> None:
        import torch  # noqa: PLC0415

        self._cuda = torch.cuda if cuda is None else cuda
        check_devices(count, self._cuda.device_count() if self._cuda.is_available() else 0)
        self._cuda.set_device(index)
        self._index = index
        self.device = torch.device("cuda", index) if device is None else device
        self.cache_bytes = int(getattr(self._cuda.get_device_properties(index), "L2_cache_size", 0))

    def pinned(self) -> AbstractContextManager[None]:
        """The device's times do not depend on where the host runs."""
        return nullcontext()

    def burst(self, calls: Sequence[Call]) -> list[float]:
        """The mean of all calls: the device pauses until the host has issued them, so that no launch is in it."""
        self._cuda._sleep(int(min(_MOST_HELD_S, len(calls) * _HELD_PER_CALL_S) * _CYCLES_PER_S))
        start = self.mark()
        for call in calls:
            call()
        end = self.mark()
        self.settle(end)
        return [self.between_s(start, end) / len(calls)]

    def between(self) -> None:
        """Nothing: buffers rotate until its cache has forgotten them."""

    def stream(self) -> AbstractContextManager[Any]:
        """A new stream of this process's GPU, which another thread does not know by itself."""
        self._cuda.set_device(self._index)
        context: AbstractContextManager[Any] = self._cuda.stream(self._cuda.Stream())
        return context

    def mark(self) -> Any:
        """An event with a time."""
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self, mark: Any) -> None:
        """Waits for the event."""
        mark.synchronize()

    def between_s(self, start: Any, end: Any) -> float:
        """Events count milliseconds."""
        return float(start.elapsed_time(end)) * 1e-3

    def synchronize(self) -> None:
        """Waits for all streams."""
        self._cuda.synchronize()


def local_timer(index: int, count: int, *, cuda: bool) -> Timer:
    """The timer of a process."""
    return CudaTimer(index, count) if cuda else CpuTimer(index, count)


def check_devices(ranks: int, devices: int) -> None:
    """Raises MeasurementError if there are fewer GPUs than ranks."""
    if ranks > devices:
        raise MeasurementError(
            f"{ranks} ranks need {ranks} GPUs, but torch sees {devices} here; use --ranks {max(1, devices)}, or "
            "measure the CPU with --on cpu"
        )


def check_cores(ranks: int, cores: int) -> None:
    """Raises MeasurementError if so many ranks would only wait for each other's cores."""
    if ranks > _RANKS_PER_CORE * cores:
        raise MeasurementError(
            f"{ranks} ranks are too many for {cores} CPU cores, which take at most {_RANKS_PER_CORE * cores}; use "
            f"--ranks {cores}"
        )


def threads_of_rank(count: int) -> int:
    """Threads of each of ``count`` processes."""
    return max(1, usable_cores() // count)


def cores_of(index: int, count: int) -> set[int] | None:
    """The cores of a process, or None where there are too few or they cannot be assigned."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    if count > len(cores):
        return None
    each = len(cores) // count
    return set(cores[index * each : (index + 1) * each])
