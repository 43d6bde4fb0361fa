"""Bounds: never above the simulation, close to it where it matters, and the parts that they are made of."""

from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic import even_model, ideal_cluster, small_transformer

from simpar import Cluster, Job, Plan, SimparError, simulate
from simpar.job import read_cluster, read_model
from simpar.plan.layout import lay_out
from simpar.program.place import place
from simpar.schedule import build
from simpar.search.blocks import BlockTimes
from simpar.search.bound import Bounds
from simpar.search.live import read_shape, shape_of
from simpar.search.space import AXES, axes_of, plans

CLUSTERS = {
    **{text: text for text in ("h100-sxm:8", "a100-sxm:2x4", "l40s:2x2", "h100-sxm:4x4")},
    "leaves": {"base": "h100-sxm:4x4", "fabric": {"pod_nodes": 2, "oversubscription": 4}},
    "two kinds": {"nodes": [{"device": "h100-sxm", "count": 1}, {"device": "h200-sxm", "count": 1}]},
    "torus": "tpu-v5e:4x4",
    "slow beside compute": {
        "base": "h100-sxm:2x4",
        "device": {"base": "h100-sxm", "collective_rate_during_compute": 0.5},
    },
}
EXTRA = ("dp_shard",)
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


@cache
def bounds_of(name: str) -> tuple[Cluster, Bounds]:
    cluster = Cluster.model_validate(read_cluster(CLUSTERS[name]))
    varied = (*axes_of({}), *EXTRA, "seq_len", "launch_s", "frozen_layers", "stage_sync", "grad_accum", "rank_order")
    return cluster, Bounds(small_transformer(), cluster, varied)


@st.composite
def some_plan(draw):
    schedule, vpp = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.sampled_from([2, 4])) if schedule not in ("1f1b", "gpipe") else draw(st.sampled_from([1, 2, 4]))
    tp = draw(st.sampled_from([1, 2, 4]))
    return {
        "tp": tp,
        "pp": pp,
        "cp": draw(st.sampled_from([1, 1, 2])),
        "zero": draw(st.integers(0, 3)),
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
    }


@given(name=st.sampled_from(sorted(CLUSTERS)), fields=some_plan())
@settings(max_examples=40, deadline=None)
def test_no_bound_is_above_the_simulation(name, fields):
    cluster, bounds = bounds_of(name)
    try:
        plan = Plan(**fields)
        bound = bounds.of(plan)
        result = simulate(Job(model=small_transformer(), cluster=cluster, plan=plan), allow_oom=True)
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


@pytest.mark.parametrize("fields", [{"pp": 2}, {"tp": 2, "pp": 2, "sequence_parallel": True}, {"zero": 1, "tp": 4}])
def test_the_bound_is_close_and_its_memory_exact(fields):
    cluster = Cluster.parse("h100-sxm:8")
    plan = Plan(**fields, global_batch=64, micro_batch=2)
    one = Job(model="llama3.2-1b", cluster=cluster, plan=plan)
    bound = Bounds(one.model, cluster, ("tp", "pp", "zero", "sequence_parallel")).of(plan)
    result = simulate(one, allow_oom=True)
    assert 0.93 < bound.step_s / result.step_time_s <= 1
    assert bound.memory_bytes == result.peak_memory_bytes


@pytest.mark.parametrize(("pp", "chunks"), [(2, 2), (2, 5), (4, 3), (8, 2)])
def test_a_long_interleaved_order_holds_no_more_than_a_short_one(pp, chunks):
    for m in (pp, 2 * pp, 3 * pp, 5 * pp, 8 * pp):
        short = shape_of("interleaved", pp, m, chunks, None)
        whole = read_shape(build("interleaved", pp=pp, microbatches=m, chunks=chunks))
        weights = np.arange(1, chunks + 1) ** 3
        for rank in range(pp):
            assert (short.live[short.rank == rank] @ weights).max() == (whole.live[whole.rank == rank] @ weights).max()


def layer_of(fields):
    model, cluster = small_transformer(), Cluster.parse("h100-sxm:4")
    chunks, _ = place(model, lay_out(Plan(**fields), model, cluster), build("1f1b", pp=1, microbatches=1))
    return chunks[0][1].unit


def test_a_block_without_collectives_takes_the_time_of_its_kernels():
    times = BlockTimes(Cluster.parse("h100-sxm:4"), "auto").of(layer_of({}).forward)
    assert times.alone_ns == times.calm_ns == times.kernels_ns > 0


def test_beside_compute_a_collective_costs_more_than_the_path_through_it():
    times = BlockTimes(Cluster.parse("h100-sxm:4"), "auto").of(layer_of({"tp": 4, "sequence_parallel": True}).backward)
    assert times.alone_ns >= times.calm_ns > times.kernels_ns


def test_every_default_choice_is_a_field_of_a_plan_and_every_combination_a_plan():
    assert set(AXES) <= set(Plan.model_fields)
    model, cluster = read_model("gpt2"), Cluster.parse("h100-sxm:2x4")
    base = Plan(global_batch=32)
    found = [tuple(sorted(fields.items())) for fields in plans(model, cluster, base, {})]
    assert len(found) == len(set(found)) > 300
    for fields in found:
        base.replace(**dict(fields))


def test_the_space_holds_all_that_is_valid():
    # a second way to it: every product of plain lists, kept if the plan can be laid out and scheduled
    model, cluster = read_model("gpt2"), Cluster.parse("h100-sxm:4")
    listed = {
        (f["tp"], f["pp"], f["micro_batch"], f["vpp"], f["zero"], f["sequence_parallel"])
        for f in plans(model, cluster, Plan(global_batch=8), {"recompute": ["none"]})
    }
    bounds = Bounds(model, cluster, axes_of({}))
    valid = set()
    for tp, pp, mb, vpp, zero, sp in product((1, 2, 4), (1, 2, 4), (1, 2, 4, 8), range(1, 7), range(4), (False, True)):
        fields = {"tp": tp, "pp": pp, "micro_batch": mb, "vpp": vpp, "zero": zero, "sequence_parallel": sp}
        if zero and tp * pp == 4:
            continue  # nothing to shard over: the same as zero 0
        try:
            plan = Plan(**fields, schedule="interleaved" if vpp > 1 else "1f1b", global_batch=8)
            bounds.of(plan)
        except SimparError:
            continue
        valid.add(tuple(fields.values()))
    assert valid <= listed
