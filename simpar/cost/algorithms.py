"""What each algorithm of a collective takes: latency of its critical path, bytes on its busiest link.

Notation and sources as in :mod:`simpar.cost.collective`.
"""

from math import log2
from typing import NamedTuple

from simpar.hardware.cluster import Cluster

# A tree between nodes runs below the ring's node bandwidth, since each GPU of the chain forwards both ways.
_TREE_ACROSS_NODES = 0.9


class CollectiveCost(NamedTuple):
    """What one collective or message costs when nothing else uses its links.

    Attributes:
        algorithm: the one that runs.
        latency_s: time during which no link is held.
        total_s: latency and streaming together; ``total_s - latency_s`` is the least time its bytes need.
        node_link_bytes: bytes that each member sends, and receives, on its node link.
        nic_bytes: the same on its share of the NICs.
    """

    algorithm: str
    latency_s: float
    total_s: float
    node_link_bytes: float
    nic_bytes: float


def blend(latency_s: float, streaming_s: float, smoothness: float) -> float:
    """Latency and streaming as pipelining blends them: the ``smoothness``-norm of both."""
    if smoothness == 1.0 or latency_s == 0.0:
        return latency_s + streaming_s
    # Scaled by the latency: tiny times to small powers lose digits otherwise, and with them monotonicity.
    return latency_s * float((1.0 + (streaming_s / latency_s) ** smoothness) ** (1.0 / smoothness))


def ring(nbytes: float, n: int, k: int, cluster: Cluster, passes: int) -> CollectiveCost:
    """A ring over all ranks: reduce-scatter and all-gather take one pass of n-1 steps, an all-reduce two."""
    g = n / k
    link = cluster.node_link.over(g)
    wire = passes * (n - 1) / n * nbytes
    streaming_s = (wire + link.copy_fraction * nbytes / n) / link.group_bytes_per_s(g) if g > 1 else 0.0
    fabric = cluster.fabric
    if k == 1 or fabric is None:
        latency_s = link.base_latency_s + passes * (n - 1) * link.step_latency_s
        return CollectiveCost("ring", latency_s, blend(latency_s, streaming_s, link.smoothness), wire, 0.0)
    # A step is no faster for the ring's leaving the node; a fabric fitted on other nodes might say so.
    inside_s = max(fabric.ring_intra_step_s, link.step_latency_s)
    between_s = max(fabric.ring_step_s, link.step_latency_s)
    steps_s = k * (g - 1) * inside_s + (k - 1) * between_s
    latency_s = link.base_latency_s + passes * steps_s
    streaming_s = max(streaming_s, wire / g / cluster.nic_bytes_per_s)
    total_s = blend(latency_s, streaming_s, fabric.smoothness)
    return CollectiveCost("ring", latency_s, total_s, wire if g > 1 else 0.0, wire / g)


def tree(nbytes: float, n: int, k: int, cluster: Cluster) -> CollectiveCost:
    """Two complementary binary trees over nodes, a chain in each node: up to reduce, down to broadcast."""
    g = n / k
    link = cluster.node_link.over(g)
    wire = 2 * nbytes if g > 1 else 0.0
    latency_s = link.base_latency_s + 2 * (g - 1) * link.step_latency_s
    fabric = cluster.fabric
    if k == 1 or fabric is None:
        streaming_s = wire / (link.tree_ratio * link.group_bytes_per_s(g))
        return CollectiveCost("tree", latency_s, blend(latency_s, streaming_s, link.smoothness), wire, 0.0)
    latency_s += 2 * log2(k) * fabric.tree_level_s
    nic = _tree_share(k) * nbytes / g
    streaming_s = max(wire / (_TREE_ACROSS_NODES * link.group_bytes_per_s(g)), nic / cluster.nic_bytes_per_s)
    return CollectiveCost("tree", latency_s, blend(latency_s, streaming_s, fabric.tree_smoothness), wire, nic)


def nvls(nbytes: float, n: int, k: int, cluster: Cluster) -> CollectiveCost:
    """The node's switch reduces: a GPU sends its buffer and a share of the results, and receives as much."""
    g = n / k
    link = cluster.node_link
    wire = (g + 1) / g * nbytes
    streaming_s = wire / (link.nvls_ratio * link.bandwidth_bytes_per_s)
    fabric = cluster.fabric
    if k == 1 or fabric is None:
        total_s = blend(link.nvls_latency_s, streaming_s, link.smoothness)
        return CollectiveCost("nvls", link.nvls_latency_s, total_s, wire, 0.0)
    latency_s = link.nvls_latency_s + 2 * log2(k) * fabric.tree_level_s
    nic = _tree_share(k) * nbytes / g
    total_s = blend(latency_s, max(streaming_s, nic / cluster.nic_bytes_per_s), fabric.tree_smoothness)
    return CollectiveCost("nvls_tree", latency_s, total_s, wire, nic)


def sharp(nbytes: float, n: int, k: int, cluster: Cluster) -> CollectiveCost:
    """The network's switches reduce: each byte leaves a node once and comes back reduced."""
    g = n / k
    link, fabric = cluster.node_link.over(g), cluster.fabric
    assert fabric is not None, "several nodes have a fabric"
    if link.nvls and g > 4:
        wire, latency_s = (g + 1) / g * nbytes, link.nvls_latency_s
        inside_s = wire / (link.nvls_ratio * link.bandwidth_bytes_per_s)
    else:
        wire, latency_s = 2 * (g - 1) / g * nbytes, link.base_latency_s + 2 * (g - 1) * link.step_latency_s
        inside_s = wire / link.group_bytes_per_s(g) if g > 1 else 0.0
    latency_s += 2 * fabric.tree_level_s
    streaming_s = max(inside_s, nbytes / g / cluster.nic_bytes_per_s) / fabric.sharp_ratio
    total_s = blend(latency_s, streaming_s, fabric.tree_smoothness)
    return CollectiveCost("sharp", latency_s, total_s, wire, nbytes / g)


def _tree_share(k: int) -> float:
    """How many times the buffer leaves a node of two complementary trees that carry half of it each."""
    return {2: 1.0, 3: 4 / 3}.get(k, 2.0)


def all_to_all(nbytes: float, n: int, k: int, cluster: Cluster) -> CollectiveCost:
    """Every rank sends a block to every other one; on several nodes those to other nodes share the NICs."""
    g = n / k
    link = cluster.node_link.over(g)
    wire = (g - 1) / n * nbytes
    copied = link.copy_fraction * nbytes / n if link.kind == "host" else 0.0
    latency_s = link.p2p_latency_s + link.peer_latency_s * (n - 1)
    streaming_s = (wire + copied) / link.group_bytes_per_s(g) if g > 1 else 0.0
    fabric = cluster.fabric
    if k == 1 or fabric is None:
        return CollectiveCost("pairwise", latency_s, blend(latency_s, streaming_s, link.smoothness), wire, 0.0)
    nic = (n - g) / n * nbytes
    latency_s += fabric.p2p_latency_s
    total_s = blend(latency_s, max(streaming_s, nic / cluster.nic_bytes_per_s), fabric.smoothness)
    return CollectiveCost("pairwise", latency_s, total_s, wire, nic)


def shift(nbytes: float, n: int, k: int, cluster: Cluster) -> CollectiveCost:
    """Every rank sends its buffer to its neighbour in a ring; the last of a node sends to the next node."""
    link, fabric = cluster.node_link.over(n / k), cluster.fabric
    wire = nbytes if n > k else 0.0
    latency_s, streaming_s = link.p2p_latency_s, wire / link.bandwidth_bytes_per_s
    if k == 1 or fabric is None:
        return CollectiveCost("shift", latency_s, blend(latency_s, streaming_s, link.smoothness), wire, 0.0)
    latency_s += fabric.p2p_latency_s
    total_s = blend(latency_s, max(streaming_s, nbytes / cluster.nic_bytes_per_s), fabric.smoothness)
    return CollectiveCost("shift", latency_s, total_s, wire, nbytes)


def broadcast(nbytes: float, n: int, k: int, cluster: Cluster) -> CollectiveCost:
    """A pipelined chain over all ranks; a reduce runs it backwards."""
    g = n / k
    link = cluster.node_link.over(g)
    wire = nbytes if g > 1 else 0.0
    latency_s = link.base_latency_s + (n - k) * link.step_latency_s
    streaming_s = wire / link.group_bytes_per_s(g) if g > 1 else 0.0
    fabric = cluster.fabric
    if k == 1 or fabric is None:
        return CollectiveCost("ring", latency_s, blend(latency_s, streaming_s, link.smoothness), wire, 0.0)
    latency_s += (k - 1) * max(fabric.ring_step_s, link.step_latency_s)
    total_s = blend(latency_s, max(streaming_s, nbytes / g / cluster.nic_bytes_per_s), fabric.smoothness)
    return CollectiveCost("ring", latency_s, total_s, wire, nbytes / g)
