"""The range in which a step time lies, as a search and a sweep state it."""

from simpar.result import Result

LEVEL = 0.8
"""Probability that the step time lies within."""


def step_time_interval(result: Result) -> tuple[float, float]:
    """Least and most seconds of a step at :data:`LEVEL`, by the errors that the descriptions state of themselves."""
    return result.step_time_interval(LEVEL)
