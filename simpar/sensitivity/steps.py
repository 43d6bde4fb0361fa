"""Finds the instruction behind every span of a result, and when its host had issued it.

Streams are in-order, so the n-th span of a lane is the n-th instruction of that rank's stream.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from simpar.engine.simulate import execute
from simpar.program.ir import (
    COMPUTE,
    Collective,
    Group,
    HostWork,
    Instruction,
    Launch,
    Program,
    RankProgram,
    Recv,
    Run,
    Send,
    host_launches,
    open_run,
)
from simpar.program.lower import lower
from simpar.result import Result
from simpar.trace.trace import Trace

Executed = Run | Launch | Collective | Send | HostWork
"""An instruction that leaves a span."""


@dataclass(frozen=True, slots=True)
class Step:
    """What a span executes.

    Attributes:
        instruction: of the program.
        rank: global rank that executes it.
        launches: calls that the host had made before it could start; for a message or collective, its own included.
        turn: of a collective, how many of its group the rank had before it.
    """

    instruction: Executed
    rank: int
    launches: int
    turn: int = 0


@dataclass(frozen=True, slots=True)
class Steps:
    """A program beside its trace.

    Attributes:
        program: what the ranks ran.
        trace: what happened.
        of: per row of the trace's spans, what it executed.
        ranks: the simulated ranks.
    """

    program: Program
    trace: Trace
    of: tuple[Step, ...]
    ranks: frozenset[int]

    def launches_after(self, row: int) -> int:
        """Calls that the host has made once it issued the row."""
        step = self.of[row]
        own = step.instruction if isinstance(step.instruction, (Run, Launch)) else None  # others count their own
        return step.launches + (0 if own is None else _launches_of(own))


def _launches_of(computed: Run | Launch) -> int:
    """Calls of the host for an operation or a kernel."""
    if isinstance(computed, Launch):
        return computed.launches
    return sum(host_launches(block.body) for block in computed.operation.blocks)


def steps_of(result: Result) -> Steps:
    """The instructions behind a result's spans; the program is lowered anew, which is deterministic.

    What was simulated kernel by kernel is so once more, with a span for each kernel instead of one for all. (Not where
    kernels have noise, which would be other noise; there such an operation is taken to scale as a whole.)
    """
    simulated = frozenset(lane.rank for lane in result.trace.lanes)
    job = result.job
    faults = job.faults if job.faults.any else None
    program = lower(job.model, job.cluster, result.layout, faults=faults)
    if frozenset(rank.rank for rank in program.ranks) != simulated:
        program = lower(job.model, job.cluster, result.layout, fold=False, faults=faults)
    if not job.faults.jitter.spread and any(map(_is_opened, chain(*(rank.instructions for rank in program.ranks)))):
        program = replace(program, ranks=tuple(replace(r, instructions=_in_full(r)) for r in program.ranks))
        return match(program, execute(program, job.cluster, faults))
    return match(program, result.trace)


def _is_opened(instruction: Instruction) -> bool:
    return isinstance(instruction, Run) and instruction.opened


def _in_full(rank: RankProgram) -> tuple[Instruction, ...]:
    """The instructions of a rank, opened runs replaced by what they are made of."""
    found: list[Instruction] = []
    for number, instruction in enumerate(rank.instructions):
        if isinstance(instruction, Run) and instruction.opened:
            found += open_run(instruction, rank.rank, number, rank.replicas)
        else:
            found.append(instruction)
    return tuple(found)


def match(program: Program, trace: Trace) -> Steps:
    """Lays a program beside its trace."""
    streams: dict[tuple[int, str], list[Step]] = {}
    for rank in program.ranks:
        for stream, steps in _by_stream(rank.rank, rank.instructions).items():
            streams[rank.rank, stream] = steps
    found: list[Step | None] = [None] * len(trace.spans)
    for index, lane in enumerate(trace.lanes):
        rows = np.flatnonzero(trace.spans.lane == index)
        steps = streams.get((lane.rank, lane.stream), [])
        if not len(rows):
            continue
        assert len(rows) == len(steps), f"{lane} has {len(rows)} spans of {len(steps)} instructions"
        for row, step in zip(rows.tolist(), steps, strict=True):
            found[row] = step
    return Steps(program, trace, tuple(step for step in found if step is not None), frozenset(r for r, _ in streams))


def _by_stream(rank: int, instructions: tuple[Instruction, ...]) -> dict[str, list[Step]]:
    streams: defaultdict[str, list[Step]] = defaultdict(list)
    turns: Counter[Group] = Counter()
    launches = 0
    for instruction in instructions:
        if isinstance(instruction, Run):
            streams[COMPUTE].append(Step(instruction, rank, launches))
            launches += _launches_of(instruction)
        elif isinstance(instruction, Launch):
            streams[COMPUTE].append(Step(instruction, rank, launches))
            launches += instruction.launches
        elif isinstance(instruction, Collective):
            launches += 1
            group = instruction.group
            streams[group.stream].append(Step(instruction, rank, launches, turns[group]))
            turns[group] += 1
        elif isinstance(instruction, (Send, HostWork)):
            launches += instruction.launches
            streams[instruction.stream].append(Step(instruction, rank, launches))
        elif isinstance(instruction, Recv):
            launches += instruction.launches
    return streams
