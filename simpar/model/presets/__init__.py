"""Published models by name; the numbers lie beside this file, one YAML file a family, with their source."""

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

from simpar.errors import ModelError, nearest
from simpar.model.transformer import Transformer
from simpar.reading import read_yaml


def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    return tuple(sorted(_fields()))


def preset(name: str) -> Transformer:
    """The published model of this name, such as ``llama3.1-405b``; capitals do not matter.

    Raises:
        ModelError: no preset has this name; the message names the nearest one.

    >>> preset("llama3.1-70b").parameters
    70553706496
    """
    fields = _fields().get(name.lower())
    if fields is None:
        raise ModelError(
            f"there is no model preset '{name}'{nearest(name.lower(), preset_names())}; choose one of the"
            f" {len(preset_names())} that preset_names() lists, or give a Transformer or a Hugging Face"
            " config.json"
        )
    return Transformer.model_validate(fields)


@functools.cache  # package data never changes while a process runs
def _fields() -> Mapping[str, Mapping[str, Any]]:
    models: dict[str, Mapping[str, Any]] = {}
    for file in resources.files(__name__).iterdir():
        if not file.name.endswith(".yaml"):
            continue
        family = read_yaml(file.read_text(encoding="utf-8"))
        for name, fields in family["models"].items():
            if name in models:
                raise AssertionError(f"two presets are called '{name}'")
            models[name] = {"source": family["source"], **family["shared"], **fields, "name": name}
    return models
