"""Fits the products of several experts in one launch: by how much they are faster or slower than a plain product."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from calibrate.fit.accuracy import accuracy
from calibrate.fit.robust import FloatArray, Parameter, solve
from calibrate.samples import KernelSample
from simpar.cost.kernel import kernel_s
from simpar.hardware.device import Device
from simpar.hardware.profile import Accuracy

PRIORS = (Parameter("grouped_gemm_speed", 1.0, 0.5, 0.01, 10.0),)


class FittedGrouped(NamedTuple):
    """Outcome: the speed relative to a plain product, its relative uncertainty, errors by dtype."""

    speed: float
    uncertainty: dict[str, float]
    accuracy: list[Accuracy]


def fit_grouped(classes: Mapping[str, Sequence[KernelSample]], device: Device) -> FittedGrouped | None:
    """Fits all dtypes together; None without samples.

    Args:
        classes: grouped products by class, ``grouped_gemm.bf16``.
        device: with its plain products fitted.
    """
    samples = [sample for found in classes.values() for sample in found]
    if not samples:
        return None
    measured_s = np.array([sample.time_s for sample in samples])

    def predicted(values: Mapping[str, float]) -> FloatArray:
        changed = device.replace(grouped_gemm_speed=values["grouped_gemm_speed"])
        return np.array([kernel_s(sample.kernel, changed) for sample in samples])

    found = solve(PRIORS, predicted, measured_s)
    speed = float(f"{found.values['grouped_gemm_speed']:.4g}")
    fitted_s = predicted({"grouped_gemm_speed": speed})
    of = np.concatenate([np.full(len(part), what) for what, part in classes.items()])
    rows = []
    for what in classes:
        regions = {"all": np.ones(measured_s.size, dtype=bool)}
        rows += accuracy(what, "fitted", fitted_s, measured_s, regions=regions, among=of == what)
    return FittedGrouped(speed, found.uncertainty, rows)
