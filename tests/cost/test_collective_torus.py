"""Collectives on tori: closed forms against rounds of transfers on the clock, and against the published formulas."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from simpar.cost.collective import collective_cost, p2p_cost
from simpar.engine.clock import Clock, Signal
from simpar.engine.network import Network
from simpar.errors import PlanError
from simpar.hardware.cluster import Cluster
from simpar.hardware.torus import Hop, Torus
from simpar.units import MIB

LINK = 90e9  # ici-v5p
SIZE = 512.0 * MIB


def streaming_s(op: str, cluster: Cluster, ranks: Sequence[int], nodes: int = 1) -> float:
    cost = collective_cost(op, SIZE, len(ranks), nodes, cluster, ranks=ranks)
    return cost.total_s - cost.latency_s  # smoothness is 1 there


class Rounds:
    """Runs rounds of transfers over single links on the clock; a round begins when all of the last have ended."""

    def __init__(self, rounds: Sequence[dict[Hop, float]]) -> None:
        self.clock = Clock()
        self.network = Network(self.clock)
        self.rounds = rounds
        self.clock.start(self.run())
        self.clock.run()

    def run(self) -> Iterator[Signal]:
        for sends in self.rounds:
            self.open, self.over = len(sends), Signal()
            for hop, nbytes in sends.items():
                load = (self.network.link(str(hop), LINK), nbytes, 1)
                self.network.transfer(self.network.route(0, round(nbytes / LINK * 1e9), [load])).then(self.ended)
            yield self.over

    def ended(self, _: object) -> None:
        self.open -= 1
        if not self.open:
            self.clock.fire(self.over)

    @property
    def seconds(self) -> float:
        return self.clock.ns * 1e-9


def all_gather_rounds(torus: Torus) -> list[dict[Hop, float]]:
    """All axes at once: one share of the buffer for each rotation of the axes, each half of it one way round."""
    axes = len(torus.shape)
    share = SIZE / axes / 2
    rounds: list[dict[Hop, float]] = []
    blocks = [share / torus.size] * axes  # what a chip has of each rotation's share and way
    for phase in range(axes):
        steps = torus.shape[phase] - 1  # all axes are equally long
        for _ in range(steps):
            sends: dict[Hop, float] = {}
            for rotation in range(axes):
                axis = (rotation + phase) % axes
                for chip, way in product(range(torus.size), "+-"):
                    sends[chip, axis, way] = sends.get((chip, axis, way), 0.0) + blocks[rotation]
            rounds.append(sends)
        blocks = [block * (steps + 1) for block in blocks]
    return rounds


@pytest.mark.parametrize("shape", [(4,), (8,), (4, 4), (4, 4, 4)])
def test_an_all_gather_takes_what_its_rounds_take(shape):
    spec = "x".join(map(str, (1,) * (3 - len(shape)) + shape))
    cluster = Cluster.parse(f"tpu-v5p:{spec}")
    torus = Torus(shape, (True,) * len(shape))
    run = Rounds(all_gather_rounds(torus))
    assert streaming_s("all_gather", cluster, range(torus.size)) == pytest.approx(run.seconds, rel=1e-5)
    # each chip sends all but its own share, in all over its links
    carried = {name: nbytes for name, nbytes, _ in run.network.usage()}
    cost = collective_cost("all_gather", SIZE, torus.size, 1, cluster)
    assert sum(carried.values()) == pytest.approx(cost.node_link_bytes * torus.size)
    assert max(carried.values()) == pytest.approx(min(carried.values()))


def test_the_published_formulas():
    # How to Scale Your Model: an axis of m chips, both ways round: (m-1)/m S/(2b); d axes: d times as fast
    cube = Cluster.parse("tpu-v5p:8x8x8")
    assert streaming_s("all_gather", cube, range(8)) == pytest.approx(7 / 8 * SIZE / (2 * LINK))
    assert streaming_s("reduce_scatter", cube, range(0, 512, 64)) == pytest.approx(7 / 8 * SIZE / (2 * LINK))
    assert streaming_s("all_reduce", cube, range(64)) == pytest.approx(2 * 63 / 64 * SIZE / (4 * LINK))
    assert streaming_s("all_to_all", cube, range(512)) == pytest.approx(SIZE * 8 / (8 * LINK))
    assert streaming_s("broadcast", cube, range(512)) == pytest.approx(SIZE / (6 * LINK))
    # a line has half of that: its ring comes back over the same cables
    assert streaming_s("all_gather", cube, range(4)) == pytest.approx(3 / 4 * SIZE / LINK)
    assert streaming_s("shift", cube, range(8)) == pytest.approx(SIZE / LINK)


def test_latency_counts_hops():
    cube = Cluster.parse("tpu-v5p:8x8x8")
    empty = {op: collective_cost(op, 0.0, 512, 1, cube).latency_s for op in ("all_gather", "all_reduce")}
    assert empty["all_gather"] == pytest.approx(5e-6 + 3 * 4e-6)
    assert empty["all_reduce"] == pytest.approx(5e-6 + 2 * 3 * 4e-6)
    assert p2p_cost(0.0, 0, 7, cube).latency_s == pytest.approx(5e-6 + 1e-6)
    assert p2p_cost(0.0, 0, 511, cube).latency_s == pytest.approx(5e-6 + 3e-6)


def test_slices_meet_on_the_network_with_each_chip_s_share():
    pods = Cluster.parse("tpu-v5e:4x16x16")
    cost = collective_cost("all_reduce", SIZE, 1024, 4, pods)
    assert cost.node_link_bytes == pytest.approx(2 * 255 / 256 * SIZE)
    assert cost.nic_bytes == pytest.approx(2 * 3 / 4 * SIZE / 256)
    # the slower tier counts: 25 Gb/s at 0.9 a chip, against four links of 45 GB/s
    slowest = max(2 * 255 / 256 * SIZE / (4 * 45e9), 2 * 3 / 4 * SIZE / 256 / (25e9 / 8 * 0.9))
    assert cost.total_s - cost.latency_s == pytest.approx(slowest)
    scattered = collective_cost("all_to_all", SIZE, 1024, 4, pods)
    assert scattered.nic_bytes == pytest.approx(768 / 1024 * SIZE)


def test_chips_without_a_box_are_a_ring_of_detours():
    cube = Cluster.parse("tpu-v5p:4x4x4")
    odd = (0, 21, 42)  # on the diagonal
    assert streaming_s("all_gather", cube, odd) >= 2 / 3 * SIZE / LINK


def test_a_torus_has_an_algorithm_of_its_own():
    cube = Cluster.parse("tpu-v5p:4x4x4")
    assert collective_cost("all_reduce", SIZE, 64, 1, cube).algorithm == "torus"
    with pytest.raises(
        PlanError, match="algorithm 'tree' does not apply to all_reduce over 64 ranks on 1 node; use auto"
    ):
        collective_cost("all_reduce", SIZE, 64, 1, cube, algorithm="tree")
