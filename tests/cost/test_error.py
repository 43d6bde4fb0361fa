"""Statistics of errors and widths of log-normal factors, against the quantiles of a factor that is written out."""

from statistics import NormalDist

import numpy as np
import pytest

from simpar.cost.error import MEDIAN, P90, error_at, log_sd, widened

Z = np.array([NormalDist().inv_cdf((i + 0.5) / 20_000) for i in range(20_000)])  # each as probable as any other


def quantiles(sd: float) -> tuple[float, float]:
    """Median and 90th percentile of |predicted/measured - 1| for a factor of that width."""
    error = np.abs(np.exp(sd * Z) - 1)
    return float(np.quantile(error, 0.5)), float(np.quantile(error, 0.9))


@pytest.mark.parametrize("sd", [0.01, 0.15, 0.5, 0.91, 2.0])
def test_a_factor_has_the_errors_that_it_is_said_to_have(sd: float) -> None:
    median, p90 = quantiles(sd)
    assert error_at(sd, MEDIAN) == pytest.approx(median, rel=1e-3)
    assert error_at(sd, P90) == pytest.approx(p90, rel=1e-3)
    assert log_sd(median) == pytest.approx(sd, rel=2e-3)
    assert log_sd(0.0, p90) == pytest.approx(sd, rel=2e-3)


def test_the_wider_of_two_statistics_counts() -> None:
    assert log_sd(0.1, 0.2) == log_sd(0.1)
    assert log_sd(0.1, 0.5) == log_sd(0.0, 0.5)
    assert log_sd(0.0) == 0.0


def test_small_errors_are_those_of_a_normal_distribution_and_large_ones_are_not() -> None:
    assert log_sd(0.001) == pytest.approx(0.001 / 0.67449, rel=1e-4)
    assert log_sd(0.0, 2.6) == pytest.approx(1.0, rel=1e-2)  # and not 2.6 / 1.645


def test_a_median_of_everything_is_wide_and_finite() -> None:
    # an error of -100 % at most on one side: no factor is off by more than that in half of all cases
    assert log_sd(0.9) < log_sd(5.0) < 10.0


def test_an_independent_factor_on_top_adds_up_in_squares() -> None:
    rng = np.random.default_rng(5)
    both = np.abs(np.exp(0.4 * rng.standard_normal(400_000) + 0.3 * rng.standard_normal(400_000)) - 1)
    assert widened(quantiles(0.4)[0], MEDIAN, 0.3) == pytest.approx(np.quantile(both, 0.5), rel=0.01)
    assert widened(quantiles(0.4)[1], P90, 0.3) == pytest.approx(np.quantile(both, 0.9), rel=0.01)
    assert widened(0.2, P90, 0.0) == pytest.approx(0.2)
