"""simpar predicts how long a training step of a large model takes on a cluster, for every way to parallelise it."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simpar.convergence import time_to_target
    from simpar.errors import (
        ClusterError,
        DeadlockError,
        DoesNotFitError,
        JobError,
        ModelError,
        PlanError,
        SimparError,
    )
    from simpar.faults.description import Faults
    from simpar.hardware.cluster import Cluster
    from simpar.hardware.device import Device
    from simpar.job import Job
    from simpar.model.module import ModuleModel, mlp, trace_module
    from simpar.model.transformer import Transformer
    from simpar.plan.plan import Overlap, Plan
    from simpar.reliability.monte_carlo import monte_carlo
    from simpar.result import Result
    from simpar.search.run import search
    from simpar.search.sweep import sweep
    from simpar.simulation import simulate
    from simpar.trace.trace import Trace
    from simpar.whatif.comparison import compare
    from simpar.whatif.explanation import explain

__version__ = "0.1.0"

_HOMES = {
    "Cluster": "simpar.hardware.cluster",
    "ClusterError": "simpar.errors",
    "DeadlockError": "simpar.errors",
    "Device": "simpar.hardware.device",
    "DoesNotFitError": "simpar.errors",
    "Faults": "simpar.faults.description",
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
    "compare": "simpar.whatif.comparison",
    "explain": "simpar.whatif.explanation",
    "mlp": "simpar.model.module",
    "monte_carlo": "simpar.reliability.monte_carlo",
    "search": "simpar.search.run",
    "simulate": "simpar.simulation",
    "sweep": "simpar.search.sweep",
    "time_to_target": "simpar.convergence",
    "trace_module": "simpar.model.module",
}

__all__ = [
    "Cluster",
    "ClusterError",
    "DeadlockError",
    "Device",
    "DoesNotFitError",
    "Faults",
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
    "compare",
    "explain",
    "mlp",
    "monte_carlo",
    "search",
    "simulate",
    "sweep",
    "time_to_target",
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


class _Package(ModuleType):
    """Keeps a public function from being replaced by the room of the same name when that is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
