"""Rounds of measurements: of each item one sample that counts, how far rounds differ, and where too few agree.

A round measures every item once, so the n-th time that an item occurs is its n-th round. What counts is the median of
an item's rounds: it is what the machine sustains. By how much a machine is slower or faster from one moment to another
(a box's neighbours come and go, clocks change) is not averaged away by adding up many kernels, so it is kept beside
them.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from math import sqrt
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
from scipy.special import ndtri, stdtrit

from calibrate.samples import CollectiveSample, KernelSample, Measurements
from simpar.model.work import Attention, Gemm, GroupedGemm, Kernel, MemoryBound
from simpar.units import format_bytes

OUTLIER = 1.5
"""A round that took so many times its item's median is reported."""

DOUBTFUL = 0.1
"""Rounds of a class do not agree if the medians of its items are known less well than this, as a relative error."""

_FEWEST = 3  # rounds from which on a spread says anything
_TAIL = 0.95  # below the upper end of a 90 % interval
_QUARTILES = 1.349  # between the quartiles of a normal distribution, in standard deviations
_OF_MEDIAN = 1.2533  # standard error of a median over that of a mean

Timed = TypeVar("Timed", KernelSample, CollectiveSample)
Items = Sequence[Sequence[float]]
"""Of each item its rounds, in seconds."""

Group = tuple[str, float, int, int]
"""What makes a collective: operation, bytes, ranks, nodes."""


class Outliers(NamedTuple):
    """Rounds far above their item's median, of all rounds, and the worst one."""

    slow: int
    rounds: int
    worst: float
    what: str


def settle(measurements: Measurements) -> Measurements:
    """One sample for each kernel and collective, the median of its rounds, and how much the machine's level moved."""
    kernels = _by(measurements.kernels, lambda sample: (sample.kernel, sample.stack))
    collectives = _by(measurements.collectives, lambda sample: (group(sample), sample.stack))
    return replace(
        measurements,
        kernels=tuple(replace(found[0], time_s=median(s.time_s for s in found)) for found in kernels),
        collectives=tuple(replace(found[0], time_s=median(s.time_s for s in found)) for found in collectives),
        kernel_spread=spread(list(_classes(kernels).values())) or measurements.kernel_spread,
        collective_spread=spread(list(_classes(collectives).values())) or measurements.collective_spread,
    )


def spread(classes: Sequence[Items]) -> float:
    """By how much the machine is slower or faster at another moment: standard deviation of the logarithm.

    A class's kernels of one round run within a second or so, as those of a few steps do. Their factor is the median
    over them of time over the item's median, and what it differs by from round to round is what a step sees of a
    machine whose neighbours come and go; a whole round would average it away. To its variance, as the mean over the
    classes, comes that of slower changes, which rounds that follow each other do not show: half the squared difference
    of the factors in the first and in the second half of the run. A later minute differs at least as much. Few rounds
    know their own spread badly, so it is widened by what Student's t has over a normal distribution at 90 %.

    Args:
        classes: of each class its items, of each item its rounds in seconds, in their order.

    Returns:
        0 with too few rounds.

    >>> round(spread([[[1.0, 1.1, 0.9, 1.0], [20.0, 22.0, 18.0, 20.0], [5.0, 5.5, 4.5, 5.0]]]), 2)
    0.16
    """
    factors = [found for found in map(_factors, classes) if len(found) >= _FEWEST]
    if not factors:
        return 0.0
    between = float(np.mean([np.var(found, ddof=1) for found in factors]))
    halves = [(np.mean(found[: len(found) // 2]), np.mean(found[-(len(found) // 2) :])) for found in factors]
    drift = float(np.mean([last - first for first, last in halves]))
    wider = float(stdtrit(min(map(len, factors)) - 1, _TAIL) / ndtri(_TAIL))
    return wider * sqrt(between + drift * drift / 2)


def doubt(items: Items) -> float:
    """How well the medians of a class's items are known: standard error of a typical one's logarithm.

    From the quartiles of each item's rounds, which single rounds do not move; infinite with too few rounds.

    >>> round(doubt([[1.0, 1.0, 1.0, 1.0]]), 2), round(doubt([[1.0, 2.0, 3.0, 9.0]]), 2)
    (0.0, 0.4)
    """
    if min(map(len, items), default=0) < _FEWEST:
        return float("inf")
    found = []
    for times in items:
        low, high = np.quantile(np.log(times), (0.25, 0.75))
        found.append(_OF_MEDIAN * (high - low) / _QUARTILES / len(times) ** 0.5)
    return float(np.median(found))


def doubtful(measurements: Measurements) -> dict[str, float]:
    """The classes whose rounds do not agree, with what is doubtful of them."""
    kernels = _by(measurements.kernels, lambda sample: sample.kernel)
    collectives = _by(measurements.collectives, group)
    found = {name: doubt(items) for name, items in (_classes(kernels) | _classes(collectives)).items()}
    return {name: value for name, value in found.items() if value > DOUBTFUL}


def class_name(what: Kernel | str) -> str:
    """What rounds of a kernel, or of a collective by its operation, are judged together with."""
    match what:
        case Gemm():
            return "products"
        case GroupedGemm():
            return "grouped products"
        case Attention():
            return "attention backward" if what.backward else "attention"
        case MemoryBound():
            return f"{what.memory_class} kernels"
    return what


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


def _classes(items: Sequence[Sequence[Timed]]) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    for rounds in items:
        first = rounds[0]
        name = class_name(first.kernel if isinstance(first, KernelSample) else first.op)
        found.setdefault(name, []).append([sample.time_s for sample in rounds])
    return found


def _factors(items: Items) -> list[float]:
    """Of each round, what its items share."""
    logs = [np.log(times) - np.log(median(times)) for times in items]
    return [
        float(np.median([log[number] for log in logs if len(log) > number])) for number in range(max(map(len, logs)))
    ]


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
