"""A GPU on the clock: in-order streams fed by one host, and a compute stream that slows while collectives run.

The host never waits for the device within a step, so the time at which it has issued each instruction is known
beforehand (``issue_ns``); a kernel starts when its stream is free *and* it was issued, which is how a launch-bound
step comes about.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import simpy

from simpar.engine.network import Flow, Link, Network
from simpar.engine.price import OperationPrice
from simpar.engine.rows import CATEGORY, Label, Recorder, Row, RunRow
from simpar.program.ir import COMPUTE
from simpar.trace.trace import NONE

RUN, RECORD, WAIT, RECV, SEND, COLLECTIVE, ALLOC = range(7)
_ACTIVATIONS = CATEGORY["activations"]
_DONE = 1e-6  # nanoseconds of work that only rounding leaves over


@dataclass(slots=True)
class Step:
    """One instruction, resolved: what a stream executes without looking anything up.

    ``work_ns`` is the time on the device (or on the links) when undisturbed, ``bound_ns`` the earliest end after the
    host begins to issue, ``value`` the FLOP or bytes.
    """

    code: int
    issue_ns: int = 0
    label: Label = Label()
    work_ns: int = 0
    bound_ns: int = 0
    latency_ns: int = 0
    value: float = 0.0
    event: int = NONE
    category: int = NONE
    transient_bytes: int = 0
    opened: int = NONE  # number of the opened run that it belongs to
    price: OperationPrice | None = None
    loads: "list[tuple[Link, float, int]] | None" = None
    meeting: "Meeting | None" = None
    mail: "Mail | None" = None
    text: str = ""


@dataclass(slots=True)
class Meeting:
    """A collective that waits for its last member."""

    expected: int
    op: str
    loads: "list[tuple[Link, float, int]]"
    arrived: "list[tuple[Gpu, Step]]" = field(default_factory=list)
    finished: simpy.Event | None = None
    start_ns: int = 0


@dataclass(slots=True)
class Mail:
    """One message: sent or not, received or not, and who waits for which."""

    row: int = NONE
    posted: bool = False
    sender: simpy.Event | None = None
    receiver: simpy.Event | None = None
    box: "Mailbox | None" = None


@dataclass(slots=True)
class Mailbox:
    """The bounded buffer of a receiver for one direction."""

    free: int
    waiting: list[simpy.Event] = field(default_factory=list)


class Gpu:
    """One simulated rank: its events, its compute rate, its streams as SimPy processes."""

    def __init__(
        self,
        env: simpy.Environment,
        network: Network,
        recorder: Recorder,
        *,
        rank: int,
        compute_rate: float,
        collective_rate: float,
        rendezvous: bool,
    ) -> None:
        self.env = env
        self.network = network
        self.recorder = recorder
        self.rank = rank
        self.events: list[Any] = []  # per event: None, an Event that somebody waits for, or the span that recorded it
        self.rendezvous = rendezvous
        self.where: dict[str, Step] = {}
        self._compute_rate = compute_rate
        self._collective_rate = collective_rate
        self._flows: list[Flow] = []
        self._computing = True
        self._left = 0.0  # work of the present operation that is not done, as of _since
        self._since = 0
        self._disturbed = False
        self._waker: simpy.Event | None = None
        self._version = 0

    # ---- compute beside collectives -------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Books the compute work done since the last change of rate."""
        now = self.env.now
        rate = self._compute_rate if self._flows else 1.0
        self._left = max(self._left - (now - self._since) * rate, 0.0)
        self._since = now
        self._disturbed = True

    def begin_collective(self, flow: Flow) -> None:
        """Compute slows from now on; the flow slows while compute runs."""
        self._advance()
        self._flows.append(flow)
        if self._computing and self._collective_rate < 1:
            self.network.set_limit(flow, self._collective_rate)
        self._arm()

    def end_collective(self, flow: Flow) -> None:
        """Undoes :meth:`begin_collective`."""
        self._advance()
        self._flows.remove(flow)
        self._arm()

    def _set_computing(self, computing: bool) -> None:
        self._computing = computing
        if self._collective_rate < 1:
            for flow in self._flows:
                self.network.set_limit(flow, self._collective_rate if computing else 1.0)

    def _arm(self) -> None:
        """Wakes a slowed operation when its work is done, at the present rate."""
        if self._waker is None:
            return
        self._version = version = self._version + 1
        timeout = self.env.timeout(ceil(self._left / (self._compute_rate if self._flows else 1.0) - 1e-6))
        assert timeout.callbacks is not None
        timeout.callbacks.append(lambda _: self._fire(version))

    def _fire(self, version: int) -> None:
        if version == self._version and self._waker is not None:
            waker, self._waker = self._waker, None
            waker.succeed()

    # ---- streams ----------------------------------------------------------------------------------------------------

    def stream(self, name: str, lane: int, steps: list[Step]) -> Generator[simpy.Event, Any, None]:
        """The process of one stream: executes its steps in order."""
        env, events, rows = self.env, self.events, self.recorder.rows
        last = NONE  # row of what this stream executed last: what a record marks
        cause = NONE  # row whose end let the stream go on
        for step in steps:
            code = step.code
            if code == RUN:
                start, work = env.now, step.work_ns
                bound = step.issue_ns + step.bound_ns - start
                if self._flows:
                    yield from self._run_slowed(work)
                    gpu_ns = env.now - start
                else:
                    gpu_ns = work
                    self._left, self._since, self._disturbed = float(work), start, False
                    yield env.timeout(work if work > bound else bound)
                    if self._disturbed:
                        self._advance()
                        if self._left > _DONE:
                            yield from self._run_slowed(self._left)
                            gpu_ns = env.now - start
                if env.now - start < bound:
                    yield env.timeout(bound - (env.now - start))
                last = self._record_run(step, lane, start, gpu_ns, cause)
                cause = last
            elif code == RECORD:
                waiting = events[step.event]
                events[step.event] = last
                if waiting is not None:
                    waiting.succeed(last)
            elif code == WAIT:
                state = events[step.event]
                if state is None:
                    state = events[step.event] = env.event()
                if type(state) is not int:
                    cause = yield from self._blocked(name, step, state)
            elif code == RECV:
                cause = yield from self._receive(name, step, cause)
            elif code == ALLOC:
                self.recorder.memory.append((env.now, self.rank, step.category, int(step.value)))
            else:
                if step.issue_ns > env.now:
                    yield env.timeout(step.issue_ns - env.now)
                transfer = self._send if code == SEND else self._collective
                start = yield from transfer(name, step)
                last = len(rows)
                rows.append(Row(start, env.now, lane, step.label, step.value, cause, step.opened))
                cause = last
                if code == SEND:
                    self._deliver(step, last)

    def _record_run(self, step: Step, lane: int, start: int, gpu_ns: int, cause: int) -> int:
        recorder, now = self.recorder, self.env.now
        row = len(recorder.rows)
        recorder.rows.append(Row(start, now, lane, step.label, step.value, cause, step.opened))
        if step.price is not None:
            recorder.runs.append(RunRow(row, step.price, step.issue_ns, gpu_ns, now - start - gpu_ns))
        if step.transient_bytes:
            recorder.memory.append((start, self.rank, _ACTIVATIONS, step.transient_bytes))
            recorder.memory.append((now, self.rank, _ACTIVATIONS, -step.transient_bytes))
        return row

    def _blocked(self, name: str, step: Step, event: simpy.Event) -> Generator[simpy.Event, Any, int]:
        """Waits, and leaves word of it for a deadlock report; returns the row that ended the wait."""
        self.where[name] = step
        if name == COMPUTE:
            self._set_computing(False)
        row: int = yield event
        if name == COMPUTE:
            self._set_computing(True)
        del self.where[name]
        return row

    def _run_slowed(self, work: float) -> Generator[simpy.Event, Any, None]:
        self._left, self._since = float(work), self.env.now
        self._waker = waker = self.env.event()
        self._arm()
        yield waker

    def _receive(self, name: str, step: Step, cause: int) -> Generator[simpy.Event, Any, int]:
        mail = step.mail
        assert mail is not None
        mail.posted = True
        if mail.row == NONE:
            if mail.sender is not None:
                mail.sender.succeed(NONE)
            mail.receiver = self.env.event()
            cause = yield from self._blocked(name, step, mail.receiver)
        if mail.box is not None:
            mail.box.free += 1
            if mail.box.waiting:
                mail.box.waiting.pop(0).succeed(NONE)
        return cause

    def _send(self, name: str, step: Step) -> Generator[simpy.Event, Any, int]:
        """Transfers a message as soon as its receiver has room (or is there); returns when the transfer began."""
        mail, env = step.mail, self.env
        assert mail is not None
        if self.rendezvous and not mail.posted:
            mail.sender = env.event()
            yield from self._blocked(name, step, mail.sender)
        if mail.box is not None:
            while mail.box.free == 0:
                room = env.event()
                mail.box.waiting.append(room)
                yield from self._blocked(name, step, room)
            mail.box.free -= 1
        start = env.now
        yield self.network.transfer(step.latency_ns, step.work_ns, step.loads or []).done
        return start

    @staticmethod
    def _deliver(step: Step, row: int) -> None:
        assert step.mail is not None
        step.mail.row = row
        if step.mail.receiver is not None:
            step.mail.receiver.succeed(row)

    def _collective(self, name: str, step: Step) -> Generator[simpy.Event, Any, int]:
        """Meets the other members; the last to arrive starts the transfer for all. Returns when it began."""
        meeting = step.meeting
        assert meeting is not None
        meeting.arrived.append((self, step))
        if len(meeting.arrived) < meeting.expected:
            if meeting.finished is None:
                meeting.finished = self.env.event()
            yield from self._blocked(name, step, meeting.finished)
            return meeting.start_ns
        meeting.start_ns = self.env.now
        loads = [*meeting.loads, *(load for _, member in meeting.arrived for load in member.loads or ())]
        flow = self.network.transfer(step.latency_ns, step.work_ns, loads)
        for gpu, _ in meeting.arrived:
            gpu.begin_collective(flow)
        yield flow.done
        for gpu, _ in meeting.arrived:
            gpu.end_collective(flow)
        if meeting.finished is not None:
            meeting.finished.succeed(NONE)
        return meeting.start_ns
