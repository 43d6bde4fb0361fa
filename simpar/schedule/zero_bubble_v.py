"""ZB-V: zero bubble in 1F1B's memory, by laying two chunks per rank in a V."""

from simpar.schedule.schedule import Action, Op, Schedule, require_counts, v_shape


def zb_v(pp: int, microbatches: int) -> Schedule:
    """Rank r holds virtual stages r and 2 pp - 1 - r, so the last rank turns a microbatch round by itself.

    Where a chunk's F, I and W take equally long and there are at least 2 pp - 1 microbatches, no rank idles from its
    own begin to its own end, and each keeps at most pp microbatches of its two chunks (Qi et al. 2024,
    arXiv:2401.10241, section 6; order as torch's ``ScheduleZBVZeroBubble``, which drops what is beyond ``microbatches``
    from the order of 2 pp - 1 of them).

    >>> [str(action) for action in zb_v(1, 2).ranks[0]]
    ['0F0', '1F0', '1I0', '1W0', '0F1', '0I0', '0W0', '1F1', '1I1', '1W1', '0I1', '0W1']

    Raises:
        PlanError: a count is below 1.
    """
    require_counts("zb-v", pp=pp, microbatches=microbatches)
    ranks = []
    for rank in range(pp):
        order = _order(pp, max(2 * pp - 1, microbatches), rank)
        ranks.append(tuple(action for action in order if action.microbatch < microbatches))
    return Schedule("zb-v", tuple(ranks), microbatches, v_shape(pp))


def _order(pp: int, microbatches: int, rank: int) -> list[Action]:
    stages = (rank, 2 * pp - 1 - rank)
    counts: dict[tuple[Op, int], int] = {(op, chunk): 0 for op in ("F", "I", "W") for chunk in (0, 1)}
    order: list[Action] = []

    def run(chunk: int, *ops: Op) -> None:
        for op in ops:
            order.append(Action(op, stages[chunk], counts[op, chunk]))
            counts[op, chunk] += 1

    for _ in range(2 * (pp - rank) - 1):
        run(0, "F")
    for _ in range(rank):
        run(1, "F")
        run(0, "F")
    for _ in range(pp - rank):
        run(1, "F", "I", "W")
    while counts["F", 1] < counts["F", 0] or counts["F", 0] < microbatches:
        if counts["F", 0] < microbatches:
            run(0, "F")
        run(0, "I", "W")
        run(1, "F", "I", "W")
    for _ in range(rank):
        run(0, "I")
        run(1, "I")
    for _ in range(pp - rank):
        run(0, "I", "W")
    for chunk in (1, 0):
        while counts["W", chunk] < counts["I", chunk]:
            run(chunk, "W")
    return order
