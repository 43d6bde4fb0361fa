"""Several jobs on one fabric: their steps in one simulation, so that they share its links.

The jobs' ranks follow each other, and the cluster's ``placement`` says on which GPUs they run; where two jobs have
nodes below the same leaf switch, their traffic meets on its uplinks. Each job runs so many steps that all last about
equally long, and what a job's step takes is the mean of its own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from simpar.engine.simulate import execute
from simpar.errors import JobError
from simpar.hardware.cluster import Cluster
from simpar.job import Job
from simpar.plan.layout import lay_out
from simpar.program.ir import Collective, Group, Instruction, Program, RankProgram, Record, Recv, Send, Wait
from simpar.program.lower import lower
from simpar.trace.trace import Trace

_MOST_STEPS = 64


@dataclass(frozen=True)
class Neighbours:
    """What jobs do to each other.

    Attributes:
        alone_s: step time of each job with the fabric to itself.
        together_s: step time of each beside the others.
        trace: of the common run.
    """

    alone_s: tuple[float, ...]
    together_s: tuple[float, ...]
    trace: Trace

    @property
    def slowdowns(self) -> tuple[float, ...]:
        """Step time beside the others over step time alone."""
        return tuple(together / alone for together, alone in zip(self.together_s, self.alone_s, strict=True))


def simulate_together(jobs: Sequence[Job], cluster: Cluster) -> Neighbours:
    """Simulates jobs that share a cluster.

    Args:
        jobs: each with a cluster of the size of its own part.
        cluster: all of it; ranks of the jobs follow each other, and run where its ``placement`` puts them.

    Raises:
        JobError: the parts do not make up the cluster, or the jobs differ in what one simulation has in common.
    """
    sizes = [job.cluster.gpus for job in jobs]
    if sum(sizes) != cluster.gpus:
        raise JobError(
            f"jobs of {' + '.join(map(str, sizes))} GPUs do not make up the cluster's {cluster.gpus}; give each job a "
            "cluster of the size of its part"
        )
    programs = [lower(job.model, job.cluster, lay_out(job.plan, job.model, job.cluster), fold=False) for job in jobs]
    for field in ("launch_s", "algorithm", "stage_sync", "stage_buffer"):
        values = {getattr(program, field) for program in programs}
        if len(values) > 1:
            raise JobError(f"jobs that run together must agree in {field}, but have {values}; set it in each plan")
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    parts = list(zip(programs, offsets, sizes, strict=True))
    alone_s = tuple(
        _end_s(execute(_merge([(program, offset, 1)]), cluster), range(offset, offset + size))
        for program, offset, size in parts
    )
    steps = [min(ceil(max(alone_s) / one), _MOST_STEPS) for one in alone_s]
    merged = _merge([(program, offset, count) for (program, offset, _), count in zip(parts, steps, strict=True)])
    trace = execute(merged, cluster)
    together_s = tuple(
        _end_s(trace, range(offset, offset + size)) / count
        for (_, offset, size), count in zip(parts, steps, strict=True)
    )
    return Neighbours(alone_s, together_s, trace)


def _merge(parts: Sequence[tuple[Program, int, int]]) -> Program:
    """One program of several: each with its ranks moved up by an offset, and as many times over as it has steps."""
    ranks = tuple(
        replace(rank, rank=rank.rank + offset, instructions=tuple(_repeated(rank, offset, steps)))
        for program, offset, steps in parts
        for rank in program.ranks
    )
    return replace(parts[0][0], ranks=ranks, placement=None)


def _repeated(rank: RankProgram, offset: int, steps: int) -> Iterator[Instruction]:
    for step in range(steps):
        for instruction in rank.instructions:
            yield _moved(instruction, offset, step)


def _moved(instruction: Instruction, offset: int, step: int) -> Instruction:
    """An instruction of the job whose ranks begin at ``offset``, with events and messages of its own in each step."""
    if isinstance(instruction, Collective):
        group = instruction.group
        ranks: range | tuple[int, ...] = tuple(rank + offset for rank in group.ranks)
        if isinstance(group.ranks, range):
            ranks = range(group.ranks.start + offset, group.ranks.stop + offset, group.ranks.step)
        return instruction._replace(group=Group(group.stream, ranks))
    if isinstance(instruction, Send | Recv):
        return instruction._replace(peer=instruction.peer + offset, tag=(step, instruction.tag))
    if isinstance(instruction, Record | Wait):
        return instruction._replace(event=(step, instruction.event))
    return instruction


def _end_s(trace: Trace, ranks: range) -> float:
    mine = np.array([lane.rank in ranks for lane in trace.lanes], np.bool_)
    return float(trace.spans.end_ns[mine[trace.spans.lane]].max()) * 1e-9
