"""Folding: whether replicas behave exactly alike, so that one of them can stand for all.

Data-parallel replicas run the same program on the same devices. They differ only if their messages take different
ways: within a node or between nodes, below one leaf switch or across. Where stages and sharding groups are aligned with
nodes and leaves, a shift along the ranks maps each replica onto the next and nothing can tell them apart. On a custom
graph any two ranks may be connected differently.
"""

from simpar.hardware.cluster import Cluster
from simpar.plan.layout import Layout


def replicas_are_alike(layout: Layout, cluster: Cluster) -> bool:
    """Whether one replica (and one rank of each tensor-parallel group) can stand for all."""
    if cluster.graph is not None:
        return False
    tp = layout.plan.tp
    blocks = [cluster.gpus_per_node]
    link = cluster.node_link
    while link.beyond is not None and link.reach is not None:
        blocks.append(link.reach)
        link = link.beyond
    pod_nodes = None if cluster.fabric is None else cluster.fabric.pod_nodes
    if pod_nodes is not None and pod_nodes < cluster.nodes:
        if cluster.nodes % pod_nodes:
            return False  # the last leaf has fewer nodes, and so less to carry
        blocks.append(pod_nodes * cluster.gpus_per_node)
    pieces = [tp * layout.shard] if layout.plan.pp == 1 else [tp * layout.shard, tp * layout.dp]
    return all(_aligned(piece, block) for piece in pieces for block in blocks)


def _aligned(piece: int, block: int) -> bool:
    """Whether pieces laid end to end never straddle a block's edge in different ways."""
    return piece % block == 0 or block % piece == 0
