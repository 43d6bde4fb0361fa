"""What was measured, on disk at once: one line for each round of each item, so that an interrupted run can go on.

The file is one of :mod:`calibrate.tables`, in which an item occurs once a round.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TextIO

from calibrate.importers.source import MeasurementError
from calibrate.measure.plan import CollectiveItem, Item, KernelItem, LaunchItem
from calibrate.samples import CollectiveSample, KernelSample, Measurements
from calibrate.tables import FORMAT, SCHEMA_VERSION, read_measurements
from simpar.model.work import Attention, Gemm, MemoryBound
from simpar.units import format_bytes

Statistic = Literal["lowest", "median"]

SAME = ("host", "device", "cpu", "cores", "gpus", "torch", "cuda", "nccl", "driver", "ranks", "nodes", "threads")
"""Facts that two runs must share for their measurements to belong together."""

OUTLIER = 1.5
"""A round that took so many times its item's median is reported."""


class Outliers(NamedTuple):
    """Rounds far above their item's median, of all rounds, and the worst one."""

    slow: int
    rounds: int
    worst: float
    what: str


class Journal:
    """A file to which measurements are appended; use it as a context manager.

    Args:
        path: the file.
        facts: of the machine and the run.
        stack: software that runs the kernels.
        communication: software that runs the collectives.
        resume: go on with the file, if it is of the same machine and versions; else it is begun anew.

    Raises:
        MeasurementError: the file cannot be written, is of another kind, or was measured elsewhere.
    """

    def __init__(
        self, path: Path, facts: Mapping[str, str], *, stack: str = "", communication: str = "", resume: bool = False
    ) -> None:
        self.path = path
        self._stack, self._communication = stack, communication
        self._file: TextIO
        try:
            if resume:
                _cut_half_line(path)
                check_same(path, read_measurements(path).provenance, facts)
                self._file = path.open("a", encoding="utf-8")
            else:
                self._file = path.open("w", encoding="utf-8")
                self._write({"format": FORMAT, "schema_version": SCHEMA_VERSION, "provenance": dict(facts)})
        except OSError as error:
            raise MeasurementError(
                f"cannot write '{path}': {error.strerror}; choose another place with --out"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, item: Item, time_s: float) -> None:
        """Appends one round of an item."""
        match item:
            case KernelItem(kernel):
                # the key "kernel" names the kind, so an attention kernel's own field goes by another name
                shape = {("generation" if key == "kernel" else key): value for key, value in asdict(kernel).items()}
                kind = "gemm" if isinstance(kernel, Gemm) else "attention" if isinstance(kernel, Attention) else ""
                rest = {"time_s": time_s, "source": self.path.name, "stack": self._stack}
                self._write({"kernel": kind or "memory_bound", **shape, **rest})
            case CollectiveItem():
                size = {"nbytes": item.nbytes, "ranks": len(item.ranks), "nodes": item.nodes, "time_s": time_s}
                source = {"source": self.path.name, "stack": self._communication}
                self._write({"collective": item.op, **size, **source})
            case LaunchItem():
                self._write({"launch_s": time_s})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()  # what is measured is kept, however the run ends


def check_same(path: Path, then: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raises MeasurementError if measurements were made on another machine or with other versions."""
    for key in SAME:
        if then.get(key) != now.get(key):
            raise MeasurementError(
                f"{path.name} was measured with {key} {then.get(key, 'none')}, but here it is {now.get(key, 'none')}; "
                "measure anew without --resume, or go on where it began"
            )


def rounds_done(measurements: Measurements, items: Iterable[Item]) -> dict[Item, int]:
    """How many rounds of each item there are."""
    kernels = Counter(sample.kernel for sample in measurements.kernels)
    collectives = Counter(map(_group, measurements.collectives))
    done: dict[Item, int] = {}
    for item in items:
        match item:
            case KernelItem(kernel):
                done[item] = kernels[kernel]
            case CollectiveItem(op, nbytes, ranks, nodes):
                done[item] = collectives[op, nbytes, len(ranks), nodes]
            case LaunchItem():
                done[item] = len(measurements.launch_s)
    return done


def settle(measurements: Measurements, statistic: Statistic) -> Measurements:
    """One sample for each kernel and collective, out of its rounds.

    The lowest round tells what the machine does when nobody disturbs it; the median what it usually does.
    """
    middle = min if statistic == "lowest" else median
    kernels: dict[Any, list[KernelSample]] = {}
    collectives: dict[Any, list[CollectiveSample]] = {}
    for sample in measurements.kernels:
        kernels.setdefault((sample.kernel, sample.stack), []).append(sample)
    for collective in measurements.collectives:
        collectives.setdefault((_group(collective), collective.stack), []).append(collective)
    return replace(
        measurements,
        kernels=tuple(replace(found[0], time_s=middle(s.time_s for s in found)) for found in kernels.values()),
        collectives=tuple(replace(found[0], time_s=middle(s.time_s for s in found)) for found in collectives.values()),
    )


def outliers(measurements: Measurements) -> Outliers:
    """Counts the rounds that took over :data:`OUTLIER` times the median of their item's rounds."""
    rounds: dict[Any, list[float]] = {}
    for sample in measurements.kernels:
        rounds.setdefault(sample.kernel, []).append(sample.time_s)
    for collective in measurements.collectives:
        rounds.setdefault(_group(collective), []).append(collective.time_s)
    factors = [(value / median(found), _named(key)) for key, found in rounds.items() for value in found]
    worst, what = max(factors, default=(1.0, ""))
    return Outliers(sum(factor > OUTLIER for factor, _ in factors), len(factors), worst, what)


def _named(key: Any) -> str:
    match key:
        case Gemm():
            return f"{key.dtype} product {key.m}×{key.n}×{key.k}"
        case Attention():
            way = "backward" if key.backward else "forward"
            return f"attention {way}, {key.batch} × {key.heads} heads × {key.seq_q} × {key.head_dim}"
        case MemoryBound():
            return f"{key.memory_class} kernel over {format_bytes(key.nbytes)}"
    op, nbytes, ranks, _ = key
    return f"{op} of {format_bytes(nbytes)} over {ranks} ranks"


def _group(sample: CollectiveSample) -> tuple[str, float, int, int]:
    return (sample.op, sample.nbytes, sample.ranks, sample.nodes)


def _cut_half_line(path: Path) -> None:
    """Drops what a run wrote of a line before it was killed."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
