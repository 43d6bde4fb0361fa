"""Links above the NICs: uplinks of leaf switches in a fat tree, bundles between the groups of a dragonfly.

Both are made of *pods*: the nodes below a leaf (or below the leaves of all rails), or those of a group.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from simpar.hardware.blocks import per_block, span
from simpar.hardware.cluster import Cluster

_ROUNDING = 1e-12  # what a difference of sums may leave where nothing is left


class Link(NamedTuple):
    """One direction of a link: ``gpu3>`` leaves GPU 3 for its node, ``nic3<`` enters it from the network."""

    name: str
    capacity_bytes_per_s: float


Route = tuple[Link, ...]
Ways = tuple[tuple[Link, float], ...]


class Uplinks:
    """What lies between the pods of a cluster whose fabric has some.

    Args:
        cluster: the description; its fabric has ``pod_nodes``.
        link: gives the link of a name and capacity.
    """

    def __init__(self, cluster: Cluster, link: Callable[[str, float], Link]) -> None:
        fabric = cluster.fabric
        assert fabric is not None, "uplinks belong to a fabric"
        assert fabric.pod_nodes is not None, "without pods there are no uplinks"
        self._fabric = fabric
        self._local = cluster.gpus_per_node
        self._pod_ranks = fabric.pod_nodes * cluster.gpus_per_node
        self._pods = -(-cluster.nodes // fabric.pod_nodes)
        self._is_dragonfly = fabric.topology == "dragonfly"
        # what enters a leaf or group from its nodes, over what leaves it
        ports = self._pod_ranks // (cluster.gpus_per_node if fabric.rail_optimized else 1)
        self._leaving = ports * cluster.nic_bytes_per_s / fabric.oversubscription
        self._link = link

    def ways(self, src: int, dst: int) -> Ways:
        """The links between two ranks of different nodes, with the share of their bytes that each carries."""
        leaf, other = self._leaf_of(src), self._leaf_of(dst)
        if leaf == other:
            return ()
        if self._is_dragonfly:
            return self._between_groups(leaf[0], other[0])
        return ((self._leaf(*leaf, ">"), 1.0), (self._leaf(*other, "<"), 1.0))

    def straight(self, src: int, dst: int) -> Route:
        """One way between two ranks, without detours."""
        leaf, other = self._leaf_of(src), self._leaf_of(dst)
        if self._is_dragonfly and leaf != other:
            return (self._bundle(leaf[0], other[0]),)
        return tuple(link for link, _ in self.ways(src, dst))

    def kinds(self, pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], int]]:
        """Pairs of ranks whose ways differ above the NICs, each with how many of the given pairs it stands for."""
        first: dict[tuple[int, ...], tuple[int, int]] = {}
        counts: Counter[tuple[int, ...]] = Counter()
        pod_ranks, rails = self._pod_ranks, self._local if self._fabric.rail_optimized else 1
        for src, dst in pairs:
            key = (src // pod_ranks, src % rails, dst // pod_ranks, dst % rails)
            counts[key] += 1
            if counts[key] == 1:
                first[key] = (src, dst)
        return ((first[key], count) for key, count in counts.items())

    def loads(self, ranks: Sequence[int], nic_bytes: float, *, every_pair: bool) -> Iterator[tuple[Link, float]]:
        """Bytes of a collective that sends ``nic_bytes`` a member, link by link; one may come several times."""
        if self._is_dragonfly:
            between = self._between(ranks, nic_bytes, every_pair)
            for (a, b), carried in (self._detoured(between) if self._takes_detours else between).items():
                yield self._bundle(a, b), carried
        else:
            for (pod, rail), members in self._members_away(ranks, every_pair).items():
                for way in "><":
                    yield self._leaf(pod, rail, way), nic_bytes * members

    def _members_away(self, ranks: Sequence[int], every_pair: bool) -> dict[tuple[int, int], float]:
        """How many members' worth of NIC bytes leave, and enter, each leaf."""
        local, pod_ranks, by_rail = self._local, self._pod_ranks, self._fabric.rail_optimized
        through_spine = by_rail and every_pair and not self._fabric.pxn  # what is for another rail
        in_pod = per_block(ranks, pod_ranks)
        if len(in_pod) < 2 and not through_spine:
            return {}
        if not every_pair and isinstance(ranks, range) and by_rail and ranks.step % local == 0:
            return dict.fromkeys(((pod, ranks[0] % local) for pod in in_pod), 1.0)
        in_leaf = Counter(self._leaf_of(rank) for rank in ranks)
        if every_pair:
            in_node = Counter(rank // local for rank in ranks)
            shares: dict[tuple[int, int], float] = dict.fromkeys(in_leaf, 0.0)
            for rank in ranks:
                leaf, near = self._leaf_of(rank), in_node[rank // local]
                stays = in_leaf[leaf] + near - 1 if through_spine else in_pod[rank // pod_ranks]
                shares[leaf] += (len(ranks) - stays) / (len(ranks) - near)
            return shares
        # Ranks are visited node by node, so the ring of each rail enters and leaves a pod once: one member's
        # worth.
        if by_rail:
            return dict.fromkeys(in_leaf, 1.0)
        widest: dict[tuple[int, int], float] = {}
        for node, members in Counter(rank // local for rank in ranks).items():
            leaf = (node * local // pod_ranks, 0)
            widest[leaf] = max(widest.get(leaf, 0.0), float(members))
        return widest

    def _between(self, ranks: Sequence[int], nic_bytes: float, every_pair: bool) -> dict[tuple[int, int], float]:
        """Bytes from group to group of a dragonfly."""
        members = per_block(ranks, self._pod_ranks)
        if len(members) < 2:
            return {}
        if every_pair:
            # all nodes are taken to hold as many members as the first
            share = nic_bytes / (len(ranks) - sum(rank // self._local == ranks[0] // self._local for rank in ranks))
            return {(a, b): members[a] * members[b] * share for a in members for b in members if a != b}
        # each NIC's ring visits the groups one after the other, and enters and leaves each once
        width = span(ranks, self._local)[1]
        return dict.fromkeys(pairwise([*members, next(iter(members))]), nic_bytes * width)

    @property
    def _takes_detours(self) -> bool:
        """Whether messages go by a third group, any of them alike (Valiant 1982)."""
        return self._fabric.routing != "minimal" and self._pods > 2

    def _detoured(self, between: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
        """What bundles carry of given bytes from group to group where all take detours.

        The bundle from a to b carries an equal part of all that leaves a, on its first leg, and of all that is for b,
        on its second; but not what goes from a to b itself.
        """
        out, into = dict.fromkeys(range(self._pods), 0.0), dict.fromkeys(range(self._pods), 0.0)
        for (a, b), carried in between.items():
            out[a] += carried
            into[b] += carried
        part = 1.0 / (self._pods - 2)
        found: dict[tuple[int, int], float] = {}
        for (a, leaving), (b, coming) in product(out.items(), into.items()):
            carried = leaving + coming - 2.0 * between.get((a, b), 0.0)
            if a != b and carried > _ROUNDING * (leaving + coming):
                found[a, b] = carried * part
        return found

    def _between_groups(self, a: int, b: int) -> Ways:
        if not self._takes_detours:
            return ((self._bundle(a, b), 1.0),)
        others = [group for group in range(self._pods) if group not in (a, b)]
        part = 1.0 / len(others)
        return tuple(
            way for group in others for way in ((self._bundle(a, group), part), (self._bundle(group, b), part))
        )

    def _leaf_of(self, rank: int) -> tuple[int, int]:
        return rank // self._pod_ranks, rank % self._local if self._fabric.rail_optimized else 0

    def _leaf(self, pod: int, rail: int, way: str) -> Link:
        name = f"leaf{pod}.{rail}{way}" if self._fabric.rail_optimized else f"leaf{pod}{way}"
        return self._link(name, self._leaving)

    def _bundle(self, group: int, other: int) -> Link:
        return self._link(f"group{group}.{other}>", self._leaving / (self._pods - 1))
