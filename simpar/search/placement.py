"""Which GPU each rank should run on: the ranks that talk most should be near each other.

The traffic of a step, rank by rank, times the distance of their GPUs is a quadratic assignment problem. scipy's FAQ
heuristic (Vogelstein et al. 2015, "Fast approximate quadratic programming for graph matching") solves its relaxation,
and 2-opt exchanges pairs from there. Both minimise total traffic, not the busiest link, so the result is simulated and
counts only if its step is shorter.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simpar.errors import JobError
from simpar.hardware.cluster import Cluster
from simpar.hardware.fabric import Network
from simpar.job import Job
from simpar.plan.layout import lay_out
from simpar.program.ir import Collective, Program, Run, Send
from simpar.program.lower import lower
from simpar.simulation import simulate

if TYPE_CHECKING:
    from scipy.optimize import OptimizeResult

_MOST_RANKS = 1024
Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Placed:
    """A placement and what it brings.

    Attributes:
        placement: the GPU of each rank, for ``Cluster.placement``; None if none was found that shortens the step.
        before_s: step time as the job stands.
        after_s: step time with the placement.
    """

    placement: tuple[int, ...] | None
    before_s: float
    after_s: float

    @property
    def gain(self) -> float:
        """Share of the step that the placement saves."""
        return 1.0 - self.after_s / self.before_s if self.before_s else 0.0


def improve_placement(job: Job, *, seed: int = 0, allow_oom: bool = False) -> Placed:
    """Looks for a placement of the job's ranks that shortens its step.

    Args:
        job: the job; what placement its cluster has is what the search begins with.
        seed: of the heuristic's random choices.
        allow_oom: also where the job does not fit.

    Raises:
        JobError: too many ranks, or scipy is missing.
    """
    gpus = job.cluster.gpus
    if gpus > _MOST_RANKS:
        raise JobError(
            f"a placement of {gpus:,} ranks takes too long to look for; choose one for at most {_MOST_RANKS:,}, or set "
            "plan.rank_order"
        )
    layout = lay_out(job.plan, job.model, job.cluster)
    program = lower(job.model, job.cluster, layout, fold=False)
    amounts, apart = traffic(program, gpus), distances(job.cluster)
    start = np.asarray(program.placement or range(gpus))
    found = _solve(amounts, apart, start, seed)
    before = simulate(job, allow_oom=allow_oom)
    placement = tuple(int(gpu) for gpu in found)
    # the plan's own order is already part of what was found
    plan = job.plan.replace(rank_order="tp-dp-pp")
    moved = job.replace(cluster=job.cluster.replace(placement=placement), plan=plan)
    after = simulate(moved, allow_oom=allow_oom)
    if after.trace.step_ns >= before.trace.step_ns:
        return Placed(None, before.step_time_s, before.step_time_s)
    return Placed(placement, before.step_time_s, after.step_time_s)


def traffic(program: Program, ranks: int) -> Matrix:
    """Bytes from rank to rank in a step: rings of collectives in order of their members, and messages."""
    found = np.zeros((ranks, ranks))

    def add(collective: Collective, times: int) -> None:
        members = list(collective.group.ranks)
        if collective.op == "all_to_all":
            share = collective.nbytes / len(members)
            found[np.ix_(members, members)] += times * share / len(members)
            return
        passes = 2.0 if collective.op == "all_reduce" else 1.0
        wire = passes * (len(members) - 1) / len(members) * collective.nbytes
        for a, b in pairwise([*members, members[0]]):
            # every member's program has the collective, so each adds its part
            found[a, b] += times * wire / len(members)

    for rank in program.ranks:
        for instruction in rank.instructions:
            if isinstance(instruction, Collective):
                add(instruction, 1)
            elif isinstance(instruction, Send):
                found[rank.rank, instruction.peer] += instruction.nbytes
            elif isinstance(instruction, Run):
                for block in instruction.operation.blocks:
                    for inner in block.body:
                        if isinstance(inner, Collective):
                            add(_moved(inner, rank.rank), 1)
    np.fill_diagonal(found, 0.0)
    return found


def _moved(collective: Collective, rank: int) -> Collective:
    """A collective of a block, which is written for rank 0, as the group of another rank runs it."""
    ranks = collective.group.ranks
    assert isinstance(ranks, range), "the groups of blocks are ranges"
    first = rank - rank // ranks.step % len(ranks) * ranks.step
    group = type(collective.group)(collective.group.stream, range(first, first + len(ranks) * ranks.step, ranks.step))
    return collective._replace(group=group)


def distances(cluster: Cluster) -> Matrix:
    """Seconds a byte from GPU to GPU: the sum over the links on its way, each by its share."""
    network = Network(cluster)
    found = np.zeros((cluster.gpus, cluster.gpus))
    for a in range(cluster.gpus):
        for b in range(cluster.gpus):
            if a != b:
                found[a, b] = sum(share / link.capacity_bytes_per_s for link, share in network.spread(a, b))
    return found


def _solve(amounts: Matrix, apart: Matrix, start: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.int64]:
    """The better of the two heuristics' assignments."""
    try:
        from scipy.optimize import quadratic_assignment  # noqa: PLC0415 - an extra, and slow to import
    except ImportError:
        raise JobError("looking for a placement needs scipy; install simpar[placement]") from None
    rng = np.random.default_rng(seed)
    scaled, near = amounts / (amounts.max() or 1.0), apart / (apart.max() or 1.0)
    begin = np.column_stack([np.arange(len(start)), start])
    tries: list[OptimizeResult] = [
        quadratic_assignment(scaled, near, method="2opt", options={"partial_guess": begin, "rng": rng})
    ]
    relaxed = quadratic_assignment(scaled, near, method="faq", options={"rng": rng})
    refined = np.column_stack([np.arange(len(start)), relaxed.col_ind])
    tries.append(quadratic_assignment(scaled, near, method="2opt", options={"partial_guess": refined, "rng": rng}))
    best: npt.NDArray[np.int64] = min(tries, key=lambda one: float(one.fun)).col_ind
    return best
