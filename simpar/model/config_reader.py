"""Typed access to a Hugging Face configuration, and what the readers of many architectures share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simpar.errors import ModelError
from simpar.model.layer import MOST_LAYERS

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

Fields = dict[str, Any]


Architecture = tuple[Callable[["ConfigReader"], Fields], bool]
"""A reader, and whether the architecture ties its embeddings when the file does not say."""


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
            if key in _LAYERS and value > MOST_LAYERS:
                raise ModelError(
                    f"{self.label}: {key} is {value}, more than the {MOST_LAYERS:,} layers that can be simulated; "
                    "give fewer"
                )
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

    def whole(self, *keys: str, default: int = 0) -> int:
        """The first of ``keys`` that the file has, as an integer of 0 or more."""
        for key in keys:
            value = self.config.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                    raise ModelError(f"{self.label}: {key} is {value!r}, but must be an integer of 0 or more")
                return value
        return default

    def integers(self, key: str) -> list[int] | None:
        """A list of integers such as layer numbers; None if it is missing."""
        value = self.config.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise ModelError(f"{self.label}: {key} is {value!r}, but must be a list of integers")
        return value

    def alike(self, key: str, default: int | None = None) -> int:
        """A positive integer, or a list that repeats one for each layer.

        Raises:
            ModelError: the list differs from layer to layer, or an entry is no positive integer.
        """
        value = self.config.get(key)
        if not isinstance(value, list) or not value:
            return self.count(key, default=default)
        if any(each != value[0] for each in value):
            raise ModelError(
                f"{self.label}: {key} {value!r} differs from layer to layer, which is not described; choose a model"
                " whose layers have one width"
            )
        return ConfigReader({key: value[0]}, self.label).count(key)

    def renamed(self, names: Mapping[str, str]) -> "ConfigReader":
        """A reader that also finds each key of ``names`` under the name it is given there."""
        found = {new: self.config[old] for old, new in names.items() if self.has(old) and not self.has(new)}
        return ConfigReader({**self.config, **found}, self.label)

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


def modern_fields(read: ConfigReader, **changes: Any) -> Fields:
    """What the llama family's files have in common."""
    heads = read.count("num_attention_heads", default=changes.pop("default_heads", None))
    return {
        "layers": read.count("num_hidden_layers"),
        "hidden": read.count("hidden_size"),
        "heads": heads,
        "kv_heads": read.count("num_key_value_heads", default=changes.pop("default_kv_heads", heads)),
        # null, unlike a missing field, is hidden / heads also where the architecture has a default
        "head_dim": read.optional("head_dim", default=changes.pop("default_head_dim", None)),
        # files of mixtures without a dense layer may leave it out
        "ffn_hidden": changes["ffn_hidden"] if "ffn_hidden" in changes else read.count("intermediate_size"),
        "gated_mlp": True,
        "vocab": read.count("vocab_size", default=changes.pop("default_vocab", None)),
        "max_positions": read.optional("max_position_embeddings"),
        "dropout": read.drops("attention_dropout"),
        **{key: value for key, value in changes.items() if not key.startswith("default_")},
    }


def bias_fields(attention: bool, mlp: bool) -> Fields:
    """Biases on all projections of the attention, and on those of the MLP."""
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": mlp}


def window_fields(read: ConfigReader, window: int | None, pattern: str) -> Fields:
    """Window fields; a ``layer_types`` list in the file overrules the architecture's own pattern."""
    kinds = read.config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        for kind in kinds:
            if kind not in ("sliding_attention", "full_attention"):
                raise ModelError(
                    f"{read.label}: layer_types has '{kind}', but layers attend fully (full_attention) or"
                    " in a window (sliding_attention); choose a model without other layers"
                )
        pattern = shortest_period("".join("W" if kind == "sliding_attention" else "F" for kind in kinds))
    if window is None or "W" not in pattern:
        return {"window": None}
    return {"window": window, "window_pattern": pattern}


def shortest_period(pattern: str) -> str:
    """The shortest pattern that repeats to this one; its last repetition may be cut off.

    >>> shortest_period("WWFWWFWW")
    'WWF'
    """
    for length in range(1, len(pattern) + 1):
        if (pattern[:length] * len(pattern))[: len(pattern)] == pattern:
            return pattern[:length]
    return pattern


def qwen_window_fields(read: ConfigReader) -> Fields:
    """Qwen counts ``max_window_layers`` from below: those layers keep full attention."""
    if not read.flag("use_sliding_window", False):
        return {"window": None}
    layers = read.count("num_hidden_layers")
    full = min(read.count("max_window_layers", default=28), layers)
    pattern = shortest_period("F" * full + "W" * (layers - full))
    return window_fields(read, read.optional("sliding_window", default=4096), pattern)


def expert_fields(read: ConfigReader, sparse: Sequence[bool], *count: str, width: int, **changes: Any) -> Fields:
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


def left_out(read: ConfigReader) -> str:
    """The note on layers that predict further tokens, which checkpoints have and an import leaves out."""
    layers = read.whole("num_nextn_predict_layers")
    return f"{layers} multi-token-prediction layer{'s' if layers > 1 else ''} left out" if layers else ""
