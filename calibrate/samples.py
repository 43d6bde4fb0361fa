"""Measurements as values: what was run, how long it took, where that comes from.

Every way to get measurements (microbenchmarks on the local devices, silicon tables, logs of nccl-tests, profiler
traces) ends in these, and :mod:`calibrate.fit` starts from them.
"""

from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that is known of one machine.

    Attributes:
        kernels: timed kernels.
        collectives: timed collectives.
        launch_s: host seconds per kernel launch, one value per repetition.
        provenance: free facts: host, device, versions, date.
    """

    kernels: tuple[KernelSample, ...] = ()
    collectives: tuple[CollectiveSample, ...] = ()
    launch_s: tuple[float, ...] = ()
    provenance: dict[str, str] = field(default_factory=dict)
