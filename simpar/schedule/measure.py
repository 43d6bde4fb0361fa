"""What follows from the orders alone: a timetable with uniform integer times, makespan, live activations.

It is the independent answer that the simulator is compared with, so it has no clock process and no floats.
"""

from collections.abc import Iterator
from typing import NamedTuple

from simpar.errors import DeadlockError
from simpar.schedule.schedule import Action, Schedule


class Span(NamedTuple):
    """When an action runs, in the integer unit of its durations."""

    start: int
    end: int


def timetable(
    schedule: Schedule, *, forward: int, backward: int, transfer: int = 0, weight: int = 0
) -> dict[Action, Span]:
    """Runs every action as soon as its rank is free and its inputs have arrived.

    Args:
        schedule: the orders; every action at most once.
        forward: time of a forward pass through one virtual stage.
        backward: time of a full backward pass through one virtual stage.
        transfer: time from the end on one rank to the arrival on another; within a rank it is 0.
        weight: the part of ``backward`` that computes weight gradients; matters only where ``I`` and ``W``
            are apart.

    Returns:
        Start and end of each action.

    Raises:
        DeadlockError: some ranks wait for actions that never run.
        ValueError: a negative time, or ``weight`` above ``backward``.
    """
    if min(forward, backward, transfer, weight) < 0 or weight > backward:
        raise ValueError(
            f"forward={forward}, backward={backward}, transfer={transfer}, weight={weight} must not be "
            "negative, and weight is a part of backward; set 0 <= weight <= backward"
        )
    cost = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    gradients = _gradients(schedule)
    spans: dict[Action, Span] = {}
    waiting: dict[Action, list[int]] = {}
    position = [0] * schedule.pp
    clock = [0] * schedule.pp
    runnable = list(range(schedule.pp))
    while runnable:
        rank = runnable.pop()
        order = schedule.ranks[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            needed = list(_inputs(action, schedule.stages, gradients))
            missing = next((other for other in needed if other not in spans), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            arrivals = (
                spans[other].end + (0 if schedule.rank_of_stage[other.stage] == rank else transfer) for other in needed
            )
            start = max(clock[rank], *arrivals, 0)
            clock[rank] = start + cost[action.op]
            spans[action] = Span(start, clock[rank])
            position[rank] += 1
            runnable += waiting.pop(action, ())
    if waiting:
        raise DeadlockError(_deadlock(schedule, position, waiting))
    return spans


def makespan(schedule: Schedule, *, forward: int, backward: int, transfer: int = 0, weight: int = 0) -> int:
    """Length of the step in the unit of the given times; arguments and errors as in :func:`timetable`.

    >>> from simpar.schedule import build
    >>> makespan(build("1f1b", pp=8, microbatches=32), forward=1, backward=1)
    78
    """
    spans = timetable(schedule, forward=forward, backward=backward, transfer=transfer, weight=weight)
    return max((span.end for span in spans.values()), default=0)


def bubble_fraction(schedule: Schedule, *, forward: int, backward: int, transfer: int = 0, weight: int = 0) -> float:
    """Share of the ranks' time in which no action runs; arguments and errors as in :func:`timetable`."""
    spans = timetable(schedule, forward=forward, backward=backward, transfer=transfer, weight=weight)
    length = max((span.end for span in spans.values()), default=0)
    busy = sum(span.end - span.start for span in spans.values())
    return 1 - busy / (schedule.pp * length) if length else 0.0


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Most (stage, microbatch) pairs per rank whose activations are kept at once.

    A pair is kept from its forward to the end of its backward; where the backward is split, to the end of
    ``W``, which still reads the inputs. With v chunks a pair weighs 1/v of a rank's layers.
    """
    peaks = []
    for order in schedule.ranks:
        live = peak = 0
        for action in order:
            live += {"F": 1, "I": 0, "B": -1, "W": -1}[action.op]
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)


def _gradients(schedule: Schedule) -> dict[tuple[int, int], Action]:
    """The action that makes the input gradient of each (stage, microbatch): ``B``, or ``I`` if split."""
    return {(a.stage, a.microbatch): a for order in schedule.ranks for a in order if a.op in ("B", "I")}


def _inputs(action: Action, stages: int, gradients: dict[tuple[int, int], Action]) -> Iterator[Action]:
    op, stage, microbatch = action
    if op == "F":
        if stage > 0:
            yield Action("F", stage - 1, microbatch)
    elif op == "W":
        yield Action("I", stage, microbatch)
    else:
        yield Action("F", stage, microbatch)
        if stage < stages - 1:
            yield gradients.get((stage + 1, microbatch), Action("B", stage + 1, microbatch))


def _deadlock(schedule: Schedule, position: list[int], waiting: dict[Action, list[int]]) -> str:
    wait_of = {rank: missing for missing, ranks in waiting.items() for rank in ranks}
    waits = ", ".join(
        f"rank {rank} waits at {schedule.ranks[rank][position[rank]]} for {wait_of[rank]}" for rank in sorted(wait_of)
    )
    return (
        f"schedule '{schedule.name}' deadlocks: {waits}; "
        "reorder these ranks so that each action comes after those that it waits for"
    )
