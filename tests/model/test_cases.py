"""Public reports about parameters, FLOP and memory of models, each with what it says and how it is checked."""

import pytest

from simpar.hardware.device import device
from simpar.model.huggingface import from_config
from simpar.model.presets import preset
from simpar.model.transformer import Transformer
from simpar.units import TFLOP

QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


def layer_matmul_flop(model, seq_len, attention="full"):
    """Forward FLOP of one layer per sequence, without the head."""
    flop = model.flop_per_token(seq_len, attention)
    return seq_len * (flop.total - 2 * model.hidden * model.vocab) / model.layers


def model(hidden=4096, heads=32, groups=8, ffn=4 * 4096, **fields):
    fixed = {"name": "m", "layers": 2, "vocab": 1000, "gated_mlp": False, "tied_embeddings": False}
    return Transformer.model_validate(
        {**fixed, "hidden": hidden, "heads": heads, "kv_heads": groups, "ffn_hidden": ffn, **fields}
    )


def test_grouped_queries_shrink_keys_and_values_only():
    # T09: 4bsh² (queries, output) + 4bsh·(h/a)·g (keys, values) + 4bhs² + MLP; the report puts the reduction on the
    # query projection, which is wrong
    h, a, g, s, ffn = 4096, 32, 8, 2048, 11008
    right = 4 * s * h * h + 4 * s * h * (h // a) * g + 4 * h * s * s + 4 * s * h * ffn
    wrong = 2 * s * h * (h // a) * g + 2 * s * h * h + 4 * s * h * h + 4 * h * s * s + 4 * s * h * ffn
    counted = layer_matmul_flop(model(ffn=ffn), s)
    assert counted == right
    assert counted != wrong


@pytest.mark.parametrize(("gated", "ffn", "coefficient"), [(False, 4, 24), (True, 4, 32), (True, 8 / 3, 24)])
def test_a_gated_mlp_has_three_products(gated, ffn, coefficient):
    # T10: 24 B s h² becomes 32 with SwiGLU of width 4h, and is 24 again with 8h/3
    h, s = 4608, 128
    counted = layer_matmul_flop(model(hidden=h, heads=36, groups=36, ffn=round(ffn * h), gated_mlp=gated), s)
    assert counted - 4 * h * s * s == coefficient * s * h * h


def test_a_window_shortens_the_core_attention_and_nothing_else():
    # T14: min(w, s) / 2 instead of s / 2 in windowed layers, projections unchanged
    s, w = 4096, 1024
    full, mixed = model(), model(window=w, window_pattern="WF")
    a, b = full.flop_per_token(s, "halved"), mixed.flop_per_token(s, "halved")
    assert a.matmul == b.matmul
    assert a.attention == 2 * 4 * 4096 * s / 2
    assert b.attention == 4 * 4096 * (w / 2 + s / 2)
    assert mixed.flop_per_token(512, "halved") == full.flop_per_token(512, "halved")


def test_mfu_of_h200_is_against_the_dense_peak():
    # U01: 420 TFLOP/s are 42.4 % of 989.5, not 21 % of the sparse 1979
    assert 420 * TFLOP / device("h200").peak("bf16") == pytest.approx(0.424, abs=0.001)


def test_head_dim_is_read_and_not_derived():
    # F02, F03, F04, F08: 2 · layers · kv_heads · head_dim · bytes = 147,456 B a token; hidden / heads would say 92,160
    found = from_config(QWEN3_4B)
    assert found.head_dim != found.hidden // found.heads
    elements = sum(count * found.cache_elements_per_token(kind) for kind, count in found.layer_kinds.items())
    assert 2 * elements == 147_456
    wide = from_config({**QWEN3_4B, "hidden_size": 6144, "num_attention_heads": 64})
    assert (wide.query_width, wide.hidden) == (8192, 6144)


def test_latent_attention_caches_its_narrow_vector():
    # DeepSeek-V2, table 1: 4.5 d_h a token and layer instead of 2 · 128 · d_h
    found = preset("deepseek-v3")
    assert {found.cache_elements_per_token(kind) for kind in found.layer_kinds} == {512 + 64}
    hybrid = preset("qwen3-next-80b-a3b")
    assert sum(count * hybrid.cache_elements_per_token(kind) for kind, count in hybrid.layer_kinds.items()) == 12 * 1024


def test_key_value_groups_are_heads():
    # F06: num_kv_groups 8 are 8 key/value heads, not 8 heads a group
    assert model(groups=8).kv_width == 8 * 128


def test_qkv_width_of_a_tensor_parallel_rank():
    # F09: hidden 5120, 40 heads, 8 groups, tp 8: (5 + 2 · 1) · 128 = 896 columns, times 4096 tokens
    found = model(hidden=5120, heads=40, groups=8)
    columns = (found.query_width + 2 * found.kv_width) // 8
    assert (columns, columns * 4096) == (896, 3_670_016)


def test_vocabulary_padding():
    # F15
    assert preset("bloom-176b").replace(vocab=250_680).padded_vocab(128 * 8) == 250_880
    gpt2 = preset("gpt2")
    assert (gpt2.padded_vocab(128), gpt2.padded_vocab(128 * 8)) == (50_304, 51_200)


def test_parameters_of_a_mixture_fall_into_buckets():
    # M10: attention, dense and shared parts, norms and router, routed experts are divided differently; together all
    found = preset("deepseek-v3")
    moe = found.moe
    layers = 58
    routed = layers * moe.experts * found.expert_parameters
    shared = layers * 3 * found.hidden * moe.shared_ffn_hidden
    router = layers * moe.router_parameters(found.hidden)
    dense = 3 * found.mlp_parameters
    norms = 61 * 2 * found.norm_parameters + found.final_norm_parameters
    attention = 61 * found.attention_parameters
    outer = found.embedding_parameters + found.head_parameters
    assert routed + shared + router + dense + norms + attention + outer == found.parameters
    assert routed / found.parameters > 0.97
