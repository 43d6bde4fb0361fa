"""Times one collective or message once, with the calls that a replay makes."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from calibrate.measure.kernels import Pool
from calibrate.measure.plan import CollectiveItem
from calibrate.measure.timer import Timer
from calibrate.replay.executor import Transfers, elements
from calibrate.replay.steps import Communicator
from simpar.program.ir import Collective, Group
from simpar.units import KIB, MIB

if TYPE_CHECKING:
    import torch.distributed as dist

Members = tuple[int, ...]
_STREAM = "dp"  # any name will do
_WARM_UP = 5


class CollectiveBench:
    """Process groups and buffers of one process; all processes make it alike.

    Args:
        timer: of this process.
        items: what will be measured; each distinct group gets a communicator.
        control: a gloo group of all processes.
        rank: of this process.
        one_machine: whether all processes share the machine, and with it a clock.
        timeout_s: seconds that a collective may take.
    """

    def __init__(
        self,
        timer: Timer,
        items: Sequence[CollectiveItem],
        control: "dist.ProcessGroup",
        *,
        rank: int,
        one_machine: bool,
        timeout_s: float,
    ) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        self._timer, self._control, self._rank = timer, control, rank
        self._one_clock = timer.shared_clock and one_machine
        self._groups = {
            members: dist.new_group(list(members), backend=timer.backend, timeout=timedelta(seconds=timeout_s))
            for members in dict.fromkeys(item.ranks for item in items)
        }
        self._pool = Pool(timer.device)
        self._warm: set[Members] = set()

    def measure_s(self, item: CollectiveItem) -> float | None:
        """Seconds from the arrival of the last member to the end of the last one; None if this rank is no member.

        Ranks that share a clock meet before each repetition and then do what a step does between two collectives; the
        mean counts. Others repeat back to back, as nccl-tests do, and the slowest rank's mean counts.
        """
        if self._rank not in item.ranks:
            return None
        call = self._message(item) if item.op == "sendrecv" else self.call(item)
        repeats = _repeats(item.nbytes)
        if item.ranks not in self._warm:
            for _ in range(_WARM_UP):  # connections are made when they are first used
                call()
            self._warm.add(item.ranks)
        call()
        times = self._met(call, repeats, item) if self._one_clock else self._back_to_back(call, repeats, item)
        return times / 2 if item.op == "sendrecv" else times  # there and back

    def call(self, item: CollectiveItem) -> Callable[[], None]:
        """One collective, waited for."""
        members = Communicator(_STREAM, item.ranks)
        self._pool.reset()
        transfers = Transfers(self._pool, {members: self._groups[item.ranks]})  # type: ignore[arg-type]
        start = transfers.collective(Collective(item.op, item.nbytes, Group(_STREAM, item.ranks)))  # type: ignore[arg-type]

        def run() -> None:
            work = start()
            if work is not None:
                work.wait()

        return run

    def _message(self, item: CollectiveItem) -> Callable[[], None]:
        """A message from the first rank to the second and one back."""
        import torch.distributed as dist  # noqa: PLC0415

        group = self._groups[item.ranks]
        first, second = item.ranks
        self._pool.reset()
        buffer = self._pool.allocate((elements(item.nbytes, 1),))

        def ask() -> None:
            dist.send(buffer, second, group=group)
            dist.recv(buffer, second, group=group)

        def answer() -> None:
            dist.recv(buffer, first, group=group)
            dist.send(buffer, first, group=group)

        return ask if self._rank == first else answer

    def _met(self, call: Callable[[], None], repeats: int, item: CollectiveItem) -> float:
        import torch.distributed as dist  # noqa: PLC0415

        group = self._groups[item.ranks]
        moments = np.empty((repeats, 2))
        for moment in moments:
            dist.barrier(group=group)
            self._timer.between()
            moment[0] = perf_counter()
            call()
            moment[1] = perf_counter()
        latest = _largest(moments, group)
        return float(np.mean(latest[:, 1] - latest[:, 0]))

    def _back_to_back(self, call: Callable[[], None], repeats: int, item: CollectiveItem) -> float:
        timer = self._timer
        timer.synchronize()
        start = timer.mark()
        for _ in range(repeats):
            call()
        end = timer.mark()
        timer.settle(end)
        mean = np.array([[timer.between_s(start, end) / repeats]])
        return float(_largest(mean, self._groups[item.ranks], self._timer.device)[0, 0])


def _largest(values: NDArray[np.float64], group: Any, device: Any = "cpu") -> NDArray[np.float64]:
    """The largest of all members, each value by itself."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    shared = torch.from_numpy(values).to(device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
    found: NDArray[np.float64] = shared.cpu().numpy()
    return found


def _repeats(nbytes: int) -> int:
    """Enough of the short ones for a median; all members count alike.

    >>> _repeats(1024), _repeats(2**20), _repeats(2**24)
    (20, 12, 6)
    """
    return 20 if nbytes <= 256 * KIB else 12 if nbytes <= 4 * MIB else 6
