"""All-reduce algorithms that NCCL lacks and other libraries have: latency, streaming time and bytes, no clock.

Their phases follow each other, so streaming times add up. Notation is that of :mod:`simpar.cost.collective`: n ranks on
k nodes, g = n/k a node, S bytes; B bandwidth of a GPU's node link, b of its share of the NICs.

* ``halving_doubling``: recursive halving (a reduce-scatter) and recursive doubling (an all-gather), Thakur,
  Rabenseifner and Gropp 2005, section 4.4: 2 log2(n) steps, and 2(n-1)/n S from each rank, the optimum, in fewer steps
  than a ring. Neighbours are exchanged with first, so that the large first halves stay in the node. Where a number is
  no power of two, those beyond it hand their buffers to a partner before and get the result after (there, too).
* ``hierarchical``: reduce-scatter in every node, all-reduce of each shard between nodes, all-gather in every node, all
  by rings (Horovod's ``NCCLHierarchicalAllreduce``; Cho et al. 2019, BlueConnect).
"""

from math import log2
from typing import NamedTuple

from simpar.hardware.cluster import Cluster


class Phases(NamedTuple):
    """What an algorithm costs when nothing else uses its links.

    Attributes:
        latency_s: of its steps.
        streaming_s: of its bytes.
        node_link_bytes: bytes that each member sends, and receives, on its node link.
        nic_bytes: the same on its share of the NICs.
    """

    latency_s: float
    streaming_s: float
    node_link_bytes: float
    nic_bytes: float


def halving_doubling(nbytes: float, n: int, k: int, cluster: Cluster) -> Phases:
    """L = a + 2 log2(g) i + 2 log2(k) er, X = 2(g-1)/g S/B + 2(k-1)/k (S/g)/b, for powers of two.

    For other g (and likewise k) the nearest power of two below takes its place, with 2 steps and 2S (2S/g) more.
    """
    g = n / k
    inside = _powers(g)
    between = _powers(k)
    node_bytes = nbytes * inside.volume
    nic_bytes = nbytes / inside.ranks * between.volume
    link, fabric = cluster.node_link.over(g), cluster.fabric
    latency_s = link.base_latency_s + inside.steps * link.step_latency_s
    streaming_s = node_bytes / link.group_bytes_per_s(g) if node_bytes else 0.0
    if fabric is not None and k > 1:
        latency_s += between.steps * max(fabric.ring_step_s, link.step_latency_s)
        streaming_s += nic_bytes / cluster.nic_bytes_per_s
    return Phases(latency_s, streaming_s, node_bytes, nic_bytes)


def hierarchical(nbytes: float, n: int, k: int, cluster: Cluster) -> Phases:
    """L = a + 2(g-1) i + 2(k-1) er, X = 2(g-1)/g S/B + 2(k-1)/k (S/g)/b."""
    g = n / k
    node_bytes = 2 * (g - 1) / g * nbytes
    nic_bytes = 2 * (k - 1) / k * nbytes / g
    link, fabric = cluster.node_link.over(g), cluster.fabric
    latency_s = link.base_latency_s + 2 * (g - 1) * link.step_latency_s
    streaming_s = node_bytes / link.group_bytes_per_s(g) if node_bytes else 0.0
    if fabric is not None and k > 1:
        latency_s += 2 * (k - 1) * max(fabric.ring_step_s, link.step_latency_s)
        streaming_s += nic_bytes / cluster.nic_bytes_per_s
    return Phases(latency_s, streaming_s, node_bytes, nic_bytes)


class _Powers(NamedTuple):
    """Halving and doubling over some ranks: those that take part, steps, and volume in buffers."""

    ranks: int
    steps: int
    volume: float


def _powers(count: float) -> _Powers:
    exponent = int(log2(count))
    ranks = 2**exponent
    beyond = count != ranks
    return _Powers(ranks, 2 * exponent + 2 * beyond, 2 * (ranks - 1) / ranks + 2 * beyond)
