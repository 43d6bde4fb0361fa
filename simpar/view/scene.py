"""What a timeline shows of a trace, as two tables: operations with the bubbles between them, and their kernels.

The figure and the page are cut from the same scene. Bubbles are rows like spans; their kinds lie behind ``KINDS``
(:data:`simpar.view.palette.DRAWN_KINDS`), and their name is that of the stream that they wait for.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simpar.trace.bubbles import Bubbles, bubbles, inner_bubbles
from simpar.trace.critical_path import critical_path
from simpar.trace.trace import NONE, FloatColumn, IntColumn, Lane, Spans, Trace, empty_spans, spans_from_columns
from simpar.view.palette import BUBBLES_FROM

MAX_KERNELS = 2_000_000
"""Kernels of a scene, at most: with more of them it has operations only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What there is to draw.

    Attributes:
        lanes: as in the trace.
        names: texts that ``Spans.name`` points into.
        operations: operations and the bubbles between them, by start.
        kernels: kernels, collectives inside operations, and the bubbles between these; ``parent`` is the row in
            ``operations``, or -1 where the operation is not known.
        dropped: kernels that are left out because they are too many.
        step_ns: length of the step.
        end_ns: where the time axis ends: the end of the step or of the last span, at least 1 ns.
        spans: spans of the trace that are shown, in both tables.
        path: the critical path: lane, start and end of each stretch in order of time, shape (n, 3); empty where the
            trace has no predecessors.
        words: per lane, whose it is where scenes are compared ("predicted"); else empty.
        link_s_per_byte: how hard spans work their links, as :meth:`Trace.link_s_per_byte` gives it; None if unknown.
    """

    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    operations: Spans
    kernels: Spans
    dropped: int
    step_ns: int
    end_ns: int
    spans: int
    path: npt.NDArray[np.int64]
    words: tuple[str, ...] = ()
    link_s_per_byte: FloatColumn | None = None

    def where(self, lane: int) -> str:
        """Which lane it is, as text."""
        word = self.words[lane] if self.words else ""
        return f"{word}: {lane_text(self.lanes[lane])}" if word else lane_text(self.lanes[lane])

    @property
    def used(self) -> IntColumn:
        """Lanes with anything on them."""
        return np.unique(np.concatenate([self.operations.lane, self.kernels.lane]))


def lane_text(lane: Lane) -> str:
    """Where a lane is.

    >>> lane_text(Lane(8, 1, "tp", 64))
    'stage 1 · GPU 8 ×64 · tp'
    """
    replicas = f" ×{lane.replicas:,}" if lane.replicas > 1 else ""
    return f"stage {lane.stage} · GPU {lane.rank}{replicas} · {lane.stream}"


def scene(trace: Trace) -> Scene:
    """Operations and kernels of ``trace`` with the bubbles of its compute lanes."""
    kernels = trace.kernels()
    dropped = len(kernels) if len(kernels) > MAX_KERNELS else 0
    if dropped:
        kernels = empty_spans()
    joined, moved = join_pieces(trace.spans)
    streams = list(dict.fromkeys(lane.stream for lane in trace.lanes))
    names = (*trace.names, *streams)
    stream_name = np.array([len(trace.names) + streams.index(lane.stream) for lane in trace.lanes], np.int64)
    operations, moved_again = _merged(joined, _as_spans(bubbles(trace), stream_name))
    place = np.append(moved_again[moved], NONE)  # so that -1 stays -1
    operations = replace(operations, predecessor=np.append(moved_again, NONE)[operations.predecessor])
    inside = _as_spans(inner_bubbles(trace, kernels), stream_name)
    kernels, _ = _merged(replace(kernels, parent=place[kernels.parent]), replace(inside, parent=place[inside.parent]))
    shown = len(joined) + int((kernels.kind < BUBBLES_FROM).sum())
    last = max((int(table.end_ns.max()) for table in (operations, kernels) if len(table)), default=0)
    return Scene(
        lanes=trace.lanes,
        names=names,
        operations=operations,
        kernels=kernels,
        dropped=dropped,
        step_ns=trace.step_ns,
        end_ns=max(1, trace.step_ns, last),
        spans=shown,
        path=_path(trace),
        link_s_per_byte=trace.link_s_per_byte(),
    )


def side_by_side(first: Scene, second: Scene, words: tuple[str, str]) -> Scene:
    """Both scenes as one: the lanes of the second come behind those of the first."""
    lanes, names = len(first.lanes), len(first.names)

    def moved(table: Spans, operations: int) -> Spans:
        return replace(
            table,
            lane=table.lane + lanes,
            name=np.where(table.name == NONE, NONE, table.name + names),
            parent=np.where(table.parent == NONE, NONE, table.parent + operations),
            predecessor=np.where(table.predecessor == NONE, NONE, table.predecessor + operations),
        )

    def both(above: Spans, below: Spans) -> Spans:
        return spans_from_columns(
            {n: np.concatenate([getattr(above, n), getattr(below, n)]) for n in Spans.__dataclass_fields__}
        )

    operations = len(first.operations)
    return Scene(
        lanes=(*first.lanes, *second.lanes),
        names=(*first.names, *second.names),
        operations=both(first.operations, moved(second.operations, operations)),
        kernels=both(first.kernels, moved(second.kernels, operations)),
        dropped=first.dropped + second.dropped,
        step_ns=max(first.step_ns, second.step_ns),
        end_ns=max(first.end_ns, second.end_ns),
        spans=first.spans + second.spans,
        path=np.zeros((0, 3), np.int64),
        words=(words[0],) * lanes + (words[1],) * len(second.lanes),
    )


def taken(spans: Spans, rows: npt.NDArray[np.intp]) -> Spans:
    """The given rows of a table."""
    return spans_from_columns({name: getattr(spans, name)[rows] for name in Spans.__dataclass_fields__})


def join_pieces(spans: Spans) -> tuple[Spans, IntColumn]:
    """Touching spans of one lane, kind, microbatch and chunk as one: an operation that was run in pieces.

    Pieces come from gradient buckets and from layers that are gathered one by one. Where a piece had to wait, the gap
    stays a gap.

    Returns:
        The spans by start, and the row in them of each given span.
    """
    order = np.lexsort((spans.start_ns, spans.lane))
    columns = {name: getattr(spans, name)[order] for name in Spans.__dataclass_fields__}
    end = columns["start_ns"] + columns["duration_ns"]
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for name in ("lane", "kind", "microbatch", "chunk"):
        same &= columns[name][1:] == columns[name][:-1]
    same &= (columns["start_ns"][1:] == end[:-1]) & (columns["microbatch"][1:] >= 0) & (columns["flop"][1:] > 0)
    first = np.concatenate([np.ones(min(len(order), 1), dtype=bool), ~same])
    begin = np.flatnonzero(first)
    last = np.append(begin[1:], len(order))[: len(begin)] - 1
    joined = {name: column[begin] for name, column in columns.items()}
    joined["duration_ns"] = end[last] - joined["start_ns"]
    if len(begin):
        joined["flop"] = np.add.reduceat(columns["flop"], begin)
    joined["layer"] = np.where(begin == last, joined["layer"], NONE)
    by_start = np.lexsort((joined["lane"], joined["start_ns"]))
    place, moved = np.empty(len(begin), np.int64), np.empty(len(order), np.int64)
    place[by_start] = np.arange(len(begin))
    moved[order] = place[np.cumsum(first) - 1]
    joined["predecessor"] = np.append(moved, NONE)[joined["predecessor"]]
    return spans_from_columns({name: column[by_start] for name, column in joined.items()}), moved


def _path(trace: Trace) -> npt.NDArray[np.int64]:
    if not (trace.spans.predecessor != NONE).any():
        return np.zeros((0, 3), np.int64)
    parts = [(trace.spans.lane[part.row], part.start_ns, part.end_ns) for part in critical_path(trace)]
    return np.array(parts, np.int64).reshape(-1, 3)


def _as_spans(idle: Bubbles, stream_name: IntColumn) -> Spans:
    nothing = np.full(len(idle), NONE, np.int64)
    return spans_from_columns(
        {
            "start_ns": idle.start_ns,
            "duration_ns": idle.duration_ns,
            "lane": idle.lane,
            "kind": BUBBLES_FROM + idle.cause,
            "name": np.where(idle.awaited == NONE, NONE, np.append(stream_name, NONE)[idle.awaited]),
            "microbatch": nothing,
            "chunk": nothing,
            "layer": nothing,
            "nbytes": np.zeros(len(idle)),
            "flop": np.zeros(len(idle)),
            "parent": idle.parent,
            "predecessor": nothing,
        }
    )


def _merged(first: Spans, second: Spans) -> tuple[Spans, IntColumn]:
    """Both tables by start, and where the rows of the first are."""
    columns = {
        name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in Spans.__dataclass_fields__
    }
    order = np.lexsort((columns["lane"], columns["start_ns"]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return spans_from_columns({name: column[order] for name, column in columns.items()}), place[: len(first)]
