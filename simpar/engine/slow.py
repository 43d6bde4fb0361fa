"""Slow devices and links, as the cost functions ask for them.

A device at a share of its speed is a kind of its own, whose kernels take longer. A link at a share of its rate is a
link of less capacity; and since a collective moves in lock-step, one that uses it takes what it would take if all its
members' links of that kind were so slow.
"""

from collections.abc import Iterable

from simpar.faults.description import Faults
from simpar.hardware.cluster import Cluster
from simpar.hardware.links import NodeLink


class Slow:
    """What is slow in a run.

    Args:
        faults: what is slow; None is nothing.

    Attributes:
        link_rates: share of its rate that a link has left, by name, of those that are slow.
    """

    def __init__(self, faults: Faults | None) -> None:
        self.link_rates = {} if faults is None else faults.link_rates
        speeds = {} if faults is None else faults.speeds
        self._speeds = (1.0, *sorted(set(speeds.values())))
        self._levels = {rank: self._speeds.index(speed) for rank, speed in speeds.items()}
        self._views: dict[tuple[int, float, float], tuple[Cluster, Cluster]] = {}

    @property
    def anything(self) -> bool:
        """Whether anything is slow."""
        return bool(self.link_rates or self._levels)

    def level(self, rank: int) -> int:
        """Which speed a rank's device has, 0 the full one."""
        return self._levels.get(rank, 0)

    def speed(self, level: int) -> float:
        """The speed of a level."""
        return self._speeds[level]

    def seen(self, cluster: Cluster, places: Iterable[int]) -> Cluster:
        """The cluster as a transfer among the GPUs at these places sees it: links as slow as the slowest of theirs."""
        if not self.link_rates:
            return cluster
        places = list(places)
        node, nic = (self._slowest(kind, places) for kind in ("gpu", "nic"))
        if node == nic == 1:
            return cluster
        key = (id(cluster), node, nic)
        if key not in self._views:
            fabric = cluster.fabric and cluster.fabric.replace(nic_gbps=cluster.fabric.nic_gbps * nic)
            view = cluster.replace(node_link=_slowed(cluster.node_link, node), fabric=fabric)
            self._views[key] = (cluster, view)  # the first is kept so that its id stays its own
        return self._views[key][1]

    def _slowest(self, kind: str, places: list[int]) -> float:
        rates = self.link_rates
        return min(min(rates.get(f"{kind}{place}{way}", 1.0) for way in "<>") for place in places)


def _slowed(link: NodeLink, rate: float) -> NodeLink:
    """A node link of which a share of the bandwidth is left, near and far."""
    beyond = link.beyond and _slowed(link.beyond, rate)
    return link.replace(bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * rate, beyond=beyond)
