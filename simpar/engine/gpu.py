"""A GPU on the clock: in-order streams fed by one host, and a compute stream that slows while collectives run.

The host never waits for the device within a step, so the time at which it has issued each instruction is known
beforehand (``issue_ns``); a kernel starts when its stream is free *and* it was issued, which is how a launch-bound
step comes about.
"""

from collections.abc import Generator, Hashable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

import simpy

from simpar.engine.clock import Clock
from simpar.engine.network import Flow, LinkLoad, Network
from simpar.engine.price import OperationPrice
from simpar.engine.rows import CATEGORY, Label, Recorder, Row, RunRow
from simpar.program.ir import COMPUTE
from simpar.trace.trace import NONE

_ACTIVATIONS = CATEGORY["activations"]
_DONE = 1e-6  # nanoseconds of work that only rounding leaves over


class RunStep(NamedTuple):
    """Compute: an operation (with its price) or a single kernel.

    ``gpu_ns`` is its time on the device when undisturbed, ``host_ns`` its earliest end after ``issue_ns``, when the
    host begins to issue it.
    """

    label: Label
    issue_ns: int
    gpu_ns: int
    host_ns: int
    flop: float
    price: OperationPrice | None
    transient_bytes: int
    opened: int


class RecordStep(NamedTuple):
    """Marks an event."""

    event: int


class WaitStep(NamedTuple):
    """Waits for an event."""

    event: int
    name: str


class ReceiveStep(NamedTuple):
    """Waits for a message."""

    mail: "Mail"


class AllocStep(NamedTuple):
    """Takes or gives back memory."""

    category: int
    nbytes: int


class SendStep(NamedTuple):
    """Sends a message once it was issued and its receiver can take it."""

    label: Label
    issue_ns: int
    nbytes: float
    latency_ns: int
    stream_ns: int
    loads: list[LinkLoad]
    mail: "Mail"


class MeetStep(NamedTuple):
    """Takes part in a collective once it was issued."""

    label: Label
    issue_ns: int
    nbytes: float
    latency_ns: int
    stream_ns: int
    loads: list[LinkLoad]
    meeting: "Meeting"
    opened: int


Step = RunStep | RecordStep | WaitStep | ReceiveStep | AllocStep | SendStep | MeetStep


@dataclass(slots=True)
class Meeting:
    """A collective that waits for its last member."""

    op: str
    title: str
    expected: int
    loads: list[LinkLoad]
    arrived: "list[tuple[Gpu, MeetStep]]" = field(default_factory=list)
    finished: simpy.Event | None = None
    start_ns: int = 0


class Mail:
    """One message: its row once delivered, whether its receiver is there, and who waits for which."""

    __slots__ = ("box", "posted", "receiver", "row", "sender", "source", "tag", "target")

    def __init__(self, source: int, target: int, tag: Hashable) -> None:
        self.source, self.target, self.tag = source, target, tag
        self.row = NONE
        self.posted = False
        self.sender: simpy.Event | None = None
        self.receiver: simpy.Event | None = None
        self.box: Mailbox | None = None


@dataclass(slots=True)
class Mailbox:
    """The bounded buffer of a receiver for one direction."""

    free: int
    waiting: list[simpy.Event] = field(default_factory=list)


def awaited(step: Step) -> str:
    """What a blocked step waits for, in words."""
    match step:
        case WaitStep(name=name):
            return f"event '{name}'"
        case ReceiveStep(mail=mail):
            return f"message '{mail.tag}' from rank {mail.source}"
        case SendStep(mail=mail):
            return f"rank {mail.target} to take message '{mail.tag}'"
        case MeetStep(meeting=meeting):
            missing = meeting.expected - len(meeting.arrived)
            return f"{missing} more of {meeting.expected} members of {meeting.title}"
        case _:
            return "nothing"


class Gpu:
    """One simulated rank: its events, its compute rate, its streams as SimPy processes."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        recorder: Recorder,
        *,
        rank: int,
        compute_rate: float,
        collective_rate: float,
        rendezvous: bool,
    ) -> None:
        self.clock = clock
        self.network = network
        self.recorder = recorder
        self.rank = rank
        self.events: list[Any] = []  # per event: None, an Event that somebody waits for, or the row that recorded it
        self.blocked: dict[str, Step] = {}  # stream -> the step at which it waits
        self._rendezvous = rendezvous
        self._compute_rate = compute_rate
        self._collective_rate = collective_rate
        self._flows: list[Flow] = []
        self._computing = True
        self._left = 0.0  # work of the present operation that is not done, as of _since
        self._since = 0
        self._disturbed = False
        self._waker: simpy.Event | None = None
        self._version = 0

    # ---- compute beside collectives ---------------------------------------------------------------------------------

    def begin_collective(self, flow: Flow) -> None:
        """Compute slows from now on; the flow slows while compute runs."""
        self._advance()
        self._flows.append(flow)
        if self._computing:
            self._slow(flow, 1)
        self._arm()

    def end_collective(self, flow: Flow) -> None:
        """Undoes :meth:`begin_collective`."""
        self._advance()
        self._flows.remove(flow)
        self._arm()

    def _slow(self, flow: Flow, change: int) -> None:
        """One more (or less) of the flow's members computes; a collective is as slow as its slowest member."""
        if self._collective_rate < 1:
            flow.slowed_by += change
            self.network.set_limit(flow, self._collective_rate if flow.slowed_by else 1.0)

    def _advance(self) -> None:
        """Books the compute work done since the last change of rate."""
        now = self.clock.ns
        rate = self._compute_rate if self._flows else 1.0
        self._left = max(self._left - (now - self._since) * rate, 0.0)
        self._since = now
        self._disturbed = True

    def _arm(self) -> None:
        """Wakes a slowed operation when its work is done, at the present rate."""
        if self._waker is None:
            return
        self._version = version = self._version + 1
        rate = self._compute_rate if self._flows else 1.0
        self.clock.after(ceil(self._left / rate - 1e-6), lambda _: self._fire(version))

    def _fire(self, version: int) -> None:
        if version == self._version and self._waker is not None:
            waker, self._waker = self._waker, None
            waker.succeed()

    def _set_computing(self, computing: bool) -> None:
        if computing != self._computing:
            self._computing = computing
            for flow in self._flows:
                self._slow(flow, 1 if computing else -1)

    # ---- streams ----------------------------------------------------------------------------------------------------

    def stream(  # noqa: PLR0912 - one branch per kind of step; a call per step would cost as much as the step
        self, name: str, lane: int, steps: list[Step]
    ) -> Generator[simpy.Event, Any, None]:
        """The process of one stream: executes its steps in order."""
        clock, events = self.clock, self.events
        cause = NONE  # row whose end let the stream get here: what it executed, or waited for, last
        for step in steps:
            if type(step) is RunStep:
                gpu_ns, waited = step.gpu_ns, 0
                if step.price is None and clock.ns < step.issue_ns + step.host_ns - gpu_ns:
                    waited = yield from self._launched(step)
                start = clock.ns
                bound = step.issue_ns + step.host_ns - start
                if self._flows:
                    yield from self._run_slowed(gpu_ns)
                    gpu_ns = clock.ns - start
                else:
                    self._left, self._since, self._disturbed = float(gpu_ns), start, False
                    yield clock.timeout(gpu_ns if gpu_ns > bound else bound)
                    if self._disturbed:
                        gpu_ns = yield from self._make_up(start, gpu_ns)
                if clock.ns - start < bound:
                    yield clock.timeout(bound - (clock.ns - start))
                cause = self._record_run(step, lane, start, gpu_ns, waited=waited, cause=cause)
            elif type(step) is RecordStep:
                waiting = events[step.event]
                events[step.event] = cause
                if waiting is not None:
                    waiting.succeed(cause)
            elif type(step) is WaitStep:
                state = events[step.event]
                if state is None:
                    state = events[step.event] = clock.event()
                if type(state) is not int:
                    cause = yield from self._wait(name, step, state)
            elif type(step) is ReceiveStep:
                if step.mail.row == NONE or step.mail.box is not None:
                    cause = yield from self._receive(name, step, cause)
            elif type(step) is AllocStep:
                self.recorder.memory.append((clock.ns, self.rank, step.category, step.nbytes))
            elif type(step) is SendStep:
                start = yield from self._send(name, step)
                cause = step.mail.row = self._add(Row(start, clock.ns, lane, step.label, step.nbytes, cause))
                if step.mail.receiver is not None:
                    step.mail.receiver.succeed(cause)
            elif type(step) is MeetStep:
                start = yield from self._meet(name, step)
                row = Row(start, clock.ns, lane, step.label, step.nbytes, cause, step.opened)
                cause = self._add(row)
        if name == COMPUTE:
            self._set_computing(False)

    def _add(self, row: Row) -> int:
        self.recorder.rows.append(row)
        return len(self.recorder.rows) - 1

    def _record_run(self, step: RunStep, lane: int, start: int, gpu_ns: int, *, waited: int, cause: int) -> int:
        recorder, now = self.recorder, self.clock.ns
        row = self._add(Row(start, now, lane, step.label, step.flop, cause, step.opened, waited))
        if step.price is not None:
            recorder.runs.append(RunRow(row, step.price, step.issue_ns, gpu_ns, now - start - gpu_ns))
        if step.transient_bytes:
            recorder.memory.append((start, self.rank, _ACTIVATIONS, step.transient_bytes))
            recorder.memory.append((now, self.rank, _ACTIVATIONS, -step.transient_bytes))
        return row

    def _wait(self, name: str, step: Step, event: simpy.Event) -> Generator[simpy.Event, Any, int]:
        """Waits, and leaves word of it for a deadlock report; returns the row that ended the wait."""
        self.blocked[name] = step
        if name == COMPUTE:
            self._set_computing(False)
        row: int = yield event
        if name == COMPUTE:
            self._set_computing(True)
        del self.blocked[name]
        return row

    def _make_up(self, start: int, gpu_ns: int) -> Generator[simpy.Event, Any, int]:
        """Does the work that collectives left undone; returns the time on the device, from ``start`` on."""
        self._advance()
        if self._left <= _DONE:
            return gpu_ns
        yield from self._run_slowed(self._left)
        return self.clock.ns - start

    def _run_slowed(self, work: float) -> Generator[simpy.Event, Any, None]:
        """Runs work at a rate that may change; :meth:`_arm` finds out when it is done."""
        self._left, self._since = float(work), self.clock.ns
        self._waker = waker = self.clock.event()
        self._arm()
        yield waker

    def _launched(self, step: RunStep) -> Generator[simpy.Event, Any, int]:
        """The device idles until the host has launched a kernel; returns for how long."""
        waited = step.issue_ns + step.host_ns - step.gpu_ns - self.clock.ns
        self._set_computing(False)
        yield self.clock.timeout(waited)
        self._set_computing(True)
        return waited

    def _issued(self, step: "SendStep | MeetStep") -> Generator[simpy.Event, Any, None]:
        if step.issue_ns > self.clock.ns:
            yield self.clock.timeout(step.issue_ns - self.clock.ns)

    def _receive(self, name: str, step: ReceiveStep, cause: int) -> Generator[simpy.Event, Any, int]:
        mail = step.mail
        mail.posted = True
        if mail.row == NONE:
            if mail.sender is not None:
                mail.sender.succeed(NONE)
            mail.receiver = self.clock.event()
            cause = yield from self._wait(name, step, mail.receiver)
        if mail.box is not None:
            mail.box.free += 1
            if mail.box.waiting:
                mail.box.waiting.pop(0).succeed(NONE)
        return cause

    def _send(self, name: str, step: SendStep) -> Generator[simpy.Event, Any, int]:
        """Transfers a message as soon as its receiver has room (or is there); returns when the transfer began."""
        mail, clock = step.mail, self.clock
        yield from self._issued(step)
        if self._rendezvous and not mail.posted:
            mail.sender = clock.event()
            yield from self._wait(name, step, mail.sender)
        if mail.box is not None:
            while mail.box.free == 0:
                room = clock.event()
                mail.box.waiting.append(room)
                yield from self._wait(name, step, room)
            mail.box.free -= 1
        start = clock.ns
        yield self.network.transfer(step.latency_ns, step.stream_ns, step.loads).done
        return start

    def _meet(self, name: str, step: MeetStep) -> Generator[simpy.Event, Any, int]:
        """Meets the other members; the last to arrive starts the transfer for all. Returns when it began."""
        meeting = step.meeting
        yield from self._issued(step)
        meeting.arrived.append((self, step))
        if len(meeting.arrived) < meeting.expected:
            if meeting.finished is None:
                meeting.finished = self.clock.event()
            yield from self._wait(name, step, meeting.finished)
            return meeting.start_ns
        meeting.start_ns = self.clock.ns
        loads = [*meeting.loads, *(load for _, member in meeting.arrived for load in member.loads)]
        flow = self.network.transfer(step.latency_ns, step.stream_ns, loads)
        for gpu, _ in meeting.arrived:
            gpu.begin_collective(flow)
        yield flow.done
        for gpu, _ in meeting.arrived:
            gpu.end_collective(flow)
        if meeting.finished is not None:
            meeting.finished.succeed(NONE)
        return meeting.start_ns
