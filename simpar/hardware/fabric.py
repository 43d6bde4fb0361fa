"""Links and routes: the link directions that a message or a collective occupies, and their capacity.

Standard topologies are arithmetic: no object exists for a link before something asks for it, so a network of
thousands of nodes costs nothing to build. Topologies of one's own (:class:`~simpar.hardware.graph.Graph`) go
through networkx. No clock and no sharing here: the engine divides the capacities.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from simpar.errors import ClusterError
from simpar.hardware.cluster import Cluster


class Link(NamedTuple):
    """One direction of a link: ``gpu3>`` leaves GPU 3 for its node, ``nic3<`` enters it from the network."""

    name: str
    capacity_bytes_per_s: float


Route = tuple[Link, ...]


class Network:
    """The links of a cluster.

    Inside a node a message leaves by its GPU's link and enters by the other's (``gpu3>``, ``gpu5<``). Between
    nodes it leaves and enters by the GPUs' shares of the NICs (``nic3>``, ``nic12<``); where the fabric has
    pods, a message that leaves its leaf switch also takes the leaf's uplinks (``leaf0.3>``) and the other's
    downlinks (``leaf1.3<``), as one bundle each, since ECMP spreads many messages. On a rail-optimised fabric
    a leaf is one rail of a pod, else it is the whole pod. Without pods (``pod_nodes`` None) nothing above the
    NICs can be a bottleneck and no such link appears.

    Attributes:
        cluster: the description behind it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._links: dict[str, Link] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        self._graph = None if cluster.graph is None else cluster.graph.build()

    def route(self, src: int, dst: int) -> Route:
        """The link directions from global rank ``src`` to ``dst``, in order; none from a rank to itself.

        Raises:
            ClusterError: a rank is not in the cluster, or a graph has no path between the two.
        """
        found = self._routes.get((src, dst))
        if found is None:
            self._check(src)
            self._check(dst)
            if src == dst:
                found = ()
            elif self._graph is not None:
                ends = self._path(src, dst)
                found = tuple(self._edge(a, b) for a, b in pairwise(ends))
            else:
                found = self._standard_route(src, dst)
            self._routes[src, dst] = found
        return found

    def latency_s(self, src: int, dst: int) -> float:
        """Latency of an empty message from ``src`` to ``dst``: the library's own, plus that of the way."""
        if src == dst:
            return 0.0
        cluster = self.cluster
        local = cluster.gpus_per_node
        if self._graph is not None:
            ends = self._path(src, dst)
            way_s: float = sum(self._graph[a][b]["latency_s"] for a, b in pairwise(ends))
            return cluster.node_link.p2p_latency_s + way_s
        if src // local == dst // local:
            return cluster.node_link.between(src % local, dst % local).p2p_latency_s
        assert cluster.fabric is not None, "several nodes have a fabric"
        return cluster.node_link.p2p_latency_s + cluster.fabric.p2p_latency_s

    def ring_route(self, order: Sequence[int]) -> tuple[Route, ...]:
        """The route of each step of one ring in this order, the step back to the first rank last."""
        if len(order) < 2:
            return ()
        return tuple(self.route(a, b) for a, b in pairwise([*order, order[0]]))

    def node_links(self, rank: int) -> Route:
        """The two directions of a rank's link inside its node."""
        return (self._gpu(rank, ">"), self._gpu(rank, "<"))

    def nic_links(self, rank: int) -> Route:
        """The two directions of a rank's share of the NICs."""
        return (self._nic(rank, ">"), self._nic(rank, "<"))

    def group_links(self, ranks: Sequence[int]) -> Route:
        """Every link direction that a ring collective over these ranks uses, each once."""
        return tuple(self.loads(ranks, 1.0, 1.0))

    def loads(
        self, ranks: Sequence[int], node_link_bytes: float, nic_bytes: float, *, every_pair: bool = False
    ) -> dict[Link, float]:
        """Bytes on every link direction when a group does one collective: its coupled flow.

        NCCL runs one ring per channel and lets channel c leave each node by rail c, so all NICs of the group
        carry an equal share, and uplinks carry those hops of each rail's ring that leave the leaf. An
        all-to-all (``every_pair``) spreads over all peers; what goes to another rail first hops to that
        rail's GPU of the own node (NCCL's PXN) and leaves a leaf only for another pod. In a graph, the ring
        follows the given order.

        Args:
            ranks: global ranks of the group.
            node_link_bytes: what each member sends, and receives, on its node link.
            nic_bytes: the same on its share of the NICs.
            every_pair: an all-to-all instead of a ring.

        Returns:
            Links with the bytes that cross them; links without traffic are left out.
        """
        if len(ranks) < 2:
            return {}
        for rank in (min(ranks), max(ranks)):
            self._check(rank)
        if self._graph is not None:
            return self._graph_loads(ranks, node_link_bytes, nic_bytes, every_pair)
        loads: dict[Link, float] = {}
        nodes, most = span(ranks, self.cluster.gpus_per_node)
        for rank in ranks:
            if most > 1 and node_link_bytes > 0:
                loads[self._gpu(rank, ">")] = loads[self._gpu(rank, "<")] = node_link_bytes
            if nodes > 1 and nic_bytes > 0:
                loads[self._nic(rank, ">")] = loads[self._nic(rank, "<")] = nic_bytes
        if nodes > 1 and nic_bytes > 0 and self.cluster.fabric is not None and self.cluster.fabric.pod_nodes:
            crossing = self._pod_traffic(ranks, self.cluster.fabric.pod_nodes, every_pair)
            for (pod, rail), shares in crossing.items():
                loads[self._leaf(pod, rail, ">")] = loads[self._leaf(pod, rail, "<")] = nic_bytes * shares
        return loads

    def _pod_traffic(self, ranks: Sequence[int], pod_nodes: int, every_pair: bool) -> dict[tuple[int, int], float]:
        """How many members' worth of NIC bytes leave, and enter, each leaf."""
        local, pod_ranks = self.cluster.gpus_per_node, self.cluster.gpus_per_node * pod_nodes
        in_pod = Counter(rank // pod_ranks for rank in ranks)
        if len(in_pod) < 2:
            return {}
        in_leaf = Counter((rank // pod_ranks, self._rail(rank)) for rank in ranks)
        if every_pair:
            in_node = Counter(rank // local for rank in ranks)
            shares: dict[tuple[int, int], float] = dict.fromkeys(in_leaf, 0.0)
            for rank in ranks:
                pod = rank // pod_ranks
                away = (len(ranks) - in_pod[pod]) / (len(ranks) - in_node[rank // local])
                shares[pod, self._rail(rank)] += away
            return shares
        # Ranks are visited node by node, so the ring of each rail enters and leaves a pod once: one member's
        # worth.
        if self._by_rail():
            return dict.fromkeys(in_leaf, 1.0)
        widest: dict[tuple[int, int], float] = {}
        for node, members in Counter(rank // local for rank in ranks).items():
            leaf = (node // pod_nodes, 0)
            widest[leaf] = max(widest.get(leaf, 0.0), float(members))
        return widest

    def _graph_loads(
        self, ranks: Sequence[int], node_link_bytes: float, nic_bytes: float, every_pair: bool
    ) -> dict[Link, float]:
        nodes, _ = span(ranks, self.cluster.gpus_per_node)
        size = len(ranks)
        per_node = size / nodes
        loads: dict[Link, float] = {}
        if every_pair:
            # A pair's share: a member's bytes to one peer, whichever tier carries them.
            share = nic_bytes / (size - per_node) if nodes > 1 else node_link_bytes / (size - 1)
            routes: Iterable[Route] = (self.route(a, b) for a in ranks for b in ranks if a != b)
        else:
            # A ring's hop carries the whole of it, of which each of a node's NICs would have carried a share.
            share = nic_bytes * per_node if nodes > 1 else node_link_bytes
            routes = self.ring_route(ranks)
        for route in routes:
            for link in route:
                loads[link] = loads.get(link, 0.0) + share
        return {link: nbytes for link, nbytes in loads.items() if nbytes > 0}

    def _standard_route(self, src: int, dst: int) -> Route:
        local = self.cluster.gpus_per_node
        node, other = src // local, dst // local
        if node == other:
            return (self._gpu(src, ">"), self._gpu(dst, "<"))
        out, into = self._nic(src, ">"), self._nic(dst, "<")
        fabric = self.cluster.fabric
        if fabric is None or fabric.pod_nodes is None:
            return (out, into)
        leaf = (node // fabric.pod_nodes, self._rail(src))
        other_leaf = (other // fabric.pod_nodes, self._rail(dst))
        if leaf == other_leaf:
            return (out, into)
        return (out, self._leaf(*leaf, ">"), self._leaf(*other_leaf, "<"), into)

    def _by_rail(self) -> bool:
        return self.cluster.fabric is not None and self.cluster.fabric.rail_optimized

    def _rail(self, rank: int) -> int:
        return rank % self.cluster.gpus_per_node if self._by_rail() else 0

    def _gpu(self, rank: int, way: str) -> Link:
        return self._link(f"gpu{rank}{way}", self.cluster.node_link.bandwidth_bytes_per_s)

    def _nic(self, rank: int, way: str) -> Link:
        return self._link(f"nic{rank}{way}", self.cluster.nic_bytes_per_s)

    def _leaf(self, pod: int, rail: int, way: str) -> Link:
        fabric = self.cluster.fabric
        assert fabric is not None, "leaves belong to a fabric"
        assert fabric.pod_nodes is not None, "without pods there are no uplinks"
        ports = fabric.pod_nodes * (1 if fabric.rail_optimized else self.cluster.gpus_per_node)
        name = f"leaf{pod}.{rail}{way}" if fabric.rail_optimized else f"leaf{pod}{way}"
        return self._link(name, ports * self.cluster.nic_bytes_per_s / fabric.oversubscription)

    def _link(self, name: str, capacity_bytes_per_s: float) -> Link:
        found = self._links.get(name)
        if found is None:
            found = self._links[name] = Link(name, capacity_bytes_per_s)
        return found

    def _edge(self, a: str, b: str) -> Link:
        assert self._graph is not None, "only graphs have edges"
        return self._link(f"{a}>{b}", self._graph[a][b]["capacity_bytes_per_s"])

    def _path(self, src: int, dst: int) -> list[str]:
        import networkx as nx  # noqa: PLC0415 - a third of a second that only custom topologies need

        assert self._graph is not None, "only graphs have paths of their own"
        try:
            path: list[str] = nx.shortest_path(self._graph, f"gpu{src}", f"gpu{dst}", weight="weight")
        except nx.NetworkXNoPath:
            raise ClusterError(
                f"the graph has no path from gpu{src} to gpu{dst}; add an edge that connects their parts"
            ) from None
        return path

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.cluster.gpus:
            raise ClusterError(
                f"rank {rank} is not in the cluster, whose {self.cluster.gpus} GPUs are ranks 0 to "
                f"{self.cluster.gpus - 1}; name one of those"
            )


def span(ranks: Sequence[int], gpus_per_node: int) -> tuple[int, int]:
    """Over how many nodes ranks are spread, and how many of them the fullest node has.

    For a range this takes constant time in its length.

    >>> span(range(0, 64, 4), 8), span([0, 1, 8], 8)
    ((8, 2), (2, 2))
    """
    if not ranks:
        return 0, 0
    if not isinstance(ranks, range):
        per_node = Counter(rank // gpus_per_node for rank in ranks)
        return len(per_node), max(per_node.values())
    ranks = ranks if ranks.step > 0 else ranks[::-1]
    step = ranks.step
    if step >= gpus_per_node:
        return len(ranks), 1
    first, last = ranks[0] // gpus_per_node, ranks[-1] // gpus_per_node
    # The pattern of ranks on nodes repeats after this many nodes; the first and last node may be cut.
    period = step // gcd(step, gpus_per_node)
    most = max(_in_node(ranks, node, gpus_per_node) for node in {*range(first, min(last, first + period) + 1), last})
    return last - first + 1, most


def _in_node(ranks: range, node: int, gpus_per_node: int) -> int:
    start = node * gpus_per_node
    below = [max(0, min(len(ranks), -((ranks.start - edge) // ranks.step))) for edge in (start, start + gpus_per_node)]
    return below[1] - below[0]
