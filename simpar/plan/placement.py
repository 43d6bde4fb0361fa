"""Where ranks run: the GPU of each, from the order in which a plan's indices count and the cluster's own placement.

And the devices of the pipeline's ranks, where a cluster has several kinds.
"""

from typing import TYPE_CHECKING

from simpar.hardware.cluster import Cluster
from simpar.hardware.device import Device
from simpar.plan.plan import Plan, Precision

if TYPE_CHECKING:
    from simpar.plan.layout import Layout


def places(layout: "Layout", cluster: Cluster) -> tuple[int, ...] | None:
    """The GPU of every rank; None where rank i runs on GPU i.

    Ranks count tensor- and context-parallel indices first, then data-parallel ones, then stages. With ``rank_order``
    ``tp-pp-dp`` (Megatron's ``--use-tp-pp-dp-mapping``) the GPUs are numbered with stages before data-parallel indices.
    A placement of the cluster's own acts on top.

    >>> from simpar.plan.layout import lay_out
    >>> from simpar.plan.plan import Plan
    >>> from simpar.model.presets import preset
    >>> cluster = Cluster.parse("h100-sxm:8")
    >>> places(lay_out(Plan(tp=2, pp=2, rank_order="tp-pp-dp"), preset("gpt2"), cluster), cluster)
    (0, 1, 4, 5, 2, 3, 6, 7)
    """
    return _places(layout.plan, layout.dp, cluster)


def stage_devices(plan: Plan, dp: int, precision: Precision, cluster: Cluster) -> tuple[Device, ...]:
    """The device that sets the pace of each pipeline rank: the slowest at products of those that its replicas run on.

    Empty where all are alike.

    >>> mixed = Cluster(nodes=[{"device": "h100-sxm", "count": 1}, {"device": "a100-sxm", "count": 1}])
    >>> [device.name for device in stage_devices(Plan(tp=8, pp=2), 1, "bf16", mixed)]
    ['h100-sxm', 'a100-sxm-80gb']
    """
    if not cluster.groups:
        return ()

    def flop_per_s(kind: int) -> float:
        device = cluster.devices[kind]
        return device.peak(precision) * device.gemm_fit(precision).peak_efficiency / device.sustained_slowdown

    gpus, each = _places(plan, dp, cluster), plan.tp * plan.cp * dp
    found = []
    for stage in range(plan.pp):
        ranks = range(stage * each, (stage + 1) * each)
        found.append(min({cluster.kind_of(r if gpus is None else gpus[r]) for r in ranks}, key=flop_per_s))
    return tuple(cluster.devices[kind] for kind in found) if len(set(found)) > 1 else ()


def _places(plan: Plan, dp: int, cluster: Cluster) -> tuple[int, ...] | None:
    own = cluster.placement
    if plan.rank_order == "tp-dp-pp" or plan.pp == 1 or dp == 1:
        return own
    inner = plan.tp * plan.cp
    ordered = tuple(
        index + inner * (stage + plan.pp * replica)
        for stage in range(plan.pp)
        for replica in range(dp)
        for index in range(inner)
    )
    return ordered if own is None else tuple(own[gpu] for gpu in ordered)
