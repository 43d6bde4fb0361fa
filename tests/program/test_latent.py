"""Layers beyond grouped queries on ranks: latent and linear attention, windows, chunks, gates."""

from collections import Counter
from typing import Any

import pytest
from synthetic import small_transformer

from simpar import Cluster, Plan, PlanError, Transformer, simulate
from simpar.model.presets import preset
from simpar.model.work import Attention, Gemm
from simpar.plan.layout import lay_out
from simpar.program.ir import Block, Collective, Launch, Run
from simpar.program.lower import lower
from simpar.program.transformer import TransformerParts

CLUSTER = Cluster.parse("h100-sxm:2x4")
SEQ = 512
MLA = {"q_rank": 192, "kv_rank": 128, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}
DELTA = {
    "rule": "gated_delta",
    "pattern": "LLF",
    "key_heads": 4,
    "value_heads": 8,
    "key_dim": 32,
    "value_dim": 64,
    "conv_width": 4,
}
LIGHTNING = {
    "rule": "lightning",
    "pattern": "LF",
    "key_heads": 8,
    "value_heads": 8,
    "key_dim": 32,
    "value_dim": 32,
    "chunk": 128,
}
MODELS: dict[str, dict[str, Any]] = {
    "latent": {"mla": MLA},
    "latent, direct queries": {"mla": {**MLA, "q_rank": None}},
    "latent with experts": {"mla": MLA, "moe": {"experts": 4, "top_k": 2, "ffn_hidden": 256, "first_dense": 1}},
    "delta rule": {"linear": DELTA, "attention_gate": True},
    "lightning": {"linear": LIGHTNING, "moe": {"experts": 4, "top_k": 1, "ffn_hidden": 256, "pattern": "DE"}},
    "sliding windows": {"window": 128, "window_pattern": "WF", "attention_sinks": True},
    "chunks": {"window": 192, "window_pattern": "WWF", "window_kind": "chunked"},
    "norms": {"qk_norm": True, "qk_norm_weights": "width", "norms_per_layer": 4, "embedding_norm": True},
    "biases": {"head_bias": True, "mlp_bias": True, "qkv_bias": True, "out_bias": True},
}
PLANS: list[dict[str, Any]] = [{}, {"tp": 2, "sequence_parallel": True}, {"tp": 4, "sequence_parallel": True, "pp": 2}]


def model(**changes: Any) -> Transformer:
    return small_transformer(**{**({} if "mla" in changes else {"kv_heads": 4}), **changes})


def blocks(described: Transformer, **plan: Any) -> list[tuple[Block, int]]:
    """Every block as often as it runs on all ranks."""
    layout = lay_out(Plan(**{"seq_len": SEQ, **plan}), described, CLUSTER)
    return [
        (block, rank.replicas)
        for rank in lower(described, CLUSTER, layout).ranks
        for i in rank.instructions
        if isinstance(i, Run)
        for block in i.operation.blocks
    ]


def is_core(kernel: object) -> bool:
    return isinstance(kernel, Attention) or (isinstance(kernel, Gemm) and kernel.batch > 1)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_the_model_s_own_flop(name, plan):
    described = model(**MODELS[name])
    flop: Counter[tuple[str, bool]] = Counter()
    for block, count in blocks(described, **plan):
        for i in block.body:
            if isinstance(i, Launch):
                phase = "backward" if i.phase == "weight_grad" else i.phase
                flop[phase, is_core(i.kernel)] += round(i.kernel.work.flop) * count
    tokens = SEQ * lay_out(Plan(seq_len=SEQ, **plan), described, CLUSTER).global_batch
    expected = described.flop_per_token(SEQ)
    # a convolution's few taps are no product here: its traffic decides
    linear = described.linear
    taps = 0 if linear is None else linear.conv_channels * linear.conv_width
    count = 0 if linear is None else sum(map(linear.is_linear, range(described.layers)))
    products = tokens * (expected.matmul - 2.0 * taps * count)
    assert flop["forward", False] == products
    assert flop["backward", False] == 2 * products
    assert flop["forward", True] == pytest.approx(tokens * expected.attention, rel=1e-12)


@pytest.mark.parametrize("name", ["delta rule", "lightning"])
def test_a_linear_core_s_products_have_two_gradients_each(name):
    flop: Counter[str] = Counter()
    for block, count in blocks(model(**MODELS[name])):
        for i in block.body:
            if isinstance(i, Launch) and isinstance(i.kernel, Gemm) and i.kernel.batch > 1:
                flop[i.phase] += round(i.kernel.work.flop) * count
    assert flop["backward"] == 2 * flop["forward"] > 0


@pytest.mark.parametrize("name", MODELS)
def test_one_rank_holds_all_parameters(name):
    described = model(**MODELS[name])
    layout = lay_out(Plan(seq_len=SEQ), described, Cluster.parse("h100-sxm:1"))
    weights = dict(lower(described, Cluster.parse("h100-sxm:1"), layout).ranks[0].resident)["weights"]
    assert weights == 2 * described.parameters


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_tensor_parallel_ranks_hold_what_is_not_split_as_often(name, tp):
    described = model(**MODELS[name])
    once, whole = (lower_weights(described, degree) for degree in (tp, 1))
    # norms, biases behind row-parallel products, routers and projections into latent space; below 15 % of these models
    assert whole < once < whole * (1 + 0.15 * (tp - 1))


def lower_weights(described: Transformer, tp: int) -> int:
    plan = Plan(seq_len=SEQ, tp=tp, sequence_parallel=tp > 1)
    found = lower(described, CLUSTER, lay_out(plan, described, CLUSTER)).ranks
    return sum(dict(rank.resident)["weights"] * rank.replicas for rank in found) * tp // 8


def test_projections_into_latent_space_are_replicated_and_work_on_the_rank_s_own_tokens():
    found = [i for block, _ in blocks(model(mla=MLA), tp=2, sequence_parallel=True) for i in block.body]
    products = {i.name: i.kernel for i in found if isinstance(i, Launch) and isinstance(i.kernel, Gemm)}
    assert (products["q down"].m, products["q down"].n) == (SEQ // 2, 192)
    assert (products["kv down"].m, products["kv down"].n) == (SEQ // 2, 128 + 32)
    assert (products["q up"].m, products["q up"].n, products["q up"].k) == (SEQ, 8 // 2 * 96, 192)
    assert (products["kv up"].n, products["kv up"].k) == (8 // 2 * (64 + 64), 128)
    gathered = {i.name: i.nbytes for i in found if isinstance(i, Collective) and i.op == "all_gather"}
    assert gathered["q up input"] == SEQ * 192 * 2
    assert gathered["kv up input"] == SEQ * 128 * 2
    assert gathered["rotary key"] == SEQ * 32 * 2


def test_keys_and_values_of_a_latent_layer_differ_in_width():
    cores = {i.kernel for b, _ in blocks(model(mla=MLA)) for i in b.body if isinstance(i, Launch) and is_core(i.kernel)}
    assert {(c.heads, c.kv_heads, c.head_dim, c.value_dim) for c in cores if isinstance(c, Attention)} == {
        (8, 8, 96, 64)
    }


def test_a_chunked_window_cuts_sequences():
    described = model(**MODELS["chunks"])
    found = {i.kernel for b, _ in blocks(described) for i in b.body if isinstance(i, Launch) and is_core(i.kernel)}
    shapes = {(k.batch, k.seq_q, k.seq_kv) for k in found if isinstance(k, Attention) and not k.backward}
    assert shapes == {(2, 192, 192), (1, 128, 128), (1, 512, 512)}


def test_a_window_that_nothing_exceeds_changes_nothing():
    wide, none = (simulate(job(model(**changes))).step_time_s for changes in ({"window": SEQ}, {}))
    assert wide == none


def job(described: Transformer, **plan: Any) -> dict[str, Any]:
    return {"model": described, "cluster": CLUSTER, "plan": Plan(**{"seq_len": SEQ, **plan})}


def test_activations_by_kind_add_up():
    """A latent layer keeps the vectors before and behind their norms, the core's tensors, and what any layer keeps."""
    described = model(mla=MLA)
    layout = lay_out(Plan(seq_len=SEQ), described, CLUSTER)
    kept = TransformerParts(described, layout).layer(described.layer_kind(0), "none").activation_bytes
    stream = 4 * 512  # inputs of two norms and of both halves
    latent = 2 * (192 + 128) + 32
    core = 8 * (96 + 96 + 64) + 8 * 64
    mlp = 3 * 1024
    assert kept == SEQ * (2 * (stream + latent + core + mlp) + 4 * 8)


@pytest.mark.parametrize(
    ("linear", "plan", "message"),
    [
        (DELTA, {"tp": 8}, "tp 8 does not divide the 4 linear key_heads of small; set tp to a divisor of 4"),
        (
            DELTA,
            {"tp": 2, "cp": 4},
            "cp 4 trades a sequence for the 2 linear key_heads of a rank of small, which it does not divide; "
            "set cp to a divisor of 2",
        ),
    ],
    ids=["tp", "cp"],
)
def test_degrees_that_do_not_fit_linear_heads(linear, plan, message):
    with pytest.raises(PlanError) as error:
        lay_out(Plan(**plan), small_transformer(linear=linear), CLUSTER)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("deepseek-v2-lite", {"ep": 8, "zero": 1}),
        ("qwen3-next-80b-a3b", {"ep": 8, "zero": 1, "pp": 4}),
        ("gpt-oss-20b", {"ep": 8, "zero": 1, "cp": 2, "cp_method": "all_gather"}),
        ("llama4-scout", {"tp": 8, "ep": 4, "etp": 2, "sequence_parallel": True, "zero": 1}),
        ("minimax-text-01", {"tp": 8, "ep": 8, "etp": 1, "sequence_parallel": True, "pp": 4}),
        ("gemma3-4b", {"tp": 2, "sequence_parallel": True}),
        ("mixtral-8x7b", {"ep": 8, "zero": 3}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_published_models_run(name, plan):
    cluster = Cluster.parse("h100-sxm:4x8")
    described = {"model": preset(name), "cluster": cluster, "plan": Plan(seq_len=4096, grad_accum=4, **plan)}
    assert 0.02 < simulate(described, allow_oom=True).mfu < 0.7


@pytest.mark.parametrize("split", ["balanced", "greedy"])
def test_stages_are_balanced_by_what_each_layer_costs(split):
    described = model(moe={"experts": 8, "top_k": 4, "ffn_hidden": 4096, "first_dense": 4}, layers=8)
    plan = Plan(seq_len=SEQ, pp=2, layer_split=split)
    found = lower(described, CLUSTER, lay_out(plan, described, CLUSTER)).ranks
    first = {x for i in found[0].instructions if isinstance(i, Run) for x in i.operation.layers if x >= 0}
    # four dense layers are less work than one with experts
    assert len(first) >= 5
