"""The JSON Schema of job files, with which editors complete and check them."""

import re
from inspect import cleandoc
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from simpar.description import Description
from simpar.faults.description import Faults, Jitter, Loader
from simpar.hardware.cluster import (
    Cluster,
    Fabric,
    NodeLink,
    cluster_presets,
    fabric_names,
    host_names,
    node_link_names,
)
from simpar.hardware.device import ALIASES, Device, device_names
from simpar.hardware.host import Host
from simpar.model.presets import preset_names
from simpar.model.transformer import Transformer
from simpar.plan.plan import Overlap, Plan

_REF = "#/$defs/{model}"
_ATTRIBUTE = re.compile(r"^    (?P<name>\w+): (?P<text>.*(?:\n {8}.*)*)", re.M)
_ROLE = re.compile(r":\w+:`~?([^`]+)`")


def job_schema() -> dict[str, Any]:
    """The schema of a job file (JSON Schema 2020-12); descriptions are those of the classes' docstrings."""
    described: tuple[type[Description], ...] = (
        *(Plan, Overlap, Transformer, Cluster, NodeLink, Fabric, Host, Device),
        *(Faults, Jitter, Loader),
    )
    _, made = models_json_schema([(cls, "validation") for cls in described], ref_template=_REF)
    definitions: dict[str, Any] = made["$defs"]
    for cls in described:
        _describe(definitions[cls.__name__], cls)
    for name in ("Transformer", "Cluster", "NodeLink", "Fabric", "Host", "Device"):
        _make_changeable(definitions[name], named=name)
    parts = definitions["Cluster"]["properties"]
    for field, cls, names in (
        ("device", Device, (*device_names(), *ALIASES)),
        ("node_link", NodeLink, node_link_names()),
        ("fabric", Fabric, fabric_names()),
        ("host", Host, host_names()),
    ):
        parts[field] = _named_or(cls, names, parts[field].get("description", ""))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "simpar job",
        "description": "A training step to simulate: which model, on which cluster, by which plan.",
        "type": "object",
        "additionalProperties": False,
        "required": ["model", "cluster"],
        "properties": {
            "model": _named_or(
                Transformer,
                preset_names(),
                "A preset, the path of a Hugging Face config.json, mlp:784-500-10, or the fields of a transformer "
                "(with base: those of another model changed).",
            ),
            "cluster": _named_or(
                Cluster,
                (*cluster_presets(), "h100-sxm:64x8"),
                "device:nodesxGPUs[@fabric] such as h100-sxm:64x8, a preset, or the fields of a cluster "
                "(with base: those of another cluster changed).",
            ),
            "plan": {"$ref": _REF.format(model="Plan"), "description": "How the job is spread over the cluster."},
            "faults": {"$ref": _REF.format(model="Faults"), "description": "What is slow or random in the cluster."},
        },
        "$defs": definitions,
    }


def _named_or(cls: type[BaseModel], names: tuple[str, ...], description: str) -> dict[str, Any]:
    return {
        "description": description,
        "anyOf": [{"type": "string", "examples": list(names)}, {"$ref": _REF.format(model=cls.__name__)}],
    }


def _make_changeable(definition: dict[str, Any], *, named: str) -> None:
    """Admits ``base`` and, as the rest comes from there, leaves out what is required."""
    definition.pop("required", None)
    definition["properties"] = {
        "base": {
            "description": f"The {named} of which the other fields change something.",
            "type": ["string", "object"],
        },
        **definition["properties"],
    }


def _describe(definition: dict[str, Any], cls: type[Description]) -> None:
    """Moves the ``Attributes`` section of a docstring to the properties that it describes."""
    summary, _, attributes = cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")
    definition["description"] = _plain(summary.split("\n\n")[0])
    for found in _ATTRIBUTE.finditer(attributes):
        if found["name"] in definition["properties"]:
            definition["properties"][found["name"]]["description"] = _plain(found["text"])


def _plain(text: str) -> str:
    return " ".join(_ROLE.sub(r"\1", text).replace("``", "").split())
