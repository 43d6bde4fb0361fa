"""Zero-bubble schedules of the 1F1B family: weight gradients wait, and fill what 1F1B leaves idle.

Source: Qi et al. 2024, arXiv:2401.10241, section 2; F, I (their B) and W are the times of a chunk's three passes.
"""

from collections.abc import Sequence

from simpar.schedule.interleaved import depth_first
from simpar.schedule.schedule import Action, Schedule, require_chunks, require_counts


def zb_h1(pp: int, microbatches: int) -> Schedule:
    """1F1B's memory, a third of its bubble: (pp - 1)(F + I - W).

    Rank r runs pp - r - 1 forwards ahead and puts off r weight gradients, so each rank keeps pp microbatches. The order
    is torch's ``ScheduleInterleavedZeroBubble`` with one chunk.

    >>> [str(action) for action in zb_h1(2, 2).ranks[1]]
    ['1F0', '1I0', '1F1', '1I1', '1W0', '1W1']

    Raises:
        PlanError: a count is below 1.
    """
    require_counts("zb-h1", pp=pp, microbatches=microbatches)
    return _schedule("zb-h1", pp, microbatches, 1, list(_visits(microbatches)), ahead=1)


def zb_h2(pp: int, microbatches: int) -> Schedule:
    """Twice the memory, no bubble where F = I = W: (pp - 1)(F + I - 2W) from a rank's own begin to its own end.

    Rank r runs 2 (pp - r - 1) forwards ahead and puts off 2 r weight gradients, so each rank keeps 2 pp - 1
    microbatches; with fewer of them there is a bubble. Ranks begin and end one after the other, so a step that ends for
    all at once is pp - 1 forwards longer (section 4 of the paper moves the optimizer's synchronisation for that).

    >>> [str(action) for action in zb_h2(2, 3).ranks[0]]
    ['0F0', '0F1', '0F2', '0I0', '0W0', '0I1', '0W1', '0I2', '0W2']

    Raises:
        PlanError: a count is below 1.
    """
    require_counts("zb-h2", pp=pp, microbatches=microbatches)
    return _schedule("zb-h2", pp, microbatches, 1, list(_visits(microbatches)), ahead=2)


def zb_1p(pp: int, microbatches: int, chunks: int, group: int | None = None) -> Schedule:
    """ZB-H1 over ``chunks`` model chunks per rank: its bubble divided by their number.

    Chunks and groups as in :func:`simpar.schedule.interleaved.interleaved`; rank r runs
    pp - r - 1 + (chunks - 1) · group forwards ahead and puts off r weight gradients (torch's
    ``ScheduleInterleavedZeroBubble``, which calls it ZB-1P).

    >>> [str(action) for action in zb_1p(2, 2, 2).ranks[1]]
    ['1F0', '1F1', '3F0', '3I0', '3F1', '3I1', '3W0', '1I0', '3W1', '1I1', '1W0', '1W1']

    Raises:
        PlanError: a count is too small, or the microbatches do not form legal groups.
    """
    require_counts("zb-1p", pp=pp, microbatches=microbatches, chunks=chunks)
    require_chunks("zb-1p", chunks, alone="zb-h1")
    group, visits = depth_first(pp, microbatches, chunks, group)
    return _schedule("zb-1p", pp, microbatches, chunks, visits, ahead=1, reserve=(chunks - 1) * group)


def _visits(microbatches: int) -> list[tuple[int, int]]:
    return [(0, m) for m in range(microbatches)]


def _schedule(
    name: str,
    pp: int,
    microbatches: int,
    chunks: int,
    visits: Sequence[tuple[int, int]],
    *,
    ahead: int,
    reserve: int = 0,
) -> Schedule:
    """``ahead`` counts forwards ahead per rank behind, and weight gradients put off per rank before."""
    ranks = []
    for rank in range(pp):
        forwards = [Action("F", chunk * pp + rank, m) for chunk, m in visits]
        inputs = [Action("I", (chunks - 1 - chunk) * pp + rank, m) for chunk, m in visits]
        warmup = min(ahead * (pp - rank - 1) + reserve, len(visits))
        ranks.append(_order(forwards, inputs, warmup, put_off=ahead * rank))
    return Schedule(name, tuple(ranks), microbatches, tuple(range(pp)) * chunks)


def _order(forwards: Sequence[Action], inputs: Sequence[Action], warmup: int, *, put_off: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then forward, input gradient and the weight gradient of ``put_off`` turns ago."""
    weights = [action._replace(op="W") for action in inputs]
    order = list(forwards[:warmup])
    for turn, gradient in enumerate(inputs):
        order += (*forwards[warmup + turn : warmup + turn + 1], gradient)
        if turn >= put_off:
            order.append(weights[turn - put_off])
    return (*order, *weights[max(0, len(inputs) - put_off) :])
