"""Where the time of a step goes, per rank: a reader of the trace.

Every nanosecond of a rank's step is counted once: as compute (by kind), as optimizer, as compute slowed by collectives
beside it, as waiting for the host, as exposed communication (by stream), or as bubble.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from simpar.trace.bubbles import MESSAGES, awaited_by_host, lane_gaps
from simpar.trace.intervals import intervals, overlap_ns, split
from simpar.trace.trace import COMMUNICATION_KINDS, KERNEL_KINDS, KINDS, NONE, IntColumn, Lane, Template, Trace
from simpar.trace.utilisation import communicator

_COMPUTE = "compute"
_P2P = KINDS.index("p2p")
_OPTIMIZER = KINDS.index("optimizer")


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
        exposed_s: compute waits for communication, by stream; for copies from and to the memory of the host as
            ``host``, for the optimizer where it runs on the processor there as ``cpu``.
        hidden_s: communication (and the host's part) beside compute, by stream.
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

    def over(self, steps: int) -> "RankTime":
        """The mean of so many steps."""
        if steps == 1:
            return self
        names = [field.name for field in fields(self) if field.name.endswith("_s")]
        mean: dict[str, Any] = {name: _divided(getattr(self, name), steps) for name in names}
        return replace(self, **mean)


def _divided(value: "float | dict[str, float]", steps: int) -> "float | dict[str, float]":
    return {name: each / steps for name, each in value.items()} if isinstance(value, dict) else value / steps


def breakdown(trace: Trace) -> tuple[RankTime, ...]:
    """The time of every simulated rank, in lane order."""
    rows = trace.spans.rows_by_lane(len(trace.lanes))
    ranks: dict[int, dict[int, IntColumn]] = {}
    for index, lane in enumerate(trace.lanes):
        ranks.setdefault(lane.rank, {})[index] = rows[index]
    return tuple(_rank_time(trace, lanes) for lanes in ranks.values())


def bubble_fraction(trace: Trace) -> float:
    """Bubble over step time, on the mean of all ranks that the simulated ones stand for."""
    times = breakdown(trace)
    total = sum(t.replicas for t in times)
    return sum(t.bubble_s * t.replicas for t in times) / (total * trace.step_s) if trace.step_ns else 0.0


def _rank_time(trace: Trace, lanes: dict[int, IntColumn]) -> RankTime:
    """The time of the rank with these lanes, each with its rows."""
    spans, details = trace.spans, trace.details
    assert details is not None, "a breakdown needs the details that the engine records"
    compute_lane = next(i for i in lanes if trace.lanes[i].stream == _COMPUTE)
    lane, mine = trace.lanes[compute_lane], lanes[compute_lane]
    busy: dict[str, int] = dict.fromkeys(KERNEL_KINDS, 0)
    optimizer = interference = 0
    exposed, hidden = _communication(trace, lanes, compute_lane)
    for template, count, gpu_ns, is_optimizer in _templates(trace, mine):
        made = details.templates[template]
        kernels = {kind: made.busy_ns.get(kind, 0) * count for kind in KERNEL_KINDS}
        if is_optimizer:
            optimizer += sum(kernels.values())
        else:
            for kind, duration in kernels.items():
                busy[kind] += duration
        for stream, (shown, behind) in waits_inside(made).items():
            exposed[stream] = exposed.get(stream, 0) + shown * count
            hidden[stream] = hidden.get(stream, 0) + behind * count
        interference += gpu_ns - made.gpu_ns * count
    alone = mine[details.template[mine] == NONE]  # kernels between operations
    for kind in KERNEL_KINDS:
        busy[kind] += int(spans.duration_ns[alone[spans.kind[alone] == KINDS.index(kind)]].sum())
    host_wait = int(details.host_wait_ns[mine].sum())
    counted = sum(busy.values()) + optimizer + interference + host_wait + sum(exposed.values())
    return RankTime(
        stage=lane.stage,
        rank=lane.rank,
        replicas=lane.replicas,
        compute_s={kind: duration * 1e-9 for kind, duration in busy.items() if duration},
        optimizer_s=optimizer * 1e-9,
        interference_s=interference * 1e-9,
        host_wait_s=host_wait * 1e-9,
        exposed_s={stream: duration * 1e-9 for stream, duration in exposed.items() if duration},
        hidden_s={stream: duration * 1e-9 for stream, duration in hidden.items() if duration},
        bubble_s=(trace.step_ns - counted) * 1e-9,
    )


def waits_inside(made: Template) -> dict[str, tuple[int, int]]:
    """Exposed and hidden time of the collectives inside an operation, by stream.

    Which of several streams the compute stream waits for is not recorded; each gets its share by the time it runs.
    """
    streams = dict(made.stream_busy_ns) or {"tp": sum(made.busy_ns.get(kind, 0) for kind in COMMUNICATION_KINDS)}
    total = sum(streams.values())
    left, found = made.exposed_ns, {}
    for number, (stream, busy) in enumerate(streams.items(), 1):
        shown = left if number == len(streams) else made.exposed_ns * busy // max(total, 1)
        left -= shown
        found[stream] = (shown, max(busy - shown, 0))
    return found


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


def _stream(lane: Lane) -> str:
    """Streams to single parameter servers count as one, and so do copies from and to the host."""
    name = communicator(lane.stream)
    return name if name in ("ps", "host") else lane.stream


def _communication(
    trace: Trace, lanes: dict[int, IntColumn], compute_lane: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Nanoseconds of communication that the compute lane waits for, and that it does not, by stream.

    A gap belongs to what ended it (the predecessor of the operation behind it), as far as that stream was busy
    meanwhile; the rest of it is bubble. The gap before the end of the step belongs to whatever the rank still
    communicates, and so does the rest of one that a copy from or to the host ended, which waited for that itself.
    """
    spans = trace.spans
    gaps = lane_gaps(*spans.times(lanes[compute_lane]), trace.step_ns)
    cause = np.append(spans.predecessor[lanes[compute_lane]], NONE)
    causing_lane = np.array([NONE if row == NONE else spans.lane[row] for row in cause], np.int64)
    exposed: dict[str, int] = {}
    hidden: dict[str, int] = {}
    after = np.concatenate([awaited_by_host(trace, lanes, gaps, causing_lane), gaps[-1:]])
    for index, rows in lanes.items():
        lane = trace.lanes[index]
        if index == compute_lane or lane.stream in MESSAGES or not len(rows):
            continue
        busy = intervals(*spans.times(rows))
        waited = overlap_ns(busy, gaps[causing_lane == index]) + overlap_ns(busy, after)
        pieces, _, covered = split(after, busy)
        after = pieces[~covered]
        stream = _stream(lane)
        exposed[stream] = exposed.get(stream, 0) + waited
        hidden[stream] = hidden.get(stream, 0) + int((busy[:, 1] - busy[:, 0]).sum()) - waited
    is_message = np.array([row != NONE and spans.kind[row] == _P2P for row in cause], np.bool_)
    if is_message.any():
        messages = cause[is_message]
        arriving = intervals(*spans.times(messages))
        waited = overlap_ns(arriving, gaps[is_message])
        name = communicator(trace.lanes[spans.lane[messages[0]]].stream)
        exposed[name] = exposed.get(name, 0) + waited
        hidden[name] = hidden.get(name, 0) + int((arriving[:, 1] - arriving[:, 0]).sum()) - waited
    return exposed, hidden
