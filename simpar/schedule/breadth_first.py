"""Looped breadth-first: every microbatch through one chunk before any goes through the next."""

from simpar.schedule.schedule import Action, Schedule, require_chunks, require_counts


def looped_bfs(pp: int, microbatches: int, chunks: int) -> Schedule:
    """GPipe over ``chunks`` model chunks per rank; chunk c of rank r is virtual stage c · pp + r.

    All microbatches go forward through a rank's first chunk, then through its next; backward they go from the last
    chunk to the first, the latest microbatch first. So a chunk's weights are needed in one stretch each way, which
    suits sharded parameters, and all activations are kept (Lamy-Poirier 2023, arXiv:2211.05953, section 4; order as
    torch's ``ScheduleLoopedBFS``).

    >>> [str(action) for action in looped_bfs(2, 2, 2).ranks[1]]
    ['1F0', '1F1', '3F0', '3F1', '3B1', '3B0', '1B1', '1B0']

    Raises:
        PlanError: a count is too small.
    """
    require_counts("looped-bfs", pp=pp, microbatches=microbatches, chunks=chunks)
    require_chunks("looped-bfs", chunks, alone="gpipe")
    ranks = []
    for rank in range(pp):
        held = range(rank, chunks * pp, pp)
        forwards = [Action("F", stage, m) for stage in held for m in range(microbatches)]
        ranks.append((*forwards, *(action._replace(op="B") for action in reversed(forwards))))
    return Schedule("looped-bfs", tuple(ranks), microbatches, tuple(range(pp)) * chunks)
