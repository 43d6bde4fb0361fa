"""The uncertainty of a step: against closed forms of one and two sources, and against machines drawn and simulated."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from simpar.framework.framework import framework
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import device
from simpar.job import Job
from simpar.result import Result
from simpar.sensitivity.parameters import ATTENTION_BACKWARD, Machine, cost_classes
from simpar.simulation import simulate
from simpar.uncertainty import Source, Spread, interval, samples, spread

JOB = {"model": "llama3-8b", "cluster": "h100-sxm:1x8", "plan": {"tp": 8, "zero": 1, "seq_len": 4096, "grad_accum": 4}}


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(JOB)


def only(error: float, *, level: float = 0.0, seconds: float = 2.0, step_s: float = 2.0, key: str = "k") -> Spread:
    source = Source(name="gemm.bf16", key=key, seconds=seconds, error=error, of_level=True)
    return Spread(step_s, (source,), Source(name="level", key="l", seconds=seconds, error=level))


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_one_source_is_a_log_normal_step(level: float) -> None:
    low, high = only(0.2).interval(level)
    z = NormalDist().inv_cdf((1 + level) / 2)
    assert low == pytest.approx(2 * math.exp(-0.2 * z), rel=0.02)
    assert high == pytest.approx(2 * math.exp(0.2 * z), rel=0.02)


def test_a_part_that_is_certain_stays() -> None:
    drawn = only(0.3, seconds=0.5).samples(50_000)
    assert drawn.min() > 1.5
    assert np.median(drawn) == pytest.approx(2.0, rel=0.01)


def test_the_level_comes_on_top_as_an_independent_factor() -> None:
    drawn = np.log(only(0.3, level=0.4).samples(200_000) / 2)
    assert drawn.std() == pytest.approx(0.5, rel=0.01)
    assert only(0.3, level=0.4).relative == pytest.approx(0.5)


def test_without_errors_the_interval_is_the_prediction() -> None:
    assert only(0.0).interval() == (2.0, 2.0)


def test_draws_are_those_of_the_key_and_the_seed() -> None:
    assert (only(0.1).samples(10) == only(0.1).samples(10)).all()
    assert (only(0.1).samples(10) != only(0.1).samples(10, seed=1)).all()
    assert (only(0.1).samples(10) != only(0.1, key="other").samples(10)).all()


def test_a_level_out_of_range_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"level=80 must lie between 0 and 1; give a share such as 0\.8"):
        only(0.1).interval(80)


def test_a_wider_level_gives_a_wider_interval_around_the_prediction(result: Result) -> None:
    half, most = result.step_time_interval(0.5), result.step_time_interval(0.9)
    assert most[0] < half[0] < result.step_time_s < half[1] < most[1]
    assert result.step_time_interval() == interval(result)
    assert (samples(result, 5, 3) == result.uncertainty.samples(5, 3)).all()


def test_measured_steps_of_a_framework_set_the_interval_and_its_absence_the_fits(result: Result) -> None:
    software = result.layout.framework
    assert software.residual_80 is not None
    low, high = result.step_time_interval(0.8)
    assert high / result.step_time_s == pytest.approx(math.exp(software.residual_80))
    assert low * high == pytest.approx(result.step_time_s**2)
    plan = result.job.plan.replace(framework=software.replace(residual_80=None))
    unknown = simulate(result.job.replace(plan=plan))
    assert unknown.step_time_interval(0.8) == unknown.uncertainty.interval(0.8)


@pytest.fixture(scope="module")
def calibrated(result: Result) -> Result:
    """The same step on a machine that was measured itself, whose level moves by 10 %."""
    errors = {**device("h100-sxm").errors, "level": 0.0674, "level.p90": 0.0}
    one = result.job.cluster.replace(device=device("h100-sxm").replace(machine="box", errors=errors))
    return simulate(result.job.replace(cluster=one))


def test_a_calibrated_machine_has_its_own_spread_and_the_framework_s_on_top(calibrated: Result) -> None:
    software, own = calibrated.layout.framework, calibrated.uncertainty
    assert software.residual_80 is not None
    assert own.level.error == pytest.approx(0.1, rel=2e-3)
    low, high = calibrated.step_time_interval(0.8)
    # second derivation: the two as independent normal logarithms
    z = NormalDist().inv_cdf(0.9)
    ends = own.interval(0.8)
    both = math.hypot(math.log(ends[1] / ends[0]) / 2, software.residual_80)
    assert math.log(high / low) / 2 == pytest.approx(both, rel=0.03)
    assert both > math.hypot(z * own.level.error * own.level.seconds / own.step_s, software.residual_80)
    plan = calibrated.job.plan.replace(framework=software.replace(residual_80=None))
    alone = simulate(calibrated.job.replace(plan=plan))
    assert alone.step_time_interval(0.8) == alone.uncertainty.interval(0.8)


def test_a_framework_s_residual_does_not_stand_for_a_machine_s_level(calibrated: Result) -> None:
    cluster = calibrated.job.cluster
    wild = cluster.device.replace(errors={**cluster.device.errors, "level": 0.5})
    moving = simulate(calibrated.job.replace(cluster=cluster.replace(device=wild)))
    low, high = moving.step_time_interval(0.8)
    assert high / low > 3 * math.exp(2 * (moving.layout.framework.residual_80 or 0.0))


def test_a_machine_measured_too_shortly_to_move_is_not_taken_to_stand_still(calibrated: Result) -> None:
    cluster = calibrated.job.cluster
    errors = {name: error for name, error in cluster.device.errors.items() if not name.startswith("level")}
    short = cluster.replace(device=cluster.device.replace(errors=errors))
    assert simulate(calibrated.job.replace(cluster=short)).uncertainty.level.error == 0.25
    kind = cluster.replace(device=cluster.device.replace(errors=errors, machine=None))
    assert simulate(calibrated.job.replace(cluster=kind)).uncertainty.level.error == 0.0


def test_two_machines_of_a_kind_err_each_for_itself(calibrated: Result) -> None:
    cluster = calibrated.job.cluster
    other = simulate(
        calibrated.job.replace(cluster=cluster.replace(device=cluster.device.replace(machine="other")))
    ).uncertainty
    assert other.level.key != calibrated.uncertainty.level.key
    shared = {s.key for s in other.sources} & {s.key for s in calibrated.uncertainty.sources}
    assert shared
    assert all(key.startswith(("node link", "no network")) for key in shared)


def test_sources_add_up_to_the_step(result: Result) -> None:
    found = {source.name: source for source in spread(result).sources}
    assert sum(s.seconds for name, s in found.items() if name != "interference") == pytest.approx(
        result.step_time_s, rel=1e-3
    )
    of_level = sum(s.seconds for s in found.values() if s.of_level)
    assert of_level == pytest.approx(spread(result).level.seconds)


def test_errors_are_those_that_the_descriptions_state(result: Result) -> None:
    errors, links = device("h100-sxm").errors, result.job.cluster.node_link.errors
    found = {source.name: source.error for source in result.uncertainty.sources}
    z = np.random.default_rng(3).standard_normal(400_000)

    def agrees(sd: float, median: float, p90: float) -> None:
        """A factor of that width has one of the two statistics, and is off by no less than the other."""
        drawn = np.quantile(np.abs(np.exp(sd * z) - 1), (0.5, 0.9)) / (median, p90)
        assert min(drawn) == pytest.approx(1.0, rel=0.01)

    agrees(found["attention_backward"], errors["attention_backward"], errors["attention_backward.p90"])
    agrees(found["node_link.bandwidth"], links.median_large, links.p90_large)
    agrees(found["node_link.latency"], links.median, links.p90)
    agrees(result.uncertainty.level.error, errors["level"], errors["level.p90"])


def test_a_device_without_measurements_is_less_certain() -> None:
    plan = {"tp": 8, "zero": 1, "seq_len": 2048}
    known, assumed = (
        simulate({"model": "llama3-8b", "cluster": f"{name}:1x8", "plan": plan}, allow_oom=True).uncertainty.relative
        for name in ("a100-sxm-80gb", "a100-sxm-40gb")
    )
    assert assumed > 1.2 * known


def test_more_nodes_than_anybody_measured_are_less_certain() -> None:
    found = []
    for nodes in (2, 64):
        job = {"model": "gpt2", "cluster": f"h100-sxm:{nodes}x8", "plan": {"seq_len": 512}}
        sources = {source.name: source.error for source in simulate(job).uncertainty.sources}
        found.append(sources["network.latency"])
    assert found[1] > found[0]


def test_drawn_machines_take_what_the_engine_says(result: Result) -> None:
    # second derivation: the classes' factors put into the machine, and the step simulated on it
    rng = np.random.default_rng(7)
    sources = {source.name: source for source in result.uncertainty.sources}
    classes = cost_classes(result.job.cluster.device, {"bf16"})
    for _ in range(4):
        machine = Machine(result.job.cluster, result.layout.launch_s)
        expected = result.step_time_s
        for name, slower in classes.items():
            if name in sources and name != ATTENTION_BACKWARD:
                factor = math.exp(0.1 * rng.standard_normal())
                machine = slower(machine, factor)
                both = sources[name].seconds
                both += sources[ATTENTION_BACKWARD].seconds if name == "attention" else 0.0
                expected += both * (factor - 1)
        plan = result.job.plan.replace(launch_s=machine.launch_s)
        job = Job.model_construct(model=result.job.model, cluster=machine.cluster, plan=plan)
        assert simulate(job).step_time_s == pytest.approx(expected, rel=0.005)


def test_links_and_devices_of_the_same_kind_err_together() -> None:
    clusters = (Cluster.parse("h100-sxm:1x8"), Cluster.parse("h100-sxm:2x8"))
    keys = [
        {
            source.key
            for source in simulate({"model": "gpt2", "cluster": c, "plan": {"seq_len": 512}}).uncertainty.sources
        }
        for c in clusters
    ]
    assert {key for key in keys[0] if not key.startswith("no network")} <= keys[1]


def test_steps_of_models_with_experts_have_residuals_of_their_own() -> None:
    software = framework("megatron-core")
    assert software.residual_80 is not None
    assert software.residual_80_experts is not None
    for model, residual in (("mixtral-8x7b", software.residual_80_experts), ("llama2-7b", software.residual_80)):
        job = {"model": model, "cluster": "h100-sxm:1x8", "plan": {"zero": 3, "seq_len": 512}}
        found = simulate(job, allow_oom=True)
        _, high = interval(found, 0.8)
        assert high / found.step_time_s == pytest.approx(math.exp(residual))
