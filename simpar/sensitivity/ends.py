"""Which ends of spans a step time is made of: the last one; where workers run apart, those that bound their cycles."""

from collections import defaultdict
from itertools import groupby

from simpar.program.ir import Launch, Run
from simpar.result import Result
from simpar.sensitivity.steps import Steps
from simpar.sensitivity.waits import Waits
from simpar.trace.cycles import cycle_s
from simpar.trace.trace import NONE


def last_end(steps: Steps) -> dict[int, float]:
    """The span that ends a trace, the first one of several, with weight 1."""
    ends = steps.trace.spans.end_ns
    return {int(ends.argmax()): 1.0} if len(ends) else {}


def ends_of(result: Result, steps: Steps, waits: Waits) -> dict[int, float]:
    """Rows, with seconds of the step time (:attr:`simpar.result.Result.step_time_s`) per second that they end later.

    Where workers do not wait for each other it is the harmonic mean of their cycles c_i, H = n / Σ 1/c_i, so
    dH = Σ (H/c_i)² dc_i / n; within a bound, it is the longest of them.
    """
    count, server = result.layout.steps, result.layout.server
    if server is None or server.is_synchronous:
        return {row: weight / count for row, weight in last_end(steps).items()}
    cycles, step_s = cycle_s(result.trace, count), result.step_time_s
    if server.bound is not None:
        shares = {max(cycles, key=cycles.__getitem__): 1.0}
    else:
        shares = {rank: (step_s / cycle) ** 2 / len(cycles) for rank, cycle in cycles.items()}
    found: defaultdict[int, float] = defaultdict(float)
    computed = [row for row, step in enumerate(steps.of) if isinstance(step.instruction, (Run, Launch))]
    for rank, mine in groupby(sorted(computed, key=lambda row: steps.of[row].rank), lambda row: steps.of[row].rank):
        if rank in shares:
            rows = list(mine)
            first, last = rows[0], rows[len(rows) // count * (count - 1)]
            # a cycle begins when the stream is free for the first operation of a step
            for row, sign in ((waits.ready(last), 1), (waits.ready(first), -1)):
                if row != NONE:
                    found[row] += sign * shares[rank] / (count - 1)
    return dict(found)
