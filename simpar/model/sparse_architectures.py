"""What Hugging Face architectures with experts, latent or linear attention mean: one small function an architecture.

Each was checked against the parameter count of the library's module.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from simpar.errors import ModelError
from simpar.model.architectures import Architecture
from simpar.model.config_reader import (
    ConfigReader,
    Fields,
    bias_fields,
    modern_fields,
    qwen_window_fields,
    shortest_period,
    window_fields,
)


def _experts(read: ConfigReader, sparse: Sequence[bool], *count: str, width: int, **changes: Any) -> Fields:
    """The experts of the layers marked ``sparse``; ``count`` are the spellings of their number."""
    if not any(sparse):
        return {}
    first_dense = list(sparse).index(True)
    fields = {
        "experts": read.count(*count),
        "top_k": read.count("num_experts_per_tok", "experts_per_token", "moe_top_k", "moe_k"),
        "ffn_hidden": width,
        "first_dense": first_dense,
        "pattern": shortest_period("".join("E" if each else "D" for each in sparse[first_dense:])),
        **changes,
    }
    # the width of a dense MLP, which some files give although no layer has one
    return {"moe": fields} if not all(sparse) else {"moe": fields, "ffn_hidden": None}


def _all_experts(read: ConfigReader, *count: str, **changes: Any) -> Fields:
    """Experts of the file's ``intermediate_size`` in every layer."""
    sparse = [True] * read.count("num_hidden_layers")
    return _experts(read, sparse, *count, width=read.count("intermediate_size"), **changes)


def _mixtral(read: ConfigReader) -> Fields:
    windows = window_fields(read, read.optional("sliding_window"), "W")
    return modern_fields(read, **windows, **_all_experts(read, "num_local_experts"))


def _granitemoe(read: ConfigReader) -> Fields:
    biases = bias_fields(read.flag("attention_bias", False), False)
    return modern_fields(read, **biases, **_all_experts(read, "num_local_experts"))


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
        **_experts(ffn, [True] * layers, "moe_num_experts", width=ffn.count("ffn_hidden_size")),
    }


def _qwen_experts(read: ConfigReader, *, shared: bool) -> Fields:
    """Experts in every ``decoder_sparse_step``-th layer, except in those that ``mlp_only_layers`` names."""
    step, dense = read.count("decoder_sparse_step", default=1), read.integers("mlp_only_layers") or []
    sparse = [(i + 1) % step == 0 and i not in dense for i in range(read.count("num_hidden_layers"))]
    shares: Fields = {}
    if shared:
        shares = {"shared_ffn_hidden": read.count("shared_expert_intermediate_size"), "shared_gate": True}
    width = read.count("moe_intermediate_size")
    return _experts(read, sparse, "num_experts", "num_local_experts", width=width, **shares)


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
        default_head_dim=128,
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


def _deepseek_experts(read: ConfigReader) -> Fields:
    """Dense layers first, then experts and shared experts in every ``moe_layer_freq``-th layer."""
    if not read.has("n_routed_experts"):
        return {}
    first, every = read.whole("first_k_dense_replace"), read.count("moe_layer_freq", default=1)
    sparse = [i >= first and i % every == 0 for i in range(read.count("num_hidden_layers"))]
    width = read.count("moe_intermediate_size")
    shared = read.whole("n_shared_experts") * width
    return _experts(read, sparse, "n_routed_experts", width=width, shared_ffn_hidden=shared)


def _left_out(read: ConfigReader) -> str:
    layers = read.whole("num_nextn_predict_layers")
    return f"{layers} multi-token-prediction layer{'s' if layers > 1 else ''} left out" if layers else ""


def _deepseek(read: ConfigReader) -> Fields:
    """DeepSeek-V2 and -V3, R1, Kimi-K2: latent attention and experts with shared ones."""
    mla = {
        "q_rank": read.optional("q_lora_rank", default=1536),
        "kv_rank": read.count("kv_lora_rank", default=512),
        "nope_dim": read.count("qk_nope_head_dim", default=128),
        "rope_dim": read.count("qk_rope_head_dim", default=64),
        "value_dim": read.count("v_head_dim", default=128),
    }
    fields = modern_fields(
        read,
        mla=mla,
        note=_left_out(read),
        **bias_fields(read.flag("attention_bias", False), False),
        **_deepseek_experts(read),
    )
    # files repeat widths here that latent attention does not have
    return {key: value for key, value in fields.items() if key not in ("kv_heads", "head_dim")}


def _glm4_moe(read: ConfigReader) -> Fields:
    return modern_fields(
        read,
        default_head_dim=128,
        qk_norm=read.flag("use_qk_norm", False),
        qkv_bias=read.flag("attention_bias", False),
        note=_left_out(read),
        **_deepseek_experts(read),
    )


def _dots1(read: ConfigReader) -> Fields:
    windows = window_fields(read, None, "F")
    biases = bias_fields(read.flag("attention_bias", False), False)
    return modern_fields(read, qk_norm=True, **biases, **windows, **_deepseek_experts(read))


def _llama4(read: ConfigReader) -> Fields:
    """Chunked attention with rotary positions, and in every fourth layer full attention without; experts by step."""
    layers, step = read.count("num_hidden_layers"), read.count("interleave_moe_layer_step", default=1)
    named = read.integers("moe_layers")
    sparse = [i in named if named is not None else (i + 1) % step == 0 for i in range(layers)]
    width = read.count("intermediate_size")
    experts = _experts(read, sparse, "num_local_experts", width=width, shared_ffn_hidden=width)
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
    "dbrx": (_dbrx, False),
    "deepseek_v2": (_deepseek, False),
    "deepseek_v3": (_deepseek, False),
    "dots1": (_dots1, False),
    "glm4_moe": (_glm4_moe, False),
    "glm4_moe_lite": (_deepseek, False),
    "gpt_oss": (_gpt_oss, False),
    "granitemoe": (_granitemoe, False),
    "grok-1": (_grok, True),
    "kimi_k2": (_deepseek, False),
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

_STATE_SPACE = "has state-space (Mamba) layers, whose scan is not described"
REFUSED: Mapping[str, str] = {
    "bamba": _STATE_SPACE,
    "deepseek_v32": "chooses the keys of each query by an indexer, which is not described",
    "falcon_h1": _STATE_SPACE,
    "granitemoehybrid": _STATE_SPACE,
    "jamba": _STATE_SPACE,
    "kimi_linear": "has Kimi Delta Attention, whose gates are not described",
    "longcat_flash": "has experts that compute nothing, so that its work depends on the text",
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "nemotron_h": _STATE_SPACE,
    "zamba2": _STATE_SPACE,
}
"""Architectures that are known and cannot be described, with the reason."""

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_LATENT_KEYS = ("kv_lora_rank",)


def check_dense(read: ConfigReader, model_type: str, known: Collection[str]) -> None:
    """Refuses a file that has experts or latent attention although its architecture has none.

    Raises:
        ModelError: such a field has a value that would be lost.
    """
    for key in (*_EXPERT_KEYS, *_LATENT_KEYS):
        value = read.config.get(key)
        if value is None or (isinstance(value, int) and value in (0, 1)):
            continue
        read.count(key)
        what = "latent attention" if key in _LATENT_KEYS else "experts"
        raise ModelError(
            f"{read.label}: {key} is {value}, but the architecture '{model_type}' has no {what}; set model_type to one"
            f" that has, such as {', '.join(sorted(known)[:3])}, or drop {key}"
        )
