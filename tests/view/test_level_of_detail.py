"""Level of detail, against the spans that it draws: no busy time is lost or invented."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_traces import Recorder, pipeline_trace

from simpar.trace.trace import KINDS, Lane, Spans, empty_spans, spans_from_columns
from simpar.view.level_of_detail import IDLE, Rectangles, finest_spans, join_pieces, to_rectangles

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
    drawn = to_rectangles(spans, LANES, end_ns=end, budget=budget)
    assert busy_of_rectangles(drawn) == pytest.approx(busy_of_spans(spans), rel=1e-9)
    least = sum(len(np.unique(spans.kind[spans.lane == lane])) + 3 for lane in range(len(LANES)))
    if len(spans) > budget:
        assert len(drawn) <= max(budget, least)


@given(lanes_of_spans(), st.integers(1, 120))
@settings(max_examples=80, deadline=None)
def test_rectangles_stay_inside_their_lane_and_apart(case: tuple[Spans, int], budget: int) -> None:
    spans, end = case
    drawn = to_rectangles(spans, LANES, end_ns=end, budget=budget)
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
def test_with_room_every_span_is_itself_and_compute_lanes_are_full(case: tuple[Spans, int]) -> None:
    spans, end = case
    drawn = to_rectangles(spans, LANES, end_ns=end, budget=10_000)
    shown = drawn.take(drawn.kind != IDLE)
    assert sorted(shown.span.tolist()) == list(range(len(spans)))
    assert (shown.start_ns == spans.start_ns[shown.span]).all()
    assert (shown.count == 1).all()
    for lane in (0, 2):
        if (spans.lane == lane).any():
            assert drawn.duration_ns[drawn.lane == lane].sum() == end
    assert not np.isin(drawn.lane[drawn.kind == IDLE], (1, 3)).any()


def test_a_cluster_says_how_many_spans_it_merges_and_how_busy_it_is() -> None:
    record = Recorder()
    for i in range(100):
        record.span(0, "forward" if i % 2 else "backward", 10 * i, 6)
    drawn = to_rectangles(record.spans(), LANES, end_ns=10_000_000, budget=10)
    forward, backward = (drawn.take(drawn.kind == KINDS.index(kind)) for kind in ("forward", "backward"))
    assert forward.count.tolist() == backward.count.tolist() == [100]
    assert forward.busy[0] == pytest.approx(600 / 996)  # from the first start, 0, to the last end, 990 + 6
    assert forward.height[0] == backward.height[0] == pytest.approx(300 / 996)
    idle_on_top = drawn.take((drawn.kind == IDLE) & (drawn.count == 100))
    assert idle_on_top.height.tolist() == pytest.approx([396 / 996])


def test_long_spans_survive_a_crowd_of_short_ones() -> None:
    record = Recorder()
    record.span(0, "optimizer", 0, 500_000)
    for i in range(3_000):
        record.span(0, "forward", 500_000 + 100 * i, 80)
    drawn = to_rectangles(record.spans(), LANES, end_ns=1_000_000, budget=200)
    longest = drawn.take(drawn.kind == KINDS.index("optimizer"))
    assert (longest.duration_ns.tolist(), longest.height.tolist(), longest.span.tolist()) == (
        [500_000],
        [1],
        [0],
    )


def test_finest_spans_are_the_kernels_and_the_operations_without_any() -> None:
    trace = pipeline_trace(2, 3)
    finest, kernels = finest_spans(trace), trace.kernels()
    kinds, counts = np.unique(finest.kind, return_counts=True)
    count = {KINDS[kind]: int(n) for kind, n in zip(kinds, counts, strict=True)}
    assert "forward" not in count
    assert "backward" not in count
    assert count["optimizer"] == 2
    assert count["p2p"] == 6
    assert count["gemm"] == (kernels.kind == KINDS.index("gemm")).sum()
    assert (np.diff(finest.start_ns) >= 0).all()


def test_nothing_becomes_nothing() -> None:
    assert len(to_rectangles(empty_spans(), LANES, end_ns=1, budget=10)) == 0
    assert len(to_rectangles(empty_spans(), (), end_ns=1, budget=0)) == 0


def test_touching_pieces_of_an_operation_become_one_and_gaps_stay() -> None:
    start, duration = [0, 10, 20, 40, 50], [10, 10, 10, 10, 5]
    columns = dict.fromkeys(Spans.__dataclass_fields__, [0] * 5)
    columns |= {"start_ns": start, "duration_ns": duration, "flop": [1.0] * 5, "layer": [0, 1, 2, 3, 4]}
    columns["microbatch"] = [0, 0, 0, 0, 1]
    joined = join_pieces(spans_from_columns(columns))
    assert joined.start_ns.tolist() == [0, 40, 50]
    assert joined.duration_ns.tolist() == [30, 10, 5]
    assert joined.flop.tolist() == [3.0, 1.0, 1.0]
    assert joined.layer.tolist() == [-1, 3, 4]
