"""The spans of a trace as typed columns, for Parquet and for data frames."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from simpar.errors import JobError
from simpar.trace.export import CSV_HEADER, write_whole
from simpar.trace.trace import KINDS, NONE, Spans, Trace


def span_table(trace: Trace, *, kernels: bool = False) -> dict[str, Any]:
    """The columns of :data:`~simpar.trace.export.CSV_HEADER`; numbers that do not apply are masked.

    Args:
        trace: what to tabulate.
        kernels: append the kernels to the operations.
    """
    tables = [("operation", trace.spans), *([("kernel", trace.kernels())] if kernels else [])]
    parts = [_columns(trace, spans, level) for level, spans in tables]
    joined: Callable[[list[Any]], Any] = np.ma.concatenate  # numpy has no types for it
    return {name: joined([part[name] for part in parts]) for name in CSV_HEADER}


def _columns(trace: Trace, spans: Spans, level: str) -> dict[str, Any]:
    lanes, count = trace.lanes, len(spans)

    def of_lane(key: str) -> Any:
        return np.array([getattr(lane, key) for lane in lanes])[spans.lane] if lanes else np.zeros(0, np.int64)

    def known(values: Any) -> Any:
        return np.ma.masked_equal(np.asarray(values, np.int64), NONE)

    return {
        "level": np.full(count, level),
        "span": known(np.arange(count) if level == "operation" else np.full(count, NONE)),
        "start_ns": spans.start_ns,
        "duration_ns": spans.duration_ns,
        **{key: of_lane(key) for key in ("rank", "stage", "stream", "replicas")},
        "kind": np.array(KINDS)[spans.kind],
        "name": np.array(trace.names or ("",))[spans.name],
        **{key: known(getattr(spans, key)) for key in ("microbatch", "chunk", "layer")},
        "size_bytes": spans.nbytes,
        "work_flop": spans.flop,
        "parent_span": known(spans.parent),
        "predecessor_span": known(spans.predecessor),
    }


def to_parquet(trace: Trace, path: str | Path, *, kernels: bool = False) -> None:
    """Writes one row per span, with the columns of the CSV; what does not apply is null.

    Args:
        trace: what to write.
        path: the file.
        kernels: also write the kernels, after the operations.

    Raises:
        JobError: pyarrow is not installed.
        OutputError: the file cannot be written.
    """
    pa, parquet = arrow()
    columns = {}
    for name, column in span_table(trace, kernels=kernels).items():
        texts = column.dtype.kind == "U"
        values = column.tolist() if texts else np.ma.getdata(column)
        mask = None if texts else np.ma.getmaskarray(column)
        array = pa.array(values, mask=mask)
        columns[name] = array.dictionary_encode() if texts else array
    data = io.BytesIO()
    parquet.write_table(pa.table(columns), data, compression="zstd")
    write_whole(path, data.getvalue())


def arrow() -> tuple[Any, Any]:
    """The packages that write Parquet.

    Raises:
        JobError: pyarrow is not installed.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra, for who asks for this format
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError:
        raise JobError(
            "Parquet needs pyarrow, which is not installed; pip install 'simpar[parquet]', or write .csv.gz"
        ) from None
    return pa, parquet
