"""The profiles in the catalog, from which measured devices and node links take their fitted values.

``simpar calibrate fit`` made each one; its ``provenance.command`` says how, and with ``--out`` makes it anew. The
result does not depend on the values that stood there before. Entries of the catalog name a profile as ``fit`` and
state what they know better: datasheet rates, and what the measurements do not tell.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def shipped_profile_names() -> tuple[str, ...]:
    """Names of the catalog's profiles, sorted."""
    folder = files("simpar.hardware") / "catalog" / "profiles"
    return tuple(sorted(f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")))


@cache  # package data never changes while a process runs
def shipped_profile(name: str) -> dict[str, Any]:
    """The fields of the catalog's profile of that name, head sizes as numbers; callers do not change them."""
    text = (files("simpar.hardware") / "catalog" / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text, object_pairs_hook=_numbered)
    return data


def _numbered(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    # JSON knows only texts as keys; YAML files, which are merged over this, write head sizes as numbers.
    return {int(key) if key.isdigit() else key: value for key, value in pairs}
