"""Cost functions bound to a cluster, in whole nanoseconds; each distinct question is asked once per run."""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from simpar.cost.collective import CollectiveCost, collective_cost, p2p_cost
from simpar.cost.kernel import kernel_s
from simpar.errors import PlanError
from simpar.hardware.cluster import Cluster
from simpar.hardware.fabric import Link, Network, span
from simpar.model.work import Kernel
from simpar.program.ir import Group
from simpar.units import ns


class Load(NamedTuple):
    """Bytes that a transfer puts on a link, as so many flows that are alike."""

    link: Link
    nbytes: float
    flows: int = 1


class Transfer(NamedTuple):
    """A transfer as the network sees it: latency, streaming time alone, and loads.

    ``intensity`` is how hard it works a member's device: bytes that pass it per second, over what its node link can
    carry (0 to 1).
    """

    latency_ns: int
    stream_ns: int
    loads: tuple[Load, ...]
    intensity: float = 0.0


class Costs:
    """Asks the cost functions, remembers the answers."""

    def __init__(self, cluster: Cluster, algorithm: str) -> None:
        self.device = cluster.device
        self._cluster = cluster
        self._algorithm = algorithm
        self._network = Network(cluster)
        self._has_leaves = cluster.fabric is not None and cluster.fabric.pod_nodes is not None
        self._kernels: dict[Kernel, int] = {}
        self._collectives: dict[tuple[str, float, int, int], CollectiveCost] = {}
        self._nodes: dict[Group, int] = {}
        self._shared: dict[tuple[str, float, Group], tuple[Load, ...]] = {}

    def kernel_ns(self, kernel: Kernel) -> int:
        """Time of a kernel that runs alone on the device."""
        found = self._kernels.get(kernel)
        if found is None:
            found = self._kernels[kernel] = ns(kernel_s(kernel, self.device))
        return found

    def collective(self, op: str, nbytes: float, group: Group, rank: int) -> Transfer:
        """A collective of ``group``, with the load that it puts on the links of one member."""
        cost = self._collective(op, nbytes, group)
        loads = []
        if self._cluster.graph is None:
            for carried, links in (
                (cost.node_link_bytes, self._network.node_links(rank)),
                (cost.nic_bytes, self._network.nic_links(rank)),
            ):
                loads += [Load(link, carried) for link in links if carried > 0]
        latency_ns, stream_ns = _split(cost)
        return Transfer(latency_ns, stream_ns, tuple(loads), self._intensity(cost, stream_ns))

    def _intensity(self, cost: CollectiveCost, stream_ns: int) -> float:
        link = self._cluster.node_link
        if link.kind == "host":
            return 1.0  # gloo takes cores from compute, however little it moves
        could = link.bandwidth_bytes_per_s * stream_ns * 1e-9
        return min(max(cost.node_link_bytes, cost.nic_bytes) / could, 1.0) if could else 0.0

    def own_links(self, kind: str, rank: int) -> tuple[Link, ...]:
        """Both directions of a rank's own links of one kind: ``gpu`` inside the node, ``nic`` outside."""
        return self._network.node_links(rank) if kind == "gpu" else self._network.nic_links(rank)

    def shared_loads(self, op: str, nbytes: float, group: Group) -> tuple[Load, ...]:
        """What a collective, and its folded copies, put on links that belong to no single member.

        These are the uplinks of leaf switches, or the edges of a custom graph. Without either there are none, and the
        cost of asking does not grow with the group.
        """
        if self._cluster.graph is None and not self._has_leaves:
            return ()
        found = self._shared.get((op, nbytes, group))
        if found is None:
            found = self._shared[op, nbytes, group] = self._count_shared(op, nbytes, group)
        return found

    def _count_shared(self, op: str, nbytes: float, group: Group) -> tuple[Load, ...]:
        cost = self._collective(op, nbytes, group)
        total: dict[Link, tuple[float, int]] = {}
        for shift in group.copies:
            ranks = [rank + shift for rank in group.ranks]
            loads = self._network.loads(ranks, cost.node_link_bytes, cost.nic_bytes, every_pair=op == "all_to_all")
            _add_shared(total, loads.items(), all_links=self._cluster.graph is not None)
        return tuple(Load(link, carried, flows) for link, (carried, flows) in total.items())

    def message(self, nbytes: float, src: int, dst: int, copies: "range | tuple[int, ...]") -> Transfer:
        """A message between two ranks; its folded copies share whatever links are not their own."""
        cost = p2p_cost(nbytes, src, dst, self._cluster, network=self._network)
        route = self._network.route(src, dst)
        if not self._has_leaves:
            return Transfer(*_split(cost), tuple(Load(link, nbytes) for link in route))
        total: dict[Link, tuple[float, int]] = {}
        for shift in copies:
            moved = self._network.route(src + shift, dst + shift)
            _add_shared(total, ((link, nbytes) for link in moved), all_links=False)
        own = tuple(Load(link, nbytes) for link in route if not _is_shared(link))
        return Transfer(*_split(cost), (*own, *(Load(link, b, flows) for link, (b, flows) in total.items())))

    def _collective(self, op: str, nbytes: float, group: Group) -> CollectiveCost:
        nodes = self._nodes.get(group)
        if nodes is None:
            nodes = self._nodes[group] = span(group.ranks, self._cluster.gpus_per_node)[0]
        key = (op, nbytes, len(group.ranks), nodes)
        cost = self._collectives.get(key)
        if cost is None:
            try:
                cost = collective_cost(*key, self._cluster, algorithm=self._algorithm)
            except PlanError:
                if self._algorithm == "auto":
                    raise
                # as NCCL does where the algorithm that it was told has no form for this collective or group
                cost = collective_cost(*key, self._cluster)
            self._collectives[key] = cost
        return cost


def _is_shared(link: Link) -> bool:
    return link.name.startswith("leaf")


def _add_shared(total: dict[Link, tuple[float, int]], loads: Iterable[tuple[Link, float]], *, all_links: bool) -> None:
    for link, carried in loads:
        if all_links or _is_shared(link):
            nbytes, flows = total.get(link, (0.0, 0))
            total[link] = (nbytes + carried, flows + 1)


def _split(cost: CollectiveCost) -> tuple[int, int]:
    """Latency and streaming time whose sum is the cost, in whole nanoseconds."""
    latency = ns(cost.latency_s)
    return latency, max(ceil(cost.total_s * 1e9 - latency - 1e-6), 0)
