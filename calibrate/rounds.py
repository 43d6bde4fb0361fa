"""Rounds of measurements: of each item one sample that counts, and how much whole rounds differ from each other.

A round measures every item once, so the n-th time that an item occurs is its n-th round. What counts is the median of
an item's rounds: it is what the machine sustains. By how much a round as a whole is slower or faster than another (a
box's neighbours come and go, clocks change) is not averaged away by adding up many kernels, so it is kept beside them.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np

from calibrate.samples import CollectiveSample, KernelSample, Measurements
from simpar.model.work import Attention, Gemm, GroupedGemm, Kernel, MemoryBound
from simpar.units import format_bytes

OUTLIER = 1.5
"""A round that took so many times its item's median is reported."""

_FEWEST = 3  # rounds from which on a spread says anything

Timed = TypeVar("Timed", KernelSample, CollectiveSample)
Group = tuple[str, float, int, int]
"""What makes a collective: operation, bytes, ranks, nodes."""


class Outliers(NamedTuple):
    """Rounds far above their item's median, of all rounds, and the worst one."""

    slow: int
    rounds: int
    worst: float
    what: str


def settle(measurements: Measurements) -> Measurements:
    """One sample for each kernel and collective, the median of its rounds, and how much rounds differ as a whole."""
    kernels = _by(measurements.kernels, lambda sample: (sample.kernel, sample.stack))
    collectives = _by(measurements.collectives, lambda sample: (group(sample), sample.stack))
    return replace(
        measurements,
        kernels=tuple(replace(found[0], time_s=median(s.time_s for s in found)) for found in kernels),
        collectives=tuple(replace(found[0], time_s=median(s.time_s for s in found)) for found in collectives),
        kernel_spread=spread([[s.time_s for s in found] for found in kernels]) or measurements.kernel_spread,
        collective_spread=spread([[s.time_s for s in found] for found in collectives])
        or measurements.collective_spread,
    )


def spread(items: Sequence[Sequence[float]]) -> float:
    """Standard deviation, between rounds, of the factor that the items of a round share; 0 with too few rounds.

    The factor of a round is the median over its items of time over the item's median.

    >>> round(spread([[1.0, 1.1, 0.9], [20.0, 22.0, 18.0], [5.0, 5.5, 4.5]]), 2)
    0.1
    """
    rounds = max(map(len, items), default=0)
    factors = [
        np.median([np.log(times[number] / median(times)) for times in items if len(times) > number])
        for number in range(rounds)
    ]
    return float(np.std(factors, ddof=1)) if rounds >= _FEWEST else 0.0


def outliers(measurements: Measurements) -> Outliers:
    """Counts the rounds that took over :data:`OUTLIER` times the median of their item's rounds."""
    kernels = _by(measurements.kernels, lambda sample: sample.kernel)
    collectives = _by(measurements.collectives, group)
    rounds = [(_kernel_name(found[0].kernel), [s.time_s for s in found]) for found in kernels]
    rounds += [(_collective_name(found[0]), [s.time_s for s in found]) for found in collectives]
    factors = [(value / median(times), name) for name, times in rounds for value in times]
    worst, what = max(factors, default=(1.0, ""))
    return Outliers(sum(factor > OUTLIER for factor, _ in factors), len(factors), worst, what)


def group(sample: CollectiveSample) -> Group:
    """What makes samples the same collective."""
    return (sample.op, sample.nbytes, sample.ranks, sample.nodes)


def _by(samples: Iterable[Timed], key: Callable[[Timed], Hashable]) -> list[list[Timed]]:
    """Samples with equal keys together, in their order."""
    found: dict[Hashable, list[Timed]] = {}
    for sample in samples:
        found.setdefault(key(sample), []).append(sample)
    return list(found.values())


def _kernel_name(kernel: Kernel) -> str:
    match kernel:
        case Gemm():
            return f"{kernel.dtype} product {kernel.m}×{kernel.n}×{kernel.k}"
        case GroupedGemm():
            return f"{kernel.dtype} products of {kernel.groups} groups, {kernel.m}×{kernel.n}×{kernel.k}"
        case Attention():
            way = "backward" if kernel.backward else "forward"
            return f"attention {way}, {kernel.batch} × {kernel.heads} heads × {kernel.seq_q} × {kernel.head_dim}"
        case MemoryBound():
            return f"{kernel.memory_class} kernel over {format_bytes(kernel.nbytes)}"


def _collective_name(sample: CollectiveSample) -> str:
    return f"{sample.op} of {format_bytes(sample.nbytes)} over {sample.ranks} ranks"
