"""Where ranks run: the GPU of each, from the order in which a plan's indices count and the cluster's own placement."""

from simpar.hardware.cluster import Cluster
from simpar.plan.layout import Layout


def places(layout: Layout, cluster: Cluster) -> tuple[int, ...] | None:
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
    plan, own = layout.plan, cluster.placement
    if plan.rank_order == "tp-dp-pp" or plan.pp == 1 or layout.dp == 1:
        return own
    inner = plan.tp * plan.cp
    ordered = tuple(
        index + inner * (stage + plan.pp * replica)
        for stage in range(plan.pp)
        for replica in range(layout.dp)
        for index in range(inner)
    )
    return ordered if own is None else tuple(own[gpu] for gpu in ordered)
