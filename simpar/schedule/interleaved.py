"""Interleaved 1F1B: each rank holds several chunks of the model, which divides the bubble by their number."""

from simpar.errors import PlanError
from simpar.schedule.schedule import Action, Schedule, alternate, require_chunks, require_counts


def interleaved(pp: int, microbatches: int, chunks: int, group: int | None = None) -> Schedule:
    """1F1B over ``chunks`` model chunks per rank; chunk c of rank r is virtual stage c · pp + r.

    A rank takes ``group`` microbatches through one chunk, then the same ones through the next, and turns to
    the next group after its last chunk. Rank r runs 2 (pp - r - 1) + (chunks - 1) · group forwards ahead, at
    most all of them (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.2; Megatron-Core
    ``get_pp_rank_microbatches`` and ``get_schedule_table``).

    Which ``microbatches`` are legal depends on ``group``:

    * left open, all groups are equal: with rounds = max(1, microbatches // pp), rounds must divide
      microbatches and group = microbatches // rounds (torch's ``ScheduleInterleaved1F1B``). Where pp divides
      microbatches, this is Megatron's default, group = pp.
    * given, as Megatron's ``microbatch_group_size_per_vp_stage``: within pp … microbatches, and the last
      group is either full or has at least pp microbatches. So ``group=pp`` is the rule of older releases: pp
      divides microbatches.

    With fewer microbatches than pp there is one group of all of them.

    >>> [str(action) for action in interleaved(2, 2, 2).ranks[1]]
    ['1F0', '1F1', '3F0', '3B0', '3F1', '3B1', '1B0', '1B1']

    Args:
        pp: pipeline ranks.
        microbatches: microbatches of a step.
        chunks: model chunks (virtual stages) per rank, at least 2.
        group: microbatches that go through a chunk in a row.

    Raises:
        PlanError: a count is too small, or the microbatches do not form legal groups.
    """
    require_counts("interleaved", pp=pp, microbatches=microbatches, chunks=chunks)
    require_chunks("interleaved", chunks, alone="1f1b")
    group, visits = depth_first(pp, microbatches, chunks, group)
    ranks = tuple(
        alternate(
            [Action("F", chunk * pp + rank, m) for chunk, m in visits],
            [Action("B", (chunks - 1 - chunk) * pp + rank, m) for chunk, m in visits],
            warmup=min(2 * (pp - rank - 1) + (chunks - 1) * group, len(visits)),
        )
        for rank in range(pp)
    )
    return Schedule("interleaved", ranks, microbatches, tuple(range(pp)) * chunks)


def depth_first(pp: int, microbatches: int, chunks: int, group: int | None) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The size of a group, and the (chunk, microbatch) that a rank visits one after the other.

    Raises:
        PlanError: the microbatches do not form legal groups; see :func:`interleaved`.
    """
    group = equal_group(pp, microbatches) if group is None else _legal_group(pp, microbatches, group)
    visits = (
        (chunk, m)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for m in range(first, min(first + group, microbatches))
    )
    return group, tuple(visits)


def equal_group(pp: int, microbatches: int) -> int:
    """Microbatches of a group where all groups are equal.

    Raises:
        PlanError: they do not form equal groups of at least ``pp``.
    """
    rounds = max(1, microbatches // pp)
    if microbatches % rounds:
        raise PlanError(
            f"{microbatches} microbatches do not form {rounds} equal groups of at least pp={pp}; "
            + _mend(pp, microbatches)
        )
    return microbatches // rounds


def _legal_group(pp: int, microbatches: int, group: int) -> int:
    smallest = min(pp, microbatches)
    if not smallest <= group <= microbatches:
        raise PlanError(
            f"microbatch_group {group} lies outside {smallest} … {microbatches}, but holds at least pp={pp} "
            "microbatches (or all, if they are fewer) and at most all; "
            f"set microbatch_group={min(max(group, smallest), microbatches)}"
        )
    last = microbatches % group
    if 0 < last < pp:
        raise PlanError(
            f"{microbatches} microbatches with microbatch_group {group} leave a last group of {last}, below pp={pp}; "
            + _mend(pp, microbatches)
        )
    return group


def _mend(pp: int, microbatches: int) -> str:
    """What is legal nearby; multiples of pp are so under every rule."""
    below = microbatches // pp * pp
    group = next(g for g in range(pp, microbatches + 1) if not 0 < microbatches % g < pp)
    return f"take {below} or {below + pp} microbatches, or microbatch_group={group}"
