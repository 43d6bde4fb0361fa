"""One replica that stands for all gives exactly what the simulation of every rank gives."""

from typing import Any

import pytest
from synthetic import columns, small_transformer

from simpar import Cluster, Overlap, Plan
from simpar.engine.simulate import execute
from simpar.plan.layout import lay_out
from simpar.program.fold import replicas_are_alike
from simpar.program.lower import lower
from simpar.trace.trace import Trace

NODES = Cluster.parse("h100-sxm:4x4")
QUIET = NODES.replace(device=NODES.device.replace(collective_rate_during_compute=0.7))
PODS = NODES.replace(fabric={"base": "ndr400", "pod_nodes": 2, "oversubscription": 4.0})
LEAVES = NODES.replace(fabric={"base": "ndr400", "pod_nodes": 1, "oversubscription": 3.0, "rail_optimized": False})
EIGHT_PODS = Cluster.parse("h100-sxm:8x2").replace(fabric={"base": "ndr400", "pod_nodes": 2, "oversubscription": 4.0})
UNEVEN_PODS = Cluster.parse("h100-sxm:6x2").replace(fabric={"base": "ndr400", "pod_nodes": 4, "oversubscription": 5.0})

PLANS: list[dict[str, Any]] = [
    {},
    {"zero": 1},
    {"zero": 2, "grad_accum": 2},
    {"zero": 3, "grad_accum": 2},
    {"zero": 3, "reshard_after_forward": False},
    {"zero": 3, "dp_shard": 4},
    {"zero": 1, "dp_shard": 4},
    {"zero": 2, "dp_shard": 2, "grad_accum": 2},
    {"tp": 4},
    {"tp": 2, "sequence_parallel": True, "zero": 3},
    {"tp": 2, "zero": 1, "bucket_parameters": 2_000_000},
    {"tp": 4, "sequence_parallel": True, "zero": 3, "dp_shard": 2, "overlap": Overlap(tp="pipelined")},
    {"pp": 4, "grad_accum": 6},
    {"pp": 4, "grad_accum": 6, "schedule": "gpipe", "zero": 2},
    {"pp": 2, "vpp": 2, "schedule": "interleaved", "grad_accum": 4, "zero": 1},
    {"pp": 2, "tp": 2, "grad_accum": 4, "zero": 1, "recompute": "full"},
    {"pp": 2, "tp": 2, "grad_accum": 4, "zero": 3, "sequence_parallel": True, "recompute": "selective"},
    {"pp": 2, "tp": 4, "grad_accum": 3, "stage_sync": "condition_variable"},
    {"pp": 4, "tp": 2, "grad_accum": 5, "stage_buffer": 1, "zero": 1},
    {"pp": 2, "grad_accum": 3, "zero": 1, "dp_shard": 4, "bucket_parameters": 2_000_000},
    {"pp": 2, "grad_accum": 3, "overlap": Overlap(grad_reduce=False, param_gather=False), "zero": 1},
    {"pp": 2, "grad_accum": 3, "overlap": Overlap(grad_reduce=False, param_gather=False), "zero": 3},
]
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 512, "shared_ffn_hidden": 512, "first_dense": 1}
EXPERT_PLANS: list[dict[str, Any]] = [
    {"ep": 8},
    {"ep": 4, "etp": 2, "zero": 1},
    {"ep": 8, "pp": 2, "grad_accum": 3, "zero": 2},
    {"ep": 4, "zero": 3, "grad_accum": 2},
    {"ep": 2, "zero": 3, "dp_shard": 8},
    {"tp": 2, "ep": 4, "zero": 1, "bucket_parameters": 1_000_000},
    {"tp": 2, "ep": 8, "etp": 1, "sequence_parallel": True, "zero": 1, "overlap": Overlap(ep=True)},
    {"tp": 2, "cp": 2, "ep": 4, "etp": 1, "sequence_parallel": True, "pp": 2, "grad_accum": 2},
]
CONTEXT_PLANS: list[dict[str, Any]] = [
    {"cp": 2, "zero": 1},
    {"cp": 4, "cp_method": "all_gather", "zero": 3},
    {"cp": 8, "cp_method": "all_to_all", "zero": 1},
    {"cp": 4, "tp": 2, "sequence_parallel": True, "pp": 2, "grad_accum": 2},
]
TIED = {"pp": 2, "tp": 2, "grad_accum": 2, "zero": 1}


def run(cluster: Cluster, plan: dict[str, Any], *, fold: bool, opened: bool = False, **model: Any) -> Trace:
    described = small_transformer(**model)
    layout = lay_out(Plan(**{"seq_len": 512, **plan}), described, cluster)
    return execute(lower(described, cluster, layout, fold=fold, opened=opened), cluster)


def rank_spans(trace: Trace, rank: int) -> list[tuple[Any, ...]]:
    """The operations of a rank."""
    spans = trace.spans
    wanted = {i: lane.stream for i, lane in enumerate(trace.lanes) if lane.rank == rank}
    return sorted(
        (wanted[lane], start, length, trace.names[name], mb, chunk)
        for lane, start, length, name, mb, chunk in zip(
            *(getattr(spans, f).tolist() for f in ("lane", "start_ns", "duration_ns", "name", "microbatch", "chunk")),
            strict=True,
        )
        if lane in wanted
    )


def assert_folds(cluster: Cluster, plan: dict[str, Any], **model: Any) -> None:
    folded = run(cluster, plan, fold=True, **model)
    unfolded = run(cluster, plan, fold=False, **model)
    assert folded.step_ns == unfolded.step_ns
    for rank in dict.fromkeys(lane.rank for lane in folded.lanes):
        assert rank_spans(folded, rank) == rank_spans(unfolded, rank)
    assert len(dict.fromkeys(lane.rank for lane in unfolded.lanes)) == cluster.gpus
    # every rank of the job is stood for once
    stood_for = {lane.rank: lane.replicas for lane in folded.lanes}
    assert sum(stood_for.values()) == cluster.gpus


def name(plan: dict[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in plan.items() if k != "overlap") + (",overlap" if "overlap" in plan else "")


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_a_folded_job_equals_every_rank(plan):
    assert_folds(NODES, plan)


@pytest.mark.parametrize("plan", PLANS[3::3], ids=name)
def test_a_folded_job_equals_every_rank_where_collectives_are_slowed_too(plan):
    assert_folds(QUIET, plan)


@pytest.mark.parametrize("cluster", [PODS, LEAVES, EIGHT_PODS], ids=["pods", "leaves", "eight pods"])
@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_a_folded_job_equals_every_rank_where_leaf_switches_are_oversubscribed(plan, cluster):
    if plan.get("tp", 1) > cluster.gpus_per_node:
        plan = {**plan, "tp": 2}
    assert_folds(cluster, plan)


@pytest.mark.parametrize("cluster", [NODES, PODS, LEAVES], ids=["nodes", "pods", "leaves"])
@pytest.mark.parametrize("plan", EXPERT_PLANS, ids=name)
def test_experts_fold(plan, cluster):
    assert_folds(cluster, plan, moe=MOE)


@pytest.mark.parametrize("cluster", [NODES, PODS, LEAVES], ids=["nodes", "pods", "leaves"])
@pytest.mark.parametrize("plan", CONTEXT_PLANS, ids=name)
def test_context_parallel_ranks_fold(plan, cluster):
    assert_folds(cluster, plan)


@pytest.mark.parametrize("plan", [{"ep": 8}, {"tp": 2, "ep": 4, "pp": 2, "grad_accum": 2}], ids=name)
def test_experts_fold_with_stages_counted_first(plan):
    assert_folds(NODES, {**plan, "rank_order": "tp-pp-dp"}, moe=MOE)


@pytest.mark.parametrize(
    "plan", [{"ep": 3}, {"cp": 3}, {"ep": 6, "etp": 1, "tp": 2, "sequence_parallel": True}], ids=name
)
def test_groups_that_straddle_nodes_unevenly_are_not_folded(plan):
    cluster = Cluster.parse("h100-sxm:3x4")
    moe = {**MOE, "experts": 6}
    described = small_transformer(moe=moe)
    layout = lay_out(Plan(seq_len=768, **plan), described, cluster)
    assert not replicas_are_alike(layout, cluster)
    assert_folds(cluster, {"seq_len": 768, **plan}, moe=moe)


@pytest.mark.parametrize("plan", [TIED, {"pp": 4, "grad_accum": 4}, {"pp": 2, "zero": 3}], ids=name)
def test_a_tied_embedding_folds(plan):
    assert_folds(PODS, plan, tied_embeddings=True)


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2, "grad_accum": 4},
        {"pp": 3, "layer_split": (1, 2, 1), "grad_accum": 4},
        {"zero": 3, "dp_shard": 4},
        {"zero": 3, "dp_shard": 6, "pp": 2, "grad_accum": 2},
        {"zero": 1, "dp_shard": 2, "pp": 3, "layer_split": (1, 2, 1)},
    ],
    ids=name,
)
def test_replicas_that_cross_pods_unevenly_fold(plan):
    assert_folds(UNEVEN_PODS, plan)


@pytest.mark.parametrize("plan", [{"zero": 3, "dp_shard": 3}, {"pp": 2, "grad_accum": 3, "zero": 1}], ids=name)
def test_replicas_that_straddle_nodes_unevenly_are_not_folded(plan):
    cluster = Cluster.parse("h100-sxm:3x4")
    assert not replicas_are_alike(lay_out(Plan(**plan), small_transformer(), cluster), cluster)
    assert_folds(cluster, plan)


def test_replicas_that_straddle_sockets_unevenly_are_not_folded():
    # GPUs 0 to 7 are near each other, so the first replicas of two six-rank stages are faster than the others
    far = NODES.node_link.replace(bandwidth_bytes_per_s=2e9)
    cluster = Cluster.parse("h100-sxm:12").replace(node_link=NODES.node_link.replace(reach=8, beyond=far))
    assert_folds(cluster, {"pp": 2, "grad_accum": 3})
    durations = {
        length for kind, _, length, *_ in rank_spans(run(cluster, {"pp": 2}, fold=False), 0) if kind == "pp_forward"
    }
    others = {
        length for kind, _, length, *_ in rank_spans(run(cluster, {"pp": 2}, fold=False), 5) if kind == "pp_forward"
    }
    assert durations != others


@pytest.mark.parametrize("plan", [PLANS[1], PLANS[9], PLANS[16]], ids=name)
def test_every_kernel_of_every_rank_adds_up_to_the_same_step(plan):
    # blocks that nobody disturbs may run as one event; with all of them opened nothing changes
    device = NODES.device.replace(compute_rate_during_collectives=1.0)
    cluster = NODES.replace(device=device)
    folded = run(cluster, plan, fold=True)
    assert run(cluster, plan, fold=False, opened=True).step_ns == folded.step_ns
    assert run(cluster, plan, fold=True, opened=True).step_ns == folded.step_ns


def test_equal_jobs_give_equal_traces():
    once, again = (columns(run(PODS, PLANS[16], fold=True)) for _ in range(2))
    assert once == again


def test_folding_saves_simulating():
    trace = run(Cluster.parse("h100-sxm:64x8"), {"tp": 8, "pp": 4, "zero": 1, "grad_accum": 8}, fold=True)
    assert {lane.rank for lane in trace.lanes} == {0, 128, 256, 384}
    assert {lane.replicas for lane in trace.lanes} == {128}


def test_a_custom_graph_is_not_folded():
    edges = [(f"gpu{i}", "switch", 400, 1) for i in range(4)]
    cluster = Cluster.parse("h100-sxm:4").replace(graph=edges)
    layout = lay_out(Plan(zero=1), small_transformer(), cluster)
    assert not replicas_are_alike(layout, cluster)
