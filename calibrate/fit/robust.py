"""The estimator behind every fit: soft-L1 residuals of log time, log-normal priors, covariance at the optimum."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

FloatArray: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Predict: TypeAlias = Callable[[Mapping[str, float]], FloatArray]

_STEP = 1e-4  # of a logarithm, for central differences of smooth functions


@dataclass(frozen=True, slots=True)
class Parameter:
    """A positive unknown with what is believed of it before anything is measured.

    Attributes:
        name: key in the values.
        guess: median of the prior.
        spread: standard deviation of the prior's logarithm.
        low: least value.
        high: largest value.
    """

    name: str
    guess: float
    spread: float
    low: float = 1e-12
    high: float = 1e15


@dataclass(frozen=True, slots=True)
class Solution:
    """Fitted values and one standard deviation of each one's logarithm, that is, its relative uncertainty."""

    values: dict[str, float]
    uncertainty: dict[str, float]


def solve(
    parameters: Sequence[Parameter],
    predict: Predict,
    measured_s: FloatArray,
    *,
    scale: float = 0.05,
    weights: FloatArray | None = None,
    start: Mapping[str, float] | None = None,
) -> Solution:
    """The most probable parameters: least sum of ρ(log(predicted/measured)/scale) and squared prior deviations.

    ρ(f) = 2(√(1+f²) - 1) is quadratic within ``scale`` and linear beyond, so that outliers pull little. The covariance
    is the sandwich A⁻¹(B + P)A⁻¹ with A the Hessian (Gauss-Newton), B the summed squared scores and P the prior's
    precision (Huber 1967). Without data it is the prior's; where data abound, it does not depend on how well ``scale``
    guessed their noise.

    Args:
        parameters: the unknowns.
        predict: seconds of all measurements from values of the unknowns.
        measured_s: shape (measurements,), seconds, positive.
        scale: relative deviation from which on a measurement counts as an outlier.
        weights: shape (measurements,); 1 each by default.
        start: where to start instead of the prior's medians; it does not change what is sought.
    """
    names = [parameter.name for parameter in parameters]
    low, high = (np.log([getattr(p, end) for p in parameters]) for end in ("low", "high"))
    guess = np.log([p.guess for p in parameters])
    precision = np.array([p.spread for p in parameters]) ** -1.0
    log_measured = np.log(measured_s)
    weight = np.ones_like(measured_s) if weights is None else weights

    def residuals(x: FloatArray) -> FloatArray:
        return (np.log(predict(dict(zip(names, np.exp(x).tolist(), strict=True)))) - log_measured) / scale

    def with_prior(x: FloatArray) -> FloatArray:
        return np.concatenate((residuals(x), (x - guess) * precision))

    def loss(z: FloatArray) -> FloatArray:
        robust, prior = z[: weight.size], z[weight.size :]
        root = np.sqrt(1.0 + robust)
        return np.array(
            (
                np.concatenate((2.0 * weight * (root - 1.0), prior)),
                np.concatenate((weight / root, np.ones_like(prior))),
                np.concatenate((-0.5 * weight / root**3, np.zeros_like(prior))),
            )
        )

    begin = guess if start is None else np.log([start.get(p.name, p.guess) for p in parameters])
    margin = 1e-9 * (high - low)
    begin = np.clip(begin, low + margin, high - margin)
    # scipy's stubs want a protocol class where any callable does.
    found = least_squares(with_prior, begin, bounds=(low, high), loss=loss, xtol=1e-8, ftol=1e-10)  # type: ignore[arg-type]
    x: FloatArray = found.x
    step = np.diag(np.full(x.size, _STEP))
    slope = np.stack([(residuals(x + h) - residuals(x - h)) / (2.0 * _STEP) for h in step], axis=1)
    f = residuals(x)
    curve = weight * (1.0 + f * f) ** -1.5
    score = weight * f / np.sqrt(1.0 + f * f)
    prior = np.diag(precision**2)
    inverse = np.linalg.inv(slope.T @ (curve[:, None] * slope) + prior)
    covariance = inverse @ (slope.T @ ((score * score)[:, None] * slope) + prior) @ inverse
    values = dict(zip(names, np.exp(x).tolist(), strict=True))
    return Solution(values, dict(zip(names, np.sqrt(np.diag(covariance)).tolist(), strict=True)))
