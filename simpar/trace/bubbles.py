"""Bubbles: the time in which a compute lane runs nothing, as spans of their own, each with its cause.

A gap belongs to the communication that ended it (the predecessor of the operation behind it), as far as that
communication ran meanwhile; this is how :mod:`simpar.trace.breakdown` counts. What is left is called by where it lies:
before the rank's first backward (the pipeline fills), after its last forward (it drains), or in between (an operation
waits for another stage). Inside an operation, a gap between its kernels belongs to the rank's collectives that run
meanwhile, and else to the host, which has launched nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simpar.trace.intervals import EMPTY, Intervals, intervals, split
from simpar.trace.trace import KINDS, NONE, IntColumn, Spans, Trace
from simpar.trace.utilisation import communicator

BUBBLE_CAUSES = ("warm-up", "dependency", "cool-down", "exposed communication", "host")
"""Why a compute lane idles; ``Bubbles.cause`` holds indices into this tuple."""

MESSAGES = ("pp_forward", "pp_backward", "pp_forward_return", "pp_backward_return")
"""Streams that carry messages between stages."""

HOST_STREAMS = ("host", "cpu")
"""Communicators that stand for copies from and to the memory of the host, and for work of its processor there."""

_WARM_UP, _DEPENDENCY, _COOL_DOWN, _EXPOSED, _HOST = range(len(BUBBLE_CAUSES))
_COMPUTE = "compute"
_P2P, _FORWARD, _BACKWARD = (KINDS.index(kind) for kind in ("p2p", "forward", "backward"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubbles:
    """Columns of equal length, one row per bubble, by lane and start.

    Attributes:
        start_ns: start on the integer clock.
        duration_ns: length.
        lane: compute lane, an index into ``Trace.lanes``.
        cause: index into ``BUBBLE_CAUSES``.
        awaited: lane of the communication that is exposed, or -1.
        parent: row of the operation in ``Trace.spans`` inside which the gap lies, or -1.
    """

    start_ns: IntColumn
    duration_ns: IntColumn
    lane: IntColumn
    cause: IntColumn
    awaited: IntColumn
    parent: IntColumn

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bubbles of one lane and cause."""

    pieces: Intervals
    lane: int
    cause: int
    awaited: int = NONE
    parent: IntColumn | None = None


def bubbles(trace: Trace) -> Bubbles:
    """Every gap between the operations of every compute lane, from 0 to the end of the step."""
    lanes, of_rank = trace.spans.rows_by_lane(len(trace.lanes)), _lanes_of_rank(trace)
    return _columns([piece for lane in compute_lanes(trace) for piece in _between(trace, lanes, of_rank, lane)])


def inner_bubbles(trace: Trace, kernels: Spans) -> Bubbles:
    """Every gap between the ``kernels`` of an operation, for operations that have any."""
    lanes, of_rank = kernels.rows_by_lane(len(trace.lanes)), _lanes_of_rank(trace)
    return _columns([p for lane in compute_lanes(trace) for p in _inside(trace, kernels, lanes, of_rank, lane)])


def compute_lanes(trace: Trace) -> list[int]:
    """Lanes that compute, and do so at least once."""
    used = set(np.unique(trace.spans.lane).tolist())
    return [i for i, lane in enumerate(trace.lanes) if lane.stream == _COMPUTE and i in used]


def lane_gaps(start: IntColumn, end: IntColumn, step_ns: int) -> Intervals:
    """When a lane is idle: a row before each of its spans, and one behind the last; spans are ordered."""
    edges = np.concatenate([[0], np.stack([start, end], axis=1).ravel(), [step_ns]])
    return edges.reshape(-1, 2)


def awaited_by_host(
    trace: Trace, lanes: Mapping[int, IntColumn] | Sequence[IntColumn], gaps: Intervals, causing_lane: IntColumn
) -> Intervals:
    """Of the gaps that copies from or to the host ended, the parts in which these themselves waited; in order.

    Args:
        trace: what happened.
        lanes: rows of each lane, by index.
        gaps: of a compute lane, in order.
        causing_lane: what ended each of them, or -1.
    """
    ending = np.unique(causing_lane[causing_lane != NONE]).tolist()
    rests = [
        _share(_positive(gaps[causing_lane == index]), intervals(*trace.spans.times(lanes[index])))[1]
        for index in ending
        if communicator(trace.lanes[index].stream) in HOST_STREAMS
    ]
    pieces = np.concatenate([EMPTY, *rests])
    return pieces[np.argsort(pieces[:, 0], kind="stable")]


def _lanes_of_rank(trace: Trace) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for index, lane in enumerate(trace.lanes):
        found.setdefault(lane.rank, []).append(index)
    return found


def _between(
    trace: Trace, lanes: Sequence[IntColumn], of_rank: Mapping[int, Sequence[int]], compute: int
) -> Iterator[_Piece]:
    spans, rows = trace.spans, lanes[compute]
    own = of_rank[trace.lanes[compute].rank]
    start, end = spans.times(rows)
    gaps = lane_gaps(start, np.maximum.accumulate(end), trace.step_ns)
    cause = np.append(spans.predecessor[rows], NONE)
    causing_lane = np.where(cause == NONE, NONE, spans.lane[cause])
    is_message = (cause != NONE) & (spans.kind[cause] == _P2P)
    left = []
    if is_message.any():
        messages = np.unique(cause[is_message])
        arriving = intervals(*spans.times(messages))
        exposed, rest = _share(_positive(gaps[is_message]), arriving)
        yield _Piece(exposed, compute, _EXPOSED, int(spans.lane[messages[0]]))
        left.append(rest)
    unknown = cause == NONE
    if len(rows) and unknown[0] and (spans.predecessor != NONE).any():  # nothing else can have held the first one up
        yield _Piece(_positive(gaps[:1]), compute, _HOST)
        unknown[0] = False
    idle = _positive(np.concatenate([awaited_by_host(trace, lanes, gaps, causing_lane), gaps[unknown]]))
    idle = idle[np.argsort(idle[:, 0], kind="stable")]
    for index in own:
        if index == compute or not len(lanes[index]):
            continue
        busy = intervals(*spans.times(lanes[index]))
        ended_by = (causing_lane == index) & ~is_message
        exposed, rest = _share(_positive(gaps[ended_by]), busy)
        if communicator(trace.lanes[index].stream) not in HOST_STREAMS:
            left.append(rest)
        yield _Piece(exposed, compute, _EXPOSED, index)
        if trace.lanes[index].stream not in MESSAGES:
            exposed, idle = _share(idle, busy)
            yield _Piece(exposed, compute, _EXPOSED, index)
    elsewhere = ~np.isin(causing_lane, own)
    foreign = (cause != NONE) & ~is_message & (elsewhere | (causing_lane == compute))
    left += [idle, _positive(gaps[foreign])]
    yield from _by_place(spans, rows, compute, np.concatenate(left))


def _by_place(spans: Spans, rows: IntColumn, compute: int, idle: Intervals) -> Iterator[_Piece]:
    """What is left of the gaps, by whether the pipeline fills, runs or drains."""
    forward, backward = rows[spans.kind[rows] == _FORWARD], rows[spans.kind[rows] == _BACKWARD]
    filled = int(spans.start_ns[backward].min()) if len(backward) else 0
    drains = int(spans.times(forward)[1].max()) if len(forward) else 0
    fills = idle[:, 0] < filled
    draining = ~fills & (idle[:, 0] >= drains) & bool(len(forward))
    yield _Piece(idle[fills], compute, _WARM_UP)
    yield _Piece(idle[draining], compute, _COOL_DOWN)
    yield _Piece(idle[~fills & ~draining], compute, _DEPENDENCY)


def _inside(
    trace: Trace, kernels: Spans, lanes: Sequence[IntColumn], of_rank: Mapping[int, Sequence[int]], compute: int
) -> Iterator[_Piece]:
    spans = trace.spans
    mine = lanes[compute][kernels.parent[lanes[compute]] >= 0]
    operations = np.unique(kernels.parent[mine])
    operations = operations[spans.lane[operations] == compute]
    if not len(operations):
        return
    busy = intervals(*kernels.times(mine))
    whole = np.stack(spans.times(operations), axis=1)
    order = np.argsort(whole[:, 0], kind="stable")
    idle, of, running = split(whole[order], busy)
    idle, parent = idle[~running], operations[order][of[~running]]
    for index in of_rank[trace.lanes[compute].rank]:
        if index != compute and len(lanes[index]):
            pieces, gap, waited = split(idle, intervals(*kernels.times(lanes[index])))
            yield _Piece(pieces[waited], compute, _EXPOSED, index, parent[gap[waited]])
            idle, parent = pieces[~waited], parent[gap[~waited]]
    yield _Piece(idle, compute, _HOST, NONE, parent)


def _positive(gaps: Intervals) -> Intervals:
    return gaps[gaps[:, 1] > gaps[:, 0]]


def _share(gaps: Intervals, busy: Intervals) -> tuple[Intervals, Intervals]:
    """The parts of ``gaps`` in which ``busy`` is, and the others."""
    if not len(gaps):
        return EMPTY, EMPTY
    pieces, _, inside = split(gaps, busy)
    return pieces[inside], pieces[~inside]


def _columns(pieces: list[_Piece]) -> Bubbles:
    sizes = [len(piece.pieces) for piece in pieces]
    edges = np.concatenate([EMPTY, *(piece.pieces for piece in pieces)])
    parents = [np.full(len(p.pieces), NONE, np.int64) if p.parent is None else p.parent for p in pieces]
    lane = np.repeat([piece.lane for piece in pieces], sizes).astype(np.int64)
    order = np.lexsort((edges[:, 0], lane))
    return Bubbles(
        start_ns=edges[order, 0],
        duration_ns=(edges[:, 1] - edges[:, 0])[order],
        lane=lane[order],
        cause=np.repeat([piece.cause for piece in pieces], sizes).astype(np.int64)[order],
        awaited=np.repeat([piece.awaited for piece in pieces], sizes).astype(np.int64)[order],
        parent=np.concatenate([np.zeros(0, np.int64), *parents])[order],
    )
