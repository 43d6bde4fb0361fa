"""Devices that tests need: a stand-in for ``torch.cuda`` whose streams are threads, and devices that fail."""

import os
import queue
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from calibrate.replay import CpuAdapter, CudaAdapter

_CURRENT = threading.local()


class FakeStream:
    """Executes what it is given in order, while the host goes on."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        threading.Thread(target=self._work, daemon=True).start()

    def put(self, call: Any) -> None:
        self._queue.put(call)

    def wait_event(self, event: "FakeEvent") -> None:
        assert event.recorded is not None, "CUDA ignores a wait for an event that was not recorded before"
        self.put(event.recorded.wait)

    def _work(self) -> None:
        while True:
            self._queue.get()()


class FakeEvent:
    """An event as CUDA has it: it means the last time that it was recorded."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.timed = enable_timing
        self.recorded: threading.Event | None = None
        self._ns = 0

    def record(self, stream: FakeStream | None = None) -> None:
        self.recorded = recorded = threading.Event()

        def pass_by() -> None:
            self._ns = time.perf_counter_ns()
            recorded.set()

        (stream or _default).put(pass_by)

    def synchronize(self) -> None:
        assert self.recorded is not None
        self.recorded.wait()

    def elapsed_time(self, other: "FakeEvent") -> float:
        assert all((self.timed, other.timed)), "CUDA gives times only of events that were made for it"
        assert other.recorded is not None, "the event was never recorded"
        assert other.recorded.is_set(), "the device has not got there"
        return (other._ns - self._ns) / 1e6


_streams: list[FakeStream] = []
_default = FakeStream()


def _new_stream() -> FakeStream:
    _streams.append(FakeStream())
    return _streams[-1]


@contextmanager
def _enter(stream: FakeStream) -> Any:
    before = getattr(_CURRENT, "stream", None)
    _CURRENT.stream = stream
    yield
    _CURRENT.stream = before


def _synchronize() -> None:
    events = []
    for stream in (*_streams, _default):
        event = FakeEvent()
        event.record(stream)
        events.append(event)
    for event in events:
        event.synchronize()


def fake_cuda(devices: int, *, available: bool = True) -> Any:
    """What the CUDA adapter uses of ``torch.cuda``."""
    return SimpleNamespace(
        is_available=lambda: available,
        device_count=lambda: devices,
        set_device=lambda index: None,
        Stream=_new_stream,
        Event=FakeEvent,
        stream=_enter,
        synchronize=_synchronize,
    )


def current_stream() -> FakeStream | None:
    return getattr(_CURRENT, "stream", None)


class FakeCudaAdapter(CudaAdapter):
    """The CUDA adapter on a CPU: its logic of streams and events, with kernels that are queued instead of launched."""

    backend = "gloo"
    device_type = "cpu"

    def __init__(self, index: int, count: int) -> None:
        super().__init__(index, count, fake_cuda(8))

    def _issue(self, stream: FakeStream, call: Any) -> None:
        issue = super()._issue
        stream.put(lambda: issue(stream, call))


class DyingAdapter(CpuAdapter):
    """Its second rank is killed in the middle of a step, while the first waits for it."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(index, count)
        self._index = index

    def run(self, issue: Any, begin: Any) -> None:
        def begin_and_die() -> None:
            begin()
            if self._index == 1:
                os.kill(os.getpid(), 9)

        super().run(issue, begin_and_die)


class Unpickled:
    """An adapter factory that does something as soon as a process receives it."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self._reduced = (call, arguments)

    def __reduce__(self) -> Any:
        return self._reduced

    def __call__(self, index: int, count: int) -> Any:
        raise AssertionError("never called")


exits_at_once = Unpickled(os._exit, 3)
raises_at_once = Unpickled(divmod, 1, 0)
hangs = Unpickled(time.sleep, 60)
