import json
import re

import networkx
import pytest

from simpar.errors import ClusterError
from simpar.hardware.cluster import (
    Cluster,
    Fabric,
    NodeLink,
    cluster_presets,
    fabric_names,
    named_fabric,
    named_node_link,
    node_link_names,
)
from simpar.hardware.device import ALIASES, device, device_names


def test_spec_names_device_nodes_and_gpus():
    cluster = Cluster.parse("h100-sxm:64x8")
    assert (cluster.device.name, cluster.nodes, cluster.gpus_per_node, cluster.gpus) == (
        "h100-sxm",
        64,
        8,
        512,
    )
    assert cluster.fabric == named_fabric("ndr400")
    assert cluster.node_link == named_node_link("nvlink4")
    assert Cluster.parse("h100-sxm:4") == Cluster(device="h100-sxm", nodes=1, gpus_per_node=4)
    assert Cluster.parse("h100-sxm:2x8@efa-p5").fabric == named_fabric("efa-p5")
    assert Cluster.model_validate("h100-sxm:2x8") == Cluster.parse("h100-sxm:2x8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100-sxm:64y8", "write device:nodes×GPUs with an x, as in 'h100-sxm:64x8'"),
        ("h100-sxm", "'h100-sxm:8' for one node"),
        ("dgx-h10", "did you mean 'dgx-h100'?"),
        ("h100-sxn:8", "unknown device 'h100-sxn'; did you mean 'h100-sxm'?"),
        ("h100-sxm:0x8", "nodes: 0 should be greater than or equal to 1 (in cluster 'h100-sxm:0x8')"),
        ("h100-sxm:2x0", "gpus_per_node: 0 should be greater than or equal to 1"),
        ("h100-sxm:-2x8", "write device:nodes×GPUs"),
        ("h100-sxm:2x8@ndr40", "unknown fabric 'ndr40'; did you mean 'ndr400'?"),
    ],
)
def test_a_wrong_spec_says_what_is_right(text, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        Cluster.parse(text)


@pytest.mark.parametrize("name", device_names())
def test_every_catalog_device_has_a_usual_node_and_network(name):
    cluster = Cluster(device=name, nodes=2)
    assert cluster.node_link in [named_node_link(link) for link in node_link_names()]
    assert cluster.nic_bytes_per_s > 0


@pytest.mark.parametrize(
    ("spec", "per_gpu_bytes_per_s"),
    [
        ("h100-sxm:2x8", 400e9 / 8 * 0.98),
        ("a100-sxm:2x8", 200e9 / 8 * 0.97),
        ("a100-sxm:2x8@efa-p4de", 4 * 100e9 / 8 * 0.954 / 8),
        ("h100-sxm:2x8@efa-p5", 32 * 100e9 / 8 * 0.98 / 8),
        ("h100-sxm:10x1", 400e9 / 8 * 0.98),
    ],
)
def test_a_gpu_gets_its_share_of_the_nics(spec, per_gpu_bytes_per_s):
    assert Cluster.parse(spec).nic_bytes_per_s == pytest.approx(per_gpu_bytes_per_s)


def test_without_a_fabric_there_is_no_network_bandwidth():
    assert Cluster(device="h100-sxm", fabric=None).nic_bytes_per_s == 0


def test_a_base_is_varied_by_field():
    cluster = Cluster(
        device={"base": "h100-sxm", "memory_bytes": 96 * 2**30},
        nodes=2,
        node_link={"base": "nvlink4", "nvls": False},
        fabric={"base": "ndr400", "nic_gbps": 800},
    )
    assert cluster.device == device("h100-sxm").replace(memory_bytes=96 * 2**30)
    assert cluster.node_link == named_node_link("nvlink4").replace(nvls=False)
    assert cluster.fabric == named_fabric("ndr400").replace(nic_gbps=800)


def test_what_follows_from_the_device_follows_a_new_device():
    h100 = Cluster.parse("h100-sxm:4x8")
    assert h100.replace(device="a100-sxm") == Cluster.parse("a100-sxm:4x8")
    chosen = h100.replace(fabric="efa-p5")
    assert chosen.replace(device="a100-sxm").fabric == named_fabric("efa-p5")
    assert Cluster.parse("h100-sxm:8").replace(nodes=2) == Cluster.parse("h100-sxm:2x8")


def test_a_cluster_survives_its_own_json():
    cluster = Cluster(device="l40s", nodes=2, graph=[(f"gpu{i}", "switch", 100, 1) for i in range(16)])
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": 2, "fabric": None}, "2 nodes need a fabric between them; name one of ndr400"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"gpus_per_node": -8}, "greater than or equal to 1"),
        ({"node_link": "nvlink44"}, "unknown node link 'nvlink44'; did you mean 'nvlink4'?"),
        ({"fabric": {"base": "ndr"}}, "unknown fabric 'ndr'"),
        ({"fabric": {"base": "ndr400", "nic_gps": 1}}, "nic_gps: unknown key; did you mean 'nic_gbps'?"),
        ({"fabric": {"base": "ndr400", "nic_gbps": 0}}, "greater than 0"),
        ({"fabric": {"base": "ndr400", "efficiency": 1.2}}, "less than or equal to 1"),
        ({"fabric": {"base": "ndr400", "oversubscription": 0.5}}, "greater than or equal to 1"),
        ({"fabric": {"base": "ndr400", "oversubscription": 2}}, "say how many nodes share a leaf"),
        ({"node_link": {"base": "nvlink4", "smoothness": 1.5}}, "less than or equal to 1"),
        ({"node_link": {"base": "nvlink4", "bandwidth_bytes_per_s": 451e9}}, "exceeds nominal_bytes_per_s"),
        ({"node_link": {"base": "nvlink4", "reach": 4}}, "reach and beyond belong together"),
        ({"devise": "x"}, "devise: unknown key; did you mean 'device'?"),
    ],
)
def test_a_wrong_field_says_what_is_right(fields, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        Cluster(**{"device": "h100-sxm", **fields})


def test_a_device_of_ones_own_needs_a_node_link():
    own = device("h100-sxm").replace(name="my-gpu")
    with pytest.raises(ClusterError, match="device 'my-gpu' has no usual node_link; name one of nvlink2"):
        Cluster(device=own)
    assert Cluster(device=own, node_link="nvlink4").gpus == 8


def test_the_longest_prefix_of_a_device_name_counts():
    card = device("a100-sxm").replace(name="a100-pcie-80gb")
    assert Cluster(device=card).node_link == named_node_link("pcie4")
    assert Cluster(device=card.replace(name="a100")).node_link == named_node_link("nvlink3")


@pytest.mark.parametrize("name", cluster_presets())
def test_every_preset_is_a_cluster(name):
    spec = cluster_presets()[name].rsplit(": ", 1)[1]
    kind = spec.split(":")[0]
    if kind not in (*device_names(), *ALIASES):
        pytest.skip(f"the catalog has no device {kind}")
    assert Cluster.parse(name) == Cluster.parse(spec)


@pytest.mark.parametrize("name", node_link_names())
def test_every_node_link_states_itself_and_its_source(name):
    link = named_node_link(name)
    assert link.about
    assert link.sources
    assert 0.02 < link.bandwidth_bytes_per_s / link.nominal_bytes_per_s <= 1
    assert 0 < link.base_latency_s < 1e-4
    assert link.errors.median <= link.errors.p90


@pytest.mark.parametrize("name", fabric_names())
def test_every_fabric_states_itself_and_its_source(name):
    fabric = named_fabric(name)
    assert fabric.about
    assert fabric.sources
    assert 0.7 < fabric.efficiency <= 1
    assert fabric.errors.median_large <= fabric.errors.p90_large


def test_wide_groups_use_the_far_path_of_a_pcie_server():
    link = named_node_link("pcie-l40s")
    assert [link.over(g).bandwidth_bytes_per_s / 1e9 for g in (1, 2, 3, 4, 5, 8)] == pytest.approx(
        [23.4988, 23.4988, 4.9435, 4.9435, 1.535, 1.535]
    )
    assert [link.between(0, j).bandwidth_bytes_per_s / 1e9 for j in (1, 2, 3, 4, 7)] == pytest.approx(
        [23.4988, 4.9435, 4.9435, 1.535, 1.535]
    )
    assert link.between(6, 7) == link
    assert link.between(1, 2) == link.beyond  # neighbours of two switches


def test_a_graph_comes_as_edges_node_link_data_or_file(tmp_path):
    edges = [["gpu0", "sw", 100, 1.5], ["gpu1", "sw", 100, 1.5]]
    data = {
        "directed": False,
        "multigraph": False,
        "nodes": [{"id": "gpu0"}, {"id": "gpu1"}, {"id": "sw"}],
        "edges": [
            {"source": a, "target": b, "bandwidth_gbps": w, "latency_us": t, "colour": "red"} for a, b, w, t in edges
        ],
    }
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(data))
    old = {**{k: v for k, v in data.items() if k != "edges"}, "links": data["edges"]}
    made = networkx.node_link_graph(data, edges="edges")
    given = (edges, data, old, path, str(path), made)
    graphs = [Cluster(device="h100-sxm", gpus_per_node=2, graph=g).graph for g in given[:-1]]
    assert graphs == [graphs[0]] * 5
    assert Cluster(device="h100-sxm", gpus_per_node=2, graph=made).graph.build().edges == graphs[0].build().edges
    assert graphs[0].edges[1].bandwidth_gbps == 100


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        ([("gpu0", "sw", 100)], "the graph lacks gpu1 and 0 more of its 2 GPUs; name the GPUs gpu0 to gpu1"),
        ([("gpu0", "gpu0", 100), ("gpu1", "gpu0", 1)], "an edge from 'gpu0' to itself carries nothing"),
        ([("gpu0", "gpu1", 0)], "greater than 0"),
        ([("gpu0", "gpu1", 100, -1)], "greater than or equal to 0"),
        ([("gpu0", "gpu1")], "bandwidth_gbps"),
        ([], "at least 1 item"),
        ("/no/such.json", "graph file '/no/such.json' cannot be read"),
    ],
)
def test_a_wrong_graph_says_what_is_right(graph, message):
    with pytest.raises(ClusterError, match=re.escape(message)):
        Cluster(device="h100-sxm", gpus_per_node=2, graph=graph)


def test_a_graph_file_must_be_json(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text("gpu0 gpu1")
    with pytest.raises(ClusterError, match="is not JSON"):
        Cluster(device="h100-sxm", gpus_per_node=2, graph=path)


def test_descriptions_are_frozen_and_equal_by_value():
    assert NodeLink.model_validate(named_node_link("nvlink4").model_dump()) == named_node_link("nvlink4")
    assert hash(Fabric(nic_gbps=400)) == hash(Fabric(nic_gbps=400))
    with pytest.raises(ClusterError, match="frozen"):
        Cluster.parse("h100-sxm:8").nodes = 2
