"""A GPU on the clock: in-order streams fed by one host, and a compute stream that slows while collectives run.

A kernel starts when its stream is free *and* it was issued, which is how a launch-bound step comes about. When the host
has issued each instruction is known beforehand (``issue_ns``) but for the waits that a program asks of it (``Sync``):
these put off all that it issues after them (``host_lag_ns``).
"""

from collections.abc import Generator, Hashable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, NamedTuple

from simpar.engine.clock import Clock, Signal, Stream
from simpar.engine.network import Flow, LinkLoad, Network, Route
from simpar.engine.price import OperationPrice
from simpar.engine.rows import CATEGORY, Label, Recorder, Row, RunRow
from simpar.program.ir import COMPUTE, Alloc, Record, Wait
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


class SyncStep(NamedTuple):
    """The host, which would have been here at ``issue_ns``, waits for the compute stream."""

    issue_ns: int


class SendStep(NamedTuple):
    """Sends a message once it was issued and its receiver can take it."""

    label: Label
    issue_ns: int
    nbytes: float
    route: Route
    mail: "Mail"


class HostStep(NamedTuple):
    """Copies from or to the memory of the host, or lets its processor work there, once it was issued."""

    label: Label
    issue_ns: int
    nbytes: float
    route: Route


class MeetStep(NamedTuple):
    """Takes part in a collective once it was issued."""

    label: Label
    issue_ns: int
    nbytes: float
    latency_ns: int
    stream_ns: int
    loads: list[LinkLoad]
    intensity: float
    meeting: "Meeting"
    opened: int


@dataclass(slots=True)
class Meeting:
    """A collective that waits for its last member."""

    op: str
    nbytes: float
    title: str
    expected: int
    loads: list[LinkLoad]
    arrived: "list[tuple[Gpu, MeetStep]]" = field(default_factory=list)
    finished: Signal | None = None
    start_ns: int = 0


class Mail(Signal):
    """One message, as a signal of its arrival: its row once delivered, whether its receiver is there, who waits.

    It is the receiver's step, too.
    """

    __slots__ = ("box", "is_awaited", "is_sent", "posted", "row", "sender", "source", "tag", "target")

    def __init__(self, source: int, target: int, tag: Hashable) -> None:
        super().__init__()
        self.source, self.target, self.tag = source, target, tag
        self.is_sent = self.is_awaited = False  # whether the program has these halves
        self.row = NONE
        self.posted = False
        self.sender: Signal | None = None
        self.box: Mailbox | None = None


Step = RunStep | Record | Wait | Mail | SyncStep | Alloc | SendStep | HostStep | MeetStep
"""What a stream executes; an instruction that needs no more than it says is a step itself."""


@dataclass(slots=True)
class Mailbox:
    """The bounded buffer of a receiver for one direction."""

    free: int
    waiting: list[Signal] = field(default_factory=list)


def awaited(step: Step) -> str:
    """What a blocked step waits for, in words."""
    match step:
        case Wait(event=event):
            return f"event '{event}'"
        case Mail(tag=tag, source=source):
            return f"message '{tag}' from rank {source}"
        case SendStep(mail=mail):
            return f"rank {mail.target} to take message '{mail.tag}'"
        case MeetStep(meeting=meeting):
            missing = meeting.expected - len(meeting.arrived)
            return f"{missing} more of {meeting.expected} members of {meeting.title}"
        case _:
            return "nothing"


class Gpu:
    """One simulated rank: its events, its compute rate, its streams as coroutines on the clock."""

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
        self.host_lag_ns = 0
        self.events: dict[
            Hashable, Any
        ] = {}  # a Signal while somebody waits for it, then the row that it happened with
        self.blocked: dict[str, Step] = {}  # stream that is not done -> the step at which it waited last
        self._rendezvous = rendezvous
        self._compute_rate = compute_rate
        self._collective_rate = collective_rate
        self._flows: dict[Flow, float] = {}  # collectives under way, and how hard each works this device
        self._computing = True
        self._left = 0.0  # work of the present operation that is not done, as of _since
        self._since = 0
        self._disturbed = False
        self._waker: Signal | None = None
        self._version = 0

    # ---- compute beside collectives ---------------------------------------------------------------------------------

    def begin_collective(self, flow: Flow, intensity: float) -> None:
        """Compute slows from now on, in proportion to what the collective moves; the flow slows while compute runs."""
        self._advance()
        self._flows[flow] = intensity
        if self._computing:
            self._slow(flow, 1)
        self._arm()

    def end_collective(self, flow: Flow) -> None:
        """Undoes :meth:`begin_collective`."""
        self._advance()
        del self._flows[flow]
        self._arm()

    def _slow(self, flow: Flow, change: int) -> None:
        """One more (or less) of the flow's members computes; a collective is as slow as its slowest member."""
        if self._collective_rate < 1:
            flow.slowed_by += change
            self.network.set_limit(flow, self._collective_rate if flow.slowed_by else 1.0)

    @property
    def _rate(self) -> float:
        """Speed of compute beside the collectives under way (1 without any)."""
        return 1.0 - (1.0 - self._compute_rate) * min(sum(self._flows.values()), 1.0)

    def _advance(self) -> None:
        """Books the compute work done since the last change of rate."""
        now = self.clock.ns
        self._left = max(self._left - (now - self._since) * self._rate, 0.0)
        self._since = now
        self._disturbed = True

    def _arm(self) -> None:
        """Wakes a slowed operation when its work is done, at the present rate."""
        if self._waker is None:
            return
        self._version = version = self._version + 1
        self.clock.after(ceil(self._left / self._rate - 1e-6), lambda _: self._fire(version))

    def _fire(self, version: int) -> None:
        if version == self._version and self._waker is not None:
            waker, self._waker = self._waker, None
            self.clock.fire(waker)

    def _set_computing(self, computing: bool) -> None:
        if computing != self._computing:
            self._computing = computing
            for flow in self._flows:
                self._slow(flow, 1 if computing else -1)

    # ---- streams ----------------------------------------------------------------------------------------------------

    def compute(  # noqa: PLR0912, PLR0915 - a call per step would cost as much as the step
        self, lane: int, steps: "list[Step]"
    ) -> Stream:
        """The compute stream: executes its steps in order."""
        clock, events, rows, memory = self.clock, self.events, self.recorder.rows, self.recorder.memory
        cause = NONE  # row whose end let the stream get here: what it executed, or waited for, last
        for step in steps:
            if type(step) is RunStep:
                gpu_ns, waited = step.gpu_ns, 0
                end = step.issue_ns + self.host_lag_ns + step.host_ns  # at the earliest, because of the host
                if step.price is None and clock.ns < end - gpu_ns:
                    waited = yield from self._launched(step)
                start = clock.ns
                bound = end - start
                if self._flows:
                    yield from self._run_slowed(gpu_ns)
                    gpu_ns = clock.ns - start
                else:
                    self._left, self._since, self._disturbed = float(gpu_ns), start, False
                    yield gpu_ns if gpu_ns > bound else bound
                    if self._disturbed:
                        gpu_ns = yield from self._make_up(start, gpu_ns)
                now = clock.ns
                if now < end:
                    yield end - now
                    now = end
                self._record_run(step, lane, (start, now), gpu_ns, waited, cause)
                cause = len(rows) - 1
            elif type(step) is Record:
                waiting = events.get(step.event)
                events[step.event] = cause
                if waiting is not None:
                    clock.fire(waiting, cause)
            elif type(step) is Wait:
                signal = events.get(step.event)
                if type(signal) is not int:
                    if signal is None:
                        signal = events[step.event] = Signal()
                    self.blocked[COMPUTE] = step
                    self._set_computing(False)
                    cause = yield signal
                    self._set_computing(True)
            elif type(step) is Mail:
                if step.box is not None:
                    cause = yield from self._receive(step, cause)
                elif step.row == NONE:
                    step.posted = True
                    if step.sender is not None:
                        clock.fire(step.sender, NONE)
                    self.blocked[COMPUTE] = step
                    self._set_computing(False)
                    cause = yield step
                    self._set_computing(True)
            elif type(step) is SyncStep:
                self.host_lag_ns = max(self.host_lag_ns, clock.ns - step.issue_ns)
            elif type(step) is Alloc:
                memory.append((clock.ns, self.rank, CATEGORY[step.category], step.nbytes))
        self._set_computing(False)
        self.blocked.pop(COMPUTE, None)

    def communicate(self, name: str, lane: int, steps: "list[Step]") -> Stream:
        """The stream of a communicator, or of the host's part: executes its steps in order."""
        clock, events, rows, transfer = self.clock, self.events, self.recorder.rows, self.network.transfer
        new = tuple.__new__  # what a named tuple's own constructor calls, three times as fast
        cause = NONE
        for step in steps:
            if type(step) is Record:
                waiting = events.get(step.event)
                events[step.event] = cause
                if waiting is not None:
                    clock.fire(waiting, cause)
            elif type(step) is Wait:
                signal = events.get(step.event)
                if type(signal) is not int:
                    if signal is None:
                        signal = events[step.event] = Signal()
                    self.blocked[name] = step
                    cause = yield signal
            elif type(step) is SendStep:
                mail, start = step.mail, clock.ns
                issued = step.issue_ns + self.host_lag_ns
                if issued > start:
                    yield issued - start
                    start = issued
                if self._rendezvous or mail.box is not None:
                    yield from self._make_room(name, step)
                    start = clock.ns
                yield transfer(step.route)
                mail.row = len(rows)
                rows.append(new(Row, (start, clock.ns, lane, step.label, step.nbytes, cause, NONE, 0)))
                cause = mail.row
                clock.fire(mail, cause)
            elif type(step) is HostStep:
                issued = step.issue_ns + self.host_lag_ns
                if issued > clock.ns:
                    yield issued - clock.ns
                start = clock.ns
                yield transfer(step.route)
                rows.append(Row(start, clock.ns, lane, step.label, step.nbytes, cause))
                cause = len(rows) - 1
            elif type(step) is MeetStep:
                issued = step.issue_ns + self.host_lag_ns
                if issued > clock.ns:
                    yield issued - clock.ns
                start = yield from self._meet(name, step)
                rows.append(Row(start, clock.ns, lane, step.label, step.nbytes, cause, step.opened))
                cause = len(rows) - 1
        self.blocked.pop(name, None)

    def _record_run(  # noqa: PLR0917 - keywords cost time here
        self, step: RunStep, lane: int, when: tuple[int, int], gpu_ns: int, waited: int, cause: int
    ) -> None:
        recorder, (start, end), new = self.recorder, when, tuple.__new__
        label, issue_ns, _, _, flop, price, transient_bytes, opened = step
        if price is not None:
            fields = (len(recorder.rows), price, issue_ns + self.host_lag_ns, gpu_ns, end - start - gpu_ns)
            recorder.runs.append(new(RunRow, fields))
        recorder.rows.append(new(Row, (start, end, lane, label, flop, cause, opened, waited)))
        if transient_bytes:
            recorder.memory.append((start, self.rank, _ACTIVATIONS, transient_bytes))
            recorder.memory.append((end, self.rank, _ACTIVATIONS, -transient_bytes))

    def _idle(self, step: Step, signal: Signal) -> Generator[int | Signal, Any, int]:
        """Compute waits; returns the row that ended the wait."""
        self.blocked[COMPUTE] = step  # word for a deadlock report
        self._set_computing(False)
        row: int = yield signal
        self._set_computing(True)
        return row

    def _make_up(self, start: int, gpu_ns: int) -> Generator[int | Signal, Any, int]:
        """Does the work that collectives left undone; returns the time on the device, from ``start`` on."""
        self._advance()
        if self._left <= _DONE:
            return gpu_ns
        yield from self._run_slowed(self._left)
        return self.clock.ns - start

    def _run_slowed(self, work: float) -> Stream:
        """Runs work at a rate that may change; :meth:`_arm` finds out when it is done."""
        self._left, self._since = float(work), self.clock.ns
        self._waker = waker = Signal()
        self._arm()
        yield waker

    def _launched(self, step: RunStep) -> Generator[int | Signal, Any, int]:
        """The device idles until the host has launched a kernel; returns for how long."""
        waited = step.issue_ns + self.host_lag_ns + step.host_ns - step.gpu_ns - self.clock.ns
        self._set_computing(False)
        yield waited
        self._set_computing(True)
        return waited

    def _receive(self, mail: Mail, cause: int) -> Generator[int | Signal, Any, int]:
        """Takes a message out of a bounded buffer."""
        mail.posted = True
        if mail.row == NONE:
            if mail.sender is not None:
                self.clock.fire(mail.sender, NONE)
            cause = yield from self._idle(mail, mail)
        if mail.box is not None:
            mail.box.free += 1
            if mail.box.waiting:
                self.clock.fire(mail.box.waiting.pop(0), NONE)
        return cause

    def _make_room(self, name: str, step: SendStep) -> Stream:
        """Waits until the receiver is there (rendezvous), or has room in its buffer."""
        mail = step.mail
        self.blocked[name] = step
        if self._rendezvous and not mail.posted:
            mail.sender = Signal()
            yield mail.sender
        if mail.box is not None:
            while mail.box.free == 0:
                room = Signal()
                mail.box.waiting.append(room)
                yield room
            mail.box.free -= 1

    def _meet(self, name: str, step: MeetStep) -> Generator[int | Signal, Any, int]:
        """Meets the other members; the last to arrive starts the transfer for all. Returns when it began."""
        meeting = step.meeting
        meeting.arrived.append((self, step))
        if len(meeting.arrived) < meeting.expected:
            if meeting.finished is None:
                meeting.finished = Signal()
            self.blocked[name] = step
            yield meeting.finished
            return meeting.start_ns
        meeting.start_ns = self.clock.ns
        loads = [*meeting.loads, *(load for _, member in meeting.arrived for load in member.loads)]
        flow = self.network.transfer(self.network.route(step.latency_ns, step.stream_ns, loads))
        for gpu, member in meeting.arrived:
            gpu.begin_collective(flow, member.intensity)
        yield flow
        for gpu, _ in meeting.arrived:
            gpu.end_collective(flow)
        if meeting.finished is not None:
            self.clock.fire(meeting.finished, NONE)
        return meeting.start_ns
