"""What was measured, on disk at once: one line for each round of each item, so that an interrupted run can go on.

The file is one of :mod:`calibrate.tables`, in which an item occurs once a round.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from calibrate.datasheet import datasheet_of
from calibrate.errors import MeasurementError
from calibrate.lines import FORMAT, SCHEMA_VERSION, Sample, line_of
from calibrate.measure.interference import Rates
from calibrate.measure.plan import CollectiveItem, InterferenceItem, Item, KernelItem, LaunchItem, UpdateItem
from calibrate.rounds import group
from calibrate.samples import (
    CollectiveSample,
    InterferenceSample,
    KernelSample,
    Measurements,
    UpdateSample,
)
from calibrate.tables import read_measurements
from simpar.hardware.device import Device

SAME = ("host", "device", "cpu", "cores", "gpus", "torch", "cuda", "nccl", "driver", "ranks", "nodes", "threads")
"""Facts that two runs must share for their measurements to belong together."""


class Journal:
    """A file to which measurements are appended; use it as a context manager.

    Args:
        path: the file.
        facts: of the machine and the run.
        stack: software that runs the kernels.
        communication: software that runs the collectives.
        base: device whose datasheet the measurements relate to.
        resume: go on with the file, if it is of the same machine and versions; else it is begun anew.

    Raises:
        MeasurementError: the file cannot be written, is of another kind, or was measured elsewhere.
    """

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, str],
        *,
        stack: str = "",
        communication: str = "",
        base: Device | None = None,
        resume: bool = False,
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
                if base is not None:
                    self._write({"datasheet": datasheet_of(base)})
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

    def add(self, item: Item, value: float | Rates) -> None:
        """Appends one round of an item: its seconds, or its rates."""
        self._write(line_of(self._sample(item, value)))

    def _sample(self, item: Item, value: float | Rates) -> Sample:
        name = self.path.name
        match item, value:
            case InterferenceItem(), Rates(compute, collective):
                return InterferenceSample(compute, collective, name)
            case KernelItem(kernel), float(time_s):
                return KernelSample(kernel, time_s, name, self._stack)
            case CollectiveItem(op, nbytes, ranks, nodes), float(time_s):
                return CollectiveSample(op, nbytes, len(ranks), nodes, time_s, name, self._communication)
            case UpdateItem(parameters), float(time_s):
                return UpdateSample("adamw", parameters, time_s, name)
            case LaunchItem(), float(time_s):
                return time_s
        raise AssertionError(f"{item} is not measured as {value}")

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
    collectives = Counter(map(group, measurements.collectives))
    done: dict[Item, int] = {}
    for item in items:
        match item:
            case KernelItem(kernel):
                done[item] = kernels[kernel]
            case CollectiveItem(op, nbytes, ranks, nodes):
                done[item] = collectives[op, nbytes, len(ranks), nodes]
            case LaunchItem():
                done[item] = len(measurements.launch_s)
            case InterferenceItem():
                done[item] = len(measurements.interference)
            case UpdateItem():
                done[item] = len(measurements.updates)
    return done


def _cut_half_line(path: Path) -> None:
    """Drops what a run wrote of a line before it was killed."""
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        path.write_bytes(content[: content.rfind(b"\n") + 1])
