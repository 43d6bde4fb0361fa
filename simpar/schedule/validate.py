"""Checks that a schedule is whole and can run."""

from simpar.errors import PlanError
from simpar.schedule.measure import timetable
from simpar.schedule.schedule import OPS, Action, Schedule


def validate(schedule: Schedule) -> None:
    """Refuses a schedule that no pipeline can run.

    Each stage must run forward and backward (``B``, or ``I`` and ``W``) exactly once per microbatch, on the
    rank that holds it, and the orders together must come to an end.

    Raises:
        PlanError: an action is missing, repeated, unknown or on the wrong rank.
        DeadlockError: the orders wait for each other; the message lists each waiting rank and its action.
    """
    seen: set[Action] = set()
    for rank, order in enumerate(schedule.ranks):
        for action in order:
            _check_action(schedule, rank, action)
            if action in seen:
                raise PlanError(f"schedule '{schedule.name}' runs {action} twice, but each action runs once; drop one")
            seen.add(action)
    for stage in range(schedule.stages):
        for microbatch in schedule.microbatches_of(stage):
            _check_pair(schedule, seen, stage, microbatch)
    timetable(schedule, forward=1, backward=1)


def _check_action(schedule: Schedule, rank: int, action: Action) -> None:
    if not (0 <= action.stage < schedule.stages and 0 <= action.microbatch < schedule.microbatches):
        raise PlanError(
            f"schedule '{schedule.name}' runs {action} on rank {rank}, but has stages 0 … "
            f"{schedule.stages - 1} and microbatches 0 … {schedule.microbatches - 1}; drop it"
        )
    if action.microbatch not in schedule.microbatches_of(action.stage):
        share = schedule.microbatches_of(action.stage)
        raise PlanError(
            f"schedule '{schedule.name}' runs {action} on rank {rank}, but microbatches {share[0]} … {share[-1]} pass "
            f"stage {action.stage} of its {schedule.copies} models; drop it"
        )
    if action.op not in OPS:
        raise PlanError(f"schedule '{schedule.name}' runs {action}, which is none of {' '.join(OPS)}; take one")
    holder = schedule.rank_of_stage[action.stage]
    if holder != rank:
        raise PlanError(
            f"schedule '{schedule.name}' runs {action} on rank {rank}, but stage {action.stage} lies on rank "
            f"{holder}; move it there"
        )


def _check_pair(schedule: Schedule, seen: set[Action], stage: int, microbatch: int) -> None:
    forward, backward, gradient, weight = (Action(op, stage, microbatch) for op in ("F", "B", "I", "W"))
    split = [action for action in (gradient, weight) if action in seen]
    if backward in seen and split:
        raise PlanError(
            f"schedule '{schedule.name}' runs {backward} and {split[0]}, but B is I and W in one; drop either"
        )
    needed = (forward, gradient, weight) if split else (forward, backward)
    for action in needed:
        if action not in seen:
            raise PlanError(
                f"schedule '{schedule.name}' never runs {action}, but each stage runs each microbatch "
                f"forward and backward; add it to rank {schedule.rank_of_stage[stage]}"
            )
