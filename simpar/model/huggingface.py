"""Reads a Hugging Face ``config.json`` into a :class:`~simpar.model.transformer.Transformer`.

One small function an architecture says what the file leaves to the library's own code: defaults, biases,
norms, windows. Architectures that a dense transformer cannot describe are refused rather than approximated in
silence.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from simpar.errors import ModelError, nearest
from simpar.model.architectures import ARCHITECTURES, ConfigReader, Fields
from simpar.model.transformer import Transformer
from simpar.units import MB

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_TYPES = frozenset(
    {
        "dbrx",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "gpt_oss",
        "granitemoe",
        "grok-1",
        "jamba",
        "llama4",
        "llama4_text",
        "mixtral",
        "olmoe",
        "phimoe",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_vl_moe",
    }
)

_LARGEST_FILE = 10 * MB  # a configuration has some kilobytes


def from_config(path_or_dict: str | Path | Mapping[str, Any], name: str | None = None) -> Transformer:
    """The transformer that a Hugging Face configuration describes.

    A multimodal file (one with a ``text_config``) yields its text tower, and ``note`` says so.

    Args:
        path_or_dict: a ``config.json``, the directory that holds it, or its parsed content.
        name: what to call the model; taken from the file's path, or from the configuration, if not given.

    Raises:
        ModelError: the file is missing or no JSON, a field is missing or of the wrong kind, or the
            architecture is unknown or not a dense transformer (mixture of experts, latent attention).
    """
    if isinstance(path_or_dict, Mapping):
        config, label, default_name = path_or_dict, "config", None
    else:
        path = Path(path_or_dict)
        path = path / "config.json" if path.is_dir() else path
        config, label = _load(path), str(path)
        stem = path.parent.resolve().name if path.stem == "config" else path.stem
        default_name = stem.split("--")[-1]
    text, tower = _text_tower(config, label)
    model_type = text.get("model_type", config.get("model_type"))
    _refuse_experts(text, config, label)
    if not isinstance(model_type, str) or _family(model_type) not in ARCHITECTURES:
        raise ModelError(
            f"{label}: model_type {model_type!r} is not an architecture that can be imported"
            f"{nearest(str(model_type), sorted(ARCHITECTURES))}; describe it as a Transformer yourself,"
            f" or use one of: {', '.join(sorted(ARCHITECTURES))}"
        )
    read, tied = ARCHITECTURES[_family(model_type)]
    reader = ConfigReader(text, label + (": text_config" if tower else ""))
    fields: Fields = {
        "name": name or default_name or str(config.get("_name_or_path") or "").split("/")[-1] or model_type,
        "tied_embeddings": reader.flag("tie_word_embeddings", reader.outer_flag(config, tied)),
        "source": f"Hugging Face configuration, model_type {model_type}",
        **read(reader),
    }
    notes = (
        f"text tower of {config.get('model_type')}; other towers are left out" if tower else "",
        fields.pop("note", ""),
    )
    try:
        return Transformer.model_validate({**fields, "note": "; ".join(note for note in notes if note)})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ModelError(f"{label}: {where + ': ' if where else ''}{first['msg']}") from error


def _load(path: Path) -> Mapping[str, Any]:
    try:
        if path.exists() and not path.is_dir() and (not path.is_file() or path.stat().st_size > _LARGEST_FILE):
            raise ModelError(
                f"{path}: is no file of at most {_LARGEST_FILE:,} bytes; give a config.json or its directory"
            )
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}); give a config.json or its directory") from error
    except (RecursionError, RuntimeError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); give a config.json that nests less") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: is not UTF-8 text, as a config.json must be; download it again") from error
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path}: is not JSON: {error.msg} at line {error.lineno}, column {error.colno}; mend that place"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds a {type(content).__name__}, but a configuration is a JSON object")
    return content


def _text_tower(config: Mapping[str, Any], label: str) -> tuple[Mapping[str, Any], bool]:
    text = config.get("text_config")
    if text is None:
        return config, False
    if not isinstance(text, Mapping):
        raise ModelError(f"{label}: text_config is {text!r}, but must be a JSON object")
    return text, True


def _refuse_experts(text: Mapping[str, Any], config: Mapping[str, Any], label: str) -> None:
    types = [str(part["model_type"]) for part in (text, config) if "model_type" in part]
    shown = types[0] if types else "unknown"
    if "kv_lora_rank" in text:
        raise ModelError(
            f"{label}: model_type '{shown}' uses multi-head latent attention (MLA, kv_lora_rank"
            f" {text['kv_lora_rank']}){' and mixture-of-experts layers' if _has_experts(text) else ''},"
            " which is not supported yet; choose a model with plain or grouped-query attention"
        )
    if _has_experts(text) or not _EXPERT_TYPES.isdisjoint(types):
        raise ModelError(
            f"{label}: model_type '{shown}' is a mixture-of-experts model, which is not supported yet;"
            " choose a dense model"
        )


def _has_experts(text: Mapping[str, Any]) -> bool:
    counts = (text.get(key) for key in _EXPERT_KEYS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def _family(model_type: str) -> str:
    """The dense text architecture behind the name that a multimodal file gives its text tower."""
    return {
        "qwen3_vl_text": "qwen3",
        "qwen2_vl": "qwen2",
        "qwen2_vl_text": "qwen2",
        "qwen2_5_vl": "qwen2",
        "qwen2_5_vl_text": "qwen2",
    }.get(model_type, model_type)
