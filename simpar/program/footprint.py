"""Peak memory of a program, without a clock.

Memory is taken and given back in the order of the compute stream, so its course needs no times: the peak is a property
of the program.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from simpar.hardware.cluster import Cluster
from simpar.hardware.device import Device
from simpar.hardware.host_ways import host_of
from simpar.plan.layout import Layout
from simpar.plan.placement import places
from simpar.program.ir import Alloc, Program, RankProgram, Run


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of one rank when it is fullest.

    Attributes:
        stage: pipeline rank.
        rank: global rank.
        peak_bytes: everything held at the peak.
        by_category: what it is held for, at that moment.
    """

    stage: int
    rank: int
    peak_bytes: int
    by_category: dict[str, int]


def footprints(program: Program) -> tuple[Footprint, ...]:
    """The footprint of every simulated rank of the job, in program order; parameter servers have their own memory."""
    return tuple(_footprint(rank) for rank in program.ranks if rank.replicas)


def devices(memory: Iterable[Footprint], layout: Layout, cluster: Cluster) -> tuple[Device, ...]:
    """The device that the rank of each footprint runs on."""
    gpus = places(layout, cluster)
    on = (f.rank if gpus is None else gpus[f.rank] for f in memory)
    return tuple(cluster.devices[cluster.kind_of(gpu)] for gpu in on)


def fullest(memory: Sequence[Footprint], layout: Layout, cluster: Cluster) -> tuple[Footprint, Device]:
    """The rank that needs the largest share of its device's memory, and that device."""
    found = zip(memory, devices(memory, layout, cluster), strict=True)
    return max(found, key=lambda pair: pair[0].peak_bytes / pair[1].memory_bytes)


def host_bytes(program: Program, layout: Layout, cluster: Cluster) -> int:
    """Memory of the fullest host that is held for its ranks; what else hosts keep is not known."""
    of_stage = [0] * layout.plan.pp
    for rank in program.ranks:
        of_stage[rank.stage] = max(of_stage[rank.stage], rank.host_bytes)
    if not any(of_stage):
        return 0
    at = places(layout, cluster) or cluster.placement
    gpus = np.arange(layout.plan.tp * layout.replicas * layout.plan.pp) if at is None else np.array(at)
    hosts = host_of(cluster, gpus).reshape(layout.plan.pp, -1)
    # ranks of each stage, by host
    counts: list[list[int]] = [np.bincount(of, minlength=int(hosts.max()) + 1).tolist() for of in hosts]
    by_host = zip(*counts, strict=True)
    return int(max(sum(n * held for n, held in zip(ranks, of_stage, strict=True)) for ranks in by_host))


def _footprint(rank: RankProgram) -> Footprint:
    held = dict(rank.resident)
    peak, at_peak = sum(held.values()), dict(held)
    total = peak
    for instruction in rank.instructions:
        if isinstance(instruction, Alloc):
            held[instruction.category] = held.get(instruction.category, 0) + instruction.nbytes
            total += instruction.nbytes
            transient = 0
        elif isinstance(instruction, Run):
            transient = instruction.transient_bytes
        else:
            continue
        if total + transient > peak:
            peak, at_peak = total + transient, dict(held)
            at_peak["activations"] = at_peak.get("activations", 0) + transient
    return Footprint(rank.stage, rank.rank, peak, at_peak)
