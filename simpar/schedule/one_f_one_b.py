"""1F1B: after a warm-up, every forward is followed by a backward."""

from simpar.schedule.schedule import Action, Schedule, alternate, require_counts


def one_f_one_b(pp: int, microbatches: int) -> Schedule:
    """1F1B with a flush at the end of the step (PipeDream-Flush).

    Rank r runs min(pp - r - 1, microbatches) forwards ahead and so keeps the activations of at most pp - r
    microbatches; its bubble is GPipe's (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).

    >>> [str(action) for action in one_f_one_b(2, 3).ranks[0]]
    ['0F0', '0F1', '0B0', '0F2', '0B1', '0B2']

    Raises:
        PlanError: a count is below 1.
    """
    require_counts("1f1b", pp=pp, microbatches=microbatches)
    ranks = tuple(
        alternate(
            [Action("F", rank, m) for m in range(microbatches)],
            [Action("B", rank, m) for m in range(microbatches)],
            warmup=min(pp - rank - 1, microbatches),
        )
        for rank in range(pp)
    )
    return Schedule("1f1b", ranks, microbatches, tuple(range(pp)))
