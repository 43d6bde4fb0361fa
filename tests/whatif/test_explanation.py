"""What removing a resource could gain: by hand on ideal devices, and as bounds that no improvement can beat."""

import pytest
from synthetic import even_model, ideal_cluster, job

from simpar.job import Job
from simpar.sensitivity.parameters import PARAMETERS, RESOURCES, slowed
from simpar.simulation import simulate
from simpar.whatif.explanation import Explanation, explain, without

PIPELINE = {
    "model": "llama3-8b",
    "cluster": "h100-sxm:2x8",
    "plan": {"tp": 4, "pp": 4, "zero": 1, "grad_accum": 8, "seq_len": 2048},
}


@pytest.fixture(scope="module")
def found() -> Explanation:
    return explain(PIPELINE)


def test_without_memory_traffic_only_the_messages_of_an_ideal_pipeline_are_left() -> None:
    model = even_model(4, forward=100, backward=200, sent=40)
    ideal = job(model, ideal_cluster(gpus_per_node=4), pp=4, grad_accum=1, optimizer="sgd")
    rooms = {room.resource: room for room in explain(ideal).headroom}
    step = simulate(ideal).trace.step_ns
    messages = 3 * 40 * 2  # forward and backward over three borders
    assert round(rooms["memory"].step_s * 1e9) == messages
    assert round(rooms["node link"].gain_s * 1e9) == messages
    assert round(rooms["memory"].gain_s * 1e9) == step - messages


def test_without_any_resource_nothing_takes_time() -> None:
    changed = Job.model_validate({"model": "gpt2", "cluster": "h100-sxm:2x8", "plan": {"pp": 2, "zero": 1}})
    for resource in RESOURCES:
        changed = without(changed, resource)
    assert simulate(changed).trace.step_ns < 1000  # of some 10,000 kernels and messages


def test_no_improvement_of_a_resource_beats_its_headroom(found: Explanation) -> None:
    rooms = {room.resource: room.step_s for room in found.headroom}
    for parameter in PARAMETERS:
        better = simulate(slowed(found.result.job, parameter, 0.5)).step_time_s
        assert better >= rooms[parameter.resource] * (1 - 1e-9), parameter.name


def test_it_is_ordered_and_whole(found: Explanation) -> None:
    gains = [room.gain_s for room in found.headroom]
    assert gains == sorted(gains, reverse=True)
    assert {room.resource for room in found.headroom} == set(RESOURCES)
    assert all(room.step_s + room.gain_s == pytest.approx(found.result.step_time_s) for room in found.headroom)
    assert sum(found.path_ns.values()) == found.result.trace.step_ns


def test_words_name_the_bound_and_its_gain(found: Explanation) -> None:
    words = " ".join(found.words)
    assert found.words[0].startswith("The step of")
    assert "is bound by matrix products" in words
    assert "If products and attention took no time to compute, the step would take" in words
    assert "which is the most that this can give" in words
    assert f"GPUs have nothing to do for {found.result.bubble_fraction:.0%} of the step" in words


def test_a_launch_bound_step_says_so() -> None:
    small = explain({"model": "gpt2", "cluster": "h100-sxm:1x1", "plan": {"seq_len": 128, "launch_s": 50e-6}})
    assert "is bound by host launches" in small.words[0]
    assert small.headroom[0].resource == "host launches"
    assert "If launching kernels took no time" in small.words[1]


def test_as_plain_values_it_says_the_same(found: Explanation) -> None:
    plain = found.to_dict()
    assert sum(plain["critical_path_s"].values()) == pytest.approx(plain["step_time_s"])
    assert [s["parameter"] for s in plain["sensitivities"]] == [p.name for p in PARAMETERS]
    assert plain["words"] == list(found.words)
    assert set(plain["headroom"][0]) == {"resource", "step_time_s", "gain_s"}


def test_a_result_is_explained_as_its_job(found: Explanation) -> None:
    again = explain(found.result)
    assert again.result is found.result
    assert again.path_ns == found.path_ns
