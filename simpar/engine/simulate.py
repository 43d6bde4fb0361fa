"""Runs a program on the clock: one environment per run, no state outside it."""

from collections.abc import Iterable, Iterator

import numpy as np
import simpy

from simpar.engine.costs import Costs, Load, Transfer
from simpar.engine.gpu import (
    ALLOC,
    COLLECTIVE,
    RECORD,
    RECV,
    RUN,
    SEND,
    WAIT,
    Gpu,
    Mail,
    Mailbox,
    Meeting,
    Step,
)
from simpar.engine.network import Link, Network
from simpar.engine.price import BlockPrice, OperationPrice
from simpar.engine.record import build_trace
from simpar.engine.rows import CATEGORY, KIND, Label, Recorder, kind_of
from simpar.errors import DeadlockError
from simpar.hardware.cluster import Cluster
from simpar.program.ir import (
    COMPUTE,
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
    return build_trace(simulation.recorder, simulation.lanes, simulation.network, program.ranks, step_ns)


class _Simulation:
    """One run: loads rank programs into streams and lets the clock go."""

    def __init__(self, program: Program, costs: Costs, *, launch_ns: int, first_issue_ns: int = 0) -> None:
        self.recorder = Recorder()
        self.lanes: list[Lane] = []
        self._env = simpy.Environment()
        self.network = Network(self._env)
        self._costs = costs
        self._launch_ns = launch_ns
        self._first_issue_ns = first_issue_ns
        self._program = program
        self._gpus: list[Gpu] = []
        self._mail: dict[tuple[int, str], Mail] = {}
        self._boxes: dict[tuple[int, str], Mailbox] = {}
        self._meetings: dict[tuple[Group, int], Meeting] = {}
        self._members: dict[Group, set[int]] = {}
        self._blocks: dict[int, BlockPrice] = {}
        self._operations: dict[int, OperationPrice] = {}
        flat = [list(self._instructions(rank)) for rank in program.ranks]
        for rank, instructions in zip(program.ranks, flat, strict=True):
            for instruction, _ in instructions:
                if isinstance(instruction, Collective):
                    self._members.setdefault(instruction.group, set()).add(rank.rank)
        for rank, instructions in zip(program.ranks, flat, strict=True):
            self._load(rank, instructions)

    def run(self) -> int:
        """Lets the clock go; returns the end of the last span."""
        self._env.run()
        stuck = [(gpu.rank, stream, step) for gpu in self._gpus for stream, step in gpu.where.items()]
        if stuck:
            shown = "; ".join(f"rank {rank} ({stream}) waits for {step.text}" for rank, stream, step in stuck[:8])
            more = f"; and {len(stuck) - 8} more streams" if len(stuck) > 8 else ""
            raise DeadlockError(
                f"no instruction can run at {self._env.now} ns: {shown}{more}; "
                "check that sends, receives and collectives pair up in the same order"
            )
        return max((row.end_ns for row in self.recorder.rows), default=0)

    # ---- loading ----------------------------------------------------------------------------------------------------

    def _instructions(self, rank: RankProgram) -> Iterator[tuple[Instruction, int]]:
        """Instructions with the number of the opened run that they belong to, or -1."""
        for number, instruction in enumerate(rank.instructions):
            if isinstance(instruction, Run) and instruction.opened:
                key = self.recorder.open(self._run_label(instruction))
                for inner in open_run(instruction, rank.rank, number):
                    yield inner, key
            else:
                yield instruction, NONE

    def _load(self, rank: RankProgram, instructions: Iterable[tuple[Instruction, int]]) -> None:
        """Makes one process per stream of the rank, its instructions resolved into steps."""
        device = self._costs.device
        gpu = Gpu(
            self._env,
            self.network,
            self.recorder,
            rank=rank.rank,
            compute_rate=device.compute_rate_during_collectives,
            collective_rate=device.collective_rate_during_compute,
            rendezvous=self._program.stage_sync == "condition_variable",
        )
        self._gpus.append(gpu)
        streams: dict[str, list[Step]] = {COMPUTE: []}
        events: dict[str, int] = {}
        for stream, step in self._steps(rank, instructions, events):
            streams.setdefault(stream, []).append(step)
        gpu.events = [None] * len(events)
        for name, steps in streams.items():
            self.lanes.append(Lane(rank.rank, rank.stage, name, rank.replicas))
            self._env.process(gpu.stream(name, len(self.lanes) - 1, steps))

    def _steps(
        self, rank: RankProgram, instructions: Iterable[tuple[Instruction, int]], events: dict[str, int]
    ) -> Iterator[tuple[str, Step]]:
        """Resolves instructions into steps; the host issues them one after the other."""
        counts: dict[Group, int] = {}
        issue = self._first_issue_ns
        for instruction, opened in instructions:
            match instruction:
                case Run(operation=operation):
                    price = self._price(operation)
                    yield COMPUTE, self._run_step(instruction, price, issue)
                    issue += price.issue_ns
                case Launch(kernel=kernel):
                    duration, launch_ns = (
                        self._costs.kernel_ns(kernel),
                        instruction.launches * self._launch_ns,
                    )
                    label = Label(KIND[kind_of(kernel)], self.recorder.name(instruction.name))
                    yield (
                        COMPUTE,
                        Step(
                            RUN,
                            issue,
                            label,
                            work_ns=duration,
                            bound_ns=launch_ns + duration,
                            value=kernel.work.flop,
                            opened=opened,
                        ),
                    )
                    issue += launch_ns
                case Record(stream=stream, event=event) | Wait(stream=stream, event=event):
                    code = RECORD if isinstance(instruction, Record) else WAIT
                    number = events.setdefault(event, len(events))
                    yield stream, Step(code, event=number, text=f"event '{event}'")
                case Collective(group=group):
                    issue += self._launch_ns
                    step = self._collective_step(instruction, rank.rank, counts, issue)
                    step.opened = opened
                    yield group.stream, step
                case Send(stream=stream):
                    issue += self._launch_ns
                    yield stream, self._send_step(instruction, rank.rank, issue)
                case Recv(peer=peer, tag=tag):
                    issue += self._launch_ns
                    yield (
                        COMPUTE,
                        Step(RECV, mail=self._letter(rank.rank, tag), text=f"message '{tag}' from rank {peer}"),
                    )
                case _:
                    yield (
                        COMPUTE,
                        Step(ALLOC, category=CATEGORY[instruction.category], value=instruction.nbytes),
                    )

    def _run_step(self, run: Run, price: OperationPrice, issue: int) -> Step:
        return Step(
            RUN,
            issue,
            self._run_label(run),
            work_ns=price.gpu_ns,
            bound_ns=price.host_ns,
            value=price.flop,
            price=price,
            transient_bytes=run.transient_bytes,
        )

    def _run_label(self, run: Run) -> Label:
        operation = run.operation
        layer = operation.layers[0] if len(operation.layers) == 1 else NONE
        return Label(KIND[operation.phase], self.recorder.name(operation.name), run.microbatch, run.chunk, layer)

    def _collective_step(self, collective: Collective, rank: int, counts: dict[Group, int], issue: int) -> Step:
        group = collective.group
        index = counts[group] = counts.get(group, -1) + 1
        meeting = self._meetings.get((group, index))
        if meeting is None:
            shared = self._loads(self._costs.shared_loads(collective.op, collective.nbytes, group))
            meeting = self._meetings[group, index] = Meeting(len(self._members[group]), collective.op, shared)
        if meeting.op != collective.op:
            raise DeadlockError(
                f"rank {rank} runs {collective.op} as number {index} of its {group.stream} group, where another member "
                f"runs {meeting.op}; give all members the same order"
            )
        name = self.recorder.name(collective.name or collective.op)
        label = Label(KIND[collective.op], name, collective.microbatch, collective.chunk, collective.layer)
        transfer = self._costs.collective(collective.op, collective.nbytes, group, rank)
        text = f"{collective.op} number {index} of the {group.stream} group of {len(group.ranks)} ranks"
        return self._transfer_step(COLLECTIVE, issue, label, transfer, collective.nbytes, text, meeting=meeting)

    def _send_step(self, send: Send, rank: int, issue: int) -> Step:
        mail = self._letter(send.peer, send.tag)
        if self._program.stage_buffer is not None:
            key = (send.peer, send.stream)
            mail.box = self._boxes.setdefault(key, Mailbox(self._program.stage_buffer))
        label = Label(KIND["p2p"], self.recorder.name(send.stream), send.microbatch)
        transfer = self._costs.message(send.nbytes, rank, send.peer, send.copies)
        text = f"rank {send.peer} to take message '{send.tag}'"
        return self._transfer_step(SEND, issue, label, transfer, send.nbytes, text, mail=mail)

    def _transfer_step(
        self,
        code: int,
        issue: int,
        label: Label,
        transfer: Transfer,
        nbytes: float,
        text: str,
        *,
        meeting: Meeting | None = None,
        mail: Mail | None = None,
    ) -> Step:
        return Step(
            code,
            issue,
            label,
            work_ns=transfer.stream_ns,
            latency_ns=transfer.latency_ns,
            value=nbytes,
            loads=self._loads(transfer.loads),
            meeting=meeting,
            mail=mail,
            text=text,
        )

    def _loads(self, loads: Iterable[Load]) -> list[tuple[Link, float, int]]:
        return [(self.network.link(x.link.name, x.link.capacity_bytes_per_s), x.nbytes, x.flows) for x in loads]

    def _letter(self, rank: int, tag: str) -> Mail:
        return self._mail.setdefault((rank, tag), Mail())

    # ---- pricing ----------------------------------------------------------------------------------------------------

    def _price(self, operation: Operation) -> OperationPrice:
        found = self._operations.get(id(operation))
        if found is None:
            blocks = tuple(self._price_block(block) for block in operation.blocks)
            found = self._operations[id(operation)] = OperationPrice(blocks, operation.layers)
        return found

    def _price_block(self, block: Block) -> BlockPrice:
        """The (max,+) map of a block, found by running it alone in both regimes: issued long ago, and stream long free."""
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
            gpu_start_ns=np.array([row.start_ns for row in rows], np.int64),
            host_start_ns=np.array([row.start_ns for row in late_rows], np.int64) - gpu_ns,
            duration_ns=duration,
            on_tp=on_tp,
            kind=kind,
            name=np.array([self.recorder.name(names[row.label.name]) for row in rows], np.int64),
            # the compute lane comes first and keeps the order of the launches
            nbytes=np.array([w.nbytes for w in work] + [row.value for row in rows[len(work) :]], np.float64),
            span_flop=np.array([w.flop for w in work] + [0.0] * (len(rows) - len(work)), np.float64),
        )
        return price
