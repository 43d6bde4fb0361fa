"""Topologies of one's own: links between GPUs, switches and hosts as a list, built into a networkx graph."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, model_validator

from simpar.description import Description
from simpar.errors import ClusterError, SimparError
from simpar.hardware.topologies import cables
from simpar.reading import read_json, read_text
from simpar.units import US, gbps

if TYPE_CHECKING:
    import networkx as nx


_ENDS = ("source", "target", "bandwidth_gbps", "latency_us")
_NO_CABLE = {"capacity_bytes_per_s": 0.0, "cable_bytes_per_s": 0.0, "latency_s": float("inf")}


class Edge(Description):
    """A cable: both directions at full rate, unless the graph is directed.

    Attributes:
        source: one end, such as ``gpu0`` or any name of a switch.
        target: the other end.
        bandwidth_gbps: usable rate of one direction in Gb/s.
        latency_us: time of flight in µs.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    source: str = Field(min_length=1)
    target: str = Field(min_length=1)
    bandwidth_gbps: Annotated[float, Field(gt=0)]
    latency_us: Annotated[float, Field(ge=0)] = 0.0

    @model_validator(mode="after")
    def _check(self) -> "Edge":
        if self.source == self.target:
            raise ValueError(f"an edge from '{self.source}' to itself carries nothing; give two different ends")
        return self


class Graph(Description):
    """A topology as edges.

    Takes a list of edges, a networkx graph or its node-link data, a named topology such as ``{topology: dragonfly,
    groups: 9, …}`` (:mod:`simpar.hardware.topologies`), or the path of a JSON file with one of these.

    Parallel edges (those of a networkx multigraph) are one bundle: their bandwidths add up, since many messages spread
    over them by hashing, and the shortest latency counts. One message alone reaches what its widest cable carries.

    A collective is one ring, in the order of its ranks, along the shortest ways; other cables stay idle (but for an
    all-to-all, which uses those between all pairs). Libraries look for several rings that share no cable.

    Attributes:
        edges: the cables.
        directed: whether an edge goes only from source to target.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    edges: tuple[Edge, ...] = Field(min_length=1)
    directed: bool = False

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if isinstance(data, str | Path):
            return dict(_load(Path(data)))
        networkx = sys.modules.get("networkx")  # who has a graph of its own has imported it
        if networkx is not None and isinstance(data, networkx.Graph):
            return _from_node_link(networkx.node_link_data(data, edges="edges"))
        if isinstance(data, Mapping) and "topology" in data:
            data = cables(data)
        if isinstance(data, Mapping) and ("links" in data or "nodes" in data):
            return _from_node_link(data)
        if isinstance(data, Sequence) and not isinstance(data, str):
            data = {"edges": data}
        if isinstance(data, Mapping) and isinstance(data.get("edges"), Sequence):
            return {**data, "edges": [_edge(item) for item in data["edges"]]}
        return data

    def require(self, names: Sequence[str]) -> None:
        """Raises :class:`ClusterError` unless every name is a node of the graph."""
        present = {end for edge in self.edges for end in (edge.source, edge.target)}
        missing = [name for name in names if name not in present]
        if missing:
            raise ClusterError(
                f"the graph lacks {missing[0]} and {len(missing) - 1} more of its {len(names)} GPUs; "
                f"name the GPUs gpu0 to gpu{len(names) - 1} and connect each"
            )

    def build(self) -> "nx.DiGraph[str]":
        """The graph with the rate of a bundle and of its widest cable, latency and integer weight on each direction.

        The weight is the latency in whole picoseconds and one more a hop, so ties go to fewer hops, exactly.
        """
        import networkx as nx  # noqa: PLC0415 - a third of a second that only custom topologies need

        graph: nx.DiGraph[str] = nx.DiGraph()
        for edge in self.edges:
            ends = [(edge.source, edge.target)]
            if not self.directed:
                ends.append((edge.target, edge.source))
            for source, target in ends:
                old = graph.get_edge_data(source, target, _NO_CABLE)
                latency_s = min(old["latency_s"], edge.latency_us * US)
                graph.add_edge(
                    source,
                    target,
                    capacity_bytes_per_s=old["capacity_bytes_per_s"] + gbps(edge.bandwidth_gbps),
                    cable_bytes_per_s=max(old["cable_bytes_per_s"], gbps(edge.bandwidth_gbps)),
                    latency_s=latency_s,
                    weight=round(latency_s * 1e12) + 1,
                )
        return graph


def _load(path: Path) -> Graph:
    try:
        data = read_json(read_text(path))
    except OSError as error:
        raise ClusterError(f"graph file '{path}' cannot be read ({error.strerror}); give a path to JSON") from None
    except ValueError as error:
        raise ClusterError(f"graph file '{path}' {error}; write it with json.dump") from None
    if not isinstance(data, (dict, list)):
        raise ClusterError(f"graph file '{path}' holds {data!r:.40}, but a graph is a list of edges or a mapping")
    try:
        return Graph.model_validate(data)
    except ClusterError as error:
        raise ClusterError(f"graph file '{path}': {error}") from None


def _edge(item: Any) -> Any:
    """An edge given as (source, target, bandwidth_gbps[, latency_us]) becomes a mapping."""
    if isinstance(item, Sequence) and not isinstance(item, str):
        if len(item) > len(_ENDS):
            raise ClusterError(f"an edge of {len(item)} parts has too many; write [{', '.join(_ENDS)}]")
        return dict(zip(_ENDS, item, strict=False))
    return item


def _from_node_link(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a graph from ``networkx.node_link_data``, whose attributes of nodes are not needed."""
    known = set(Edge.model_fields)
    links = data.get("edges", data.get("links", ()))
    if not isinstance(links, Sequence) or isinstance(links, str):
        raise ClusterError(
            f"links of a graph should be a list of edges, not {links!r:.40}; name source and target of each"
        )
    edges = [
        {key: link[key] for key in link if key in known} if isinstance(link, Mapping) else _edge(link) for link in links
    ]
    return {"edges": edges, "directed": bool(data.get("directed", False))}
