"""Level of detail: spans become at most ``budget`` rectangles that keep the busy time of each lane and kind.

Plotly widens a bar of less than a pixel to a whole one, so thousands of short spans would look like a busy
lane. Here neighbouring short spans are merged into a cluster, drawn as stacked kinds whose heights are the
fractions of the cluster's width that they keep the lane busy: the painted area is the busy time. Longer spans
stay as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from simpar.trace.trace import KINDS, NONE, FloatColumn, IntColumn, Lane, Spans, Trace, spans_from_columns

IDLE = len(KINDS)
"""The kind of rectangles that show where a compute lane does nothing."""

PLOT_PIXELS = 1200
"""Width of the plot that level of detail and labels assume; the browser's own is not known here."""

_MIN_FRACTION = 1e-9
_COARSER = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangles:
    """Columns of equal length, one row per rectangle to draw.

    Attributes:
        start_ns: left edge.
        duration_ns: width.
        lane: index into ``Trace.lanes``.
        kind: index into ``KINDS``, or ``IDLE``.
        bottom: lower edge as a fraction of the lane's height.
        height: height as a fraction of the lane's height.
        span: row of the span drawn, or -1 for a cluster and for idle time.
        count: spans that the rectangle's cluster merges (1 for a span, 0 for idle time alone).
        busy: busy fraction of the rectangle's cluster, all kinds together.
    """

    start_ns: IntColumn
    duration_ns: IntColumn
    lane: IntColumn
    kind: IntColumn
    bottom: FloatColumn
    height: FloatColumn
    span: IntColumn
    count: IntColumn
    busy: FloatColumn

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> "Rectangles":
        """The given rows, by index or by mask."""
        return Rectangles(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


def finest_spans(trace: Trace) -> Spans:
    """The kernel spans, and the operations that have none, ordered by start."""
    kernels, operations = trace.kernels(), trace.spans
    expanded = np.zeros(len(operations), dtype=bool)
    expanded[kernels.parent[kernels.parent >= 0]] = True
    columns = {
        name: np.concatenate([getattr(operations, name)[~expanded], getattr(kernels, name)])
        for name in Spans.__dataclass_fields__
    }
    order = np.lexsort((columns["lane"], columns["start_ns"]))
    return spans_from_columns({name: column[order] for name, column in columns.items()})


def join_pieces(spans: Spans) -> Spans:
    """Touching spans of one lane, kind, microbatch and chunk as one: an operation that was run in pieces.

    Pieces come from gradient buckets and from layers that are gathered one by one. Where a piece had to wait, the gap
    stays a gap.
    """
    order = np.lexsort((spans.start_ns, spans.lane))
    columns = {name: getattr(spans, name)[order] for name in Spans.__dataclass_fields__}
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for name in ("lane", "kind", "microbatch", "chunk"):
        same &= columns[name][1:] == columns[name][:-1]
    end = columns["start_ns"] + columns["duration_ns"]
    same &= (columns["start_ns"][1:] == end[:-1]) & (columns["microbatch"][1:] >= 0) & (columns["flop"][1:] > 0)
    first = np.concatenate([np.ones(min(len(order), 1), dtype=bool), ~same])
    begin = np.flatnonzero(first)
    if len(begin) == len(order):
        return spans
    last = np.append(begin[1:], len(order)) - 1
    joined = {name: column[begin] for name, column in columns.items()}
    joined["duration_ns"] = end[last] - joined["start_ns"]
    joined["flop"] = np.add.reduceat(columns["flop"], begin)
    joined["layer"] = np.where(begin == last, joined["layer"], -1)
    return spans_from_columns(joined)


def extent_ns(trace: Trace, spans: Spans) -> int:
    """Where the time axis ends: the end of the step, or of the last span if that is later; at least 1 ns."""
    return max(1, trace.step_ns, int(spans.end_ns.max()) if len(spans) else 0)


def to_rectangles(spans: Spans, lanes: Sequence[Lane], *, end_ns: int, budget: int) -> Rectangles:
    """Rectangles that show ``spans`` from 0 to ``end_ns``, with the idle time of the compute lanes.

    With at most ``budget`` spans each is its own rectangle, and so is each idle gap. With more, short
    neighbours are merged, with an ever longer notion of "short", until spans and gaps together keep the
    budget (one below a cluster per lane still gets a cluster per lane). Gaps of less than half a pixel are
    then left out.
    """
    compute = np.array([lane.stream == "compute" for lane in lanes], dtype=bool)
    if len(spans) <= budget:
        single = _merge(spans, 0.0)
        return _concatenate([_idle(single, compute, end_ns, 0.0), single])
    resolution = end_ns / PLOT_PIXELS
    while True:
        merged = _merge(spans, resolution)
        drawn = _concatenate([_idle(merged, compute, end_ns, 0.5 * end_ns / PLOT_PIXELS), merged])
        if len(drawn) <= budget or resolution > end_ns:
            return drawn
        resolution *= _COARSER


def _merge(spans: Spans, resolution_ns: float) -> Rectangles:
    """One rectangle per span that is long or has no short neighbour; else one per cluster and kind."""
    order = np.lexsort((spans.start_ns, spans.lane))
    start, duration, lane, kind = (
        column[order] for column in (spans.start_ns, spans.duration_ns, spans.lane, spans.kind)
    )
    cluster = _clusters(start, duration, lane, resolution_ns)
    first = np.flatnonzero(np.diff(cluster, prepend=-1))
    count = np.bincount(cluster, minlength=len(first))
    alone = count[cluster] == 1
    return _concatenate(
        [
            _singles(start[alone], duration[alone], lane[alone], kind[alone], order[alone]),
            _stacks(start[~alone], duration[~alone], lane[~alone], kind[~alone], cluster[~alone]),
        ]
    )


def _clusters(start: IntColumn, duration: IntColumn, lane: IntColumn, resolution_ns: float) -> IntColumn:
    """Cluster of each span (by lane, then start): runs of short spans and gaps, cut every resolution."""
    if not len(start):
        return np.zeros(0, dtype=np.int64)
    short = duration < resolution_ns
    gap = start[1:] - (start + duration)[:-1]
    joins = np.concatenate([[False], short[1:] & short[:-1] & (lane[1:] == lane[:-1]) & (gap < resolution_ns)])
    run = np.cumsum(~joins) - 1
    origin = start[~joins][run]
    # Cuts are counted from the start of each run: a grid common to all lanes would show as a comb.
    piece = np.floor((start - origin) / max(resolution_ns, 1.0)).astype(np.int64)
    cut = ~joins | np.concatenate([[True], piece[1:] != piece[:-1]])
    return np.cumsum(cut).astype(np.int64) - 1


def _singles(
    start: IntColumn, duration: IntColumn, lane: IntColumn, kind: IntColumn, span: npt.NDArray[np.intp]
) -> Rectangles:
    ones = np.ones(len(start), dtype=np.float64)
    return Rectangles(
        start_ns=start,
        duration_ns=duration,
        lane=lane,
        kind=kind,
        bottom=0 * ones,
        height=ones,
        span=span.astype(np.int64),
        count=ones.astype(np.int64),
        busy=ones,
    )


def _stacks(start: IntColumn, duration: IntColumn, lane: IntColumn, kind: IntColumn, cluster: IntColumn) -> Rectangles:
    """The kinds of each cluster, stacked: width times height is the time that it spends in the kind."""
    first = np.flatnonzero(np.diff(cluster, prepend=-1))
    number = np.cumsum(np.diff(cluster, prepend=-1) != 0) - 1  # clusters of several spans, numbered without holes
    left = start[first]
    count = np.diff(np.append(first, len(start)))
    last = first + count - 1
    # Spans of a lane do not overlap, so the last to start is the last to end.
    width = (start + duration)[last] - left
    key, position = np.unique(number * len(KINDS) + kind, return_inverse=True)
    of, each_kind = key // len(KINDS), key % len(KINDS)
    time = np.bincount(position, weights=duration, minlength=len(key))
    height = time / np.maximum(width[of], 1)
    top = np.cumsum(height)
    below = np.concatenate([[0.0], top])[np.searchsorted(of, np.arange(len(first)))]
    busy = np.bincount(of, weights=height, minlength=len(first)).astype(np.float64)
    return Rectangles(
        start_ns=left[of],
        duration_ns=width[of],
        lane=lane[first][of],
        kind=each_kind,
        bottom=top - height - below[of],
        height=height,
        span=np.full(len(key), NONE, dtype=np.int64),
        count=count[of],
        busy=busy[of],
    )


def _idle(drawn: Rectangles, compute: npt.NDArray[np.bool_], end_ns: int, shortest_ns: float) -> Rectangles:
    """Gaps between the rectangles of each compute lane in use, and the unused height of its clusters."""
    gaps: list[tuple[IntColumn, IntColumn, IntColumn]] = []
    for lane in np.flatnonzero(compute):
        rows = np.flatnonzero(drawn.lane == lane)
        if not len(rows):
            continue
        rows = rows[np.argsort(drawn.start_ns[rows], kind="stable")]
        busy_until = np.maximum.accumulate((drawn.start_ns + drawn.duration_ns)[rows])
        left, right = np.append(0, busy_until), np.append(drawn.start_ns[rows], end_ns)
        wide = right - left > max(shortest_ns, 0.0)
        gaps.append((left[wide], (right - left)[wide], np.full(int(wide.sum()), lane, dtype=np.int64)))
    empty = np.zeros(0, dtype=np.int64)
    start, duration, of_lane = (
        (np.concatenate([empty, *columns]) for columns in zip(*gaps, strict=True)) if gaps else (empty, empty, empty)
    )
    ones = np.ones(len(start))
    between = Rectangles(
        start_ns=start,
        duration_ns=duration,
        lane=of_lane,
        kind=np.full(len(start), IDLE, dtype=np.int64),
        bottom=0 * ones,
        height=ones,
        span=np.full(len(start), NONE, dtype=np.int64),
        count=np.zeros(len(start), dtype=np.int64),
        busy=0 * ones,
    )
    return _concatenate([between, _unused_height(drawn, compute)])


def _unused_height(drawn: Rectangles, compute: npt.NDArray[np.bool_]) -> Rectangles:
    """What the stacks of compute lanes leave of the lane's height: one rectangle on top of each stack."""
    ends_stack = np.ones(len(drawn), dtype=bool)
    ends_stack[:-1] = (np.diff(drawn.lane) != 0) | (np.diff(drawn.start_ns) != 0)
    on_compute = compute[drawn.lane] if len(compute) else np.zeros(len(drawn), dtype=bool)
    rest = drawn.take(ends_stack & on_compute & (drawn.count > 1) & (drawn.busy < 1 - _MIN_FRACTION))
    return Rectangles(
        start_ns=rest.start_ns,
        duration_ns=rest.duration_ns,
        lane=rest.lane,
        kind=np.full(len(rest), IDLE, dtype=np.int64),
        bottom=rest.busy,
        height=1 - rest.busy,
        span=rest.span,
        count=rest.count,
        busy=rest.busy,
    )


def _concatenate(parts: Sequence[Rectangles]) -> Rectangles:
    return Rectangles(
        **{column.name: np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(Rectangles)}
    )
