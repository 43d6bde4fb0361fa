"""Measurements as values: what was run, how long it took, where that comes from.

Every way to get measurements (microbenchmarks on the local devices, silicon tables, logs of nccl-tests, profiler
traces) ends in these, and :mod:`calibrate.fit` starts from them.
"""

from dataclasses import dataclass, field
from typing import Any

from simpar.model.work import Kernel


@dataclass(frozen=True, slots=True)
class KernelSample:
    """One kernel, timed.

    Attributes:
        kernel: shape and dtype.
        time_s: seconds of one execution on the device, without the host's launch.
        source: table, log or run that it comes from.
        stack: software that ran it (``vllm/0.24.0``, ``torch/2.13.0``), or an empty string.
    """

    kernel: Kernel
    time_s: float
    source: str
    stack: str = ""


@dataclass(frozen=True, slots=True)
class CollectiveSample:
    """One collective or message, timed.

    Attributes:
        op: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``reduce``, ``sendrecv``.
        nbytes: as nccl-tests counts them (see :class:`simpar.program.ir.Collective`).
        ranks: members of the group.
        nodes: nodes over which they are spread evenly.
        time_s: seconds.
        source: table, log or run that it comes from.
        stack: ``nccl/2.27.3``, ``gloo/torch 2.13.0``, ...
    """

    op: str
    nbytes: float
    ranks: int
    nodes: int
    time_s: float
    source: str
    stack: str = ""


@dataclass(frozen=True, slots=True)
class InterferenceSample:
    """Compute and collectives of one device at once: the speed of each over its speed alone, at most 1.

    Attributes:
        compute_rate: of compute during collectives.
        collective_rate: of collectives during compute.
        source: run that it comes from.
    """

    compute_rate: float
    collective_rate: float
    source: str


@dataclass(frozen=True, slots=True)
class UpdateSample:
    """One fused step of an optimizer, timed.

    Attributes:
        optimizer: ``adamw``.
        parameters: of one fp32 tensor, with its gradient and the optimizer's moments.
        time_s: seconds.
        source: run that it comes from.
    """

    optimizer: str
    parameters: int
    time_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that is known of one machine.

    Attributes:
        kernels: timed kernels.
        collectives: timed collectives.
        launch_s: host seconds per kernel launch, one value per repetition.
        interference: compute beside collectives, one a repetition.
        updates: optimizer steps.
        datasheet: what the device that was measured has instead of the rates of the catalog's ``name``: fields of
            :class:`simpar.hardware.device.Device`; empty if it is the catalog's.
        kernel_spread: how much kernels of one moment were slower or faster than those of others, as the standard
            deviation of the logarithm of what they share (:func:`calibrate.rounds.spread`); 0 if it is not known.
        collective_spread: the same of collectives.
        provenance: free facts: host, device, versions, date.
    """

    kernels: tuple[KernelSample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()
    launch_s: tuple[float, ...] = ()
    interference: tuple[InterferenceSample, ...] = ()
    updates: tuple[UpdateSample, ...] = ()
    datasheet: dict[str, Any] = field(default_factory=dict)
    kernel_spread: float = 0.0
    collective_spread: float = 0.0
    provenance: dict[str, str] = field(default_factory=dict)
