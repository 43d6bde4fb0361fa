"""What data parallelism asks for, read off the instructions: which collectives, how often, on which stream, when."""

import pytest

from simpar.job import Job
from simpar.plan.layout import lay_out
from simpar.program.ir import Collective, Run, Wait
from simpar.program.lower import lower
from simpar.simulation import simulate


def instructions(cluster: str = "h100-sxm:2x8", model: str = "llama3.2-1b", stage: int = 0, **plan):
    job = Job(model=model, cluster=cluster, plan={"seq_len": 512, **plan})
    return lower(job.model, job.cluster, lay_out(job.plan, job.model, job.cluster)).ranks[stage].instructions


def collectives(found, name):
    return [i for i in found if isinstance(i, Collective) and i.name == name]


def place(found, instruction):
    return next(n for n, i in enumerate(found) if i is instruction)


def last_backward(found):
    return max(n for n, i in enumerate(found) if isinstance(i, Run) and i.operation.phase == "backward")


def test_hsdp_reduces_among_replicas_beside_the_shards_collectives():
    found = collectives(instructions(zero=3, dp_shard=8), "gradients")
    assert {c.op: c.group.stream for c in found} == {"reduce_scatter": "dp", "all_reduce": "dp_replicas"}
    scattered, reduced = found[:2]
    assert reduced.nbytes == scattered.nbytes / 8
    assert len(scattered.group.ranks) == 8
    assert len(reduced.group.ranks) == 2


def test_zero_3_gathers_forward_and_backward_but_the_last_unit_once():
    units = 16 + 2  # layers, embedding, head
    found = collectives(instructions(zero=3, grad_accum=3), "parameters")
    assert len(found) == 3 * (2 * units - 1)


def test_without_resharding_only_a_backward_pass_makes_a_gather_necessary():
    plan = {"zero": 3, "pp": 2, "schedule": "gpipe", "grad_accum": 4, "reshard_after_forward": False}
    found = collectives(instructions(**plan), "parameters")
    units = 8 + 1
    # the first forward pass gathers; each backward pass but the first finds what the one before gave back
    assert len(found) == units * (1 + 3)


def test_compute_waits_for_the_previous_reduce_scatter():
    found = instructions(zero=3)
    second = place(found, collectives(found, "gradients")[1])
    waits = [i for i in found[:second] if isinstance(i, Wait) and i.stream == "compute"]
    first_end = next(i.event for i in found[place(found, collectives(found, "gradients")[0]) :] if hasattr(i, "event"))
    assert first_end in [wait.event for wait in waits]


@pytest.mark.parametrize("zero", [0, 1])
def test_without_overlap_gradients_are_reduced_after_the_last_backward_pass(zero):
    plan = {"zero": zero, "pp": 2, "schedule": "interleaved", "vpp": 2, "grad_accum": 4}
    found = instructions(**plan, overlap={"grad_reduce": False})
    reduced = collectives(found, "gradients")
    assert len(reduced) == 2
    assert min(place(found, c) for c in reduced) > last_backward(found)
    beside = instructions(**plan)
    assert min(place(beside, c) for c in collectives(beside, "gradients")) < last_backward(beside)


def test_only_the_first_chunk_of_the_first_stage_is_bucketed_unless_told_a_size():
    plan = {"zero": 1, "pp": 2, "cluster": "h100-sxm:1x8", "model": "llama3-8b"}
    counts = [len(collectives(instructions(stage=stage, **plan), "gradients")) for stage in (0, 1)]
    assert counts[0] > 5
    assert counts[1] == 1
    told = instructions(stage=1, bucket_parameters=500_000_000, **plan)
    assert len(collectives(told, "gradients")) > 1


def test_clipping_waits_for_the_gradients_of_all_stages():
    for plan, ranks in (({"zero": 1, "pp": 2}, 16), ({"pp": 2, "tp": 2}, 4)):
        (norm,) = collectives(instructions(**plan), "gradient norm")
        assert (norm.op, norm.nbytes, len(norm.group.ranks)) == ("all_reduce", 4.0, ranks)
    assert not collectives(instructions(pp=2, clip_gradients=False), "gradient norm")
    ends = [
        max(end for end, kind, lane in ends_of(result) if result.trace.lanes[lane].stage == stage)
        for result in [simulate(Job(model="llama3.2-1b", cluster="h100-sxm:2x8", plan={"pp": 2, "seq_len": 512}))]
        for stage in (0, 1)
    ]
    assert abs(ends[0] - ends[1]) < 0.2 * max(ends)  # both stages update at the end


def ends_of(result):
    spans = result.trace.spans
    return zip(spans.end_ns.tolist(), spans.kind.tolist(), spans.lane.tolist(), strict=True)


def test_a_tied_embedding_is_reduced_by_the_shard_where_gradients_are_sharded():
    plan = {"pp": 2, "model": "qwen3-0.6b"}
    (whole,) = collectives(instructions(zero=1, **plan), "tied embedding")
    (part,) = collectives(instructions(zero=3, **plan), "tied embedding")
    assert part.nbytes == whole.nbytes / 8


def test_a_tied_head_gathers_the_table_that_it_reads():
    found = collectives(instructions(zero=3, model="qwen3-0.6b"), "parameters")
    table = 151_936 * 1024 * 2
    assert sum(c.nbytes >= table for c in found) == 3  # embedding forward and backward, head once


def test_folding_costs_the_same_for_any_number_of_replicas():
    def copies(nodes):
        found = instructions(cluster=f"h100-sxm:{nodes}x8", zero=3)
        return sum(len(c.group.copies) for c in found if isinstance(c, Collective)) / len(found)

    assert copies(256) == copies(2)


@pytest.mark.parametrize(("zero", "op", "is_waited_for"), [(0, "all_reduce", False), (1, "reduce_scatter", True)])
def test_nanotron_waits_for_each_reduce_scatter_but_for_no_all_reduce(zero, op, is_waited_for):
    found = instructions(framework="nanotron", zero=zero, micro_batch=4)
    reductions = [c for c in collectives(found, "gradients") if c.op == op]
    assert len(reductions) > 1
    place_of_last = place(found, reductions[-1])
    between = found[place(found, reductions[0]) : place_of_last]
    waits = [i for i in between if isinstance(i, Wait) and i.stream == "compute"]
    assert bool(waits) is is_waited_for


def test_what_is_waited_for_is_exposed():
    job = Job(
        model="llama3.2-1b",
        cluster="h100-sxm:4x8",
        plan={"framework": "nanotron", "zero": 1, "micro_batch": 4, "seq_len": 4096, "tp": 2},
    )
    rank = simulate(job).ranks[0]
    assert rank.hidden_s.get("dp", 0.0) == pytest.approx(0.0, abs=1e-9)
    without = job.replace(plan={**job.plan.model_dump(exclude_unset=True), "zero": 0})
    assert simulate(without).ranks[0].hidden_s["dp"] > 0.0
