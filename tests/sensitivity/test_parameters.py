"""Parameters as data: what they scale, and that a scaled machine is one that can be simulated."""

import pytest

from simpar.job import Job
from simpar.sensitivity.parameters import PARAMETERS, RESOURCES, Machine, slowed
from simpar.simulation import simulate

BY_NAME = {parameter.name: parameter for parameter in PARAMETERS}
JOB = Job(model="gpt2", cluster="h100-sxm:2x8", plan={"seq_len": 256})


def test_names_are_unique_and_every_resource_has_one() -> None:
    assert len(BY_NAME) == len(PARAMETERS)
    assert {parameter.resource for parameter in PARAMETERS} == set(RESOURCES)


@pytest.mark.parametrize("name", [n for n in BY_NAME if n.partition(".")[2] in ("nic_gbps", "memory_bytes_per_s")])
def test_rates_are_divided(name: str) -> None:
    part, _, field = name.partition(".")
    before, after = (getattr(getattr(job.cluster, part), field) for job in (JOB, slowed(JOB, BY_NAME[name], 2.0)))
    assert after == before / 2


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.endswith("latency_s") or "step_s" in name])
def test_times_are_multiplied(name: str) -> None:
    part, _, field = name.partition(".")
    before, after = (getattr(getattr(job.cluster, part), field) for job in (JOB, slowed(JOB, BY_NAME[name], 2.0)))
    assert after == before * 2


def test_levels_of_a_node_link_change_together() -> None:
    job = Job(model="gpt2", cluster="l40s:1x8")
    assert job.cluster.node_link.beyond is not None
    after = slowed(job, BY_NAME["node_link.bandwidth_bytes_per_s"], 2.0).cluster.node_link
    assert after.beyond is not None
    assert after.beyond.bandwidth_bytes_per_s == job.cluster.node_link.beyond.bandwidth_bytes_per_s / 2


def test_edges_of_a_graph_are_the_network() -> None:
    edges = [{"source": f"gpu{g}", "target": "switch", "bandwidth_gbps": 100, "latency_us": 2} for g in range(2)]
    job = Job(model="gpt2", cluster={"device": "h100-sxm", "nodes": 1, "gpus_per_node": 2, "graph": edges})
    after = slowed(job, BY_NAME["fabric.nic_gbps"], 2.0).cluster.graph
    assert after is not None
    assert [edge.bandwidth_gbps for edge in after.edges] == [50, 50]
    assert simulate(slowed(job, BY_NAME["fabric.nic_gbps"], 2.0)).step_time_s > simulate(job).step_time_s


def test_the_host_s_time_is_the_plan_s_where_it_has_one() -> None:
    job = JOB.replace(plan=JOB.plan.replace(launch_s=10e-6))
    assert slowed(job, BY_NAME["device.launch_s"], 3.0).plan.launch_s == pytest.approx(30e-6)
    assert slowed(JOB, BY_NAME["device.launch_s"], 3.0).plan.launch_s == pytest.approx(
        3 * simulate(JOB).layout.launch_s
    )
    assert slowed(JOB, BY_NAME["fabric.nic_gbps"], 3.0).plan == JOB.plan


def test_a_job_is_left_as_it_was() -> None:
    before = JOB.model_dump(mode="json")
    for parameter in PARAMETERS:
        parameter.slower(Machine(JOB.cluster, 1e-6), 1e-9)
    assert JOB.model_dump(mode="json") == before


def test_every_kind_of_device_is_scaled() -> None:
    nodes = [{"device": "h100-sxm", "count": 1}, {"device": "a100-sxm", "count": 1}]
    job = Job(model="gpt2", cluster={"nodes": nodes, "gpus_per_node": 8, "fabric": "ndr400"})
    after = slowed(job, BY_NAME["device.memory_bytes_per_s"], 2.0).cluster
    assert [d.memory_bytes_per_s * 2 for d in after.devices] == [d.memory_bytes_per_s for d in job.cluster.devices]
