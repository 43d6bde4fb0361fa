"""What each dense Hugging Face architecture's ``config.json`` means: one small function an architecture.

The functions say what the files leave to the library's own code: defaults, biases, norms, windows. Each was
checked against the parameter count of the library's module.
"""

from collections.abc import Mapping

from simpar.errors import ModelError
from simpar.model.config_reader import (
    Architecture,
    ConfigReader,
    Fields,
    bias_fields,
    left_out,
    modern_fields,
    qwen_window_fields,
    window_fields,
)
from simpar.model.gpt_architectures import GPT, PARALLEL


def _llama(read: ConfigReader) -> Fields:
    return modern_fields(read, **bias_fields(read.flag("attention_bias", False), read.flag("mlp_bias", False)))


def _mistral(read: ConfigReader) -> Fields:
    return modern_fields(read, **window_fields(read, read.optional("sliding_window", default=4096), "W"))


def _phi3(read: ConfigReader) -> Fields:
    dropout = read.drops("attention_dropout", "resid_pdrop", "embd_pdrop")
    return modern_fields(read, dropout=dropout, **window_fields(read, read.optional("sliding_window"), "W"))


def _qwen2(read: ConfigReader) -> Fields:
    return modern_fields(read, qkv_bias=True, **qwen_window_fields(read))


def _qwen3(read: ConfigReader) -> Fields:
    biases = bias_fields(read.flag("attention_bias", False), False)
    return modern_fields(read, default_head_dim=128, qk_norm=True, **biases, **qwen_window_fields(read))


def _gemma(read: ConfigReader) -> Fields:
    return modern_fields(read, default_head_dim=256, **bias_fields(read.flag("attention_bias", False), False))


def _gemma2(read: ConfigReader) -> Fields:
    windows = window_fields(read, read.optional("sliding_window", default=4096), "WF")
    return {**_gemma(read), "norms_per_layer": 4, **windows}


def _gemma3(read: ConfigReader) -> Fields:
    period = read.count("sliding_window_pattern", default=6)
    windows = window_fields(read, read.optional("sliding_window", default=4096), "W" * (period - 1) + "F")
    biases = bias_fields(read.flag("attention_bias", False), False)
    # files of this family leave out what equals the library's defaults
    defaults = {"default_heads": 8, "default_kv_heads": 4, "default_head_dim": 256, "default_vocab": 262208}
    return modern_fields(read, **defaults, qk_norm=True, norms_per_layer=4, **biases, **windows)


def _starcoder2(read: ConfigReader) -> Fields:
    bias = read.flag("use_bias", True)
    dropout = read.drops("attention_dropout", "residual_dropout", "embedding_dropout")
    windows = window_fields(read, read.optional("sliding_window"), "W")
    return modern_fields(read, gated_mlp=False, norm="layernorm", dropout=dropout, **bias_fields(bias, bias), **windows)


def _nemotron(read: ConfigReader) -> Fields:
    biases = bias_fields(read.flag("attention_bias", False), read.flag("mlp_bias", False))
    return modern_fields(read, gated_mlp=False, norm="layernorm", **biases)


def _stablelm(read: ConfigReader) -> Fields:
    read.must_not("qk_layernorm", True, "its norms are one LayerNorm per head")
    read.must_not("use_parallel_residual", True, "attention and MLP run side by side")
    return modern_fields(read, norm="layernorm", qkv_bias=read.flag("use_qkv_bias", False))


def _seed_oss(read: ConfigReader) -> Fields:
    biases = {
        "qkv_bias": read.flag("attention_bias", True),
        "out_bias": read.flag("attention_out_bias", False),
    }
    dropout = read.drops("attention_dropout", "residual_dropout", default=0.1)
    return modern_fields(read, default_head_dim=128, dropout=dropout, mlp_bias=read.flag("mlp_bias", False), **biases)


def _cohere(read: ConfigReader) -> Fields:
    read.must_not("use_qk_norm", True, "its norms have one weight vector per head")
    biases = bias_fields(read.flag("attention_bias", False), False)
    return modern_fields(read, norm="layernorm", norm_bias=False, norms_per_layer=1, note=PARALLEL, **biases)


def _cohere2(read: ConfigReader) -> Fields:
    period = read.count("sliding_window_pattern", default=4)
    windows = window_fields(read, read.optional("sliding_window", default=4096), "W" * (period - 1) + "F")
    return {**_cohere(read), **windows}


def _olmo(read: ConfigReader) -> Fields:
    """OLMo 1: its norms have no weights, which a Transformer's always have."""
    biases = bias_fields(read.flag("attention_bias", False), False)
    spare = (2 * read.count("num_hidden_layers") + 1) * read.count("hidden_size")
    note = f"norms have no weights in this architecture; {spare:,} parameters of them are counted nevertheless"
    return modern_fields(read, norm="layernorm", norm_bias=False, note=note, **biases)


def _olmo2(read: ConfigReader) -> Fields:
    biases = bias_fields(read.flag("attention_bias", False), False)
    return modern_fields(read, qk_norm=True, qk_norm_weights="width", **biases)


def _olmo3(read: ConfigReader) -> Fields:
    return {**_olmo2(read), **window_fields(read, read.optional("sliding_window", default=4096), "WWWF")}


def _glm(read: ConfigReader) -> Fields:
    return modern_fields(read, default_head_dim=128, qkv_bias=read.flag("attention_bias", True))


def _glm4(read: ConfigReader) -> Fields:
    return {**_glm(read), "norms_per_layer": 4}


def _glm4v(read: ConfigReader) -> Fields:
    return modern_fields(read, norms_per_layer=4, qkv_bias=True, head_dim=None)


def _chatglm(read: ConfigReader) -> Fields:
    """ChatGLM2 and 3, GLM-4-9B in the form of their own code; the first ChatGLM has other fields."""
    heads = read.count("num_attention_heads")
    grouped = read.flag("multi_query_attention", False)
    bias = read.flag("add_bias_linear", False)
    return {
        "layers": read.count("num_layers"),
        "hidden": read.count("hidden_size"),
        "heads": heads,
        "kv_heads": read.count("multi_query_group_num", default=1) if grouped else heads,
        "head_dim": read.optional("kv_channels"),
        "ffn_hidden": read.count("ffn_hidden_size"),
        "gated_mlp": True,
        "vocab": read.count("padded_vocab_size", "vocab_size"),
        "max_positions": read.optional("seq_length"),
        "norm": "rmsnorm" if read.flag("rmsnorm", True) else "layernorm",
        "dropout": read.drops("attention_dropout", "hidden_dropout"),
        "qkv_bias": bias or read.flag("add_qkv_bias", False),
        "out_bias": bias,
        "mlp_bias": bias,
    }


def _exaone(read: ConfigReader) -> Fields:
    return _llama(read.renamed({"num_layers": "num_hidden_layers"}))


def _exaone4(read: ConfigReader) -> Fields:
    """The pattern is a period, or letters as in ``LLLG``: local and global."""
    given = read.config.get("sliding_window_pattern", 4)
    if isinstance(given, str) and given and not set(given) - {"L", "G"}:
        pattern = given.replace("L", "W").replace("G", "F")
    else:
        pattern = "F" if given is None else "W" * (read.count("sliding_window_pattern", default=4) - 1) + "F"
    return modern_fields(
        read, qk_norm=True, **window_fields(read, read.optional("sliding_window", default=4096), pattern)
    )


def _internlm2(read: ConfigReader) -> Fields:
    bias = read.flag("bias", True)
    return modern_fields(read, qkv_bias=bias, out_bias=bias)


def _internlm3(read: ConfigReader) -> Fields:
    named = read.renamed({"qkv_bias": "attention_bias", "bias": "mlp_bias"})
    biases = bias_fields(named.flag("attention_bias", False), named.flag("mlp_bias", False))
    return modern_fields(named, default_head_dim=128, **biases)


def _baichuan(read: ConfigReader) -> Fields:
    # the repositories' own code differs: the small ones rotate, the wide ones have ALiBi (vLLM tells them apart so too)
    position = "rope" if read.count("hidden_size") == 4096 else "none"
    return {**modern_fields(read.renamed({"model_max_length": "max_position_embeddings"})), "position": position}


def _ernie4_5(read: ConfigReader) -> Fields:
    bias = read.flag("use_bias", False)
    return modern_fields(read, default_head_dim=128, **bias_fields(bias, bias))


def _hunyuan(read: ConfigReader) -> Fields:
    return modern_fields(
        read,
        default_head_dim=read.optional("attention_head_dim"),
        qk_norm=read.flag("use_qk_norm", True),
        **bias_fields(read.flag("attention_bias", False), False),
    )


def _helium(read: ConfigReader) -> Fields:
    biases = {"qkv_bias": read.flag("attention_bias", False), "mlp_bias": read.flag("mlp_bias", False)}
    return modern_fields(read, default_head_dim=128, **biases)


def _minicpm(read: ConfigReader) -> Fields:
    sparse = read.has("sparse_config")
    note = "its sparse attention to long sequences (sparse_config) is described as full attention" if sparse else ""
    return modern_fields(read, note=note, **bias_fields(read.flag("attention_bias", False), False))


def _qwen(read: ConfigReader) -> Fields:
    """The first Qwen: the file's width is that of gate and up projection together."""
    bias = not read.flag("no_bias", True)
    width, odd = divmod(read.count("intermediate_size"), 2)
    if odd:
        raise ModelError(
            f"{read.label}: intermediate_size {2 * width + 1} is odd, but is that of two projections here; correct it"
        )
    return modern_fields(
        read.renamed({"kv_channels": "head_dim", "seq_length": "max_position_embeddings"}),
        ffn_hidden=width,
        dropout=read.drops("attn_dropout_prob", "emb_dropout_prob"),
        qkv_bias=True,
        out_bias=bias,
        mlp_bias=bias,
    )


def _apertus(read: ConfigReader) -> Fields:
    biases = bias_fields(read.flag("attention_bias", False), False)
    note = "2 trained numbers a layer in its activation (xIELU) are left out"
    return modern_fields(read, gated_mlp=False, qk_norm=True, note=note, **biases)


def _arcee(read: ConfigReader) -> Fields:
    return {**_llama(read), "gated_mlp": False}


def _ministral3(read: ConfigReader) -> Fields:
    return modern_fields(read, default_head_dim=128, **window_fields(read, read.optional("sliding_window"), "W"))


def _smollm3(read: ConfigReader) -> Fields:
    """Windows, where a file has them, are on the layers without rotary positions: every fourth."""
    window = read.optional("sliding_window") if read.flag("use_sliding_window", False) else None
    interval = read.count("no_rope_layer_interval", default=4)
    rotary = read.integers("no_rope_layers")  # 1 with rotary positions, 0 without
    pattern = "".join("F" if each else "W" for each in rotary) if rotary else "F" * (interval - 1) + "W"
    return {**_llama(read), **window_fields(read, window, pattern)}


def _mimo(read: ConfigReader) -> Fields:
    return {**_qwen2(read), "qkv_bias": read.flag("attention_bias", True), "note": left_out(read)}


def _cwm(read: ConfigReader) -> Fields:
    windows = window_fields(read, read.optional("sliding_window", default=8192), "FWWW")
    return modern_fields(read, default_head_dim=128, mlp_bias=read.flag("mlp_bias", False), **windows)


def _hyperclovax(read: ConfigReader) -> Fields:
    return {**_llama(read), "norms_per_layer": 4 if read.flag("use_post_norm", True) else 2}


def _vaultgemma(read: ConfigReader) -> Fields:
    return {**_gemma(read), **window_fields(read, read.optional("sliding_window", default=4096), "WF")}


DENSE: Mapping[str, Architecture] = {
    **GPT,
    "apertus": (_apertus, False),
    "arcee": (_arcee, False),
    "baichuan": (_baichuan, False),
    "chatglm": (_chatglm, False),
    "cohere": (_cohere, True),
    "cohere2": (_cohere2, True),
    "cwm": (_cwm, False),
    "ernie4_5": (_ernie4_5, True),
    "exaone": (_exaone, False),
    "exaone4": (_exaone4, False),
    "gemma": (_gemma, True),
    "gemma2": (_gemma2, True),
    "gemma3_text": (_gemma3, True),
    "glm": (_glm, False),
    "glm4": (_glm4, False),
    "glm4v_text": (_glm4v, False),
    "granite": (_llama, False),
    "helium": (_helium, False),
    "hunyuan_v1_dense": (_hunyuan, False),
    "hyperclovax": (_hyperclovax, False),
    "internlm2": (_internlm2, False),
    "internlm3": (_internlm3, False),
    "llama": (_llama, False),
    "mimo": (_mimo, False),
    "minicpm": (_minicpm, True),
    "ministral": (_mistral, False),
    "ministral3": (_ministral3, False),
    "mistral": (_mistral, False),
    "nemotron": (_nemotron, False),
    "olmo": (_olmo, False),
    "olmo2": (_olmo2, False),
    "olmo3": (_olmo3, False),
    "phi3": (_phi3, False),
    "qwen": (_qwen, False),
    "qwen2": (_qwen2, False),
    "qwen3": (_qwen3, False),
    "seed_oss": (_seed_oss, False),
    "smollm3": (_smollm3, True),
    "stablelm": (_stablelm, False),
    "starcoder2": (_starcoder2, True),
    "vaultgemma": (_vaultgemma, True),
}
