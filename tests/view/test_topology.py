"""Drawings of clusters: every cable between drawn parts, links that exist, loads that are the trace's."""

import pytest

from simpar.hardware.cluster import Cluster
from simpar.hardware.fabric import Network
from simpar.job import Job
from simpar.model.presets import preset
from simpar.simulation import simulate
from simpar.view.sketch import sketch
from simpar.view.topology import loads, topology_figure

LEAVES = {"base": "ndr400", "pod_nodes": 2, "oversubscription": 2}
DRAGONFLY = {"base": "ndr400", "pod_nodes": 2, "topology": "dragonfly", "rail_optimized": False}
CLUSTERS = {
    "one node": Cluster.parse("h100-sxm:8"),
    "nodes": Cluster.parse("h100-sxm:4x8"),
    "leaves": Cluster(device="h100-sxm", nodes=4, fabric=LEAVES),
    "columns": Cluster.parse("h100-sxm:16x8"),
    "columns below leaves": Cluster(device="h100-sxm", nodes=16, fabric={**LEAVES, "pod_nodes": 4}),
    "columns below shared leaves": Cluster(
        device="h100-sxm", nodes=16, fabric={**LEAVES, "pod_nodes": 4, "rail_optimized": False}
    ),
    "pods": Cluster(device="h100-sxm", nodes=132, fabric={**LEAVES, "pod_nodes": 4}),
    "shared leaves": Cluster(device="h100-sxm", nodes=4, fabric={**LEAVES, "rail_optimized": False}),
    "dragonfly": Cluster(device="h100-sxm", nodes=6, fabric=DRAGONFLY),
    "slices": Cluster.parse("tpu-v5e:2x4x4"),
    "cube": Cluster.parse("tpu-v5p:4x4x4"),
    "ring": Cluster(device="h100", gpus_per_node=6, graph={"topology": "ring", "gpus": 6, "bandwidth_gbps": 400}),
    "tree": Cluster(
        device="h100",
        gpus_per_node=4,
        graph={
            "topology": "leaf_spine",
            "leaves": 2,
            "gpus_per_leaf": 2,
            "spines": 2,
            "bandwidth_gbps": 400,
            "uplink_gbps": 100,
        },
    ),
}
MODEL = preset("gpt2").replace(layers=2)


@pytest.mark.parametrize("name", CLUSTERS)
def test_every_cable_joins_drawn_parts_that_lie_apart(name):
    drawn = sketch(CLUSTERS[name])
    assert drawn.cables
    for cable in drawn.cables:
        a, b = drawn.vertices[cable.a], drawn.vertices[cable.b]
        assert (a.x, a.y) != (b.x, b.y)
    assert len({(vertex.x, vertex.y) for vertex in drawn.vertices.values()}) == len(drawn.vertices)


@pytest.mark.parametrize("name", [name for name in CLUSTERS if name not in ("slices",)])
def test_every_link_that_a_step_uses_is_drawn(name):
    cluster = CLUSTERS[name]
    used = {link.name for link in Network(cluster).loads(range(cluster.gpus), 1.0, 1.0, every_pair=True)}
    drawn = {link for cable in sketch(cluster).cables for link in cable.links}
    if name == "dragonfly":  # a node stands for its GPUs
        used = {link for link in used if not link.startswith("gpu")}
    assert used <= drawn


def test_levels_are_aligned():
    drawn = sketch(CLUSTERS["leaves"])
    heights = {kind: {v.y for n, v in drawn.vertices.items() if n.startswith(kind)} for kind in ("gpu", "leaf", "node")}
    assert all(len(found) == 1 for found in heights.values())


def test_colours_follow_the_load():
    cluster = CLUSTERS["ring"]
    trace = simulate(Job(model=MODEL, cluster=cluster, plan={"tp": 2})).trace
    busy = loads(trace)
    used = {link.name: link for link in trace.links}
    for name, share in busy.items():
        assert share == pytest.approx(used[name].nbytes / used[name].capacity_bytes_per_s / trace.step_s)
        assert 0 < share <= 1 + 1e-9
    figure = topology_figure(cluster, trace)
    lines = [drawn for drawn in figure.data if drawn.mode == "lines"]
    assert len(lines) >= 1
    assert len({drawn.line.color for drawn in lines}) == len(lines)
    assert any(drawn.marker.showscale for drawn in figure.data if drawn.mode == "markers")
    assert not any(
        drawn.marker.showscale for drawn in topology_figure(cluster, dark=True).data if drawn.mode == "markers"
    )


def test_ranks_that_were_not_simulated_look_like_their_representatives():
    cluster = CLUSTERS["nodes"]
    trace = simulate(Job(model=MODEL, cluster=cluster, plan={})).trace
    figure = topology_figure(cluster, trace)
    (hover,) = [drawn for drawn in figure.data if drawn.text is not None and "busy" in str(drawn.text[0])]
    assert len({text.split("<br>")[1] for text in hover.text if "node" in text}) == 1


def test_columns_of_large_clusters_hold_every_gpu_once():
    for name, columns, word in (("columns", 16, "node"), ("pods", 33, "pod")):
        drawn = sketch(CLUSTERS[name])
        held = [vertex.name for vertex in drawn.vertices.values() if vertex.kind == "gpu"]
        ends = [[int(part) for part in vertex.split() if part.isdigit()] for vertex in held]
        assert len(held) == columns
        assert sorted(gpu for a, b in ends for gpu in range(a, b + 1)) == list(range(CLUSTERS[name].gpus))
        assert f"a column is a {word}, numbered, with its" in drawn.note


def test_a_line_of_a_column_shows_the_busiest_of_its_cables():
    trace = simulate(Job(model=MODEL, cluster=CLUSTERS["columns"], plan={"tp": 2})).trace
    figure = topology_figure(CLUSTERS["columns"], trace)
    (hover,) = (drawn.text for drawn in figure.data if drawn.text is not None and "busy" in str(drawn.text[0]))
    busiest = max(share for name, share in loads(trace).items() if name.startswith("gpu"))
    assert busiest > 0
    columns = [text.split("<br>")[1] for text in hover if text.startswith("GPUs")]
    assert columns == [f"busy {busiest:.1%} of the step"] * 16


def test_names_lie_beside_cables():
    (gpus,) = (drawn for drawn in topology_figure(CLUSTERS["one node"]).data if drawn.text and drawn.text[0] == "gpu0")
    assert set(gpus.textposition) == {"top center"}  # all cables lead down to the node
    (node,) = (drawn for drawn in topology_figure(CLUSTERS["one node"]).data if drawn.text == ("node 0",))
    assert node.textposition == ("bottom center",)


def test_very_large_clusters_are_drawn_in_part():
    drawn = sketch(Cluster.parse("h100-sxm:512x8"))
    assert drawn.note.startswith("the first 128 of 512 nodes")
    assert "the first 128" in topology_figure(Cluster.parse("h100-sxm:512x8"), title="x").layout.title.subtitle.text
