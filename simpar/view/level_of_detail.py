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

from simpar.trace.trace import NONE, FloatColumn, IntColumn, Spans, spans_from_columns
from simpar.view.palette import BUBBLES_FROM, DRAWN_KINDS

IDLE = BUBBLES_FROM
"""The first kind that shows where a compute lane does nothing."""

PLOT_PIXELS = 1200
"""Width of the plot that level of detail and labels assume; the browser's own is not known here."""

_COARSER = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangles:
    """Columns of equal length, one row per rectangle to draw.

    Attributes:
        start_ns: left edge.
        duration_ns: width.
        lane: index into ``Trace.lanes``.
        kind: index into ``DRAWN_KINDS``; bubbles are ``IDLE`` and above.
        bottom: lower edge as a fraction of the lane's height.
        height: height as a fraction of the lane's height.
        span: row of the span drawn, or -1 for a cluster.
        count: spans that the rectangle's cluster merges (1 for a span).
        busy: fraction of the rectangle's cluster that is busy, all kinds but bubbles together.
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


def to_rectangles(
    operations: Spans, kernels: Spans, *, end_ns: int, budget: int, expand: Sequence[int] = ()
) -> Rectangles:
    """Rectangles that show a scene from 0 to ``end_ns``.

    Parents first: kernels on the lanes of ``expand`` stand in for an operation only where they are a pixel wide on
    the mean, else the operation itself is drawn. Kernels on other lanes (collectives inside operations) are drawn
    wherever they are. Then short neighbours are merged, with an ever longer notion of "short", until all keep the
    budget (one below a cluster per lane still gets a cluster per lane).

    Args:
        operations: the upper level, which has everything that ``kernels`` has on the lanes of ``expand``.
        kernels: the lower level; ``parent`` is a row of ``operations``.
        end_ns: right edge.
        budget: rectangles, at most.
        expand: lanes on which kernels may replace operations; on lanes with operations that are not among them,
            kernels are not drawn.

    Returns:
        The rectangles; ``span`` counts the rows of ``operations`` and then those of ``kernels``.
    """
    resolution = 0.0
    while True:
        shown, rows, group = _levels(operations, kernels, resolution, expand)
        drawn = _merge(shown, rows, group, resolution)
        if len(drawn) <= budget or resolution > end_ns:
            return drawn
        resolution = max(resolution * _COARSER, end_ns / PLOT_PIXELS)


def _levels(
    operations: Spans, kernels: Spans, resolution_ns: float, expand: Sequence[int]
) -> tuple[Spans, IntColumn, IntColumn]:
    """The rows of both tables that are drawn, and the operation that each belongs to."""
    count = np.bincount(kernels.parent[kernels.parent >= 0], minlength=len(operations))
    opened = np.isin(operations.lane, expand) & (count > 1)
    opened &= operations.duration_ns >= count * resolution_ns
    has_operations = np.isin(kernels.lane, np.unique(operations.lane[operations.kind < IDLE]))
    orphan = kernels.parent < 0
    below = np.where(orphan, np.isin(kernels.lane, expand), np.append(opened, False)[kernels.parent])
    rows = np.concatenate(
        [np.flatnonzero(~opened), len(operations) + np.flatnonzero(np.where(has_operations, below, True))]
    )
    columns = {
        name: np.concatenate([getattr(operations, name), getattr(kernels, name)])[rows]
        for name in Spans.__dataclass_fields__
    }
    group = np.concatenate([np.arange(len(operations)), kernels.parent])[rows]
    return spans_from_columns(columns), rows, group


def _merge(spans: Spans, rows: IntColumn, group: IntColumn, resolution_ns: float) -> Rectangles:
    """One rectangle per span that is long or has no short neighbour; else one per cluster and kind."""
    order = np.lexsort((spans.start_ns + spans.duration_ns, spans.start_ns, spans.lane))
    start, duration, lane, kind = (
        column[order] for column in (spans.start_ns, spans.duration_ns, spans.lane, spans.kind)
    )
    cluster = _clusters(start, duration, lane, group[order], resolution_ns)
    first = np.flatnonzero(np.diff(cluster, prepend=-1))
    count = np.bincount(cluster, minlength=len(first))
    alone = count[cluster] == 1
    return _concatenate(
        [
            _singles(start[alone], duration[alone], lane[alone], kind[alone], rows[order][alone]),
            _stacks(start[~alone], duration[~alone], lane[~alone], kind[~alone], cluster[~alone]),
        ]
    )


def _clusters(
    start: IntColumn, duration: IntColumn, lane: IntColumn, group: IntColumn, resolution_ns: float
) -> IntColumn:
    """Cluster of each span (by lane, then start): runs of short spans and gaps, cut every resolution.

    The short kernels of one operation that is longer than the resolution are one cluster, whatever its length.
    """
    if not len(start):
        return np.zeros(0, dtype=np.int64)
    short = duration < resolution_ns
    end = start + duration
    same = (lane[1:] == lane[:-1]) & (group[1:] == group[:-1])
    family = np.cumsum(np.concatenate([[True], ~same])) - 1  # spans of one operation in a row
    begin = np.flatnonzero(np.diff(family, prepend=-1))
    final = np.append(begin[1:], len(start)) - 1
    whole = (group >= 0) & (final > begin)[family] & ((end[final] - start[begin])[family] >= resolution_ns)
    together = same & whole[1:]
    gap = start[1:] - end[:-1]
    near = (lane[1:] == lane[:-1]) & (gap < resolution_ns) & ~(whole[1:] | whole[:-1])
    joins = np.concatenate([[False], short[1:] & short[:-1] & (near | together)])
    origin = start[~joins][np.cumsum(~joins) - 1]
    # Cuts are counted from the start of each run: a grid common to all lanes would show as a comb.
    piece = np.floor((start - origin) / max(resolution_ns, 1.0)).astype(np.int64)
    moved_on = np.concatenate([[True], (piece[1:] != piece[:-1]) & ~together])
    return np.cumsum(~joins | moved_on).astype(np.int64) - 1


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
    key, position = np.unique(number * len(DRAWN_KINDS) + kind, return_inverse=True)
    of, each_kind = key // len(DRAWN_KINDS), key % len(DRAWN_KINDS)
    time = np.bincount(position, weights=duration, minlength=len(key))
    height = time / np.maximum(width[of], 1)
    top = np.cumsum(height)
    below = np.concatenate([[0.0], top])[np.searchsorted(of, np.arange(len(first)))]
    busy = np.bincount(of, weights=np.where(each_kind < IDLE, height, 0.0), minlength=len(first)).astype(np.float64)
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


def _concatenate(parts: Sequence[Rectangles]) -> Rectangles:
    return Rectangles(
        **{column.name: np.concatenate([getattr(part, column.name) for part in parts]) for column in fields(Rectangles)}
    )
