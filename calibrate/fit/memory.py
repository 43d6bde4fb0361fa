"""Fits memory-bound kernels: an overhead and a share of the bandwidth for each class."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.fit.accuracy import assess, kernel_splits
from calibrate.fit.gemm import rounded
from calibrate.fit.robust import FloatArray, Mask, Parameter, Solution, solve
from calibrate.samples import KernelSample
from simpar.hardware.device import Device, MemoryFit
from simpar.hardware.profile import Accuracy
from simpar.model.work import MemoryBound
from simpar.units import US

PRIORS = (
    Parameter("bandwidth_efficiency", 0.7, 0.6, 0.01, 2.0),
    Parameter("overhead_s", 2.0 * US, 1.0, 0.01 * US, 1.0),
)
_FEWEST = 3
_CACHED_BYTES = 30e6  # smaller buffers may stay in a cache, whose rate is not the memory's


class FittedMemory(NamedTuple):
    """Outcome for one class: the fit, its parameters' relative uncertainty, errors, number of unknowns."""

    fit: MemoryFit
    uncertainty: dict[str, float]
    accuracy: list[Accuracy]
    unknowns: int


def fit_memory(samples: Sequence[KernelSample], memory_class: str, base: Device) -> FittedMemory | None:
    """Fits one class of memory-bound kernels; None if there are too few.

    Args:
        samples: kernels of that class.
        memory_class: theirs.
        base: device with the datasheet's bandwidth.
    """
    if len(samples) < _FEWEST:
        return None
    nbytes = np.array([s.kernel.nbytes for s in samples if isinstance(s.kernel, MemoryBound)], dtype=float)
    measured_s = np.array([s.time_s for s in samples])
    ideal_s = nbytes / base.memory_bytes_per_s

    def predicted(values: Mapping[str, float], ideal: FloatArray) -> FloatArray:
        return values["overhead_s"] + ideal / values["bandwidth_efficiency"]

    def learn(mask: Mask) -> Solution:
        return solve(PRIORS, lambda values: predicted(values, ideal_s[mask]), measured_s[mask])

    full = learn(np.ones(measured_s.size, dtype=bool))

    def times(mask: Mask) -> FloatArray:
        return predicted((full if mask.all() else learn(mask)).values, ideal_s)

    parts = {"large": nbytes >= _CACHED_BYTES, "all": np.ones(measured_s.size, dtype=bool)}
    splits = kernel_splits(nbytes, [s.stack for s in samples], nbytes[:, None])
    rows = assess(f"memory_bound.{memory_class}", times, measured_s, parts, splits)
    return FittedMemory(MemoryFit(**rounded(full.values)), full.uncertainty, rows, len(PRIORS))
