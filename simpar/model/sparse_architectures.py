"""What Hugging Face architectures with experts, latent or linear attention mean: one small function an architecture.

Each was checked against the parameter count of the library's module.
"""

from collections.abc import Mapping
from typing import Any

from simpar.errors import ModelError
from simpar.model.config_reader import (
    Architecture,
    ConfigReader,
    Fields,
    bias_fields,
    expert_fields,
    modern_fields,
    qwen_window_fields,
    shortest_period,
    window_fields,
)
from simpar.model.deepseek_architectures import DEEPSEEK


def _all_experts(read: ConfigReader, *count: str, **changes: Any) -> Fields:
    """Experts of the file's ``intermediate_size`` in every layer."""
    sparse = [True] * read.count("num_hidden_layers")
    return expert_fields(read, sparse, *count, width=read.count("intermediate_size"), **changes)


def _mixtral(read: ConfigReader) -> Fields:
    windows = window_fields(read, read.optional("sliding_window"), "W")
    return modern_fields(read, **windows, **_all_experts(read, "num_local_experts"))


def _granitemoe(read: ConfigReader) -> Fields:
    biases = bias_fields(read.flag("attention_bias", False), False)
    return modern_fields(read, **biases, **_all_experts(read, "num_local_experts"))


def _granitemoeshared(read: ConfigReader) -> Fields:
    biases = bias_fields(read.flag("attention_bias", False), False)
    shared = read.whole("shared_intermediate_size")
    return modern_fields(read, **biases, **_all_experts(read, "num_local_experts", shared_ffn_hidden=shared))


def _granitemoehybrid(read: ConfigReader) -> Fields:
    """Granite 4.0 without state spaces: the shared MLP alone, or with experts."""
    kinds = read.config.get("layer_types") or read.config.get("layers_block_type")
    if not isinstance(kinds, list) or any(kind not in ("attention", "full_attention") for kind in kinds):
        raise ModelError(
            f"{read.label}: model_type 'granitemoehybrid' has state-space (Mamba) layers, whose scan is not described,"
            " unless layer_types says 'attention' of every layer; choose such a model"
        )
    changes: Fields = {
        "position": "rope" if read.config.get("position_embedding_type") == "rope" else "none",
        **bias_fields(read.flag("attention_bias", False), False),
    }
    shared = read.count("shared_intermediate_size", default=1024)
    if not read.whole("num_local_experts", default=8):
        return modern_fields(read, ffn_hidden=shared, **changes)
    return modern_fields(read, **changes, **_all_experts(read, "num_local_experts", shared_ffn_hidden=shared))


def _olmoe(read: ConfigReader) -> Fields:
    biases = bias_fields(read.flag("attention_bias", False), False)
    return modern_fields(
        read, qk_norm=True, qk_norm_weights="width", **biases, **_all_experts(read, "num_experts", "num_local_experts")
    )


def _phimoe(read: ConfigReader) -> Fields:
    window = read.optional("sliding_window")
    if window is not None and window >= read.count("max_position_embeddings"):
        window = None  # the file writes the longest sequence where there is no window
    return modern_fields(
        read,
        norm="layernorm",
        head_bias=read.flag("lm_head_bias", False),
        **bias_fields(read.flag("attention_bias", False), False),
        **window_fields(read, window, "W"),
        **_all_experts(read, "num_local_experts"),
    )


def _gpt_oss(read: ConfigReader) -> Fields:
    return modern_fields(
        read,
        default_head_dim=64,
        attention_sinks=True,
        **bias_fields(read.flag("attention_bias", True), True),
        **window_fields(read, read.optional("sliding_window", default=128), "WF"),
        **_all_experts(read, "num_local_experts", "num_experts", router_bias=True),
    )


def _grok(read: ConfigReader) -> Fields:
    return modern_fields(read, norms_per_layer=4, **_all_experts(read, "num_experts", "num_local_experts"))


def _dbrx(read: ConfigReader) -> Fields:
    layers, hidden, heads = read.count("n_layers"), read.count("d_model"), read.count("n_heads")
    attention, ffn = read.part("attn_config"), read.part("ffn_config")
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": attention.count("kv_n_heads", default=1),
        "gated_mlp": True,
        "vocab": read.count("vocab_size"),
        "max_positions": read.optional("max_seq_len"),
        "norm": "layernorm",
        "norm_bias": False,
        "dropout": read.drops("resid_pdrop", "emb_pdrop") or attention.drops("attn_pdrop"),
        **expert_fields(ffn, [True] * layers, "moe_num_experts", width=ffn.count("ffn_hidden_size")),
    }


def _qwen_experts(read: ConfigReader, *, shared: bool) -> Fields:
    """Experts in every ``decoder_sparse_step``-th layer, except in those that ``mlp_only_layers`` names."""
    step, dense = read.count("decoder_sparse_step", default=1), read.integers("mlp_only_layers") or []
    sparse = [(i + 1) % step == 0 and i not in dense for i in range(read.count("num_hidden_layers"))]
    shares: Fields = {}
    if shared:
        shares = {"shared_ffn_hidden": read.count("shared_expert_intermediate_size"), "shared_gate": True}
    width = read.count("moe_intermediate_size")
    return expert_fields(read, sparse, "num_experts", "num_local_experts", width=width, **shares)


def _qwen2_moe(read: ConfigReader) -> Fields:
    return modern_fields(
        read,
        qkv_bias=read.flag("qkv_bias", True),
        **qwen_window_fields(read),
        **_qwen_experts(read, shared=True),
    )


def _qwen3_moe(read: ConfigReader) -> Fields:
    return modern_fields(
        read,
        qk_norm=True,
        **bias_fields(read.flag("attention_bias", False), False),
        **qwen_window_fields(read),
        **_qwen_experts(read, shared=False),
    )


def _linear_pattern(read: ConfigReader, period: str) -> str:
    """``L`` for linear layers and ``F`` for others, from ``layer_types`` where the file has them."""
    kinds = read.config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return period
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise ModelError(
                f"{read.label}: layer_types has '{kind}', but layers of this architecture attend fully (full_attention)"
                " or linearly (linear_attention); correct the list"
            )
    return shortest_period("".join("L" if kind == "linear_attention" else "F" for kind in kinds))


def _gated_delta(read: ConfigReader) -> Fields:
    """Three of four layers with Gated DeltaNet, the fourth with gated full attention."""
    interval = read.count("full_attention_interval", default=4)
    linear = {
        "rule": "gated_delta",
        "pattern": _linear_pattern(read, "L" * (interval - 1) + "F"),
        "key_heads": read.count("linear_num_key_heads", default=16),
        "value_heads": read.count("linear_num_value_heads", default=32),
        "key_dim": read.count("linear_key_head_dim", default=128),
        "value_dim": read.count("linear_value_head_dim", default=128),
        "conv_width": read.count("linear_conv_kernel_dim", default=4),
    }
    biases = bias_fields(read.flag("attention_bias", False), False)
    return {"linear": linear, "attention_gate": True, "qk_norm": True, "default_head_dim": 256, **biases}


def _qwen3_next(read: ConfigReader) -> Fields:
    return modern_fields(read, **_gated_delta(read), **_qwen_experts(read, shared=True))


def _qwen3_5(read: ConfigReader) -> Fields:
    return modern_fields(read, **_gated_delta(read))


def _minimax_text(read: ConfigReader) -> Fields:
    """MiniMax-Text-01: lightning attention, and softmax attention in every eighth layer."""
    heads = read.count("num_attention_heads")
    head_dim = read.count("head_dim", default=read.count("hidden_size") // heads)
    kinds = read.integers("attn_type_list")  # 0 linear, 1 softmax
    pattern = shortest_period("".join("F" if kind else "L" for kind in kinds)) if kinds else "FL"
    linear = {
        "rule": "lightning",
        "pattern": _linear_pattern(read, pattern),
        "key_heads": heads,
        "value_heads": heads,
        "key_dim": head_dim,
        "value_dim": head_dim,
        "chunk": read.count("block_size", default=256),
    }
    shared = read.whole("shared_intermediate_size")
    if shared:
        raise ModelError(f"{read.label}: shared_intermediate_size {shared} is not supported; use a file with 0 there")
    return modern_fields(read, linear=linear, **_all_experts(read, "num_local_experts"))


def _minimax_m2(read: ConfigReader) -> Fields:
    normed = {"qk_norm": True, "qk_norm_weights": "width"} if read.flag("use_qk_norm", True) else {}
    return modern_fields(read, default_head_dim=128, **normed, **_all_experts(read, "num_local_experts"))


def _llama4(read: ConfigReader) -> Fields:
    """Chunked attention with rotary positions, and in every fourth layer full attention without; experts by step."""
    layers, step = read.count("num_hidden_layers"), read.count("interleave_moe_layer_step", default=1)
    named = read.integers("moe_layers")
    sparse = [i in named if named is not None else (i + 1) % step == 0 for i in range(layers)]
    width = read.count("intermediate_size")
    experts = expert_fields(read, sparse, "num_local_experts", width=width, shared_ffn_hidden=width)
    rotary = read.integers("no_rope_layers")  # 1 with rotary positions, 0 without
    interval = read.count("no_rope_layer_interval", default=4)
    pattern = "".join("W" if each else "F" for each in rotary) if rotary else "W" * (interval - 1) + "F"
    chunk = read.optional("attention_chunk_size", default=8192)
    chunks = {"window": chunk, "window_pattern": shortest_period(pattern), "window_kind": "chunked"} if chunk else {}
    return modern_fields(
        read,
        default_head_dim=128,
        qk_norm=read.flag("use_qk_norm", True),
        qk_norm_weights="none",
        **chunks,
        **bias_fields(read.flag("attention_bias", False), False),
        **{"ffn_hidden": read.count("intermediate_size_mlp", default=16384), **experts},
    )


SPARSE: Mapping[str, Architecture] = {
    **DEEPSEEK,
    "dbrx": (_dbrx, False),
    "flex_olmo": (_olmoe, False),
    "gpt_oss": (_gpt_oss, False),
    "granitemoe": (_granitemoe, False),
    "granitemoehybrid": (_granitemoehybrid, False),
    "granitemoeshared": (_granitemoeshared, False),
    "grok-1": (_grok, True),
    "llama4_text": (_llama4, False),
    "minimax": (_minimax_text, False),
    "minimax_m2": (_minimax_m2, False),
    "minimax_text_01": (_minimax_text, False),
    "mixtral": (_mixtral, False),
    "olmoe": (_olmoe, False),
    "phimoe": (_phimoe, False),
    "qwen2_moe": (_qwen2_moe, False),
    "qwen3_5_moe_text": (_qwen3_next, False),
    "qwen3_5_text": (_qwen3_5, False),
    "qwen3_moe": (_qwen3_moe, False),
    "qwen3_next": (_qwen3_next, False),
}
