"""Pipeline messages of one rank: what it gets from, and sends to, those that hold the neighbouring virtual stages."""

from collections.abc import Sequence
from typing import NamedTuple

from simpar.program.ir import Recv, Send, Sync
from simpar.program.position import Position
from simpar.program.sized import Sized
from simpar.program.writer import Writer
from simpar.schedule.schedule import Action


class _Peer(NamedTuple):
    """The rank that holds a neighbouring virtual stage, and the stream of the messages that it is sent."""

    rank: int
    stage: int
    boundary: int  # the stage before it, of the two
    stream: str


class Messages:
    """Writes the messages around the passes of one rank.

    Args:
        position: the rank.
        sized: what each microbatch runs, which says how large its messages are.
        writer: of the rank's program.
    """

    def __init__(self, position: Position, sized: Sequence[Sized], writer: Writer) -> None:
        self._position = position
        self._sized = sized
        self._writer = writer
        self._step = 0
        schedule = position.schedule
        self._before = {v: self._peer(schedule.before(v), "pp_backward", v - 1) for v in position.held}
        self._after = {v: self._peer(schedule.after(v), "pp_forward", v) for v in position.held}

    def _peer(self, stage: int | None, stream: str, boundary: int) -> _Peer | None:
        """Who holds a virtual stage of this rank's pipeline; None if there is none, or it is this rank."""
        position, schedule = self._position, self._position.schedule
        if stage is None or stage in position.held:
            return None
        # where a V comes back up, messages meet those that go down; neither may wait for the other
        way = "" if schedule.goes_round(boundary) else "_return"
        rank = position.layout.rank(schedule.rank_of_stage[stage], position.replica, position.tp_rank)
        return _Peer(rank, stage, boundary, stream + way)

    def begin_step(self, step: int) -> None:
        """Messages of a step are told from those of the others."""
        self._step = step

    def receive_input(self, action: Action) -> None:
        """What a forward pass begins with."""
        self._receive(action, self._before[action.stage])

    def send_output(self, action: Action) -> None:
        """What it ends with."""
        self._send(action, self._after[action.stage])

    def receive_gradient(self, action: Action) -> None:
        """What a backward pass, or its first half, begins with."""
        self._receive(_whole(action), self._after[action.stage])

    def send_gradient(self, action: Action) -> None:
        """What it ends with, where the stage before this one trains anything."""
        peer = self._before[action.stage]
        if peer is not None and self._position.trains(peer.stage):
            self._send(_whole(action), peer)

    def _receive(self, action: Action, source: _Peer | None) -> None:
        if source is not None:
            self._writer.add(Recv(source.rank, self._tag(action)))
            self._wait_on_host()

    def _send(self, action: Action, target: _Peer | None) -> None:
        """What an action makes goes to the same action of the neighbouring stage."""
        if target is None:
            return
        rank, stage, boundary, stream = target
        self._writer.wait(self._writer.record(), stream)
        tag = self._tag(Action(action.op, stage, action.microbatch))
        nbytes = self._sized[action.microbatch].boundary_bytes[boundary]
        self._writer.add(Send(stream, rank, nbytes, tag, action.microbatch, self._position.copies))
        if not self._position.layout.overlaps_messages:
            self._writer.wait(self._writer.record(stream))
            self._wait_on_host()

    def _tag(self, action: Action) -> Action | tuple[int, Action]:
        """The name of a message; where a program has several steps, they have their own."""
        return (self._step, action) if self._step else action

    def _wait_on_host(self) -> None:
        if self._position.layout.framework.host_waits_for_messages:
            self._writer.add(Sync())


def _whole(backward: Action) -> Action:
    """The backward pass that an action is, or is the first half of; messages are known by it."""
    return backward if backward.op == "B" else backward._replace(op="B")
