import csv
import re
from collections import defaultdict
from math import inf, nan
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.cost.collective import (
    COLLECTIVE_OPS,
    CollectiveCost,
    collective_cost,
    collective_error,
    p2p_channels,
    p2p_cost,
)
from simpar.errors import PlanError
from simpar.hardware.cluster import Cluster, fabric_names, named_fabric
from simpar.hardware.fabric import Network
from simpar.units import GB, GIB, KIB, MIB

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "collectives"

A100, H100, H200, B200, L40S, CPU = (
    Cluster.model_validate({"nodes": 16, **fields})
    for fields in (
        {"device": "a100-sxm"},
        {"device": "h100-sxm"},
        {"device": "h200-sxm"},
        {"device": "b200-sxm"},
        {"device": "l40s"},
        {"device": "cpu", "gpus_per_node": 4},
    )
)


def typed(cluster, gigabytes, microseconds, copies, smoothness, **nvls):
    """The cluster with numbers of its node link as typed into the forms below, whatever the catalog's fit says."""
    names = ("base_latency_s", "step_latency_s", "p2p_latency_s", "peer_latency_s")
    latencies = {name: value * 1e-6 for name, value in zip(names, microseconds, strict=True)}
    rates = {"bandwidth_bytes_per_s": gigabytes * 1e9, "copy_fraction": copies, "smoothness": smoothness}
    return cluster.replace(node_link=cluster.node_link.replace(**rates, **latencies, **nvls))


A100_TYPED = typed(A100, 236.4432, (8.6761, 0.7868, 11.4706, 0.1597), 0.3159, 0.5569)
H100_TYPED = typed(
    H100, 369.3468, (4.6319, 0.7808, 8.0763, 0.0897), 0.3995, 0.6063, nvls_ratio=0.8222, nvls_latency_s=15.8085e-6
)
B200_TYPED = typed(B200, 680.3347, (7.647, 1.2291, 11.161, 0.1491), 0.2379, 0.5993)
CLUSTERS = {
    "a100": A100,
    "h100": H100,
    "h200": H200,
    "b200": B200,
    "l40s": L40S,
    "cpu": CPU,
    "h100, EFA": H100.replace(fabric="efa-p5"),
    "a100, EFA": A100.replace(fabric="efa-p4de"),
    "b200, Slingshot": B200.replace(fabric="slingshot11-polaris"),
}

ops = st.sampled_from(COLLECTIVE_OPS)
clusters = st.sampled_from(list(CLUSTERS))  # by name, which a failing example can show
sizes = st.one_of(st.integers(0, 4096), st.integers(0, 64 * GIB))


@st.composite
def groups(draw, cluster):
    nodes = draw(st.integers(1, cluster.nodes))
    return draw(st.integers(nodes, nodes * cluster.gpus_per_node)), nodes


def busbw(op, nbytes, size, nodes, cluster, **how):
    cost = collective_cost(op, nbytes, size, nodes, cluster, **how)
    return (2 if op == "all_reduce" else 1) * (size - 1) / size * nbytes / cost.total_s / GB


# Closed forms, derived by hand.


def test_ring_all_reduce_of_512_mb_on_one_h100_node():
    cost = collective_cost("all_reduce", 512 * MIB, 8, 1, H100_TYPED, algorithm="ring")
    latency_us = 4.6319 + 14 * 0.7808
    streaming_us = (2 * 7 / 8 + 0.3995 / 8) * 512 * 2**20 / 369346.8
    assert cost.latency_s == pytest.approx(latency_us * 1e-6)
    total_us = (latency_us**0.6063 + streaming_us**0.6063) ** (1 / 0.6063)
    assert cost.total_s == pytest.approx(total_us * 1e-6)
    assert (cost.node_link_bytes, cost.nic_bytes) == (2 * 7 / 8 * 512 * 2**20, 0)


def test_ring_all_gather_over_two_a100_nodes_is_bound_by_the_nics():
    cost = collective_cost("all_gather", 1 * GB, 16, 2, A100_TYPED)
    latency_us = 8.6761 + (2 * 7 * 1.87 + 7.09)
    streaming_us = 15 / 16 * 1e9 / (8 * 25000 * 0.97)
    assert cost.latency_s == pytest.approx(latency_us * 1e-6)
    assert cost.total_s == pytest.approx((latency_us**0.596 + streaming_us**0.596) ** (1 / 0.596) * 1e-6)
    assert (cost.node_link_bytes, cost.nic_bytes) == (15 / 16 * 1e9, 15 / 16 * 1e9 / 8)


def test_nvls_sends_the_buffer_and_a_share_of_the_sum():
    cost = collective_cost("all_reduce", 8 * GIB, 8, 1, H200, algorithm="nvls")
    streaming_us = 9 / 8 * 8 * 2**30 / (0.8328 * 373967.5)
    assert cost.total_s == pytest.approx((16.8499**0.6145 + streaming_us**0.6145) ** (1 / 0.6145) * 1e-6)
    assert cost.node_link_bytes == 9 / 8 * 8 * 2**30


def test_nvls_tree_adds_the_nics():
    cost = collective_cost("all_reduce", 8 * GIB, 32, 4, H100_TYPED, algorithm="nvls_tree")
    latency_us = 15.8085 + 2 * 2 * 8.73
    streaming_us = max(9 / 8 * 8 * 2**30 / (0.8222 * 369346.8), 2 * 8 * 2**30 / (8 * 49000))
    assert cost.latency_s == pytest.approx(latency_us * 1e-6)
    assert cost.total_s == pytest.approx((latency_us**0.467 + streaming_us**0.467) ** (1 / 0.467) * 1e-6)
    assert cost.nic_bytes == 2 * 8 * 2**30 / 8


@pytest.mark.parametrize(("nodes", "copies"), [(2, 1), (3, 4 / 3), (4, 2), (16, 2)])
def test_a_tree_sends_the_buffer_over_the_nics_up_to_twice(nodes, copies):
    cost = collective_cost("all_reduce", 1 * GB, nodes, nodes, A100_TYPED, algorithm="tree")
    assert (cost.node_link_bytes, cost.nic_bytes) == (0, pytest.approx(copies * 1e9))


def test_all_to_all_splits_between_node_links_and_nics():
    cost = collective_cost("all_to_all", 1 * GB, 32, 4, H100_TYPED)
    latency_us = 8.0763 + 31 * 0.0897 + 5
    streaming_us = 24 / 32 * 1e9 / 49000
    assert (cost.node_link_bytes, cost.nic_bytes) == (7 / 32 * 1e9, 24 / 32 * 1e9)
    assert cost.total_s == pytest.approx((latency_us**0.684 + streaming_us**0.684) ** (1 / 0.684) * 1e-6)


def test_gloo_is_latency_plus_bytes_over_bandwidth():
    cost = collective_cost("all_reduce", 16 * MIB, 2, 1, CPU)
    assert cost.algorithm == "ring"
    assert cost.total_s == pytest.approx(231e-6 + (1 + 2.9 / 2) * 16 * MIB / 6.7e9)
    assert collective_cost("reduce_scatter", 16 * MIB, 2, 1, CPU) == cost
    assert collective_cost("all_gather", 16 * MIB, 2, 1, CPU).total_s < 0.8 * cost.total_s


def test_gloo_copies_the_own_block_of_an_all_to_all():
    cost = collective_cost("all_to_all", 16 * MIB, 2, 1, CPU)
    assert cost.total_s == pytest.approx(94e-6 + (1 / 2 + 2.9 / 2) * 16 * MIB / 6.7e9)


def test_a_tree_over_nodes_is_bound_by_the_chain_inside_them():
    cost = collective_cost("all_reduce", 1 * GB, 16, 2, A100_TYPED, algorithm="tree")
    latency_us = 8.6761 + 2 * 7 * 0.7868 + 2 * 11.1
    streaming_us = 2e9 / (0.9 * 236443.2)
    assert (cost.latency_s, cost.node_link_bytes) == (pytest.approx(latency_us * 1e-6), 2e9)
    assert cost.total_s == pytest.approx((latency_us**0.571 + streaming_us**0.571) ** (1 / 0.571) * 1e-6)


def test_a_tree_inside_a_node_has_its_own_bandwidth():
    cost = collective_cost("all_reduce", 1 * GB, 8, 1, A100_TYPED, algorithm="tree")
    latency_us, streaming_us = 8.6761 + 14 * 0.7868, 2e9 / (0.6 * 236443.2)
    assert cost.total_s == pytest.approx((latency_us**0.5569 + streaming_us**0.5569) ** (1 / 0.5569) * 1e-6)


def test_steps_inside_a_node_are_no_faster_on_a_foreign_fabric():
    mixed = B200_TYPED.replace(
        fabric="slingshot11-polaris"
    )  # fitted on A100_TYPED, whose steps are shorter than those of B200
    cost = collective_cost("all_gather", 1, 16, 2, mixed)
    assert cost.latency_s == pytest.approx((7.647 + 14 * 1.2291 + 1.2291) * 1e-6)


def test_broadcast_is_a_pipelined_chain():
    cost = collective_cost("broadcast", 1 * GB, 16, 2, A100_TYPED)
    assert cost.latency_s == pytest.approx((8.6761 + 14 * 0.7868 + 7.09) * 1e-6)
    assert (cost.node_link_bytes, cost.nic_bytes) == (1e9, 1e9 / 8)
    assert collective_cost("reduce", 1 * GB, 16, 2, A100_TYPED) == cost


def test_messages_take_node_link_nic_or_channels():
    inside = p2p_cost(1 * GB, 0, 7, H100_TYPED)
    assert inside.total_s == pytest.approx(((8.0763e-6) ** 0.6063 + (1e9 / 369.3468e9) ** 0.6063) ** (1 / 0.6063))
    assert (inside.node_link_bytes, inside.nic_bytes) == (1e9, 0)
    across = p2p_cost(1 * GB, 0, 8, H100_TYPED)
    assert across.latency_s == pytest.approx(13.0763e-6)
    assert across.total_s == pytest.approx(((13.0763e-6) ** 0.684 + (1e9 / 49e9) ** 0.684) ** (1 / 0.684))
    assert (across.node_link_bytes, across.nic_bytes) == (0, 1e9)
    capped = p2p_cost(1 * GB, 0, 8, H100_TYPED, channels=2)
    assert capped.total_s == pytest.approx(((13.0763e-6) ** 0.684 + (1e9 / 28e9) ** 0.684) ** (1 / 0.684))
    thin = H100_TYPED.replace(fabric={"base": "ndr400", "p2p_channels": 2})
    assert p2p_cost(1 * GB, 0, 8, thin) == capped
    assert p2p_cost(1 * GB, 3, 3, H100_TYPED).total_s == 0


def test_messages_on_a_graph_take_its_narrowest_edge():
    path = [("gpu0", "a", 100, 1), ("a", "gpu1", 40, 2)]
    link = H100_TYPED.node_link
    cluster = Cluster(device="h100-sxm", nodes=2, gpus_per_node=1, node_link=link, graph=path)
    cost = p2p_cost(1 * GB, 0, 1, cluster, network=Network(cluster))
    assert cost.latency_s == pytest.approx(11.0763e-6)
    assert cost.total_s == pytest.approx(((11.0763e-6) ** 0.684 + (1e9 / 5e9) ** 0.684) ** (1 / 0.684))


RING_OF_FOUR = [("gpu0", "gpu1", 100, 1), ("gpu1", "gpu2", 100, 2), ("gpu2", "gpu3", 100, 40), ("gpu3", "gpu0", 100, 3)]


def on_graph(edges, op, **options):
    """The same collective over four GPUs with and without the graph's flights, in µs apart."""
    link = H100_TYPED.node_link
    cluster = Cluster(device="h100-sxm", nodes=1, gpus_per_node=4, node_link=link, graph={"edges": edges})
    asked = (op, 1 * MIB, 4, 1, cluster)
    flown = collective_cost(*asked, ranks=range(4), network=Network(cluster), **options)
    return (flown.latency_s - collective_cost(*asked, **options).latency_s) * 1e6


@pytest.mark.parametrize(("op", "steps"), [("all_gather", 3), ("reduce_scatter", 3), ("all_reduce", 6)])
def test_a_chunk_flies_along_the_ring_of_a_graph(op: str, steps: int) -> None:
    one_way = {"edges": RING_OF_FOUR, "directed": True}
    cluster = Cluster(device="h100-sxm", gpus_per_node=4, graph=one_way)
    hops = [RING_OF_FOUR[rank][3] for rank in range(4)]
    # chunk by chunk: a rank passes on what it has as soon as it is there, three times or six
    there = [0.0] * 4
    for _ in range(steps):
        there = [there[rank - 1] + hops[rank - 1] for rank in range(4)]
    options = {"algorithm": "ring"} if op == "all_reduce" else {}
    asked = (op, 1.0, 4, 1, cluster)
    flown = collective_cost(*asked, ranks=range(4), network=Network(cluster), **options)
    flight_s = flown.total_s - collective_cost(*asked, **options).total_s
    assert flight_s * 1e6 == pytest.approx(max(there))


def test_flights_on_a_graph_by_hand():
    # from gpu2 to gpu3 the way round (1 + 2 + 3 µs) is shorter than the long cable
    assert on_graph(RING_OF_FOUR, "reduce_scatter") == pytest.approx(1 + 2 + 6 + 3 - 1)
    assert on_graph(RING_OF_FOUR, "all_reduce", algorithm="ring") == pytest.approx(2 * (1 + 2 + 6 + 3) - (1 + 2))
    assert on_graph(RING_OF_FOUR, "all_reduce", algorithm="tree") == pytest.approx(2 * 3 * 6)
    assert on_graph(RING_OF_FOUR, "broadcast") == pytest.approx(1 + 2 + 6)
    assert on_graph(RING_OF_FOUR, "shift") == pytest.approx(6)
    assert on_graph(RING_OF_FOUR, "all_to_all") == pytest.approx(6, rel=1e-6)


def test_no_switch_of_a_graph_reduces():
    graph = {"topology": "ring", "gpus": 8, "bandwidth_gbps": 400}
    cluster = Cluster(device="h100-sxm", gpus_per_node=8, graph=graph)
    assert cluster.node_link.nvls
    cost = collective_cost("all_reduce", 1 * GB, 8, 1, cluster)
    assert (cost.algorithm, cost.node_link_bytes) == ("ring", pytest.approx(2 * 7 / 8 * GB))
    with pytest.raises(PlanError, match="algorithm 'nvls' does not apply"):
        collective_cost("all_reduce", 1 * GB, 8, 1, cluster, algorithm="nvls")


def test_one_rank_costs_nothing():
    for op in COLLECTIVE_OPS:
        assert collective_cost(op, 1 * GB, 1, 1, H100_TYPED) == CollectiveCost("none", 0, 0, 0, 0)


def test_a_group_of_two_nodes_that_differ_counts_their_mean():
    twelve = collective_cost("all_gather", 1 * GB, 12, 2, H100_TYPED)
    assert twelve.nic_bytes == pytest.approx(11 / 12 * 1e9 / 6)


# Published measurements.


@pytest.mark.parametrize(
    ("cluster", "collective", "low", "high"),
    [
        # 8x H100, 512 MiB, NCCL 2.27-2.29: 2111 us (aiconfigurator-core 0.12.0).
        (H100, ("all_reduce", 512 * MIB, 8, 1), 445, 445),
        # 5 and 8 of 8x H200, 8 GiB (stas00/ml-engineering).
        (H200, ("all_reduce", 8 * GIB, 5, 1), 414, 414),
        (H200, ("all_reduce", 8 * GIB, 8, 1), 473, 473),
        # 8x B200: 539 GB/s of NVLS bandwidth, which is 14/9 of it as busbw (same source).
        (B200, ("all_reduce", 8 * GIB, 8, 1), 838, 838),
        # 10 nodes of 1, 2, 4, 8 H100, 400 Gb/s a GPU (xxrjun/nccl-tests-cluster).
        (H100, ("all_reduce", 16 * GIB, 10, 10), 48.9, 48.9),
        (H100, ("all_reduce", 16 * GIB, 20, 10), 98, 98),
        (H100, ("all_reduce", 16 * GIB, 40, 10), 196, 196),
        (H100, ("all_reduce", 16 * GIB, 80, 10), 320, 345),
        (H100, ("all_to_all", 16 * GIB, 80, 10), 50.5, 50.5),
        (H100, ("all_to_all", 16 * GIB, 16, 2), 92, 92),
        # 2 nodes of 8 A100, 200 Gb/s a GPU (Sophia; a DGX A100 pair).
        (A100, ("all_reduce", 4 * GIB, 16, 2), 178, 194),
        # 2 p4de and 2 p5 nodes.
        (A100.replace(fabric="efa-p4de"), ("all_reduce", 4 * GIB, 16, 2), 78, 78),
        (H100.replace(fabric="efa-p5"), ("all_reduce", 16 * GIB, 16, 2), 488, 488),
    ],
)
def test_published_bus_bandwidths(cluster, collective, low, high):
    error = min(0.12, collective_error(*collective[1:], cluster).p90)
    assert low * (1 - error) < busbw(*collective, cluster) < high * (1 + error)


def test_a_tree_over_two_nodes_may_beat_the_wire_but_not_over_more():
    line = 8 * A100.nic_bytes_per_s / GB
    fast_links = A100.replace(node_link="nvlink5")
    assert busbw("all_reduce", 64 * GIB, 16, 2, fast_links, algorithm="tree") > 1.5 * line
    for nodes in (4, 8, 16):
        assert busbw("all_reduce", 64 * GIB, 8 * nodes, nodes, fast_links) < 1.01 * line


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter"])
def test_large_messages_approach_the_link(op):
    assert busbw(op, 1e15, 8, 1, A100) == pytest.approx(A100.node_link.bandwidth_bytes_per_s / GB, rel=0.05)
    assert busbw(op, 1e15, 128, 16, A100) == pytest.approx(8 * 25 * 0.97, rel=0.01)


def test_mid_size_bus_bandwidth_falls_with_nodes():
    speeds = [busbw("all_gather", 4 * MIB, 8 * k, k, H100) for k in (1, 2, 4, 8, 16)]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[-1] < speeds[0] / 10


@pytest.mark.parametrize(("ranks", "gb_per_s"), [(16, 45), (40, 25), (80, 15)])
def test_channels_of_messages_on_growing_communicators(ranks, gb_per_s):
    cost = p2p_cost(16 * GIB, 0, 8, H100, channels=p2p_channels(H100, ranks))
    assert 16 * GIB / cost.total_s / GB == pytest.approx(gb_per_s, rel=0.15)


def test_channels_need_a_network():
    assert p2p_channels(Cluster(device="h100-sxm", fabric=None), 8) == 1


# The library's choice.


def test_the_fastest_algorithm_wins():
    assert collective_cost("all_reduce", 1 * KIB, 8, 1, H100).algorithm == "ring"
    assert collective_cost("all_reduce", 1 * GIB, 8, 1, H100).algorithm == "nvls"
    assert collective_cost("all_reduce", 1 * GIB, 4, 1, H100).algorithm == "ring"
    assert collective_cost("all_reduce", 1 * KIB, 128, 16, A100).algorithm == "tree"
    for nbytes in (1, KIB, MIB, GIB):
        named = [
            collective_cost("all_reduce", nbytes, 16, 2, H100, algorithm=a).total_s
            for a in ("ring", "tree", "nvls_tree")
        ]
        assert collective_cost("all_reduce", nbytes, 16, 2, H100).total_s == min(named)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            ("all_reduce", 1, 8, 1, A100, "nvls"),
            "'nvls' does not apply to all_reduce over 8 ranks on 1 node (",
        ),
        (("all_reduce", 1, 4, 1, H100, "nvls"), "use auto, ring, tree"),
        (("all_reduce", 1, 16, 2, H100, "nvls"), "and one node); use auto, ring, tree, nvls_tree"),
        (("all_gather", 1, 8, 1, H100, "tree"), "apply to all_gather over 8 ranks on 1 node; use auto, ring"),
        (("all_gather", 1, 8, 1, H100, "rings"), "unknown algorithm 'rings'; did you mean 'ring'?"),
        (("all_gather", 1, 1, 1, H100, "rings"), "unknown algorithm 'rings'"),
        (("allreduce", 1, 8, 1, H100, "auto"), "unknown collective 'allreduce'; did you mean 'all_reduce'"),
        (("all_reduce", 1, 16, 1, H100, "auto"), "on 1 node does not fit 16 nodes of 8 GPUs; give a size"),
        (("all_reduce", 1, 17, 17, H100, "auto"), "over 17 ranks on 17 nodes does not fit"),
        (("all_reduce", 1, 1, 2, H100, "auto"), "over 1 ranks on 2 nodes does not fit"),
        (("all_reduce", -1, 8, 1, H100, "auto"), "-1 bytes"),
        (("all_reduce", nan, 8, 1, H100, "auto"), "nan bytes"),
    ],
)
def test_a_wrong_collective_says_what_is_right(call, message):
    *numbers, algorithm = call
    with pytest.raises(PlanError, match=re.escape(message)):
        collective_cost(*numbers, algorithm=algorithm)


@pytest.mark.parametrize(("nbytes", "src", "dst"), [(1, 0, 128), (1, -1, 0), (-1, 0, 1)])
def test_a_wrong_message_says_what_is_right(nbytes, src, dst):
    with pytest.raises(PlanError, match=f"message of {nbytes} bytes from rank {src} to {dst} .* ranks from 0 to 127"):
        p2p_cost(nbytes, src, dst, H100)


# Invariants.


@given(st.data(), ops, clusters, sizes, st.integers(1, 64 * GIB))
def test_more_bytes_take_longer(data, op, name, nbytes, more):
    cluster = CLUSTERS[name]
    size, nodes = data.draw(groups(cluster))
    small = collective_cost(op, nbytes, size, nodes, cluster)
    large = collective_cost(op, nbytes + more, size, nodes, cluster)
    if size > 1:
        assert 0 < small.latency_s <= small.total_s < large.total_s < inf


@given(st.data(), ops, clusters, sizes)
def test_flows_never_exceed_a_link(data, op, name, nbytes):
    cluster = CLUSTERS[name]
    nodes = data.draw(st.integers(1, 4))
    per_node = data.draw(st.sampled_from([1, 2, cluster.gpus_per_node]))
    ranks = [node * cluster.gpus_per_node + local for node in range(nodes) for local in range(per_node)]
    cost = collective_cost(op, nbytes, len(ranks), nodes, cluster)
    every_pair = op == "all_to_all"
    loads = Network(cluster).loads(ranks, cost.node_link_bytes, cost.nic_bytes, every_pair=every_pair)
    assert bool(loads) == (len(ranks) > 1 and nbytes > 0)
    for link, on_link in loads.items():
        assert on_link / link.capacity_bytes_per_s <= cost.total_s - cost.latency_s + 1e-15


@given(st.data(), clusters, sizes)
def test_messages_never_exceed_a_link(data, name, nbytes):
    cluster = CLUSTERS[name]
    src, dst = (data.draw(st.integers(0, cluster.gpus - 1)) for _ in range(2))
    network = Network(cluster)
    cost = p2p_cost(nbytes, src, dst, cluster)
    assert cost.latency_s == network.latency_s(src, dst)
    for link in network.route(src, dst):
        assert nbytes / link.capacity_bytes_per_s <= cost.total_s - cost.latency_s + 1e-15


@settings(max_examples=300)
@given(st.data(), ops, st.sampled_from(["a100", "h100", "h200", "b200"]), st.sampled_from(fabric_names()), sizes)
def test_crossing_nodes_is_never_cheaper(data, op, name, fabric, nbytes):
    cluster = CLUSTERS[name]
    size = data.draw(st.integers(2, 8))
    nodes = data.draw(st.integers(2, size))
    across = collective_cost(op, nbytes, size, nodes, cluster.replace(fabric=fabric))
    within = collective_cost(op, nbytes, size, 1, cluster).total_s
    assert across.total_s >= within * (1 - 1e-12)  # but for rounding


@given(st.data(), ops, clusters, st.tuples(st.floats(1, 10), st.floats(1, 10)))
def test_faster_links_are_never_slower(data, op, name, speedups):
    nbytes, (inside, between) = data.draw(sizes), speedups
    cluster = CLUSTERS[name]
    size, nodes = data.draw(groups(cluster))
    link = cluster.node_link.replace(
        nominal_bytes_per_s=cluster.node_link.nominal_bytes_per_s * inside,
        bandwidth_bytes_per_s=cluster.node_link.bandwidth_bytes_per_s * inside,
        base_latency_s=cluster.node_link.base_latency_s / inside,
    )
    fabric = cluster.fabric.replace(
        nic_gbps=cluster.fabric.nic_gbps * between,
        ring_step_s=cluster.fabric.ring_step_s / between,
        tree_level_s=cluster.fabric.tree_level_s / between,
    )
    faster = collective_cost(op, nbytes, size, nodes, cluster.replace(node_link=link, fabric=fabric))
    assert faster.total_s <= collective_cost(op, nbytes, size, nodes, cluster).total_s * (1 + 1e-12)


@given(st.data(), clusters, sizes)
def test_an_all_reduce_is_no_slower_than_its_halves(data, name, nbytes):
    cluster = CLUSTERS[name]
    size, nodes = data.draw(groups(cluster))
    halves = sum(collective_cost(op, nbytes, size, nodes, cluster).total_s for op in ("all_gather", "reduce_scatter"))
    assert collective_cost("all_reduce", nbytes, size, nodes, cluster).total_s <= halves * (1 + 1e-12)


# Errors.


def test_errors_are_those_of_the_fit_that_prices():
    fit = H100.node_link.errors
    assert collective_error(1 * KIB, 8, 1, H100) == (fit.median, fit.p90)
    assert collective_error(1 * MIB, 8, 1, H100) == (fit.median_large, fit.p90_large)
    assert fit.median != fit.median_large
    assert collective_error(1 * MIB, 2, 1, L40S) == (0.033, 0.082)
    assert collective_error(1 * MIB, 8, 1, L40S) == (0.148, 0.422)
    assert collective_error(1 * MIB, 16, 2, H100) == (0.066, 0.181)


def test_errors_grow_where_nothing_was_measured():
    assert collective_error(1 * KIB, 16, 2, A100) == (0.094, 0.213)
    assert collective_error(1 * KIB, 24, 3, A100) == (0.172, 0.457)
    unmeasured = A100.replace(fabric="roce200")
    assert named_fabric("roce200").measured_nodes is None
    assert collective_error(1 * MIB, 16, 2, unmeasured) == (0.112, 0.273)


# Tables of measurements, where they lie beside the checkout.


def rows(name):
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} does not lie in shared/data/collectives beside this checkout")
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("system", ["a100_sxm", "h100_sxm", "b200_sxm", "l40s", "gb200"])
def test_one_node_measurements_are_predicted(system):
    cluster = Cluster(device=system.replace("_", "-"), gpus_per_node=8)
    errors = defaultdict(list)
    for row in rows("one_node.csv"):
        if row["system"] == system and KIB <= int(row["bytes"]) <= 512 * MIB:
            op = row["op"].replace("alltoall", "all_to_all")
            cost = collective_cost(op, float(row["bytes"]), int(row["ranks"]), 1, cluster)
            errors[op].append(abs(cost.total_s * 1e6 / float(row["time_us"]) - 1))
    assert set(errors) == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
    together = sorted(error for some in errors.values() for error in some)
    assert median(together) < 0.08
    assert together[int(0.9 * len(together))] < 0.30
    assert all(median(some) < 0.12 for some in errors.values())


@pytest.mark.parametrize(
    ("system", "cluster", "limit"),
    [
        ("H100x8 400Gb/GPU IB (xxrjun)", H100, 0.08),
        ("Sophia A100x8 IB", A100, 0.11),
        ("p5.48xlarge H100 EFA", H100.replace(fabric="efa-p5"), 0.06),
        ("AWS p4de A100 EFA", A100.replace(fabric="efa-p4de"), 0.08),
        ("AWS p6-b200", B200.replace(fabric="efa-p6"), 0.08),
    ],
)
def test_large_collectives_over_nodes_are_predicted(system, cluster, limit):
    best: dict[tuple[str, int, int, int], float] = {}
    for row in rows("multi_node.csv"):
        point = row["op"], int(row["bytes"]), int(row["gpus"]), int(row["nodes"])
        if row["system"] == system and row["op"] not in ("sendrecv", "alltoall") and point[3] > 1 and point[1] >= MIB:
            best[point] = min(best.get(point, inf), float(row["time_us"]) * 1e-6)
    assert len(best) >= 12
    errors = [abs(collective_cost(*point, cluster).total_s / measured - 1) for point, measured in best.items()]
    assert median(errors) < limit


def test_gloo_measurements_are_predicted():
    best: dict[tuple[str, int], float] = {}
    for row in rows("gloo_2core_cpu.csv"):
        if row["ranks"] == "2" and row["op"] in COLLECTIVE_OPS and int(row["bytes"]) <= 16 * MIB:
            point = row["op"], int(row["bytes"])
            best[point] = min(best.get(point, inf), float(row["med_us"]) * 1e-6)
    errors = [abs(collective_cost(op, nbytes, 2, 1, CPU).total_s / s - 1) for (op, nbytes), s in best.items()]
    assert len(errors) == 5 * 8
    assert median(errors) < 0.2
    assert max(errors) < 0.7
