"""Steps of a trace that covers several: how long one takes each rank."""

import numpy as np

from simpar.trace.trace import Trace


def cycle_s(trace: Trace, steps: int) -> dict[int, float]:
    """Seconds of a step of every rank of the job, on the mean, from the begin of its first to that of its last step.

    Args:
        trace: of ``steps`` steps, each with the same operations on a rank.
        steps: at least 2.
    """
    spans, found = trace.spans, {}
    for index, lane in enumerate(trace.lanes):
        if lane.stream != "compute" or not lane.replicas:
            continue
        starts = np.sort(spans.start_ns[spans.lane == index])
        last = len(starts) // steps * (steps - 1)
        found[lane.rank] = float(starts[last] - starts[0]) * 1e-9 / (steps - 1)
    return found
