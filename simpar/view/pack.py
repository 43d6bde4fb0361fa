"""Columns as text for a page: each in its smallest type, byte-shuffled, all deflated together, in base64.

Spans lie by lane and start, so that a start is the gap behind the span before: neighbours of a simulated step repeat,
and a span takes less than a byte. ``assets/unpack.js`` reads this.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from simpar.trace.trace import NONE, IntColumn, Spans

Columns = Mapping[str, npt.NDArray[Any]]

_UNSIGNED = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4"))
_SIGNED = tuple(np.dtype(name) for name in ("<i1", "<i2", "<i4", "<i8"))


def pack(columns: Columns) -> tuple[list[list[str | int]], str]:
    """Columns as base64.

    Returns:
        What is in it, in order: name, type and length of each column; and the text.
    """
    manifest: list[list[str | int]] = []
    parts = []
    for name, column in columns.items():
        small = _narrow(column)
        manifest.append([name, small.dtype.str[1:], len(small)])
        # like bytes side by side deflate better
        parts.append(np.frombuffer(small.tobytes(), np.uint8).reshape(-1, small.itemsize).T.tobytes())
    return manifest, base64.b64encode(zlib.compress(b"".join(parts), 9)).decode("ascii")


def span_columns(spans: Spans, lanes: int, parents: IntColumn | None = None) -> tuple[dict[str, Any], IntColumn]:
    """The columns of a table of spans.

    Args:
        spans: in any order.
        lanes: how many there are.
        parents: new rows of the operations that ``spans.parent`` counts in its old ones.

    Returns:
        The columns, and the new row of each span.
    """
    order = np.lexsort((spans.end_ns, spans.start_ns, spans.lane))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    start, end, lane = spans.start_ns[order], spans.end_ns[order], spans.lane[order]
    before = np.concatenate([[0], end[:-1]])
    before[np.flatnonzero(np.diff(lane, prepend=-1))] = 0
    parent = np.append(parents if parents is not None else [], NONE).astype(np.int64)[spans.parent[order]]
    predecessor = np.append(place, NONE)[spans.predecessor[order]]
    columns = {
        "offset": np.searchsorted(lane, np.arange(lanes + 1)),
        "gap": start - before,
        "length": end - start,
        "kind": spans.kind[order],
        "name": np.where(spans.name[order] < 0, 0xFFFF, spans.name[order]),
        "microbatch": spans.microbatch[order],
        "chunk": spans.chunk[order],
        "layer": spans.layer[order],
        "nbytes": spans.nbytes[order].astype(np.float32),
        "flop": spans.flop[order].astype(np.float32),
        "parent": np.diff(parent, prepend=0),
        "back": np.where(predecessor == NONE, 0, np.arange(len(order)) - predecessor),
    }
    return columns, place


def _narrow(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The column in the smallest type that holds it exactly."""
    if column.dtype.kind == "f":
        return column.astype("<f4" if column.dtype == np.float32 else "<f8")
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    types = _UNSIGNED if low >= 0 and high < 2**32 else _SIGNED
    return column.astype(next(t for t in types if np.iinfo(t).min <= low and high <= np.iinfo(t).max))
