"""Tori: neighbours, routes and loads against networkx, boxes against a linear programme, published figures."""

from itertools import combinations, permutations, product
from math import prod

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from simpar.errors import ClusterError
from simpar.hardware.cluster import Cluster, named_node_link
from simpar.hardware.fabric import Network
from simpar.hardware.graph import Graph
from simpar.hardware.paths import Paths
from simpar.hardware.torus import Box, Side, Torus, busiest, slice_loads, usual_shape

TORI = [
    Torus((4, 4), (True, True)),
    Torus((3, 5), (True, True)),
    Torus((4, 6), (False, False)),
    Torus((2, 4), (False, True)),
    Torus((2, 3, 4), (False, True, True)),
    Torus((4, 8), (True, True), twisted=True),
    Torus((4, 4, 8), (True, True, True), twisted=True),
]


def as_graph(torus: Torus) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(torus.size))
    graph.add_edges_from((hop[0], other) for hop, other in torus.hops())
    return graph


@given(st.sampled_from(TORI), st.data())
def test_places_and_links_can_be_gone_back(torus, data):
    chip = data.draw(st.integers(0, torus.size - 1))
    assert torus.chip(torus.coordinates(chip)) == chip
    for axis in range(len(torus.shape)):
        other = torus.neighbour(chip, axis, "+")
        if other is not None:
            assert torus.neighbour(other, axis, "-") == chip


@pytest.mark.parametrize("torus", TORI, ids=str)
def test_routes_are_ways_and_as_short_as_networkx_finds(torus):
    graph = as_graph(torus)
    ahead = {(chip, axis, way): other for (chip, axis, way), other in torus.hops()}
    lengths = dict(nx.all_pairs_shortest_path_length(graph))
    for src, dst in product(range(0, torus.size, 3), range(torus.size)):
        at = src
        for hop in torus.route(src, dst):
            assert hop[0] == at
            at = ahead[hop]
        assert at == dst
        assert len(torus.route(src, dst)) == lengths[src][dst]


@pytest.mark.parametrize(
    "torus", [*(t for t in TORI if all(t.wraps) and t.size < 100), Torus((3, 3, 6), (True,) * 3, twisted=True)], ids=str
)
def test_all_to_all_loads_are_those_of_even_splits_over_shortest_ways(torus):
    cables = [
        {"source": f"gpu{hop[0]}", "target": f"gpu{other}", "bandwidth_gbps": 100, "latency_us": 1}
        for hop, other in torus.hops()
        if hop[2] == "+"
    ]
    ways = Paths(Graph(edges=cables))
    bundles: dict[tuple[str, str], float] = {}
    for a, b in permutations(range(torus.size), 2):
        for source, target, share in ways.shares(f"gpu{a}", f"gpu{b}"):
            bundles[source, target] = bundles.get((source, target), 0.0) + share
    axes = {(f"gpu{hop[0]}", f"gpu{other}"): hop[1] for hop, other in torus.hops()}
    most = [max(load for pair, load in bundles.items() if axes[pair] == axis) for axis in range(len(torus.shape))]
    assert torus.all_to_all_crossings() == pytest.approx(most)
    loads = slice_loads(torus, range(torus.size), torus.size - 1.0, every_pair=True)
    assert max(loads.values()) == pytest.approx(max(most))


def test_an_all_to_all_counts_the_middle_of_the_longest_axis():
    # S m / (8 b): each half of m chips sends half of its bytes to the other, over two cuts
    torus = Torus((4, 16), (True, True))
    loads = slice_loads(torus, range(64), 63 / 64 * 1.0, every_pair=True)
    assert max(loads.values()) == pytest.approx(16 / 8)
    line = Torus((16,), (False,))
    assert max(slice_loads(line, range(16), 15 / 16, every_pair=True).values()) == pytest.approx(8 * 8 / 16)


@pytest.mark.parametrize(("shape", "published"), [((4, 4, 8), 1.63), ((4, 8, 8), 1.31)])
def test_twisting_helps_all_to_all_about_as_google_publishes(shape, published):
    # Jouppi et al., ISCA 2023: measured gains of twisted tori in all-to-all bandwidth
    plain, twisted = (max(Torus(shape, (True,) * 3, t).all_to_all_crossings()) for t in (False, True))
    assert plain / twisted == pytest.approx(published, rel=0.08)


def least_streaming(sides: tuple[Side, ...]) -> float:
    """By linear programming: shares of the buffer that pass the axes in every order, busiest link least."""
    orders = list(permutations(range(len(sides))))
    size = prod(side.chips for side in sides)
    loads = np.zeros((len(sides), len(orders)))
    for number, order in enumerate(orders):
        gathered = 1
        for axis in order:
            loads[axis, number] = (sides[axis].chips - 1) * gathered / size / sides[axis].links
            gathered *= sides[axis].chips
    cost = np.zeros(len(orders) + 1)
    cost[-1] = 1.0
    bound = np.hstack([loads, -np.ones((len(sides), 1))])
    whole = np.array([[1.0] * len(orders) + [0.0]])
    return float(linprog(cost, A_ub=bound, b_ub=np.zeros(len(sides)), A_eq=whole, b_eq=[1.0]).fun)


@given(st.lists(st.tuples(st.integers(2, 16), st.booleans()), min_size=1, max_size=3))
def test_boxes_stream_as_fast_as_any_mix_of_orders(axes):
    sides = tuple(Side(axis, chips, 1, closed) for axis, (chips, closed) in enumerate(axes))
    size = prod(side.chips for side in sides)
    assert max(Box(sides).link_bytes((size - 1) / size)) == pytest.approx(least_streaming(sides))


@pytest.mark.parametrize("torus", [t for t in TORI if all(t.wraps) and not t.twisted], ids=str)
def test_a_closed_torus_carries_what_its_chips_send_and_no_more(torus):
    loads = slice_loads(torus, range(torus.size), 3.0)
    assert sum(loads.values()) == pytest.approx(3.0 * torus.size)
    into = dict.fromkeys(range(torus.size), 0.0)
    ahead = dict(torus.hops())
    for hop, carried in loads.items():
        into[ahead[hop]] += carried
    assert list(into.values()) == pytest.approx([3.0] * torus.size)


def test_a_line_is_a_ring_that_travels_back():
    line = Torus((5,), (False,))
    loads = slice_loads(line, range(5), 1.0)
    assert loads == {
        (chip, 0, way): 1.0 for chip, way in [*((c, "+") for c in range(4)), *((c, "-") for c in range(1, 5))]
    }


def test_groups_are_boxes_where_they_can_be():
    torus = Torus((4, 8), (True, True))
    assert torus.box(range(8)) == Box((Side(1, 8, 1, True),))
    assert torus.box(range(4)) == Box((Side(1, 4, 1, False),))
    assert torus.box(range(0, 8, 2)) == Box((Side(1, 4, 2, True),))
    assert torus.box(range(0, 32, 8)) == Box((Side(0, 4, 1, True),))
    assert torus.box(range(32)).size == 32
    assert torus.box((0, 1, 3)) is None
    assert torus.box((0, 9)) is None
    assert torus.box((0, 9)) is None


def test_interleaved_groups_share_every_link():
    torus = Torus((8,), (True,))
    even, odd = (slice_loads(torus, range(start, 8, 2), 2.0) for start in (0, 1))
    assert even == odd
    assert set(even.values()) == {1.0}
    assert len(even) == 16


def test_chips_that_form_no_box_make_one_ring():
    torus = Torus((4, 4), (True, True))
    loads = slice_loads(torus, (0, 1, 5), 2.0)  # there and back along both axes
    assert loads == {(0, 1, "+"): 2.0, (1, 0, "+"): 2.0, (5, 0, "-"): 2.0, (1, 1, "-"): 2.0}
    assert torus.ring_crossings((0, 1, 5)) == (1, 2)
    pairs = slice_loads(torus, (0, 1, 5), 2.0, every_pair=True)
    assert sum(pairs.values()) == sum(len(torus.route(a, b)) for a, b in permutations((0, 1, 5), 2))


@pytest.mark.parametrize(
    ("chips", "axes", "multiple", "shape"),
    [
        (4, 3, 4, (1, 2, 2)),
        (64, 3, 4, (4, 4, 4)),
        (192, 3, 4, (4, 4, 12)),
        (4096, 3, 4, (16, 16, 16)),
        (256, 2, 16, (16, 16)),
    ],
)
def test_slices_have_the_shapes_that_google_offers(chips, axes, multiple, shape):
    assert usual_shape(chips, axes, multiple) == shape


def test_a_slice_is_a_cluster():
    cluster = Cluster.parse("tpu-v5p:2x4x4x8")
    assert (cluster.nodes, cluster.gpus_per_node, cluster.node_link.shape) == (2, 128, (4, 4, 8))
    assert Cluster.parse("tpu-v5p:64").node_link.torus(64) == Torus((4, 4, 4), (True,) * 3)
    assert Cluster.parse("tpu-v5e:8x16").node_link.torus(128) == Torus((8, 16), (False, True))
    assert Cluster.parse("tpu-v5p:3x64").nodes == 3
    assert Cluster.model_validate_json(cluster.model_dump_json()) == cluster


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Cluster.parse("tpu-v5e:2x2x2x2"),
            "names 4 lengths, but tpu-v5e is a torus of 2 axes; write 'tpu-v5e:4x4'",
        ),
        (
            lambda: Cluster(device="tpu-v5e", gpus_per_node=8, node_link={"base": "ici-v5e", "shape": [4, 4]}),
            "a torus of 4×4 has 16 chips, but gpus_per_node is 8; set gpus_per_node=16",
        ),
        (lambda: named_node_link("ici-v4").replace(shape=(4, 4)), "shape (4, 4) has 2 axes, but the link has 3"),
        (lambda: named_node_link("nvlink4").replace(axes=2), "axes belongs to kind 'torus', but kind is 'nvlink'"),
        (lambda: named_node_link("ici-v4").replace(shape=(4, 4, 4), twisted=True), "such as (4, 4, 8), not (4, 4, 4)"),
    ],
)
def test_a_wrong_torus_says_what_is_right(make, message):
    with pytest.raises(ClusterError) as error:
        make()
    assert message in str(error.value)


def test_messages_pass_the_chips_on_their_way():
    net = Network(Cluster.parse("tpu-v5p:2x4x4x4"))
    assert [link.name for link in net.route(0, 5)] == ["ici0.1+", "ici4.2+"]
    assert [link.name for link in net.route(64, 67)] == ["ici64.2-"]
    assert [link.name for link in net.route(0, 64)] == ["nic0>", "nic64<"]
    assert net.latency_s(0, 5) == pytest.approx(5e-6 + 2e-6)
    names = {link.name for link in net.loads(range(64, 128), 1.0, 0.0)}
    assert names == {f"ici{chip}.{axis}{way}" for chip in range(64, 128) for axis in range(3) for way in "+-"}


def test_every_pair_of_sides_is_tried():
    # one long line beside two short rings binds alone
    sides = (Side(0, 16, 1, False), Side(1, 2, 1, True), Side(2, 2, 1, True))
    along = Box(sides).link_bytes(1.0)
    bounds = [
        (prod(s.chips for s in chosen) - 1) / 63 / sum(s.links for s in chosen)
        for n in (1, 2, 3)
        for chosen in combinations(sides, n)
    ]
    assert max(along) == pytest.approx(max(bounds))
    assert sum(load * side.links for load, side in zip(along, sides, strict=True)) == pytest.approx(1.0)


@pytest.mark.parametrize("torus", TORI, ids=str)
@pytest.mark.parametrize("every_pair", [False, True])
def test_what_is_asked_of_a_few_links_is_what_all_of_them_say(torus, every_pair):
    for members in (range(torus.size), range(torus.shape[-1]), range(0, torus.size, torus.shape[-1])):
        loads = slice_loads(torus, members, 1.0, every_pair=every_pair)
        assert busiest(torus, members, every_pair=every_pair) == pytest.approx(max(loads.values()))
        some = slice_loads(torus, members, 1.0, every_pair=every_pair, near=frozenset({0, torus.size // 2}))
        own = {hop: carried for hop, carried in loads.items() if hop[0] in (0, torus.size // 2)}
        assert {hop: some[hop] for hop in own} == pytest.approx(own)
