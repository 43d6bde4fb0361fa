"""Measurements as JSON lines, our own format: written whole or not at all, and read with file and line in each error.

A file begins with ``{"format": "simpar measurements", "schema_version": 1, "provenance": {...}}``. Then each line has
one measurement: ``{"kernel": "gemm", "m": 64, ...}``, ``{"collective": "all_reduce", ...}``, ``{"launch_s": 6e-6}``,
``{"interference": {...}}`` (rates of compute and collectives beside each other) or ``{"update": {...}}`` (a step of an
optimizer); several of the same item are rounds (:mod:`calibrate.rounds`). ``{"datasheet": {...}}`` says what the device
has instead of the rates of the catalog's device ``name``, and ``{"spread": {...}}`` how much rounds differed where only
their medians are kept.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_args

from calibrate import datasheet
from calibrate.errors import MeasurementError
from calibrate.samples import CollectiveSample, InterferenceSample, KernelSample, Measurements, UpdateSample
from simpar.model.work import Attention, DType, Gemm, GroupedGemm, Kernel, MemoryBound

FORMAT = "simpar measurements"
SCHEMA_VERSION = 1

_KERNELS: dict[str, type[Kernel]] = {
    "gemm": Gemm, "grouped_gemm": GroupedGemm, "attention": Attention, "memory_bound": MemoryBound,
}  # fmt: skip
_KERNEL_NAMES = {kind: name for name, kind in _KERNELS.items()}

Sample = KernelSample | CollectiveSample | InterferenceSample | UpdateSample | float

_LINES = "kernel, collective, launch_s, interference, update, datasheet or spread"


def write_measurements(path: str | Path, measurements: Measurements) -> None:
    """Writes JSON lines, complete or not at all.

    Raises:
        MeasurementError: the file cannot be written there.
    """
    target = Path(path)
    try:
        handle, draft = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in _lines(measurements))
            Path(draft).chmod(0o644)  # mkstemp lets only the owner read
            Path(draft).replace(target)
        finally:
            Path(draft).unlink(missing_ok=True)
    except OSError as error:
        raise MeasurementError(f"cannot write '{path}': {error.strerror}; choose another place") from None


def _lines(measurements: Measurements) -> Iterator[dict[str, Any]]:
    yield {"format": FORMAT, "schema_version": SCHEMA_VERSION, "provenance": measurements.provenance}
    if measurements.datasheet:
        yield {"datasheet": measurements.datasheet}
    spreads = {"kernels": measurements.kernel_spread, "collectives": measurements.collective_spread}
    if any(spreads.values()):
        yield {"spread": {name: value for name, value in spreads.items() if value}}
    for part in ("kernels", "collectives", "launch_s", "interference", "updates"):
        yield from map(line_of, getattr(measurements, part))


def line_of(sample: Sample) -> dict[str, Any]:
    """What a measurement is as a line; a number is the host's seconds for a launch."""
    match sample:
        case KernelSample(kernel):
            # the shape's "kernel" is an attention kernel's generation, so the sample's kind needs the key
            shape = {("generation" if key == "kernel" else key): value for key, value in asdict(kernel).items()}
            rest = {"time_s": sample.time_s, "source": sample.source, "stack": sample.stack}
            return {"kernel": _KERNEL_NAMES[type(kernel)], **shape, **rest}
        case CollectiveSample(op):
            return {"collective": op, **{key: value for key, value in asdict(sample).items() if key != "op"}}
        case InterferenceSample():
            return {"interference": asdict(sample)}
        case UpdateSample():
            return {"update": asdict(sample)}
        case float():
            return {"launch_s": sample}


def read_lines(text: str, name: str) -> Measurements:
    """The measurements in a file's text, each round of them; ``name`` is the file's in messages.

    Raises:
        MeasurementError: a line is malformed.
    """
    parts: dict[str, list[Any]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise MeasurementError(f"{where}: is not JSON ({error.msg}); write one object a line") from None
        part, value = ("provenance", _provenance(data, where)) if number == 1 else _read_line(data, where)
        parts.setdefault(part, []).append(value)
    single = ("provenance", "datasheet", "spread")
    provenance, sheet, spreads = (parts.pop(part, [{}])[-1] for part in single)
    return Measurements(
        **{part: tuple(values) for part, values in parts.items()},
        datasheet=sheet,
        kernel_spread=spreads.get("kernels", 0.0),
        collective_spread=spreads.get("collectives", 0.0),
        provenance=provenance,
    )


def _read_line(data: Any, where: str) -> tuple[str, Any]:
    """Which part of the measurements a line belongs to, and its value."""
    if not isinstance(data, dict):
        raise MeasurementError(f"{where}: is no object; write one measurement a line")
    if "kernel" in data:
        return "kernels", _kernel_sample(data, where)
    if "collective" in data:
        data["op"] = data.pop("collective")
        return "collectives", _build(CollectiveSample, data, where)
    if set(data) == {"launch_s"}:
        return "launch_s", positive(data["launch_s"], "launch_s", where)
    (kind, inner), *more = list(data.items()) or [("", None)]
    if more or not isinstance(inner, dict) or kind not in _INNER:
        raise MeasurementError(f"{where}: is no measurement; give one of {_LINES}")
    part, read = _INNER[kind]
    return part, read(inner, where)


def _rates(data: dict[str, Any], where: str) -> InterferenceSample:
    found: InterferenceSample = _build(InterferenceSample, data, where)
    for name, rate in (("compute_rate", found.compute_rate), ("collective_rate", found.collective_rate)):
        if rate > 1:
            raise MeasurementError(f"{where}: {name} {rate:g} is a share of the speed alone; give one of at most 1")
    return found


def _datasheet(data: dict[str, Any], where: str) -> dict[str, Any]:
    known = ("name", *datasheet.FIELDS, "sources")
    for key in data:
        if key not in known:
            raise MeasurementError(f"{where}: datasheet has an unknown field '{key}'; use {', '.join(known)}")
    if not isinstance(data.get("name"), str):
        raise MeasurementError(f"{where}: datasheet names no device; give the catalog's as name")
    return data


def _update(data: dict[str, Any], where: str) -> UpdateSample:
    found: UpdateSample = _build(UpdateSample, data, where)
    return found


def _spread(data: dict[str, Any], where: str) -> dict[str, float]:
    return {name: positive(value, name, where) for name, value in data.items()}


_INNER: dict[str, tuple[str, Callable[[dict[str, Any], str], Any]]] = {
    "interference": ("interference", _rates),
    "update": ("updates", _update),
    "datasheet": ("datasheet", _datasheet),
    "spread": ("spread", _spread),
}


def _provenance(data: Any, where: str) -> dict[str, str]:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise MeasurementError(f'{where}: does not begin with {{"format": "{FORMAT}"}}; give a file that simpar wrote')
    if data.get("schema_version") != SCHEMA_VERSION:
        raise MeasurementError(
            f"{where}: has schema_version {data.get('schema_version')}, but this simpar reads {SCHEMA_VERSION}; "
            f"measure again, or install the simpar that wrote it"
        )
    given = data.get("provenance", {})
    return {str(key): str(value) for key, value in given.items()} if isinstance(given, dict) else {}


def _kernel_sample(data: dict[str, Any], where: str) -> KernelSample:
    kind = data.pop("kernel")
    if kind not in _KERNELS:
        raise MeasurementError(f"{where}: kernel '{kind}' is unknown; use one of {', '.join(_KERNELS)}")
    rest = {key: data.pop(key, default) for key, default in (("time_s", None), ("source", ""), ("stack", ""))}
    if "generation" in data:
        data["kernel"] = data.pop("generation")
    kernel: Kernel = _build(_KERNELS[kind], data, where)
    return KernelSample(kernel, positive(rest["time_s"], "time_s", where), str(rest["source"]), str(rest["stack"]))


def _build(kind: Callable[..., Any], data: dict[str, Any], where: str) -> Any:
    """A sample or shape from a line's fields, whose types follow the dataclass."""
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in data:
        if key not in known:
            raise MeasurementError(f"{where}: unknown field '{key}'; use {', '.join(known)}")
    for key, field in known.items():
        if key not in data:
            if field.default is MISSING and key != "source":
                raise MeasurementError(f"{where}: field '{key}' is missing; give it")
            continue
        if field.type in (int, float) or (key in ("window", "value_dim") and data[key] is not None):
            number = positive(data[key], key, where)
            data[key] = number if field.type is float else whole(number, key, where)
    if "dtype" in data and data["dtype"] not in get_args(DType):
        raise MeasurementError(f"{where}: dtype '{data['dtype']}' is unknown; use one of {', '.join(get_args(DType))}")
    if data.get("over", "m") not in ("m", "k"):
        raise MeasurementError(f"{where}: over '{data['over']}' is no dimension that groups share; use m or k")
    return kind(**{"source": "", **data} if "source" in known else data)


def whole(value: float, column: str, where: str) -> int:
    """The number as an integer, or a MeasurementError that names its place."""
    if value != int(value):
        raise MeasurementError(f"{where}: {column} {value:g} is not a whole number; give one")
    return int(value)


def positive(text: Any, column: str, where: str) -> float:
    """The number in a cell or field, or a MeasurementError that names its place."""
    try:
        value = float(text) if not isinstance(text, bool) else float("nan")
    except (TypeError, ValueError):
        raise MeasurementError(f"{where}: {column} '{text}' is no number; give a positive one") from None
    if not 0 < value < float("inf"):
        raise MeasurementError(f"{where}: {column} {text} is out of range; give a positive number")
    return value
