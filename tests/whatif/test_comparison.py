"""Two jobs side by side: differences that add up, and probabilities against closed forms."""

import math
from statistics import NormalDist

import pytest

from simpar.simulation import simulate
from simpar.whatif.comparison import Comparison, compare

TENSOR = {"model": "llama3-8b", "cluster": "h100-sxm:1x8", "plan": {"tp": 8, "zero": 1, "seq_len": 2048}}
PIPELINE = {**TENSOR, "plan": {"tp": 2, "pp": 4, "zero": 1, "seq_len": 2048, "grad_accum": 8}}


@pytest.fixture(scope="module")
def found() -> Comparison:
    return compare(TENSOR, PIPELINE)


def test_the_parts_add_up_to_the_difference_exactly(found: Comparison) -> None:
    a, b = simulate(TENSOR), simulate(PIPELINE)
    assert found.difference_ns == b.trace.step_ns - a.trace.step_ns
    assert sum(part.difference_ns for part in found.parts) == found.difference_ns
    assert sum(part.a_ns for part in found.parts) == a.trace.step_ns
    assert sum(part.b_ns for part in found.parts) == b.trace.step_ns


def test_the_largest_difference_comes_first(found: Comparison) -> None:
    moved = [abs(part.difference_ns) for part in found.parts]
    assert moved == sorted(moved, reverse=True)


def test_equal_jobs_are_equally_fast() -> None:
    same = compare(TENSOR, TENSOR)
    assert same.probability_a_faster == 0.5
    assert same.ratio_interval == (1.0, 1.0)
    assert same.difference_ns == 0
    assert all(part.difference_ns == 0 for part in same.parts)


def test_the_other_way_round_everything_is_mirrored(found: Comparison) -> None:
    mirrored = compare(found.b, found.a)
    assert mirrored.difference_ns == -found.difference_ns
    assert mirrored.probability_a_faster == pytest.approx(1 - found.probability_a_faster)
    assert mirrored.ratio_interval[0] == pytest.approx(1 / found.ratio_interval[1], rel=1e-3)


def test_shared_errors_cancel() -> None:
    # the same work a little longer on the same machine: whatever its true speed, A is faster
    longer = compare(TENSOR, {**TENSOR, "plan": {**TENSOR["plan"], "recompute": "selective"}})
    assert longer.probability_a_faster == 1.0
    assert longer.b.step_time_interval()[0] < longer.a.step_time_interval()[1]  # though the intervals overlap


def test_on_two_devices_it_is_the_closed_form_of_independent_errors() -> None:
    def one(slowdown: float) -> dict[str, object]:
        return {"model": "gpt2", "cluster": "h100-sxm:1x1", "plan": {"launch_s": 0.0, "micro_batch": 16}}

    a = simulate(one(1.0))
    other = a.job.cluster.device.replace(name="another", sustained_slowdown=1.25)
    b = simulate(a.job.replace(cluster=a.job.cluster.model_copy(update={"device": other})))
    found = compare(a, b)
    spread = math.hypot(a.uncertainty.relative, b.uncertainty.relative)
    # both steps are nearly log-normal, and independent
    expected = NormalDist().cdf(math.log(b.step_time_s / a.step_time_s) / spread)
    assert 0.6 < expected < 0.95
    assert found.probability_a_faster == pytest.approx(expected, abs=0.02)


def test_different_batches_are_compared_per_token() -> None:
    more = {**TENSOR, "plan": {**TENSOR["plan"], "grad_accum": 4}}
    found = compare(TENSOR, more)
    assert not found.same_batch
    assert found.difference_ns > 0
    assert found.probability_a_faster < 0.5  # the optimizer's time is spread over four times the tokens
    assert any("counts per token" in sentence for sentence in found.words)


def test_words_and_plain_values(found: Comparison) -> None:
    assert found.words[0].startswith("A takes ")
    assert found.words[1].startswith("Most of it: ")
    assert "A is the faster one with a probability of" in found.words[-1]
    plain = found.to_dict()
    assert sum(part["difference_s"] for part in plain["parts"]) == pytest.approx(plain["difference_s"])
    assert plain["probability_a_faster"] == found.probability_a_faster
