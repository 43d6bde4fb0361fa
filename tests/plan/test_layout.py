"""Plans laid over a model and a cluster: each rule with its full text, and what is filled in."""

import re

import pytest
from synthetic import even_model, ideal_cluster, small_transformer

from simpar import Cluster, ClusterError, Plan, PlanError, mlp
from simpar.cost.kernel import kernel_s, runnable
from simpar.framework.framework import framework
from simpar.model.work import Attention
from simpar.plan.layout import lay_out

CLUSTER = Cluster.parse("h100-sxm:4x8")
MODEL = small_transformer()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"dp": 3, "tp": 4, "pp": 2},
            "dp 3 × tp 4 × pp 2 = 24 ranks, but the cluster has 32 GPUs; set dp=4",
        ),
        (
            {"tp": 3, "pp": 2},
            "tp 3 × pp 2 = 6 does not divide the cluster's 32 GPUs; choose degrees whose product divides 32",
        ),
        ({"dp_shard": 3, "zero": 3}, "dp_shard 3 does not divide dp 32; set dp_shard to a divisor of 32"),
        (
            {"dp_shard": 8},
            "dp_shard 8 has no meaning with zero 0, which shards nothing; set zero to 1, 2 or 3",
        ),
        ({"tp": 16}, "tp 16 does not divide the 8 heads of small; set tp to a divisor of 8"),
        (
            {"sequence_parallel": True},
            "sequence_parallel shards over the tensor-parallel group, but tp is 1; raise tp or switch it off",
        ),
        (
            {"sequence_parallel": True, "tp": 8, "seq_len": 100},
            "sequence_parallel splits seq_len 100 over tp 8, which does not divide it; set seq_len to a multiple of 8",
        ),
        (
            {"recompute": "full", "recompute_layers": 5},
            "recompute_layers 5 is more than the 4 layers of small; "
            "set recompute_layers lower or drop it to recompute all",
        ),
        (
            {"global_batch": 100},
            "global batch 100 is not a multiple of dp 32 × micro-batch 1 = 32; set global_batch=96 or 128",
        ),
        (
            {"global_batch": 64, "grad_accum": 4},
            "grad_accum 4 × micro_batch 1 × dp 32 = 128 samples, but global_batch is 64; set grad_accum=2 or drop it",
        ),
    ],
)
def test_rules(fields, text):
    with pytest.raises(PlanError) as caught:
        lay_out(Plan(**fields), MODEL, CLUSTER)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("model", "fields", "text"),
    [
        (
            small_transformer(ffn_hidden=1030),
            {"tp": 4},
            "tp 4 does not divide the 1030 ffn_hidden of small; set tp to a divisor of 1030",
        ),
        (
            small_transformer(heads=24, kv_heads=3, hidden=768),
            {"tp": 2},
            "tp 2 neither divides nor is a multiple of the 3 kv_heads of small; set tp to a divisor of 3",
        ),
        (
            small_transformer(position="learned"),
            {"seq_len": 2048},
            "seq_len 2048 is longer than the 1024 learned positions of small; set seq_len to at most 1024",
        ),
        (
            even_model(4, forward=1, backward=1),
            {"tp": 2},
            "tp 2 needs a transformer description, but even is a traced module; set tp=1",
        ),
        (
            even_model(4, forward=1, backward=1),
            {"seq_len": 7},
            "seq_len 7 has no meaning for the module even; drop it",
        ),
        (
            even_model(4, forward=1, backward=1),
            {"recompute": "selective"},
            "recompute 'selective' needs a transformer description, not even; set recompute=full",
        ),
    ],
)
def test_rules_of_the_model(model, fields, text):
    with pytest.raises(PlanError) as caught:
        lay_out(Plan(**fields), model, CLUSTER)
    assert str(caught.value) == text


def test_tensor_parallel_groups_must_not_straddle_nodes():
    model = small_transformer(heads=12, hidden=768, ffn_hidden=3072)
    with pytest.raises(PlanError) as caught:
        lay_out(Plan(tp=4), model, Cluster.parse("h100-sxm:2x6"))
    assert str(caught.value) == (
        "tp 4 neither divides nor is a multiple of the 6 GPUs of a node, so some groups would straddle nodes; "
        "set tp to a divisor of 6"
    )
    assert lay_out(Plan(tp=12), model, Cluster.parse("h100-sxm:2x6")).dp == 1


def test_a_dtype_that_the_device_lacks():
    with pytest.raises(ClusterError, match=r"device 'a100-sxm-80gb' does not compute in fp8 .*; use bf16 instead"):
        lay_out(Plan(precision="fp8"), MODEL, Cluster.parse("a100-sxm:8"))


def test_an_attention_kernel_that_the_device_lacks():
    with pytest.raises(PlanError) as caught:
        lay_out(Plan(attention="flash3"), MODEL, Cluster.parse("a100-sxm:8"))
    assert str(caught.value) == (
        "attention 'flash3' does not run on a100-sxm-80gb, which has flash1, flash2; set attention=auto"
    )
    assert lay_out(Plan(attention="unfused"), MODEL, Cluster.parse("a100-sxm:8")).attention == "unfused"


def test_what_is_left_open_is_filled_in():
    layout = lay_out(Plan(tp=2, pp=2, micro_batch=3, grad_accum=5), MODEL, CLUSTER)
    assert (layout.dp, layout.shard) == (8, 8)
    assert (layout.microbatches, layout.global_batch) == (5, 120)
    assert (layout.seq_len, layout.tokens) == (1024, 3072)
    assert layout.grad_dtype == "fp32"
    assert layout.attention == "flash3"
    alone = lay_out(Plan(micro_batch=3), MODEL, CLUSTER)
    assert alone.launch_s == framework("megatron-core").launch_s
    leaves_it = framework("megatron-core").replace(launch_s=None)
    assert lay_out(Plan(framework=leaves_it), MODEL, CLUSTER).launch_s == CLUSTER.device.launch_s
    assert layout.bucket_parameters == 40_000_000


def test_what_is_given_stays():
    plan = Plan(
        dp=32, dp_shard=8, zero=1, global_batch=128, seq_len=77, grad_dtype="bf16", launch_s=0.0, bucket_parameters=5
    )
    layout = lay_out(plan, MODEL, CLUSTER)
    assert (layout.dp, layout.shard, layout.microbatches, layout.seq_len) == (32, 8, 4, 77)
    assert (layout.grad_dtype, layout.launch_s, layout.bucket_parameters) == ("bf16", 0.0, 5)


def test_a_long_model_is_trained_at_4096_tokens_unless_asked():
    model = small_transformer(max_positions=131_072)
    assert lay_out(Plan(), model, CLUSTER).seq_len == 4096
    assert lay_out(Plan(seq_len=8192), model, CLUSTER).seq_len == 8192
    assert lay_out(Plan(), small_transformer(max_positions=None), CLUSTER).seq_len == 4096


def test_buckets_grow_with_many_replicas():
    assert lay_out(Plan(), MODEL, Cluster.parse("h100-sxm:16x8")).bucket_parameters == 128_000_000


def test_ranks_count_tensor_first_then_data_then_pipeline():
    layout = lay_out(Plan(tp=2, pp=4), MODEL, CLUSTER)
    order = [layout.rank(s, d, t) for s in range(4) for d in range(4) for t in range(2)]
    assert order == list(range(32))


def test_a_batch_smaller_than_the_replicas_names_the_smallest():
    with pytest.raises(PlanError, match=r"set global_batch=8$"):
        lay_out(Plan(global_batch=4), even_model(1, forward=1, backward=1), ideal_cluster(gpus_per_node=8))


def test_a_module_runs_in_the_dtype_in_which_it_was_traced():
    cluster = Cluster.parse("h100-sxm:1x1")
    assert lay_out(Plan(), mlp("8-8"), cluster).precision == "fp32"
    text = "precision bf16 is not that of mlp:8-8, which was traced in fp32; set precision=fp32, or trace"
    with pytest.raises(PlanError, match=re.escape(text)):
        lay_out(Plan(precision="bf16"), mlp("8-8"), cluster)


def test_nvls_needs_a_switch_that_reduces():
    with pytest.raises(PlanError, match="needs a switch that reduces"):
        lay_out(Plan(collective_algorithm="nvls"), mlp("8-8"), Cluster.parse("a100-sxm:1x8"))
    ring = {"topology": "ring", "gpus": 8, "bandwidth_gbps": 400}
    with pytest.raises(PlanError, match="which a graph of one's own has not"):
        lay_out(Plan(collective_algorithm="nvls"), mlp("8-8"), Cluster(device="h100-sxm", gpus_per_node=8, graph=ring))


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("a100-sxm-80gb", "v100-sxm-32gb"), "flash2"),
        (("h100-sxm", "a100-sxm-80gb"), "flash3"),
        (("h100-sxm", "v100-sxm-32gb"), "flash3"),
        (("v100-sxm-16gb", "v100-sxm-32gb"), "flash1"),
    ],
)
def test_kinds_of_devices_run_the_newest_kernel_that_each_has_in_any_order(names, chosen):
    plan = Plan(precision="fp16")
    for order in (names, names[::-1]):
        cluster = Cluster.model_validate({"nodes": [{"device": name, "count": 1} for name in order]})
        assert lay_out(plan, MODEL, cluster).attention == chosen
        of_framework = plan.replace(framework="torchtitan")
        known = {kernel for kind in cluster.devices for kernel in kind.attention_kernel_speed}
        assert lay_out(of_framework, MODEL, cluster).attention == ("flash2" if "flash2" in known else "flash1")
        for kind in cluster.devices:
            kernel = runnable(Attention(1, 512, 512, 8, 8, 64, kernel=chosen, dtype="fp16"), kind)
            assert kernel.kernel == (chosen if chosen in kind.attention_kernel_speed else kind.fastest_attention)
            assert kernel_s(kernel, kind) > 0


def test_a_kernel_that_no_kind_has_is_refused_and_one_that_some_have_is_not():
    for order in (("a100-sxm-80gb", "v100-sxm-32gb"), ("v100-sxm-32gb", "a100-sxm-80gb")):
        cluster = Cluster.model_validate({"nodes": [{"device": name, "count": 1} for name in order]})
        has = {"a100-sxm-80gb": "flash1, flash2", "v100-sxm-32gb": "flash1"}
        said = ", nor on ".join(f"{name}, which has {has[name]}" for name in order)
        with pytest.raises(PlanError) as caught:
            lay_out(Plan(attention="flash3", precision="fp16"), MODEL, cluster)
        assert str(caught.value) == f"attention 'flash3' does not run on {said}; set attention=auto"
        for kernel in ("flash1", "flash2", "unfused"):
            assert lay_out(Plan(attention=kernel, precision="fp16"), MODEL, cluster).attention == kernel
