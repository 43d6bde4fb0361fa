"""How busy the streams of each communicator are over time: a reader of the trace's raw spans."""

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
