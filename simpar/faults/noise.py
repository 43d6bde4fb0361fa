"""Random draws of faults: pure functions of a seed and of who draws, so that no order of asking changes them."""

import math

import numpy as np
import numpy.typing as npt

Draws = npt.NDArray[np.float64]

JITTER, LOADER = 0, 1
"""What is drawn; each has numbers of its own."""


def lognormal(mean: float, spread: float, count: int, *, key: tuple[int, ...]) -> Draws:
    """``count`` log-normal numbers with this mean, and ``spread`` as standard deviation over mean.

    With parameters mu and sigma, a log-normal variable has the mean exp(mu + sigma² / 2) and the coefficient of
    variation sqrt(exp(sigma²) - 1).

    Args:
        mean: of the numbers.
        spread: 0 gives the mean each time.
        count: how many.
        key: seed, what is drawn and who draws; equal keys give equal numbers.
    """
    if spread == 0:
        return np.full(count, mean)
    variance = math.log1p(spread**2)
    normal = np.random.default_rng(key).standard_normal(count)
    return mean * np.exp(math.sqrt(variance) * normal - variance / 2)


def happens(probability: float, count: int, *, key: tuple[int, ...]) -> npt.NDArray[np.bool_]:
    """For each of ``count`` times whether something of this probability happens."""
    return np.random.default_rng((*key, 1)).random(count) < probability
