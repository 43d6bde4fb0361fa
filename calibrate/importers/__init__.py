"""Measurements that others made: logs of nccl-tests, silicon tables of aiconfigurator-core, torch profiles.

Each importer is a function of a path and returns :class:`calibrate.samples.Measurements` (or, for the measured step
of a profile, a :class:`simpar.trace.trace.Trace`). None needs torch or a GPU; Parquet tables need pyarrow. What is
wrong with a file is a :class:`MeasurementError` that names file and line; what was left out or looks wrong is a
:class:`MeasurementWarning`.
"""

import json
from pathlib import Path

from calibrate.errors import MeasurementError
from calibrate.importers.aiconfigurator import Table, read_aiconfigurator, read_table, table_holds, tables
from calibrate.importers.kineto import kineto_steps, read_kineto, read_kineto_trace
from calibrate.importers.nccl_tests import is_csv, parse_nccl_tests, read_nccl_tests
from calibrate.importers.source import MeasurementWarning, read_text
from calibrate.samples import Measurements

__all__ = [
    "MeasurementError",
    "MeasurementWarning",
    "Table",
    "kineto_steps",
    "parse_nccl_tests",
    "read",
    "read_aiconfigurator",
    "read_kineto",
    "read_kineto_trace",
    "read_nccl_tests",
    "read_table",
    "recognise",
    "tables",
]

# Enough to see what a file is; traces are hundreds of megabytes.
_SNIFFED = 100_000


def read(path: str | Path, *, op: str | None = None) -> Measurements:
    """Measurements of a file whose format is told by its content.

    Args:
        path: the file.
        op: operation of a log of nccl-tests that does not name it.

    Raises:
        MeasurementError: if the format is not known, or the file is malformed (with file and line).
    """
    match recognise(path):
        case "kineto":
            return read_kineto(path)
        case "aiconfigurator":
            return read_table(path)
        case _:
            return read_nccl_tests(path, usual_op=op)


def recognise(path: str | Path) -> str:
    """``nccl-tests``, ``aiconfigurator`` or ``kineto``.

    Raises:
        MeasurementError: if the file cannot be read, or is none of these.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        return "aiconfigurator"
    text = read_text(path)[:_SNIFFED]
    first = next((line for line in text.splitlines() if line.strip()), "")
    if '"traceEvents"' in text or '"ph"' in text:
        return "kineto"
    if table_holds(name.strip() for name in first.split(",")):
        return "aiconfigurator"
    tested = any(word in text for word in ('"results"', '"size"', "# nThread", "algbw", "float     sum"))
    if is_csv(text) or tested:
        return "nccl-tests"
    raise MeasurementError(
        f"'{path}' is no measurement that can be imported, beginning with {json.dumps(first[:40])}; pass the output of "
        f"nccl-tests (text, CSV, JSON), a table of aiconfigurator-core, or a trace of torch.profiler"
    )
