"""Level of detail, against the spans that it draws: no busy time is lost or invented."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_traces import Recorder, pipeline_trace

from simpar.trace.bubbles import compute_lanes
from simpar.trace.trace import KINDS, Lane, Spans, empty_spans
from simpar.view.level_of_detail import IDLE, Rectangles, to_rectangles
from simpar.view.palette import DRAWN_KINDS
from simpar.view.scene import scene

LANES = (Lane(0, 0, "compute"), Lane(0, 0, "tp"), Lane(1, 1, "compute"), Lane(1, 1, "dp"))


def busy_of_spans(spans: Spans) -> dict[tuple[int, int], float]:
    busy: dict[tuple[int, int], float] = defaultdict(float)
    for lane, kind, duration in zip(spans.lane, spans.kind, spans.duration_ns, strict=True):
        busy[int(lane), int(kind)] += float(duration)
    return {key: value for key, value in busy.items() if value}


def busy_of_rectangles(drawn: Rectangles) -> dict[tuple[int, int], float]:
    busy: dict[tuple[int, int], float] = defaultdict(float)
    for row in range(len(drawn)):
        if drawn.kind[row] != IDLE:
            area = float(drawn.duration_ns[row]) * float(drawn.height[row])
            busy[int(drawn.lane[row]), int(drawn.kind[row])] += area
    return {key: value for key, value in busy.items() if value}


@st.composite
def lanes_of_spans(draw: st.DrawFn) -> tuple[Spans, int]:
    """Spans that do not overlap on a lane, from nothing to far longer than a pixel, with and without gaps."""
    record = Recorder()
    end = 1
    for lane in range(len(LANES)):
        clock = 0
        for _ in range(draw(st.integers(0, 25))):
            clock += draw(st.sampled_from([0, 0, 1, 7, 1_000, 50_000]))
            duration = draw(st.sampled_from([0, 1, 3, 90, 2_000, 100_000]))
            record.span(lane, draw(st.sampled_from(KINDS)), clock, duration)
            clock += duration
        end = max(end, clock)
    return record.spans(), end


@given(lanes_of_spans(), st.integers(1, 120))
@settings(max_examples=80, deadline=None)
def test_busy_time_is_conserved_and_the_budget_kept(case: tuple[Spans, int], budget: int) -> None:
    spans, end = case
    drawn = to_rectangles(spans, empty_spans(), end_ns=end, budget=budget)
    assert busy_of_rectangles(drawn) == pytest.approx(busy_of_spans(spans), rel=1e-9)
    least = sum(len(np.unique(spans.kind[spans.lane == lane])) + 3 for lane in range(len(LANES)))
    if len(spans) > budget:
        assert len(drawn) <= max(budget, least)


@given(lanes_of_spans(), st.integers(1, 120))
@settings(max_examples=80, deadline=None)
def test_rectangles_stay_inside_their_lane_and_apart(case: tuple[Spans, int], budget: int) -> None:
    spans, end = case
    drawn = to_rectangles(spans, empty_spans(), end_ns=end, budget=budget)
    assert (drawn.bottom > -1e-9).all()
    assert (drawn.bottom + drawn.height < 1 + 1e-9).all()
    for lane in range(len(LANES)):
        columns = {
            (int(drawn.start_ns[row]), int(drawn.duration_ns[row])) for row in np.flatnonzero(drawn.lane == lane)
        }
        ordered = sorted(columns)
        for (start, duration), (after, _) in pairwise(ordered):
            assert start + duration <= after


@given(lanes_of_spans())
@settings(max_examples=40, deadline=None)
def test_with_room_every_span_is_itself(case: tuple[Spans, int]) -> None:
    spans, end = case
    drawn = to_rectangles(spans, empty_spans(), end_ns=end, budget=10_000)
    assert sorted(drawn.span.tolist()) == list(range(len(spans)))
    assert (drawn.start_ns == spans.start_ns[drawn.span]).all()
    assert (drawn.count == 1).all()


@pytest.mark.parametrize(
    ("budget", "levels"), [(150, "forward"), (400, "forward"), (1500, "forward gemm"), (20_000, "gemm")]
)
def test_kernels_replace_operations_where_they_are_wide_and_no_time_is_lost(budget: int, levels: str) -> None:
    trace = pipeline_trace(3, 12)
    shown = scene(trace)
    drawn = to_rectangles(
        shown.operations, shown.kernels, end_ns=shown.end_ns, budget=budget, expand=compute_lanes(trace)
    )
    assert len(drawn) <= budget
    area = np.zeros((len(trace.lanes), len(DRAWN_KINDS)))
    np.add.at(area, (drawn.lane, drawn.kind), drawn.duration_ns * drawn.height)
    for lane, described in enumerate(trace.lanes):
        if described.stream == "compute":
            assert area[lane].sum() == pytest.approx(trace.step_ns, rel=1e-12)
        else:
            for kind in range(len(KINDS)):
                both = sum(
                    int(table.duration_ns[(table.lane == lane) & (table.kind == kind)].sum())
                    for table in (trace.spans, trace.kernels())
                )
                assert area[lane, kind] == pytest.approx(both, rel=1e-9)
    assert [kind for kind in ("forward", "gemm") if area[:, KINDS.index(kind)].any()] == levels.split()


def test_collectives_of_one_operation_are_one_cluster_as_long_as_it() -> None:
    shown = scene(pipeline_trace(2, 30, layers=40))
    drawn = to_rectangles(shown.operations, shown.kernels, end_ns=shown.end_ns, budget=600)
    tp = drawn.take((drawn.lane == 1) & (drawn.kind == KINDS.index("all_reduce")))
    assert len(tp) == 60  # a forward and a backward of each microbatch
    assert set(tp.count.tolist()) == {40}
    assert tp.height.tolist() == pytest.approx([40 / 157] * 60)  # 40 of 160 pieces, from the fourth to the last


def test_a_cluster_says_how_many_spans_it_merges_and_how_busy_it_is() -> None:
    record = Recorder()
    for i in range(100):
        record.span(0, "forward" if i % 2 else "backward", 10 * i, 6)
    drawn = to_rectangles(record.spans(), empty_spans(), end_ns=10_000_000, budget=10)
    forward, backward = (drawn.take(drawn.kind == KINDS.index(kind)) for kind in ("forward", "backward"))
    assert forward.count.tolist() == backward.count.tolist() == [100]
    assert forward.busy[0] == pytest.approx(600 / 996)  # from the first start, 0, to the last end, 990 + 6
    assert forward.height[0] == backward.height[0] == pytest.approx(300 / 996)


def test_long_spans_survive_a_crowd_of_short_ones() -> None:
    record = Recorder()
    record.span(0, "optimizer", 0, 500_000)
    for i in range(3_000):
        record.span(0, "forward", 500_000 + 100 * i, 80)
    drawn = to_rectangles(record.spans(), empty_spans(), end_ns=1_000_000, budget=200)
    longest = drawn.take(drawn.kind == KINDS.index("optimizer"))
    assert (longest.duration_ns.tolist(), longest.height.tolist(), longest.span.tolist()) == (
        [500_000],
        [1],
        [0],
    )


def test_bubbles_are_not_counted_as_busy() -> None:
    record = Recorder()
    for i in range(100):
        record.span(0, "forward", 10 * i, 6)
    spans = record.spans()
    idle = record.spans()
    idle.kind[:] = IDLE
    idle.start_ns[:] += 6
    idle.duration_ns[:] = 4
    both = Spans(**{n: np.concatenate([getattr(spans, n), getattr(idle, n)]) for n in Spans.__dataclass_fields__})
    drawn = to_rectangles(both, empty_spans(), end_ns=10_000_000, budget=10)
    assert sorted(zip(drawn.kind.tolist(), drawn.height.tolist(), strict=True)) == [(0, 0.6), (IDLE, 0.4)]
    assert drawn.busy.tolist() == pytest.approx([0.6, 0.6])


def test_nothing_becomes_nothing() -> None:
    assert len(to_rectangles(empty_spans(), empty_spans(), end_ns=1, budget=10)) == 0
    assert len(to_rectangles(empty_spans(), empty_spans(), end_ns=1, budget=0)) == 0
