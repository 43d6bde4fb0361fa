"""Links and routes: the link directions that a message or a collective occupies, and their capacity.

Standard topologies are arithmetic: no object exists for a link before something asks for it, so a network of
thousands of nodes costs nothing to build. Topologies of one's own (:class:`~simpar.hardware.graph.Graph`) go
through networkx. No clock and no sharing here: the engine divides the capacities.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from simpar.errors import ClusterError
from simpar.hardware.blocks import per_block, span, within
from simpar.hardware.cluster import Cluster
from simpar.hardware.paths import Paths
from simpar.hardware.torus import Hop, slice_loads
from simpar.hardware.uplinks import Link, Route, Uplinks, Ways

__all__ = ["Link", "Network", "Route", "span"]


class Network:
    """The links of a cluster.

    Inside a node a message leaves by its GPU's link and enters by the other's (``gpu3>``, ``gpu5<``). Between
    nodes it leaves and enters by the GPUs' shares of the NICs (``nic3>``, ``nic12<``); where the fabric has
    pods, a message that leaves its leaf switch also takes the leaf's uplinks (``leaf0.3>``) and the other's
    downlinks (``leaf1.3<``), as one bundle each, since ECMP spreads many messages. On a rail-optimised fabric
    a leaf is one rail of a pod, else it is the whole pod. Without pods (``pod_nodes`` None) nothing above the
    NICs can be a bottleneck and no such link appears. In a torus a message passes the links of the chips on its way
    (``ici5.0+`` leaves chip 5 along axis 0); in a dragonfly the bundle between two groups (``group0.3>`` leads from
    group 0 to group 3).

    Attributes:
        cluster: the description behind it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._links: dict[str, Link] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        self._kinds: dict[int, Cluster] = {}
        self._spreads: dict[tuple[int, int], Ways] = {}
        self._graph = None if cluster.graph is None else Paths(cluster.graph)
        has_pods = cluster.graph is None and cluster.fabric is not None and cluster.fabric.pod_nodes is not None
        self._uplinks = Uplinks(cluster, self._link) if has_pods else None
        self._torus = None if cluster.graph is not None else cluster.node_link.torus(cluster.gpus_per_node)

    def route(self, src: int, dst: int) -> Route:
        """The link directions from global rank ``src`` to ``dst``, in order; none from a rank to itself.

        Where several ways are equal, one of them; :meth:`spread` has all.

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
                ends = self._graph.path(f"gpu{src}", f"gpu{dst}")
                found = tuple(self._edge(a, b) for a, b in pairwise(ends))
            else:
                found = self._standard_route(src, dst)
            self._routes[src, dst] = found
        return found

    def spread(self, src: int, dst: int) -> Ways:
        """The link directions that many messages from ``src`` to ``dst`` use, with the share of their bytes on each.

        In a graph equal shortest ways take equal shares at every fork (ECMP); a dragonfly with Valiant routing takes
        all detours alike. Elsewhere the one route carries all.

        Raises:
            ClusterError: see :meth:`route`.
        """
        found = self._spreads.get((src, dst))
        if found is None:
            if self._graph is not None and src != dst:
                self._check(src)
                self._check(dst)
                ways = self._graph.shares(f"gpu{src}", f"gpu{dst}")
                found = tuple((self._edge(a, b), share) for a, b, share in ways)
            elif (detours := self._detours(src, dst)) is not None:
                found = detours
            else:
                found = tuple((link, 1.0) for link in self.route(src, dst))
            self._spreads[src, dst] = found
        return found

    def latency_s(self, src: int, dst: int) -> float:
        """Latency of an empty message from ``src`` to ``dst``: the library's own, plus that of the way."""
        if src == dst:
            return 0.0
        cluster = self.cluster
        local = cluster.gpus_per_node
        if self._graph is not None:
            return cluster.node_link.p2p_latency_s + self._graph.latency_s(f"gpu{src}", f"gpu{dst}")
        if src // local == dst // local:
            link = cluster.node_link.between(src % local, dst % local)
            if self._torus is not None:
                return link.p2p_latency_s + len(self.route(src, dst)) * link.step_latency_s
            return link.p2p_latency_s
        assert cluster.fabric is not None, "several nodes have a fabric"
        return cluster.node_link.p2p_latency_s + cluster.fabric.p2p_latency_s

    def flights_s(self, ranks: Sequence[int]) -> list[float]:
        """Time of flight of each hop of a ring in this order on a custom graph, the hop back to the first rank last."""
        assert self._graph is not None, "elsewhere the cost function knows"
        return [self._graph.latency_s(f"gpu{a}", f"gpu{b}") for a, b in pairwise([*ranks, ranks[0]])]

    def farthest_s(self, ranks: Sequence[int]) -> float:
        """The longest time of flight between two of these ranks on a custom graph."""
        assert self._graph is not None, "elsewhere the cost function knows"
        return self._graph.farthest_s([f"gpu{rank}" for rank in ranks])

    def message_bytes_per_s(self, src: int, dst: int) -> float:
        """What one message between two ranks can reach on a custom graph."""
        assert self._graph is not None, "elsewhere the cost function knows"
        return self._graph.widest_bytes_per_s(f"gpu{src}", f"gpu{dst}")

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

    def named(self, name: str) -> Link:
        """The link of that name, of a GPU's own kinds: ``gpu``, ``nic`` and ``ici``."""
        if name.startswith("ici"):
            return self._link(name, self.cluster.node_link.bandwidth_bytes_per_s)
        rank = int(name[3:-1])
        return self._gpu(rank, name[-1]) if name.startswith("gpu") else self._nic(rank, name[-1])

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
        loads = self.shared_loads(ranks, node_link_bytes, nic_bytes, every_pair=every_pair)
        if len(ranks) < 2 or self._graph is not None:
            return loads
        nodes, most = span(ranks, self.cluster.gpus_per_node)
        for rank in ranks:
            if most > 1 and node_link_bytes > 0 and self._torus is None:
                loads[self._gpu(rank, ">")] = loads[self._gpu(rank, "<")] = node_link_bytes
            if nodes > 1 and nic_bytes > 0:
                loads[self._nic(rank, ">")] = loads[self._nic(rank, "<")] = nic_bytes
        return loads

    def shared_loads(
        self,
        ranks: Sequence[int],
        node_link_bytes: float,
        nic_bytes: float,
        *,
        every_pair: bool = False,
        owners: frozenset[int] = frozenset(),
    ) -> dict[Link, float]:
        """The part of :meth:`loads` on links that belong to no single rank, or that a rank forwards for others.

        In a torus all links but those of ``owners`` may be left out, if there are any.
        """
        loads: dict[Link, float] = {}
        if len(ranks) < 2:
            return loads
        for rank in (min(ranks), max(ranks)):
            self._check(rank)
        if self._graph is not None:
            return self._graph_loads(ranks, node_link_bytes, nic_bytes, every_pair)
        if self._torus is not None and node_link_bytes > 0:
            self._add_slices(loads, ranks, node_link_bytes, every_pair=every_pair, owners=owners)
        if nic_bytes > 0 and self._uplinks is not None:
            for link, carried in self._uplinks.loads(ranks, nic_bytes, every_pair=every_pair):
                loads[link] = loads.get(link, 0.0) + carried
        return loads

    def shared_ways(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[Link, float, int]]:
        """Links that messages between these pairs may meet on: link, share of a message, number of messages.

        Above the NICs many pairs go the same way, so each way is looked up once.
        """
        if self._graph is None and self._torus is None:
            pairs_and_counts = iter(()) if self._uplinks is None else self._uplinks.kinds(pairs)
        else:
            pairs_and_counts = ((pair, 1) for pair in pairs)
        for (src, dst), count in pairs_and_counts:
            for link, share in self.spread(src, dst):
                if self._graph is not None or link.name.startswith(("leaf", "group", "ici")):
                    yield link, share, count

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
            pairs: Iterable[tuple[int, int]] = ((a, b) for a in ranks for b in ranks if a != b)
        else:
            # A ring's hop carries the whole of it, of which each of a node's NICs would have carried a share.
            share = nic_bytes * per_node if nodes > 1 else node_link_bytes
            pairs = pairwise([*ranks, ranks[0]])
        for pair in pairs:
            for link, part in self.spread(*pair):
                loads[link] = loads.get(link, 0.0) + share * part
        return {link: nbytes for link, nbytes in loads.items() if nbytes > 0}

    def _standard_route(self, src: int, dst: int) -> Route:
        local = self.cluster.gpus_per_node
        node, other = src // local, dst // local
        if node == other:
            if self._torus is not None:
                return tuple(self._ici(node * local, hop) for hop in self._torus.route(src % local, dst % local))
            return (self._gpu(src, ">"), self._gpu(dst, "<"))
        fabric = self.cluster.fabric
        if self._uplinks is None or fabric is None:
            return (self._nic(src, ">"), self._nic(dst, "<"))
        if fabric.rail_optimized and fabric.pxn and src % local != dst % local and self._torus is None:
            # first to the own node's GPU on the receiver's rail
            relay = node * local + dst % local
            return (self._gpu(src, ">"), self._gpu(relay, "<"), *self._standard_route(relay, dst))
        return (self._nic(src, ">"), *self._uplinks.straight(src, dst), self._nic(dst, "<"))

    def _add_slices(
        self, loads: dict[Link, float], ranks: Sequence[int], wire: float, *, every_pair: bool, owners: frozenset[int]
    ) -> None:
        """A collective inside the slices: along all axes of each slice's box, or around where they form no box."""
        torus, local = self._torus, self.cluster.gpus_per_node
        assert torus is not None, "slices are tori"
        for node in per_block(ranks, local):
            near = frozenset(rank - node * local for rank in owners if rank // local == node) if owners else None
            if near is not None and not near:
                continue
            members = within(ranks, node, local)
            for hop, carried in slice_loads(torus, members, wire, every_pair=every_pair, near=near).items():
                link = self._ici(node * local, hop)
                loads[link] = loads.get(link, 0.0) + carried

    def _detours(self, src: int, dst: int) -> Ways | None:
        """All links of a message, where detours spread it; else nothing."""
        fabric, local = self.cluster.fabric, self.cluster.gpus_per_node
        if self._uplinks is None or fabric is None or fabric.routing == "minimal" or src // local == dst // local:
            return None
        return ((self._nic(src, ">"), 1.0), *self._uplinks.ways(src, dst), (self._nic(dst, "<"), 1.0))

    def _gpu(self, rank: int, way: str) -> Link:
        return self._link(f"gpu{rank}{way}", self._kind(rank).node_link.bandwidth_bytes_per_s)

    def _nic(self, rank: int, way: str) -> Link:
        return self._link(f"nic{rank}{way}", self._kind(rank).nic_bytes_per_s)

    def _kind(self, rank: int) -> Cluster:
        """The cluster as nodes of this rank's kind have it."""
        if not self.cluster.groups:
            return self.cluster
        kind = self.cluster.kind_of(rank)
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = self.cluster.seen_by([kind])
        return found

    def _ici(self, first: int, hop: Hop) -> Link:
        chip, axis, way = hop
        return self._link(f"ici{first + chip}.{axis}{way}", self.cluster.node_link.bandwidth_bytes_per_s)

    def _link(self, name: str, capacity_bytes_per_s: float) -> Link:
        found = self._links.get(name)
        if found is None:
            found = self._links[name] = Link(name, capacity_bytes_per_s)
        return found

    def _edge(self, a: str, b: str) -> Link:
        assert self._graph is not None, "only graphs have edges"
        return self._link(f"{a}>{b}", self._graph.capacity_bytes_per_s(a, b))

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.cluster.gpus:
            raise ClusterError(
                f"rank {rank} is not in the cluster, whose {self.cluster.gpus} GPUs are ranks 0 to "
                f"{self.cluster.gpus - 1}; name one of those"
            )
