"""Folding: which replicas behave exactly alike, so that one of them can stand for all.

Data-parallel replicas run the same program on the same devices. They differ only if their messages take different
ways: under oversubscribed leaf switches, a replica whose stages share a leaf is faster than one whose stages do not.
On a custom graph every rank may differ, so nothing is folded.
"""

from simpar.hardware.cluster import Cluster
from simpar.plan.layout import Layout


def replica_classes(layout: Layout, cluster: Cluster) -> list[tuple[int, ...]]:
    """Replicas in classes of equals, each led by its first."""
    if cluster.graph is not None:
        return [(replica,) for replica in range(layout.dp)]
    pod_nodes = None if cluster.fabric is None else cluster.fabric.pod_nodes
    if pod_nodes is None or layout.plan.pp == 1:
        return [tuple(range(layout.dp))]
    pod_ranks = pod_nodes * cluster.gpus_per_node
    classes: dict[tuple[bool, ...], list[int]] = {}
    for replica in range(layout.dp):
        pods = [layout.rank(stage, replica) // pod_ranks for stage in range(layout.plan.pp)]
        crossing = tuple(here != there for here, there in zip(pods, [*pods[1:], pods[0]], strict=True))
        classes.setdefault(crossing, []).append(replica)
    return [tuple(members) for members in classes.values()]
