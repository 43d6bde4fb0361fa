"""Turns what a run wrote down into a trace."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter

import numpy as np

from simpar.engine.expansion import Expansion
from simpar.engine.network import Network
from simpar.engine.price import OpenedPrice
from simpar.engine.rows import (
    CATEGORY,
    KIND,
    InnerRow,
    Label,
    LabelColumns,
    Recorder,
    Row,
    RowFields,
    RunFields,
    label_columns,
)
from simpar.program.ir import COMPUTE, RankProgram
from simpar.trace.trace import (
    NONE,
    FloatColumn,
    IntColumn,
    Lane,
    LinkUse,
    MemoryEvents,
    Trace,
    spans_from_columns,
)

_LAST_COMPUTE = KIND["norm"]


def build_trace(  # noqa: PLR0917 - all that a run leaves behind
    recorder: Recorder,
    lanes: Sequence[Lane],
    network: Network,
    ranks: Iterable[RankProgram],
    step_ns: int,
    traffic: Callable[[Sequence[Lane]], FloatColumn],
) -> Trace:
    """Sorts rows by start and turns them into columns; ``traffic`` tells what lanes ask of their links."""
    rows, runs, children = _close_opened_runs(recorder, lanes)
    labels = label_columns(recorder.labels)
    columns, place = _columns(rows, labels)
    spans = spans_from_columns(columns)
    expansion = Expansion(runs, place, spans, lanes, children, labels)
    return Trace(
        step_ns=step_ns,
        lanes=expansion.lanes,
        names=recorder.names,
        spans=spans,
        memory=_memory_events(recorder.memory, ranks),
        links=tuple(LinkUse(name=n, nbytes=b, capacity_bytes_per_s=c) for n, b, c in network.usage()),
        details=expansion.details(len(rows)),
        expand=expansion.kernels,
        traffic=partial(traffic, expansion.lanes),
    )


def _columns(rows: Sequence[RowFields], labels: LabelColumns) -> tuple[dict[str, IntColumn | FloatColumn], IntColumn]:
    """Columns ordered by start, and the place of every row in them (-1 stays -1)."""
    start, end, lane, label, microbatch, chunk, cause = _transposed(rows, len(Row._fields))
    order = np.lexsort((lane, end, start))
    place = np.full(len(rows) + 1, NONE, np.int64)
    place[order] = np.arange(len(rows))
    start, label = start[order], label[order]
    kind, value = labels.kind[label], labels.value[label]
    is_compute = kind <= _LAST_COMPUTE
    columns: dict[str, IntColumn | FloatColumn] = {
        "start_ns": start,
        "duration_ns": end[order] - start,
        "lane": lane[order],
        "kind": kind,
        "name": labels.name[label],
        "microbatch": microbatch[order],
        "chunk": chunk[order],
        "layer": labels.layer[label],
        "nbytes": np.where(is_compute, 0.0, value),
        "flop": np.where(is_compute, value, 0.0),
        "parent": np.full(len(rows), NONE, np.int64),
        "predecessor": place[cause[order]],
    }
    return columns, place


def _transposed(rows: Sequence[tuple[int, ...]], width: int) -> IntColumn:
    # one long row first: numpy reads it much faster than many short ones
    flat = np.fromiter(chain.from_iterable(rows), np.int64, width * len(rows))
    return np.ascontiguousarray(flat.reshape(-1, width).T)


def _close_opened_runs(
    recorder: Recorder, lanes: Sequence[Lane]
) -> tuple[list[RowFields], list[RunFields], list[tuple[Row, int]]]:
    """Puts one row in place of the kernels of each opened run.

    Returns:
        The rows that remain, how the runs among them were made up, and the kernels, each with its run's row.
    """
    if not recorder.inner:
        return recorder.rows, recorder.runs, []
    members: dict[int, list[InnerRow]] = {}
    for inner in map(InnerRow._make, recorder.inner):
        members.setdefault(inner.opened, []).append(inner)
    inside = {row for row, *_ in recorder.inner}
    kept = [row for row in range(len(recorder.rows)) if row not in inside]
    moved = {NONE: NONE, **{old: new for new, old in enumerate(kept)}}  # old row -> new row
    closed = [recorder.rows[row] for row in kept]
    runs: list[RunFields] = []
    children: list[tuple[Row, int]] = []
    labels = recorder.labels
    for number, mine in members.items():
        place, rows = len(closed), [Row(*recorder.rows[inner.row]) for inner in mine]
        moved.update((inner.row, place) for inner in mine)
        children += [(row, place) for row in rows]
        price = _opened_price(rows, mine, labels, lanes)
        # a run begins when its stream is free; what let it begin is not one of its own kernels
        begins = [(row.start_ns - inner.host_wait_ns, row.cause) for row, inner in zip(rows, mine, strict=True)]
        own = {inner.row for inner in mine}
        cause = next((cause for _, cause in sorted(begins, key=itemgetter(0)) if cause not in own), NONE)
        start, end = min(begins)[0], max(row.end_ns for row in rows)
        compute = [row for row in rows if lanes[row.lane].stream == COMPUTE]
        run, flop = recorder.opened[number], sum(labels[row.label].value for row in compute)
        label = recorder.label(run.label._replace(value=flop))
        closed.append((start, end, compute[0].lane, label, run.microbatch, run.chunk, cause))
        runs.append((place, compute[0].lane, price, start, price.gpu_ns))
    closed = [(*row[:-1], moved[row[-1]]) for row in closed]
    return closed, [(moved[run[0]], *run[1:]) for run in recorder.runs] + runs, children


def _opened_price(
    rows: Sequence[Row], inner: Sequence[InnerRow], labels: Sequence[Label], lanes: Sequence[Lane]
) -> OpenedPrice:
    """What the kernels of an opened run make of it; it ends when its collectives have joined."""
    start = min(row.start_ns - each.host_wait_ns for row, each in zip(rows, inner, strict=True))
    gpu_ns = max(row.end_ns for row in rows) - start - sum(each.host_wait_ns for each in inner)
    busy: dict[int, int] = {}
    stream_busy: dict[str, int] = {COMPUTE: 0}
    for row in rows:
        kind, stream, length = labels[row.label].kind, lanes[row.lane].stream, row.end_ns - row.start_ns
        busy[kind] = busy.get(kind, 0) + length
        stream_busy[stream] = stream_busy.get(stream, 0) + length
    return OpenedPrice(busy, gpu_ns - stream_busy.pop(COMPUTE), gpu_ns, stream_busy_ns=stream_busy)


def _memory_events(memory: list[tuple[int, int, int, int]], ranks: Iterable[RankProgram]) -> MemoryEvents:
    resident = [
        (0, rank.rank, CATEGORY[category], nbytes) for rank in ranks for category, nbytes in rank.resident if nbytes
    ]
    columns = _transposed(resident + memory, 4)
    # at one instant the order of the compute stream stays, as the allocator sees it
    time, rank, category, delta = columns[:, np.argsort(columns[0], kind="stable")]
    return MemoryEvents(time_ns=time, rank=rank, category=category, delta_bytes=delta)
