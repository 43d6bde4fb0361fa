"""A trace as a file: Chrome/Perfetto JSON for trace viewers, CSV for everything else.

Files are written whole or not at all, and equal traces give equal bytes.
"""

import csv
import gzip
import io
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from simpar import __version__
from simpar.errors import SimparError
from simpar.trace.trace import KINDS, MEMORY_CATEGORIES, IntColumn, Spans, Trace
from simpar.trace.utilisation import busy_share, link_share

MAX_FLOWS = 20_000
"""Arrows in a Perfetto file; viewers become slow with more, and nobody follows them."""

_NS_PER_US = 1000
_LINK_BINS = 400  # of a step, in the counters of links

Event = dict[str, Any]


class OutputError(SimparError):
    """A file that cannot be written."""


def write_whole(path: str | Path, content: bytes) -> None:
    """Writes ``content`` under a temporary name beside ``path``, then renames it: no reader sees half a file.

    Raises:
        OutputError: if the folder does not exist, or the file cannot be written there.
    """
    path = Path(path)
    if str(path).startswith(("/dev/", "/proc/")) or (path.exists() and not path.is_file() and not path.is_dir()):
        raise OutputError(f"cannot write '{path}': it is not a file; name one")
    try:
        path = path.resolve()  # a link stays, its target is written
    except (OSError, RuntimeError) as problem:
        raise OutputError(f"cannot write '{path}': {problem}; choose another file") from problem
    if not path.parent.is_dir():
        raise OutputError(f"cannot write '{path}': there is no folder '{path.parent}'; create it first")
    if path.is_dir():
        raise OutputError(f"cannot write '{path}': it is a folder; add a file name")
    unfinished = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with unfinished.open("xb") as file:
            file.write(content)
        os.replace(unfinished, path)  # noqa: PTH105 - the one call that is atomic on every system
    except OSError as problem:
        unfinished.unlink(missing_ok=True)
        reason = problem.strerror or problem
        raise OutputError(f"cannot write '{path}': {reason}; choose another folder") from problem


def to_perfetto(trace: Trace, path: str | Path, *, kernels: bool = False) -> None:
    """Writes the Trace Event Format that ui.perfetto.dev and chrome://tracing open.

    Processes are ranks (in the order of their stages), threads are streams, times are µs with all nanoseconds
    of the clock. Counters show memory by category and how busy links are; arrows lead from an operation to one on
    another lane that waited for it.

    Args:
        trace: what to write.
        path: the file; gzipped (reproducibly) if its name ends in ``.gz``.
        kernels: also write the kernels, nested in their operations.

    Raises:
        OutputError: if the file cannot be written.
    """
    flows, left_out = _flows(trace)
    tables = (trace.spans, *((trace.kernels(),) if kernels else ()))
    document = {
        "traceEvents": [
            *_names(trace),
            *(event for spans in tables for event in _slices(trace, spans)),
            *flows,
            *_counters(trace, tables),
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "producer": f"simpar {__version__}",
            "step_us": trace.step_ns / _NS_PER_US,
            "flows_left_out": left_out,
        },
    }
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    _write_text(path, text)


def to_csv(trace: Trace, path: str | Path, *, kernels: bool = False) -> None:
    """Writes one line per span, with units in the header; what does not apply is empty.

    ``span`` is the number of an operation, to which ``parent_span`` and ``predecessor_span`` refer.
    ``replicas`` says how many equal ranks a line stands for.

    Args:
        trace: what to write.
        path: the file; gzipped (reproducibly) if its name ends in ``.gz``.
        kernels: also write the kernels, after the operations.

    Raises:
        OutputError: if the file cannot be written.
    """
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(CSV_HEADER)
    rows.writerows(_rows(trace, trace.spans, "operation"))
    if kernels:
        rows.writerows(_rows(trace, trace.kernels(), "kernel"))
    _write_text(path, text.getvalue())


CSV_HEADER = (
    "level", "span", "start_ns", "duration_ns", "rank", "stage", "stream", "replicas", "kind", "name",
    "microbatch", "chunk", "layer", "size_bytes", "work_flop", "parent_span", "predecessor_span",
)  # fmt: skip


def _write_text(path: str | Path, text: str) -> None:
    content = text.encode()
    write_whole(path, gzip.compress(content, 9, mtime=0) if Path(path).name.endswith(".gz") else content)


def _streams(trace: Trace) -> list[int]:
    """Thread number of each lane: its place among the lanes of its rank."""
    seen: dict[int, int] = {}
    numbers = []
    for lane in trace.lanes:
        numbers.append(seen.get(lane.rank, 0))
        seen[lane.rank] = numbers[-1] + 1
    return numbers


def _names(trace: Trace) -> Iterator[Event]:
    def metadata(entry: str, rank: int, stream: int, **args: str | int) -> Event:
        return {"ph": "M", "name": entry, "pid": rank, "tid": stream, "args": args}

    stages = {lane.rank: lane for lane in reversed(trace.lanes)}
    for index, lane in enumerate(sorted(stages.values(), key=lambda lane: (lane.stage, lane.rank))):
        replicas = f" ×{lane.replicas} equal" if lane.replicas > 1 else ""
        yield metadata("process_name", lane.rank, 0, name=f"stage {lane.stage} · GPU {lane.rank}{replicas}")
        yield metadata("process_sort_index", lane.rank, 0, sort_index=index)
    for lane, stream in zip(trace.lanes, _streams(trace), strict=True):
        yield metadata("thread_name", lane.rank, stream, name=lane.stream)
        yield metadata("thread_sort_index", lane.rank, stream, sort_index=stream)


def _slices(trace: Trace, spans: Spans) -> Iterator[Event]:
    streams = _streams(trace)
    for row in range(len(spans)):
        lane, kind, name = trace.lanes[spans.lane[row]], KINDS[spans.kind[row]], trace.names[spans.name[row]]
        args: dict[str, int | float] = {}
        for key in ("microbatch", "chunk", "layer"):
            value = int(getattr(spans, key)[row])
            if value >= 0:
                args[key] = value
        if spans.nbytes[row]:
            args["bytes"] = float(spans.nbytes[row])
        if spans.flop[row]:
            args["flop"] = float(spans.flop[row])
        yield {
            "ph": "X",
            # Viewers colour by name: the microbatch stays out of it, the kind goes in.
            "name": kind if name in ("", kind) else f"{kind}: {name}",
            "cat": kind,
            "pid": lane.rank,
            "tid": streams[spans.lane[row]],
            "ts": int(spans.start_ns[row]) / _NS_PER_US,
            "dur": int(spans.duration_ns[row]) / _NS_PER_US,
            "args": args,
        }


def _flows(trace: Trace) -> tuple[list[Event], int]:
    """Arrows between lanes, the first :data:`MAX_FLOWS` by the time they end, and how many are left out."""
    spans, streams = trace.spans, _streams(trace)
    rows, before = crossings(trace)
    events: list[Event] = []
    for row, source in zip(rows[:MAX_FLOWS].tolist(), before[:MAX_FLOWS].tolist(), strict=True):
        # An arrow leaves from inside its span: at the very end the viewer takes the span for closed.
        leaves = min(int(spans.end_ns[source]) - 1, int(spans.start_ns[row]))
        ends = (
            (source, {"ph": "s"}, max(leaves, int(spans.start_ns[source]))),
            (row, {"ph": "f", "bp": "e"}, int(spans.start_ns[row])),
        )
        for end, phase, time in ends:
            lane = int(spans.lane[end])
            events.append(
                {
                    **phase,
                    "id": row,
                    "name": "lets start",
                    "cat": "dependency",
                    "pid": trace.lanes[lane].rank,
                    "tid": streams[lane],
                    "ts": time / _NS_PER_US,
                }
            )
    return events, max(0, len(rows) - MAX_FLOWS)


def crossings(trace: Trace) -> tuple[IntColumn, IntColumn]:
    """Operations that waited for one on another lane, in order of time, and the ones that they waited for."""
    spans = trace.spans
    rows = np.flatnonzero(spans.predecessor >= 0)
    before = spans.predecessor[rows]
    crossing = (spans.lane[rows] != spans.lane[before]) & (spans.start_ns[before] <= spans.start_ns[rows])
    return rows[crossing], before[crossing]


def counters(trace: Trace, tables: tuple[Spans, ...]) -> Iterator[tuple[str, int, int, float]]:
    """Values that change in the course of a step: name, rank, time (ns) and value.

    Memory is in bytes by category, at each change; links are, by the spans of ``tables``, the per cent of its links'
    capacity that a communicator uses in a bin of time, or where nobody knows that of the time in which it carries
    something; on the mean of all ranks, told at the first one.
    """
    held: dict[tuple[int, str], int] = {}
    memory = trace.memory
    columns = (memory.time_ns, memory.rank, memory.category, memory.delta_bytes)
    for time, rank, category, delta in zip(*(column.tolist() for column in columns), strict=True):
        name = MEMORY_CATEGORIES[category]
        held[rank, name] = held.get((rank, name), 0) + delta
        yield f"memory {name}", rank, time, held[rank, name]
    if not trace.lanes or trace.step_ns < _LINK_BINS:
        return
    first = min((lane.stage, lane.rank) for lane in trace.lanes)[1]
    edges = np.linspace(0, trace.step_ns, _LINK_BINS + 1).astype(np.int64)
    use = trace.link_s_per_byte()
    if use is None:
        word, shares = "busy", busy_share(tables, trace.lanes, edges)
    else:
        word, shares = "used", link_share(tables, trace.lanes, edges, use)
    for name, share in shares.items():
        if share.any():
            for time, value in zip(edges[:-1].tolist(), share.tolist(), strict=True):
                yield f"links {word} {name}", first, time, round(100 * value, 2)


def _counters(trace: Trace, tables: tuple[Spans, ...]) -> Iterator[Event]:
    for name, rank, time, value in counters(trace, tables):
        unit = "bytes" if name.startswith("memory") else "%"
        yield {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": time / _NS_PER_US, "args": {unit: value}}


def _rows(trace: Trace, spans: Spans, level: str) -> Iterator[tuple[object, ...]]:
    def known(value: int) -> int | str:
        return value if value >= 0 else ""

    for row in range(len(spans)):
        lane = trace.lanes[spans.lane[row]]
        yield (
            level,
            row if level == "operation" else "",
            int(spans.start_ns[row]),
            int(spans.duration_ns[row]),
            lane.rank,
            lane.stage,
            lane.stream,
            lane.replicas,
            KINDS[spans.kind[row]],
            trace.names[spans.name[row]],
            *(known(int(getattr(spans, key)[row])) for key in ("microbatch", "chunk", "layer")),
            float(spans.nbytes[row]),
            float(spans.flop[row]),
            known(int(spans.parent[row])),
            known(int(spans.predecessor[row])),
        )
