"""Invariants of schedules over drawn shapes and times."""

from itertools import pairwise

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    build,
    from_csv,
    makespan,
    timetable,
    to_csv,
    validate,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.integers(1, 6))
    if name == "dualpipe":
        pp += pp % 2
        return build(name, pp=pp, microbatches=2 * draw(st.integers(pp, pp + 4)))
    if name == "dualpipev":
        return build(name, pp=pp, microbatches=draw(st.integers(2 * pp, 2 * pp + 6)))
    if name == "looped-bfs":
        return build(name, pp=pp, microbatches=draw(st.integers(1, 9)), chunks=draw(st.integers(2, 4)))
    if name not in ("interleaved", "zb-1p"):
        return build(name, pp=pp, microbatches=draw(st.integers(1, 14)))
    chunks = draw(st.integers(2, 4))
    group = draw(st.integers(pp, pp + 4))
    full = draw(st.integers(1, 3))
    last = draw(st.sampled_from([0, *range(pp, group)]))
    return build(name, pp=pp, microbatches=full * group + last, chunks=chunks, group=group)


TIMES = st.integers(0, 9)


def _longest_path(schedule: Schedule, times: dict[str, int], transfer: int) -> int:
    """The makespan as a longest path: nodes are turns of a rank, edges carry the duration of their start and the
    transfer."""
    turn_of = {a: turn for rank in range(schedule.pp) for turn in schedule.turns(rank) for a in turn}
    rank_of = {a: r for r, order in enumerate(schedule.ranks) for a in order}
    model, graph = schedule.stages // schedule.copies, nx.DiGraph()

    def connect(before: Action, after: Action) -> None:
        turn = turn_of[before]
        cost = sum(times[action.op] for action in turn) + (0 if rank_of[before] == rank_of[after] else transfer)
        graph.add_edge(turn, turn_of[after], weight=cost)

    for rank in range(schedule.pp):
        for before, after in pairwise(schedule.turns(rank)):
            connect(before[0], after[0])
    for action, turn in turn_of.items():
        graph.add_edge(turn, "end", weight=sum(times[each.op] for each in turn))
        op, stage, m = action
        if op == "W":
            connect(Action("I", stage, m), action)
            continue
        is_end = stage % model == (0 if op == "F" else model - 1)
        for feeding in ("F",) if op == "F" or is_end else ("B", "I"):
            source = Action(feeding, stage + (0 if is_end else -1 if op == "F" else 1), m)  # type: ignore[arg-type]
            if source != action and source in turn_of:
                connect(source, action)
    return int(nx.dag_longest_path_length(graph))


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_each_action_once_in_an_order_that_runs(schedule: Schedule) -> None:
    validate(schedule)
    actions = [action for order in schedule.ranks for action in order]
    passes = schedule.stages * schedule.microbatches // schedule.copies
    assert len(actions) == len(set(actions)) == 2 * passes + sum(action.op == "W" for action in actions)
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


@given(schedules(), TIMES, TIMES, TIMES, TIMES)
@settings(max_examples=60, deadline=None)
def test_makespan_is_the_longest_path(
    schedule: Schedule, forward: int, input_gradient: int, weight: int, transfer: int
) -> None:
    backward = input_gradient + weight
    expected = _longest_path(schedule, {"F": forward, "B": backward, "I": input_gradient, "W": weight}, transfer)
    assert makespan(schedule, forward=forward, backward=backward, weight=weight, transfer=transfer) == expected


@given(schedules(), TIMES, TIMES, TIMES)
@settings(max_examples=40, deadline=None)
def test_ranks_do_one_thing_at_a_time(schedule: Schedule, forward: int, backward: int, transfer: int) -> None:
    spans = timetable(schedule, forward=forward, backward=backward, transfer=transfer)
    for rank in range(schedule.pp):
        for before, after in pairwise(schedule.turns(rank)):
            assert spans[before[0]].end <= spans[after[0]].start
        for turn in schedule.turns(rank):
            expected = sum({"F": forward, "W": 0}.get(action.op, backward) for action in turn)
            assert {spans[action].end - spans[action].start for action in turn} == {expected}
    for (op, stage, m), span in spans.items():
        if op != "F":
            assert spans[Action("F", stage, m)].end <= span.start


@given(schedules(), TIMES, TIMES, TIMES)
@settings(max_examples=40, deadline=None)
def test_slower_never_helps(schedule: Schedule, forward: int, backward: int, transfer: int) -> None:
    length = makespan(schedule, forward=forward, backward=backward, transfer=transfer)
    for more in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        slower = makespan(schedule, forward=forward + more[0], backward=backward + more[1], transfer=transfer + more[2])
        assert slower >= length
