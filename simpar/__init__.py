"""simpar predicts how long a training step of a large model takes on a cluster, for every way to parallelise it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simpar.errors import (
        ClusterError,
        DeadlockError,
        DoesNotFitError,
        JobError,
        ModelError,
        PlanError,
        SimparError,
    )
    from simpar.hardware.cluster import Cluster
    from simpar.hardware.device import Device
    from simpar.job import Job
    from simpar.model.module import ModuleModel, mlp, trace_module
    from simpar.model.transformer import Transformer
    from simpar.plan.plan import Overlap, Plan
    from simpar.result import Result
    from simpar.simulation import simulate
    from simpar.trace.trace import Trace

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "simpar.hardware.cluster",
    "ClusterError": "simpar.errors",
    "DeadlockError": "simpar.errors",
    "Device": "simpar.hardware.device",
    "DoesNotFitError": "simpar.errors",
    "Job": "simpar.job",
    "JobError": "simpar.errors",
    "ModelError": "simpar.errors",
    "ModuleModel": "simpar.model.module",
    "Overlap": "simpar.plan.plan",
    "Plan": "simpar.plan.plan",
    "PlanError": "simpar.errors",
    "Result": "simpar.result",
    "SimparError": "simpar.errors",
    "Trace": "simpar.trace.trace",
    "Transformer": "simpar.model.transformer",
    "mlp": "simpar.model.module",
    "simulate": "simpar.simulation",
    "trace_module": "simpar.model.module",
}

__all__ = [
    "Cluster",
    "ClusterError",
    "DeadlockError",
    "Device",
    "DoesNotFitError",
    "Job",
    "JobError",
    "ModelError",
    "ModuleModel",
    "Overlap",
    "Plan",
    "PlanError",
    "Result",
    "SimparError",
    "Trace",
    "Transformer",
    "mlp",
    "simulate",
    "trace_module",
]


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that ``import simpar`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'simpar' has no attribute '{name}'")
    from importlib import import_module  # noqa: PLC0415

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
