"""Turns what a run wrote down into a trace."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain

import numpy as np

from simpar.engine.expansion import Expansion
from simpar.engine.network import Network
from simpar.engine.price import OpenedPrice
from simpar.engine.rows import CATEGORY, KIND, Label, Recorder, Row, RunRow
from simpar.program.ir import COMPUTE, RankProgram
from simpar.trace.trace import (
    NONE,
    FloatColumn,
    IntColumn,
    Lane,
    LinkUse,
    MemoryEvents,
    Spans,
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
    rows, runs_of_rows, children = _close_opened_runs(recorder, lanes)
    columns, place = _columns(rows)
    spans = spans_from_columns(columns)
    expansion = Expansion(runs_of_rows, place, spans, lanes, children)
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


def _columns(rows: Sequence[Row]) -> tuple[dict[str, IntColumn | FloatColumn], IntColumn]:
    """Columns ordered by start, and the place of every row in them (-1 stays -1)."""
    if not rows:
        return {name: np.zeros(0) for name in Spans.__dataclass_fields__}, np.full(1, NONE, np.int64)
    # transposed in Python first: numpy reads a few long columns much faster than many short rows
    start, end, lane, label, value, cause, *_ = zip(*rows, strict=True)
    order = np.lexsort((lane, end, start))
    place = np.full(len(rows) + 1, NONE, np.int64)
    place[order] = np.arange(len(rows))
    labels = np.fromiter(chain.from_iterable(label), np.int64, 5 * len(label)).reshape(-1, 5)[order].T
    starts, lengths = np.array(start, np.int64)[order], (np.array(end, np.int64) - np.array(start, np.int64))[order]
    values = np.array(value, np.float64)[order]
    is_compute = labels[0] <= _LAST_COMPUTE
    columns: dict[str, IntColumn | FloatColumn] = {
        "start_ns": starts,
        "duration_ns": lengths,
        "lane": np.array(lane, np.int64)[order],
        **dict(zip(Label._fields, labels, strict=True)),
        "nbytes": np.where(is_compute, 0.0, values),
        "flop": np.where(is_compute, values, 0.0),
        "parent": np.full(len(rows), NONE, np.int64),
        "predecessor": place[np.array(cause, np.int64)[order]],
    }
    return columns, place


def _close_opened_runs(
    recorder: Recorder, lanes: Sequence[Lane]
) -> tuple[list[Row], list[RunRow], list[tuple[Row, int]]]:
    """Puts one row in place of the kernels of each opened run.

    Returns:
        The rows that remain, how the runs among them were made up, and the kernels, each with its run's row.
    """
    if not recorder.opened:
        return recorder.rows, recorder.runs, []
    rows: list[Row] = []
    moved: dict[int, int] = {NONE: NONE}  # old row -> new row
    members: dict[int, list[int]] = {}
    for index, row in enumerate(recorder.rows):
        if row.opened == NONE:
            moved[index] = len(rows)
            rows.append(row)
        else:
            members.setdefault(row.opened, []).append(index)
    children, opened_runs = [], []
    for number, indices in members.items():
        mine = [recorder.rows[i] for i in indices]
        compute = [row for row in mine if lanes[row.lane].stream == COMPUTE]
        # a run begins when its stream is free and ends when its collectives have joined
        start = min(_begin(row) for row in mine)
        end = max(row.end_ns for row in mine)
        busy: dict[int, int] = {}
        stream_busy: dict[str, int] = {}
        for row in mine:
            length, stream = row.end_ns - row.start_ns, lanes[row.lane].stream
            busy[row.label.kind] = busy.get(row.label.kind, 0) + length
            if stream != COMPUTE:
                stream_busy[stream] = stream_busy.get(stream, 0) + length
        waited = sum(row.host_wait_ns for row in compute)
        exposed = end - start - waited - sum(row.end_ns - row.start_ns for row in compute)
        moved.update(dict.fromkeys(indices, len(rows)))
        children += [(row, len(rows)) for row in mine]
        gpu_ns = end - start - waited
        price = OpenedPrice(busy, exposed, gpu_ns, stream_busy_ns=stream_busy)
        opened_runs.append(RunRow(len(rows), price, start, gpu_ns, waited))
        flop = sum(row.value for row in compute)
        # what let the run begin is not one of its own kernels
        cause = next((row.cause for row in sorted(mine, key=_begin) if row.cause not in indices), NONE)
        rows.append(Row(start, end, compute[0].lane, recorder.opened[number], flop, cause))
    runs = [run._replace(row=moved[run.row]) for run in recorder.runs]
    return [row._replace(cause=moved[row.cause]) for row in rows], runs + opened_runs, children


def _begin(row: Row) -> int:
    return row.start_ns - row.host_wait_ns


def _memory_events(memory: list[tuple[int, int, int, int]], ranks: Iterable[RankProgram]) -> MemoryEvents:
    resident = [
        (0, rank.rank, CATEGORY[category], nbytes) for rank in ranks for category, nbytes in rank.resident if nbytes
    ]
    # one long row first: numpy reads it much faster than many short ones
    events = resident + memory
    columns = np.fromiter(chain.from_iterable(events), np.int64, 4 * len(events)).reshape(-1, 4)
    # at one instant the order of the compute stream stays, as the allocator sees it
    columns = columns[np.argsort(columns[:, 0], kind="stable")]
    return MemoryEvents(time_ns=columns[:, 0], rank=columns[:, 1], category=columns[:, 2], delta_bytes=columns[:, 3])
