"""A GPU as a device: CUDA streams and events, the host running ahead, as in training.

Its logic is proved with a stand-in for ``torch.cuda``; what that cannot show is how a real device behaves.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter_ns
from typing import Any

from calibrate.replay.adapter import Call
from calibrate.replay.steps import ReplayError


class CudaAdapter:
    """The GPU number ``index`` of this machine, which ``count`` processes share out among them.

    Args:
        index: of this process.
        count: processes on this machine.
        cuda: what stands for ``torch.cuda``.
    """

    backend = "nccl"
    device_type = "cuda"

    def __init__(self, index: int, count: int, cuda: Any = None) -> None:
        import torch  # noqa: PLC0415

        self._cuda = torch.cuda if cuda is None else cuda
        devices = self._cuda.device_count() if self._cuda.is_available() else 0
        if devices < count:
            raise ReplayError(
                f"{count} ranks need {count} GPUs, but torch sees {devices} here; use a smaller cluster, or replay "
                "with adapter='cpu'"
            )
        self._cuda.set_device(index)
        self.device = torch.device(self.device_type, index)
        self._marks: list[Any] = []  # events with times are made once and used in every step
        self._used = 0
        self._base: Any = None
        self._base_ns = 0

    def stream(self, name: str) -> Any:  # noqa: ARG002 - CUDA's streams have no names
        """A new stream that does not wait for the default stream."""
        return self._cuda.Stream()

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Kernels and the start of collectives go to the stream."""
        context: AbstractContextManager[Any] = self._cuda.stream(stream)
        return context

    def launch(self, stream: Any, call: Call) -> tuple[Any, Any]:
        """Issues the work between two events; NCCL's own stream is joined, not the host."""
        start = self.mark(stream)
        self._issue(stream, call)
        return start, self.mark(stream)

    def mark(self, stream: Any) -> Any:
        """An event with a time."""
        if self._used == len(self._marks):
            self._marks.append(self._cuda.Event(enable_timing=True))
        event = self._marks[self._used]
        self._used += 1
        event.record(stream)
        return event

    def record(self, stream: Any) -> Any:
        """An event without a time, which is cheaper."""
        event = self._cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Lets the stream wait."""
        stream.wait_event(event)

    def wait_on_host(self, stream: Any) -> None:
        """Waits."""
        stream.synchronize()

    def run(self, issue: Callable[[], None], begin: Callable[[], None]) -> None:
        """Ties the device's clock to the host's, begins, issues, and waits for the device."""
        self._used = 0
        self._cuda.synchronize()
        self._base = self._base or self._cuda.Event(enable_timing=True)
        before = perf_counter_ns()
        self._base.record()
        self._base.synchronize()
        self._base_ns = (before + perf_counter_ns()) // 2
        begin()
        issue()
        self._cuda.synchronize()

    def read_ns(self, mark: Any) -> int:
        """The event's distance from the base, on the host's clock."""
        since_base_ms: float = self._base.elapsed_time(mark)
        return self._base_ns + round(since_base_ms * 1e6)

    def _issue(self, stream: Any, call: Call) -> None:
        with self.using(stream):
            work = call()
            if work is not None:
                work.wait()
