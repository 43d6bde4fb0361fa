"""Two jobs side by side: where the difference of their step times comes from, and which is faster how surely."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from simpar.job import Job
from simpar.result import Result
from simpar.sensitivity.attribution import path_time
from simpar.sensitivity.step import Dependence
from simpar.simulation import simulate
from simpar.uncertainty import samples
from simpar.units import format_time

SAMPLES = 20_000
"""Machines drawn for a probability; its standard error is at most 0.4 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of work on the critical paths of both jobs, in whole nanoseconds."""

    name: str
    a_ns: int
    b_ns: int

    @property
    def difference_ns(self) -> int:
        """B less A."""
        return self.b_ns - self.a_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two results side by side.

    Attributes:
        a: the one.
        b: the other.
        parts: by kind of work; their differences add up to that of the step times exactly, in nanoseconds.
        probability_a_faster: that A takes less time per token (per sample for a module), given the model's uncertainty
            (:mod:`simpar.uncertainty`), where both run on the same draw of what they share; 0.5 for equal jobs.
        ratio_interval: time per token of B over that of A: what 80 % of the draws lie between.
    """

    a: Result
    b: Result
    parts: tuple[Part, ...]
    probability_a_faster: float
    ratio_interval: tuple[float, float]

    @property
    def difference_ns(self) -> int:
        """Step time of B less that of A."""
        return self.b.trace.step_ns - self.a.trace.step_ns

    @property
    def same_batch(self) -> bool:
        """Whether a step of both is the same work."""
        return _tokens(self.a) == _tokens(self.b)

    @property
    def words(self) -> tuple[str, ...]:
        """The answer in sentences."""
        times = f"A takes {format_time(self.a.step_time_s)} a step, B {format_time(self.b.step_time_s)}"
        slower = "longer" if self.difference_ns > 0 else "shorter"
        apart = f"{format_time(abs(self.difference_ns) * 1e-9)} {slower}" if self.difference_ns else "equally long"
        said = [f"{times}: {apart}."]
        moved = sorted((p for p in self.parts if p.difference_ns), key=lambda p: -abs(p.difference_ns))[:3]
        if moved:
            said.append(
                "Most of it: "
                + ", ".join(
                    f"{p.name} {'+' if p.difference_ns > 0 else '−'}{format_time(abs(p.difference_ns) * 1e-9)}"
                    for p in moved
                )
                + "."
            )
        if not self.same_batch:
            said.append(
                f"A step of A is {_tokens(self.a):,} {self.a.unit}, one of B {_tokens(self.b):,}; "
                f"which is faster counts per {self.a.unit.removesuffix('s')}."
            )
        low, high = self.ratio_interval
        if low == high == 1.0:  # on every draw of what both share
            return tuple(said)
        said.append(
            f"A is the faster one with a probability of {self.probability_a_faster:.0%}; per "
            f"{self.a.unit.removesuffix('s')} B takes {low:.3g} to {high:.3g} times as long (80%)."
        )
        return tuple(said)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, times in seconds."""
        return {
            "a": {"title": self.a.title, "step_time_s": self.a.step_time_s, "tokens_per_s": self.a.tokens_per_s},
            "b": {"title": self.b.title, "step_time_s": self.b.step_time_s, "tokens_per_s": self.b.tokens_per_s},
            "difference_s": self.difference_ns * 1e-9,
            "parts": [
                {
                    "name": p.name,
                    "a_s": p.a_ns * 1e-9,
                    "b_s": p.b_ns * 1e-9,
                    "difference_s": p.difference_ns * 1e-9,
                }
                for p in self.parts
            ],
            "probability_a_faster": self.probability_a_faster,
            "ratio_interval": list(self.ratio_interval),
            "same_batch": self.same_batch,
            "words": list(self.words),
        }


def compare(
    a: "Job | dict[str, Any] | Result", b: "Job | dict[str, Any] | Result", *, allow_oom: bool = False, seed: int = 0
) -> Comparison:
    """Lays two jobs side by side.

    Args:
        a: a job, its fields, or a result of it.
        b: likewise.
        allow_oom: compare also jobs that do not fit their devices.
        seed: of the draws behind the probability.

    Raises:
        SimparError: a job cannot be simulated; see :func:`simpar.simulation.simulate`.

    >>> job = dict(model="gpt2", cluster="h100-sxm:8")
    >>> found = compare(job, {**job, "plan": dict(zero=1)})
    >>> sum(part.difference_ns for part in found.parts) == found.difference_ns
    True
    """
    one, other = (job if isinstance(job, Result) else simulate(job, allow_oom=allow_oom) for job in (a, b))
    paths = [path_time(Dependence(result)) for result in (one, other)]
    names = dict.fromkeys(name for path in paths for name in path)
    parts = [Part(name=name, a_ns=paths[0].get(name, 0), b_ns=paths[1].get(name, 0)) for name in names]
    drawn = [samples(result, SAMPLES, seed) / _tokens(result) for result in (one, other)]
    faster, equal = np.mean(drawn[0] < drawn[1]), np.mean(drawn[0] == drawn[1])
    low, high = np.quantile(drawn[1] / drawn[0], (0.1, 0.9))
    return Comparison(
        a=one,
        b=other,
        parts=tuple(sorted(parts, key=lambda part: -abs(part.difference_ns))),
        probability_a_faster=float(faster + equal / 2),
        ratio_interval=(float(low), float(high)),
    )


def _tokens(result: Result) -> int:
    return result.layout.global_batch * result.layout.seq_len
