"""The scene, against the trace that it is made of."""

import numpy as np
import pytest
from pipeline_traces import pipeline_trace

from simpar.trace.critical_path import critical_path
from simpar.trace.trace import KINDS, Spans, spans_from_columns
from simpar.view.palette import BUBBLES_FROM
from simpar.view.scene import join_pieces, scene, side_by_side


def pieces() -> Spans:
    columns = dict.fromkeys(Spans.__dataclass_fields__, [0] * 5)
    columns |= {"start_ns": [0, 10, 20, 40, 50], "duration_ns": [10, 10, 10, 10, 5], "flop": [1.0] * 5}
    columns |= {"layer": [0, 1, 2, 3, 4], "microbatch": [0, 0, 0, 0, 1], "predecessor": [-1, 0, 1, 2, 3]}
    return spans_from_columns(columns)


def test_touching_pieces_of_an_operation_become_one_and_gaps_stay() -> None:
    joined, moved = join_pieces(pieces())
    assert joined.start_ns.tolist() == [0, 40, 50]
    assert joined.duration_ns.tolist() == [30, 10, 5]
    assert joined.flop.tolist() == [3.0, 1.0, 1.0]
    assert joined.layer.tolist() == [-1, 3, 4]
    assert moved.tolist() == [0, 0, 0, 1, 2]
    assert joined.predecessor.tolist() == [-1, 0, 1]


def test_kernels_keep_their_operations_and_these_what_let_them_start() -> None:
    trace = pipeline_trace(3, 5)
    shown = scene(trace)
    assert shown.spans == len(trace.spans) + len(trace.kernels())
    inside = shown.kernels.parent >= 0
    assert inside.all()
    parent = shown.kernels.parent
    assert (shown.operations.start_ns[parent] <= shown.kernels.start_ns).all()
    assert (shown.kernels.end_ns <= shown.operations.end_ns[parent]).all()
    assert np.isin(shown.operations.kind[parent], (KINDS.index("forward"), KINDS.index("backward"))).all()
    begun = shown.operations.predecessor >= 0
    before = shown.operations.predecessor[begun]
    assert begun.sum() == (trace.spans.predecessor >= 0).sum()
    assert (shown.operations.end_ns[before] == shown.operations.start_ns[begun]).all()
    assert (shown.operations.kind[before] < BUBBLES_FROM).all()


def test_every_compute_lane_is_full_on_both_levels() -> None:
    trace = pipeline_trace(3, 5)
    shown = scene(trace)
    for lane, described in enumerate(trace.lanes):
        if described.stream != "compute":
            continue
        assert shown.operations.duration_ns[shown.operations.lane == lane].sum() == trace.step_ns
        for row in np.unique(shown.kernels.parent):
            if shown.operations.lane[row] == lane:
                mine = (shown.kernels.parent == row) & (shown.kernels.lane == lane)
                assert shown.kernels.duration_ns[mine].sum() == shown.operations.duration_ns[row]


def test_the_path_is_the_critical_path() -> None:
    trace = pipeline_trace(3, 5)
    path = scene(trace).path
    parts = critical_path(trace)
    assert path[:, 1:].tolist() == [[part.start_ns, part.end_ns] for part in parts]
    assert path[:, 0].tolist() == [int(trace.spans.lane[part.row]) for part in parts]
    assert int((path[:, 2] - path[:, 1]).sum()) == trace.step_ns


def test_side_by_side_moves_everything_that_points() -> None:
    first, second = scene(pipeline_trace(2, 3)), scene(pipeline_trace(4, 2))
    both = side_by_side(first, second, ("a", "b"))
    behind = slice(len(first.operations), None)
    assert both.where(0).startswith("a: stage 0")
    assert both.where(len(first.lanes)).startswith("b: stage 0")
    assert [both.lanes[i] for i in both.operations.lane[behind]] == [second.lanes[i] for i in second.operations.lane]
    theirs = second.kernels.parent >= 0
    parent = both.kernels.parent[len(first.kernels) :][theirs]
    for column in ("start_ns", "duration_ns", "kind"):
        moved = getattr(both.operations, column)[parent]
        assert moved.tolist() == getattr(second.operations, column)[second.kernels.parent[theirs]].tolist()
    assert (both.end_ns, both.spans) == (max(first.end_ns, second.end_ns), first.spans + second.spans)


@pytest.mark.parametrize("most", [0, 10**9])
def test_too_many_kernels_are_left_out_and_counted(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pipeline_trace(2, 3)
    monkeypatch.setattr("simpar.view.scene.MAX_KERNELS", most)
    shown = scene(trace)
    assert shown.dropped == (0 if most else len(trace.kernels()))
    assert (len(shown.kernels) > 0) == bool(most)
