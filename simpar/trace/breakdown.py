"""Where the time of a step goes, per rank: a reader of the trace.

Every nanosecond of a rank's step is counted once: as compute (by kind), as optimizer, as compute slowed by collectives
beside it, as waiting for the host, as exposed communication (by stream), or as bubble.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simpar.trace.trace import COMMUNICATION_KINDS, KERNEL_KINDS, KINDS, NONE, IntColumn, Trace

_COMPUTE = "compute"
_P2P = KINDS.index("p2p")
_OPTIMIZER = KINDS.index("optimizer")
_MESSAGES = ("pp_forward", "pp_backward")
Intervals = npt.NDArray[np.int64]  # shape (n, 2): start and end, disjoint and ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """The step of one rank, in seconds; all but ``hidden_s`` add up to the step.

    Attributes:
        stage: pipeline rank.
        rank: global rank.
        replicas: ranks that it stands for.
        compute_s: kernels of forward and backward (recomputation included), by kind.
        optimizer_s: the optimizer's kernels.
        interference_s: what compute lost to collectives beside it.
        host_wait_s: the device waits for launches.
        exposed_s: compute waits for communication, by stream.
        hidden_s: communication beside compute, by stream.
        bubble_s: nothing to do: the pipeline fills, drains or waits.
    """

    stage: int
    rank: int
    replicas: int
    compute_s: dict[str, float]
    optimizer_s: float
    interference_s: float
    host_wait_s: float
    exposed_s: dict[str, float]
    hidden_s: dict[str, float]
    bubble_s: float


def breakdown(trace: Trace) -> tuple[RankTime, ...]:
    """The time of every simulated rank, in lane order."""
    ranks = dict.fromkeys(lane.rank for lane in trace.lanes)
    return tuple(_rank_time(trace, rank) for rank in ranks)


def bubble_fraction(trace: Trace) -> float:
    """Bubble over step time, on the mean of all ranks that the simulated ones stand for."""
    times = breakdown(trace)
    total = sum(t.replicas for t in times)
    return sum(t.bubble_s * t.replicas for t in times) / (total * trace.step_s) if trace.step_ns else 0.0


def _rank_time(trace: Trace, rank: int) -> RankTime:
    spans, details = trace.spans, trace.details
    assert details is not None, "a breakdown needs the details that the engine records"
    lanes = [i for i, lane in enumerate(trace.lanes) if lane.rank == rank]
    compute_lane = next(i for i in lanes if trace.lanes[i].stream == _COMPUTE)
    lane = trace.lanes[compute_lane]
    mine = np.flatnonzero(spans.lane == compute_lane)
    busy: dict[str, int] = dict.fromkeys(KERNEL_KINDS, 0)
    optimizer = exposed_inside = interference = hidden_inside = 0
    for template, count, gpu_ns, is_optimizer in _templates(trace, mine):
        made = details.templates[template]
        kernels = {kind: made.busy_ns.get(kind, 0) * count for kind in KERNEL_KINDS}
        if is_optimizer:
            optimizer += sum(kernels.values())
        else:
            for kind, duration in kernels.items():
                busy[kind] += duration
        exposed_inside += made.exposed_ns * count
        hidden_inside += (sum(made.busy_ns.get(k, 0) for k in COMMUNICATION_KINDS) - made.exposed_ns) * count
        interference += gpu_ns - made.gpu_ns * count
    exposed, hidden = _communication(trace, rank, compute_lane, mine)
    exposed["tp"] = exposed.get("tp", 0) + exposed_inside
    hidden["tp"] = hidden.get("tp", 0) + max(hidden_inside, 0)
    host_wait = int(details.host_wait_ns[mine].sum())
    counted = sum(busy.values()) + optimizer + interference + host_wait + sum(exposed.values())
    return RankTime(
        stage=lane.stage,
        rank=rank,
        replicas=lane.replicas,
        compute_s={kind: duration * 1e-9 for kind, duration in busy.items() if duration},
        optimizer_s=optimizer * 1e-9,
        interference_s=interference * 1e-9,
        host_wait_s=host_wait * 1e-9,
        exposed_s={stream: duration * 1e-9 for stream, duration in exposed.items() if duration},
        hidden_s={stream: duration * 1e-9 for stream, duration in hidden.items() if duration},
        bubble_s=(trace.step_ns - counted) * 1e-9,
    )


def _templates(trace: Trace, rows: IntColumn) -> list[tuple[int, int, int, bool]]:
    """Template, number of operations, their time on the device, and whether they are the optimizer's."""
    assert trace.details is not None
    template, gpu = trace.details.template[rows], trace.details.gpu_ns[rows]
    found = []
    for number in np.unique(template[template != NONE]):
        of = template == number
        is_optimizer = bool(trace.spans.kind[rows[of][0]] == _OPTIMIZER)
        found.append((int(number), int(of.sum()), int(gpu[of].sum()), is_optimizer))
    return found


def _communication(
    trace: Trace, rank: int, compute_lane: int, compute_rows: IntColumn
) -> tuple[dict[str, int], dict[str, int]]:
    """Nanoseconds of communication that the compute lane waits for, and that it does not, by stream.

    A gap belongs to what ended it (the predecessor of the operation behind it), as far as that stream was busy
    meanwhile; the rest of it is bubble. The gap before the end of the step belongs to whatever the rank still
    communicates.
    """
    spans = trace.spans
    gaps = _gaps(spans.start_ns[compute_rows], spans.end_ns[compute_rows], trace.step_ns)
    cause = np.append(spans.predecessor[compute_rows], NONE)
    causing_lane = np.array([NONE if row == NONE else spans.lane[row] for row in cause], np.int64)
    exposed: dict[str, int] = {}
    hidden: dict[str, int] = {}
    after = gaps[-1:]
    for index, lane in enumerate(trace.lanes):
        rows = np.flatnonzero(spans.lane == index)
        if lane.rank != rank or index == compute_lane or lane.stream in _MESSAGES or not len(rows):
            continue
        busy = _union(np.stack([spans.start_ns[rows], spans.end_ns[rows]], axis=1))
        waited = _overlap(busy, gaps[causing_lane == index]) + _overlap(busy, after)
        after = _without(after, busy)
        exposed[lane.stream] = waited
        hidden[lane.stream] = int((busy[:, 1] - busy[:, 0]).sum()) - waited
    is_message = np.array([row != NONE and spans.kind[row] == _P2P for row in cause], np.bool_)
    if is_message.any():
        messages = cause[is_message]
        arriving = _union(np.stack([spans.start_ns[messages], spans.end_ns[messages]], axis=1))
        exposed["pp"] = _overlap(arriving, gaps[is_message])
        hidden["pp"] = int((arriving[:, 1] - arriving[:, 0]).sum()) - exposed["pp"]
    return exposed, hidden


def _without(gaps: Intervals, busy: Intervals) -> Intervals:
    """The parts of ``gaps`` in which ``busy`` is not."""
    if not len(gaps):
        return gaps
    edges = np.unique(np.concatenate([gaps.ravel(), np.clip(busy.ravel(), gaps.min(), gaps.max())]))
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    kept = [_overlap(busy, piece[None]) == 0 and _overlap(gaps, piece[None]) > 0 for piece in pieces]
    return pieces[np.array(kept, np.bool_)]


def _gaps(start: IntColumn, end: IntColumn, step_ns: int) -> Intervals:
    """When a lane is idle; its spans are ordered and do not overlap."""
    edges = np.concatenate([[0], np.stack([start, end], axis=1).ravel(), [step_ns]])
    return edges.reshape(-1, 2)


def _union(intervals: Intervals) -> Intervals:
    """The same instants as disjoint, ordered intervals."""
    if not len(intervals):
        return intervals
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate([[True], ordered[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([ordered[first, 0], reach[last]], axis=1)


def _overlap(covered: Intervals, gaps: Intervals) -> int:
    """Nanoseconds of ``gaps`` that ``covered`` covers."""
    if not len(covered):
        return 0
    ends = np.cumsum(covered[:, 1] - covered[:, 0])
    edges = covered.ravel()
    level = np.stack([ends - (covered[:, 1] - covered[:, 0]), ends], axis=1).ravel()
    return int(np.rint((np.interp(gaps[:, 1], edges, level) - np.interp(gaps[:, 0], edges, level)).sum()))
