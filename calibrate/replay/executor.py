"""Executes the steps of one rank on its adapter, and times them."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from itertools import cycle
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from calibrate.replay.adapter import Adapter, Call
from calibrate.replay.kernels import Kernels
from calibrate.replay.steps import (
    Begin,
    Communicator,
    End,
    Letter,
    Listing,
    ReplayError,
    Step,
    Way,
    communicator,
    pair,
)
from simpar.program.ir import COMPUTE, Alloc, Collective, Launch, Record, Recv, Send, Sync, Wait
from simpar.trace.trace import IntColumn

if TYPE_CHECKING:
    import torch.distributed as dist

_UNTIMED = -1


class Communicators:
    """The process groups of one program; use it as a context manager, which gives them back.

    Every process of the job makes it, in the same order of groups, whether it is a member or not.

    Args:
        wanted: the groups.
        backend: of all of them but the control group, which :attr:`control` is.
        size: ranks of the program.
        timeout_s: seconds that a collective may take.

    Raises:
        ReplayError: this torch has no such back end.
    """

    def __init__(self, wanted: Iterable[Communicator], backend: str, size: int, timeout_s: float) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        if not dist.is_backend_available(backend):
            raise ReplayError(
                f"this torch was built without the communication back end '{backend}'; install a build that has it, or "
                "replay with adapter='cpu'"
            )
        timeout = timedelta(seconds=timeout_s)
        self.control = dist.new_group(list(range(size)), timeout=timeout, backend="gloo")
        self._made = {group: dist.new_group(list(group.ranks), timeout=timeout, backend=backend) for group in wanted}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import torch.distributed as dist  # noqa: PLC0415

        if error is not None:
            return  # peers would fail at once for want of this rank, and their failures would hide the reason
        for group in (*self._made.values(), self.control):
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)

    def __getitem__(self, group: Communicator) -> "dist.ProcessGroup":
        found: dist.ProcessGroup = self._made[group]
        return found


class Executor:
    """One rank of a program on one device: buffers and calls are made once, and every step uses them.

    Args:
        listing: the program.
        rank: which of its ranks.
        adapter: the device.
        groups: its process groups, all made.
    """

    def __init__(self, listing: Listing, rank: int, adapter: Adapter, groups: Communicators) -> None:
        self._listing, self._rank, self._adapter = listing, rank, adapter
        self._steps = listing.steps[rank]
        self._program = listing.program
        self._compute = adapter.stream(COMPUTE)
        self._streams: dict[Any, Any] = {COMPUTE: self._compute}
        self._kernels = Kernels(adapter.device)
        self._transfers = Transfers(self._kernels, groups)
        self._inbox = self._expected()
        with adapter.using(self._compute):
            self._calls = [self._call(step) for step in self._steps]
            self._receives = {letter: self._transfers.receive(letter) for way in self._inbox.values() for letter in way}
        self._marks: dict[int, tuple[Any, Any]] = {}

    def step(self, begin: Callable[[], None]) -> IntColumn:
        """Executes the program once.

        Args:
            begin: returns when all ranks start.

        Returns:
            Start and end of every step of the listing in nanoseconds of :func:`time.perf_counter_ns`, shape
            (2, steps); -1 where nothing is timed. A receive is on its way from start to end.
        """
        self._marks = {}
        self._adapter.run(self._issue, begin)
        times = np.full((2, len(self._steps)), _UNTIMED, np.int64)
        for index, marks in self._marks.items():
            times[:, index] = [self._adapter.read_ns(mark) for mark in marks]
        return times

    def _issue(self) -> None:
        """Gives all work to the streams, in host order."""
        adapter, compute, marks = self._adapter, self._compute, self._marks
        events: dict[Hashable, Any] = {}
        mail = _Mail(self._inbox, self._program.stage_sync == "condition_variable", self._program.stage_buffer)
        for index, (step, call) in enumerate(zip(self._steps, self._calls, strict=True)):
            match step:
                case Launch():
                    marks[index] = adapter.launch(compute, call)
                case Collective():
                    marks[index] = adapter.launch(self._stream(step.group.stream), call)
                case Send():
                    marks[index] = adapter.launch(self._stream(step.stream), call)
                case Recv():
                    self._receive(step, index, mail)
                case Record():
                    events[step.event] = adapter.record(self._stream(step.stream))
                case Wait():
                    adapter.wait(self._stream(step.stream), events[step.event])
                case Sync():
                    adapter.wait_on_host(compute)
                case Alloc() | Begin() | End():
                    mark = adapter.mark(compute)
                    marks[index] = (mark, mark)

    def _receive(self, step: Recv, index: int, mail: "_Mail") -> None:
        """Posts what must have come in before, in the sender's order, and lets the compute stream wait for its own."""
        adapter = self._adapter
        wanted = self._listing.letters[self._rank, step.tag]
        stream = self._stream(wanted.way)
        for letter in mail.post(wanted):
            room = mail.room(letter)
            if mail.rendezvous:
                room = adapter.record(self._compute)
            if room is not None:
                adapter.wait(stream, room)
            mail.posted[letter] = adapter.launch(stream, self._receives[letter])
            mail.arrived[letter] = adapter.record(stream)
        adapter.wait(self._compute, mail.arrived[wanted])
        self._marks[index] = mail.posted[wanted]
        if mail.buffer is not None:
            mail.taken[wanted] = adapter.record(self._compute)

    def _stream(self, name: Any) -> Any:
        if name not in self._streams:
            self._streams[name] = self._adapter.stream(str(name))
        return self._streams[name]

    def _call(self, step: Step) -> Call:
        match step:
            case Launch():
                return self._kernels.call(step)
            case Collective():
                return self._transfers.collective(step)
            case Send():
                return self._transfers.send(self._listing.letters[step.peer, step.tag])
            case _:
                return _nothing

    def _expected(self) -> dict[Way, list[Letter]]:
        """What comes in along each direction, in the sender's order."""
        found: dict[Way, list[Letter]] = {}
        for letter in sorted(self._listing.letters.values(), key=lambda letter: letter.number):
            if letter.way.target == self._rank:
                found.setdefault(letter.way, []).append(letter)
        return found


class _Mail:
    """Receives of one step: which are posted, which buffers are free.

    ``buffer`` messages may be in at a time, or any number if it is None; with ``rendezvous`` a transfer begins only
    once the compute stream is there to take it.
    """

    def __init__(self, inbox: Mapping[Way, list[Letter]], rendezvous: bool, buffer: int | None) -> None:
        self.rendezvous, self.buffer = rendezvous, buffer
        self.posted: dict[Letter, tuple[Any, Any]] = {}
        self.arrived: dict[Letter, Any] = {}
        self.taken: dict[Letter, Any] = {}
        self._inbox = inbox
        self._next: Counter[Way] = Counter()

    def post(self, wanted: Letter) -> list[Letter]:
        """Messages up to the wanted one that are not posted yet."""
        first = self._next[wanted.way]
        self._next[wanted.way] = max(first, wanted.number + 1)
        return self._inbox[wanted.way][first : wanted.number + 1]

    def room(self, letter: Letter) -> Any:
        """The event that frees the letter's buffer, if it has to wait for one."""
        if self.buffer is None or letter.number < self.buffer:
            return None
        return self.taken.get(self._inbox[letter.way][letter.number - self.buffer])


class Transfers:
    """Communication calls on buffers of their own; two of each size take turns."""

    def __init__(self, kernels: Kernels, groups: Communicators) -> None:
        self._kernels, self._groups = kernels, groups
        self._buffers: dict[tuple[Any, int], Any] = {}

    def send(self, letter: Letter) -> Call:
        """Sends a message; the back end matches it by its number."""
        return self._message("isend", letter, letter.way.target)

    def receive(self, letter: Letter) -> Call:
        """Receives a message."""
        return self._message("irecv", letter, letter.way.source)

    def _message(self, op: str, letter: Letter, peer: int) -> Call:
        import torch.distributed as dist  # noqa: PLC0415

        group = self._groups[pair(letter.way)]
        buffer = self._buffer((op, letter.way), elements(letter.nbytes, 1))
        return partial(getattr(dist, op), buffer, peer, group=group, tag=letter.number)

    @staticmethod
    def _shift(mine: Any, theirs: Any, members: Any, group: Any) -> Call:
        """Sends to the next rank of the group and receives from the one before."""
        import torch.distributed as dist  # noqa: PLC0415

        ranks = tuple(members.ranks)
        at = ranks.index(dist.get_rank())
        ahead, behind = ranks[(at + 1) % len(ranks)], ranks[at - 1]

        def run() -> Any:
            operations = [dist.P2POp(dist.isend, mine, ahead, group), dist.P2POp(dist.irecv, theirs, behind, group)]
            return _Both(dist.batch_isend_irecv(operations))

        return run

    def collective(self, step: Collective) -> Call:
        """A collective of so many bytes, counted as :class:`simpar.program.ir.Collective` says."""
        import torch.distributed as dist  # noqa: PLC0415

        members = communicator(step)
        group = self._groups[members]
        size = len(members.ranks)
        whole = self._buffer((step.op, members, "whole"), elements(step.nbytes, size))
        options: dict[str, Any] = {"group": group, "async_op": True}
        match step.op:
            case "all_reduce":
                return partial(dist.all_reduce, whole, **options)
            case "broadcast":
                return partial(dist.broadcast, whole, members.ranks[0], **options)
            case "shift":
                return self._shift(whole, self._buffer((step.op, members, "output"), whole.numel()), members, group)
            case "all_to_all":
                other = self._buffer((step.op, members, "output"), whole.numel())
                return partial(dist.all_to_all_single, other, whole, **options)
        part = self._buffer((step.op, members, "part"), whole.numel() // size)
        if step.op == "all_gather":
            # torch 2.13 renamed both
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return partial(gather, whole, part, **options)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return partial(scatter, part, whole, **options)

    def _buffer(self, use: Any, count: int) -> Any:
        if (use, count) not in self._buffers:
            self._buffers[use, count] = cycle([self._kernels.allocate((count,)) for _ in range(2)])
        return next(self._buffers[use, count])


def elements(nbytes: float, parts: int) -> int:
    """fp32 elements that carry so many bytes, rounded up to whole ones and to equal parts.

    >>> elements(16, 2), elements(17, 2), elements(0, 4)
    (4, 6, 4)
    """
    count = max(1, -int(-nbytes // 4))
    return -(-count // parts) * parts


def _nothing() -> None:
    """Steps that are no work of a stream."""


class _Both:
    """Two halves of one exchange, waited for together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Waits for both."""
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """Whether both are done."""
        return all(work.is_completed() for work in self._works)
