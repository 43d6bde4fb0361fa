"""A job: which model, on which cluster, by which plan."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, InstanceOf

from simpar.description import Description
from simpar.errors import ModelError, nearest
from simpar.hardware.cluster import Cluster
from simpar.model.huggingface import from_config
from simpar.model.module import ModuleModel, mlp
from simpar.model.transformer import Transformer
from simpar.model.presets import preset, preset_names
from simpar.plan.plan import Plan


def read_model(value: Any) -> Any:
    """What a job file or a caller may write for a model.

    A preset's name (``llama3-70b``), the path of a Hugging Face ``config.json`` (or of the folder that holds one),
    ``mlp:784-500-10``, a mapping with the fields of a :class:`Transformer` (with ``base``, those of a preset changed),
    a ``Transformer`` or a :class:`ModuleModel`.

    Raises:
        ModelError: it is none of these.
    """
    if isinstance(value, dict) and "base" in value:
        changes = {key: field for key, field in value.items() if key != "base"}
        base = read_model(value["base"])
        if not isinstance(base, Transformer):
            raise ModelError(
                f"base '{value['base']}' is not a transformer, so no field of it can be changed; name a preset"
            )
        return base.replace(**changes)
    if not isinstance(value, (str, Path)):
        return value
    text = str(value)
    if text.startswith("mlp:"):
        return mlp(text.removeprefix("mlp:"))
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        return from_config(path / "config.json" if path.is_dir() else path)
    if text not in preset_names():
        raise ModelError(
            f"unknown model '{text}'{nearest(text, preset_names())}; give a preset (see 'simpar models'), "
            "the path of a Hugging Face config.json, or mlp:SIZES such as mlp:784-500-10"
        )
    return preset(text)


def _read_cluster(value: Any) -> Any:
    return Cluster.parse(value) if isinstance(value, str) else value


class Job(Description):
    """A training step to simulate.

    Attributes:
        model: see :func:`read_model`.
        cluster: a :class:`Cluster`, or its text form such as ``h100-sxm:64x8``.
        plan: how the job is spread; the default is plain data parallelism.
    """

    model: Annotated[Transformer | InstanceOf[ModuleModel], BeforeValidator(read_model)]
    cluster: Annotated[Cluster, BeforeValidator(_read_cluster)]
    plan: Plan = Field(default_factory=Plan)
