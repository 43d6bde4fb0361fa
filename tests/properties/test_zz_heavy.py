"""What holds of every job: bounds of the step, order on streams, bytes, memory, and what faster hardware does."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic import columns, job, small_transformer

from simpar import Cluster, Overlap, Result, SimparError, simulate
from simpar.trace.breakdown import breakdown
from simpar.trace.trace import COMMUNICATION_KINDS, KINDS, Spans, Trace

CLUSTERS = {text: Cluster.parse(text) for text in ("h100-sxm:8", "a100-sxm:2x4", "l40s:2x2", "h100-sxm:3x4")}


@st.composite
def plans(draw) -> dict[str, Any]:
    pp = draw(st.sampled_from([1, 1, 2, 4]))
    plan: dict[str, Any] = {
        "tp": draw(st.sampled_from([1, 2, 4])),
        "pp": pp,
        "zero": draw(st.integers(0, 3)),
        "grad_accum": draw(st.integers(1, 5)),
        "micro_batch": draw(st.integers(1, 2)),
        "seq_len": draw(st.sampled_from([128, 256])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "schedule": draw(st.sampled_from(["gpipe", "1f1b"])),
        "stage_sync": draw(st.sampled_from(["message_passing", "condition_variable"])),
        "launch_s": draw(st.sampled_from([0.0, None, 5e-5])),
        "bucket_parameters": draw(st.sampled_from([None, 1_000_000])),
        "overlap": Overlap(
            grad_reduce=draw(st.booleans()),
            param_gather=draw(st.booleans()),
            tp=draw(st.sampled_from(["none", "bulk", "pipelined"])),
        ),
    }
    if pp == 2 and draw(st.booleans()):
        plan.update(schedule="interleaved", vpp=2, grad_accum=draw(st.sampled_from([2, 4])))
    if plan["tp"] > 1:
        plan["sequence_parallel"] = draw(st.booleans())
    if plan["stage_sync"] == "message_passing":
        plan["stage_buffer"] = draw(st.sampled_from([None, 1]))
    if plan["zero"] and draw(st.booleans()):
        plan["dp_shard"] = 2
    return plan


def run(cluster: Cluster, plan: dict[str, Any], *, fold: bool = True) -> Result:
    try:
        return simulate(job(small_transformer(tied_embeddings=plan["zero"] == 1), cluster, **plan), fold=fold)
    except SimparError:
        assume(False)
        raise


cases = settings(max_examples=250, deadline=None)


def assert_streams_are_in_order(spans: Spans, lanes: int) -> None:
    for lane in range(lanes):
        mine = np.flatnonzero(spans.lane == lane)
        assert (spans.start_ns[mine][1:] >= spans.end_ns[mine][:-1]).all()


def assert_step_is_bounded(trace: Trace, launch_s: float) -> None:
    spans, communication = trace.spans, len(KINDS) - len(COMMUNICATION_KINDS)
    # a collective or message may also wait for its own launch, when nothing at all runs
    launches = int((spans.kind >= communication).sum()) * launch_s * 1e9
    busy = np.bincount(spans.lane, weights=spans.duration_ns, minlength=len(trace.lanes))
    assert busy.max() <= trace.step_ns <= busy.sum() + launches
    assert spans.end_ns.max() == trace.step_ns
    assert spans.start_ns.min() >= 0
    assert (spans.duration_ns >= 0).all()


def assert_rows_point_where_they_should(trace: Trace) -> None:
    spans, kernels = trace.spans, trace.kernels()
    assert (np.diff(spans.start_ns) >= 0).all()
    assert (np.diff(kernels.start_ns) >= 0).all()
    assert (spans.parent == -1).all()
    cause = spans.predecessor
    assert (cause < len(spans)).all()
    assert (cause >= -1).all()
    known = cause >= 0
    assert (spans.end_ns[cause[known]] <= spans.start_ns[known]).all()
    assert ((kernels.parent >= 0) & (kernels.parent < len(spans))).all()
    rank = np.array([lane.rank for lane in trace.lanes])
    assert (rank[kernels.lane] == rank[spans.lane[kernels.parent]]).all()
    for table in (spans, kernels):
        assert ((table.name >= 0) & (table.name < len(trace.names))).all()
        assert ((table.kind >= 0) & (table.kind < len(KINDS))).all()


@cases
@given(st.sampled_from(sorted(CLUSTERS)), plans())
def test_every_trace_is_one_that_hardware_could_have_made(name, plan):
    result = run(CLUSTERS[name], plan)
    trace = result.trace
    assert_step_is_bounded(trace, result.layout.launch_s)
    assert_rows_point_where_they_should(trace)
    assert_streams_are_in_order(trace.spans, len(trace.lanes))
    kernels = trace.kernels()
    assert_streams_are_in_order(kernels, len(trace.lanes))
    assert (kernels.start_ns >= trace.spans.start_ns[kernels.parent]).all()
    assert (kernels.end_ns <= trace.spans.end_ns[kernels.parent]).all()
    # work is neither lost nor done twice on the way from operations to kernels
    assert kernels.flop.sum() == pytest.approx(trace.spans.flop.sum(), rel=1e-12)
    communication = [KINDS.index(kind) for kind in COMMUNICATION_KINDS]
    assert (trace.spans.flop[np.isin(trace.spans.kind, communication)] == 0).all()


@cases
@given(st.sampled_from(sorted(CLUSTERS)), plans())
def test_memory_ends_where_it_began_and_time_adds_up(name, plan):
    result = run(CLUSTERS[name], plan)
    trace, memory = result.trace, result.trace.memory
    for footprint in result.footprints:
        held = np.cumsum(memory.delta_bytes[memory.rank == footprint.rank])
        resident = sum(b for c, b in footprint.by_category.items() if c != "activations")
        assert held[-1] == resident
        assert held.min() >= 0
        assert held.max() == footprint.peak_bytes
    for time in breakdown(trace):
        parts = sum(time.compute_s.values()) + sum(time.exposed_s.values())
        parts += time.optimizer_s + time.interference_s + time.host_wait_s + time.bubble_s
        assert parts == pytest.approx(trace.step_s, abs=1e-9)
        assert time.bubble_s >= -1e-9


@cases
@given(st.sampled_from(sorted(CLUSTERS)), plans())
def test_folded_equals_unfolded_and_every_byte_that_leaves_arrives(name, plan):
    folded, unfolded = (run(CLUSTERS[name], plan, fold=fold) for fold in (True, False))
    assert folded.trace.step_ns == unfolded.trace.step_ns
    assert folded.bubble_fraction == pytest.approx(unfolded.bubble_fraction, abs=1e-9)
    links = {link.name: link.nbytes for link in unfolded.trace.links}
    for tier in ("gpu", "nic"):
        out, into = (sum(b for n, b in links.items() if n.startswith(tier) and n[-1] == way) for way in "><")
        assert out == pytest.approx(into)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(sorted(CLUSTERS)), plans())
def test_the_same_job_gives_the_same_trace(name, plan):
    once, again = (columns(run(CLUSTERS[name], plan).trace) for _ in range(2))
    assert once == again


def faster(cluster: Cluster, compute: float, network: float) -> Cluster:
    """The cluster with quicker parts, and without interference."""
    device = cluster.device
    device = device.replace(
        peak_flop_per_s={k: v * compute for k, v in device.peak_flop_per_s.items()},
        memory_bytes_per_s=device.memory_bytes_per_s * compute,
        compute_rate_during_collectives=1.0,
    )
    rates = ("nominal_bytes_per_s", "bandwidth_bytes_per_s")
    link = cluster.node_link
    if link.beyond is not None:
        link = link.replace(beyond=link.beyond.replace(**{r: getattr(link.beyond, r) * network for r in rates}))
    link = link.replace(**{r: getattr(link, r) * network for r in rates})
    fabric = cluster.fabric and cluster.fabric.replace(nic_gbps=cluster.fabric.nic_gbps * network)
    return cluster.replace(device=device, node_link=link, fabric=fabric)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(sorted(CLUSTERS)), plans(), st.sampled_from([(1.5, 1.0), (1.0, 2.0), (3.0, 3.0)]))
def test_faster_hardware_never_hurts_an_uncontended_job(name, plan, gain):
    # one kind of traffic at a time: no two groups share links, so nothing can be reordered to a disadvantage
    plan = {**plan, "tp": 1, "sequence_parallel": False, "bucket_parameters": None}
    if plan["pp"] > 1:
        plan = {**plan, "zero": min(plan["zero"], 1), "overlap": Overlap(grad_reduce=False, param_gather=False)}
    before, after = (run(faster(CLUSTERS[name], *factors), plan) for factors in ((1.0, 1.0), gain))
    # whole nanoseconds: each kernel and message may be rounded the other way
    spans = len(before.trace.kernels()) + len(before.trace.spans)
    assert after.trace.step_ns <= before.trace.step_ns + spans
