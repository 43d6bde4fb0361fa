"""Collectives on tori of chips, such as TPU slices: all axes of a group's box at once, slices joined by a network.

Over one closed axis of m chips an all-gather of S bytes takes (m-1)/m S/(2b), both ways round; over d closed axes at
once (n-1)/n S/(2 d b), with b the bandwidth of a link and direction; a line counts for half a ring. An all-to-all takes
S m/(8b) on the longest axis (count the messages that cross the middle). Sources: Austin et al., How to Scale Your Model
(2025), chapter 3; the bound for boxes of any shape is in :mod:`simpar.hardware.torus`.

Between slices XLA reduces hierarchically: inside the slice, then each chip's share over the data-centre network,
pipelined, so that the slower of the two counts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from simpar.hardware.blocks import within
from simpar.hardware.cluster import Cluster
from simpar.hardware.torus import busiest


class TorusCost(NamedTuple):
    """Latency and streaming time of a collective, and the bytes that each chip sends inside and outside its slice."""

    latency_s: float
    streaming_s: float
    slice_bytes: float
    nic_bytes: float


def torus_cost(
    op: str, nbytes: float, size: int, nodes: int, cluster: Cluster, *, ranks: Sequence[int] | None = None
) -> TorusCost:
    """Cost of one collective over ``size`` chips, equally many in each of ``nodes`` slices.

    Args:
        op: operation.
        nbytes: as :func:`simpar.cost.collective.collective_cost` counts them.
        size: number of chips.
        nodes: number of slices.
        cluster: where they are.
        ranks: the chips; left out, the first ones of each slice.
    """
    torus, link, fabric = cluster.node_link.torus(cluster.gpus_per_node), cluster.node_link, cluster.fabric
    assert torus is not None, "called for tori only"
    inside = size // nodes
    members: range | tuple[int, ...] = range(inside)
    if ranks is not None:
        local = cluster.gpus_per_node
        first = ranks[0] // local
        members = within(ranks, first, local)
        inside = len(members)
    passes = 2 if op == "all_reduce" else 1
    every_pair = op == "all_to_all"
    if every_pair:
        wire, nic = (inside - 1) / size * nbytes, (size - inside) / size * nbytes
    elif op in ("broadcast", "reduce", "shift"):
        wire, nic = (nbytes if inside > 1 else 0.0), nbytes / (1 if op == "shift" else inside)
    else:
        wire, nic = passes * (inside - 1) / inside * nbytes, passes * (nodes - 1) / nodes * nbytes / inside
    latency_s, streaming_s = link.base_latency_s, 0.0
    if inside > 1:
        box = torus.box(members)
        hops = torus.ring_crossings(members)[1] if box is None else box.steps
        hops = 1 if op == "shift" else hops
        latency_s += passes * hops * link.step_latency_s
        streaming_s = wire * busiest(torus, members, every_pair=every_pair) / link.bandwidth_bytes_per_s
        if op == "shift":  # to one neighbour by one link, however many the chip has
            streaming_s = nbytes / link.bandwidth_bytes_per_s
    if nodes == 1 or fabric is None:
        return TorusCost(latency_s, streaming_s, wire, 0.0)
    latency_s += passes * (nodes - 1 if not every_pair else 1) * max(fabric.ring_step_s, link.step_latency_s)
    return TorusCost(latency_s, max(streaming_s, nic / cluster.nic_bytes_per_s), wire, nic)
