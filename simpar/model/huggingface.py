"""Reads a Hugging Face ``config.json`` into a :class:`~simpar.model.transformer.Transformer`.

One small function an architecture says what the file leaves to the library's own code: defaults, biases,
norms, windows, experts. Architectures that a transformer cannot describe are refused rather than approximated in
silence.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpar.errors import ModelError, nearest
from simpar.model.architectures import DENSE
from simpar.model.config_reader import Architecture, ConfigReader, Fields
from simpar.model.refused_architectures import REFUSED, check_dense
from simpar.model.sparse_architectures import SPARSE
from simpar.model.transformer import Transformer
from simpar.reading import read_json
from simpar.units import MB

ARCHITECTURES: Mapping[str, Architecture] = {**DENSE, **SPARSE}
"""Every architecture that can be imported, by ``model_type``."""

_LARGEST_FILE = 10 * MB  # a configuration has some kilobytes


def from_config(path_or_dict: str | Path | Mapping[str, Any], name: str | None = None) -> Transformer:
    """The transformer that a Hugging Face configuration describes.

    A multimodal file (one with a ``text_config`` or the like) yields its text tower, and ``note`` says so.

    Args:
        path_or_dict: a ``config.json``, the directory that holds it, or its parsed content.
        name: what to call the model; taken from the file's path, or from the configuration, if not given.

    Raises:
        ModelError: the file is missing or no JSON, a field is missing or of the wrong kind, or the
            architecture is unknown or has layers that a transformer cannot describe, such as state spaces.
    """
    if isinstance(path_or_dict, Mapping):
        config, label, default_name = path_or_dict, "config", None
    else:
        path = Path(path_or_dict)
        path = path / "config.json" if path.is_dir() else path
        config, label = _load(path), str(path)
        stem = path.parent.resolve().name if path.stem == "config" else path.stem
        default_name = stem.split("--")[-1]
    text, outer, label = _text_tower(config, label)
    tower = text is not config
    model_type = _known(_model_type(text, outer), label)
    family = _family(model_type)
    read, tied = ARCHITECTURES[family]
    # the library writes only what differs from its defaults into a tower's part of a file
    reader = ConfigReader({**_TOWER_DEFAULTS.get(model_type, {}), **text} if tower else text, label)
    if family in DENSE:
        check_dense(reader, model_type, SPARSE)
    fields: Fields = {
        "name": name or default_name or str(config.get("_name_or_path") or "").split("/")[-1] or model_type,
        "tied_embeddings": reader.flag("tie_word_embeddings", reader.outer_flag(outer, tied)),
        "source": f"Hugging Face configuration, model_type {model_type}",
        **read(reader),
    }
    notes = (
        f"text tower of {_model_type(config, config)}; other towers are left out" if tower else "",
        fields.pop("note", ""),
    )
    try:
        return Transformer.model_validate({**fields, "note": "; ".join(note for note in notes if note)})
    except ModelError as error:
        raise ModelError(f"{label}: {error}") from None


def _load(path: Path) -> Mapping[str, Any]:
    try:
        if path.exists() and not path.is_dir() and (not path.is_file() or path.stat().st_size > _LARGEST_FILE):
            raise ModelError(
                f"{path}: is no file of at most {_LARGEST_FILE:,} bytes; give a config.json or its directory"
            )
        content = read_json(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); give a config.json or its directory") from error
    except RuntimeError as error:  # links in a circle
        raise ModelError(f"{path}: cannot be read ({error}); give a config.json or its directory") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text, as a config.json must be; download it again") from error
    except ValueError as error:
        raise ModelError(f"{path}: {error}; mend that place") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}, but a configuration is a JSON object")
    return content


_TOWERS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Where multimodal files keep their text tower: Qwen's omni models (around the next), most, InternVL, DeepSeek-VL2."""


def _text_tower(config: Mapping[str, Any], label: str) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """The innermost text tower, what encloses it, and how errors name it; the file itself if it has no towers."""
    outer = config
    while (key := next((key for key in _TOWERS if config.get(key) is not None), None)) is not None:
        outer, config = config, config[key]
        if not isinstance(config, Mapping):
            raise ModelError(f"{label}: {key} is {config!r}, but must be a JSON object")
        label = f"{label}: {key}"
    return config, outer, label


def _model_type(config: Mapping[str, Any], outer: Mapping[str, Any]) -> Any:
    """``model_type``, or what the name of the library's class in ``architectures`` says where it is missing."""
    for part in (config, outer):
        if part.get("model_type") is not None:
            return part["model_type"]
        classes = part.get("architectures")
        if isinstance(classes, list) and classes and isinstance(classes[0], str):
            name = _squeezed(re.sub(r"(ForCausalLM|ForConditionalGeneration|LMHeadModel|Model)$", "", classes[0]))
            known = {_squeezed(each): each for each in (*ARCHITECTURES, *REFUSED, *_SAME)}
            return known.get(name, classes[0])
    return None


def _squeezed(name: str) -> str:
    """Letters and digits alone, to compare ``Qwen3Moe`` with ``qwen3_moe``."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _known(model_type: Any, label: str) -> str:
    """The architecture's name, if it can be imported."""
    if isinstance(model_type, str) and model_type in REFUSED:
        raise ModelError(
            f"{label}: model_type '{model_type}' {REFUSED[model_type]}; choose a model of attention layers and MLPs"
        )
    if not isinstance(model_type, str) or _family(model_type) not in ARCHITECTURES:
        close = nearest(model_type, sorted(ARCHITECTURES)) if isinstance(model_type, str) else ""
        raise ModelError(
            f"{label}: model_type {model_type!r} is not an architecture that can be imported{close} (of "
            f"{len(ARCHITECTURES)}, see simpar.model.huggingface.ARCHITECTURES); describe it as a Transformer yourself"
        )
    return model_type


def _family(model_type: str) -> str:
    """The text architecture behind other names of it, such as a multimodal file gives its text tower."""
    return _SAME.get(model_type, model_type)


_SAME: Mapping[str, str] = {
    "Yi": "llama",
    "gemma3": "gemma3_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4_moe",
    "glm4v_moe_text": "glm4_moe",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3",
}

_TOWER_DEFAULTS: Mapping[str, Fields] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2": {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "gemma": {
        "vocab_size": 256000,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma2": {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gemma3_text": {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
    "glm4v_text": {
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
    },
    "ministral3": {
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "glm4v_moe_text": {"attention_bias": True},
}
"""The library's defaults (transformers 5.24) of the architectures that multimodal files use as text towers."""
