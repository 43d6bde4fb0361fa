"""GPipe: all forwards, then all backwards."""

from simpar.schedule.schedule import Action, Schedule, alternate, require_counts


def gpipe(pp: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards, both in the order of the microbatches.

    Every rank keeps the activations of every microbatch (Huang et al. 2019, arXiv:1811.06965, section 2.3;
    backward order as in torch's ``ScheduleGPipe``).

    >>> [str(action) for action in gpipe(2, 2).ranks[1]]
    ['1F0', '1F1', '1B0', '1B1']

    Raises:
        PlanError: a count is below 1.
    """
    require_counts("gpipe", pp=pp, microbatches=microbatches)
    ranks = tuple(
        alternate(
            [Action("F", rank, m) for m in range(microbatches)],
            [Action("B", rank, m) for m in range(microbatches)],
            warmup=microbatches,
        )
        for rank in range(pp)
    )
    return Schedule("gpipe", ranks, microbatches, tuple(range(pp)))
