"""What ``config.json`` files of the GPT-3 era mean: LayerNorm, a two-matrix MLP, biases; one function an architecture.

Each was checked against the parameter count of the library's module.
"""

from collections.abc import Mapping
from typing import Any

from simpar.errors import ModelError
from simpar.model.config_reader import Architecture, ConfigReader, Fields, bias_fields, shortest_period

PARALLEL = "attention and MLP run side by side in this architecture, but are described one after the other"


def _gpt(read: ConfigReader, layers: int, hidden: int, heads: int, **changes: Any) -> Fields:
    """What these files have in common: LayerNorm, two-matrix MLP, biases everywhere."""
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
        note=PARALLEL if read.flag("use_parallel_residual", True) else "",
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
        note=PARALLEL if parallel else "",
        **bias_fields(biased, biased),
    )


def _gpt_bigcode(read: ConfigReader) -> Fields:
    return {**_gpt2(read), "kv_heads": 1 if read.flag("multi_query", True) else None}


def _gptj(read: ConfigReader) -> Fields:
    """GPT-J and CodeGen: no biases in the attention, but one on the head."""
    return _gpt(
        read,
        read.count("n_layer", "num_hidden_layers"),
        read.count("n_embd", "hidden_size"),
        read.count("n_head", "num_attention_heads"),
        ffn_hidden=read.optional("n_inner"),
        max_positions=read.count("n_positions", "max_position_embeddings", "n_ctx"),
        norms_per_layer=1,
        head_bias=True,
        dropout=read.drops("attn_pdrop", "embd_pdrop", "resid_pdrop"),
        note=PARALLEL,
        **bias_fields(False, True),
    )


def _gpt_neo(read: ConfigReader) -> Fields:
    layers = read.count("num_layers", "num_hidden_layers")
    return _gpt(
        read,
        layers,
        read.count("hidden_size"),
        read.count("num_heads", "num_attention_heads"),
        ffn_hidden=read.optional("intermediate_size"),
        position="learned",
        max_positions=read.count("max_position_embeddings"),
        window=read.count("window_size", default=256),
        window_pattern=shortest_period(_gpt_neo_pattern(read, layers)),
        qkv_bias=False,
        dropout=read.drops("attention_dropout", "embed_dropout", "resid_dropout"),
    )


def _gpt_neo_pattern(read: ConfigReader, layers: int) -> str:
    """Letters of the layers, from ``attention_types``: pairs of a list of kinds and how often it repeats."""
    types = read.config.get("attention_types") or [[["global", "local"], (layers + 1) // 2]]
    try:
        kinds = [kind for names, times in types for kind in list(names) * times]
        pattern = "".join({"global": "F", "local": "W"}[kind] for kind in kinds)[:layers]
    except (TypeError, ValueError, KeyError):
        pattern = ""
    if len(pattern) != layers:
        raise ModelError(
            f"{read.label}: attention_types is {types!r}, but must name 'global' or 'local' for each of {layers}"
            ' layers, such as [[["global", "local"], 12]]'
        )
    return pattern


def _phi(read: ConfigReader) -> Fields:
    """Phi-1, 1.5 and 2."""
    read.must_not("qk_layernorm", True, "its norms are LayerNorms with biases")
    return _gpt(
        read,
        *_three(read),
        kv_heads=read.optional("num_key_value_heads"),
        head_dim=read.optional("head_dim"),
        ffn_hidden=read.count("intermediate_size"),
        max_positions=read.optional("max_position_embeddings"),
        norms_per_layer=1,
        head_bias=True,
        dropout=read.drops("attention_dropout", "embd_pdrop", "resid_pdrop"),
        note=PARALLEL,
    )


def _persimmon(read: ConfigReader) -> Fields:
    normed = read.flag("qk_layernorm", True)
    return _gpt(
        read,
        *_three(read),
        ffn_hidden=read.count("intermediate_size"),
        max_positions=read.optional("max_position_embeddings"),
        qk_norm=normed,
        dropout=read.drops("attention_dropout", "hidden_dropout"),
        note="biases of the norms of queries and keys (2 · head_dim a layer) are left out" if normed else "",
    )


def _xglm(read: ConfigReader) -> Fields:
    return _gpt(
        read,
        read.count("num_layers", "num_hidden_layers"),
        read.count("d_model", "hidden_size"),
        read.count("attention_heads", "num_attention_heads"),
        ffn_hidden=read.count("ffn_dim"),
        position="none",  # sinusoidal: a table without weights
        max_positions=read.optional("max_position_embeddings"),
        dropout=read.drops("dropout", "attention_dropout", default=0.1),
    )


GPT: Mapping[str, Architecture] = {
    "bloom": (_bloom, True),
    "codegen": (_gptj, False),
    "falcon": (_falcon, True),
    "gpt2": (_gpt2, True),
    "gpt_bigcode": (_gpt_bigcode, True),
    "gpt_neo": (_gpt_neo, True),
    "gpt_neox": (_gpt_neox, False),
    "gptj": (_gptj, False),
    "mpt": (_mpt, True),
    "opt": (_opt, True),
    "persimmon": (_persimmon, False),
    "phi": (_phi, False),
    "xglm": (_xglm, True),
}
