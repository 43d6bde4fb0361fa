"""Named topologies: counted parts, conserved bytes, and the arithmetic fabrics against the same networks as graphs."""

import json
import re
from collections import Counter
from itertools import combinations
from time import process_time

import networkx as nx
import pytest

from simpar.cost.collective import p2p_cost
from simpar.errors import ClusterError
from simpar.hardware.cluster import Cluster
from simpar.hardware.fabric import Network
from simpar.hardware.graph import Graph
from simpar.hardware.topologies import TOPOLOGIES, cables

RATE = {"bandwidth_gbps": 400}
EXAMPLES = {
    "ring": {"gpus": 6, **RATE},
    "line": {"gpus": 6, **RATE},
    "fully_connected": {"gpus": 6, **RATE},
    "star": {"gpus": 6, **RATE},
    "torus": {"shape": [3, 4], **RATE},
    "leaf_spine": {"leaves": 3, "gpus_per_leaf": 2, "spines": 2, "uplink_gbps": 200, **RATE},
    "dragonfly": {
        "groups": 4,
        "routers_per_group": 3,
        "gpus_per_router": 1,
        "local_gbps": 200,
        "global_gbps": 100,
        **RATE,
    },
}
# GPUs, switches, cables
COUNTS = {
    "ring": (6, 0, 6),
    "line": (6, 0, 5),
    "fully_connected": (6, 0, 15),
    "star": (6, 1, 6),
    "torus": (12, 0, 24),
    "leaf_spine": (6, 5, 6 + 3 * 2),
    "dragonfly": (12, 12, 12 + 4 * 3 + 6),
}


def graph(name: str, **changes: object) -> Graph:
    return Graph.model_validate({"topology": name, **EXAMPLES[name], **changes})


def network(name: str) -> Network:
    return Network(Cluster(device="h100-sxm", gpus_per_node=COUNTS[name][0], graph=graph(name)))


def test_every_topology_has_an_example():
    assert set(EXAMPLES) == set(COUNTS) == set(TOPOLOGIES)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_parts_are_as_many_as_they_should_be(name):
    made = nx.MultiGraph()
    made.add_edges_from((source, target) for source, target, *_ in cables({"topology": name, **EXAMPLES[name]}))
    gpus = [node for node in made if node.startswith("gpu")]
    assert (len(gpus), len(made) - len(gpus), made.number_of_edges()) == COUNTS[name]
    assert nx.is_connected(made)


def test_a_dragonfly_is_three_hops_wide():
    made = nx.Graph(
        (source, target) for source, target, *_ in cables({"topology": "dragonfly", **EXAMPLES["dragonfly"]})
    )
    routers = made.subgraph(node for node in made if node.startswith("router"))
    assert nx.diameter(routers) == 3
    assert {made.degree(node) for node in routers} == {1 + 2 + 1}


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("every_pair", [False, True])
def test_what_enters_a_part_leaves_it(name, every_pair):
    net, size = network(name), COUNTS[name][0]
    ranks = range(size)
    loads = net.loads(ranks, 30.0, 0.0, every_pair=every_pair)
    into, out = Counter(), Counter()
    for link, carried in loads.items():
        source, target = link.name.split(">")
        into[target] += carried
        out[source] += carried
    for part in {*into, *out}:
        assert into[part] == pytest.approx(out[part])
    # whatever passes through it, every GPU also sends and receives its own 30 bytes
    longest = {(a, b): sum(share for _, share in net.spread(a, b)) for a in ranks for b in ranks if a != b}
    if every_pair:
        assert sum(loads.values()) == pytest.approx(sum(longest.values()) * 30.0 / (size - 1))
    else:
        assert sum(loads.values()) == pytest.approx(30.0 * sum(longest[a, (a + 1) % size] for a in ranks))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_shares_of_equal_ways_add_up(name):
    net, size = network(name), COUNTS[name][0]
    for a, b in combinations(range(size), 2):
        ways = [(link.name.split(">"), share) for link, share in net.spread(a, b)]
        assert sum(share for (source, _), share in ways if source == f"gpu{a}") == pytest.approx(1.0)
        assert sum(share for (_, target), share in ways if target == f"gpu{b}") == pytest.approx(1.0)
        shortest = nx.shortest_path_length(net_graph(name), f"gpu{a}", f"gpu{b}")
        assert sum(share for _, share in ways) == pytest.approx(shortest)


def net_graph(name: str) -> nx.Graph:
    return nx.Graph((source, target) for source, target, *_ in cables({"topology": name, **EXAMPLES[name]}))


def test_two_spines_take_half_each():
    net = network("leaf_spine")
    shares = {link.name: share for link, share in net.spread(0, 5)}
    assert shares["leaf0>spine0"] == shares["leaf0>spine1"] == shares["spine1>leaf2"] == 0.5
    assert shares["gpu0>leaf0"] == 1.0


def test_one_message_takes_one_of_parallel_cables():
    twice = [("gpu0", "gpu1", 100, 1), ("gpu0", "gpu1", 300, 1)]
    cluster = Cluster(device="h100-sxm", gpus_per_node=2, graph=twice)
    net = Network(cluster)
    assert net.route(0, 1)[0].capacity_bytes_per_s == 400e9 / 8
    assert net.message_bytes_per_s(0, 1) == 300e9 / 8
    cost = p2p_cost(1e9, 0, 1, cluster, network=net)
    assert cost.total_s > 1e9 / (300e9 / 8)


def dragonfly(nodes: int, routing: str = "minimal", oversubscription: float = 1.0) -> Network:
    fabric = {
        "base": "ndr400",
        "topology": "dragonfly",
        "pod_nodes": 2,
        "rail_optimized": False,
        "routing": routing,
        "oversubscription": oversubscription,
    }
    return Network(Cluster(device="h100-sxm", nodes=nodes, gpus_per_node=1, fabric=fabric))


@pytest.mark.parametrize("every_pair", [False, True])
def test_an_arithmetic_dragonfly_equals_its_graph(every_pair):
    # one router a group: GPUs below it, a cable between each two routers
    fields = {"groups": 4, "routers_per_group": 1, "gpus_per_router": 2, "local_gbps": 1, "global_gbps": 1, **RATE}
    star = Network(Cluster(device="h100-sxm", nodes=8, gpus_per_node=1, graph={"topology": "dragonfly", **fields}))
    theirs = {
        re.sub(r"router(\d)\.0>router(\d)\.0", r"group\1.\2>", link.name): nbytes
        for link, nbytes in star.loads(range(8), 0.0, 12.0, every_pair=every_pair).items()
        if "gpu" not in link.name
    }
    ours = dragonfly(8).loads(range(8), 0.0, 12.0, every_pair=every_pair)
    assert {link.name: nbytes for link, nbytes in ours.items() if link.name.startswith("group")} == pytest.approx(
        theirs
    )


def test_a_detour_doubles_traffic_and_spreads_it():
    short, long = dragonfly(12), dragonfly(12, "valiant")
    assert [link.name for link, _ in short.spread(0, 4)] == ["nic0>", "group0.2>", "nic4<"]
    ways = {link.name: share for link, share in long.spread(0, 4) if link.name.startswith("group")}
    assert ways == {f"group{a}.{b}>": 0.25 for m in (1, 3, 4, 5) for a, b in ((0, m), (m, 2))}
    assert len(long.spread(0, 1)) == 2
    direct, spread = (net.loads(range(12), 0.0, 8.0) for net in (short, long))

    def on_bundles(loads):
        return [nbytes for link, nbytes in loads.items() if link.name.startswith("group")]

    assert sum(on_bundles(spread)) == pytest.approx(2 * sum(on_bundles(direct)))
    assert max(on_bundles(spread)) < max(on_bundles(direct))


@pytest.mark.parametrize("ranks", [range(12), range(0, 12, 2), range(1, 9), (0, 1, 7), (3, 2, 9, 8, 11), (0, 11)])
@pytest.mark.parametrize("every_pair", [False, True])
def test_detours_of_a_group_are_those_of_its_messages(ranks, every_pair):
    direct, spread = dragonfly(12), dragonfly(12, "valiant")
    expected = Counter()
    for link, nbytes in direct.loads(ranks, 0.0, 8.0, every_pair=every_pair).items():
        if pair := re.fullmatch(r"group(\d+)\.(\d+)>", link.name):
            a, b = (2 * int(group) for group in pair.groups())  # a rank of each
            for way, share in spread.spread(a, b):
                expected[way.name] += nbytes * share * way.name.startswith("group")
    found = spread.loads(ranks, 0.0, 8.0, every_pair=every_pair)
    found = {link.name: nbytes for link, nbytes in found.items() if link.name.startswith("group")}
    assert found == pytest.approx(+expected)


def test_detours_of_an_all_to_all_over_many_groups_are_counted_bundle_by_bundle():
    net = dragonfly(600, "valiant")
    start = process_time()
    loads = net.loads(range(600), 0.0, 8.0, every_pair=True)
    assert sum(link.name.startswith("group") for link in loads) == 300 * 299
    assert process_time() - start < 10.0  # 27 million ways of single messages would take longer


def test_bundles_divide_what_leaves_a_group():
    bundles = [dragonfly(8, oversubscription=over).spread(0, 2)[1][0].capacity_bytes_per_s for over in (1.0, 2.0)]
    nic = 400e9 / 8 * 0.98
    assert bundles == pytest.approx([2 * nic / 3, nic / 3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topology": "rng"}, "unknown topology 'rng'; did you mean 'ring'?"),
        ({"topology": "ring", "gpu": 3}, "topology 'ring' has no parameter 'gpu'; did you mean 'gpus'?"),
        ({"topology": "ring"}, "topology 'ring' needs gpus and bandwidth_gbps; add them"),
        ({"topology": "ring", "gpus": 2.5, **RATE}, "gpus is 2.5, but should be a whole number of at least 1"),
        ({"topology": "torus", "shape": [4, 0], **RATE}, "shape[1] is 0, but should be"),
        ({"topology": "fully_connected", "gpus": 5000, **RATE}, "is too large for a graph; describe it by node_link"),
        ({"topology": "ring", "gpus": 2, "bandwidth_gbps": -1}, "edges.0.bandwidth_gbps: -1 should be greater than 0"),
        (
            [["gpu0", "gpu1", 1, 2, 3]],
            "an edge of 5 parts has too many; write [source, target, bandwidth_gbps, latency_us]",
        ),
    ],
)
def test_a_wrong_topology_says_what_is_right(fields, message):
    with pytest.raises(ClusterError) as error:
        Graph.model_validate(fields)
    assert message in str(error.value)


def test_a_wrong_edge_in_a_file_names_the_file_and_nothing_else(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([["gpu0", "gpu1", 100], ["gpu1", "gpu0", -5, 1]]), encoding="utf-8")
    with pytest.raises(ClusterError) as error:
        Cluster(device="h100-sxm", gpus_per_node=2, graph=str(path))
    assert str(error.value) == f"graph: graph file '{path}': edges.1.bandwidth_gbps: -5 should be greater than 0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"topology": "dragonfly", "rail_optimized": False},
            "a dragonfly is made of groups; say how many nodes each has",
        ),
        ({"topology": "dragonfly", "pod_nodes": 4}, "a dragonfly has no rails; set rail_optimized=false"),
        ({"routing": "valiant"}, "routing 'valiant' belongs to topology 'dragonfly', not 'fat_tree'"),
    ],
)
def test_a_wrong_dragonfly_says_what_is_right(changes, message):
    with pytest.raises(ClusterError) as error:
        Cluster(device="h100-sxm", nodes=8, fabric={"base": "ndr400", **changes})
    assert message in str(error.value)
