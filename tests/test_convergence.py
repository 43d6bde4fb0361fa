"""Time to a target: the trade-off of steps and examples as published, on top of the ordinary simulation."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import simpar
from simpar.convergence import gradient_noise_scale, steps_to_target, time_to_target

JOB: dict[str, Any] = {
    "model": "gpt2",
    "cluster": {"base": "h100-sxm:1x8", "price_per_gpu_hour": 2.0},
    "plan": {"seq_len": 512, "micro_batch": 2},
}
BATCHES = (16, 64, 256)


@given(
    batch=st.floats(1.0, 1e9),
    critical=st.floats(1.0, 1e9),
    least=st.floats(1.0, 1e7),
)
def test_steps_and_examples_lie_on_the_published_curve(batch, critical, least):
    # (S / S_min - 1) (E / E_min - 1) = 1, with E = S B and E_min = S_min B_crit
    steps = steps_to_target(batch, critical_batch_tokens=critical, minimum_steps=least)
    examples, fewest = steps * batch, least * critical
    assert (steps - least) * (examples - fewest) == pytest.approx(least * fewest, rel=1e-3)


def test_at_the_critical_batch_both_are_twice_the_least():
    steps = steps_to_target(1e6, critical_batch_tokens=1e6, minimum_steps=5000)
    assert (steps, steps * 1e6) == (10_000, 2 * 5000 * 1e6)


def test_each_record_is_the_ordinary_simulation_times_the_steps():
    for record in time_to_target(JOB, critical_batch_tokens=100_000, minimum_steps=1000, batches=BATCHES):
        alone = simpar.simulate({**JOB, "plan": {**JOB["plan"], "global_batch": record.batch}})
        assert record.step_time_s == alone.step_time_s
        assert record.tokens_per_s == alone.tokens_per_s
        assert record.batch_tokens == record.batch * 512
        cost = alone.cost(record.tokens).run
        assert cost is not None
        assert record.steps == pytest.approx(cost.steps)
        assert record.hours * 3600 == pytest.approx(cost.time_s)
        assert record.gpu_hours == pytest.approx(cost.gpu_hours)
        assert record.cost == pytest.approx(cost.price)


def test_larger_batches_take_fewer_steps_and_more_tokens():
    found = time_to_target(JOB, critical_batch_tokens=50_000, minimum_steps=1000, batches=BATCHES)
    assert [record.batch for record in found] == list(BATCHES)
    assert [r.steps for r in found] == sorted((r.steps for r in found), reverse=True)
    assert [r.tokens for r in found] == sorted(r.tokens for r in found)


def test_speed_alone_would_choose_another_batch():
    found = time_to_target(JOB, critical_batch_tokens=20_000, minimum_steps=1000, batches=(*BATCHES, 2048))
    fastest = max(found, key=lambda record: record.tokens_per_s)
    soonest = min(found, key=lambda record: record.hours)
    assert fastest.batch > soonest.batch


def test_without_a_price_there_is_no_cost():
    (record,) = time_to_target(
        {**JOB, "cluster": "h100-sxm:8"}, critical_batch_tokens=1e5, minimum_steps=10, batches=[16]
    )
    assert record.cost is None
    assert record.to_dict()["gpus"] == 8


def test_gradient_accumulation_follows_the_batch():
    (record,) = time_to_target(
        {**JOB, "plan": {**JOB["plan"], "grad_accum": 3}}, critical_batch_tokens=1e5, minimum_steps=10, batches=[64]
    )
    assert record.batch == 64


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batches": ()}, simpar.JobError, "batches is empty"),
        ({"minimum_steps": 0}, simpar.JobError, "minimum_steps=0 must be positive"),
        ({"critical_batch_tokens": math.inf}, simpar.JobError, "critical_batch_tokens=inf must be positive"),
        ({"batches": (17,)}, simpar.PlanError, "global_batch 17: .*17"),
    ],
)
def test_mistakes_are_told(changes, error, message):
    with pytest.raises(error, match=message):
        time_to_target(JOB, **{"critical_batch_tokens": 1e5, "minimum_steps": 10, "batches": (16,), **changes})


def test_the_noise_scale_is_that_of_simulated_gradients():
    # gradients of single examples: a true one, and noise of known covariance
    random = np.random.default_rng(0)
    true, deviations = random.normal(size=50), random.uniform(0.5, 2.0, 50)
    scale = (deviations**2).sum() / (true**2).sum()

    def squared_norm(batch: int) -> float:
        noise = random.normal(size=(4000, 50)) * deviations / math.sqrt(batch)
        return float(((true + noise) ** 2).sum(axis=1).mean())

    found = gradient_noise_scale((2, squared_norm(2)), (64, squared_norm(64)))
    assert found == pytest.approx(scale, rel=0.05)


@pytest.mark.parametrize(
    ("small", "large", "message"),
    [
        ((8, 1.0), (8, 1.0), "must be positive, the first the smaller"),
        ((0, 1.0), (8, 1.0), "must be positive"),
        ((1, 10.0), (8, 0.5), "leave no gradient behind the noise"),
        ((1, 1.0), (8, 2.0), "leave no gradient behind the noise"),
    ],
)
def test_norms_without_meaning_are_refused(small, large, message):
    with pytest.raises(simpar.JobError, match=message):
        gradient_noise_scale(small, large)
