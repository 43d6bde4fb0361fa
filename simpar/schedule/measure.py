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
    schedule: Schedule, *, forward: int, backward: int, transfer: int = 0, weight: int = 0, pair: int | None = None
) -> dict[Action, Span]:
    """Runs every action as soon as its rank is free and its inputs have arrived.

    Args:
        schedule: the orders; every action at most once.
        forward: time of a forward pass through one virtual stage.
        backward: time of a full backward pass through one virtual stage.
        transfer: time from the end on one rank to the arrival on another; within a rank it is 0.
        weight: the part of ``backward`` that computes weight gradients; matters only where ``I`` and ``W``
            are apart.
        pair: time of a forward and a backward that overlap: they start and end together. Left open, as long as one
            after the other.

    Returns:
        Start and end of each action.

    Raises:
        DeadlockError: some ranks wait for actions that never run.
        ValueError: a negative time, or ``weight`` above ``backward``.
    """
    pair = forward + backward if pair is None else pair
    if min(forward, backward, transfer, weight, pair) < 0 or weight > backward:
        raise ValueError(
            f"forward={forward}, backward={backward}, transfer={transfer}, weight={weight}, pair={pair} must not be "
            "negative, and weight is a part of backward; set 0 <= weight <= backward"
        )
    cost = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    gradients = _gradients(schedule)
    orders = [schedule.turns(rank) for rank in range(schedule.pp)]
    spans: dict[Action, Span] = {}
    waiting: dict[Action, list[int]] = {}
    position = [0] * schedule.pp
    clock = [0] * schedule.pp
    runnable = list(range(schedule.pp))
    while runnable:
        rank = runnable.pop()
        while position[rank] < len(orders[rank]):
            turn = orders[rank][position[rank]]
            needed = [other for action in turn for other in _inputs(schedule, action, gradients)]
            missing = next((other for other in needed if other not in spans), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            arrivals = (
                spans[other].end + (0 if schedule.rank_of_stage[other.stage] == rank else transfer) for other in needed
            )
            start = max(clock[rank], *arrivals, 0)
            clock[rank] = start + (pair if len(turn) == 2 else cost[turn[0].op])
            position[rank] += 1
            for action in turn:
                spans[action] = Span(start, clock[rank])
                runnable += waiting.pop(action, ())
    if waiting:
        waits = {rank: missing for missing, ranks in waiting.items() for rank in ranks}
        raise DeadlockError(_deadlock(schedule, {r: (orders[r][position[r]][0], waits[r]) for r in sorted(waits)}))
    return spans


def makespan(
    schedule: Schedule, *, forward: int, backward: int, transfer: int = 0, weight: int = 0, pair: int | None = None
) -> int:
    """Length of the step in the unit of the given times; arguments and errors as in :func:`timetable`.

    >>> from simpar.schedule import build
    >>> makespan(build("1f1b", pp=8, microbatches=32), forward=1, backward=1)
    78
    """
    spans = timetable(schedule, forward=forward, backward=backward, transfer=transfer, weight=weight, pair=pair)
    return max((span.end for span in spans.values()), default=0)


def bubble_fraction(
    schedule: Schedule, *, forward: int, backward: int, transfer: int = 0, weight: int = 0, pair: int | None = None
) -> float:
    """Share of the ranks' time in which no action runs; arguments and errors as in :func:`timetable`."""
    spans = timetable(schedule, forward=forward, backward=backward, transfer=transfer, weight=weight, pair=pair)
    length = max((span.end for span in spans.values()), default=0)
    turns = (turn[0] for rank in range(schedule.pp) for turn in schedule.turns(rank))
    busy = sum(spans[action].end - spans[action].start for action in turns)
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


def _inputs(schedule: Schedule, action: Action, gradients: dict[tuple[int, int], Action]) -> Iterator[Action]:
    op, stage, microbatch = action
    before, after = schedule.before(stage), schedule.after(stage)
    if op == "F":
        if before is not None:
            yield Action("F", before, microbatch)
    elif op == "W":
        yield Action("I", stage, microbatch)
    else:
        yield Action("F", stage, microbatch)
        if after is not None:
            yield gradients.get((after, microbatch), Action("B", after, microbatch))


def _deadlock(schedule: Schedule, waits: dict[int, tuple[Action, Action]]) -> str:
    listed = ", ".join(f"rank {rank} waits at {action} for {missing}" for rank, (action, missing) in waits.items())
    return (
        f"schedule '{schedule.name}' deadlocks: {listed}; "
        "reorder these ranks so that each action comes after those that it waits for"
    )
