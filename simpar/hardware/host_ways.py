"""Ways of messages that begin or end at the host of a node."""

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from simpar.errors import ClusterError
from simpar.hardware.cluster import Cluster
from simpar.hardware.fabric import Network
from simpar.hardware.uplinks import Link, Ways


class HostWay(NamedTuple):
    """The way of a message that begins or ends at a host.

    Attributes:
        latency_s: time of an empty message.
        bytes_per_s: what one message alone can reach.
        ways: link directions, with the share of the bytes on each.
    """

    latency_s: float
    bytes_per_s: float
    ways: Ways


def host_way(network: Network, src: int, dst: int) -> HostWay:
    """The way between two places of which at least one is a host: place ``gpus + n`` is the host of node n.

    A GPU reaches the host of its own node by their link (``pcie``), which the GPUs of a switch share. Between nodes the
    sender's NIC (a host's: all NICs of its node, in equal shares) and the receiver's are used.
    """
    cluster = network.cluster
    gpus, local = cluster.gpus, cluster.gpus_per_node
    nodes = [place - gpus if place >= gpus else place // local for place in (src, dst)]
    if nodes[0] == nodes[1]:
        host = cluster.host
        if min(src, dst) >= gpus:
            return HostWay(0.0, float("inf"), ())
        gpu, way = (src, ">") if dst >= gpus else (dst, "<")
        link = host_link(cluster, gpu, way)
        return HostWay(host.latency_s, host.link_bytes_per_s, ((link, 1.0),))
    fabric = cluster.fabric
    assert fabric is not None, "several nodes have a fabric"
    ways: list[tuple[Link, float]] = []
    rates = []
    for end, place in enumerate((src, dst)):
        members = [place] if place < gpus else range(nodes[end] * local, (nodes[end] + 1) * local)
        links = [network.nic_links(gpu)[end] for gpu in members]
        ways += [(link, 1 / len(links)) for link in links]
        rates.append(sum(link.capacity_bytes_per_s for link in links))
    ways[1:1] = _above_the_nics(network, nodes)
    return HostWay(cluster.node_link.p2p_latency_s + fabric.p2p_latency_s, min(rates), tuple(ways))


def host_link(cluster: Cluster, gpu: int, way: str) -> Link:
    """The link from a GPU to its host (``>``) or back (``<``), which the GPUs of a switch share."""
    host, local = cluster.host, cluster.gpus_per_node
    links = -(-local // host.gpus_per_link)  # of a node
    return Link(f"pcie{gpu // local * links + gpu % local // host.gpus_per_link}{way}", host.link_bytes_per_s)


G = TypeVar("G", int, npt.NDArray[np.int64])


def host_of(cluster: Cluster, gpu: G) -> G:
    """The host of a GPU (or of each of an array): that of its node, or of the GPUs that share a processor with it."""
    local, each = cluster.gpus_per_node, cluster.host.gpus_per_host or cluster.gpus_per_node
    return gpu // local * -(-local // each) + gpu % local // each


def host_memory(cluster: Cluster, gpu: int) -> Link:
    """The memory of the host of a GPU, as a link that all copies and passes of the processor share."""
    device = cluster.host.device
    usable = device.memory_bytes_per_s * device.memory_bound["elementwise"].bandwidth_efficiency
    return Link(f"ram{host_of(cluster, gpu)}", usable)


def _above_the_nics(network: Network, nodes: list[int]) -> Ways:
    """Links between leaf switches, those of the first GPUs of both nodes."""
    local = network.cluster.gpus_per_node
    ends = (nodes[0] * local, nodes[1] * local)
    return tuple((link, share) for link, share in network.spread(*ends) if link.name.startswith(("leaf", "group")))


def require_plain(cluster: Cluster) -> None:
    """Raises :class:`ClusterError` where hosts have no place in the network: on a custom graph or a torus."""
    if cluster.graph is not None or cluster.node_link.axes is not None:
        kind = "custom graph" if cluster.graph is not None else "torus"
        raise ClusterError(
            f"the hosts of a {kind} have no links of their own, so no server can run on them; "
            "put the servers on workers"
        )
