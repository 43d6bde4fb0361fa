"""Finds the instruction behind every span of a result, and when its host had issued it.

Streams are in-order, so the n-th span of a lane is the n-th instruction of that rank's stream.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simpar.program.ir import (
    COMPUTE,
    Collective,
    Launch,
    Program,
    Recv,
    Run,
    Send,
    Sync,
    host_launches,
)
from simpar.program.lower import lower
from simpar.result import Result
from simpar.trace.trace import Trace

Executed = Run | Launch | Collective | Send
"""An instruction that leaves a span."""


class HostWait(NamedTuple):
    """A place at which the host of a rank waits for its compute stream.

    Attributes:
        launches: calls that it had made before.
        computed: operations and kernels before it on the compute stream.
    """

    launches: int
    computed: int


@dataclass(frozen=True, slots=True)
class Step:
    """What a span executes.

    Attributes:
        instruction: of the program.
        rank: global rank that executes it.
        launches: calls that the host had made before it could start; for a message or collective, its own included.
        waits: places before it at which the host waited for the device, in order.
    """

    instruction: Executed
    rank: int
    launches: int
    waits: tuple[HostWait, ...] = ()


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


def steps_of(result: Result) -> Steps:
    """The instructions behind a result's spans; the program is lowered anew, which is deterministic."""
    simulated = frozenset(lane.rank for lane in result.trace.lanes)
    job = result.job
    program = lower(job.model, job.cluster, result.layout)
    if frozenset(rank.rank for rank in program.ranks) != simulated:
        program = lower(job.model, job.cluster, result.layout, fold=False)
    return match(program, result.trace)


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


def _by_stream(rank: int, instructions: tuple[object, ...]) -> dict[str, list[Step]]:
    streams: defaultdict[str, list[Step]] = defaultdict(list)
    launches = 0
    waits: tuple[HostWait, ...] = ()
    for instruction in instructions:
        if isinstance(instruction, Run):
            streams[COMPUTE].append(Step(instruction, rank, launches, waits))
            launches += sum(host_launches(block.body) for block in instruction.operation.blocks)
        elif isinstance(instruction, Launch):
            streams[COMPUTE].append(Step(instruction, rank, launches, waits))
            launches += instruction.launches
        elif isinstance(instruction, (Send, Collective)):
            launches += instruction.launches if isinstance(instruction, Send) else 1
            stream = instruction.stream if isinstance(instruction, Send) else instruction.group.stream
            streams[stream].append(Step(instruction, rank, launches, waits))
        elif isinstance(instruction, Recv):
            launches += instruction.launches
        elif isinstance(instruction, Sync):
            waits = (*waits, HostWait(launches, len(streams[COMPUTE])))
    return streams
