"""Loads a program: resolves the instructions of each rank, in host order, into steps of its streams.

Equal operations, messages and collectives are priced and labelled once; a step refers to what it shares with them.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from simpar.engine.costs import Costs, Load, Transfer
from simpar.engine.gpu import Mail, Mailbox, Meeting, MeetStep, RunStep, Step, SyncStep, Task, TransferStep
from simpar.engine.network import LinkLoad, Network, Route
from simpar.engine.price import OperationPrice
from simpar.engine.rows import KIND, Label, OpenedRun, Recorder
from simpar.errors import DeadlockError
from simpar.model.work import kernel_kind
from simpar.program.ir import (
    COMPUTE,
    Alloc,
    Collective,
    Delay,
    Group,
    HostWork,
    Instruction,
    Launch,
    Operation,
    RankProgram,
    Record,
    Recv,
    Run,
    Send,
    Sync,
    Wait,
    open_run,
)
from simpar.trace.trace import NONE
from simpar.units import ns


@dataclass(slots=True)
class _Host:
    """The host of a rank while its instructions are loaded: where it sends them, and when it issues the next one."""

    rank: RankProgram
    kind: int
    issue_ns: int
    streams: defaultdict[str, list[Step]] = field(default_factory=lambda: defaultdict(list, {COMPUTE: []}))
    tasks: dict[Operation, Task] = field(default_factory=dict)
    met: dict[Group, int] = field(default_factory=dict)  # collectives of each group so far


class Loader:
    """Loads the ranks of a run one after the other; collectives and messages between them meet here.

    Args:
        costs: prices kernels, collectives and messages.
        network: of the run.
        recorder: of the run.
        price: the price of an operation, for a rank and the kind of its device; None where no operations come.
        launch_ns: one call of the host.
        first_issue_ns: when hosts begin to issue.
        stage_buffer: messages that a receiver buffers per direction; None is as many as come.

    Attributes:
        mail: messages that are sent, by receiver and tag.
    """

    def __init__(
        self,
        costs: Costs,
        network: Network,
        recorder: Recorder,
        price: Callable[[Operation, int, int], OperationPrice] | None,
        *,
        launch_ns: int,
        first_issue_ns: int,
        stage_buffer: int | None,
    ) -> None:
        self.mail: defaultdict[int, dict[Hashable, Mail]] = defaultdict(dict)
        self._costs = costs
        self._network = network
        self._recorder = recorder
        self._price = price
        self._launch_ns = launch_ns
        self._first_issue_ns = first_issue_ns
        self._stage_buffer = stage_buffer
        self._boxes: dict[tuple[int, str], Mailbox] = {}
        self._meetings: dict[tuple[Group, int], Meeting] = {}
        self._members: defaultdict[Group, set[int]] = defaultdict(set)
        self._messages: dict[Hashable, tuple[int, Route]] = {}
        self._host_works: dict[Hashable, Route] = {}

    def streams(self, rank: RankProgram) -> dict[str, list[Step]]:
        """The steps of a rank by stream."""
        host = _Host(rank, self._costs.kind_of(rank.rank), self._first_issue_ns)
        self._add(host, rank.instructions, NONE)
        return host.streams

    def _add(  # noqa: PLR0912 - a call per instruction would cost as much as to load it
        self, host: _Host, instructions: Iterable[Instruction], opened: int
    ) -> None:
        """Resolves instructions, those of an opened run or of none; the host issues them one after the other."""
        streams, tasks, launch_ns, issue = host.streams, host.tasks, self._launch_ns, host.issue_ns
        compute = streams[COMPUTE]
        new = tuple.__new__  # what a named tuple's own constructor calls, three times as fast
        for instruction in instructions:
            what = type(instruction)  # the most frequent ones first
            if what is Record or what is Wait:
                streams[instruction.stream].append(instruction)  # type: ignore[union-attr, arg-type]
            elif type(instruction) is Run:
                operation, microbatch, chunk, transient_bytes, is_opened = instruction
                if is_opened:
                    host.issue_ns = issue
                    self._open(host, instruction)
                    issue = host.issue_ns
                    continue
                task = tasks.get(operation)
                if task is None:
                    task = tasks[operation] = self._task(operation, host)
                compute.append(new(RunStep, (task, microbatch, chunk, issue, transient_bytes, NONE)))
                issue += task.issue_ns
            elif type(instruction) is Alloc:
                compute.append(instruction)
            elif type(instruction) is Recv:
                issue += instruction.launches * launch_ns
                compute.append(instruction)
            elif type(instruction) is Send:
                issue += instruction.launches * launch_ns
                streams[instruction.stream].append(self._send(instruction, host.rank.rank, issue))
            elif type(instruction) is Launch:
                task = self._kernel(instruction, host.kind)
                compute.append(RunStep(task, NONE, NONE, issue, 0, opened))
                issue += task.issue_ns
            elif type(instruction) is Delay:
                issue += ns(instruction.delay_s)
            elif type(instruction) is Sync:
                compute.append(SyncStep(issue))
            elif type(instruction) is Collective:
                issue += launch_ns
                streams[instruction.group.stream].append(self._meet(instruction, host, issue, opened))
            elif type(instruction) is HostWork:
                issue += instruction.launches * launch_ns
                streams[instruction.stream].append(self._host_work(instruction, host.rank.rank, issue))
        host.issue_ns = issue

    def _open(self, host: _Host, run: Run) -> None:
        """Puts what an opened run is made of in its place."""
        number = self._recorder.open(OpenedRun(self._label(run.operation), run.microbatch, run.chunk))
        inner: Iterable[Instruction] = open_run(run, host.rank.rank, number, host.rank.replicas)
        if run.transient_bytes:
            inner = (Alloc("activations", run.transient_bytes), *inner, Alloc("activations", -run.transient_bytes))
        self._add(host, inner, number)

    def _label(self, operation: Operation) -> Label:
        layer = operation.layers[0] if len(operation.layers) == 1 else NONE
        return Label(KIND[operation.phase], self._recorder.name(operation.name), layer)

    def _task(self, operation: Operation, host: _Host) -> Task:
        assert self._price is not None, "blocks hold no operations"
        price = self._price(operation, host.rank.rank, host.kind)
        label = self._recorder.label(self._label(operation)._replace(value=price.flop))
        return Task(label, price.gpu_ns, price.host_ns, price.issue_ns, price)

    def _kernel(self, launch: Launch, kind: int) -> Task:
        kernel, name = launch.kernel, self._recorder.name(launch.name)
        label = self._recorder.label(Label(KIND[kernel_kind(kernel)], name, launch.layer, kernel.work.flop))
        duration, issue_ns = self._costs.kernel_ns(kernel, kind), launch.launches * self._launch_ns
        return Task(label, duration, issue_ns + duration, issue_ns, None)

    def _meet(self, collective: Collective, host: _Host, issue: int, opened: int) -> MeetStep:
        op, nbytes, group, rank = collective.op, collective.nbytes, collective.group, host.rank.rank
        index = host.met[group] = host.met.get(group, -1) + 1
        meeting = self._meetings.get((group, index))
        if meeting is None:
            title = f"{op} {index} of a {group.stream} group of {len(group.ranks)} ranks"
            shared = self._loads(self._costs.shared_loads(op, nbytes, group))
            meeting = self._meetings[group, index] = Meeting(op, nbytes, title, shared, self._members[group])
        self._members[group].add(rank)
        if meeting.op != op:
            raise DeadlockError(
                f"rank {rank} runs {op} as number {index} of its {group.stream} group, where another member "
                f"runs {meeting.op}; give all members the same order"
            )
        if meeting.nbytes != nbytes:
            raise DeadlockError(
                f"rank {rank} runs {op} {index} of its {group.stream} group over {nbytes:,.0f} bytes, another member "
                f"over {meeting.nbytes:,.0f}; give all members the same size"
            )
        name = self._recorder.name(collective.name or op)
        label = self._recorder.label(Label(KIND[op], name, collective.layer, nbytes))
        transfer = self._costs.collective(op, nbytes, group, rank)
        return MeetStep(
            label,
            collective.microbatch,
            collective.chunk,
            issue,
            transfer.latency_ns + ns(collective.extra_s),
            transfer.stream_ns,
            self._loads(transfer.loads),
            transfer.intensity,
            meeting,
            opened,
        )

    def _send(self, send: Send, rank: int, issue: int) -> TransferStep:
        stream, peer, nbytes, tag, microbatch, _, _, also = send
        mail = self.mail[peer][tag] = Mail(rank, peer, tag)
        for other, _ in also:
            self.mail[other][tag] = mail  # all receivers wait for one arrival
        if self._stage_buffer is not None:
            mail.box = self._boxes.setdefault((peer, stream), Mailbox(self._stage_buffer))
        question = (stream, nbytes, rank, peer, also)
        found = self._messages.get(question)
        if found is None:
            found = self._messages[question] = self._message(send, rank)
        label, route = found
        return tuple.__new__(TransferStep, (label, microbatch, issue, route, mail))

    def _message(self, send: Send, rank: int) -> tuple[int, Route]:
        """Label and route of messages of that size to that peer."""
        carried = sum(nbytes for _, nbytes in send.parts)
        label = self._recorder.label(Label(KIND["p2p"], self._recorder.name(send.stream), value=carried))
        return label, self._route(self._costs.messages(send.parts, rank, send.copies))

    def _host_work(self, work: HostWork, rank: int, issue: int) -> TransferStep:
        question = (work.op, work.nbytes, rank, work.copies)
        route = self._host_works.get(question)
        if route is None:
            route = self._host_works[question] = self._route(self._costs.host_work(*question))
        is_copy = work.op != "update"
        kind = KIND["copy" if is_copy else "optimizer"]
        value = work.nbytes if is_copy else 0.0  # a column holds FLOP of what computes
        label = self._recorder.label(Label(kind, self._recorder.name(work.name), work.layer, value))
        return TransferStep(label, work.microbatch, issue, route, None)

    def _route(self, transfer: Transfer) -> Route:
        return self._network.route(transfer.latency_ns, transfer.stream_ns, self._loads(transfer.loads))

    def _loads(self, loads: Iterable[Load]) -> list[LinkLoad]:
        return [(self._network.link(x.link.name, x.link.capacity_bytes_per_s), x.nbytes, x.flows) for x in loads]
