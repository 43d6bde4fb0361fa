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
    interleaved,
    makespan,
    timetable,
    to_csv,
    validate,
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.integers(1, 6))
    if name != "interleaved":
        return build(name, pp=pp, microbatches=draw(st.integers(1, 14)))
    chunks = draw(st.integers(2, 4))
    group = draw(st.integers(pp, pp + 4))
    full = draw(st.integers(1, 3))
    last = draw(st.sampled_from([0, *range(pp, group)]))
    return interleaved(pp, full * group + last, chunks, group)


TIMES = st.integers(0, 9)


def _longest_path(schedule: Schedule, forward: int, backward: int, transfer: int) -> int:
    """The makespan as a longest path: nodes are actions, edges carry the duration of their start and the
    transfer."""
    duration = {"F": forward, "B": backward}
    graph = nx.DiGraph()
    rank = {action: r for r, order in enumerate(schedule.ranks) for action in order}
    last = schedule.stages - 1
    pairs = [pair for order in schedule.ranks for pair in pairwise(order)]
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            if stage < last:
                pairs.append((Action("F", stage, m), Action("F", stage + 1, m)))
                pairs.append((Action("B", stage + 1, m), Action("B", stage, m)))
            else:
                pairs.append((Action("F", stage, m), Action("B", stage, m)))
            graph.add_edge(Action("B", stage, m), "end", weight=backward)
    for before, after in pairs:
        cost = duration[before.op] + (0 if rank[before] == rank[after] else transfer)
        graph.add_edge(before, after, weight=cost)
    return int(nx.dag_longest_path_length(graph))


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_each_action_once_in_an_order_that_runs(schedule: Schedule) -> None:
    validate(schedule)
    actions = [action for order in schedule.ranks for action in order]
    assert len(actions) == len(set(actions)) == 2 * schedule.stages * schedule.microbatches
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


@given(schedules(), TIMES, TIMES, TIMES)
@settings(max_examples=60, deadline=None)
def test_makespan_is_the_longest_path(schedule: Schedule, forward: int, backward: int, transfer: int) -> None:
    expected = _longest_path(schedule, forward, backward, transfer)
    assert makespan(schedule, forward=forward, backward=backward, transfer=transfer) == expected


@given(schedules(), TIMES, TIMES, TIMES)
@settings(max_examples=40, deadline=None)
def test_ranks_do_one_thing_at_a_time(schedule: Schedule, forward: int, backward: int, transfer: int) -> None:
    spans = timetable(schedule, forward=forward, backward=backward, transfer=transfer)
    for order in schedule.ranks:
        for before, after in pairwise(order):
            assert spans[before].end <= spans[after].start
    for (op, stage, m), span in spans.items():
        assert span.end - span.start == (forward if op == "F" else backward)
        if op == "B":
            assert spans[Action("F", stage, m)].end <= span.start


@given(schedules(), TIMES, TIMES, TIMES)
@settings(max_examples=40, deadline=None)
def test_slower_never_helps(schedule: Schedule, forward: int, backward: int, transfer: int) -> None:
    length = makespan(schedule, forward=forward, backward=backward, transfer=transfer)
    for more in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        slower = makespan(schedule, forward=forward + more[0], backward=backward + more[1], transfer=transfer + more[2])
        assert slower >= length
