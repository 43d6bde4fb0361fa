"""Output of nccl-tests and rccl-tests of any age, as text, CSV or JSON, turned into collective samples.

What the programs print is described by their own sources (``src/common.cu`` and ``src/util.cu`` of NVIDIA/nccl-tests,
``Reporter`` in ``src/common.cu`` of ROCm/rccl-tests). Sizes are bytes; times are µs, except in the oldest format, whose
first column is called ``bytes`` and whose times are milliseconds.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from calibrate.errors import MeasurementError
from calibrate.importers.nccl_log import LogReader
from calibrate.importers.nccl_rows import KNOWN_OPS, Row, op_name, op_of_program, samples_from_rows
from calibrate.importers.source import read_text
from calibrate.samples import Measurements
from simpar.errors import nearest

# Normalised column names of CSV tables, by what they hold; the first that is present counts.
_CSV_COLUMNS = {
    "nbytes": ("size", "sizebytes", "sizeb", "bytes", "nbytes", "messagesizebytes"),
    "op": ("collective", "collectivename", "operation", "op", "name"),
    "ranks": ("ranks", "ngpus", "numgpus", "gpus", "nranks"),
    "nodes": ("nodes", "nnodes", "numnodes"),
    "per_node": ("rankspernode",),
    "per_rank": ("gpusperrank",),
    "in_place": ("inplace",),
    "reduction": ("redop",),
    "wrong": ("wrong",),
}
_CSV_TIMES = {
    False: ("time", "timeus", "ooptime", "timeusoop", "ooptimeus", "outofplacetime", "outofplacetimeus"),
    True: ("iptime", "timeusip", "iptimeus", "inplacetime", "inplacetimeus"),
}
_CSV_BANDWIDTHS = {
    False: ("{}", "{}gbs", "oop{}", "{}oop", "outofplace{}"),
    True: ("ip{}", "{}ip", "inplace{}"),
}


def read_nccl_tests(
    path: str | Path,
    *,
    op: str | None = None,
    usual_op: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    in_place: bool = False,
) -> Measurements:
    """Collective samples of one file of nccl-tests or rccl-tests.

    Args:
        path: text (a log with anything around it, prefixes of ``mpirun --tag-output`` or ``srun --label`` included),
            CSV or JSON; gzipped or not.
        op: operation of all rows, whatever the file says.
        usual_op: operation of rows that name none; left open, that of a file called after its program, such as
            ``all_reduce_perf.log``, or what the bandwidths tell.
        ranks: members of the group, where the file does not list its devices.
        nodes: hosts, likewise; 1 if nobody says.
        in_place: take the in-place half of each row instead of the out-of-place half.

    Raises:
        MeasurementError: naming file and line, if there is nothing to read, a row is malformed, or numbers contradict
            each other.
    """
    return parse_nccl_tests(
        read_text(path), str(path), op=op, usual_op=usual_op, ranks=ranks, nodes=nodes, in_place=in_place
    )


def parse_nccl_tests(
    text: str,
    source: str = "text",
    *,
    op: str | None = None,
    usual_op: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    in_place: bool = False,
) -> Measurements:
    """As :func:`read_nccl_tests`, from the text itself; ``source`` names it in messages and samples."""
    for given in (op, usual_op):
        if given is not None and not op_name(given):
            raise MeasurementError(
                f"unknown operation '{given}'{nearest(given, KNOWN_OPS)}; use one of {', '.join(KNOWN_OPS)}"
            )
    provenance: dict[str, str] = {}
    start = text.lstrip()[:1]
    if start in ("{", "[") and not re.match(r"\s*\[[^\s\[\]{}\"]*\d\]", text):  # "[0]" is a tag of mpirun, not a list
        rows = list(_json_rows(text, source, in_place, provenance))
    elif is_csv(text):
        rows = list(_csv_rows(text, source, in_place))
    else:
        reader = LogReader(source, in_place)
        rows = reader.read(text)
        provenance = reader.provenance
    changes: dict[str, Any] = {"op": op, "ranks": ranks, "nodes": nodes}
    changes = {key: value for key, value in changes.items() if value is not None}
    unnamed = usual_op or op_of_program(source)
    rows = [replace(row, **{"op": row.op or unnamed, **changes}) for row in rows]
    if not rows:
        half = "in-place" if in_place else "out-of-place"
        raise MeasurementError(f"{source}: no row with {half} results; pass the output of a finished run")
    return Measurements(
        collectives=samples_from_rows(rows, source),
        provenance={
            "format": "nccl-tests",
            "file": source,
            "half": "in_place" if in_place else "out_of_place",
            **provenance,
        },
    )


def is_csv(text: str) -> bool:
    """Whether the first line that holds anything is the header of a table with a size column."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    names = [_plain(name) for name in first.split(",")]
    return len(names) > 2 and any(name in _CSV_COLUMNS["nbytes"] for name in names)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _csv_rows(text: str, source: str, in_place: bool) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text), skipinitialspace=True)
    header: list[str] = []
    for cells in reader:
        where = f"{source}:{reader.line_num}"
        if not any(cells):
            continue
        if not header:
            header = [_plain(name) for name in cells]
            column = _csv_layout(header, where, in_place)
            continue
        if len(cells) != len(header):
            raise MeasurementError(
                f"{where}: {len(cells)} cells, but the header has {len(header)}; complete the row or remove it"
            )
        found = {name: cells[index].strip() for name, index in column.items()}
        # rccl-tests writes both halves as rows of their own; other tables as columns
        if "in_place" in found and _flag(found.pop("in_place")) != in_place:
            continue
        # rccl-tests counts processes as ranks, each of which may drive several GPUs
        ranks = _integer(found.get("ranks", "0"), where, "ranks")
        nodes = _integer(found.get("nodes", "0"), where, "nodes")
        if "per_node" in found and not nodes:
            nodes = max(ranks // max(_integer(found["per_node"], where, "ranksPerNode"), 1), 1)
        ranks *= max(_integer(found.get("per_rank", "1"), where, "gpusPerRank"), 1)
        yield Row(
            where=where,
            op=found.get("op", ""),
            nbytes=_float(found["nbytes"], where, "size"),
            time=found["time"],
            algbw=found.get("algbw", ""),
            busbw=found.get("busbw", ""),
            ranks=ranks,
            nodes=nodes,
            reduction=found.get("reduction", ""),
            wrong=_wrong(found.get("wrong", "")),
        )


def _csv_layout(header: list[str], where: str, in_place: bool) -> dict[str, int]:
    """Where each column of a row lies."""
    both = "inplace" in header
    times = _CSV_TIMES[False] if both else _CSV_TIMES[in_place]
    wanted: dict[str, tuple[str, ...]] = {**_CSV_COLUMNS, "time": times}
    for kind in ("algbw", "busbw"):
        wanted[kind] = tuple(form.format(kind) for form in _CSV_BANDWIDTHS[in_place and not both])
    column = {}
    for name, spellings in wanted.items():
        index = next((header.index(s) for s in spellings if s in header), None)
        if index is not None:
            column[name] = index
    for name in ("nbytes", "time"):
        if name not in column:
            raise MeasurementError(
                f"{where}: no column for {'sizes' if name == 'nbytes' else 'times'} among {', '.join(header)}; "
                f"name it one of {', '.join(wanted[name])}"
            )
    return column


def _json_rows(text: str, source: str, in_place: bool, provenance: dict[str, str]) -> Iterator[Row]:
    document = load_json(text, source)
    if isinstance(document, list):
        yield from _rccl_json(document, source, in_place)
        return
    results = document.get("results")
    if not isinstance(results, list):
        raise MeasurementError(f"{source}: no list 'results'; pass the JSON file that nccl-tests wrote")
    ranks, nodes, device = _json_devices(document)
    version = document.get("nccl_version")
    stack = f"nccl/{_nccl_version(version)}" if isinstance(version, int) and version > 0 else ""
    program = str((document.get("args") or [""])[0])
    provenance.update(
        {k: v for k, v in {"device": device, "stack": stack, "date": document.get("start_time", "")}.items() if v}
    )
    for index, result in enumerate(results):
        where = f"{source}: results[{index}]"
        half = result.get("in_place" if in_place else "out_of_place") if isinstance(result, dict) else None
        if half is None and isinstance(result, dict) and "size" in result:
            continue  # runs that measure one half write null for the other
        if not isinstance(half, dict) or "size" not in result or not {"time", "cpu_time"} & set(half):
            raise MeasurementError(f"{where} has no size or no time; pass the JSON file that nccl-tests wrote")
        yield Row(
            where=where,
            op=_json_op(result, program, document),
            nbytes=_float(result["size"], where, "size"),
            time=str(half.get("time", half.get("cpu_time"))),
            algbw=str(half.get("alg_bw", "")),
            busbw=str(half.get("bus_bw", "")),
            ranks=ranks,
            nodes=nodes,
            reduction=str(result.get("redop", "")),
            root=_integer(result.get("root", -1), where, "root"),
            wrong=_wrong(half.get("nwrong")),
            stack=stack,
        )


def _json_op(result: dict[str, Any], program: str, document: dict[str, Any]) -> str:
    config = document.get("config") or {}
    names = (program, str(result.get("experiment_name", "")), str(config.get("collective", "")))
    return next((name for name in names if op_name(name)), names[0])


def _json_devices(document: dict[str, Any]) -> tuple[int, int, str]:
    """Ranks, hosts and device of the group of rank 0; without MPI the file lists only the first device."""
    config = document.get("config") or {}
    devices = [d for d in config.get("devices") or [] if isinstance(d, dict)]
    devices = [d for d in devices if d.get("group") == devices[0].get("group")]
    local = int(config.get("nthreads") or 1) * int(config.get("ngpus") or 0)
    hosts = {d.get("hostname") for d in devices}
    nodes = len(hosts) or int(config.get("num_nodes") or 0)
    return max(len(devices), local), nodes, str(devices[0].get("device_info", "")) if devices else ""


def _rccl_json(document: list[Any], source: str, in_place: bool) -> Iterator[Row]:
    for index, entry in enumerate(document):
        where = f"{source}: [{index}]"
        found = {_plain(str(k)): v for k, v in entry.items()} if isinstance(entry, dict) else {}
        if "size" not in found or "time" not in found:
            raise MeasurementError(f"{where} has no size or no time; pass the JSON file that rccl-tests wrote")
        if _flag(found.get("inplace", 0)) != in_place:
            continue
        ranks = _integer(found.get("ranks", 1), where, "ranks")
        ranks *= max(_integer(found.get("gpusperrank", found.get("gpus", 1)), where, "gpusPerRank"), 1)
        yield Row(
            where=where,
            op=str(found.get("name", found.get("collective", ""))),
            nbytes=_float(found["size"], where, "size"),
            time=str(found["time"]),
            algbw=str(found.get("algbw", "")),
            busbw=str(found.get("busbw", "")),
            ranks=ranks,
            nodes=_integer(found.get("nodes", 0), where, "nodes"),
            reduction=str(found.get("redop", "")),
            wrong=_wrong(found.get("wrong")),
        )


def load_json(text: str, source: str) -> Any:
    """The document, or an error with line and character offset.

    Raises:
        MeasurementError: if the text is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as problem:
        raise MeasurementError(
            f"{source}:{problem.lineno}: not valid JSON at character {problem.pos} ({problem.msg}); "
            f"the file may be truncated: write or copy it again"
        ) from problem
    except RecursionError as problem:
        raise MeasurementError(f"{source}: JSON nested too deeply to be a measurement; pass another file") from problem


def _nccl_version(code: int) -> str:
    """NCCL_VERSION_CODE as text: 22703 is 2.27.3, and before 2.9 2806 was 2.8.6."""
    major, rest = divmod(code, 10_000 if code >= 10_000 else 1_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _flag(value: object) -> bool:
    return str(value).strip().lower() in ("1", "true", "yes")


def _wrong(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return 0.0  # "N/A": nobody checked


def _float(value: object, where: str, column: str) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise MeasurementError(f"{where}: column {column} holds '{value}', which is no size; mend or remove the row")
    return number


def _integer(value: object, where: str, column: str) -> int:
    try:
        return int(float(str(value).strip() or 0))
    except (ValueError, OverflowError) as problem:
        raise MeasurementError(
            f"{where}: column {column} holds '{value}', which is no whole number; mend the row"
        ) from problem
