"""What each Hugging Face architecture's ``config.json`` means: one small function an architecture.

The functions say what the files leave to the library's own code: defaults, biases, norms, windows. Each was
checked against the parameter count of the library's module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simpar.errors import ModelError

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Typed access to a configuration; every error names the file, the field and what it should be."""

    config: Mapping[str, Any]
    label: str

    def has(self, key: str) -> bool:
        """Whether the file gives this field a value other than null."""
        return self.config.get(key) is not None

    def count(self, *keys: str, default: int | None = None) -> int:
        """The first of ``keys`` (spellings of one field) that the file has, as a positive integer."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ModelError(f"{self.label}: {key} is {value!r}, but must be a positive integer")
            return value
        if default is not None:
            return default
        spelled = " (or " + ", ".join(keys[1:]) + ")" if len(keys) > 1 else ""
        raise ModelError(f"{self.label}: field {keys[0]}{spelled} is missing; add it as a positive integer")

    def optional(self, key: str, default: int | None = None) -> int | None:
        """A positive integer where an explicit null means that there is none."""
        if key not in self.config:
            return default
        return self.count(key) if self.has(key) else None

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; the default stands for a missing field and for null."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.label}: {key} is {value!r}, but must be true or false")
        return value

    def outer_flag(self, config: Mapping[str, Any], default: bool) -> bool:
        """``tie_word_embeddings`` of the enclosing file, where the text tower does not say."""
        return ConfigReader(config, self.label).flag("tie_word_embeddings", default)

    def part(self, key: str) -> "ConfigReader":
        """A reader of a nested object; an empty one if it is missing."""
        value = self.config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ModelError(f"{self.label}: {key} is {value!r}, but must be a JSON object")
        return ConfigReader(value or {}, f"{self.label}: {key}")

    def drops(self, *keys: str, default: float = 0.0) -> bool:
        """Whether any of these dropout rates is above zero."""
        rates = [self.config.get(key, default) for key in keys]
        for key, rate in zip(keys, rates, strict=True):
            if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float)):
                raise ModelError(f"{self.label}: {key} is {rate!r}, but must be a number")
        return any(rate for rate in rates)

    def must_not(self, key: str, value: Any, why: str) -> None:
        """Refuses a setting that a Transformer cannot describe."""
        if self.config.get(key) == value:
            raise ModelError(
                f"{self.label}: {key} {value!r} is not supported: {why}; describe the model as a Transformer"
            )


def _modern(read: ConfigReader, **changes: Any) -> Fields:
    """What the llama family's files have in common."""
    heads = read.count("num_attention_heads", default=changes.pop("default_heads", None))
    return {
        "layers": read.count("num_hidden_layers"),
        "hidden": read.count("hidden_size"),
        "heads": heads,
        "kv_heads": read.count("num_key_value_heads", default=changes.pop("default_kv_heads", heads)),
        "head_dim": read.count("head_dim") if read.has("head_dim") else changes.pop("default_head_dim", None),
        "ffn_hidden": read.count("intermediate_size"),
        "gated_mlp": True,
        "vocab": read.count("vocab_size", default=changes.pop("default_vocab", None)),
        "max_positions": read.optional("max_position_embeddings"),
        "dropout": read.drops("attention_dropout"),
        **{key: value for key, value in changes.items() if not key.startswith("default_")},
    }


def _biases(attention: bool, mlp: bool) -> Fields:
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": mlp}


def _windows(read: ConfigReader, window: int | None, pattern: str) -> Fields:
    """Window fields; a ``layer_types`` list in the file overrules the architecture's own pattern."""
    kinds = read.config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                raise ModelError(
                    f"{read.label}: layer_types has '{kind}', but layers attend fully (full_attention) or"
                    " in a window (sliding_attention); choose a model without other layers"
                )
        pattern = _shortest_period("".join("W" if kind == "sliding_attention" else "F" for kind in kinds))
    if window is None or "W" not in pattern:
        return {"window": None}
    return {"window": window, "window_pattern": pattern}


def _shortest_period(pattern: str) -> str:
    for length in range(1, len(pattern) + 1):
        if (pattern[:length] * len(pattern))[: len(pattern)] == pattern:
            return pattern[:length]
    return pattern


def _llama(read: ConfigReader) -> Fields:
    return _modern(read, **_biases(read.flag("attention_bias", False), read.flag("mlp_bias", False)))


def _mistral(read: ConfigReader) -> Fields:
    return _modern(read, **_windows(read, read.optional("sliding_window", default=4096), "W"))


def _phi3(read: ConfigReader) -> Fields:
    dropout = read.drops("attention_dropout", "resid_pdrop", "embd_pdrop")
    return _modern(read, dropout=dropout, **_windows(read, read.optional("sliding_window"), "W"))


def _qwen_windows(read: ConfigReader) -> Fields:
    """Qwen counts ``max_window_layers`` from below: those layers keep full attention."""
    if not read.flag("use_sliding_window", False):
        return {"window": None}
    layers = read.count("num_hidden_layers")
    full = min(read.count("max_window_layers", default=28), layers)
    pattern = _shortest_period("F" * full + "W" * (layers - full))
    return _windows(read, read.optional("sliding_window", default=4096), pattern)


def _qwen2(read: ConfigReader) -> Fields:
    return _modern(read, qkv_bias=True, **_qwen_windows(read))


def _qwen3(read: ConfigReader) -> Fields:
    biases = _biases(read.flag("attention_bias", False), False)
    return _modern(read, default_head_dim=128, qk_norm=True, **biases, **_qwen_windows(read))


def _gemma(read: ConfigReader) -> Fields:
    return _modern(read, default_head_dim=256, **_biases(read.flag("attention_bias", False), False))


def _gemma2(read: ConfigReader) -> Fields:
    windows = _windows(read, read.optional("sliding_window", default=4096), "WF")
    return {**_gemma(read), "norms_per_layer": 4, **windows}


def _gemma3(read: ConfigReader) -> Fields:
    period = read.count("sliding_window_pattern", default=6)
    windows = _windows(read, read.optional("sliding_window", default=4096), "W" * (period - 1) + "F")
    biases = _biases(read.flag("attention_bias", False), False)
    # files of this family leave out what equals the library's defaults
    defaults = {"default_heads": 8, "default_kv_heads": 4, "default_head_dim": 256, "default_vocab": 262208}
    return _modern(read, **defaults, qk_norm=True, norms_per_layer=4, **biases, **windows)


def _starcoder2(read: ConfigReader) -> Fields:
    bias = read.flag("use_bias", True)
    dropout = read.drops("attention_dropout", "residual_dropout", "embedding_dropout")
    windows = _windows(read, read.optional("sliding_window"), "W")
    return _modern(read, gated_mlp=False, norm="layernorm", dropout=dropout, **_biases(bias, bias), **windows)


def _nemotron(read: ConfigReader) -> Fields:
    biases = _biases(read.flag("attention_bias", False), read.flag("mlp_bias", False))
    return _modern(read, gated_mlp=False, norm="layernorm", **biases)


def _stablelm(read: ConfigReader) -> Fields:
    read.must_not("qk_layernorm", True, "its norms are one LayerNorm per head")
    read.must_not("use_parallel_residual", True, "attention and MLP run side by side")
    return _modern(read, norm="layernorm", qkv_bias=read.flag("use_qkv_bias", False))


def _seed_oss(read: ConfigReader) -> Fields:
    biases = {
        "qkv_bias": read.flag("attention_bias", True),
        "out_bias": read.flag("attention_out_bias", False),
    }
    dropout = read.drops("attention_dropout", "residual_dropout")
    return _modern(read, default_head_dim=128, dropout=dropout, mlp_bias=read.flag("mlp_bias", False), **biases)


_PARALLEL = "attention and MLP run side by side in this architecture, but are described one after the other"


def _cohere(read: ConfigReader) -> Fields:
    read.must_not("use_qk_norm", True, "its norms have one weight vector per head")
    biases = _biases(read.flag("attention_bias", False), False)
    return _modern(read, norm="layernorm", norm_bias=False, norms_per_layer=1, note=_PARALLEL, **biases)


def _gpt(read: ConfigReader, layers: int, hidden: int, heads: int, **changes: Any) -> Fields:
    """What the files of the GPT-3 era have in common: LayerNorm, two-matrix MLP, biases everywhere."""
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "gated_mlp": False,
        "vocab": read.count("vocab_size"),
        "norm": "layernorm",
        **_biases(True, True),
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
        **_biases(biased, biased),
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
        **_biases(biased, biased),
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
        **_biases(biased, biased),
    )


# model_type -> reader, and whether the architecture ties its embeddings when the file does not say
ARCHITECTURES: Mapping[str, tuple[Callable[[ConfigReader], Fields], bool]] = {
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
