"""Architectures laid out as DeepSeek's: dense layers first, then routed and shared experts; some with latent attention.

One small function an architecture; each was checked against the parameter count of the library's module, and those
that only come with code of their own (Ling, DeepSeekMoE) against that of their checkpoint.
"""

from collections.abc import Mapping

from simpar.errors import ModelError
from simpar.model.config_reader import (
    Architecture,
    ConfigReader,
    Fields,
    bias_fields,
    expert_fields,
    left_out,
    modern_fields,
    window_fields,
)


def _deepseek_experts(read: ConfigReader, first: int = 0, shared: int = 0) -> Fields:
    """Dense layers first, then experts and shared experts in every ``moe_layer_freq``-th layer.

    Args:
        read: the file.
        first: dense layers, where the file does not say.
        shared: shared experts, where the file does not say.
    """
    if not read.has("n_routed_experts"):
        return {}
    layers = read.count("num_hidden_layers")
    first, every = read.whole("first_k_dense_replace", default=first), read.count("moe_layer_freq", default=1)
    sparse = [i >= first and i % every == 0 for i in range(layers)]
    kinds = read.config.get("mlp_layer_types")
    if isinstance(kinds, list) and kinds:  # newer files name each layer's kind
        if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
            raise ModelError(f"{read.label}: mlp_layer_types must name 'dense' or 'sparse' for each of {layers} layers")
        sparse = [kind == "sparse" for kind in kinds]
    width = read.count("moe_intermediate_size")
    # Ling names the width of one shared expert, which is that of a routed one in the other architectures
    one = read.count("moe_shared_expert_intermediate_size", default=width)
    shared_width = read.whole("n_shared_experts", default=shared) * one
    return expert_fields(read, sparse, "n_routed_experts", width=width, shared_ffn_hidden=shared_width)


_DEEPSEEK_WIDTHS: Mapping[str, int] = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _latent(read: ConfigReader, experts: Fields, **widths: int) -> Fields:
    """Latent attention; ``widths`` are the architecture's defaults where they are not DeepSeek's."""
    default = {**_DEEPSEEK_WIDTHS, **widths}
    mla = {
        "q_rank": read.optional("q_lora_rank", default=default["q_lora_rank"]),
        "kv_rank": read.count("kv_lora_rank", default=default["kv_lora_rank"]),
        "nope_dim": read.count("qk_nope_head_dim", default=default["qk_nope_head_dim"]),
        "rope_dim": read.count("qk_rope_head_dim", default=default["qk_rope_head_dim"]),
        "value_dim": read.count("v_head_dim", default=default["v_head_dim"]),
    }
    biases = bias_fields(read.flag("attention_bias", False), False)
    fields = {**modern_fields(read, mla=mla, note=left_out(read), **biases), **experts}
    # files repeat widths here that latent attention does not have
    return {key: value for key, value in fields.items() if key not in ("kv_heads", "head_dim")}


def _deepseek_moe(read: ConfigReader) -> Fields:
    """DeepSeekMoE-16B, the first of the family: experts with shared ones, and grouped queries."""
    return modern_fields(read, **bias_fields(read.flag("attention_bias", False), False), **_deepseek_experts(read))


def _deepseek_v2(read: ConfigReader) -> Fields:
    if not read.flag("use_mla", True):  # the text tower of DeepSeek-VL2-Tiny
        return _deepseek_moe(read)
    return _latent(read, _deepseek_experts(read, shared=2))


def _deepseek_v3(read: ConfigReader) -> Fields:
    """DeepSeek-V3, R1 and Kimi-K2."""
    return _latent(read, _deepseek_experts(read, first=3, shared=1))


def _glm4_moe_lite(read: ConfigReader) -> Fields:
    experts = _deepseek_experts(read, first=1, shared=1)
    return _latent(read, experts, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256)


def _mistral4(read: ConfigReader) -> Fields:
    return _latent(read, _deepseek_experts(read, shared=1), q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64)


def _minicpm3(read: ConfigReader) -> Fields:
    value = read.count("hidden_size") // read.count("num_attention_heads")
    widths = {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    return {**_latent(read, {}, **widths, v_head_dim=value), "mlp_bias": read.flag("mlp_bias", False)}


def _glm4_moe(read: ConfigReader) -> Fields:
    return modern_fields(
        read,
        qk_norm=read.flag("use_qk_norm", False),
        qkv_bias=read.flag("attention_bias", False),
        note=left_out(read),
        **_deepseek_experts(read, first=1, shared=1),
    )


def _dots1(read: ConfigReader) -> Fields:
    windows = window_fields(read, None, "F")
    biases = bias_fields(read.flag("attention_bias", False), False)
    return modern_fields(read, qk_norm=True, **biases, **windows, **_deepseek_experts(read))


def _solar_open(read: ConfigReader) -> Fields:
    biases = {"qkv_bias": read.flag("attention_bias", False)}
    # every layer has experts, so that files give no width of a dense MLP
    return modern_fields(
        read, default_head_dim=128, **biases, **{"ffn_hidden": None, **_deepseek_experts(read, shared=1)}
    )


def _bailing(read: ConfigReader, normed: bool = False) -> Fields:
    """Ling and Ring; ``normed`` says whether queries and keys are normalised where the file does not."""
    read.must_not("use_bias", True, "its shared experts have biases")
    named = read.renamed({"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"})
    return modern_fields(
        read,
        qk_norm=read.flag("use_qk_norm", normed),
        qkv_bias=read.flag("use_qkv_bias", False),
        note=left_out(read),
        **_deepseek_experts(named),
    )


def _bailing_v2(read: ConfigReader) -> Fields:
    return _bailing(read, normed=True)


def _ernie4_5_moe(read: ConfigReader) -> Fields:
    read.must_not("use_bias", True, "its shared experts have biases and its routed ones have none")
    layers, width = read.count("num_hidden_layers"), read.count("moe_intermediate_size")
    first, every = read.whole("moe_layer_start_index", default=1), read.count("moe_layer_interval", default=1)
    last = read.config.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else read.whole("moe_layer_end_index")
    sparse = [first <= i <= last and (i + 1) % every == 0 for i in range(layers)]
    shared = read.whole("moe_num_shared_experts", default=2) * width
    named = read.renamed({"moe_k": "num_experts_per_tok"})
    return modern_fields(
        read,
        note=left_out(read),
        **expert_fields(named, sparse, "moe_num_experts", width=width, shared_ffn_hidden=shared),
    )


def _hunyuan_moe(read: ConfigReader) -> Fields:
    """Hunyuan-A13B; its files repeat a number for each layer."""
    width = read.alike("moe_intermediate_size", default=read.count("intermediate_size"))
    shared = read.alike("num_shared_expert", default=1) * width if read.flag("use_mixed_mlp_moe", True) else 0
    counts = ConfigReader(
        {"num_experts": read.alike("num_experts"), "num_experts_per_tok": read.alike("moe_topk", default=1)}, read.label
    )
    skipped, layers = read.whole("moe_layer_num_skipped"), read.count("num_hidden_layers")
    return modern_fields(
        read,
        default_head_dim=read.optional("attention_head_dim"),
        qk_norm=read.flag("use_qk_norm", True),
        **bias_fields(read.flag("attention_bias", False), False),
        **expert_fields(
            counts, [i >= skipped for i in range(layers)], "num_experts", width=width, shared_ffn_hidden=shared
        ),
    )


DEEPSEEK: Mapping[str, Architecture] = {
    "bailing_moe": (_bailing, False),
    "bailing_moe_v2": (_bailing_v2, False),
    "deepseek": (_deepseek_moe, False),
    "deepseek_v2": (_deepseek_v2, False),
    "deepseek_v3": (_deepseek_v3, False),
    "dots1": (_dots1, False),
    "ernie4_5_moe": (_ernie4_5_moe, True),
    "glm4_moe": (_glm4_moe, False),
    "glm4_moe_lite": (_glm4_moe_lite, False),
    "hunyuan_v1_moe": (_hunyuan_moe, False),
    "kimi_k2": (_deepseek_v3, False),
    "minicpm3": (_minicpm3, True),
    "mistral4": (_mistral4, False),
    "solar_open": (_solar_open, False),
}
