"""A run of days on the clock: it trains, writes checkpoints, fails, restarts, and trains again what was lost.

Two processes of one SimPy environment: the job, and failures that interrupt whatever the job does. Failures come at
random with a constant rate, in restarts too. What the step itself costs is :func:`simpar.simulate`'s; here is only how
much of the time is spent on steps that count.
"""

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import simpy

from simpar.errors import JobError
from simpar.reliability.failures import Failures
from simpar.reliability.optimum import daly_interval_s, expected_goodput, young_interval_s

_RUNS = 8
_SPAN = 4.0  # intervals from a quarter of Daly's to four times as long
_POINTS = 17
_MOST_FAILURES = 1_000_000  # of all runs with one interval; some minutes
_BATCH = 1024  # gaps between failures that are drawn at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What became of the wall time of one run.

    Attributes:
        wall_s: all of it; the parts below add up to it.
        useful_s: training that counts: it is in a checkpoint, or was done since the last one by the end.
        lost_s: training that a failure undid, and which was done again.
        checkpoint_s: writing checkpoints, those that a failure broke off included.
        restart_s: restarting, likewise.
        failures: how many.
        checkpoints: how many were written.
    """

    wall_s: float
    useful_s: float
    lost_s: float
    checkpoint_s: float
    restart_s: float
    failures: int
    checkpoints: int

    @property
    def goodput(self) -> float:
        """Share of the wall time that trains for good (0 to 1)."""
        return self.useful_s / self.wall_s


def simulate_run(failures: Failures, interval_s: float, *, seed: int = 0) -> Run:
    """Simulates one run.

    Args:
        failures: of the cluster, and what surviving them costs.
        interval_s: training between two checkpoints.
        seed: of the failures; equal seeds give the same failures whatever the interval is.

    Raises:
        JobError: the interval has no meaning.

    >>> calm = Failures(gpus=8, mtbf_gpu_h=1e12, checkpoint_s=10, restart_s=600, days=1)
    >>> round(simulate_run(calm, 90.0).goodput, 3)
    0.9
    """
    failures.check_interval(interval_s)
    environment = simpy.Environment()
    training = _Training(environment, failures, interval_s)
    job = environment.process(training.run())
    environment.process(_fail(environment, job, failures.mtbf_s, seed))
    environment.run(until=failures.wall_s)
    return training.summary()


def _fail(environment: simpy.Environment, job: simpy.Process, mtbf_s: float, seed: int) -> Generator[Any, Any, None]:
    """Interrupts the job at random."""
    random = np.random.default_rng(seed)
    while True:
        for gap in random.exponential(mtbf_s, _BATCH).tolist():
            yield environment.timeout(gap)
            job.interrupt()


class _Training:
    """A job that trains, with the books of its time."""

    def __init__(self, environment: simpy.Environment, failures: Failures, interval_s: float) -> None:
        self._environment = environment
        self._failures = failures
        self._interval_s = interval_s
        self._trained_s = self._lost_s = self._saving_s = self._restarting_s = 0.0
        self._failed = self._written = 0
        self._is_up, self._since = True, 0.0

    def run(self) -> Generator[Any, Any, None]:
        """Trains until something fails, restarts, and trains on; a failure during a restart begins it anew."""
        while True:
            try:
                if not self._is_up:
                    yield self._environment.timeout(self._failures.restart_s)
                    self._book()
                    self._is_up = True
                yield self._environment.event()  # nobody triggers it: only a failure ends training
            except simpy.Interrupt:
                self._lost_s += self._book()
                self._failed += 1
                self._is_up = False

    def _book(self) -> float:
        """Books the time since the job came up or went down; returns how much of it is training not yet saved.

        Between failures nothing is random, so all checkpoints of such a span are counted at its end.
        """
        spent = self._environment.now - self._since
        self._since += spent
        if not self._is_up:
            self._restarting_s += spent
            return 0.0
        cycle_s = self._interval_s + self._failures.checkpoint_s
        written = int(spent // cycle_s)
        rest_s = max(spent - written * cycle_s, 0.0)
        unsaved_s = min(rest_s, self._interval_s)
        trained_s = written * self._interval_s + unsaved_s
        self._trained_s += trained_s
        self._saving_s += spent - trained_s
        self._written += written
        return unsaved_s

    def summary(self) -> Run:
        """The books when the wall time is over."""
        self._book()
        return Run(
            wall_s=self._failures.wall_s,
            useful_s=self._trained_s - self._lost_s,
            lost_s=self._lost_s,
            checkpoint_s=self._saving_s,
            restart_s=self._restarting_s,
            failures=self._failed,
            checkpoints=self._written,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Goodput with one interval between checkpoints.

    Attributes:
        interval_s: training between two checkpoints.
        goodput: mean of the simulated runs (0 to 1).
        low: the lowest of them.
        high: the highest of them.
        expected: by Daly's closed form.
    """

    interval_s: float
    goodput: float
    low: float
    high: float
    expected: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """A run with one interval, and what other intervals would have given.

    Attributes:
        failures: what was simulated.
        interval_s: training between two checkpoints.
        runs: the simulated runs with it, one per seed.
        points: goodput by interval, shortest first.
        daly_s: the best interval by Daly's closed form.
        young_s: the same by Young's first approximation.
    """

    failures: Failures
    interval_s: float
    runs: tuple[Run, ...]
    points: tuple[Point, ...]
    daly_s: float
    young_s: float

    @property
    def goodput(self) -> float:
        """Mean share of the wall time that trains for good (0 to 1)."""
        return sum(run.goodput for run in self.runs) / len(self.runs)

    @property
    def expected(self) -> float:
        """The same by Daly's closed form."""
        return _expected(self.failures, self.interval_s)

    @property
    def best(self) -> Point:
        """The interval with the highest simulated goodput."""
        return max(self.points, key=lambda point: point.goodput)

    def shares(self) -> dict[str, float]:
        """Mean shares of the wall time by what it was spent on; they add up to 1."""
        parts = {"useful": "useful_s", "done again": "lost_s", "checkpoints": "checkpoint_s", "restarts": "restart_s"}
        wall_s = self.failures.wall_s * len(self.runs)
        return {name: sum(getattr(run, field) for run in self.runs) / wall_s for name, field in parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values; times in seconds."""
        return {
            "mtbf_s": self.failures.mtbf_s,
            "days": self.failures.days,
            "interval_s": self.interval_s,
            "goodput": self.goodput,
            "goodput_daly": self.expected,
            "shares": self.shares(),
            "runs": [{**asdict(run), "goodput": run.goodput} for run in self.runs],
            "best_interval_s": self.best.interval_s,
            "best_goodput": self.best.goodput,
            "daly_interval_s": self.daly_s,
            "young_interval_s": self.young_s,
            "daly_best_goodput": _expected(self.failures, self.daly_s),
            "by_interval": [asdict(point) for point in self.points],
        }


def goodput(
    failures: Failures, *, interval_s: float | None = None, step_s: float = 0.0, seed: int = 0, runs: int = _RUNS
) -> Goodput:
    """Simulates runs of days with one interval between checkpoints, and with others around the best.

    Args:
        failures: of the cluster, and what surviving them costs.
        interval_s: training between two checkpoints; left open, Daly's optimum.
        step_s: seconds of a step; checkpoints are written between steps, so intervals are rounded to whole ones.
        seed: of the first run; the others have those that follow, and all intervals the same failures.
        runs: how many runs of each interval.

    Raises:
        JobError: the interval has no meaning, or there are no runs.
    """
    if runs < 1:
        raise JobError(f"runs={runs} leaves nothing to simulate; give 1 or more")
    if runs * max(failures.wall_s / failures.mtbf_s, 1.0) > _MOST_FAILURES:
        raise JobError(
            f"runs={runs:,} of {failures.days:g} days have more than the {_MOST_FAILURES:,} failures that can be "
            "simulated for each interval; give fewer runs or days"
        )
    costs = {"mtbf_s": failures.mtbf_s, "checkpoint_s": failures.checkpoint_s}
    # where checkpoints cost nothing, one after each step is best
    shortest = step_s or failures.mtbf_s / 1000
    daly_s = max(daly_interval_s(**costs), shortest)
    if interval_s is not None:
        failures.check_interval(interval_s)
    chosen_s = _whole_steps(daly_s if interval_s is None else interval_s, step_s)
    grid = {_whole_steps(daly_s * _SPAN ** (2 * i / (_POINTS - 1) - 1), step_s) for i in range(_POINTS)}
    seeds = range(seed, seed + runs)
    made = {x: [simulate_run(failures, x, seed=each) for each in seeds] for x in sorted({*grid, chosen_s})}
    return Goodput(
        failures=failures,
        interval_s=chosen_s,
        runs=tuple(made[chosen_s]),
        points=tuple(_point(failures, x, simulated) for x, simulated in made.items()),
        daly_s=daly_s,
        young_s=young_interval_s(**costs),
    )


def _point(failures: Failures, interval_s: float, runs: Sequence[Run]) -> Point:
    found = [run.goodput for run in runs]
    return Point(
        interval_s=interval_s,
        goodput=sum(found) / len(found),
        low=min(found),
        high=max(found),
        expected=_expected(failures, interval_s),
    )


def _expected(failures: Failures, interval_s: float) -> float:
    return expected_goodput(
        mtbf_s=failures.mtbf_s,
        checkpoint_s=failures.checkpoint_s,
        restart_s=failures.restart_s,
        interval_s=interval_s,
    )


def _whole_steps(interval_s: float, step_s: float) -> float:
    return max(round(interval_s / step_s), 1) * step_s if step_s else interval_s
