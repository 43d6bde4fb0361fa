"""Runs of days against Daly's closed forms, against a simulation event by event, and against a published run."""

import math
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

import simpar
from simpar.reliability.failures import Failures
from simpar.reliability.goodput import Run, goodput, simulate_run
from simpar.reliability.optimum import daly_interval_s, expected_goodput, young_interval_s

HOUR, DAY = 3600.0, 86400.0
# The Llama 3 Herd of Models (arXiv:2407.21783), section 3.3.4: 466 interruptions in 54 days of pre-training on 16,384
# H100, 419 of them unexpected, with more than 90 % effective training time
LLAMA3_DAYS, LLAMA3_GPUS, LLAMA3_UNEXPECTED = 54, 16_384, 419
LLAMA3_MTBF_GPU_H = LLAMA3_DAYS * 24 * LLAMA3_GPUS / LLAMA3_UNEXPECTED


def failures(**changes: Any) -> Failures:
    fields = {"gpus": 1000, "mtbf_gpu_h": 10_000.0, "checkpoint_s": 60.0, "restart_s": 600.0, "days": 100.0}
    return Failures(**{**fields, **changes})


# ---- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint_s", [1.0, 60.0, 600.0])
@pytest.mark.parametrize("mtbf_s", [HOUR, DAY, 30 * DAY])
def test_daly_s_interval_is_near_the_minimum_of_his_run_time(mtbf_s: float, checkpoint_s: float):
    def lost(log_interval: float) -> float:
        return -expected_goodput(
            mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=0.0, interval_s=math.exp(log_interval)
        )

    best = minimize_scalar(lost, bounds=(math.log(1e-3), math.log(100 * mtbf_s)), method="bounded")
    daly = daly_interval_s(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s)
    # he states 0.2 % of the run time at most where checkpoints take less than half of the time between failures
    assert lost(math.log(daly)) == pytest.approx(best.fun, rel=2e-3)
    assert daly == pytest.approx(math.exp(best.x), rel=0.02)


def test_young_s_interval_is_daly_s_where_checkpoints_are_short():
    exact = {"mtbf_s": 30 * DAY, "checkpoint_s": 1.0}
    assert daly_interval_s(**exact) == pytest.approx(young_interval_s(**exact), rel=1e-3)
    assert young_interval_s(mtbf_s=7200.0, checkpoint_s=100.0) == 1200.0
    assert daly_interval_s(mtbf_s=10.0, checkpoint_s=20.0) == 10.0


def test_limits_of_the_expected_goodput():
    calm = {"mtbf_s": math.inf, "checkpoint_s": 10.0, "restart_s": 600.0, "interval_s": 90.0}
    assert expected_goodput(**calm) == 0.9
    assert expected_goodput(**{**calm, "mtbf_s": 1e15}) == pytest.approx(0.9)
    assert expected_goodput(**{**calm, "mtbf_s": 0.01}) == 0.0


def test_rates_of_parts_add_up():
    assert failures(gpus=512, mtbf_gpu_h=51_200.0).mtbf_s == pytest.approx(100 * HOUR)
    assert failures(gpus=512, mtbf_gpu_h=None, mtbf_node_h=6400.0).mtbf_s == pytest.approx(100 * HOUR)
    assert failures(gpus=512, mtbf_gpu_h=51_200.0, mtbf_node_h=6400.0).mtbf_s == pytest.approx(50 * HOUR)


@pytest.mark.parametrize(("gpus", "hours"), [(16_384, 1.8), (131_072, 0.23)])
def test_time_between_failures_as_projected_for_a_published_cluster(gpus: int, hours: float):
    # Kokolis et al., Revisiting Reliability in Large-Scale Machine Learning Research Clusters (arXiv:2410.21680): 6.5
    # failures per thousand node-days give 1.8 h for 16,384 GPUs and 0.23 h for 131,072
    per_node_h = 1000 / 6.5 * 24
    found = failures(gpus=gpus, gpus_per_node=8, mtbf_gpu_h=None, mtbf_node_h=per_node_h, days=1.0)
    assert found.mtbf_s / HOUR == pytest.approx(hours, rel=0.03)


# ---- simulation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval_s", [300.0, 1800.0, 7200.0])
@pytest.mark.parametrize(
    ("mtbf_h", "checkpoint_s", "restart_s"), [(10.0, 60.0, 600.0), (3.0, 5.0, 300.0), (2.0, 600.0, 3600.0)]
)
def test_simulated_goodput_is_the_expected_one(mtbf_h, checkpoint_s, restart_s, interval_s):
    what = failures(mtbf_gpu_h=1000 * mtbf_h, checkpoint_s=checkpoint_s, restart_s=restart_s, days=1000.0)
    run = simulate_run(what, interval_s)
    expected = expected_goodput(
        mtbf_s=what.mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s, interval_s=interval_s
    )
    # what a failure costs varies about as much as it is, and failures are independent
    assert run.goodput == pytest.approx(expected, abs=4 * (1 - expected) / math.sqrt(run.failures))


class ByEvents:
    """The same run with every checkpoint as an event of its own."""

    def __init__(self, what: Failures, interval_s: float, seed: int) -> None:
        self.env, self.what, self.interval_s = simpy.Environment(), what, interval_s
        self.saved = self.unsaved = self.began = 0.0
        self.training = False
        self.failed = self.written = 0
        job = self.env.process(self.run())
        self.env.process(self.fail(job, seed))
        self.env.run(until=what.wall_s)
        self.useful_s = self.saved + self.unsaved + (self.env.now - self.began if self.training else 0.0)

    def fail(self, job: simpy.Process, seed: int) -> Generator[Any, Any, None]:
        random = np.random.default_rng(seed)
        while True:
            for gap in random.exponential(self.what.mtbf_s, 1024).tolist():
                yield self.env.timeout(gap)
                job.interrupt()

    def run(self) -> Generator[Any, Any, None]:
        down = False
        while True:
            try:
                if down:
                    yield self.env.timeout(self.what.restart_s)
                    down = False
                while True:
                    self.training, self.began = True, self.env.now
                    yield self.env.timeout(self.interval_s)
                    self.training, self.unsaved = False, self.interval_s
                    yield self.env.timeout(self.what.checkpoint_s)
                    self.saved, self.unsaved = self.saved + self.unsaved, 0.0
                    self.written += 1
            except simpy.Interrupt:
                self.training, self.unsaved, down = False, 0.0, True
                self.failed += 1


@pytest.mark.parametrize("seed", range(3))
def test_a_run_is_what_it_is_event_by_event(seed: int):
    what = failures(days=10.0, mtbf_gpu_h=4000.0)
    run, slow = simulate_run(what, 1000.0, seed=seed), ByEvents(what, 1000.0, seed)
    assert run.useful_s == pytest.approx(slow.useful_s, rel=1e-9)
    assert (run.failures, run.checkpoints) == (slow.failed, slow.written)


@settings(max_examples=60, deadline=None)
@given(
    mtbf_h=st.floats(0.5, 1e4),
    checkpoint_s=st.floats(0.0, 1e4),
    restart_s=st.floats(0.0, 1e4),
    interval_s=st.floats(1.0, 1e6),
    seed=st.integers(0, 5),
)
def test_the_books_add_up(mtbf_h, checkpoint_s, restart_s, interval_s, seed):
    what = failures(gpus=1, mtbf_gpu_h=mtbf_h, checkpoint_s=checkpoint_s, restart_s=restart_s, days=20.0)
    run = simulate_run(what, interval_s, seed=seed)
    parts = (run.useful_s, run.lost_s, run.checkpoint_s, run.restart_s)
    assert min(parts) >= -1e-6
    assert sum(parts) == pytest.approx(run.wall_s)
    assert run == simulate_run(what, interval_s, seed=seed)


def test_without_failures_only_checkpoints_cost():
    run = simulate_run(failures(mtbf_gpu_h=1e15, days=1.0), 1380.0)
    assert run == Run(
        wall_s=DAY, useful_s=60 * 1380.0, lost_s=0.0, checkpoint_s=3600.0, restart_s=0.0, failures=0, checkpoints=60
    )


def test_the_best_interval_by_simulation_is_daly_s():
    found = goodput(failures(days=400.0, mtbf_gpu_h=5000.0), runs=2)
    assert found.best.interval_s == pytest.approx(found.daly_s, rel=0.5)
    # around the optimum little is at stake
    daly = expected_goodput(mtbf_s=found.failures.mtbf_s, checkpoint_s=60.0, restart_s=600.0, interval_s=found.daly_s)
    assert found.best.goodput == pytest.approx(daly, abs=0.01)
    assert [point.interval_s for point in found.points] == sorted(point.interval_s for point in found.points)
    assert sum(found.shares().values()) == pytest.approx(1.0)


def test_checkpoints_are_written_between_steps():
    found = goodput(failures(days=20.0), step_s=7.0, interval_s=1000.0, runs=1)
    assert found.interval_s == 143 * 7.0
    assert all(point.interval_s / 7.0 == pytest.approx(round(point.interval_s / 7.0)) for point in found.points)


def test_free_checkpoints_are_written_after_each_step():
    found = goodput(failures(checkpoint_s=0.0, days=20.0), step_s=10.0, runs=1)
    assert found.interval_s == found.daly_s == 10.0


# ---- the published run ----------------------------------------------------------------------------------------------


def llama3(**changes: Any) -> Failures:
    fields = {"gpus": LLAMA3_GPUS, "mtbf_gpu_h": LLAMA3_MTBF_GPU_H, "days": LLAMA3_DAYS}
    return Failures(**{**fields, "checkpoint_s": 5.0, "restart_s": 600.0, **changes})


def test_llama_3_is_interrupted_as_often_as_published():
    assert llama3().mtbf_s / HOUR == pytest.approx(3.1, abs=0.05)  # "one failure every three hours"
    counts = [simulate_run(llama3(), 600.0, seed=seed).failures for seed in range(30)]
    # a mean of 30 Poisson numbers
    assert np.mean(counts) == pytest.approx(LLAMA3_UNEXPECTED, abs=4 * math.sqrt(LLAMA3_UNEXPECTED / 30))


@pytest.mark.parametrize(
    ("checkpoint_s", "restart_s", "above"), [(5.0, 600.0, True), (5.0, 1800.0, False), (60.0, 600.0, False)]
)
def test_llama_3_trained_for_more_than_90_percent_only_with_short_checkpoints_and_restarts(
    checkpoint_s, restart_s, above
):
    # the report gives neither; its 90 % bounds them: training cannot have stood still a minute for each checkpoint,
    # nor half an hour for each restart
    found = goodput(llama3(checkpoint_s=checkpoint_s, restart_s=restart_s), runs=4)
    assert (found.best.goodput > 0.9) is above
    assert found.goodput == pytest.approx(found.expected, abs=0.01)


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mtbf_gpu_h": None}, "no time between failures is given; give mtbf_gpu_h"),
        ({"mtbf_gpu_h": 0.0}, "mtbf_gpu_h: 0.0 should be greater than 0"),
        ({"days": -1.0}, "days: -1.0 should be greater than 0"),
        ({"checkpoint_s": -1.0}, "checkpoint_s: -1.0 should be greater than or equal to 0"),
        ({"mtbf_gpu_h": 0.1}, "failures in 100 days are more than can be simulated"),
    ],
)
def test_impossible_failures_are_refused(changes, message):
    with pytest.raises(simpar.JobError, match=message):
        failures(**changes)


def test_impossible_runs_are_refused():
    with pytest.raises(simpar.JobError, match="interval_s=0 must be positive"):
        simulate_run(failures(), 0.0)
    with pytest.raises(simpar.JobError, match="interval_s=inf must be positive"):
        goodput(failures(), interval_s=math.inf)
    with pytest.raises(simpar.JobError, match="runs=0 leaves nothing"):
        goodput(failures(), runs=0)
    with pytest.raises(simpar.JobError, match=r"runs=10,000,000 of .* days have more than the 1,000,000 failures"):
        goodput(failures(), runs=10**7)
