"""The section ``faults`` of a job: what it says, and what it refuses."""

import numpy as np
import pytest

import simpar
from simpar import Faults, Job
from simpar.faults.noise import happens, lognormal

JOB = {"model": "gpt2", "cluster": "h100-sxm:2x4"}


def test_nothing_is_a_fault_by_itself():
    assert not Faults().any
    assert not Faults(slow_gpus={3: 1.0}, slow_links={"nic1": 1.0}, lossy_links={"nic2": 0.0}).any
    assert not Faults(loader={"delay_s": 1.0, "probability": 0.0}).any
    assert not Faults(loader={"delay_s": 1.0, "replicas": ()}).any
    assert Job(**JOB).faults == Faults()


def test_a_link_has_two_directions_and_rates_multiply():
    faults = Faults(slow_links={"nic1": 0.5, "gpu2>": 0.25}, lossy_links={"nic1<": 0.1})
    assert faults.link_rates == {"nic1>": 0.5, "nic1<": 0.45, "gpu2>": 0.25}
    assert faults.own_links == {1: {"nic"}, 2: {"gpu"}}
    assert Faults(slow_links={"leaf0.1>": 0.5}).own_links is None


@pytest.mark.parametrize(("loss", "window"), [(0.05, 1), (0.2, 1), (0.01, 16), (0.1, 4)])
def test_a_lossy_link_sends_what_it_loses_again(loss: float, window: int):
    # packet by packet: a packet that is lost costs ``window`` packets more, and may be lost again
    random = np.random.default_rng(1)
    packets = 200_000
    sent = packets + window * int((random.geometric(1 - loss, packets) - 1).sum())
    rate = Faults(lossy_links={"nic0>": loss}, resent_packets=window).link_rates["nic0>"]
    assert rate == pytest.approx(packets / sent, rel=0.01)


def test_what_is_random():
    assert Faults(jitter={"spread": 0.1}).is_random
    assert Faults(loader={"delay_s": 1.0, "probability": 0.5}).is_random
    assert not Faults(loader={"delay_s": 1.0}).is_random
    assert not Faults(slow_gpus={0: 0.5}).is_random


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"slow_gpus": {8: 0.5}}, r"faults.slow_gpus names GPU 8, but the cluster has GPUs 0 to 7"),
        ({"lossy_links": {"nic9": 0.5}}, r"faults.lossy_links names GPU 9"),
        ({"slow_gpus": {1: 1.5}}, r"faults.slow_gpus.1: 1.5 should be less than or equal to 1"),
        ({"slow_gpus": {1: 0.0}}, r"faults.slow_gpus.1: 0.0 should be greater than 0"),
        ({"slow_links": {"nic": 0.5}}, r"faults.slow_links: 'nic' is no link; name one as the report does"),
        ({"slow_links": {"3": 0.5}}, r"'3' is no link"),
        ({"lossy_links": {"nic1": 1.0}}, r"faults.lossy_links.nic1: 1.0 should be less than 1"),
        ({"jitter": {"spred": 0.5}}, r"faults.jitter.spred: unknown key; did you mean 'spread'"),
        ({"jitter": {"per": "step"}}, r"faults.jitter.per"),
    ],
)
def test_mistakes_are_told(faults: dict, message: str):
    with pytest.raises(simpar.JobError, match=message):
        Job(**JOB, faults=faults)


def test_the_summary_names_what_is_wrong():
    faults = Faults(
        slow_gpus={3: 0.8}, slow_links={"nic1>": 0.5}, jitter={"spread": 0.05}, loader={"delay_s": 0.1, "spread": 1.0}
    )
    assert faults.summary() == (
        "GPU of rank 3 at 80%, link nic1> at 0.5 of its rate, 5% jitter per microbatch, "
        "data late by 0.1 s before 100% of microbatches (seed 0)"
    )
    assert Faults(slow_gpus=dict.fromkeys(range(9), 0.5)).summary().endswith("rank 3 at 50%, 5 more")


@pytest.mark.parametrize(("mean", "spread"), [(1.0, 0.05), (3.0, 0.5), (0.2, 1.5)])
def test_draws_have_the_mean_and_the_spread_that_were_asked_for(mean: float, spread: float):
    drawn = lognormal(mean, spread, 400_000, key=(0, 0))
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.std() / drawn.mean() == pytest.approx(spread, rel=0.05)
    assert (drawn > 0).all()


def test_draws_depend_on_their_key_only():
    assert (lognormal(1.0, 0.1, 5, key=(7, 1)) == lognormal(1.0, 0.1, 9, key=(7, 1))[:5]).all()
    assert (lognormal(1.0, 0.1, 5, key=(7, 1)) != lognormal(1.0, 0.1, 5, key=(7, 2))).all()
    assert lognormal(2.0, 0.0, 3, key=(7,)).tolist() == [2.0] * 3
    assert happens(0.3, 100_000, key=(1,)).mean() == pytest.approx(0.3, abs=0.01)
