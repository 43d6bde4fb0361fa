"""What each dense Hugging Face architecture's ``config.json`` means: one small function an architecture.

The functions say what the files leave to the library's own code: defaults, biases, norms, windows. Each was
checked against the parameter count of the library's module.
"""

from collections.abc import Callable, Mapping
from typing import Any

from simpar.errors import ModelError
from simpar.model.config_reader import (
    ConfigReader,
    Fields,
    bias_fields,
    modern_fields,
    qwen_window_fields,
    window_fields,
)

Architecture = tuple[Callable[[ConfigReader], Fields], bool]
"""A reader, and whether the architecture ties its embeddings when the file does not say."""


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
    dropout = read.drops("attention_dropout", "residual_dropout")
    return modern_fields(read, default_head_dim=128, dropout=dropout, mlp_bias=read.flag("mlp_bias", False), **biases)


_PARALLEL = "attention and MLP run side by side in this architecture, but are described one after the other"


def _cohere(read: ConfigReader) -> Fields:
    read.must_not("use_qk_norm", True, "its norms have one weight vector per head")
    biases = bias_fields(read.flag("attention_bias", False), False)
    return modern_fields(read, norm="layernorm", norm_bias=False, norms_per_layer=1, note=_PARALLEL, **biases)


def _gpt(read: ConfigReader, layers: int, hidden: int, heads: int, **changes: Any) -> Fields:
    """What the files of the GPT-3 era have in common: LayerNorm, two-matrix MLP, biases everywhere."""
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "gated_mlp": False,
        "vocab": read.count("vocab_size"),
        "norm": "layernorm",
        **bias_fields(True, True),
        **changes,
    }


def _gpt2(read: ConfigReader) -> Fields:
    return _gpt(
        read,
        read.count("n_layer", "num_hidden_layers"),
        read.count("n_embd", "hidden_size"),
        read.count("n_head", "num_attention_heads"),
        ffn_hidden=read.optional("n_inner"),
        position="learned",
        max_positions=read.count("n_positions", "max_position_embeddings", "n_ctx"),
        dropout=read.drops("attn_pdrop", "embd_pdrop", "resid_pdrop", default=0.1),
    )


def _three(read: ConfigReader) -> tuple[int, int, int]:
    return read.count("num_hidden_layers"), read.count("hidden_size"), read.count("num_attention_heads")


def _gpt_neox(read: ConfigReader) -> Fields:
    attention = read.flag("attention_bias", True)
    return _gpt(
        read,
        *_three(read),
        ffn_hidden=read.count("intermediate_size"),
        max_positions=read.optional("max_position_embeddings"),
        dropout=read.drops("attention_dropout", "hidden_dropout"),
        qkv_bias=attention,
        out_bias=attention,
        note=_PARALLEL if read.flag("use_parallel_residual", True) else "",
    )


def _opt(read: ConfigReader) -> Fields:
    read.must_not("do_layer_norm_before", False, "its norms come after the sublayers and none before the head")
    hidden = read.count("hidden_size")
    if read.count("word_embed_proj_dim", default=hidden) != hidden:
        raise ModelError(
            f"{read.label}: word_embed_proj_dim {read.config['word_embed_proj_dim']} differs from hidden_size"
            f" {hidden}: embeddings with a projection are not supported; choose another size of OPT"
        )
    biased = read.flag("enable_bias", True)
    return _gpt(
        read,
        *_three(read),
        ffn_hidden=read.count("ffn_dim"),
        position="learned",
        # the table has two rows more than there are positions (an offset kept from the padding index)
        max_positions=read.count("max_position_embeddings") + 2,
        dropout=read.drops("dropout", default=0.1),
        **bias_fields(biased, biased),
    )


def _mpt(read: ConfigReader) -> Fields:
    attention = read.part("attn_config")
    attention.must_not("qk_ln", True, "queries and keys are normalised over their full width")
    attention.must_not("attn_type", "multiquery_attention", "key/value heads are stored in another form")
    hidden, positions = read.count("d_model"), read.count("max_seq_len")
    biased = not read.flag("no_bias", True)
    return _gpt(
        read,
        read.count("n_layers"),
        hidden,
        read.count("n_heads"),
        ffn_hidden=read.count("expansion_ratio", default=4) * hidden,
        position="none" if attention.flag("alibi", True) else "learned",
        max_positions=positions,
        norm_bias=biased,
        **bias_fields(biased, biased),
    )


def _bloom(read: ConfigReader) -> Fields:
    return _gpt(
        read,
        read.count("n_layer", "num_hidden_layers"),
        read.count("hidden_size", "n_embed"),
        read.count("n_head", "num_attention_heads"),
        position="none",
        embedding_norm=True,
        dropout=read.drops("attention_dropout", "hidden_dropout"),
    )


def _falcon(read: ConfigReader) -> Fields:
    heads = read.count("num_attention_heads", "n_head")
    new = read.flag("new_decoder_architecture", False)
    parallel = new or read.flag("parallel_attn", True)
    shared = read.count("num_ln_in_parallel_attn", default=2 if new else 1) == 1
    biased = read.flag("bias", False)
    hidden = read.count("hidden_size")
    kv_heads = read.count("num_kv_heads", default=heads) if new else 1 if read.flag("multi_query", True) else heads
    return _gpt(
        read,
        read.count("num_hidden_layers", "n_layer"),
        hidden,
        heads,
        kv_heads=kv_heads,
        ffn_hidden=read.count("ffn_hidden_size", default=4 * hidden),
        position="none" if read.flag("alibi", False) else "rope",
        norms_per_layer=1 if parallel and shared else 2,
        dropout=read.drops("attention_dropout", "hidden_dropout"),
        note=_PARALLEL if parallel else "",
        **bias_fields(biased, biased),
    )


DENSE: Mapping[str, Architecture] = {
    "bloom": (_bloom, True),
    "cohere": (_cohere, True),
    "falcon": (_falcon, True),
    "gemma": (_gemma, True),
    "gemma2": (_gemma2, True),
    "gemma3_text": (_gemma3, True),
    "gpt2": (_gpt2, True),
    "gpt_neox": (_gpt_neox, False),
    "granite": (_llama, False),
    "llama": (_llama, False),
    "mistral": (_mistral, False),
    "mpt": (_mpt, True),
    "nemotron": (_nemotron, False),
    "opt": (_opt, True),
    "phi3": (_phi3, False),
    "qwen2": (_qwen2, False),
    "qwen3": (_qwen3, False),
    "seed_oss": (_seed_oss, False),
    "smollm3": (_llama, True),
    "stablelm": (_stablelm, False),
    "starcoder2": (_starcoder2, True),
}
