"""Recorded measurements: tables as CSV files, and our own JSON lines, which also write.

| header of a CSV | what it is |
|---|---|
| ``m,n,k,bf16_vllm_us,fp8_vllm_us,...`` | products; a column for each dtype and stack |
| ``b,s,h,kv,d,vllm_us,...`` | causal attention of s queries; with ``decode`` in the file's name, of one query |
| ``system,nccl_version,op,ranks,bytes,time_us`` | collectives on one node |
| ``system,...,nodes,gpus,op,bytes,config,time_us`` | collectives on several nodes |
| ``ranks,op,bytes,round,med_us`` | rounds of gloo; of each size the lowest round counts |

JSON lines begin with ``{"format": "simpar measurements", "schema_version": 1, "provenance": {...}}``; then each line
has one measurement: ``{"kernel": "gemm", "m": 64, ...}``, ``{"collective": "all_reduce", ...}`` or
``{"launch_s": 6e-6}``.
"""

import csv
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_args

from calibrate.importers.source import MeasurementError, read_text
from calibrate.samples import CollectiveSample, KernelSample, Measurements
from simpar.model.work import Attention, DType, Gemm, Kernel, MemoryBound
from simpar.units import US

FORMAT = "simpar measurements"
SCHEMA_VERSION = 1

_KERNELS: dict[str, type[Gemm] | type[Attention] | type[MemoryBound]] = {
    "gemm": Gemm, "attention": Attention, "memory_bound": MemoryBound,
}  # fmt: skip
_OPS = {"alltoall": "all_to_all", "sendrecv_pp": "sendrecv"}
_TABLES = "m,n,k,<dtype>_<stack>_us; b,s,h,kv,d,<stack>_us; op,ranks,bytes,time_us; or nodes,gpus,op,bytes,time_us"

Row = tuple[str, Mapping[str, str]]
"""A line of a table: where it is (``file:line``), and its cells by column."""


def read_any(path: str | Path, *, systems: Sequence[str] = ()) -> Measurements:
    """Reads tables and JSON lines as :func:`read_measurements`, and all that :mod:`calibrate.importers` knows.

    Args:
        path: the file.
        systems: as for :func:`read_measurements`.

    Raises:
        MeasurementError: the file is of no known kind, or malformed; the message names file and line.
    """
    from calibrate import importers  # noqa: PLC0415 - only files of others need them

    path = Path(path)
    if path.suffix != ".parquet":
        text = read_text(path)
        header = [cell.strip() for cell in text.partition("\n")[0].split(",")]
        if _kind(header) or f'"format": "{FORMAT}"' in text.partition("\n")[0]:
            return read_measurements(path, systems=systems)
    try:
        return importers.read(path)
    except MeasurementError as error:
        if "is no measurement that can be imported" not in str(error):
            raise
        raise MeasurementError(f"{error}, or a CSV with columns {_TABLES}") from None


def read_measurements(path: str | Path, *, systems: Sequence[str] = ()) -> Measurements:
    """Reads a file of measurements; the kind is recognised by its first line.

    Args:
        path: the file.
        systems: of a table with several systems, the one that is wanted, by any of its names.

    Raises:
        MeasurementError: the file cannot be read, is of no known kind, or a line is malformed; the message names file
            and line.
    """
    path = Path(path)
    text = read_text(path)
    if text.lstrip().startswith("{"):
        return _read_lines(text, path.name)
    reader = csv.reader(text.splitlines())
    header = [cell.strip() for cell in next(reader, [])]
    rows = _rows(reader, header, path.name)
    match _kind(header):
        case "gemm":
            return Measurements(kernels=tuple(_gemms(rows, header, path.name)))
        case "attention":
            return Measurements(kernels=tuple(_attention(rows, header, path.name)))
        case "collectives":
            return Measurements(collectives=tuple(_collectives(rows, header, path.name, systems)))
    raise MeasurementError(
        f"{path.name}:1: columns {','.join(header)[:80] or 'none'} are of no known table; have {_TABLES}"
    )


def _kind(header: Sequence[str]) -> str:
    """What a table with these columns holds, or an empty string."""
    has = set(header).issuperset
    # A table of other origin may have such columns too; its times are not ours if none is in µs.
    if not any(column.endswith("_us") for column in header) and not has(("op", "bytes")) and len(header) > 3:
        return ""
    if has(("m", "n", "k")):
        return "gemm"
    if has(("b", "s", "h", "kv", "d")):
        return "attention"
    return "collectives" if has(("op", "bytes")) and (has(("ranks",)) or has(("gpus", "nodes"))) else ""


def merge(parts: Iterable[Measurements]) -> Measurements:
    """All measurements together; of equal facts in their provenance, the last one counts."""
    parts = list(parts)
    return Measurements(
        kernels=tuple(sample for part in parts for sample in part.kernels),
        collectives=tuple(sample for part in parts for sample in part.collectives),
        launch_s=tuple(value for part in parts for value in part.launch_s),
        provenance={key: value for part in parts for key, value in part.provenance.items()},
    )


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
    names = {kind: name for name, kind in _KERNELS.items()}
    for sample in measurements.kernels:
        # the shape's "kernel" is an attention kernel's generation, so the sample's kind needs the key
        shape = {("generation" if key == "kernel" else key): value for key, value in asdict(sample.kernel).items()}
        rest = {"time_s": sample.time_s, "source": sample.source, "stack": sample.stack}
        yield {"kernel": names[type(sample.kernel)], **shape, **rest}
    for collective in measurements.collectives:
        line = asdict(collective)
        yield {"collective": line.pop("op"), **line}
    for launch_s in measurements.launch_s:
        yield {"launch_s": launch_s}


def _read_lines(text: str, name: str) -> Measurements:
    kernels: list[KernelSample] = []
    collectives: list[CollectiveSample] = []
    launches: list[float] = []
    provenance: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{name}:{number}"
        if not line.strip():
            continue
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise MeasurementError(f"{where}: is not JSON ({error.msg}); write one object a line") from None
        if number == 1:
            provenance = _provenance(data, where)
        elif not isinstance(data, dict):
            raise MeasurementError(f"{where}: is no object; write one measurement a line")
        elif "kernel" in data:
            kernels.append(_kernel_sample(data, where))
        elif "collective" in data:
            data["op"] = data.pop("collective")
            collectives.append(_build(CollectiveSample, data, where))
        elif set(data) == {"launch_s"}:
            launches.append(_positive(data["launch_s"], "launch_s", where))
        else:
            raise MeasurementError(f"{where}: has neither kernel, collective nor launch_s; give one of them")
    return Measurements(
        kernels=tuple(kernels), collectives=tuple(collectives), launch_s=tuple(launches), provenance=provenance
    )


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
    return KernelSample(kernel, _positive(rest["time_s"], "time_s", where), str(rest["source"]), str(rest["stack"]))


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
        if field.type in (int, float) or (key == "window" and data[key] is not None):
            number = _positive(data[key], key, where)
            data[key] = number if field.type is float else _whole(number, key, where)
    if "dtype" in data and data["dtype"] not in get_args(DType):
        raise MeasurementError(f"{where}: dtype '{data['dtype']}' is unknown; use one of {', '.join(get_args(DType))}")
    return kind(**{"source": "", **data} if "source" in known else data)


def _rows(reader: Iterator[list[str]], header: list[str], name: str) -> Iterator[Row]:
    for number, cells in enumerate(reader, 2):
        if not cells:
            continue
        where = f"{name}:{number}"
        if len(cells) != len(header):
            cells_of = f"{len(cells)} cells, the header {len(header)}"
            raise MeasurementError(f"{where}: has {cells_of}; give every column a cell")
        yield where, dict(zip(header, cells, strict=True))


def _gemms(rows: Iterator[Row], header: list[str], name: str) -> Iterator[KernelSample]:
    columns: dict[str, tuple[DType, str]] = {}
    for column in _time_columns(header, name):
        text, _, stack = column.removesuffix("_us").partition("_")
        dtype: DType | None = next((dtype for dtype in get_args(DType) if dtype == text), None)
        if dtype is None:
            raise MeasurementError(
                f"{name}:1: column '{column}' begins with no dtype; name it <dtype>_<stack>_us, such as bf16_vllm_us"
            )
        columns[column] = (dtype, stack)
    for where, row in rows:
        m, n, k = (_integer(row, column, where) for column in ("m", "n", "k"))
        shapes = {dtype: Gemm(m, n, k, dtype) for dtype, _ in columns.values()}
        for column, (dtype, stack) in columns.items():
            if row[column].strip():
                yield KernelSample(shapes[dtype], _time(row, column, where), name, stack)


def _attention(rows: Iterator[Row], header: list[str], name: str) -> Iterator[KernelSample]:
    columns = {column: column.removesuffix("_us").strip("_") for column in _time_columns(header, name)}
    decode = "decode" in name.lower()
    for where, row in rows:
        b, s, h, kv, d = (_integer(row, column, where) for column in ("b", "s", "h", "kv", "d"))
        kernel = Attention(b, 1 if decode else s, s, h, kv, d, causal=not decode)
        for column, stack in columns.items():
            if row[column].strip():
                yield KernelSample(kernel, _time(row, column, where), name, stack)


def _collectives(
    rows: Iterator[Row], header: list[str], name: str, systems: Sequence[str]
) -> Iterator[CollectiveSample]:
    time_column = next((column for column in ("time_us", "med_us") if column in header), None)
    if time_column is None:
        raise MeasurementError(f"{name}:1: has no time; name its column time_us (or med_us for rounds)")
    ranks_column = "ranks" if "ranks" in header else "gpus"
    samples: dict[tuple[str, float, int, int, str], CollectiveSample] = {}
    seen: dict[str, None] = {}
    for where, row in rows:
        system = row.get("system", "")
        seen[system] = None
        op = _OPS.get(row["op"], row["op"])
        ranks, nodes = _integer(row, ranks_column, where), _integer(row, "nodes", where) if "nodes" in row else 1
        if not nodes <= ranks:
            raise MeasurementError(f"{where}: {ranks} ranks cannot be on {nodes} nodes; give at least one a node")
        nbytes = _positive(row["bytes"], "bytes", where)
        time_s = _time(row, time_column, where)
        if systems and system and not _same(system, systems):
            continue
        stack = f"nccl/{row['nccl_version']}" if "nccl_version" in row else row.get("config", "")
        stack = "gloo" if time_column == "med_us" else stack
        sample = CollectiveSample(op, nbytes, ranks, nodes, time_s, name, stack)
        key = (op, nbytes, ranks, nodes, f"{system}/{stack}")
        # Rounds of the same point differ by what else the machine did meanwhile; the quietest one counts.
        if key not in samples or sample.time_s < samples[key].time_s:
            samples[key] = sample
    chosen = [system for system in seen if _same(system, systems)]
    if "system" in header and len(seen) > 1 and len(chosen) != 1:
        known = ", ".join(f"'{system}'" for system in seen)
        raise MeasurementError(f"{name}: holds {len(seen)} systems; say which one, of {known}")
    yield from samples.values()


def _same(system: str, wanted: Sequence[str]) -> bool:
    plain = system.replace("_", "-").lower()
    return any(plain == name.replace("_", "-").lower() for name in wanted)


def _time_columns(header: list[str], name: str) -> list[str]:
    columns = [column for column in header if column.endswith("_us")]
    if not columns:
        raise MeasurementError(f"{name}:1: has no column of times; name each <stack>_us, in µs")
    return columns


def _time(row: Mapping[str, str], column: str, where: str) -> float:
    return _positive(row[column], column, where) * US


def _integer(row: Mapping[str, str], column: str, where: str) -> int:
    return _whole(_positive(row[column], column, where), column, where)


def _whole(value: float, column: str, where: str) -> int:
    if value != int(value):
        raise MeasurementError(f"{where}: {column} {value:g} is not a whole number; give one")
    return int(value)


def _positive(text: Any, column: str, where: str) -> float:
    try:
        value = float(text) if not isinstance(text, bool) else float("nan")
    except (TypeError, ValueError):
        raise MeasurementError(f"{where}: {column} '{text}' is no number; give a positive one") from None
    if not 0 < value < float("inf"):
        raise MeasurementError(f"{where}: {column} {text} is out of range; give a positive number")
    return value
