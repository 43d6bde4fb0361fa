"""Rows of nccl-tests, whatever they were written as, checked against themselves and turned into samples."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from calibrate.errors import MeasurementError
from calibrate.importers.source import warn
from calibrate.samples import CollectiveSample

_OPS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "bcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "sendrecv",
}
KNOWN_OPS = tuple(sorted(set(_OPS.values())))

# Twice the bytes may cost a little more than twice the time; beyond this the library fell off a cliff.
_CLIFF = 2.0
# Points of real fabrics exceed the monotone envelope by up to this without being outliers.
_ABOVE_ENVELOPE = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One half (out of place or in place) of one row.

    Attributes:
        where: ``file:line``, for messages.
        op: as the source writes it, or an empty string.
        nbytes: the size column.
        time: the time column, as printed.
        algbw: bytes over time in GB/s as printed, or an empty string.
        busbw: GB/s as printed, or an empty string.
        unit_s: seconds of one unit of ``time``.
        ranks: members of the group, or 0 where the source does not say.
        nodes: hosts of the group, or 0 where the source does not say.
        reduction: name of the reduction, ``none`` or an empty string.
        root: the root column, or -1.
        wrong: elements that came out wrong.
        stack: library and version.
    """

    where: str
    op: str
    nbytes: float
    time: str
    algbw: str = ""
    busbw: str = ""
    unit_s: float = 1e-6
    ranks: int = 0
    nodes: int = 0
    reduction: str = ""
    root: int = -1
    wrong: float = 0.0
    stack: str = ""


def op_name(text: str) -> str:
    """Our name of an operation in any spelling, or an empty string.

    >>> op_name("AllReduce"), op_name("./build/alltoall_perf"), op_name("hypercube_perf")
    ('all_reduce', 'all_to_all', '')
    """
    word = text.strip().rsplit("/", 1)[-1].lower()
    for part in ("_perf", "_test", "_", "-", " "):
        word = word.replace(part, "")
    return _OPS.get(word, "")


def op_of_program(path: str) -> str:
    """Our name of the operation of the program after which a file is called, or an empty string.

    >>> op_of_program("logs/h100-alltoall_perf_8.log"), op_of_program("reduce_perf"), op_of_program("reduce.log")
    ('all_to_all', 'reduce', '')
    """
    name = path.replace("\\", "/").rsplit("/", 1)[-1].lower()
    found = re.search(r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|reduce|send_?recv)_perf", name)
    return op_name(found.group(1)) if found else ""


def bus_factor(op: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, from nccl-tests' doc/PERFORMANCE.md.

    >>> bus_factor("all_reduce", 8), bus_factor("all_gather", 8), bus_factor("broadcast", 8)
    (1.75, 0.875, 1.0)
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if op in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def samples_from_rows(rows: Iterable[Row], source: str) -> tuple[CollectiveSample, ...]:
    """Samples of all rows with bytes to move, each checked against its own bandwidth columns.

    Operations that no cost model knows (gather, scatter, hypercube, ...) are left out with a warning, and so is nothing
    else: results that came out wrong and cliffs are warned about, and kept.

    Raises:
        MeasurementError: naming file and line, if operation or ranks are unknown, a number is none, or time, bytes and
            bandwidth contradict each other.
    """
    samples, unknown = [], dict[str, str]()
    for row in rows:
        if not row.nbytes:
            continue  # sizes below one element per rank are printed as 0 bytes
        op = op_name(row.op) if row.op else _op_by_columns(row)
        if not op:
            unknown.setdefault(row.op, row.where)
            continue
        samples.append(_sample(row, op, source))
    for name, where in unknown.items():
        warn(f"{where}: operation '{name}' is not one of {', '.join(KNOWN_OPS)}; its rows are left out")
    for sample, reason in cliffs(samples):
        warn(
            f"{source}: {sample.op} of {sample.nbytes:.0f} bytes on {sample.ranks} ranks takes "
            f"{sample.time_s * 1e6:.6g} µs, {reason}; measure it again before fitting through it"
        )
    return tuple(samples)


def cliffs(samples: Sequence[CollectiveSample]) -> tuple[tuple[CollectiveSample, str], ...]:
    """Samples that stick out of their curve, each with the reason.

    A time sticks out if it grows more than twice as fast as the bytes since the next smaller size, or if it is more
    than 1.3 times the time of the next larger size (time is monotone in bytes).
    """
    found = []
    curves: dict[tuple[str, int, int, str], list[CollectiveSample]] = {}
    for sample in sorted(samples, key=lambda s: s.nbytes):
        curves.setdefault((sample.op, sample.ranks, sample.nodes, sample.stack), []).append(sample)
    for curve in curves.values():
        for small, large in pairwise(curve):
            times, sizes = large.time_s / small.time_s, large.nbytes / small.nbytes
            if sizes > 1 and times > _CLIFF * sizes:
                found.append(
                    (large, f"{times:.3g} times the time of the next smaller size for {sizes:.3g} times the bytes")
                )
            elif sizes > 1 and times < 1 / _ABOVE_ENVELOPE:
                found.append((small, f"{1 / times:.3g} times the time of the next larger size"))
    return tuple(found)


def _sample(row: Row, op: str, source: str) -> CollectiveSample:
    if row.ranks < 1:
        raise MeasurementError(
            f"{row.where}: the file does not say how many ranks ran; keep its 'Using devices' lines, or pass ranks=…"
        )
    nodes = row.nodes or 1
    time_s = _number(row.time, row.where, "time") * row.unit_s
    if time_s <= 0:
        raise MeasurementError(f"{row.where}: time '{row.time}' is not positive; remove the row or measure it again")
    _check_bandwidth(row, op, time_s)
    if row.wrong > 0:
        warn(f"{row.where}: {row.wrong:.0f} elements of the result were wrong; the time may be that of a broken run")
    return CollectiveSample(op, row.nbytes, row.ranks, nodes, time_s, source, row.stack)


def _check_bandwidth(row: Row, op: str, time_s: float) -> None:
    """Units are wrong by a factor of 1,000 or 8, if they are; the printed columns are exact to their last digit."""
    if not row.algbw or row.algbw.upper() == "N/A":
        return
    stated = _number(row.algbw, row.where, "algbw")
    computed = row.nbytes / time_s / 1e9
    slack = _half_digit(row.algbw) + computed * (_half_digit(row.time) / float(row.time) + 0.01)
    # old releases left the rank's own share out of an all-gather's or reduce-scatter's bandwidth
    older = op in ("all_gather", "reduce_scatter") and abs(stated - computed * bus_factor(op, row.ranks)) <= slack
    if abs(stated - computed) > slack and not older:
        raise MeasurementError(
            f"{row.where}: {row.nbytes:.0f} bytes in {time_s * 1e6:.6g} µs are {computed:.4g} GB/s, but the row says "
            f"{row.algbw}; check that sizes are bytes and times µs"
        )
    # small bandwidths are printed with too few digits to divide
    if row.busbw and row.busbw.upper() != "N/A" and stated > 100 * _half_digit(row.algbw) and not older:
        ratio, expected = _number(row.busbw, row.where, "busbw") / stated, bus_factor(op, row.ranks)
        if abs(ratio - expected) > 0.03 * max(expected, 0.1) + _half_digit(row.busbw) / stated:
            raise MeasurementError(
                f"{row.where}: busbw/algbw is {ratio:.3g}, but {op} on {row.ranks} ranks has {expected:.3g}; "
                f"check operation and number of ranks"
            )


def _op_by_columns(row: Row) -> str:
    """All-reduce or reduce-scatter, which the reduction and the ratio of bandwidths tell apart."""
    if row.reduction not in ("", "none") and row.root < 0 and row.ranks > 1 and row.busbw:
        ratio = _number(row.busbw, row.where, "busbw") / max(_number(row.algbw, row.where, "algbw"), 1e-12)
        factors = {op: bus_factor(op, row.ranks) for op in ("all_reduce", "reduce_scatter")}
        op = min(factors, key=lambda name: abs(factors[name] - ratio))
        if abs(ratio / factors[op] - 1) < 0.1:
            return op
    raise MeasurementError(
        f"{row.where}: the file does not name its operation; pass --op (in Python usual_op=), one of "
        f"{', '.join(KNOWN_OPS)}, or call the file after its program, such as all_reduce_perf.log"
    )


def _half_digit(text: str) -> float:
    """Half a unit of the last digit that a number is printed with."""
    mantissa, _, exponent = text.lower().partition("e")
    decimals = len(mantissa.partition(".")[2])
    return 0.5 * 10.0 ** (int(exponent or 0) - decimals)


def _number(text: str, where: str, column: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < float("inf"):
        raise MeasurementError(f"{where}: column {column} holds '{text}', which is no number; mend or remove the row")
    return value
