"""How busy each communicator is over time, and how much of its links it uses: readers of the trace's raw spans."""

import numpy as np
import numpy.typing as npt

from simpar.trace.intervals import covered_until, intervals
from simpar.trace.trace import FloatColumn, Lane, Spans


def communicator(stream: str) -> str:
    """The communicator that a stream serves.

    >>> communicator("pp_forward"), communicator("dp")
    ('pp', 'dp')
    """
    return stream.partition("_")[0]


def link_line(stream: str) -> str:
    """What a stream's use of links is shown under: messages of both directions together, and else each stream alone.

    Streams of one communicator may load different links (HSDP shards within a node and reduces across nodes; offloading
    reads and writes), so that their shares do not add up.
    """
    return communicator(stream) if communicator(stream) == "pp" else stream


def busy_share(
    tables: tuple[Spans, ...], lanes: tuple[Lane, ...], edges_ns: npt.NDArray[np.int64]
) -> dict[str, FloatColumn]:
    """The share of each bin of time in which the streams of a communicator carry something.

    Args:
        tables: spans; on one lane those of different tables count once where they overlap.
        lanes: what ``Spans.lane`` points into.
        edges_ns: edges of the bins, ascending; one more than there are bins.

    Returns:
        Per communicator (``tp``, ``pp``, ...; both directions of ``pp`` together), the share from 0 to 1 of each bin
        on the mean of the ranks that have such a stream, each with the ranks that it stands for.
    """
    busy: dict[str, FloatColumn] = {}
    weight: dict[str, float] = {}
    width = np.maximum(np.diff(edges_ns), 1)
    for name in dict.fromkeys(communicator(lane.stream) for lane in lanes if lane.stream != "compute"):
        mine = [i for i, lane in enumerate(lanes) if communicator(lane.stream) == name]
        for rank in dict.fromkeys(lanes[i].rank for i in mine):
            of_rank = [i for i in mine if lanes[i].rank == rank]
            rows = [(table, np.flatnonzero(np.isin(table.lane, of_rank))) for table in tables]
            start = np.concatenate([table.start_ns[found] for table, found in rows])
            end = np.concatenate([table.end_ns[found] for table, found in rows])
            if not len(start):
                continue
            share = np.diff(covered_until(edges_ns, intervals(start, end))) / width
            replicas = float(lanes[of_rank[0]].replicas)
            busy[name] = busy.get(name, np.zeros(len(width))) + replicas * share
            weight[name] = weight.get(name, 0.0) + replicas
    return {name: total / weight[name] for name, total in busy.items()}


def link_share(
    tables: tuple[Spans, ...],
    lanes: tuple[Lane, ...],
    edges_ns: npt.NDArray[np.int64],
    link_s_per_byte: FloatColumn,
) -> dict[str, FloatColumn]:
    """The share of its links' capacity that a communicator uses in each bin of time: bytes carried over capacity.

    A span spreads its bytes evenly over its length, latency included. Where a transfer takes several links, the busiest
    counts.

    Args:
        tables: spans, none of them in two tables.
        lanes: what ``Spans.lane`` points into.
        edges_ns: edges of the bins, ascending; one more than there are bins.
        link_s_per_byte: shape (lanes, kinds), as :meth:`Trace.link_s_per_byte` gives it.

    Returns:
        Per :func:`link_line`, as :func:`busy_share`.
    """
    used: dict[str, FloatColumn] = {}
    ranks: dict[str, dict[int, float]] = {}
    width = np.maximum(np.diff(edges_ns), 1)
    for index, lane in enumerate(lanes):
        if lane.stream == "compute":
            continue
        name = link_line(lane.stream)
        for table in tables:
            rows = np.flatnonzero(table.lane == index)
            if not len(rows):
                continue
            needed_ns = table.nbytes[rows] * link_s_per_byte[index, table.kind[rows]] * 1e9
            before = _spread_until(edges_ns, table.start_ns[rows], table.end_ns[rows], needed_ns)
            used[name] = used.get(name, np.zeros(len(width))) + lane.replicas * np.diff(before) / width
            ranks.setdefault(name, {})[lane.rank] = lane.replicas
    return {name: total / sum(ranks[name].values()) for name, total in used.items()}


def _spread_until(
    instants: npt.NDArray[np.int64], start: npt.NDArray[np.int64], end: npt.NDArray[np.int64], amount: FloatColumn
) -> FloatColumn:
    """What spans of one stream, which follow each other, have brought until each instant."""
    done = np.concatenate([[0.0], np.cumsum(amount)])
    begun = np.searchsorted(start, instants, side="right")
    last = np.maximum(begun - 1, 0)
    ahead = np.clip((end[last] - instants) / np.maximum(end[last] - start[last], 1), 0.0, 1.0)
    found: FloatColumn = done[begun] - np.where(begun > 0, ahead * amount[last], 0.0)
    return found
