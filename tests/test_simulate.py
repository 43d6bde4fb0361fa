"""From a job to its result: what fits, what is warned of, what the figures mean."""

import gc
import re
import time

import pytest
import yaml
from synthetic import even_model, ideal_cluster, ideal_device, job, small_transformer

from simpar import Cluster, DoesNotFitError, Job, JobError, Plan, PlanError, SimparError, mlp, simulate
from simpar.trace.trace import KINDS

BIG = {"model": "llama3-8b", "cluster": "h100-sxm:1x8"}


# ---- memory ---------------------------------------------------------------------------------------------------------


def suggestions(text: str) -> list[dict[str, object]]:
    """The changes of the plan that an error offers, read from its text."""
    offered = re.search(r"what would fit: (.*), or simulate it anyway", text)
    assert offered, text
    found = []
    for part in offered.group(1).split("; "):
        changes: dict[str, object] = {}
        for word in part.rpartition(" (")[0].replace("without ", "without=").split():
            key, _, value = word.partition("=")
            changes.update({value: None} if key == "without" else {key: yaml.safe_load(value)})
        found.append(changes)
    return found


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"micro_batch": 4},
        {"micro_batch": 2, "grad_accum": 3, "zero": 3, "seq_len": 8192, "recompute": "selective"},
        {"tp": 2, "seq_len": 8192, "micro_batch": 2},
        {"zero": 3, "seq_len": 8192, "micro_batch": 8},
        {"zero": 1, "dp_shard": 2},
        {"pp": 2, "grad_accum": 16, "schedule": "gpipe", "zero": 1},
    ],
)
def test_what_an_error_suggests_really_fits(plan):
    with pytest.raises(DoesNotFitError) as caught:
        simulate({**BIG, "plan": plan})
    text = str(caught.value)
    assert re.match(r"stage \d+ needs [\d,.]+ GiB \(.*\), but h100-sxm has 79\.\d GiB; ", text)
    plans = []
    for changes in suggestions(text):
        changed = Plan.model_validate({**Plan(**plan).model_dump(), **changes})
        result = simulate({**BIG, "plan": changed})
        assert result.fits
        assert changed not in plans  # nothing is offered twice
        plans.append(changed)
        if "micro_batch" in changes:
            assert result.layout.global_batch == result.layout.dp * plan.get("micro_batch", 1) * plan.get(
                "grad_accum", 1
            )


def test_what_leaves_next_to_nothing_free_is_called_tight():
    with pytest.raises(DoesNotFitError) as caught:
        simulate(
            {"model": "llama3-70b", "cluster": "h100-sxm:1x8", "plan": {"tp": 8, "global_batch": 64, "seq_len": 4096}}
        )
    assert "offload=optimizer zero=1 (79 GiB, tight); offload=optimizer zero=3 recompute=full (25 GiB)," in str(
        caught.value
    )


def test_where_nothing_would_fit_the_error_says_so():
    with pytest.raises(DoesNotFitError, match="none of the usual changes of the plan would fit; use more GPUs, or"):
        simulate({"model": "llama3.1-405b", "cluster": "h100-sxm:1x8"})


def test_a_job_that_does_not_fit_can_be_simulated_anyway():
    result = simulate(BIG, allow_oom=True)
    assert not result.fits
    assert result.peak_memory_bytes > result.job.cluster.device.memory_bytes
    assert result.step_time_s > 0
    assert re.fullmatch(
        r"does not fit: needs [\d,.]+ GiB of 79\.\d GiB; the step time is hypothetical", result.warnings[0]
    )


def test_nearly_full_memory_is_warned_of():
    model = even_model(1, forward=100, backward=100, kept=950)
    device = ideal_device(memory_bytes=1000)
    full = simulate(job(model, ideal_cluster(gpus_per_node=1, device=device)))
    assert any(w.startswith("memory is 95% full; allocators fragment above 90%") for w in full.warnings)
    roomy = simulate(job(even_model(1, forward=100, backward=100, kept=890), full.job.cluster))
    assert not any("full" in w for w in roomy.warnings)
    exact = simulate(job(even_model(1, forward=100, backward=100, kept=1000), full.job.cluster))
    assert exact.fits
    with pytest.raises(DoesNotFitError):
        simulate(job(even_model(1, forward=100, backward=100, kept=1001), full.job.cluster))


# ---- warnings -------------------------------------------------------------------------------------------------------


def test_a_tensor_parallel_group_across_nodes_is_warned_of():
    cluster = Cluster.parse("h100-sxm:2x4")
    across = simulate(job(small_transformer(), cluster, tp=8))
    assert "tp 8 spans nodes of 4 GPUs; its collectives go over the network in every layer" in across.warnings
    assert not any("spans nodes" in w for w in simulate(job(small_transformer(), cluster, tp=4)).warnings)


def test_a_launch_bound_step_is_warned_of():
    cluster = Cluster.parse("h100-sxm:1")
    tiny = simulate(job(mlp("64-64-64"), cluster))
    assert any(re.match(r"launch-bound: the device waits for the host [4-9]\d% of the step", w) for w in tiny.warnings)
    assert not any(w.startswith("launch-bound") for w in simulate(job(mlp("64-64-64"), cluster, launch_s=0.0)).warnings)


def test_extrapolated_kernels_are_named():
    odd = small_transformer(head_dim=96, heads=8)
    warnings = simulate(job(odd, Cluster.parse("h100-sxm:1"), seq_len=1024, micro_batch=8)).warnings
    assert any("head size 96 is not among the measured" in w and "attention" in w for w in warnings)


def test_a_device_without_measurements_is_named():
    warnings = simulate(job(small_transformer(), Cluster.parse("h100-pcie:1"))).warnings
    assert any("h100-pcie was not measured" in w for w in warnings)


def test_the_note_of_a_model_is_passed_on():
    model = small_transformer(note="its vision tower is left out")
    assert "its vision tower is left out" in simulate(job(model, Cluster.parse("h100-sxm:8"))).warnings


# ---- input ----------------------------------------------------------------------------------------------------------


def test_a_job_may_be_a_mapping_or_a_job():
    plan = {"tp": 8, "zero": 1}
    assert simulate({**BIG, "plan": plan}).trace.step_ns == simulate(Job(**BIG, plan=Plan(**plan))).trace.step_ns


def test_wrong_plans_are_refused_before_anything_runs():
    with pytest.raises(PlanError, match="dp 3 × tp 2 × pp 1 = 6 ranks, but the cluster has 8 GPUs; set dp=4"):
        simulate({**BIG, "plan": {"dp": 3, "tp": 2}})
    with pytest.raises(JobError, match=r"plan\.zeero: unknown key; did you mean 'zero'"):
        simulate({**BIG, "plan": {"zeero": 1}})
    with pytest.raises(PlanError, match="each stage needs one"):
        simulate(job(even_model(3, forward=1, backward=1), ideal_cluster(gpus_per_node=4), pp=4))
    with pytest.raises(PlanError, match="microbatches"):
        simulate(
            job(
                even_model(8, forward=1, backward=1),
                ideal_cluster(gpus_per_node=4),
                pp=4,
                vpp=2,
                schedule="interleaved",
                grad_accum=9,
            )
        )


def test_the_collector_is_left_as_it_was():
    assert gc.isenabled()
    with pytest.raises(DoesNotFitError):
        simulate(BIG)
    assert gc.isenabled()
    gc.disable()
    try:
        simulate(job(even_model(1, forward=1, backward=1), ideal_cluster(gpus_per_node=1)))
        assert not gc.isenabled()
    finally:
        gc.enable()


# ---- figures --------------------------------------------------------------------------------------------------------


def test_throughput_and_utilisation_follow_from_the_step():
    cluster = Cluster.parse("h100-sxm:2x8")
    result = simulate(job(small_transformer(), cluster, tp=4, pp=2, grad_accum=4, micro_batch=2, zero=1, seq_len=512))
    assert result.layout.global_batch == 2 * 4 * 2
    assert result.samples_per_s == pytest.approx(16 / result.step_time_s)
    assert result.tokens_per_s == pytest.approx(16 * 512 / result.step_time_s)
    assert result.tokens_per_s_per_gpu == pytest.approx(result.tokens_per_s / 16)
    # 6 FLOP per weight of a product and token, 12 per key, query head and head dimension
    weights = 4 * (4 * 512 * 512 + 3 * 512 * 1024) + 512 * 4096
    flop = 16 * 512 * (6 * weights + 12 * 4 * 512 * 512)
    assert result.model_flop == flop
    assert result.mfu == pytest.approx(flop / result.step_time_s / (16 * cluster.device.peak("bf16")))
    assert result.hfu == result.mfu


def test_recomputation_costs_utilisation_of_the_model_but_not_of_the_hardware():
    cluster = Cluster.parse("h100-sxm:1")
    plain, full = (
        simulate(job(small_transformer(), cluster, seq_len=1024, micro_batch=8, recompute=r)) for r in ("none", "full")
    )
    assert full.model_flop == plain.model_flop
    assert full.mfu < plain.mfu
    assert full.hfu > full.mfu
    # a whole forward pass of the layers again: a third of their work, and none of the head's
    head = 6 * 512 * 4096 * 8 * 1024
    assert full.recomputed_flop == pytest.approx((plain.model_flop - head) / 3)


def test_the_trace_does_the_work_of_the_layers():
    model = small_transformer()
    cluster = Cluster.parse("h100-sxm:8")
    result = simulate(job(model, cluster, tp=2, pp=2, grad_accum=3, micro_batch=2, seq_len=512))
    trace = result.trace
    # products count the padded vocabulary; attention is causal, and 2.5 times as much backward
    tokens = 512 * 2 * 3 * 2
    weights = 4 * (4 * 512 * 512 + 3 * 512 * 1024) + 512 * model.padded_vocab(256)
    attention = 4 * 512 * 512 / 2 * 4 * (1 + 2.5)
    done = sum(
        float(flop) * trace.lanes[lane].replicas for flop, lane in zip(trace.spans.flop, trace.spans.lane, strict=True)
    )
    assert done == pytest.approx(tokens * (6 * weights + attention), rel=1e-12)
    kernels = trace.kernels()
    assert kernels.flop.sum() == pytest.approx(trace.spans.flop.sum(), rel=1e-12)
    gemms = kernels.kind == KINDS.index("gemm")
    assert (kernels.flop[gemms] > 0).all()


def test_the_dictionary_of_a_result_repeats_its_figures():
    result = simulate(job(small_transformer(), Cluster.parse("h100-sxm:8"), tp=2, zero=1, grad_accum=2))
    told = result.to_dict()
    assert told["step_time_s"] == result.step_time_s
    assert told["mfu"] == result.mfu
    assert told["gpus"] == 8
    assert told["memory"]["peak_bytes"] == result.peak_memory_bytes
    assert sum(told["memory"]["by_category"].values()) == result.peak_memory_bytes
    assert told["warnings"] == list(result.warnings)
    assert all(0 <= link["utilisation"] <= 1 + 1e-9 for link in told["links"])
    assert told["links"] == sorted(told["links"], key=lambda link: -link["bytes"] / link["capacity_gb_per_s"])


@pytest.mark.parametrize("plan", [{"zero": 3}, {"tp": 4, "zero": 1}, {"pp": 2, "tp": 2, "grad_accum": 4}])
def test_no_link_carries_more_than_it_can(plan):
    for cluster in (
        Cluster.parse("h100-sxm:2x4"),
        Cluster.parse("h100-sxm:2x4").replace(fabric={"base": "ndr400", "pod_nodes": 1, "oversubscription": 4.0}),
    ):
        result = simulate(job(small_transformer(), cluster, seq_len=512, **plan))
        for link in result.trace.links:
            assert link.nbytes <= link.capacity_bytes_per_s * result.step_time_s * (1 + 1e-9), link


LONG = {"seq_len": 128, "grad_accum": 4000}


@pytest.mark.parametrize(
    ("cluster", "plan", "reason"),
    [
        ("h100-sxm:2048x8", {"sync": {"on": "hosts"}}, "parameter servers tell the ranks apart"),
        (
            {"base": "h100-sxm:1x1024", "graph": {"topology": "star", "gpus": 1024, "bandwidth_gbps": 400}},
            LONG,
            "a graph",
        ),
        ({"base": "h100-sxm:128x8", "placement": [*range(1023, -1, -1)]}, LONG, "a placement tells the ranks apart"),
        ({"nodes": [{"device": name, "count": 64} for name in ("h100-sxm", "a100-sxm")]}, LONG, "kinds of nodes"),
        ("h100-sxm:999x4", {"pp": 6, "zero": 3, **LONG}, "groups lie on nodes or leaf switches in different ways"),
        ("h100-sxm:1x8", {"sync_every": 10**9}, "1 microbatches on 1 virtual stages in 1,000,000,000 steps"),
        (
            "h100-sxm:1x8",
            {"sync": {"mode": "asynchronous", "steps": 10**9}},
            "1 microbatches on 1 virtual stages in 1,0",
        ),
    ],
)
def test_what_would_run_for_hours_is_refused_at_once(cluster, plan, reason):
    started = time.monotonic()
    with pytest.raises(SimparError, match=r"more than the 2,000,000 that can be") as caught:
        simulate({"model": "gpt2", "cluster": cluster, "plan": plan})
    assert reason in str(caught.value)
    assert time.monotonic() - started < 20  # it would take hours


def test_the_same_jobs_run_where_they_are_small():
    small = {"seq_len": 128, "grad_accum": 2}
    for cluster, plan in (
        ("h100-sxm:2x4", {"sync": {"on": "hosts"}}),
        ({"base": "h100-sxm:2x4", "placement": [*range(7, -1, -1)]}, small),
        ("h100-sxm:3x2", {"pp": 3, "zero": 3, **small}),
        ("h100-sxm:1x8", {"sync_every": 100}),
    ):
        assert simulate({"model": "gpt2", "cluster": cluster, "plan": plan}).step_time_s > 0


def test_a_name_is_text_in_a_notebook_too():
    shown = simulate({"model": {"base": "gpt2", "name": "<img src=x onerror=alert(1)>"}, "cluster": "h100-sxm:1"})
    assert "<img" not in shown._repr_html_()
    assert "&lt;img" in shown._repr_html_()
