"""Many draws of one step: equal wherever they run, and told by their quantiles."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import simpar

JOB: dict[str, Any] = {
    "model": "gpt2",
    "cluster": "h100-sxm:2",
    "plan": {"seq_len": 512, "micro_batch": 8},
    "faults": {"jitter": {"spread": 0.1}, "slow_gpus": {1: 0.9}},
}


def test_the_same_steps_in_this_process_in_others_and_in_threads():
    here = simpar.monte_carlo(JOB, n=4, seed=7, workers=1)
    there = simpar.monte_carlo(JOB, n=4, seed=7, workers=2)
    with ThreadPoolExecutor(2) as executor:
        threads = simpar.monte_carlo(JOB, n=4, seed=7, executor=executor)
    assert here.step_times_s.tolist() == there.step_times_s.tolist() == threads.step_times_s.tolist()
    assert here.seeds == (7, 8, 9, 10)


def test_each_step_is_that_of_its_seed():
    found = simpar.monte_carlo(JOB, n=3, seed=5, workers=1)
    alone = simpar.simulate({**JOB, "faults": {**JOB["faults"], "seed": 6}})
    assert found.records()[1] == {"seed": 6, "step_time_s": alone.step_time_s}
    quiet = simpar.simulate({**JOB, "faults": {"slow_gpus": {1: 0.9}}})
    assert found.quiet_s == quiet.step_time_s


def test_quantiles_are_those_of_the_sample():
    found = simpar.monte_carlo(JOB, n=9, workers=1)
    times = np.sort(found.step_times_s)
    assert found.quantile(0.0) == times[0]
    assert found.quantiles() == {0.05: found.quantile(0.05), 0.5: times[4], 0.95: found.quantile(0.95)}
    assert found.mean_s == pytest.approx(times.mean())
    assert found.std_s == pytest.approx(times.std(ddof=1))
    assert "Distribution of 9 steps" in repr(found)


def test_what_has_no_distribution_is_refused():
    with pytest.raises(simpar.JobError, match="n=0 steps have no distribution"):
        simpar.monte_carlo(JOB, n=0)
    with pytest.raises(simpar.JobError, match="faults: nothing is random"):
        simpar.monte_carlo({**JOB, "faults": {"slow_gpus": {0: 0.5}}}, n=2)
