"""What the replay needs of a device: a handful of methods, so that everything else is the same on all of them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

Call = Callable[[], Any]
"""Work for a stream; what it returns is None or a handle (``torch.distributed.Work``) that the stream waits for."""


class Adapter(Protocol):
    """A device of this process: in-order streams, events between them, and a clock.

    Work is given to streams in host order within :meth:`run`, and times are read once that has returned. Streams,
    events and marks are whatever the device makes of them; the replay only hands them back.

    Attributes:
        backend: name of the ``torch.distributed`` back end that moves this device's tensors.
        device: where tensors live.
    """

    backend: str
    device: "torch.device"

    def stream(self, name: str) -> Any:
        """A new in-order stream."""

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """While entered, torch's own work goes to the stream."""

    def launch(self, stream: Any, call: Call) -> tuple[Any, Any]:
        """Lets the stream do the work; returns marks at its start and its end."""

    def mark(self, stream: Any) -> Any:
        """A moment of the stream, to be read after the step."""

    def record(self, stream: Any) -> Any:
        """An event: the present end of the stream."""

    def wait(self, stream: Any, event: Any) -> None:
        """The stream goes on only after the event."""

    def wait_on_host(self, stream: Any) -> None:
        """The host goes on only when the stream gets here."""

    def run(self, issue: Callable[[], None], begin: Callable[[], None]) -> None:
        """One step: ``issue`` gives the streams their work, ``begin`` returns when all ranks start; waits for it."""

    def read_ns(self, mark: Any) -> int:
        """When a mark was passed, on :func:`time.perf_counter_ns`."""


AdapterFactory = Callable[[int, int], Adapter]
"""Makes the adapter of a process: its index among the processes of this machine, and how many there are."""


def local_adapter(index: int, count: int) -> Adapter:
    """GPUs where torch sees any, else processes on the CPU."""
    import torch  # noqa: PLC0415 - torch only where devices are touched

    from calibrate.replay.cpu import CpuAdapter  # noqa: PLC0415
    from calibrate.replay.cuda import CudaAdapter  # noqa: PLC0415

    return CudaAdapter(index, count) if torch.cuda.is_available() else CpuAdapter(index, count)
