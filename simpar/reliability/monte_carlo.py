"""One step under many draws of its noise: the distribution of step times over seeds."""

import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from simpar.errors import JobError
from simpar.job import Job
from simpar.search.workers import WorkerLostError, Workers
from simpar.simulation import simulate

_QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Step times over seeds.

    Attributes:
        job: what was simulated.
        seeds: of the noise, in order.
        step_times_s: seconds of the step of each seed.
        quiet_s: seconds of the step without jitter and without a late loader.
    """

    job: Job
    seeds: tuple[int, ...]
    step_times_s: npt.NDArray[np.float64]
    quiet_s: float

    @property
    def mean_s(self) -> float:
        """Mean step time: what a run of many steps takes for each."""
        return float(self.step_times_s.mean())

    @property
    def std_s(self) -> float:
        """Standard deviation of the step time, of this sample."""
        return float(self.step_times_s.std(ddof=1)) if len(self.seeds) > 1 else 0.0

    @property
    def slowdown(self) -> float:
        """Mean step time over that without noise."""
        return self.mean_s / self.quiet_s

    def quantile(self, share: float) -> float:
        """Seconds that this share of the steps (0 to 1) takes at most."""
        return float(np.quantile(self.step_times_s, share))

    def quantiles(self, shares: Sequence[float] = _QUANTILES) -> dict[float, float]:
        """Seconds by share of the steps that take at most so long."""
        return {share: self.quantile(share) for share in shares}

    def records(self) -> list[dict[str, Any]]:
        """One record per seed."""
        times = self.step_times_s.tolist()
        return [{"seed": seed, "step_time_s": time} for seed, time in zip(self.seeds, times, strict=True)]

    def __repr__(self) -> str:
        shown = ", ".join(f"{share:.0%} {time:.4g} s" for share, time in self.quantiles().items())
        return f"<Distribution of {len(self.seeds):,} steps: mean {self.mean_s:.4g} s, {shown}>"


def monte_carlo(
    job: Job | Mapping[str, Any],
    n: int = 100,
    seed: int = 0,
    *,
    allow_oom: bool = False,
    executor: Executor | None = None,
    workers: int | None = None,
) -> Distribution:
    """Simulates one step ``n`` times, each with its own draw of jitter and of late data.

    Args:
        job: the job, or its fields; its ``faults`` say what is random.
        n: steps.
        seed: the first; the others follow it, so that equal calls give equal distributions.
        allow_oom: simulate also a job that does not fit its devices.
        executor: where to run; left open, in processes of this machine.
        workers: processes (left open, one per core; 1 works in this one), or tasks that the executor gets at a time.

    Raises:
        JobError: nothing in the job is random, or ``n`` is below 1.

    >>> job = {"model": "gpt2", "cluster": "h100-sxm:4", "faults": {"jitter": {"spread": 0.05}}}
    >>> found = monte_carlo(job, n=8, workers=1)
    >>> found.quantile(0.05) <= found.mean_s <= found.quantile(0.95)
    True
    """
    job = Job.model_validate(job)
    if n < 1:
        raise JobError(f"n={n} steps have no distribution; give 1 or more")
    if not job.faults.is_random:
        raise JobError(
            "faults: nothing is random, so every seed gives the same step; set jitter.spread, or a loader with a "
            "spread or a probability below 1"
        )
    token = pickle.dumps((job, allow_oom))
    times: dict[int, float] = {}
    with Workers(executor, workers) as pool:
        for (_, number), answer in pool.run(step_of_seed, ((token, seed + i) for i in range(n))):
            if isinstance(answer, WorkerLostError):
                raise answer
            times[number] = answer
    seeds = tuple(sorted(times))
    quiet = job.replace(faults=job.faults.replace(jitter={}, loader={}))
    quiet_s = simulate(quiet, allow_oom=allow_oom).step_time_s
    return Distribution(job, seeds, np.array([times[s] for s in seeds]), quiet_s)


@lru_cache(maxsize=4)  # a worker answers for the same few jobs again and again
def _opened(token: bytes) -> tuple[Job, bool]:
    opened: tuple[Job, bool] = pickle.loads(token)
    return opened


def step_of_seed(task: tuple[bytes, int]) -> float:
    """Seconds of the step of one seed."""
    token, seed = task
    job, allow_oom = _opened(token)
    return simulate(job.replace(faults=job.faults.replace(seed=seed)), allow_oom=allow_oom).step_time_s
