from collections import Counter
from itertools import permutations
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpar.errors import ClusterError
from simpar.hardware.cluster import Cluster, named_node_link
from simpar.hardware.fabric import Network, span

NIC = 400e9 / 8 * 0.98
NVLINK = named_node_link("nvlink4").bandwidth_bytes_per_s
MESSAGE_S = named_node_link("nvlink4").p2p_latency_s


def network(nodes=8, gpus=8, **fabric):
    return Network(Cluster(device="h100-sxm", nodes=nodes, gpus_per_node=gpus, fabric={"base": "ndr400", **fabric}))


def names(route):
    return [link.name for link in route]


def graph_network(edges, gpus=4, **fields):
    return Network(
        Cluster(device="h100-sxm", gpus_per_node=gpus, graph={"edges": edges, **fields} if fields else edges)
    )


def edge(source, target, bandwidth_gbps, latency_us):
    return {"source": source, "target": target, "bandwidth_gbps": bandwidth_gbps, "latency_us": latency_us}


def test_inside_a_node_a_message_leaves_and_enters_by_node_links():
    assert network().route(11, 13) == (("gpu11>", NVLINK), ("gpu13<", NVLINK))
    assert network().route(5, 5) == ()


def test_between_nodes_a_message_leaves_and_enters_by_nics():
    route = network().route(3, 12)
    assert names(route) == ["nic3>", "nic12<"]
    assert [link.capacity_bytes_per_s for link in route] == pytest.approx([NIC, NIC])


def test_a_rail_optimised_pod_keeps_a_rail_on_its_leaf():
    rails = network(pod_nodes=2, oversubscription=2)
    assert names(rails.route(3, 11)) == ["nic3>", "nic11<"]  # node 0 to 1, rail 3
    plain = network(pod_nodes=2, oversubscription=2, pxn=False)
    assert names(plain.route(3, 12)) == ["nic3>", "leaf0.3>", "leaf0.4<", "nic12<"]  # other rail
    assert names(rails.route(3, 12)) == ["gpu3>", "gpu4<", "nic4>", "nic12<"]  # by the own node's GPU on that rail
    route = rails.route(3, 19)  # node 0 to 2, rail 3, other pod
    assert names(route) == ["nic3>", "leaf0.3>", "leaf1.3<", "nic19<"]
    assert route[1].capacity_bytes_per_s == pytest.approx(2 * NIC / 2)


def test_a_shared_leaf_keeps_its_whole_pod():
    shared = network(pod_nodes=2, oversubscription=4, rail_optimized=False)
    assert names(shared.route(3, 12)) == ["nic3>", "nic12<"]
    route = shared.route(3, 19)
    assert names(route) == ["nic3>", "leaf0>", "leaf1<", "nic19<"]
    assert route[1].capacity_bytes_per_s == pytest.approx(2 * 8 * NIC / 4)


@given(st.integers(0, 63), st.integers(0, 63), st.sampled_from([None, 1, 2, 3]), st.booleans())
def test_the_way_back_mirrors_the_way_there(src, dst, pod_nodes, rail_optimized):
    net = network(pod_nodes=pod_nodes, rail_optimized=rail_optimized, pxn=False)
    there, back = net.route(src, dst), net.route(dst, src)
    turned = [name[:-1] + ("<" if name[-1] == ">" else ">") for name in reversed(names(back))]
    assert names(there) == turned
    assert len(set(there)) == len(there) == (0 if src == dst else len(back))


def test_latency_adds_the_network_to_the_library():
    net = network()
    assert net.latency_s(0, 0) == 0
    assert net.latency_s(0, 7) == pytest.approx(MESSAGE_S)
    assert net.latency_s(0, 8) == pytest.approx(MESSAGE_S + 5e-6)


@pytest.mark.parametrize("rank", [-1, 64])
def test_a_rank_outside_the_cluster_is_named(rank):
    with pytest.raises(ClusterError, match=f"rank {rank} is not in the cluster, whose 64 GPUs are ranks 0 to 63"):
        network().route(0, rank)
    with pytest.raises(ClusterError, match=f"rank {rank} is not in the cluster"):
        network().group_links([0, rank])


def test_a_large_network_costs_nothing_until_asked():
    start = perf_counter()
    net = network(nodes=2048, pod_nodes=32, pxn=False)
    built = perf_counter() - start
    assert names(net.route(0, 16383)) == ["nic0>", "leaf0.0>", "leaf63.7<", "nic16383<"]
    assert built < 0.1


def test_a_ring_has_a_route_for_each_step():
    steps = network().ring_route([0, 1, 8])
    assert [names(step) for step in steps] == [["gpu0>", "gpu1<"], ["nic1>", "nic8<"], ["nic8>", "nic0<"]]
    assert network().ring_route([4]) == ()


def test_a_rank_has_links_of_its_own():
    assert names(network().node_links(9)) == ["gpu9>", "gpu9<"]
    assert names(network().nic_links(9)) == ["nic9>", "nic9<"]


def test_group_links_are_those_of_its_members():
    assert sorted(names(network().group_links(range(2)))) == ["gpu0<", "gpu0>", "gpu1<", "gpu1>"]
    assert sorted(names(network().group_links([0, 8]))) == ["nic0<", "nic0>", "nic8<", "nic8>"]
    assert len(network().group_links(range(16))) == 16 * 4
    assert network().group_links([7]) == ()
    assert network().loads(range(16), 5.0, 0.0) == {
        link: 5.0 for link in network().group_links(range(16)) if link.name.startswith("gpu")
    }


@pytest.mark.parametrize("rail_optimized", [True, False])
@pytest.mark.parametrize("ranks", [range(64), range(0, 64, 8), range(16, 48), range(16), range(0, 64, 2)])
def test_ring_loads_are_those_of_one_ring_per_rail(ranks, rail_optimized):
    net = network(pod_nodes=2, oversubscription=2, rail_optimized=rail_optimized)
    expected = Counter()
    for rail in {rank % 8 for rank in ranks}:
        on_rail = [rank for rank in ranks if rank % 8 == rail]
        for step in net.ring_route(on_rail):
            expected.update(dict.fromkeys(step, 10.0))
    loads = net.loads(ranks, 0.0, 10.0)
    assert loads == pytest.approx(expected)


def test_all_to_all_loads_are_those_of_all_pairs():
    net = network(nodes=6, gpus=2, pod_nodes=2, oversubscription=2, rail_optimized=False)
    ranks = [0, 1, 2, 4, 5, 6, 7, 11]  # uneven over nodes and pods
    expected = Counter()
    for a in ranks:
        peers = [b for b in ranks if b // 2 != a // 2]
        for b in peers:
            expected.update(
                dict.fromkeys([link for link in net.route(a, b) if link.name[-1] == ">"], 12.0 / len(peers))
            )
    loads = net.loads(ranks, 0.0, 12.0, every_pair=True)
    assert {link: nbytes for link, nbytes in loads.items() if link.name[-1] == ">"} == pytest.approx(expected)


def test_oversubscription_shows_only_where_routes_leave_a_leaf():
    def busiest_s(net, ranks, **how):
        return max(nbytes / link.capacity_bytes_per_s for link, nbytes in net.loads(ranks, 0.0, 1e9, **how).items())

    flat, thin = network(pod_nodes=2), network(pod_nodes=2, oversubscription=4)
    inside, across = range(16), range(64)
    assert busiest_s(thin, inside, every_pair=True) == busiest_s(flat, inside, every_pair=True)
    assert busiest_s(flat, across, every_pair=True) == pytest.approx(1e9 / NIC)
    # 48 of the 56 peers on other nodes are in other pods; two NICs share a leaf's uplink of half a NIC.
    assert busiest_s(thin, across, every_pair=True) == pytest.approx(2 * 48 / 56 * 1e9 / (NIC / 2))
    # A rail's ring crosses once, so four times less uplink is two times too little for a pod of two.
    assert busiest_s(thin, across) == pytest.approx(2 * busiest_s(flat, across))
    assert busiest_s(network(pod_nodes=2, oversubscription=2), across) == pytest.approx(1e9 / NIC)


RING = [edge(f"gpu{i}", f"gpu{(i + 1) % 4}", 100, 1.0) for i in range(4)]


def test_a_ring_of_four_goes_the_short_way():
    net = graph_network(RING)
    assert names(net.route(0, 1)) == ["gpu0>gpu1"]
    assert names(net.route(0, 3)) == ["gpu0>gpu3"]
    assert len(net.route(0, 2)) == 2
    assert net.route(0, 1)[0].capacity_bytes_per_s == 12.5e9
    assert net.latency_s(0, 2) == pytest.approx(MESSAGE_S + 2e-6)
    assert net.loads(range(4), 6.0, 0.0) == {step[0]: 6.0 for step in net.ring_route(range(4))}


def test_a_directed_ring_goes_round():
    net = graph_network(RING, directed=True)
    assert names(net.route(1, 0)) == ["gpu1>gpu2", "gpu2>gpu3", "gpu3>gpu0"]


def test_a_ring_over_a_line_loads_the_line_with_its_way_back():
    net = graph_network([edge("gpu0", "gpu1", 100, 1), edge("gpu1", "gpu2", 100, 1)], gpus=3)
    loads = {link.name: nbytes for link, nbytes in net.loads([0, 1, 2], 4.0, 0.0).items()}
    assert loads == {"gpu0>gpu1": 4.0, "gpu1>gpu2": 4.0, "gpu2>gpu1": 4.0, "gpu1>gpu0": 4.0}
    loads = {link.name: nbytes for link, nbytes in net.loads([0, 1, 2], 4.0, 0.0, every_pair=True).items()}
    assert loads == {
        "gpu0>gpu1": 4.0,
        "gpu1>gpu2": 4.0,
        "gpu2>gpu1": 4.0,
        "gpu1>gpu0": 4.0,
    }  # 2 of 6 pairs x 2 each


def test_a_graph_over_nodes_carries_the_whole_ring_per_hop():
    star = [edge(f"gpu{i}", "switch", 100, 0.5) for i in range(4)]
    net = Network(Cluster(device="h100-sxm", nodes=2, gpus_per_node=2, graph=star))
    # Two members a node: each NIC would carry half of what one ring's hop carries.
    assert set(net.loads(range(4), 6.0, 3.0).values()) == {6.0}
    assert len(net.loads(range(4), 6.0, 3.0)) == 8
    # An all-to-all of 3 bytes to the 2 peers elsewhere is 1.5 a pair; each GPU has three peers.
    assert set(net.loads(range(4), 1.5, 3.0, every_pair=True).values()) == {4.5}


def test_a_missing_path_names_both_gpus():
    net = graph_network([edge("gpu0", "gpu1", 100, 1), edge("gpu2", "gpu3", 100, 1)])
    assert len(net.route(0, 1)) == 1
    with pytest.raises(ClusterError, match="no path from gpu1 to gpu2; add an edge"):
        net.ring_route([0, 1, 2])


def test_one_way_streets_are_no_way_back():
    net = graph_network([edge("gpu0", "gpu1", 100, 1)], gpus=2, directed=True)
    with pytest.raises(ClusterError, match="no path from gpu1 to gpu0"):
        net.route(1, 0)


def test_latency_decides_the_way_and_hops_break_ties():
    detour = [edge("gpu0", "gpu1", 10, 3), edge("gpu0", "a", 100, 1), edge("a", "gpu1", 100, 1)]
    assert names(graph_network(detour, gpus=2).route(0, 1)) == ["gpu0>a", "a>gpu1"]
    tie = [edge("gpu0", "a", 100, 1), edge("a", "gpu1", 100, 1), edge("gpu0", "gpu1", 10, 2)]
    for order in permutations(tie):
        assert names(graph_network(list(order), gpus=2).route(0, 1)) == ["gpu0>gpu1"]


def test_free_edges_are_not_walked_in_circles():
    free = [
        edge("gpu0", "a", 100, 0),
        edge("a", "b", 100, 0),
        edge("b", "gpu1", 100, 0),
        edge("a", "gpu1", 100, 0),
    ]
    for order in permutations(free):
        assert names(graph_network(list(order), gpus=2).route(0, 1)) == ["gpu0>a", "a>gpu1"]


def test_of_free_ways_the_one_with_fewest_hops_wins():
    ends = [
        "z gpu1",
        "b gpu1",
        "a b",
        "y z",
        "gpu0 x",
        "gpu0 a",
        "x y",
    ]  # an order in which Dijkstra alone errs
    net = graph_network([edge(*pair.split(), 100, 0) for pair in ends], gpus=2)
    assert names(net.route(0, 1)) == ["gpu0>a", "a>b", "b>gpu1"]


def test_parallel_edges_are_one_bundle():
    twice = [edge("gpu0", "gpu1", 100, 2), edge("gpu0", "gpu1", 300, 1), edge("gpu1", "gpu0", 100, 5)]
    net = graph_network(twice, gpus=2)
    assert net.route(0, 1) == (("gpu0>gpu1", 500e9 / 8),)
    assert net.latency_s(0, 1) == pytest.approx(MESSAGE_S + 1e-6)
    assert graph_network(twice, gpus=2, directed=True).route(0, 1) == (("gpu0>gpu1", 400e9 / 8),)


@given(st.integers(0, 40), st.integers(1, 60), st.integers(-20, 20).filter(bool), st.integers(1, 9))
def test_span_of_a_range_equals_counting(start, count, step, gpus_per_node):
    start += 20 * 60  # no negative ranks
    ranks = range(start, start + step * count, step)
    counted = Counter(rank // gpus_per_node for rank in ranks)
    assert span(ranks, gpus_per_node) == (len(counted), max(counted.values()))
    assert span(list(ranks), gpus_per_node) == (len(counted), max(counted.values()))


def test_span_of_nothing_and_of_very_much():
    assert span([], 8) == span(range(0), 8) == (0, 0)
    start = perf_counter()
    assert span(range(0, 10**12, 3), 8) == (125 * 10**9, 3)
    assert perf_counter() - start < 0.01


def test_without_pxn_an_all_to_all_goes_through_the_spine():
    rails = {pxn: network(nodes=4, gpus=4, pod_nodes=2, pxn=pxn) for pxn in (True, False)}
    ranks = range(16)
    expected = Counter()
    for a in ranks:
        peers = [b for b in ranks if b // 4 != a // 4]
        for b in peers:
            ways = [link for link in rails[False].route(a, b) if link.name[-1] == ">"]
            expected.update(dict.fromkeys(ways, 12.0 / len(peers)))
    found = {pxn: rails[pxn].loads(ranks, 0.0, 12.0, every_pair=True) for pxn in rails}
    assert {x: n for x, n in found[False].items() if x.name[-1] == ">"} == pytest.approx(expected)
    # with it, only what is for the other pod does: 8 of 12 peers, against 11 of 12 that are not on the rail's leaf
    uplinks = {pxn: max(n for x, n in found[pxn].items() if x.name.startswith("leaf")) for pxn in found}
    assert uplinks == pytest.approx({True: 2 * 8.0, False: 2 * 11.0})
