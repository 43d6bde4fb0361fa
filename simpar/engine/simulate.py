"""Runs a program on the clock: one environment per run, no state outside it."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat

import numpy as np

from simpar.engine.clock import Clock
from simpar.engine.costs import Costs, Load
from simpar.engine.gpu import (
    Gpu,
    HostStep,
    Mail,
    Mailbox,
    Meeting,
    MeetStep,
    RunStep,
    SendStep,
    Step,
    SyncStep,
    awaited,
)
from simpar.engine.network import LinkLoad, Network, Route
from simpar.engine.noise import Noise
from simpar.engine.price import BlockPrice, OperationPrice
from simpar.engine.record import build_trace
from simpar.engine.rows import KIND, Label, Recorder
from simpar.engine.traffic import link_s_per_byte
from simpar.errors import DeadlockError
from simpar.faults.description import Faults
from simpar.hardware.cluster import Cluster
from simpar.model.work import kernel_kind
from simpar.program.ir import (
    COMPUTE,
    Alloc,
    Block,
    Collective,
    Delay,
    Group,
    HostWork,
    Instruction,
    Launch,
    Operation,
    Program,
    RankProgram,
    Record,
    Recv,
    Run,
    Send,
    Sync,
    Wait,
    host_launches,
    open_run,
)
from simpar.trace.trace import NONE, Lane, Trace
from simpar.units import ns


def execute(program: Program, cluster: Cluster, faults: Faults | None = None) -> Trace:
    """Simulates one step.

    Args:
        program: what the ranks run.
        cluster: where they run it.
        faults: what is slow or random there.

    Returns:
        The trace; equal programs on equal clusters give equal traces.

    Raises:
        DeadlockError: ranks wait for each other; the message names each and what it waits for.
    """
    if program.placement is not None:
        cluster = cluster.replace(placement=program.placement)
    ranks = (rank.rank for rank in program.ranks)
    costs = Costs(cluster, program.algorithm, ranks, faults, guests=program.guests)
    noise = Noise(faults, ns(program.launch_s)) if faults is not None and faults.jitter.spread else None
    simulation = _Simulation(program, costs, launch_ns=ns(program.launch_s), noise=noise)
    step_ns = simulation.run()
    simulation.book_block_traffic()
    traffic = partial(link_s_per_byte, program, costs)
    return build_trace(simulation.recorder, simulation.lanes, simulation.network, program.ranks, step_ns, traffic)


class _Simulation:
    """One run: loads rank programs into streams and lets the clock go."""

    def __init__(
        self,
        program: Program,
        costs: Costs,
        *,
        launch_ns: int,
        first_issue_ns: int = 0,
        noise: Noise | None = None,
    ) -> None:
        self.recorder = Recorder()
        self.lanes: list[Lane] = []
        self._clock = Clock()
        self.network = Network(self._clock, costs.slow.link_rates)
        self._costs = costs
        self._launch_ns = launch_ns
        self._first_issue_ns = first_issue_ns
        self._noise = noise
        self._program = program
        self._gpus: list[Gpu] = []
        self._mail: defaultdict[int, dict[Hashable, Mail]] = defaultdict(dict)  # by receiver, by tag
        self._boxes: dict[tuple[int, str], Mailbox] = {}
        self._meetings: dict[tuple[Group, int], Meeting] = {}
        self._members: dict[Group, set[int]] = {}
        self._blocks: dict[tuple[int, int], BlockPrice] = {}
        self._operations: dict[tuple[int, int], OperationPrice] = {}
        self._messages: dict[tuple[float, int, int, tuple[tuple[int, float], ...]], Route] = {}
        self._host_works: dict[tuple[Hashable, ...], Route] = {}
        opened = [self._opened(rank) for rank in program.ranks]
        for rank, (instructions, _) in zip(program.ranks, opened, strict=True):
            for instruction in instructions:
                if type(instruction) is Collective:
                    self._members.setdefault(instruction.group, set()).add(rank.rank)
                elif type(instruction) is Send and instruction.also:
                    mail = Mail(rank.rank, instruction.peer, instruction.tag)  # all receivers wait for one arrival
                    for peer, _ in instruction.parts:
                        self._mail[peer][instruction.tag] = mail
        for rank, (instructions, runs) in zip(program.ranks, opened, strict=True):
            self._load(rank, instructions, runs)

    def run(self) -> int:
        """Lets the clock go; returns the end of the last span."""
        self._clock.run()
        stuck = [(gpu.rank, stream, step) for gpu in self._gpus for stream, step in gpu.blocked.items()]
        if stuck:
            shown = "; ".join(f"rank {rank} ({stream}) waits for {awaited(step)}" for rank, stream, step in stuck[:8])
            more = f"; and {len(stuck) - 8} more streams" if len(stuck) > 8 else ""
            raise DeadlockError(
                f"no instruction can run at {self._clock.ns} ns: {shown}{more}; "
                "check that sends, receives and collectives pair up in the same order"
            )
        for mail in chain.from_iterable(box.values() for box in self._mail.values()):
            if mail.is_sent and not mail.is_awaited:
                raise DeadlockError(
                    f"rank {mail.source} sends message '{mail.tag}' to rank {mail.target}, which never receives it; "
                    "add the receive"
                )
        return max((row.end_ns for row in self.recorder.rows), default=0)

    def book_block_traffic(self) -> None:
        """Adds what the collectives inside blocks carried to the links of the ranks that ran them."""
        runs = Counter((self.lanes[self.recorder.rows[run.row].lane].rank, run.price) for run in self.recorder.runs)
        for (rank, price), count in runs.items():
            for (kind, end), nbytes in price.links.items():
                link = self._costs.own_link(kind, end, rank)
                self.network.link(link.name, link.capacity_bytes_per_s).total_bytes += nbytes * count

    # ---- loading ----------------------------------------------------------------------------------------------------

    def _opened(self, rank: RankProgram) -> tuple[Sequence[Instruction], Iterable[int]]:
        """Instructions, opened runs replaced by what they are made of; per instruction the number of its run, or -1."""
        if not [each for each in rank.instructions if type(each) is Run and each.opened]:
            return rank.instructions, repeat(NONE)
        instructions: list[Instruction] = []
        runs: list[int] = []
        for number, instruction in enumerate(rank.instructions):
            if type(instruction) is Run and instruction.opened:
                inner = list(open_run(instruction, rank.rank, number, rank.replicas))
                held = [Alloc("activations", sign * instruction.transient_bytes) for sign in (1, -1)]
                instructions += [held[0], *inner, held[1]] if instruction.transient_bytes else inner
                runs += [self.recorder.open(self._label(instruction))] * (len(instructions) - len(runs))
            else:
                instructions.append(instruction)
                runs.append(NONE)
        return instructions, runs

    def _load(self, rank: RankProgram, instructions: Sequence[Instruction], runs: Iterable[int]) -> None:
        """Makes one coroutine per stream of the rank, its instructions resolved into steps."""
        device = self._costs.device(self._costs.kind_of(rank.rank))
        gpu = Gpu(
            self._clock,
            self.network,
            self.recorder,
            rank=rank.rank,
            compute_rate=device.compute_rate_during_collectives,
            collective_rate=device.collective_rate_during_compute,
            rendezvous=self._program.stage_sync == "condition_variable",
        )
        self._gpus.append(gpu)
        for name, steps in self._steps(rank.rank, instructions, runs).items():
            if self._noise is not None and name == COMPUTE:
                steps = self._noise.disturbed(rank.rank, steps, self.recorder.opened)  # noqa: PLW2901
            self.lanes.append(Lane(rank.rank, rank.stage, name, rank.replicas))
            lane = len(self.lanes) - 1
            is_compute = name == COMPUTE
            self._clock.start(gpu.compute(lane, steps) if is_compute else gpu.communicate(name, lane, steps))

    def _steps(self, rank: int, instructions: Sequence[Instruction], runs: Iterable[int]) -> dict[str, list[Step]]:
        """Resolves instructions into steps by stream; the host issues them one after the other."""
        streams: defaultdict[str, list[Step]] = defaultdict(list)
        compute = streams[COMPUTE]
        counts: dict[Group, int] = {}
        launch_ns, issue = self._launch_ns, self._first_issue_ns
        letters = self._mail[rank]
        known: dict[int, tuple[Label, OperationPrice]] = {}
        new = tuple.__new__  # what a named tuple's own constructor calls, three times as fast
        for instruction, opened in zip(instructions, runs, strict=False):
            what = type(instruction)  # the most frequent ones first
            if what is Record or what is Wait:
                streams[instruction.stream].append(instruction)  # type: ignore[union-attr, arg-type]
            elif type(instruction) is Run:
                operation, microbatch, chunk, transient, _ = instruction
                same = known.get(id(operation))
                if same is None:
                    price = self._price(operation, rank)
                    same = known[id(operation)] = (self._label(instruction), price)
                (kind, name, _, _, layer), price = same
                label = new(Label, (kind, name, microbatch, chunk, layer))
                fields = (label, issue, price.gpu_ns, price.host_ns, price.flop, price, transient, NONE)
                compute.append(new(RunStep, fields))
                issue += price.issue_ns
            elif type(instruction) is Alloc:
                compute.append(instruction)
            elif type(instruction) is Recv:
                issue += instruction.launches * launch_ns
                mail = letters.get(instruction.tag)
                if mail is None:
                    mail = letters[instruction.tag] = Mail(instruction.peer, rank, instruction.tag)
                mail.is_awaited = True
                compute.append(mail)
            elif type(instruction) is Send:
                issue += instruction.launches * launch_ns
                streams[instruction.stream].append(self._send_step(instruction, rank, issue))
            elif type(instruction) is Launch:
                compute.append(self._launch_step(instruction, rank, issue, opened))
                issue += instruction.launches * launch_ns
            elif type(instruction) is Delay:
                issue += ns(instruction.delay_s)
            elif type(instruction) is Sync:
                compute.append(SyncStep(issue))
            elif type(instruction) is Collective:
                issue += launch_ns
                step = self._meet_step(instruction, rank, counts, issue, opened)
                streams[instruction.group.stream].append(step)
            elif type(instruction) is HostWork:
                issue += instruction.launches * launch_ns
                streams[instruction.stream].append(self._host_step(instruction, rank, issue))
        return streams

    def _label(self, run: Run) -> Label:
        operation = run.operation
        layer = operation.layers[0] if len(operation.layers) == 1 else NONE
        return Label(KIND[operation.phase], self.recorder.name(operation.name), run.microbatch, run.chunk, layer)

    def _launch_step(self, launch: Launch, rank: int, issue: int, opened: int) -> RunStep:
        kernel = launch.kernel
        label = Label(KIND[kernel_kind(kernel)], self.recorder.name(launch.name), layer=launch.layer)
        duration = self._costs.kernel_ns(kernel, self._costs.kind_of(rank))
        bound = launch.launches * self._launch_ns + duration
        return RunStep(label, issue, duration, bound, kernel.work.flop, None, 0, opened)

    def _meet_step(
        self, collective: Collective, rank: int, counts: dict[Group, int], issue: int, opened: int
    ) -> MeetStep:
        op, nbytes, group = collective.op, collective.nbytes, collective.group
        index = counts[group] = counts.get(group, -1) + 1
        meeting = self._meetings.get((group, index))
        if meeting is None:
            title = f"{op} {index} of a {group.stream} group of {len(group.ranks)} ranks"
            shared = self._loads(self._costs.shared_loads(op, nbytes, group))
            meeting = self._meetings[group, index] = Meeting(op, nbytes, title, len(self._members[group]), shared)
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
        name = self.recorder.name(collective.name or op)
        label = Label(KIND[op], name, collective.microbatch, collective.chunk, collective.layer)
        transfer = self._costs.collective(op, nbytes, group, rank)
        loads = self._loads(transfer.loads)
        timing = (transfer.latency_ns + ns(collective.extra_s), transfer.stream_ns, loads, transfer.intensity)
        return MeetStep(label, issue, nbytes, *timing, meeting, opened)

    def _send_step(self, send: Send, rank: int, issue: int) -> SendStep:
        letters = self._mail[send.peer]
        mail = letters.get(send.tag)
        if mail is None:
            mail = letters[send.tag] = Mail(rank, send.peer, send.tag)
        mail.is_sent = True
        if self._program.stage_buffer is not None:
            key = (send.peer, send.stream)
            mail.box = self._boxes.setdefault(key, Mailbox(self._program.stage_buffer))
        question = (send.nbytes, rank, send.peer, send.also)
        found = self._messages.get(question)
        if found is None:
            transfer = self._costs.messages(send.parts, rank, send.copies)
            loads = self._loads(transfer.loads)
            found = self._messages[question] = self.network.route(transfer.latency_ns, transfer.stream_ns, loads)
        new = tuple.__new__
        label = new(Label, (KIND["p2p"], self.recorder.name(send.stream), send.microbatch, NONE, NONE))
        carried = sum(nbytes for _, nbytes in send.parts) if send.also else send.nbytes
        return new(SendStep, (label, issue, carried, found, mail))

    def _host_step(self, work: HostWork, rank: int, issue: int) -> HostStep:
        question = (work.op, work.nbytes, rank, work.copies)
        route = self._host_works.get(question)
        if route is None:
            transfer = self._costs.host_work(*question)
            loads = self._loads(transfer.loads)
            route = self._host_works[question] = self.network.route(transfer.latency_ns, transfer.stream_ns, loads)
        is_copy = work.op != "update"
        kind = KIND["copy" if is_copy else "optimizer"]
        label = Label(kind, self.recorder.name(work.name), work.microbatch, layer=work.layer)
        return HostStep(label, issue, work.nbytes if is_copy else 0.0, route)  # a column holds FLOP of what computes

    def _loads(self, loads: Iterable[Load]) -> list[LinkLoad]:
        return [(self.network.link(x.link.name, x.link.capacity_bytes_per_s), x.nbytes, x.flows) for x in loads]

    # ---- pricing ----------------------------------------------------------------------------------------------------

    def _price(self, operation: Operation, rank: int) -> OperationPrice:
        """The price of an operation on the kind of device that a rank is."""
        key = (id(operation), self._costs.kind_of(rank))
        found = self._operations.get(key)
        if found is None:
            blocks = tuple(self._price_block(block, rank) for block in operation.blocks)
            found = self._operations[key] = OperationPrice(blocks, operation.layers)
        return found

    def _price_block(self, block: Block, rank: int) -> BlockPrice:
        """The (max,+) map of a block: it runs alone in both regimes, issued long ago and stream long free."""
        key = (id(block), self._costs.kind_of(rank))
        found = self._blocks.get(key)
        if found is not None:
            return found
        home = self._costs.home(rank)
        body = tuple(open_run(Run(Operation(block.name, "forward", (block,), (NONE,))), home, 0))
        alone = Program(ranks=(RankProgram(home, 0, 1, (), body),), launch_s=0.0)
        early = _Simulation(alone, self._costs, launch_ns=0)
        gpu_ns = early.run()
        late = _Simulation(alone, self._costs, launch_ns=self._launch_ns, first_issue_ns=gpu_ns)
        host_ns = late.run() - gpu_ns
        names = early.recorder.names
        rows, late_rows = early.recorder.by_lane(), late.recorder.by_lane()
        streams = (COMPUTE, *sorted({lane.stream for lane in early.lanes} - {COMPUTE}))
        stream = np.array([streams.index(early.lanes[row.lane].stream) for row in rows], np.int64)
        duration = np.array([row.end_ns - row.start_ns for row in rows], np.int64)
        kind = np.array([row.label.kind for row in rows], np.int64)
        busy = np.bincount(kind, weights=duration) if len(rows) else np.zeros(0)
        work = [i.kernel.work for i in block.body if isinstance(i, Launch)]
        price = self._blocks[key] = BlockPrice(
            gpu_ns=gpu_ns,
            host_ns=host_ns,
            issue_ns=self._launch_ns * host_launches(block.body),
            flop=sum(w.flop for w in work),
            busy_ns=tuple((int(k), int(busy[k])) for k in np.flatnonzero(busy)),
            exposed_ns=gpu_ns - int(duration[stream == 0].sum()),
            links=tuple(
                (*own, nbytes)
                for name, nbytes, _ in early.network.usage()
                if (own := self._costs.own_part(name, home)) is not None
            ),
            gpu_start_ns=np.array([row.start_ns for row in rows], np.int64),
            host_start_ns=np.array([row.start_ns for row in late_rows], np.int64) - gpu_ns,
            gpu_end_ns=np.array([row.end_ns for row in rows], np.int64),
            host_end_ns=np.array([row.end_ns for row in late_rows], np.int64) - gpu_ns,
            streams=streams,
            stream=stream,
            kind=kind,
            name=np.array([self.recorder.name(names[row.label.name]) for row in rows], np.int64),
            # the compute lane comes first and keeps the order of the launches
            nbytes=np.array([w.nbytes for w in work] + [row.value for row in rows[len(work) :]], np.float64),
            span_flop=np.array([w.flop for w in work] + [0.0] * (len(rows) - len(work)), np.float64),
        )
        return price
