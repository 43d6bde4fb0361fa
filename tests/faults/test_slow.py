"""Slow devices and links: each step is as late as a second derivation says, folded or rank by rank."""

from dataclasses import replace
from typing import Any

import pytest
from synthetic import columns, even_model, ideal_cluster, ideal_device, job, small_transformer

import simpar
from simpar import Cluster, Plan, simulate

NODES = Cluster.parse("h100-sxm:4x4")
MODEL = even_model(4, forward=1000, backward=2000, parameters=1000)


def slowed_device(speed: float) -> Any:
    """The ideal device at a share of its speed, as its datasheet would say."""
    return ideal_device(
        memory_bytes_per_s=1e9 * speed, peak_flop_per_s=dict.fromkeys(("bf16", "fp16", "fp32"), 1e12 * speed)
    )


def step_ns(what: dict[str, Any], *, fold: bool = True, **faults: Any) -> int:
    return simulate({**what, "faults": faults}, fold=fold).trace.step_ns


@pytest.mark.parametrize("plan", [{}, {"zero": 3}, {"tp": 2, "zero": 1}, {"pp": 2, "grad_accum": 4}], ids=str)
def test_no_fault_changes_nothing(plan: dict[str, Any]):
    what = job(small_transformer(), NODES, seq_len=256, **plan)
    neutral = {"slow_gpus": {3: 1.0}, "slow_links": {"nic0": 1.0}, "lossy_links": {"gpu1": 0.0}, "seed": 9}
    assert columns(simulate({**what, "faults": neutral}).trace) == columns(simulate(what).trace)


def test_all_devices_slow_are_a_slower_device():
    what = job(MODEL, ideal_cluster(), grad_accum=2)
    slower = job(MODEL, ideal_cluster(device=slowed_device(0.5)), grad_accum=2)
    assert step_ns(what, slow_gpus=dict.fromkeys(range(8), 0.5)) == simulate(slower).trace.step_ns


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_one_slow_device_makes_all_replicas_as_slow_as_itself(zero: int):
    # nothing is overlapped, so everyone waits for the slowest in each collective
    plan = {"zero": zero, "overlap": {"grad_reduce": False, "param_gather": False}}
    what = job(MODEL, ideal_cluster(), **plan)
    one = step_ns(what, slow_gpus={5: 0.8})
    assert one == step_ns(what, slow_gpus=dict.fromkeys(range(8), 0.8))
    assert one > step_ns(what)


def test_the_slowest_of_several_counts():
    what = job(MODEL, ideal_cluster())
    assert step_ns(what, slow_gpus={2: 0.9, 5: 0.5, 6: 0.7}) == step_ns(what, slow_gpus={5: 0.5})


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_slow_stage_is_one_with_heavier_layers(schedule: str, stage: int):
    plan = {"pp": 4, "grad_accum": 6, "schedule": schedule}
    cluster = ideal_cluster(gpus_per_node=4)
    model, heavy = (even_model(4, forward=factor * 1000, backward=factor * 2000) for factor in (1, 2))
    layers = tuple(heavy.layers[i] if i == stage else layer for i, layer in enumerate(model.layers))
    uneven = simulate(job(replace(model, layers=layers), cluster, layer_split=(1, 1, 1, 1), **plan))
    assert step_ns(job(model, cluster, **plan), slow_gpus={stage: 0.5}) == uneven.trace.step_ns


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_wait_for_the_slow_one_in_every_layer(sequence_parallel: bool):
    plan = {"tp": 4, "seq_len": 256, "launch_s": 0.0, "sequence_parallel": sequence_parallel}
    cluster = ideal_cluster(gpus_per_node=4)
    what = job(small_transformer(), cluster, **plan)
    one, all_four = (step_ns(what, slow_gpus=dict.fromkeys(r, 0.5)) for r in ((2,), range(4)))
    assert one == pytest.approx(all_four, rel=1e-6)
    assert one > 1.2 * step_ns(what)


def test_a_slow_nic_slows_a_ring_as_if_all_were_slow():
    what = job(small_transformer(), NODES, seq_len=256)
    fabric = NODES.fabric
    assert fabric is not None
    slower = NODES.replace(fabric=fabric.replace(nic_gbps=fabric.nic_gbps / 4))
    everywhere = simulate(job(small_transformer(), slower, seq_len=256)).trace.step_ns
    assert step_ns(what, slow_links={"nic6": 0.25}) == pytest.approx(everywhere, rel=1e-6)
    # a ring sends and receives in lock-step: either direction will do
    assert step_ns(what, slow_links={"nic6>": 0.25}) == step_ns(what, slow_links={"nic6<": 0.25})


def test_a_slow_node_link_slows_its_node_s_collectives():
    what = job(small_transformer(), NODES, seq_len=256, tp=4)
    slower = NODES.replace(
        node_link=NODES.node_link.replace(bandwidth_bytes_per_s=NODES.node_link.bandwidth_bytes_per_s / 8)
    )
    everywhere = simulate(job(small_transformer(), slower, seq_len=256, tp=4)).trace.step_ns
    # data-parallel collectives across nodes follow those of the slow group, so the whole step is as late
    assert step_ns(what, slow_links={"gpu9": 0.125}) == pytest.approx(everywhere, rel=1e-3)


def test_a_lossy_link_is_a_slow_one():
    what = job(small_transformer(), NODES, seq_len=256)
    lossy = step_ns(what, lossy_links={"nic3": 0.01}, resent_packets=101)
    assert lossy == step_ns(what, slow_links={"nic3": 0.99 / 2})


def test_a_slow_uplink_slows_who_crosses_it():
    pods = NODES.replace(fabric={"base": "ndr400", "pod_nodes": 2, "oversubscription": 2.0, "rail_optimized": False})
    what = job(small_transformer(), pods, seq_len=256)
    names = sorted(link.name for link in simulate(what).trace.links if link.name.startswith("leaf"))
    one = step_ns(what, slow_links={names[0]: 0.25})
    all_of_them = step_ns(what, slow_links=dict.fromkeys(names, 0.25))
    assert one == pytest.approx(all_of_them, rel=1e-6)
    assert one > step_ns(what)


def test_a_slow_link_carries_what_it_carried():
    what = job(small_transformer(), NODES, seq_len=256)
    slow = simulate({**what, "faults": {"slow_links": {"nic0>": 0.5}}}).trace
    links = {link.name: link for link in slow.links}
    assert links["nic0>"].nbytes == links["nic1>"].nbytes if "nic1>" in links else True
    assert links["nic0>"].capacity_bytes_per_s == pytest.approx(NODES.nic_bytes_per_s / 2)


PLANS: list[dict[str, Any]] = [
    {},
    {"zero": 1, "grad_accum": 2},
    {"zero": 3, "grad_accum": 2},
    {"zero": 3, "dp_shard": 4},
    {"tp": 4},
    {"tp": 2, "zero": 1, "bucket_parameters": 2_000_000},
    {"tp": 2, "sequence_parallel": True, "zero": 3},
    {"pp": 2, "tp": 2, "grad_accum": 4, "zero": 1},
    {"pp": 2, "tp": 2, "cp": 2, "grad_accum": 2},
    {"pp": 4, "grad_accum": 6},
    {"pp": 2, "grad_accum": 4, "rank_order": "tp-pp-dp"},
]
FAULTS: list[dict[str, Any]] = [
    {"slow_gpus": {3: 0.6}},
    {"slow_gpus": {5: 0.9, 14: 0.5}},
    {"slow_links": {"nic6": 0.2}},
    {"slow_links": {"gpu1": 0.1}},
    {"loader": {"delay_s": 1e-3, "replicas": (1,)}},
]


@pytest.mark.parametrize("faults", FAULTS, ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_folded_around_a_fault_equals_every_rank(plan: dict[str, Any], faults: dict[str, Any]):
    what = {**job(small_transformer(), NODES, seq_len=256, **plan), "faults": faults}
    folded, unfolded = (simulate(what, fold=fold) for fold in (True, False))
    assert folded.trace.step_ns == unfolded.trace.step_ns
    assert sum(rank.replicas for rank in folded.ranks) == NODES.gpus
    assert len(unfolded.ranks) == NODES.gpus
    by_rank = {rank.rank: replace(rank, replicas=1) for rank in unfolded.ranks}
    for rank in folded.ranks:
        assert replace(rank, replicas=1) == by_rank[rank.rank]


def test_only_struck_replicas_are_simulated_beside_one_of_the_others():
    what = job(small_transformer(), Cluster.parse("h100-sxm:64x8"), tp=8, zero=1, seq_len=256)
    assert len(simulate({**what, "faults": {"slow_gpus": {100: 0.5}}}).ranks) == 2 * 8


@pytest.mark.parametrize("speed", [0.9, 0.6, 0.3])
def test_a_slower_device_never_helps(speed: float):
    for plan in PLANS[:5]:
        what = job(small_transformer(), NODES, seq_len=256, **plan)
        assert step_ns(what, slow_gpus={3: speed}) >= step_ns(what, slow_gpus={3: min(speed * 1.1, 1.0)})


def test_the_report_says_which_faults_there_were():
    warnings = simulate({**job(MODEL, ideal_cluster()), "faults": {"slow_gpus": {3: 0.5}}}).warnings
    assert "with faults: GPU of rank 3 at 50%" in warnings


def test_a_link_that_nobody_uses_is_told():
    warnings = simulate({**job(MODEL, ideal_cluster()), "faults": {"slow_links": {"lef0>": 0.5}}}).warnings
    assert "faults change nothing on lef0>: no simulated transfer uses a link of that name" in warnings


def test_what_would_unfold_to_hours_is_refused():
    what = job("llama3-8b", Cluster.parse("h100-sxm:1024x8"), tp=8, grad_accum=8)
    with pytest.raises(simpar.JobError, match="faults: tell the ranks apart, so that 8,192 of them would"):
        simulate({**what, "faults": {"jitter": {"spread": 0.1}}})


def test_the_interval_of_a_struck_step_holds_it():
    result = simulate({**job(small_transformer(), NODES, seq_len=256), "faults": {"slow_gpus": {3: 0.5}}})
    low, high = result.step_time_interval()
    assert low < result.step_time_s < high


def test_a_plan_stays_a_plan():
    assert Plan() == simpar.Job(model="gpt2", cluster="h100-sxm:8", faults={"seed": 3}).plan
