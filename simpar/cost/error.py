"""Errors of costs: as people state them, and as the log-normal factor with which they are reckoned.

Accuracy is stated as statistics of e = |predicted/measured - 1|: its median and its 90th percentile. Uncertainty is
reckoned with a factor exp(σz), z standard normal, since times are positive and err by factors. For small errors one is
the other times a number (a median of 0.1 is σ = 0.149), for large ones not: with σ = 1 the median of e is 0.6 and its
90th percentile 2.6. Both ways follow from

    P(e <= q) = Φ(log(1 + q)/σ) - Φ(log(1 - q)/σ), the second term 0 from q = 1 on.
"""

from collections.abc import Callable
from functools import lru_cache
from math import exp, inf, log, log1p
from statistics import NormalDist

MEDIAN, P90 = 0.5, 0.9
"""Shares of errors that lie below the two statistics."""

_LARGEST_MEDIAN = 0.99  # half of a log-normal factor's values never lie further off, however wide it is
_STEPS = 100  # halvings of an interval
_WIDEST = 50.0


def log_sd(median: float, p90: float = 0.0) -> float:
    """Standard deviation of log(predicted/measured): the wider one that the two statistics of e imply.

    >>> round(log_sd(0.1, 0.2), 3), round(log_sd(0.1, 0.5), 3)
    (0.149, 0.301)
    """
    return max(_log_sd_at(median, MEDIAN), _log_sd_at(p90, P90))


def widened(error: float, share: float, sd: float) -> float:
    """The statistic of e below which ``share`` lies, with an independent factor of that log sd on top."""
    return error_at((_log_sd_at(error, share) ** 2 + sd**2) ** 0.5, share)


@lru_cache(maxsize=1024)
def error_at(sd: float, share: float) -> float:
    """The e below which ``share`` of a log-normal factor's errors lie.

    >>> [round(error_at(1.0, share), 2) for share in (MEDIAN, P90)]
    [0.6, 2.6]
    """
    if not sd:
        return 0.0
    return _where(lambda q: _share(q, sd) >= share, 0.0, exp(sd * NormalDist().inv_cdf((1 + share) / 2)))


@lru_cache(maxsize=1024)
def _log_sd_at(error: float, share: float) -> float:
    if share == MEDIAN:
        error = min(error, _LARGEST_MEDIAN)
    if not error:
        return 0.0
    return _where(lambda sd: _share(error, sd) <= share, 0.0, _WIDEST)


def _share(error: float, sd: float) -> float:
    """P(e <= error)."""
    normal = NormalDist()
    below = log(1 - error) if error < 1 else -inf
    return normal.cdf(log1p(error) / sd) - (normal.cdf(below / sd) if below > -inf else 0.0)


def _where(holds: Callable[[float], bool], low: float, high: float) -> float:
    """Where a condition begins to hold between the two ends."""
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return high
