"""One clock for all ranks, and a common start of every step.

Processes of one machine read the same monotonic clock. Between machines the distance of the clocks is estimated as NTP
does: of several round trips, the fastest tells most, and the peer's clock is taken to be read at its middle.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

_LEAD_NS = 2_000_000  # from the agreement on a start to the start: more than it takes all ranks to hear of it
_SPIN_NS = 200_000  # the last bit is not slept, so that the start is met to a microsecond
_ROUNDS = 20


def offset_ns(exchange: Callable[[], int], now: Callable[[], int] = perf_counter_ns, rounds: int = _ROUNDS) -> int:
    """What to add to the own clock to get the peer's.

    Args:
        exchange: asks the peer for its time and returns it.
        now: the own clock.
        rounds: how often to ask.
    """
    best: tuple[int, int] | None = None
    for _ in range(rounds):
        asked = now()
        theirs = exchange()
        answered = now()
        best = min(best or (answered - asked, 0), (answered - asked, theirs - (asked + answered) // 2))
    assert best is not None
    return best[1]


class Clock:
    """The clock of the group's first rank, as this rank reads it.

    Args:
        control: a gloo group of all ranks of the program; its first rank is 0.
        rank: of this process.
        size: of the group.
    """

    def __init__(self, control: "dist.ProcessGroup", rank: int, size: int) -> None:
        self._control = control
        self.offset_ns = self._offset(rank, size)

    def _offset(self, rank: int, size: int) -> int:
        import torch.distributed as dist  # noqa: PLC0415

        machines: list[Any] = [None] * size
        dist.all_gather_object(machines, _machine(), group=self._control)
        found = 0
        for peer in range(1, size):
            if machines[peer] == machines[0]:
                continue
            if rank == 0:
                _answer(self._control, peer)
            elif rank == peer:
                found = offset_ns(lambda: _ask(self._control))
        return found

    def common_start_ns(self) -> int:
        """Agrees with all ranks on a moment just ahead, waits for it, and returns it as the common clock reads it."""
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        start = torch.tensor([perf_counter_ns() + self.offset_ns + _LEAD_NS])
        dist.all_reduce(start, op=dist.ReduceOp.MAX, group=self._control)
        common = int(start)
        left = common - self.offset_ns - perf_counter_ns()
        if left > _SPIN_NS:
            sleep((left - _SPIN_NS) * 1e-9)
        while perf_counter_ns() + self.offset_ns < common:
            pass
        return common


def _machine() -> tuple[str, str]:
    """Name and boot of this machine: equal for processes that share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot.read_text() if boot.exists() else ""


def _ask(control: "dist.ProcessGroup") -> int:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    time = torch.zeros(1, dtype=torch.int64)
    dist.send(time, 0, group=control)
    dist.recv(time, 0, group=control)
    return int(time)


def _answer(control: "dist.ProcessGroup", peer: int) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    for _ in range(_ROUNDS):
        time = torch.zeros(1, dtype=torch.int64)
        dist.recv(time, peer, group=control)
        time[0] = perf_counter_ns()
        dist.send(time, peer, group=control)
