"""Runs a program on the clock: one environment per run, no state outside it."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat

import numpy as np

from simpar.engine.clock import Clock
from simpar.engine.costs import Costs, Load
from simpar.engine.gpu import (
    AllocStep,
    Gpu,
    Mail,
    Mailbox,
    Meeting,
    MeetStep,
    ReceiveStep,
    RecordStep,
    RunStep,
    SendStep,
    Step,
    WaitStep,
    awaited,
)
from simpar.engine.network import LinkLoad, Network, Route
from simpar.engine.price import BlockPrice, OperationPrice
from simpar.engine.record import build_trace
from simpar.engine.rows import CATEGORY, KIND, Label, Recorder
from simpar.errors import DeadlockError
from simpar.hardware.cluster import Cluster
from simpar.model.work import kernel_kind
from simpar.program.ir import (
    COMPUTE,
    Alloc,
    Block,
    Collective,
    Group,
    Instruction,
    Launch,
    Operation,
    Program,
    RankProgram,
    Record,
    Recv,
    Run,
    Send,
    Wait,
    host_launches,
    open_run,
)
from simpar.trace.trace import NONE, Lane, Trace
from simpar.units import ns


def execute(program: Program, cluster: Cluster) -> Trace:
    """Simulates one step.

    Args:
        program: what the ranks run.
        cluster: where they run it.

    Returns:
        The trace; equal programs on equal clusters give equal traces.

    Raises:
        DeadlockError: ranks wait for each other; the message names each and what it waits for.
    """
    simulation = _Simulation(program, Costs(cluster, program.algorithm), launch_ns=ns(program.launch_s))
    step_ns = simulation.run()
    simulation.book_block_traffic()
    return build_trace(simulation.recorder, simulation.lanes, simulation.network, program.ranks, step_ns)


class _Simulation:
    """One run: loads rank programs into streams and lets the clock go."""

    def __init__(self, program: Program, costs: Costs, *, launch_ns: int, first_issue_ns: int = 0) -> None:
        self.recorder = Recorder()
        self.lanes: list[Lane] = []
        self._clock = Clock()
        self.network = Network(self._clock)
        self._costs = costs
        self._launch_ns = launch_ns
        self._first_issue_ns = first_issue_ns
        self._program = program
        self._gpus: list[Gpu] = []
        self._mail: dict[tuple[int, Hashable], Mail] = {}
        self._boxes: dict[tuple[int, str], Mailbox] = {}
        self._meetings: dict[tuple[Group, int], Meeting] = {}
        self._members: dict[Group, set[int]] = {}
        self._blocks: dict[int, BlockPrice] = {}
        self._operations: dict[int, OperationPrice] = {}
        self._messages: dict[tuple[float, int, int], Route] = {}
        opened = [self._opened(rank) for rank in program.ranks]
        for rank, (instructions, _) in zip(program.ranks, opened, strict=True):
            for instruction in instructions:
                if type(instruction) is Collective:
                    self._members.setdefault(instruction.group, set()).add(rank.rank)
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
        for mail in self._mail.values():
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
            for (kind, way), nbytes in price.links.items():
                links = self._costs.own_links(kind, rank)
                link = next(link for link in links if link.name.endswith(way))
                self.network.link(link.name, link.capacity_bytes_per_s).total_bytes += nbytes * count

    # ---- loading ----------------------------------------------------------------------------------------------------

    def _opened(self, rank: RankProgram) -> tuple[Sequence[Instruction], Iterable[int]]:
        """Instructions, opened runs replaced by what they are made of; per instruction the number of its run, or -1."""
        if not any(type(instruction) is Run and instruction.opened for instruction in rank.instructions):
            return rank.instructions, repeat(NONE)
        instructions: list[Instruction] = []
        runs: list[int] = []
        for number, instruction in enumerate(rank.instructions):
            if type(instruction) is Run and instruction.opened:
                inner = list(open_run(instruction, rank.rank, number))
                held = [Alloc("activations", sign * instruction.transient_bytes) for sign in (1, -1)]
                instructions += [held[0], *inner, held[1]] if instruction.transient_bytes else inner
                runs += [self.recorder.open(self._label(instruction))] * (len(instructions) - len(runs))
            else:
                instructions.append(instruction)
                runs.append(NONE)
        return instructions, runs

    def _load(self, rank: RankProgram, instructions: Sequence[Instruction], runs: Iterable[int]) -> None:
        """Makes one coroutine per stream of the rank, its instructions resolved into steps."""
        device = self._costs.device
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
        events: dict[Hashable, int] = {}
        streams = self._steps(rank.rank, instructions, runs, events)
        gpu.events = [None] * len(events)
        for name, steps in streams.items():
            self.lanes.append(Lane(rank.rank, rank.stage, name, rank.replicas))
            lane = len(self.lanes) - 1
            is_compute = name == COMPUTE
            self._clock.start(gpu.compute(lane, steps) if is_compute else gpu.communicate(name, lane, steps))

    def _steps(
        self, rank: int, instructions: Sequence[Instruction], runs: Iterable[int], events: dict[Hashable, int]
    ) -> dict[str, list[Step]]:
        """Resolves instructions into steps by stream; the host issues them one after the other."""
        streams: defaultdict[str, list[Step]] = defaultdict(list)
        compute = streams[COMPUTE]
        counts: dict[Group, int] = {}
        launch_ns, issue = self._launch_ns, self._first_issue_ns
        for instruction, opened in zip(instructions, runs, strict=False):
            if type(instruction) is Run:
                price = self._price(instruction.operation)
                label, transient = self._label(instruction), instruction.transient_bytes
                compute.append(RunStep(label, issue, price.gpu_ns, price.host_ns, price.flop, price, transient, NONE))
                issue += price.issue_ns
            elif type(instruction) is Record:
                streams[instruction.stream].append(RecordStep(events.setdefault(instruction.event, len(events))))
            elif type(instruction) is Wait:
                number = events.setdefault(instruction.event, len(events))
                streams[instruction.stream].append(WaitStep(number, instruction.event))
            elif type(instruction) is Launch:
                compute.append(self._launch_step(instruction, issue, opened))
                issue += instruction.launches * launch_ns
            elif type(instruction) is Alloc:
                compute.append(AllocStep(CATEGORY[instruction.category], instruction.nbytes))
            elif type(instruction) is Recv:
                issue += launch_ns
                mail = self._letter(instruction.peer, rank, instruction.tag)
                mail.is_awaited = True
                compute.append(ReceiveStep(mail))
            elif type(instruction) is Send:
                issue += launch_ns
                streams[instruction.stream].append(self._send_step(instruction, rank, issue))
            elif type(instruction) is Collective:
                issue += launch_ns
                step = self._meet_step(instruction, rank, counts, issue, opened)
                streams[instruction.group.stream].append(step)
        return streams

    def _label(self, run: Run) -> Label:
        operation = run.operation
        layer = operation.layers[0] if len(operation.layers) == 1 else NONE
        return Label(KIND[operation.phase], self.recorder.name(operation.name), run.microbatch, run.chunk, layer)

    def _launch_step(self, launch: Launch, issue: int, opened: int) -> RunStep:
        kernel = launch.kernel
        label = Label(KIND[kernel_kind(kernel)], self.recorder.name(launch.name), layer=launch.layer)
        duration = self._costs.kernel_ns(kernel)
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
        timing = (transfer.latency_ns, transfer.stream_ns, loads, transfer.intensity)
        return MeetStep(label, issue, nbytes, *timing, meeting, opened)

    def _send_step(self, send: Send, rank: int, issue: int) -> SendStep:
        mail = self._letter(rank, send.peer, send.tag)
        mail.is_sent = True
        if self._program.stage_buffer is not None:
            key = (send.peer, send.stream)
            mail.box = self._boxes.setdefault(key, Mailbox(self._program.stage_buffer))
        question = (send.nbytes, rank, send.peer)
        found = self._messages.get(question)
        if found is None:
            transfer = self._costs.message(*question, send.copies)
            loads = self._loads(transfer.loads)
            found = self._messages[question] = self.network.route(transfer.latency_ns, transfer.stream_ns, loads)
        label = Label(KIND["p2p"], self.recorder.name(send.stream), send.microbatch)
        return SendStep(label, issue, send.nbytes, found, mail)

    def _loads(self, loads: Iterable[Load]) -> list[LinkLoad]:
        return [(self.network.link(x.link.name, x.link.capacity_bytes_per_s), x.nbytes, x.flows) for x in loads]

    def _letter(self, source: int, target: int, tag: Hashable) -> Mail:
        mail = self._mail.get((target, tag))
        if mail is None:
            mail = self._mail[target, tag] = Mail(source, target, tag)
        return mail

    # ---- pricing ----------------------------------------------------------------------------------------------------

    def _price(self, operation: Operation) -> OperationPrice:
        found = self._operations.get(id(operation))
        if found is None:
            blocks = tuple(self._price_block(block) for block in operation.blocks)
            found = self._operations[id(operation)] = OperationPrice(blocks, operation.layers)
        return found

    def _price_block(self, block: Block) -> BlockPrice:
        """The (max,+) map of a block: it runs alone in both regimes, issued long ago and stream long free."""
        found = self._blocks.get(id(block))
        if found is not None:
            return found
        alone = Program(ranks=(RankProgram(0, 0, 1, (), block.body),), launch_s=0.0)
        early = _Simulation(alone, self._costs, launch_ns=0)
        gpu_ns = early.run()
        late = _Simulation(alone, self._costs, launch_ns=self._launch_ns, first_issue_ns=gpu_ns)
        host_ns = late.run() - gpu_ns
        names = early.recorder.names
        rows, late_rows = early.recorder.by_lane(), late.recorder.by_lane()
        on_tp = np.array([early.lanes[row.lane].stream != COMPUTE for row in rows], np.bool_)
        duration = np.array([row.end_ns - row.start_ns for row in rows], np.int64)
        kind = np.array([row.label.kind for row in rows], np.int64)
        busy = np.bincount(kind, weights=duration) if len(rows) else np.zeros(0)
        work = [i.kernel.work for i in block.body if isinstance(i, Launch)]
        price = self._blocks[id(block)] = BlockPrice(
            gpu_ns=gpu_ns,
            host_ns=host_ns,
            issue_ns=self._launch_ns * host_launches(block.body),
            flop=sum(w.flop for w in work),
            busy_ns=tuple((int(k), int(busy[k])) for k in np.flatnonzero(busy)),
            exposed_ns=gpu_ns - int(duration[~on_tp].sum()),
            # alone, the block ran as rank 0
            links=tuple((name[:3], name[-1], nbytes) for name, nbytes, _ in early.network.usage()),
            gpu_start_ns=np.array([row.start_ns for row in rows], np.int64),
            host_start_ns=np.array([row.start_ns for row in late_rows], np.int64) - gpu_ns,
            gpu_end_ns=np.array([row.end_ns for row in rows], np.int64),
            host_end_ns=np.array([row.end_ns for row in late_rows], np.int64) - gpu_ns,
            on_tp=on_tp,
            kind=kind,
            name=np.array([self.recorder.name(names[row.label.name]) for row in rows], np.int64),
            # the compute lane comes first and keeps the order of the launches
            nbytes=np.array([w.nbytes for w in work] + [row.value for row in rows[len(work) :]], np.float64),
            span_flop=np.array([w.flop for w in work] + [0.0] * (len(rows) - len(work)), np.float64),
        )
        return price
