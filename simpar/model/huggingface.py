"""Reads a Hugging Face ``config.json`` into a :class:`~simpar.model.transformer.Transformer`.

One small function an architecture says what the file leaves to the library's own code: defaults, biases,
norms, windows, experts. Architectures that a transformer cannot describe are refused rather than approximated in
silence.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simpar.errors import ModelError, nearest
from simpar.model.architectures import DENSE, Architecture
from simpar.model.config_reader import ConfigReader, Fields
from simpar.model.sparse_architectures import REFUSED, SPARSE, check_dense
from simpar.model.transformer import Transformer
from simpar.reading import read_json
from simpar.units import MB

ARCHITECTURES: Mapping[str, Architecture] = {**DENSE, **SPARSE}
"""Every architecture that can be imported, by ``model_type``."""

_LARGEST_FILE = 10 * MB  # a configuration has some kilobytes


def from_config(path_or_dict: str | Path | Mapping[str, Any], name: str | None = None) -> Transformer:
    """The transformer that a Hugging Face configuration describes.

    A multimodal file (one with a ``text_config``) yields its text tower, and ``note`` says so.

    Args:
        path_or_dict: a ``config.json``, the directory that holds it, or its parsed content.
        name: what to call the model; taken from the file's path, or from the configuration, if not given.

    Raises:
        ModelError: the file is missing or no JSON, a field is missing or of the wrong kind, or the
            architecture is unknown or has layers that a transformer cannot describe (state spaces).
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
    model_type = _known(text.get("model_type", config.get("model_type")), label)
    family = _family(model_type)
    read, tied = ARCHITECTURES[family]
    reader = ConfigReader(text, label + (": text_config" if tower else ""))
    if family in DENSE:
        check_dense(reader, model_type, SPARSE)
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


def _text_tower(config: Mapping[str, Any], label: str) -> tuple[Mapping[str, Any], bool]:
    text = config.get("text_config")
    if text is None:
        return config, False
    if not isinstance(text, Mapping):
        raise ModelError(f"{label}: text_config is {text!r}, but must be a JSON object")
    return text, True


def _known(model_type: Any, label: str) -> str:
    """The architecture's name, if it can be imported."""
    if isinstance(model_type, str) and model_type in REFUSED:
        raise ModelError(
            f"{label}: model_type '{model_type}' {REFUSED[model_type]}; choose a model of attention layers and MLPs"
        )
    if not isinstance(model_type, str) or _family(model_type) not in ARCHITECTURES:
        raise ModelError(
            f"{label}: model_type {model_type!r} is not an architecture that can be imported"
            f"{nearest(str(model_type), sorted(ARCHITECTURES))}; describe it as a Transformer yourself,"
            f" or use one of: {', '.join(sorted(ARCHITECTURES))}"
        )
    return model_type


def _family(model_type: str) -> str:
    """The text architecture behind other names of it, such as a multimodal file gives its text tower."""
    return {
        "llama4": "llama4_text",
        "qwen3_5": "qwen3_5_text",
        "qwen3_5_moe": "qwen3_5_moe_text",
        "qwen3_vl_moe_text": "qwen3_moe",
        "qwen3_vl_text": "qwen3",
        "qwen2_vl": "qwen2",
        "qwen2_vl_text": "qwen2",
        "qwen2_5_vl": "qwen2",
        "qwen2_5_vl_text": "qwen2",
    }.get(model_type, model_type)
