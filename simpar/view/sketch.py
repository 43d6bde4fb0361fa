"""Where the parts of a cluster are drawn: GPUs, switches and cables with the link directions that each cable has.

Tiers are levels of height: the switch of a node, its GPUs, leaves, spine; of large clusters one column stands for a
node, or for a pod, with all its GPUs. Tori are grids, dragonflies circles of groups, and topologies of one's own are
laid out by networkx.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import cos, pi, sin

from simpar.hardware.cluster import Cluster
from simpar.hardware.torus import Torus

_MOST_GPUS = 512  # of grids and dragonflies; more than a screen can show
_MOST_ALONE = 32  # GPUs of tiers that have room for a name each
_MOST_COLUMNS, _MOST_NUMBERS, _MOST_COUNTS = 128, 64, 12  # columns, and those of them with a number or a count


@dataclass(frozen=True, slots=True)
class Vertex:
    """A GPU (``gpu``) or something that switches (``switch``), at a place; beside it its label, else its name."""

    name: str
    kind: str
    x: float
    y: float
    label: str | None = None


@dataclass(frozen=True, slots=True)
class Cable:
    """A line between two vertices, named, with the link directions behind it; ``stub`` if it leads round a torus."""

    a: str
    b: str
    links: tuple[str, ...]
    stub: bool = False


@dataclass(frozen=True, slots=True)
class Sketch:
    """A drawing as data.

    Attributes:
        vertices: by name.
        cables: between them.
        note: what is not drawn, and what stands for several, or an empty string.
    """

    vertices: dict[str, Vertex]
    cables: tuple[Cable, ...]
    note: str = ""


def sketch(cluster: Cluster) -> Sketch:
    """The drawing of a cluster."""
    if cluster.graph is not None:
        return _graph(cluster)
    torus = cluster.node_link.torus(cluster.gpus_per_node)
    if torus is not None:
        return _slices(cluster, torus)
    if cluster.fabric is not None and cluster.fabric.topology == "dragonfly":
        nodes = max(min(cluster.nodes, _MOST_GPUS // cluster.gpus_per_node), 1)
        return _dragonfly(cluster, nodes, f"the first {nodes} of {cluster.nodes} nodes" * (nodes < cluster.nodes))
    return _tiers(cluster) if cluster.gpus <= _MOST_ALONE or cluster.nodes == 1 else _columns(cluster)


def _tiers(cluster: Cluster) -> Sketch:
    local, fabric, nodes = cluster.gpus_per_node, cluster.fabric, cluster.nodes
    gpus = min(local, _MOST_GPUS)
    note = f"the first {gpus} of {local} GPUs" if gpus < local else ""
    vertices: dict[str, Vertex] = {}
    cables: list[Cable] = []
    gap = 1.5  # between nodes, in widths of a GPU

    def middle(node: int) -> float:
        return node * (gpus + gap) + (gpus - 1) / 2

    for node in range(nodes):
        inner = _add(vertices, f"node {node}", "switch", middle(node), -1.0) if gpus > 1 else ""
        for index in range(gpus):
            rank = node * local + index
            name = _add(vertices, f"gpu{rank}", "gpu", node * (gpus + gap) + index, 0.0)
            if inner:
                cables.append(Cable(name, inner, (f"gpu{rank}>", f"gpu{rank}<")))
    if nodes == 1 or fabric is None:
        return Sketch(vertices, tuple(cables), note)
    pod_nodes = fabric.pod_nodes or nodes
    width = nodes * (gpus + gap)
    leaves: dict[str, None] = {}
    for node in range(nodes):
        pod = node // pod_nodes
        for index in range(gpus):
            rail = index if fabric.rail_optimized else 0
            leaf = f"leaf{pod}.{rail}" if fabric.rail_optimized else f"leaf{pod}"
            if leaf not in leaves:
                leaves[leaf] = None
                first, last = pod * pod_nodes, min((pod + 1) * pod_nodes, nodes) - 1
                begin, end = middle(first), middle(last)
                share = (rail + 0.5) / gpus if fabric.rail_optimized else 0.5
                _add(vertices, leaf, "switch", begin + (end - begin) * share, 1.5)
            rank = node * local + index
            cables.append(Cable(f"gpu{rank}", leaf, (f"nic{rank}>", f"nic{rank}<")))
    if len(leaves) > 1:
        spine = _add(vertices, "spine", "switch", (width - gap - 1) / 2, 2.5)
        cables += [Cable(leaf, spine, (f"{leaf}>", f"{leaf}<")) for leaf in leaves]
    return Sketch(vertices, tuple(cables), note)


def _columns(cluster: Cluster) -> Sketch:
    """A column for the GPUs of each node, or of each pod where nodes are too many: cables side by side are one."""
    local, fabric, whole = cluster.gpus_per_node, cluster.fabric, cluster.nodes
    pod_nodes = (fabric.pod_nodes if fabric is not None else None) or whole
    size = 1 if whole <= _MOST_COLUMNS or pod_nodes == whole else pod_nodes
    nodes, word = min(whole, _MOST_COLUMNS * size), "node" if size == 1 else "pod"
    vertices: dict[str, Vertex] = {}
    cables: list[Cable] = []
    pods: dict[int, list[int]] = {}
    columns = [range(first, min(first + size, nodes)) for first in range(0, nodes, size)]
    every = -(-len(columns) // _MOST_NUMBERS)
    rails = local if fabric is not None and fabric.rail_optimized else 1
    for column, members in enumerate(columns):
        pods.setdefault(members[0] // pod_nodes, []).append(column)
        ranks = range(members[0] * local, (members[-1] + 1) * local)
        number = str(column) if column % every == 0 else ""
        held = _add(vertices, f"GPUs {ranks[0]} to {ranks[-1]}", "gpu", column, 0.0, number)
        inner = _add(vertices, f"{word} {column}", "switch", column, 1.0, "")
        cables.append(Cable(held, inner, _both_ways(f"gpu{rank}" for rank in ranks)))
        if fabric is not None:
            leaves = _leaves(members[0] // pod_nodes, rails)
            cables.append(Cable(inner, leaves, _both_ways(f"nic{rank}" for rank in ranks)))
    counted = f"{rails} leaves" if rails > 1 else "1 leaf"
    if fabric is not None:
        for pod, of_pod in pods.items():
            text = counted if len(pods) <= _MOST_COUNTS else ""
            _add(vertices, _leaves(pod, rails), "switch", (of_pod[0] + of_pod[-1]) / 2, 2.2, text)
        if rails * len(pods) > 1:
            spine = _add(vertices, "spine", "switch", (len(columns) - 1) / 2, 3.2, "spine")
            for pod in pods:
                names = [f"leaf{pod}.{rail}" for rail in range(rails)] if fabric.rail_optimized else [f"leaf{pod}"]
                cables.append(Cable(_leaves(pod, rails), spine, _both_ways(names)))
    held_by = f"{local} GPUs" if size == 1 else f"{size} nodes of {local} GPUs, below its {counted}"
    notes = [f"the first {nodes:,} of {whole:,} nodes"] if nodes < whole else []
    notes += [f"a column is a {word}, numbered, with its {held_by}", "a line shows the busiest of its cables"]
    return Sketch(vertices, tuple(cables), "; ".join(notes))


def _both_ways(links: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{link}{way}" for link in links for way in "><")


def _leaves(pod: int, rails: int) -> str:
    return f"leaf{pod}" if rails == 1 else f"leaves {pod}.0 to {pod}.{rails - 1}"


def _add(  # noqa: PLR0917 - a vertex
    vertices: dict[str, Vertex], name: str, kind: str, x: float, y: float, label: str | None = None
) -> str:
    vertices[name] = Vertex(name, kind, x, y, label)
    return name


def _slices(cluster: Cluster, torus: Torus) -> Sketch:
    """Slices side by side; a third axis goes into depth, that is, up and to the right."""
    vertices: dict[str, Vertex] = {}
    cables: list[Cable] = []
    chips = torus.size
    slices = max(min(cluster.nodes, _MOST_GPUS // chips), 1)
    shape = (1,) * (3 - len(torus.shape)) + torus.shape[-3:]
    depth, height, width = shape
    step = 0.8 / max(depth, 1) if depth > 1 else 0.0
    for piece in range(slices):
        for chip in range(chips):
            z, y, x = (0,) * (3 - len(torus.shape)) + torus.coordinates(chip)[-3:]
            left = piece * (width + 1.0)
            _add(vertices, f"gpu{piece * chips + chip}", "gpu", left + x + z * step, height - 1 - y + z * step)
        first = piece * chips
        for (chip, axis, way), other in torus.hops():
            if way == "-":
                continue
            links = (f"ici{first + chip}.{axis}+", f"ici{first + other}.{axis}-")
            wraps = abs(torus.coordinates(chip)[axis] - torus.coordinates(other)[axis]) > 1
            cables.append(Cable(f"gpu{first + chip}", f"gpu{first + other}", links, stub=wraps))
    if slices > 1:
        middle = (slices * (width + 1.0) - 2.0) / 2
        network = _add(vertices, "network", "switch", middle, height + 1.0)
        for piece in range(slices):
            # one line for all NICs of a slice: those of its first chip stand for them
            place = _add(vertices, f"slice {piece}", "switch", piece * (width + 1.0) + (width - 1) / 2, height + 0.2)
            cables.append(Cable(place, network, (f"nic{piece * chips}>", f"nic{piece * chips}<")))
    note = f"the first {slices} of {cluster.nodes} slices" if slices < cluster.nodes else ""
    return Sketch(vertices, tuple(cables), note)


def _dragonfly(cluster: Cluster, nodes: int, note: str) -> Sketch:
    """Groups on a circle, the nodes of each around it; nodes stand for their GPUs."""
    fabric, local = cluster.fabric, cluster.gpus_per_node
    assert fabric is not None, "a dragonfly is a fabric"
    size = fabric.pod_nodes or nodes
    groups = -(-nodes // size)
    vertices: dict[str, Vertex] = {}
    cables: list[Cable] = []
    for group in range(groups):
        angle = pi / 2 - 2 * pi * group / groups
        name = _add(vertices, f"group {group}", "switch", cos(angle), sin(angle))
        members = range(group * size, min((group + 1) * size, nodes))
        for index, node in enumerate(members):
            turn = angle + (index - (len(members) - 1) / 2) * 2 * pi / groups / (len(members) + 1)
            place = _add(vertices, f"node {node}", "gpu", 1.45 * cos(turn), 1.45 * sin(turn))
            ends = tuple(f"nic{rank}{way}" for rank in range(node * local, (node + 1) * local) for way in "><")
            cables.append(Cable(place, name, ends))
    for a in range(groups):
        cables += [
            Cable(f"group {a}", f"group {b}", (f"group{a}.{b}>", f"group{b}.{a}>")) for b in range(a + 1, groups)
        ]
    return Sketch(vertices, tuple(cables), note)


def _graph(cluster: Cluster) -> Sketch:
    import networkx as nx  # noqa: PLC0415 - a third of a second that only custom topologies need

    assert cluster.graph is not None, "drawn for graphs only"
    graph: nx.Graph[str] = nx.Graph()
    for edge in cluster.graph.edges:
        graph.add_edge(edge.source, edge.target)
    gpus = {f"gpu{rank}" for rank in range(cluster.gpus)}
    away = {name: int(hops) for name, hops in nx.multi_source_dijkstra_path_length(graph, gpus).items()}
    height = max(away.values())
    # where GPUs hang on switches only, switches stand in levels above them
    levels = 0 < height <= 4 and all(away[a] != away[b] for a, b in graph.edges)
    if levels:
        ordered = dict(_spread_levels(away))
    else:
        # a circle to begin with, in order of the names, so that a ring stays one
        names = sorted((name for name in graph if away[name] == height), key=_by_number)
        circle = {n: (cos(2 * pi * i / len(names)), sin(2 * pi * i / len(names))) for i, n in enumerate(names)}
        for name in sorted(graph, key=lambda name: (-away[name], _by_number(name))):
            if name not in circle:  # outside of what it hangs on, side by side with the others there
                x, y = next(circle[other] for other in graph[name] if other in circle)
                turn = len(circle) * 2.4
                circle[name] = (1.4 * x + 0.05 * cos(turn), 1.4 * y + 0.05 * sin(turn))
        is_ring = all(degree <= 2 for _, degree in graph.degree)
        found = circle if is_ring else nx.spring_layout(graph, pos=circle, seed=1, iterations=200)
        ordered = {name: (float(x), float(y)) for name, (x, y) in found.items()}
    vertices = {name: Vertex(name, "gpu" if name in gpus else "switch", x, y) for name, (x, y) in ordered.items()}
    cables = tuple(Cable(a, b, (f"{a}>{b}", f"{b}>{a}")) for a, b in graph.edges)
    return Sketch(vertices, cables)


def _spread_levels(away: dict[str, int]) -> Iterator[tuple[str, tuple[float, float]]]:
    """Each level as wide as the widest, in order of its numbers."""
    for level in set(away.values()):
        names = sorted((name for name in away if away[name] == level), key=_by_number)
        for index, name in enumerate(names):
            yield name, ((index + 0.5) / len(names), float(level))


def _by_number(name: str) -> tuple[str, tuple[int, ...]]:
    digits = "".join(c if c.isdigit() else " " for c in name)
    return name.rstrip("0123456789."), tuple(int(part) for part in digits.split())
