"""Recorded measurements: tables as CSV files, and whatever else can be read.

| header of a CSV | what it is |
|---|---|
| ``m,n,k,bf16_vllm_us,fp8_vllm_us,...`` | products; a column for each dtype and stack |
| ``b,s,h,kv,d,vllm_us,...`` | causal attention of s queries; with ``decode`` in the file's name, of one query |
| ``system,nccl_version,op,ranks,bytes,time_us`` | collectives on one node |
| ``system,...,nodes,gpus,op,bytes,config,time_us`` | collectives on several nodes |
| ``ranks,op,bytes,round,med_us`` | rounds of gloo; of each size the lowest round counts |

Our own JSON lines are :mod:`calibrate.lines`.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

from calibrate.errors import MeasurementError
from calibrate.importers.source import read_text
from calibrate.lines import FORMAT, positive, read_lines, whole
from calibrate.rounds import settle
from calibrate.samples import CollectiveSample, KernelSample, Measurements
from simpar.model.work import Attention, DType, Gemm
from simpar.units import US

_OPS = {"alltoall": "all_to_all", "sendrecv_pp": "sendrecv"}
_TABLES = "m,n,k,<dtype>_<stack>_us; b,s,h,kv,d,<stack>_us; op,ranks,bytes,time_us; or nodes,gpus,op,bytes,time_us"

Row = tuple[str, Mapping[str, str]]
"""A line of a table: where it is (``file:line``), and its cells by column."""


def read_any(path: str | Path, *, systems: Sequence[str] = (), op: str | None = None) -> Measurements:
    """Reads tables and JSON lines as :func:`read_measurements`, and all that :mod:`calibrate.importers` knows.

    JSON lines may hold rounds; of each item their median counts (:func:`calibrate.rounds.settle`).

    Args:
        path: the file.
        systems: as for :func:`read_measurements`.
        op: operation of a log of nccl-tests that does not name it.

    Raises:
        MeasurementError: the file is of no known kind, or malformed; the message names file and line.
    """
    from calibrate import importers  # noqa: PLC0415 - only files of others need them

    path = Path(path)
    if path.suffix != ".parquet":
        text = read_text(path)
        first = text.partition("\n")[0]
        if f'"format": "{FORMAT}"' in first:
            return settle(read_measurements(path))
        if _kind([cell.strip() for cell in first.split(",")]):
            return read_measurements(path, systems=systems)
    try:
        return importers.read(path, op=op)
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
        return read_lines(text, path.name)
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
        interference=tuple(sample for part in parts for sample in part.interference),
        updates=tuple(sample for part in parts for sample in part.updates),
        datasheet=next((part.datasheet for part in reversed(parts) if part.datasheet), {}),
        kernel_spread=max((part.kernel_spread for part in parts), default=0.0),
        collective_spread=max((part.collective_spread for part in parts), default=0.0),
        provenance={key: value for part in parts for key, value in part.provenance.items()},
    )


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
        nbytes = positive(row["bytes"], "bytes", where)
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
    return positive(row[column], column, where) * US


def _integer(row: Mapping[str, str], column: str, where: str) -> int:
    return whole(positive(row[column], column, where), column, where)
