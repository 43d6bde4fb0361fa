"""What let each span start: a program tells what a trace does not.

Streams are in-order, so each got to an instruction when the last of what it had to wait for was over: the span before
it, the events and the messages in between. The same holds of a receiver that a message waits for, of the members of a
collective, and of the host where it waits for the device. Nothing is guessed from spans that end at the same instant.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simpar.program.ir import (
    COMPUTE,
    Alloc,
    Collective,
    Delay,
    Group,
    HostWork,
    Launch,
    RankProgram,
    Record,
    Recv,
    Run,
    Send,
    Sync,
    Wait,
)
from simpar.sensitivity.blocks import Blocks
from simpar.sensitivity.prices import Prices
from simpar.sensitivity.steps import Steps
from simpar.trace.critical_path import Causes, HostStart
from simpar.trace.trace import NONE
from simpar.units import ns


def causes_of(steps: Steps, prices: Prices, blocks: Blocks) -> Causes:
    """What let the spans of a trace start, the host's waits for the device included."""
    waits = Waits(steps, prices, blocks)
    return Causes(steps.trace, waits.began, waits.cause)


class _HostWait(NamedTuple):
    """A place at which a host waits for its compute stream: what that had got to, and calls and delays before it."""

    row: int
    launches: int
    delay_ns: int


@dataclass(slots=True)
class _Rank:
    """A rank on the way through its instructions: what let its streams get where they are, and its host's way so far.

    Attributes:
        reached: by stream, the row that ended last of all that it had to wait for.
        events: the same by event, of the stream that recorded it.
        delay_ns: time that the host spent on other things.
        waits: of the host, so far.
    """

    reached: defaultdict[str, int] = field(default_factory=lambda: defaultdict(lambda: NONE))
    events: dict[Hashable, int] = field(default_factory=dict)
    delay_ns: int = 0
    waits: tuple[_HostWait, ...] = ()


class Waits:
    """Follows every rank through its program, beside the trace.

    Args:
        steps: program and trace.
        prices: on the machine of the trace.
        blocks: run there alone.
    """

    def __init__(self, steps: Steps, prices: Prices, blocks: Blocks) -> None:
        self._steps = steps
        self._prices = prices
        self._blocks = blocks
        spans = steps.trace.spans
        self._start: list[int] = spans.start_ns.tolist()
        self._end: list[int] = spans.end_ns.tolist()
        rows = len(steps.of)
        self._ready = [NONE] * rows  # what let the row's stream get to it
        self._host: list[tuple[int, tuple[_HostWait, ...]]] = [(0, ())] * rows  # delays and waits before it
        self._members: defaultdict[tuple[Group, int], list[int]] = defaultdict(list)
        self._posted: dict[tuple[int, Hashable], int] = {}  # receiver and tag -> what let the receiver get there
        self._taken: dict[tuple[int, str, int], int] = {}  # receiver, stream and instant -> what let it take a message
        lanes: dict[tuple[int, str], list[int]] = defaultdict(list)
        for row, step in enumerate(steps.of):
            lane = steps.trace.lanes[spans.lane[row]]
            lanes[lane.rank, lane.stream].append(row)
            if isinstance(step.instruction, Collective):
                self._members[step.instruction.group, step.turn].append(row)
        self._mail = {
            (receiver, step.instruction.tag): row
            for row, step in enumerate(steps.of)
            if isinstance(step.instruction, Send)
            for receiver, _ in step.instruction.parts
        }
        for rank in steps.program.ranks:
            self._follow(rank, lanes)

    def ready(self, row: int) -> int:
        """The span whose end let the stream of ``row`` get to it, or -1; its host may have come later."""
        return self._ready[row]

    def cause(self, row: int) -> int:
        """The span whose end let ``row`` start, or -1: its host had just issued it, or it starts the step."""
        instruction, start = self._steps.of[row].instruction, self._start[row]
        if start == 0:
            return NONE
        for member in self._together(row):
            if self._ends_at(self._ready[member], start):
                return self._ready[member]
        if isinstance(instruction, Send):
            for receiver, _ in instruction.parts:
                posted = self._posted.get((receiver, instruction.tag), NONE)
                if self._steps.program.stage_sync == "condition_variable" and self._ends_at(posted, start):
                    return posted
            if self._steps.program.stage_buffer is not None:
                return self._taken.get((instruction.peer, instruction.stream, start), NONE)
        return NONE

    def began(self, row: int) -> HostStart:
        """Since when the host of a span that waited for it issued without a break.

        All that a host issues after a wait is late by the same time, that of the wait that delayed it most.
        """
        row = self._issuer(row)
        launch_ns, step, (delay_ns, waits) = self._prices.launch_ns, self._steps.of[row], self._host[row]
        calls = step.launches + (step.instruction.launches if isinstance(step.instruction, Launch) else 0)
        late = self._issued(row) - step.launches * launch_ns - delay_ns
        for wait in reversed(waits):
            if late > 0 and self._end[wait.row] - wait.launches * launch_ns - wait.delay_ns == late:
                return HostStart(self._end[wait.row], wait.row, calls - wait.launches)
        return HostStart(calls=calls)

    def _together(self, row: int) -> Sequence[int]:
        """The row, or all members of its collective."""
        step = self._steps.of[row]
        is_collective = isinstance(step.instruction, Collective)
        return self._members[step.instruction.group, step.turn] if is_collective else (row,)  # type: ignore[union-attr]

    def _ends_at(self, row: int, time_ns: int) -> bool:
        return row != NONE and self._end[row] == time_ns

    def _issuer(self, row: int) -> int:
        """The row, or the member of its collective that was issued last."""
        return max(self._together(row), key=lambda member: (self._earliest_ns(member), -member))

    def _earliest_ns(self, row: int) -> int:
        """When the host issued a row if none but the longest of its waits counts."""
        launch_ns, (delay_ns, waits) = self._prices.launch_ns, self._host[row]
        late = max((self._end[w.row] - w.launches * launch_ns - w.delay_ns for w in waits), default=0)
        return self._steps.of[row].launches * launch_ns + delay_ns + max(late, 0)

    def _issued(self, row: int) -> int:
        """When the host had issued the span, or began to if it is compute."""
        step = self._steps.of[row]
        if isinstance(step.instruction, Run):
            issued = self._blocks.issued(step.instruction.operation, self._prices.kind_of(step.rank))
            return self._end[row] - issued.length_ns
        own = step.instruction.launches if isinstance(step.instruction, Launch) else 0
        return self._start[row] - own * self._prices.launch_ns

    # ---- along the program ------------------------------------------------------------------------------------------

    def _follow(self, program: RankProgram, lanes: "dict[tuple[int, str], list[int]]") -> None:
        rank, at = program.rank, _Rank()
        rows = {stream: iter(mine) for (owner, stream), mine in lanes.items() if owner == rank}
        launches = 0
        for instruction in program.instructions:
            if isinstance(instruction, Record):
                at.events[instruction.event] = at.reached[instruction.stream]
            elif isinstance(instruction, Wait):
                self._wait(at, instruction.stream, at.events.get(instruction.event, NONE))
            elif isinstance(instruction, Recv):
                self._receive(at, rank, instruction)
                launches += instruction.launches
            elif isinstance(instruction, Delay):
                at.delay_ns += ns(instruction.delay_s)
            elif isinstance(instruction, Sync):
                if at.reached[COMPUTE] != NONE:
                    at.waits = (*at.waits, _HostWait(at.reached[COMPUTE], launches, at.delay_ns))
            elif not isinstance(instruction, Alloc):
                stream = _stream(instruction)
                row = next(rows[stream])
                self._ready[row], self._host[row] = at.reached[stream], (at.delay_ns, at.waits)
                at.reached[stream] = row
                launches = self._steps.launches_after(row)

    def _wait(self, at: _Rank, stream: str, row: int) -> None:
        """The stream got further when the row ended, unless something else kept it longer."""
        before = at.reached[stream]
        if row != NONE and (before == NONE or self._end[row] >= self._end[before]):
            at.reached[stream] = row

    def _receive(self, at: _Rank, rank: int, recv: Recv) -> None:
        self._posted[rank, recv.tag] = at.reached[COMPUTE]
        row = self._mail.get((rank, recv.tag), NONE)
        self._wait(at, COMPUTE, row)
        if row != NONE and at.reached[COMPUTE] != NONE:
            sent, took = self._steps.of[row].instruction, at.reached[COMPUTE]
            assert isinstance(sent, Send), "mail is sent"
            self._taken[sent.peer, sent.stream, self._end[took]] = took


def _stream(instruction: "Run | Launch | Collective | Send | HostWork") -> str:
    """The stream that executes what leaves a span."""
    if isinstance(instruction, (Run, Launch)):
        return COMPUTE
    return instruction.group.stream if isinstance(instruction, Collective) else instruction.stream
