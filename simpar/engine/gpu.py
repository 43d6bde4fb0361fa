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
from simpar.engine.rows import CATEGORY, Recorder
from simpar.program.ir import COMPUTE, Alloc, Record, Recv, Wait
from simpar.trace.trace import NONE

_ACTIVATIONS = CATEGORY["activations"]
_DONE = 1e-6  # nanoseconds of work that only rounding leaves over


class Task(NamedTuple):
    """What steps that compute the same have in common: an operation (with its price) or a single kernel.

    ``gpu_ns`` is its time on the device when undisturbed, ``host_ns`` its earliest end after the host begins to issue
    it, which takes ``issue_ns``. Here and below, ``label`` counts in the recorder's labels.
    """

    label: int
    gpu_ns: int
    host_ns: int
    issue_ns: int
    price: OperationPrice | None


class RunStep(NamedTuple):
    """Computes a task, which the host begins to issue at ``issue_ns``, in the opened run of that number or in none."""

    task: Task
    microbatch: int
    chunk: int
    issue_ns: int
    transient_bytes: int
    opened: int


class SyncStep(NamedTuple):
    """The host, which would have been here at ``issue_ns``, waits for the compute stream."""

    issue_ns: int


class TransferStep(NamedTuple):
    """Carries something once it was issued: a message, as soon as its receiver can take it, or what the host moves."""

    label: int
    microbatch: int
    issue_ns: int
    route: Route
    mail: "Mail | None"


class MeetStep(NamedTuple):
    """Takes part in a collective once it was issued."""

    label: int
    microbatch: int
    chunk: int
    issue_ns: int
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
    loads: list[LinkLoad]
    members: set[int]
    arrived: "list[tuple[Gpu, MeetStep]]" = field(default_factory=list)
    finished: Signal | None = None
    start_ns: int = 0


class Mail(Signal):
    """One message, as a signal of its arrival: its row once delivered, whether its receiver is there, who waits."""

    row = NONE
    posted = False
    sender: Signal | None = None
    box: "Mailbox | None" = None

    def __init__(self, source: int, target: int, tag: Hashable) -> None:
        self.source, self.target, self.tag = source, target, tag


Step = RunStep | Record | Wait | Recv | SyncStep | Alloc | TransferStep | MeetStep
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
        case Recv(peer=peer, tag=tag):
            return f"message '{tag}' from rank {peer}"
        case TransferStep(mail=Mail() as mail):
            return f"rank {mail.target} to take message '{mail.tag}'"
        case MeetStep(meeting=meeting):
            expected = len(meeting.members)
            return f"{expected - len(meeting.arrived)} more of {expected} members of {meeting.title}"
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
        letters: dict[Hashable, Mail],
        compute_rate: float,
        collective_rate: float,
        rendezvous: bool,
    ) -> None:
        self.clock = clock
        self.network = network
        self.recorder = recorder
        self.rank = rank
        self.letters = letters  # messages to this rank, by tag
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
        self._left: float = 0.0  # work of the present operation that is not done, as of _since
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
        clock, events, recorder = self.clock, self.events, self.recorder
        letters, rows, runs, memory = self.letters, recorder.rows, recorder.runs, recorder.memory
        cause = NONE  # row whose end let the stream get here: what it executed, or waited for, last
        for step in steps:
            if type(step) is RunStep:
                (label, gpu_ns, host_ns, _, price), microbatch, chunk, issue_ns, transient_bytes, opened = step
                issue_ns += self.host_lag_ns
                start, end, waited = clock.ns, issue_ns + host_ns, 0  # it ends no earlier, because of the host
                if price is None and start < end - gpu_ns:
                    waited = end - gpu_ns - start
                    yield from self._await_launch(waited)
                    start += waited
                if self._flows:
                    yield from self._run_slowed(gpu_ns)
                    gpu_ns = clock.ns - start
                else:
                    self._left, self._since, self._disturbed = gpu_ns, start, False
                    yield gpu_ns if start + gpu_ns > end else end - start
                    if self._disturbed:
                        gpu_ns = yield from self._make_up(start, gpu_ns)
                if clock.ns < end:
                    yield end - clock.ns
                now, row = clock.ns, len(rows)
                rows.append((start, now, lane, label, microbatch, chunk, cause))
                cause = row
                if price is not None:
                    runs.append((row, lane, price, issue_ns, gpu_ns))
                elif opened != NONE:
                    recorder.inner.append((row, opened, waited))
                if transient_bytes:
                    memory.append((start, self.rank, _ACTIVATIONS, transient_bytes))
                    memory.append((now, self.rank, _ACTIVATIONS, -transient_bytes))
            elif type(step) is Record:
                waiting = events.get(step.event)
                events[step.event] = cause
                if waiting is not None:
                    clock.fire(waiting, cause)
            elif type(step) is Alloc:
                memory.append((clock.ns, self.rank, CATEGORY[step.category], step.nbytes))
            elif type(step) is Recv:
                mail = letters.get(step.tag)
                if mail is None:  # nobody ever sends it
                    mail = letters[step.tag] = Mail(step.peer, self.rank, step.tag)
                mail.posted = True
                if mail.row == NONE:
                    if mail.sender is not None:
                        clock.fire(mail.sender, NONE)
                    self.blocked[COMPUTE] = step
                    self._set_computing(False)
                    cause = yield mail
                    self._set_computing(True)
                if mail.box is not None:
                    self._empty(mail.box)
            elif type(step) is Wait:
                signal = events.get(step.event)
                if type(signal) is not int:
                    if signal is None:
                        signal = events[step.event] = Signal()
                    self.blocked[COMPUTE] = step
                    self._set_computing(False)
                    cause = yield signal
                    self._set_computing(True)
            elif type(step) is SyncStep:
                self.host_lag_ns = max(self.host_lag_ns, clock.ns - step.issue_ns)
        self._set_computing(False)
        self.blocked.pop(COMPUTE, None)

    def communicate(  # noqa: PLR0912 - as above
        self, name: str, lane: int, steps: "list[Step]"
    ) -> Stream:
        """The stream of a communicator, or of the host's part: executes its steps in order."""
        clock, events, rows, transfer = self.clock, self.events, self.recorder.rows, self.network.transfer
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
            elif type(step) is TransferStep:
                label, microbatch, issue_ns, route, mail = step
                if issue_ns + self.host_lag_ns > clock.ns:
                    yield issue_ns + self.host_lag_ns - clock.ns
                if mail is not None and (self._rendezvous or mail.box is not None):
                    yield from self._make_room(name, step, mail)
                start = clock.ns
                yield transfer(route)
                row = len(rows)
                rows.append((start, clock.ns, lane, label, microbatch, NONE, cause))
                cause = row
                if mail is not None:
                    mail.row = row
                    clock.fire(mail, row)
            elif type(step) is MeetStep:
                if step.issue_ns + self.host_lag_ns > clock.ns:
                    yield step.issue_ns + self.host_lag_ns - clock.ns
                start = yield from self._meet(name, step)
                row = len(rows)
                rows.append((start, clock.ns, lane, step.label, step.microbatch, step.chunk, cause))
                cause = row
                if step.opened != NONE:
                    self.recorder.inner.append((row, step.opened, 0))
        self.blocked.pop(name, None)

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

    def _await_launch(self, waited_ns: int) -> Stream:
        """The device idles until the host has launched a kernel."""
        self._set_computing(False)
        yield waited_ns
        self._set_computing(True)

    def _empty(self, box: Mailbox) -> None:
        """Takes a message out of a bounded buffer."""
        box.free += 1
        if box.waiting:
            self.clock.fire(box.waiting.pop(0), NONE)

    def _make_room(self, name: str, step: TransferStep, mail: Mail) -> Stream:
        """Waits until the receiver is there (rendezvous), or has room in its buffer."""
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
        if len(meeting.arrived) < len(meeting.members):
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
        meeting.arrived.clear()  # steps and meetings would hold each other
        return meeting.start_ns
