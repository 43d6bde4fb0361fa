"""How far off a prediction may be, by the errors that the profile states of itself.

Errors of kernels of one class are taken to go the same way, so they add up; classes, the level that all kernels of a
machine share, and communication are taken to be independent, so their squares do. Compute and the waits that follow
from it (a pipeline's bubble) scale by compute's relative error, exposed communication by the link's. What hidden
communication costs compute is not in it, nor the host's time where it bounds the step. The interval is that of a
log-normal distribution with this relative standard deviation: one of 200 % does not reach down to nothing.
"""

from collections import defaultdict
from math import exp, hypot, log1p, sqrt

from simpar.cost.kernel import kernel_error, kernel_s
from simpar.hardware.cluster import Cluster, FitError
from simpar.hardware.device import Device
from simpar.model.work import Kernel, kernel_kind
from simpar.program.ir import Launch, Program, Run
from simpar.trace.breakdown import RankTime, breakdown
from simpar.trace.trace import Trace

COVERAGE = 0.9
"""Share of measurements that should lie inside."""

_SIGMAS = 1.6449  # of a normal distribution, on both sides
_MEDIAN = 0.6745  # median of |z|
HOW = (
    f"{COVERAGE:.0%} intervals from the profile's errors: the same way within a class of kernels, independent between "
    "classes, the machine's level and communication; without what hidden communication costs compute"
)


def interval_s(trace: Trace, program: Program, cluster: Cluster) -> tuple[float, float]:
    """Lower and upper bound of the predicted step in seconds.

    Args:
        trace: of the engine.
        program: what it simulated.
        cluster: where.
    """
    sigma = log_error(step_error(trace, program, cluster))
    return trace.step_s * exp(-_SIGMAS * sigma), trace.step_s * exp(_SIGMAS * sigma)


def log_error(relative: float) -> float:
    """Standard deviation of the logarithm of what has this relative standard deviation: √log(1 + r²) of a log-normal.

    >>> round(log_error(0.1), 3), round(log_error(5.0), 2)
    (0.1, 1.81)
    """
    return sqrt(log1p(relative * relative))


def step_error(trace: Trace, program: Program, cluster: Cluster) -> float:
    """Relative standard deviation of the step."""
    busiest = max(breakdown(trace), key=_busy_s)
    exposed = min(sum(busiest.exposed_s.values()), trace.step_s)
    compute = trace.step_s - exposed
    kernels = _kernels(program, busiest.rank)
    return (
        hypot(compute * compute_error(kernels, cluster.device), exposed * link_error(cluster.node_link.errors))
        / trace.step_s
    )


def compute_error(kernels: dict[Kernel, int], device: Device) -> float:
    """Relative standard deviation of the sum of kernels, each so many times."""
    total = 0.0
    classes: defaultdict[str, float] = defaultdict(float)
    for kernel, count in kernels.items():
        spent = kernel_s(kernel, device) * count
        total += spent
        dtype = getattr(kernel, "dtype", "")
        classes[f"{kernel_kind(kernel)}.{dtype}"] += spent * kernel_error(kernel, device)
    between = sum(error * error for error in classes.values()) ** 0.5 / total if total else 0.0
    return hypot(between, device.errors.get("level", 0.0))


def link_error(errors: FitError) -> float:
    """Relative standard deviation of a collective, from the median or the 90th percentile, whichever is wider."""
    return max(errors.median / _MEDIAN, errors.p90 / _SIGMAS)


def _busy_s(rank: RankTime) -> float:
    return sum(rank.compute_s.values()) + rank.optimizer_s + sum(rank.exposed_s.values())


def _kernels(program: Program, rank: int) -> dict[Kernel, int]:
    found: defaultdict[Kernel, int] = defaultdict(int)
    for instruction in next(r for r in program.ranks if r.rank == rank).instructions:
        if isinstance(instruction, Run):
            for block in instruction.operation.blocks:
                for inner in block.body:
                    if isinstance(inner, Launch):
                        found[inner.kernel] += 1
    return found
