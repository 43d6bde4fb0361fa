"""Paths through a topology of one's own: shortest paths by latency, and how traffic spreads over equal ones.

networkx does the searching, and is imported with the first graph.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from simpar.errors import ClusterError
from simpar.hardware.graph import Graph


class Paths:
    """The paths between the nodes of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph.build()
        self._to: dict[str, dict[str, tuple[float, list[str]]]] = {}

    def capacity_bytes_per_s(self, a: str, b: str) -> float:
        """Rate of all cables from ``a`` to ``b`` together."""
        return float(self._graph[a][b]["capacity_bytes_per_s"])

    def widest_bytes_per_s(self, src: str, dst: str) -> float:
        """What one message can reach: of parallel cables it uses one, and of its path the narrowest step counts."""
        return min(float(self._graph[a][b]["cable_bytes_per_s"]) for a, b in pairwise(self.path(src, dst)))

    def latency_s(self, src: str, dst: str) -> float:
        """Time of flight on the shortest path."""
        return sum(float(self._graph[a][b]["latency_s"]) for a, b in pairwise(self.path(src, dst)))

    def farthest_s(self, ends: Sequence[str]) -> float:
        """The longest time of flight on a shortest path between two of ``ends``."""
        weight = max((self._nearer(dst)[src][0] for dst in ends for src in ends if src != dst), default=0.0)
        return weight * 1e-12  # a weight is picoseconds, and one more a hop

    def path(self, src: str, dst: str) -> list[str]:
        """One shortest path.

        Raises:
            ClusterError: there is none.
        """
        import networkx as nx  # noqa: PLC0415 - a third of a second that only custom topologies need

        try:
            path: list[str] = nx.shortest_path(self._graph, src, dst, weight="weight")
        except nx.NetworkXNoPath:
            raise ClusterError(
                f"the graph has no path from {src} to {dst}; add an edge that connects their parts"
            ) from None
        return path

    def shares(self, src: str, dst: str) -> Iterator[tuple[str, str, float]]:
        """All edges on shortest paths with their share of the bytes: split evenly at every fork, as ECMP does.

        Raises:
            ClusterError: there is no path.
        """
        nearer = self._nearer(dst)
        if src not in nearer:
            self.path(src, dst)  # says so
        shares = {src: 1.0}
        for node in sorted(nearer, key=lambda node: (-nearer[node][0], node)):
            following = nearer[node][1]
            for after in following if node in shares else ():
                yield node, after, shares[node] / len(following)
                shares[after] = shares.get(after, 0.0) + shares[node] / len(following)

    def _nearer(self, dst: str) -> dict[str, tuple[float, list[str]]]:
        """Of every node that reaches ``dst``: how far it is, and the next nodes on shortest paths."""
        found = self._to.get(dst)
        if found is None:
            import networkx as nx  # noqa: PLC0415 - as above

            turned = self._graph.reverse(copy=False)
            following, far = nx.dijkstra_predecessor_and_distance(turned, dst, weight="weight")
            found = self._to[dst] = {node: (far[node], sorted(following[node])) for node in far}
        return found
