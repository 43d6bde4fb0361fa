"""Bounds: never above the simulation, close to it where it matters, and the parts that they are made of."""

from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic import even_model, ideal_cluster, small_transformer

from simpar import Cluster, Job, Plan, PlanError, SimparError, simulate
from simpar.engine.simulate import execute
from simpar.job import read_cluster
from simpar.plan.layout import lay_out
from simpar.program.ir import Program, RankProgram
from simpar.program.place import place
from simpar.schedule import build
from simpar.search.blocks import BlockTimes
from simpar.search.bound import Bounds
from simpar.search.live import read_shape, read_turns, shape_of, turns_of
from simpar.search.space import AXES

CLUSTERS = {
    **{text: text for text in ("h100-sxm:8", "a100-sxm:2x4", "l40s:2x2", "h100-sxm:4x4")},
    **{text: text for text in ("l40s:4x4", "h100-pcie:4x4")},
    "leaves": {"base": "h100-sxm:4x4", "fabric": {"pod_nodes": 2, "oversubscription": 4}},
    "two kinds": {"nodes": [{"device": "h100-sxm", "count": 1}, {"device": "h200-sxm", "count": 1}]},
    "two hosts a node": "gb200:2x4",
    "slow hosts": {"base": "h100-sxm:2x4", "host": {"base": "dgx-h100", "device": {"base": "cpu"}}},
    "torus": "tpu-v5e:4x4",
    "slow network": {"base": "h100-sxm:4x4", "fabric": {"nic_gbps": 25}},
    "slow beside compute": {
        "base": "h100-sxm:2x4",
        "device": {"base": "h100-sxm", "collective_rate_during_compute": 0.5},
    },
}
EXTRA = ("dp_shard", "reshard_after_forward", "overlap")
SCHEDULES = [
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("looped-bfs", 2),
    ("zb-h1", 1),
    ("zb-v", 1),
    ("dualpipe", 1),
    ("dualpipev", 1),
]


MODELS = {
    "dense": small_transformer(),
    "tied": small_transformer(tied_embeddings=True),
    "experts": small_transformer(moe={"experts": 4, "top_k": 2, "ffn_hidden": 512, "first_dense": 1}),
}


@cache
def bounds_of(name: str, model: str, software: str) -> tuple[Cluster, Bounds]:
    cluster = Cluster.model_validate(read_cluster(CLUSTERS[name]))
    varied = (*AXES, *EXTRA, "seq_len", "launch_s", "frozen_layers", "stage_sync", "grad_accum", "rank_order")
    varied = (*varied, "layer_split", "sync_every", "clip_gradients", "collective_algorithm", "offload")
    return cluster, Bounds(MODELS[model], cluster, varied)


@st.composite
def some_plan(draw):
    schedule, vpp = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.sampled_from([2, 4])) if schedule not in ("1f1b", "gpipe") else draw(st.sampled_from([1, 2, 4]))
    tp = draw(st.sampled_from([1, 2, 4]))
    zero = draw(st.integers(0, 3))
    sharded = {"reshard_after_forward": draw(st.booleans())} if zero == 3 else {}
    pipelined = {"overlap": {"tp": "pipelined"}} if draw(st.booleans()) else {}
    return {
        **sharded,
        **pipelined,
        "tp": tp,
        "pp": pp,
        "cp": draw(st.sampled_from([1, 1, 2])),
        "zero": zero,
        "dp_shard": draw(st.sampled_from([None, None, 2])),
        "sequence_parallel": tp > 1 and draw(st.booleans()),
        "micro_batch": draw(st.integers(1, 2)),
        "grad_accum": draw(st.sampled_from([1, 2, 3, 4, 8, 12])),
        "seq_len": draw(st.sampled_from([128, 256])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "schedule": schedule,
        "vpp": vpp,
        "launch_s": draw(st.sampled_from([0.0, None, 5e-5])),
        "rank_order": draw(st.sampled_from(["tp-dp-pp", "tp-dp-pp", "tp-pp-dp"])),
        "frozen_layers": draw(st.sampled_from([None, None, 1])),
        "stage_sync": draw(st.sampled_from(["message_passing", "condition_variable"])),
        "layer_split": draw(st.sampled_from([None, None, "greedy", "balanced"])),
        "framework": draw(st.sampled_from(["megatron-core", "megatron-core", "nanotron", "megatron-lm-2021"])),
        "sync_every": draw(st.sampled_from([1, 1, 1, 2])),
        "collective_algorithm": draw(st.sampled_from(["auto", "auto", "ring", "tree"])),
        "offload": draw(st.sampled_from(["none", "none", "optimizer", "activations", "both"])),
    }


@given(
    name=st.sampled_from(sorted(CLUSTERS)),
    model=st.sampled_from(sorted(MODELS)),
    fields=some_plan(),
    ep=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=60, deadline=None)
def test_no_bound_is_above_the_simulation(name, model, fields, ep):
    cluster, bounds = bounds_of(name, model, fields["framework"])
    spread = {"ep": ep, "etp": 1 if fields["sequence_parallel"] else None} if model == "experts" else {}
    if model == "tied":
        fields = {**fields, "frozen_layers": None}
    try:
        plan = Plan(**fields, **spread)
        bound = bounds.of(plan)
        result = simulate(Job(model=MODELS[model], cluster=cluster, plan=plan), allow_oom=True)
    except SimparError:
        assume(False)
        raise
    assert bound.step_s <= result.step_time_s
    assert bound.memory_bytes <= result.peak_memory_bytes


def test_the_bound_of_an_even_pipeline_is_its_closed_form():
    # (m + pp - 1) (f + b): the busiest rank, what fills before it and what drains after it
    model = even_model(4, forward=1000, backward=2000)
    for name, vpp, m in (("1f1b", 1, 6), ("interleaved", 2, 8)):
        pp = 4 if vpp == 1 else 2
        plan = Plan(pp=pp, schedule=name, vpp=vpp, grad_accum=m, optimizer="sgd", launch_s=0)
        one = ideal_cluster(gpus_per_node=pp)
        bound = Bounds(model, one, ("pp",)).of(plan)
        stage = 3000 * 4 // (pp * vpp)
        assert bound.step_s * 1e9 == pytest.approx(stage * (m * vpp + pp - 1), rel=1e-5)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("llama3.2-1b", {"pp": 2}),
        ("llama3.2-1b", {"tp": 2, "pp": 2, "sequence_parallel": True}),
        ("llama3.2-1b", {"zero": 1, "tp": 4}),
        ("llama3.2-1b", {"zero": 2, "pp": 2}),
        ("llama3.2-1b", {"zero": 3, "cp": 2}),
        ("qwen1.5-moe-a2.7b", {"zero": 1, "ep": 4, "pp": 2}),
    ],
)
def test_the_bound_is_close_and_its_memory_exact(model, fields):
    bound, result = bound_and_result(model, fields)
    assert 0.93 < bound.step_s / result.step_time_s <= 1
    assert bound.memory_bytes == result.peak_memory_bytes


@pytest.mark.parametrize(
    ("fields", "least"),
    [
        # each pass gathers behind the reduction that the one before it left
        ({"zero": 3, "pp": 2, "schedule": "interleaved", "vpp": 4, "grad_accum": 32}, 0.8),
        ({"zero": 3, "pp": 4, "grad_accum": 8}, 0.75),
        # reductions of every microbatch slow the kernels that collectives of tensor parallelism leave alone
        ({"zero": 2, "tp": 2, "sequence_parallel": True, "overlap": {"tp": "pipelined"}, "grad_accum": 8}, 0.9),
    ],
)
def test_the_bound_is_close_where_data_parallelism_takes_long(fields, least):
    one = Job(model="llama3.2-1b", cluster="h100-sxm:2x8", plan={"grad_accum": 4, "seq_len": 2048, **fields})
    bound = Bounds(one.model, one.cluster, tuple(AXES)).of(one.plan)
    assert least < bound.step_s / simulate(one, allow_oom=True).step_time_s <= 1


@pytest.mark.parametrize(
    "fields",
    [
        # all gradients must be there before the first parameter is updated
        {"zero": 1, "tp": 4, "sequence_parallel": True},
        {"zero": 0, "tp": 4, "pp": 2, "recompute": "full"},
        # of every microbatch, hosts add up gradients
        {"zero": 2, "tp": 8, "sequence_parallel": True},
        {"zero": 3, "tp": 4, "sequence_parallel": True, "micro_batch": 2},
    ],
)
def test_the_bound_is_close_where_hosts_take_long(fields):
    batch = {"global_batch": 16, "seq_len": 4096}
    one = Job(model="llama3-70b", cluster="h100-sxm:1x8", plan={**batch, **fields, "offload": "optimizer"})
    bounds = Bounds(one.model, one.cluster, tuple(AXES), prunes=False)
    bound, result = bounds.of(one.plan), simulate(one, allow_oom=True)
    assert 0.9 < bound.step_s / result.step_time_s <= 1
    # which the passes alone do not say
    beside = bounds.of(one.plan.replace(offload="none"))
    assert beside.step_s < 0.7 * result.step_time_s


def test_what_follows_backward_passes():
    # rank 0 of two runs F0 F1 B0 F2 B1 F3 B2 B3; each backward pass takes away what forward left there
    first, second = (turns_of("1f1b", rank, pp=2, microbatches=4, chunks=1, group=None) for rank in range(2))
    assert [count.tolist() for count in first] == [[2], [2], [1]]
    assert [count.tolist() for count in second] == [[3], [3], [0]]


@pytest.mark.parametrize(
    ("name", "pp", "m", "chunks"), [("1f1b", 4, 40, 1), ("interleaved", 4, 32, 3), ("interleaved", 2, 24, 5)]
)
def test_turns_of_a_long_order_are_those_of_a_short_one_over_and_over(name, pp, m, chunks):
    whole = build(name, pp=pp, microbatches=m, chunks=chunks)
    for rank in range(pp):
        short, long = (
            turns_of(name, rank, pp=pp, microbatches=m, chunks=chunks, group=None),
            read_turns(whole.ranks[rank]),
        )
        assert [count.tolist() for count in short] == [count.tolist() for count in long]


@pytest.mark.parametrize("name", ["l40s:4x4", "h100-pcie:4x4"])
@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize(("tp", "cp"), [(4, 2), (4, 1), (2, 2), (1, 4)])
def test_no_bound_is_above_the_simulation_where_passes_wait_for_their_own_collectives(name, zero, tp, cp):
    # the gathers and reductions of ZeRO, long on such links, set back no kernel while none runs
    one = Job(
        model="llama3.2-1b",
        cluster=Cluster.parse(name),
        plan=Plan(tp=tp, cp=cp, sequence_parallel=tp > 1, zero=zero, global_batch=16, seq_len=2048),
    )
    bound = Bounds(one.model, one.cluster, tuple(AXES)).of(one.plan)
    assert bound.step_s <= simulate(one, allow_oom=True).step_time_s


def test_collectives_cost_what_the_algorithm_of_each_plan_does():
    model, cluster = small_transformer(), Cluster.parse("h100-sxm:4x8")
    bounds = Bounds(model, cluster, (*AXES, "collective_algorithm"))
    found = set()
    for algorithm in ("auto", "ring", "halving_doubling", "auto"):
        plan = Plan(collective_algorithm=algorithm, tp=4, zero=2, global_batch=64, seq_len=128, launch_s=0)
        alone = Bounds(model, cluster, tuple(AXES)).of(plan)  # whatever was asked before
        assert bounds.of(plan) == alone
        assert alone.step_s <= simulate(Job(model=model, cluster=cluster, plan=plan)).step_time_s
        found.add(alone.step_s)
    assert len(found) > 1


def test_optimizer_states_on_parameter_servers_are_not_on_the_workers():
    cluster = Cluster.parse("h100-sxm:8")
    fields = {"recompute": "full", "global_batch": 8, "seq_len": 1024}
    one = Job(model="llama3-8b", cluster=cluster, plan=Plan(sync={"on": "hosts"}, **fields))
    beside = one.plan.replace(sync="all_reduce")
    bounds = Bounds(one.model, cluster, (*AXES, "sync"))
    result = simulate(one)
    assert result.fits
    assert bounds.of(one.plan).memory_bytes <= result.peak_memory_bytes
    assert bounds.of(beside).memory_bytes > bounds.capacity_bytes


def test_unpruned_bounds_rule_out_nothing():
    cluster, plan = Cluster.parse("l40s:2"), Plan(global_batch=2, seq_len=128)
    model = Job(model="llama3-8b", cluster=cluster, plan=plan).model
    assert Bounds(model, cluster, tuple(AXES)).of(plan).step_s == 0
    unpruned = Bounds(model, cluster, tuple(AXES), prunes=False)
    bound = unpruned.of(plan)
    assert bound.step_s > 0
    assert cluster.device.memory_bytes < bound.memory_bytes < unpruned.capacity_bytes


def test_the_memory_of_sharded_experts_is_exact():
    bound, result = bound_and_result("qwen1.5-moe-a2.7b", {"zero": 3, "ep": 2})
    assert bound.memory_bytes == result.peak_memory_bytes


def bound_and_result(model, fields):
    cluster = Cluster.parse("h100-sxm:8")
    plan = Plan(**fields, global_batch=64, micro_batch=2)
    one = Job(model=model, cluster=cluster, plan=plan)
    bound = Bounds(one.model, cluster, ("tp", "pp", "zero", "sequence_parallel")).of(plan)
    return bound, simulate(one, allow_oom=True)


@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (2, 5), (4, 3), (8, 2)])
def test_a_long_interleaved_order_holds_no_more_than_a_short_one(pp, chunks):
    for m in (pp, 2 * pp, 3 * pp, 5 * pp, 8 * pp, 3 * (pp + 1), 5 * (pp + 1)):
        try:
            whole = read_shape(build("interleaved", pp=pp, microbatches=m, chunks=chunks))
        except PlanError:
            continue
        short = shape_of("interleaved", pp, m, chunks, None)
        weights = np.arange(1, chunks + 1) ** 3
        for rank in range(pp):
            assert (short.live[short.rank == rank] @ weights).max() == (whole.live[whole.rank == rank] @ weights).max()


def test_a_long_1f1b_order_has_the_moments_of_a_short_one():
    short, whole = shape_of("1f1b", 4, 40, 1, None), read_shape(build("1f1b", pp=4, microbatches=40))
    assert short.schedule.microbatches < 40
    assert (np.column_stack((short.rank, short.live)) == np.column_stack((whole.rank, whole.live))).all()


def test_microbatches_that_form_no_groups_have_no_shape():
    with pytest.raises(PlanError, match="13 microbatches do not form 3 equal groups"):
        shape_of("interleaved", 4, 13, 2, None)


def layer_of(fields, model=None):
    model, cluster = model or small_transformer(), Cluster.parse("h100-sxm:4")
    chunks, _ = place(model, lay_out(Plan(**fields), model, cluster), build("1f1b", pp=1, microbatches=1))
    return chunks[0][-2].unit


def engine_ns(block, cluster):
    alone = Program(ranks=(RankProgram(0, 0, 1, (), block.body),), launch_s=0.0)
    return execute(alone, cluster).step_ns


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tp": 4},
        {"tp": 4, "sequence_parallel": True, "overlap": {"tp": "pipelined"}},
        {"tp": 2, "cp": 2, "sequence_parallel": True},
        {"cp": 4, "cp_method": "all_gather"},
        {"tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True},
    ],
)
def test_the_longest_path_is_what_the_engine_says_where_nothing_slows_anything(fields):
    cluster = Cluster.parse("h100-sxm:4")
    calm = {"compute_rate_during_collectives": 1.0, "collective_rate_during_compute": 1.0}
    unslowed = cluster.replace(device=cluster.device.replace(**calm))
    unit = layer_of(fields, MODELS["experts"] if "ep" in fields else None)
    times = BlockTimes(cluster, "auto")
    for block in (unit.forward, unit.backward):
        assert times.kernels_ns(block) <= times.calm_ns(block) == engine_ns(block, unslowed)
        assert times.alone_ns(block) == engine_ns(block, cluster) >= times.calm_ns(block)


def test_beside_compute_a_collective_costs_more_than_the_path_through_it():
    forward = layer_of({"tp": 4, "sequence_parallel": True, "overlap": {"tp": "pipelined"}}).forward
    times = BlockTimes(Cluster.model_validate(read_cluster(CLUSTERS["slow beside compute"])), "auto")
    assert times.alone_ns(forward) > times.calm_ns(forward) > times.kernels_ns(forward)


def test_a_load_is_of_the_plan_that_asks():
    # gradients in bf16 are half as many bytes, whatever was asked before
    cluster = Cluster.parse("h100-sxm:8")
    bounds = Bounds(small_transformer(), cluster, (*AXES, "grad_dtype"))
    plan = Plan(zero=2, grad_accum=64, seq_len=64, launch_s=0)
    first, second, third = (bounds.of(plan.replace(grad_dtype=dtype)) for dtype in ("fp32", "bf16", "fp32"))
    assert first == third
    assert second.step_s < first.step_s
    assert second.memory_bytes < first.memory_bytes
