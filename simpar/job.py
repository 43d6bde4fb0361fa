"""A job: which model, on which cluster, by which plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, InstanceOf, model_validator

from simpar.description import Description
from simpar.errors import JobError, ModelError, SimparError, nearest
from simpar.faults.description import Faults
from simpar.hardware.cluster import Cluster
from simpar.model.cnn import cnn
from simpar.model.huggingface import from_config
from simpar.model.module import ModuleModel, mlp
from simpar.model.presets import preset, preset_names
from simpar.model.transformer import Transformer
from simpar.plan.plan import Plan


def read_model(value: Any) -> Transformer | ModuleModel:
    """What a job file or a caller may write for a model.

    A preset's name (``llama3-70b``), the path of a Hugging Face ``config.json`` (or of the folder that holds one),
    ``mlp:784-500-10``, ``cnn:resnet-50``, a mapping with the fields of a :class:`Transformer` (with ``base``, those of
    another model changed), a ``Transformer`` or a :class:`ModuleModel`.

    Raises:
        ModelError: it is none of these, or a field of the mapping is wrong.
    """
    if isinstance(value, Mapping):
        return _changed_model(value) if "base" in value else Transformer.model_validate(value)
    if isinstance(value, (str, Path)) and str(value):
        return _named_model(str(value))
    if isinstance(value, (Transformer, ModuleModel)):
        return value
    shown = "nothing" if value is None or value == "" else repr(value)[:40]
    raise ModelError(f"{shown} is not a model; {_MODEL_FORMS}, or the fields of a Transformer")


_MODEL_FORMS = (
    "give a preset (see 'simpar models'), the path of a Hugging Face config.json, or mlp:SIZES such as mlp:784-500-10"
)


def _named_model(text: str) -> Transformer | ModuleModel:
    # Presets come first: a folder that happens to bear a preset's name must not change what a job means.
    if text.lower() in preset_names():
        return preset(text)
    if text.startswith("mlp:"):
        return mlp(text.removeprefix("mlp:"))
    if text.startswith("cnn:"):
        return cnn(text.removeprefix("cnn:"))
    path = Path(text)
    if path.suffix == ".json" or path.is_dir():
        return from_config(path)
    raise ModelError(f"unknown model '{text}'{nearest(text, preset_names())}; {_MODEL_FORMS}")


def _changed_model(fields: Mapping[str, Any]) -> Transformer:
    base = read_model(fields["base"])
    if not isinstance(base, Transformer):
        raise ModelError(f"base '{base.name}' is not a transformer, so no field of it can be changed; name a preset")
    changes = {key: value for key, value in fields.items() if key != "base"}
    named = ", ".join(f"{key}={value}" for key, value in changes.items())
    return base.replace(**{"name": f"{base.name} with {named}" if changes else base.name, **changes})


def read_cluster(value: Any) -> Any:
    """What a job file or a caller may write for a cluster.

    A text such as ``h100-sxm:64x8`` or a preset's name, a mapping with the fields of a :class:`Cluster`, or a mapping
    with a cluster as ``base`` and what differs; there, a mapping for a part (``fabric: {oversubscription: 2}``) changes
    only the fields that it names. A device that changes so keeps its links.

    Raises:
        ClusterError: the base is not understood, or a field is wrong.
    """
    if not (isinstance(value, Mapping) and "base" in value):
        return value
    base = Cluster.model_validate(read_cluster(value["base"]))
    changes = {key: change for key, change in value.items() if key != "base"}
    kept: dict[str, Any] = {}
    for key, change in changes.items():
        part = getattr(base, key, None)
        if isinstance(part, Description) and isinstance(change, Mapping) and "base" not in change:
            changes[key] = _changed_part(part, change)
            if key == "device":
                kept = {"node_link": base.node_link, "fabric": base.fabric}
    return base.replace(**{**kept, **changes})


def _changed_part(part: Description | Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a part, changed where ``changes`` says, in its own parts too (``peak_flop_per_s: {bf16: …}``)."""
    fields = dict(part)
    for key, change in changes.items():
        inner = fields.get(key)
        if isinstance(inner, Description | Mapping) and isinstance(change, Mapping) and "base" not in change:
            fields[key] = _changed_part(inner, change)
        else:
            fields[key] = change
    return fields


class Job(Description):
    """A training step to simulate.

    Attributes:
        model: see :func:`read_model`.
        cluster: see :func:`read_cluster`.
        plan: how the job is spread; the default is plain data parallelism.
        faults: what is slow or random in the cluster; the default is nothing.
    """

    error_type: ClassVar[type[SimparError]] = JobError

    model: Annotated[Transformer | InstanceOf[ModuleModel], BeforeValidator(read_model)]
    cluster: Annotated[Cluster, BeforeValidator(read_cluster)]
    plan: Plan = Field(default_factory=Plan)
    faults: Faults = Field(default_factory=Faults)

    @model_validator(mode="after")
    def _check_faults(self) -> Self:
        beyond = self.faults.beyond(self.cluster.gpus)
        if beyond is not None:
            field, rank = beyond
            raise ValueError(f"faults.{field} names GPU {rank}, but the cluster has GPUs 0 to {self.cluster.gpus - 1}")
        return self
