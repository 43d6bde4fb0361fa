"""All-reduce algorithms beyond NCCL's, against runs of the algorithms on numbers that count steps and bytes."""

from collections import Counter

import numpy as np
import pytest

import simpar
from simpar.cost.all_reduce import halving_doubling, hierarchical
from simpar.cost.collective import collective_cost
from simpar.errors import PlanError
from simpar.hardware.cluster import Cluster

NBYTES = 64 * 3 * 2**16
A100 = Cluster.parse("a100-sxm:12x8")


class Ranks:
    """Ranks with a buffer each; counts what each sends inside its node and between nodes, and the steps of each."""

    def __init__(self, size, local):
        self.local = local
        self.values = [np.arange(size * 48) * (rank + 1.0) for rank in range(size)]
        self.truth = sum(self.values)
        self.sent = Counter()
        self.steps = Counter()

    def tier(self, a, b):
        return "inside" if a // self.local == b // self.local else "between"

    def step(self, moves, *, add):
        """(source, target, slice) at once."""
        payload = [(a, b, part, self.values[a][part].copy()) for a, b, part in moves]
        for a, b, part, data in payload:
            self.values[b][part] = self.values[b][part] + data if add else data
            self.sent[self.tier(a, b), a] += len(data)
        for tier in {self.tier(a, b) for a, b, _ in moves}:
            self.steps[tier] += 1

    def share(self, tier):
        """What the busiest rank sends, in buffers."""
        return max((n for (t, _), n in self.sent.items() if t == tier), default=0) / len(self.values[0])


def run_halving_doubling(ranks, first, count, stride, part):
    """Reduce-scatter by halving and all-gather by doubling over ``count`` ranks, ``stride`` apart."""
    places = [first + i * stride for i in range(count)]
    held = dict.fromkeys(places, part)
    history, distance = [], 1
    while distance < count:
        moves, kept = [], {}
        for index, place in enumerate(places):
            low, high = held[place].start, held[place].stop
            middle = (low + high) // 2
            mine, theirs = slice(low, middle), slice(middle, high)
            if index & distance:
                mine, theirs = theirs, mine
            moves.append((place, places[index ^ distance], theirs))
            kept[place] = mine
        history.append((distance, dict(held)))
        yield moves, True
        held = kept
        distance *= 2
    for distance, before in reversed(history):
        yield [(p, places[i ^ distance], held[p]) for i, p in enumerate(places)], False
        held = before


@pytest.mark.parametrize(("nodes", "local"), [(1, 8), (4, 1), (2, 4), (4, 8), (8, 2)])
def test_halving_and_doubling_as_it_runs(nodes, local):
    size = nodes * local
    ranks = Ranks(size, local)
    # neighbours first: distance 1, 2, 4 … over all ranks at once
    for moves, add in run_halving_doubling(ranks, 0, size, 1, slice(0, size * 48)):
        ranks.step(moves, add=add)
    for values in ranks.values:
        np.testing.assert_allclose(values, ranks.truth)
    cluster = Cluster.parse(f"a100-sxm:{nodes}x{local}")
    found = halving_doubling(NBYTES, size, nodes, cluster)
    assert found.node_link_bytes == pytest.approx(ranks.share("inside") * NBYTES)
    assert found.nic_bytes == pytest.approx(ranks.share("between") * NBYTES)
    link, fabric = cluster.node_link, cluster.fabric
    between = ranks.steps["between"] * max(fabric.ring_step_s, link.step_latency_s) if nodes > 1 else 0.0
    assert found.latency_s == pytest.approx(link.base_latency_s + ranks.steps["inside"] * link.step_latency_s + between)


def test_ranks_beyond_a_power_of_two_hand_over_before_and_get_the_result_after():
    ranks = Ranks(6, 6)
    whole = slice(0, 6 * 48)
    ranks.step([(4, 0, whole), (5, 1, whole)], add=True)
    for moves, add in run_halving_doubling(ranks, 0, 4, 1, whole):
        ranks.step(moves, add=add)
    ranks.step([(0, 4, whole), (1, 5, whole)], add=False)
    for values in ranks.values:
        np.testing.assert_allclose(values, ranks.truth)
    cluster = Cluster.parse("a100-sxm:1x6")
    found = halving_doubling(NBYTES, 6, 1, cluster)
    link = cluster.node_link
    assert found.latency_s == pytest.approx(link.base_latency_s + ranks.steps["inside"] * link.step_latency_s)
    # the pair's link carries a buffer one way before and one the other way after, and each waits for it
    assert found.node_link_bytes == pytest.approx((2 * 3 / 4 + 2) * NBYTES)


@pytest.mark.parametrize(("nodes", "local"), [(1, 8), (3, 4), (12, 8), (5, 1)])
def test_hierarchical_is_three_rings(nodes, local):
    ranks = Ranks(nodes * local, local)
    length = len(ranks.values[0])
    pieces = [slice(length * i // local, length * (i + 1) // local) for i in range(local)]
    ring(ranks, [[node * local + i for i in range(local)] for node in range(nodes)], [pieces] * nodes, gathers=False)
    owned = [pieces[(i + 1) % local] for i in range(local)]
    columns = [[node * local + i for node in range(nodes)] for i in range(local)]
    parts = [
        [
            slice(p.start + (p.stop - p.start) * k // nodes, p.start + (p.stop - p.start) * (k + 1) // nodes)
            for k in range(nodes)
        ]
        for p in owned
    ]
    ring(ranks, columns, parts, gathers=False)
    ring(ranks, columns, parts, gathers=True)
    ring(ranks, [[node * local + i for i in range(local)] for node in range(nodes)], [pieces] * nodes, gathers=True)
    for values in ranks.values:
        np.testing.assert_allclose(values, ranks.truth)
    cluster = Cluster.parse(f"a100-sxm:{nodes}x{local}")
    found = hierarchical(NBYTES, nodes * local, nodes, cluster)
    assert found.node_link_bytes == pytest.approx(ranks.share("inside") * NBYTES)
    assert found.nic_bytes == pytest.approx(ranks.share("between") * NBYTES)
    link, fabric = cluster.node_link, cluster.fabric
    between = ranks.steps["between"] * max(fabric.ring_step_s, link.step_latency_s) if nodes > 1 else 0.0
    assert found.latency_s == pytest.approx(link.base_latency_s + ranks.steps["inside"] * link.step_latency_s + between)


def ring(ranks, groups, pieces, *, gathers):
    """One pass of a ring in each group; rank i ends a reduction with piece i + 1, and begins a gather with it."""
    count = len(groups[0])
    for step in range(count - 1):
        moves = []
        for group, parts in zip(groups, pieces, strict=True):
            for i, place in enumerate(group):
                piece = parts[(i + 1 - step) % count] if gathers else parts[(i - step) % count]
                moves.append((place, group[(i + 1) % count], piece))
        ranks.step(moves, add=not gathers)


@pytest.mark.parametrize("nodes", [1, 4])
def test_reduce_and_broadcast_follow_each_other(nodes):
    one, other, both = (
        collective_cost(op, NBYTES, 8 * nodes, nodes, A100, algorithm=algorithm)
        for op, algorithm in (("reduce", "auto"), ("broadcast", "auto"), ("all_reduce", "reduce_broadcast"))
    )
    assert both.total_s == pytest.approx(one.total_s + other.total_s)
    assert both.node_link_bytes == pytest.approx(one.node_link_bytes + other.node_link_bytes)
    assert both.nic_bytes == pytest.approx(one.nic_bytes + other.nic_bytes)


@pytest.mark.parametrize("algorithm", ["halving_doubling", "hierarchical", "reduce_broadcast"])
@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_links_carry_no_more_than_they_can(algorithm, nodes):
    for nbytes in (1e3, 1e6, 1e9):
        found = collective_cost("all_reduce", nbytes, 8 * nodes, nodes, A100, algorithm=algorithm)
        streaming_s = found.total_s - found.latency_s
        assert found.algorithm == algorithm
        assert found.node_link_bytes / A100.node_link.bandwidth_bytes_per_s <= streaming_s * (1 + 1e-9)
        assert found.nic_bytes / A100.nic_bytes_per_s <= streaming_s * (1 + 1e-9)


def test_they_are_taken_only_when_named():
    assert collective_cost("all_reduce", 1e4, 64, 8, A100).algorithm in ("ring", "tree", "nvls_tree")
    with pytest.raises(PlanError, match="algorithm 'hierarchical' does not apply to all_gather"):
        collective_cost("all_gather", 1e4, 64, 8, A100, algorithm="hierarchical")


@pytest.mark.parametrize("algorithm", ["halving_doubling", "hierarchical", "reduce_broadcast"])
def test_a_plan_may_name_them(algorithm):
    plan = {"seq_len": 512, "collective_algorithm": algorithm, "clip_gradients": False, "bucket_parameters": 10**9}
    found = simpar.simulate(simpar.Job(model="gpt2", cluster="a100-sxm:2x8", plan=plan))
    reduced = found.trace.spans.duration_ns[found.trace.spans.nbytes > 0]
    model = found.job.model.replace(vocab=found.job.model.padded_vocab(128))  # as Megatron pads
    expected = collective_cost("all_reduce", 4.0 * model.parameters, 16, 2, A100, algorithm=algorithm).total_s
    assert reduced.max() * 1e-9 == pytest.approx(expected, rel=1e-6)
