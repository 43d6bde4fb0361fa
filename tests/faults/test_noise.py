"""Jitter and late data: their statistics, and the closed forms of what they cost."""

import math
from typing import Any

import numpy as np
import pytest
from synthetic import columns, even_model, ideal_cluster, job, lane_spans, small_transformer

from simpar import Cluster, monte_carlo, simulate

MODEL = even_model(2, forward=10_000, backward=20_000)
ONE = ideal_cluster(gpus_per_node=1)
QUIET = {"optimizer": "sgd"}


def noisy(what: dict[str, Any], **jitter: Any) -> dict[str, Any]:
    return {**what, "faults": {"jitter": jitter}}


@pytest.mark.parametrize("per", ["kernel", "microbatch"])
@pytest.mark.parametrize("plan", [{}, {"zero": 3}, {"tp": 2, "pp": 2, "grad_accum": 2}], ids=str)
def test_a_seed_gives_one_step_and_another_seed_another(plan: dict[str, Any], per: str):
    plan = {**plan, "seq_len": 256, "launch_s": 0.0}
    what = noisy(job(small_transformer(), Cluster.parse("h100-sxm:4"), **plan), spread=0.1, per=per)
    first, again = simulate(what).trace, simulate(what).trace
    assert columns(first) == columns(again)
    other = simulate({**what, "faults": {**what["faults"], "seed": 1}}).trace
    assert first.step_ns != other.step_ns


@pytest.mark.parametrize("plan", [{}, {"zero": 3}, {"tp": 2, "pp": 2, "grad_accum": 2}], ids=str)
def test_noise_is_compute_that_took_longer_and_nothing_else(plan: dict[str, Any]):
    cluster = ideal_cluster(gpus_per_node=4)  # nothing here slows compute beside it
    what = job(small_transformer(), cluster, seq_len=256, launch_s=0.0, **plan)
    for rank in simulate(noisy(what, spread=0.2)).ranks:
        assert rank.interference_s == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("per", ["kernel", "microbatch"])
@pytest.mark.parametrize("plan", [{}, {"recompute": "full", "grad_accum": 3}, {"pp": 2, "grad_accum": 4}], ids=str)
def test_parts_of_a_disturbed_step_add_up_to_the_nanosecond(plan: dict[str, Any], per: str, seed: int):
    what = job(small_transformer(), Cluster.parse("h100-sxm:2"), seq_len=256, **plan)
    faults = {"slow_gpus": {0: 1e-3}, "jitter": {"spread": 0.3, "per": per}, "seed": seed}
    result = simulate({**what, "faults": faults})
    assert result.trace.details is not None
    for made in result.trace.details.templates:
        assert made.gpu_ns == sum(made.busy_ns.values()) + made.exposed_ns
    for rank in result.ranks:  # what is left over is no rounding below nothing
        assert rank.bubble_s >= 0
        assert rank.interference_s >= -1e-12


def test_a_pass_of_a_microbatch_has_one_factor():
    what = job(MODEL, ONE, grad_accum=3, **QUIET)
    plain, disturbed = (lane_spans(simulate(w).trace, 0) for w in (what, noisy(what, spread=0.3)))
    factors = [(b[2] - b[1]) / (a[2] - a[1]) for a, b in zip(plain, disturbed, strict=True) if a[2] > a[1]]
    assert len(set(factors)) == len(factors) >= 6
    kernels = simulate(noisy(what, spread=0.3)).trace.kernels()
    lengths = kernels.duration_ns[kernels.parent == kernels.parent[0]].tolist()
    assert len(set(lengths)) == 1


def test_expansion_fills_the_operation():
    trace = simulate(noisy(job(small_transformer(), Cluster.parse("h100-sxm:2"), seq_len=256), spread=0.3)).trace
    kernels, spans = trace.kernels(), trace.spans
    for parent in np.unique(kernels.parent[kernels.parent >= 0]):
        mine = kernels.parent == parent
        assert kernels.start_ns[mine].min() >= spans.start_ns[parent]
        assert kernels.end_ns[mine].max() == spans.end_ns[parent]


def expected_maximum(count: int, spread: float, terms: tuple[float, ...]) -> float:
    """Mean of the largest of ``count`` sums of log-normal numbers with these means, by a draw of its own."""
    sigma = math.sqrt(math.log(1 + spread**2))
    random = np.random.default_rng(12345)
    total = sum(term * random.lognormal(-(sigma**2) / 2, sigma, (100_000, count)) for term in terms)
    return float(np.asarray(total).max(axis=1).mean())


@pytest.mark.parametrize("ranks", [2, 8])
def test_replicas_take_the_mean_of_the_slowest(ranks: int):
    what = noisy(job(MODEL, ideal_cluster(gpus_per_node=ranks), **QUIET), spread=0.1)
    found = monte_carlo(what, n=100, workers=1)
    expected = expected_maximum(ranks, 0.1, (20e3, 40e3)) * 1e-9
    rest = found.quiet_s - 60e-6  # the optimizer and the all-reduce
    assert found.mean_s == pytest.approx(expected + rest, rel=4 * 0.08 / math.sqrt(100))
    assert found.slowdown > 1.0


def test_alone_noise_costs_nothing_on_average():
    found = monte_carlo(noisy(job(MODEL, ONE, **QUIET), spread=0.1), n=150, workers=1)
    assert found.mean_s == pytest.approx(found.quiet_s, rel=4 * 0.08 / math.sqrt(150))


def test_noise_of_many_kernels_averages_out():
    model = even_model(16, forward=1000, backward=1000)
    per_kernel, per_pass = (
        monte_carlo(noisy(job(model, ONE, **QUIET), spread=0.2, per=per), n=100, workers=1).std_s
        for per in ("kernel", "microbatch")
    )
    # 2 passes of 16 equal kernels: variances add up, so deviations go with the root of the number of draws
    assert per_pass == pytest.approx(16e-6 * 0.2 * math.sqrt(2), rel=0.25)
    assert per_kernel == pytest.approx(per_pass / 4, rel=0.3)


@pytest.mark.parametrize("delay_ns", [1_000, 25_000, 100_000])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_late_loader_stalls_what_the_host_cannot_run_ahead_of(microbatches: int, delay_ns: int):
    what = job(MODEL, ONE, grad_accum=microbatches, **QUIET)
    quiet = simulate(what).trace.step_ns
    late = simulate({**what, "faults": {"loader": {"delay_s": delay_ns * 1e-9}}}).trace.step_ns
    # the host waits for each microbatch in turn; the device computes what it was given
    compute, rest = 60_000, quiet - 60_000 * microbatches
    ready, end = 0, 0
    for _ in range(microbatches):
        ready += delay_ns
        end = max(ready, end) + compute
    assert late == end + rest


def test_one_late_replica_keeps_all_waiting():
    what = job(MODEL, ideal_cluster(gpus_per_node=4), grad_accum=2, **QUIET)
    everyone, one = ({**what, "faults": {"loader": {"delay_s": 1e-3, "replicas": r}}} for r in (None, (2,)))
    assert simulate(one).trace.step_ns == simulate(everyone).trace.step_ns
    assert len(simulate(everyone).ranks) == 1
    assert len(simulate(one).ranks) == 2


def test_late_data_are_not_told_as_slow_launches():
    what = job(small_transformer(), Cluster.parse("h100-sxm:8"), seq_len=256, grad_accum=6)
    late = simulate({**what, "faults": {"loader": {"delay_s": 1.0}}})
    assert late.ranks[0].host_wait_s > 0.9 * late.step_time_s
    assert not [said for said in late.warnings if "launch" in said]
    assert any("data late by 1 s" in said for said in late.warnings)


def test_tensor_parallel_ranks_get_the_same_late_sample():
    loader = {"delay_s": 1e-3, "spread": 0.5, "probability": 0.5}
    what = job(small_transformer(), Cluster.parse("h100-sxm:8"), seq_len=256, tp=4, grad_accum=6)
    result = simulate({**what, "faults": {"loader": loader}})
    waits = {rank.rank: rank.host_wait_s for rank in result.ranks}
    assert len({waits[rank] for rank in range(4)}) == 1
    assert sum(waits.values()) > 0
