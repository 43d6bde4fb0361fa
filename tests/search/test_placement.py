"""The search for placements: it undoes a bad one, and its traffic and distances are counted another way."""

import random

import numpy as np
import pytest

from simpar.errors import JobError
from simpar.hardware.cluster import Cluster
from simpar.job import Job
from simpar.model.presets import preset
from simpar.plan.layout import lay_out
from simpar.program.lower import lower
from simpar.search.placement import distances, improve_placement, traffic
from simpar.simulation import simulate

MODEL = preset("gpt2").replace(layers=2)
TORUS = {"topology": "torus", "shape": [3, 4], "bandwidth_gbps": 400}


def job(placement: list[int] | None = None, **plan: object) -> Job:
    cluster = Cluster(device="h100-sxm", gpus_per_node=12, graph=TORUS, placement=placement)
    return Job(model=MODEL, cluster=cluster, plan={"tp": 4, "zero": 1, "launch_s": 0.0, **plan})


def test_a_shuffled_placement_is_mended():
    shuffled = list(range(12))
    random.Random(3).shuffle(shuffled)
    found = improve_placement(job(shuffled))
    assert found.placement is not None
    assert sorted(found.placement) == list(range(12))
    assert 0.02 < found.gain < 1
    assert found.before_s == simulate(job(shuffled)).step_time_s
    assert found.after_s == simulate(job(list(found.placement))).step_time_s
    assert found.after_s <= 1.1 * simulate(job()).step_time_s


def test_where_all_gpus_are_alike_nothing_is_gained():
    one_switch = Job(model=MODEL, cluster="h100-sxm:4", plan={"tp": 2})
    assert improve_placement(one_switch).placement is None


def test_traffic_is_what_the_links_of_a_star_carry():
    star = Cluster(device="h100-sxm", gpus_per_node=4, graph={"topology": "star", "gpus": 4, "bandwidth_gbps": 400})
    whole = Job(model=MODEL, cluster=star, plan={"tp": 2, "pp": 2, "global_batch": 4, "collective_algorithm": "ring"})
    layout = lay_out(whole.plan, whole.model, star)
    amounts = traffic(lower(MODEL, star, layout, fold=False), 4)
    carried = {link.name: link.nbytes for link in simulate(whole).trace.links}
    sent = [carried[f"gpu{rank}>switch"] for rank in range(4)]
    assert amounts.sum(axis=1) == pytest.approx(sent, rel=1e-6)


def test_distances_add_the_links_of_a_way():
    found = distances(job().cluster)
    assert np.allclose(found, found.T)
    assert found[0, 1] == pytest.approx(1 / 50e9)
    assert found[0, 6] == pytest.approx(3 / 50e9)


def test_too_many_ranks_are_refused():
    with pytest.raises(JobError, match="a placement of 1,032 ranks takes too long to look for"):
        improve_placement(Job(model=MODEL, cluster="h100-sxm:129x8"))
