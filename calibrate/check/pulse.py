"""How fast the machine is at this minute beside its profile, and how compute and communication slow each other.

A pulse is a short program of kernels alone, all-reduces alone, and both at once. It runs before the steps of every
round, so that a box whose neighbours come and go is known by its state in the minute of the steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from calibrate.training.recipe import Perceptron
from simpar.hardware.cluster import Cluster
from simpar.model.work import DTYPE_BYTES, DType, Gemm, MemoryBound
from simpar.program.ir import COMPUTE, Collective, Group, Instruction, Launch, Program, RankProgram, Record, Wait
from simpar.trace.trace import COMMUNICATION_KINDS, KINDS, IntColumn, Trace

_STREAM = "dp"
_ALONE, _SHORT, _BESIDE = "alone", "short", "beside"
_REPEATS = 4
_MOST_BESIDE = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Measured over predicted times, and rates of one beside the other over alone.

    Attributes:
        compute: of kernels that run alone.
        communication: of all-reduces that run alone; 1 with one rank.
        compute_beside: speed of kernels beside an all-reduce over their speed alone; None if none was seen there.
        communication_beside: speed of an all-reduce beside kernels over its speed alone; None likewise.
    """

    compute: float
    communication: float = 1.0
    compute_beside: float | None = None
    communication_beside: float | None = None


UNMEASURED = Level(compute=1.0)
"""As fast as the profile says, with nothing known of interference."""


def pulse(network: Perceptron, batch: int, ranks: int, dtype: DType, *, launch_s: float) -> Program:
    """The program: kernels as the network has them, and all-reduces of one layer's and of all its parameters."""
    inner, outer = network.widths[:2]
    size = DTYPE_BYTES[dtype]
    short = Gemm(max(8, batch // 4), outer, inner, dtype, out_bytes=size)
    kernels = (Gemm(batch, outer, inner, dtype, out_bytes=size), MemoryBound(2 * size * batch * outer))
    parameters = sum(a * b for a, b in zip(network.widths, network.widths[1:], strict=False))
    body: list[Instruction] = [Launch(kernel, _ALONE) for _ in range(_REPEATS) for kernel in kernels]
    body += [Launch(short, _SHORT) for _ in range(_REPEATS)]
    if ranks > 1:
        group = Group(_STREAM, range(ranks))
        whole = float(size * parameters)
        for number, nbytes in enumerate((whole / 8, whole)):
            body += _exchange(nbytes, group, _ALONE, number)
        beside = max(_REPEATS, min(_MOST_BESIDE, round(4 * parameters / (outer * inner))))
        body += [Record(COMPUTE, "both"), Wait(_STREAM, "both"), Collective("all_reduce", whole, group, _BESIDE)]
        body += [Launch(short, _BESIDE) for _ in range(beside)]
        body += [Record(_STREAM, "end"), Wait(COMPUTE, "end")]
    members = tuple(RankProgram(rank, 0, 1, (), tuple(body)) for rank in range(ranks))
    return Program(members, launch_s)


def _exchange(nbytes: float, group: Group, name: str, number: int) -> list[Instruction]:
    return [
        Record(COMPUTE, ("ready", number)),
        Wait(_STREAM, ("ready", number)),
        Collective("all_reduce", nbytes, group, name),
        Record(_STREAM, ("done", number)),
        Wait(COMPUTE, ("done", number)),
    ]


def level(predicted: Trace, measured: Sequence[Trace]) -> Level:
    """What the pulses of one or more rounds say, each figure as the median over them."""
    readings = [_reading(predicted, trace) for trace in measured]

    def middle(name: str) -> float | None:
        found = [value for reading in readings if (value := getattr(reading, name)) is not None]
        return median(found) if found else None

    return Level(
        compute=middle("compute") or 1.0,
        communication=middle("communication") or 1.0,
        compute_beside=middle("compute_beside"),
        communication_beside=middle("communication_beside"),
    )


def _reading(predicted: Trace, measured: Trace) -> Level:
    communicates = len(KINDS) - len(COMMUNICATION_KINDS)

    def lengths(trace: Trace, name: str, *, communication: bool) -> IntColumn:
        spans = trace.spans
        wanted = np.array([text == name for text in trace.names], np.bool_)[spans.name]
        chosen: IntColumn = spans.duration_ns[wanted & ((spans.kind >= communicates) == communication)]
        return chosen

    def total(trace: Trace, *names: str, communication: bool) -> float:
        return float(sum(lengths(trace, name, communication=communication).sum() for name in names))

    compute = total(measured, _ALONE, _SHORT, communication=False) / total(
        predicted, _ALONE, _SHORT, communication=False
    )
    exchanged = lengths(measured, _ALONE, communication=True)
    if not len(exchanged):
        return Level(compute=compute)
    long = exchanged[exchanged >= np.median(exchanged)]
    beside = _overlapped(measured)
    short = lengths(measured, _SHORT, communication=False)
    both = lengths(measured, _BESIDE, communication=True)
    return Level(
        compute=compute,
        communication=float(exchanged.sum()) / total(predicted, _ALONE, communication=True),
        compute_beside=float(np.median(short) / np.mean(beside)) if len(beside) else None,
        communication_beside=float(np.median(long) / np.median(both)) if len(beside) else None,
    )


def _overlapped(trace: Trace) -> list[int]:
    """Lengths of the kernels that ran while their rank's all-reduce was under way from start to end."""
    spans, names = trace.spans, trace.names
    found = []
    for rank in {lane.rank for lane in trace.lanes}:
        mine = [i for i, lane in enumerate(trace.lanes) if lane.rank == rank]
        rows = np.flatnonzero(np.isin(spans.lane, mine))
        beside = [row for row in rows if names[spans.name[row]] == _BESIDE]
        other = next(row for row in beside if KINDS[spans.kind[row]] == "all_reduce")
        found += [
            int(spans.duration_ns[row])
            for row in beside
            if row != other
            and spans.start_ns[row] >= spans.start_ns[other]
            and spans.end_ns[row] <= spans.end_ns[other]
        ]
    return found


def at_level(cluster: Cluster, now: Level) -> Cluster:
    """The cluster as fast as the machine was in that minute: all kernels and all communication by one factor each."""
    slower, link = now.compute, cluster.node_link
    device = cluster.device
    changed = device.replace(
        peak_flop_per_s={dtype: peak / slower for dtype, peak in device.peak_flop_per_s.items()},
        memory_bytes_per_s=device.memory_bytes_per_s / slower,
        gemm={name: fit.replace(overhead_s=fit.overhead_s * slower) for name, fit in device.gemm.items()},
        attention={name: fit.replace(overhead_s=fit.overhead_s * slower) for name, fit in device.attention.items()},
        memory_bound={
            name: fit.replace(overhead_s=fit.overhead_s * slower) for name, fit in device.memory_bound.items()
        },
    )
    factor = now.communication
    rates = ("nominal_bytes_per_s", "bandwidth_bytes_per_s")
    latencies = ("base_latency_s", "step_latency_s", "p2p_latency_s", "peer_latency_s", "nvls_latency_s")
    return cluster.replace(
        device=changed,
        node_link=link.replace(
            **{name: getattr(link, name) / factor for name in rates},
            **{name: getattr(link, name) * factor for name in latencies},
        ),
    )
