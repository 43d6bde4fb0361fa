"""Collectives and messages in the engine: alone as the cost functions say, together sharing links and devices."""

import pytest
from synthetic import columns, ideal_cluster, ideal_device, lane_spans, program, work

from simpar import Cluster
from simpar.cost.collective import collective_cost, p2p_cost
from simpar.engine.simulate import execute
from simpar.hardware.fabric import span
from simpar.program.ir import COMPUTE, Collective, Group, Record, Recv, Send, Wait
from simpar.units import ns

H100 = Cluster.parse("h100-sxm:4x8")
PODS = H100.replace(fabric={"base": "ndr400", "pod_nodes": 2, "oversubscription": 1.0})
MB = 10**6


def collective(op="all_reduce", nbytes=64 * MB, ranks=range(8), stream="dp", name="c"):
    return Collective(op, float(nbytes), Group(stream, ranks), name)


@pytest.mark.parametrize("nbytes", [0, 1000, 3 * MB, 1000 * MB])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
@pytest.mark.parametrize("ranks", [range(2), range(8), range(0, 32, 8), range(32), (1, 9, 5, 13)])
@pytest.mark.parametrize("cluster", [H100, PODS], ids=["h100", "pods"])
def test_alone_a_collective_takes_what_the_cost_function_says(cluster, op, ranks, nbytes):
    trace = execute(program({rank: [collective(op, nbytes, ranks)] for rank in ranks}), cluster)
    cost = collective_cost(op, nbytes, len(ranks), span(ranks, 8)[0], cluster)
    assert abs(trace.step_ns - cost.total_s * 1e9) <= 1
    assert {tuple(lane_spans(trace, rank, "dp")[0][1:]) for rank in ranks} == {(0, trace.step_ns)}


@pytest.mark.parametrize(("source", "target"), [(0, 1), (0, 8), (3, 29)])
@pytest.mark.parametrize("cluster", [H100, PODS], ids=["h100", "pods"])
def test_alone_a_message_takes_what_the_cost_function_says(cluster, source, target):
    trace = execute(program({source: [Send("pp", target, 5.0 * MB, "x")], target: [Recv(source, "x")]}), cluster)
    assert abs(trace.step_ns - p2p_cost(5 * MB, source, target, cluster).total_s * 1e9) <= 1


def test_a_ring_on_ideal_links_moves_its_bytes_at_link_speed():
    # an all-reduce of 8000 bytes over 8 ranks sends 2 · 7/8 · 8000 bytes per rank, one per nanosecond
    trace = execute(program({rank: [collective(nbytes=8000)] for rank in range(8)}, algorithm="ring"), ideal_cluster())
    assert trace.step_ns == 14_000


def test_two_equal_collectives_at_once_take_twice_as_long():
    both = [collective(nbytes=8000, name="a"), collective(nbytes=8000, stream="ep", name="b")]
    trace = execute(program(dict.fromkeys(range(8), both), algorithm="ring"), ideal_cluster())
    assert lane_spans(trace, 3, "dp") == [("a", 0, 28_000)]
    assert lane_spans(trace, 3, "ep") == [("b", 0, 28_000)]


def test_on_one_stream_collectives_queue():
    both = [collective(nbytes=8000, name="a"), collective(nbytes=8000, name="b")]
    trace = execute(program(dict.fromkeys(range(8), both), algorithm="ring"), ideal_cluster())
    assert lane_spans(trace, 0, "dp") == [("a", 0, 14_000), ("b", 14_000, 28_000)]


def test_groups_on_different_links_do_not_meet():
    ranks = {r: [collective(nbytes=8000, ranks=range(r // 4 * 4, r // 4 * 4 + 4))] for r in range(8)}
    trace = execute(program(ranks, algorithm="ring"), ideal_cluster())
    assert trace.step_ns == 2 * 3 * 8000 // 4


def test_latency_does_not_hold_links():
    # 500 of latency, then 8000 and 7000 bytes; the second one's latency ends at 8000, when 500 of the first are left
    cluster = ideal_cluster(latency_s=500e-9)
    late = [work(8000 - 500), Record(COMPUTE, "e"), Wait("ep", "e"), collective("all_gather", 8000, stream="ep")]
    ranks = {r: [collective("all_gather", 8000 * 8 / 7), *late] for r in range(8)}
    trace = execute(program(ranks), cluster)
    assert lane_spans(trace, 0, "dp")[0][1:] == (0, 9000)
    assert lane_spans(trace, 0, "ep")[0][1:] == (7500, 9000 + 6500)


def test_a_collective_starts_when_its_last_member_arrives():
    ranks = {r: [work(100 * r), Record(COMPUTE, "e"), Wait("dp", "e"), collective("all_gather", 800)] for r in range(8)}
    trace = execute(program(ranks), ideal_cluster())
    assert {tuple(lane_spans(trace, r, "dp")[0][1:]) for r in range(8)} == {(700, 1400)}


def test_a_forced_algorithm_runs_where_it_has_a_form():
    slow = execute(program({r: [collective()] for r in range(8)}, algorithm="ring"), H100)
    fast = execute(program({r: [collective()] for r in range(8)}), H100)
    ring = collective_cost("all_reduce", 64 * MB, 8, 1, H100, algorithm="ring")
    assert abs(slow.step_ns - ring.total_s * 1e9) <= 1
    assert fast.step_ns < slow.step_ns
    # a tree does no all-gather: NCCL falls back, and so do we
    tree = execute(program({r: [collective("all_gather")] for r in range(8)}, algorithm="tree"), H100)
    assert abs(tree.step_ns - ns(collective_cost("all_gather", 64 * MB, 8, 1, H100).total_s)) <= 1


def test_bytes_out_equal_bytes_in_on_every_link():
    ranks = {r: [collective(ranks=range(16))] for r in range(16)}
    ranks[0].append(Send("pp", 9, 77.0, "x"))
    ranks[9].append(Recv(0, "x"))
    links = {link.name: link.nbytes for link in execute(program(ranks), H100).links}
    out, into = (sum(b for name, b in links.items() if name[-1] == way) for way in "><")
    assert out == into
    assert links["nic0>"] == links["nic0<"] + 77


# ---- interference ---------------------------------------------------------------------------------------------------


def slowed(compute_rate=1.0, collective_rate=1.0) -> Cluster:
    return ideal_cluster(
        device=ideal_device(
            compute_rate_during_collectives=compute_rate, collective_rate_during_compute=collective_rate
        )
    )


@pytest.mark.parametrize("rate", [0.25, 0.5, 0.8])
@pytest.mark.parametrize(("compute", "gathered"), [(10_000, 4000), (10_000, 7000)])
def test_compute_beside_a_collective_loses_what_the_collective_lasts(rate, compute, gathered):
    nbytes = gathered * 8 / 7
    trace = execute(program({r: [collective("all_gather", nbytes), work(compute)] for r in range(8)}), slowed(rate))
    # T = C + c (1 - r), since the collective is over before compute is
    assert trace.step_ns == pytest.approx(compute + gathered * (1 - rate), abs=1)
    assert lane_spans(trace, 0, "dp")[0][2] == gathered


def test_compute_that_ends_before_the_collective_runs_slowed_all_along():
    trace = execute(program({r: [collective("all_gather", 80_000), work(1000)] for r in range(8)}), slowed(0.4))
    assert lane_spans(trace, 0)[0][2] == 2500
    assert trace.step_ns == 70_000


def test_a_collective_that_comes_in_the_middle_slows_what_is_left():
    # 300 ns alone, then the collective for 700: 500 of compute go on at a half until 1000, the rest alone
    wait = [work(300), Record(COMPUTE, "e"), Wait("dp", "e"), collective("all_gather", 800), work(600)]
    trace = execute(program(dict.fromkeys(range(8), wait)), slowed(0.5))
    assert lane_spans(trace, 0, "dp")[0][1:] == (300, 1000)
    assert lane_spans(trace, 0)[1][1:] == (300, 1000 + 250)


def test_kernels_that_begin_and_end_beside_a_collective_are_slowed_one_by_one():
    many = [collective("all_gather", 8000), *[work(100)] * 40]
    trace = execute(program(dict.fromkeys(range(8), many)), slowed(0.5))
    assert trace.step_ns == 4000 + 7000 // 2


def test_a_collective_beside_compute_is_slowed_while_compute_runs():
    trace = execute(program({r: [collective("all_gather", 8000), work(1000)] for r in range(8)}), slowed(1.0, 0.25))
    # 1000 ns at a quarter, then alone, although the compute stream has nothing more to do
    assert lane_spans(trace, 0, "dp")[0][2] == 1000 + 7000 - 250


def test_both_slow_each_other():
    trace = execute(program({r: [collective("all_gather", 8000), work(1000)] for r in range(8)}), slowed(0.5, 0.25))
    # compute at a half ends at 2000, when 500 of the collective are done
    assert lane_spans(trace, 0)[0][2] == 2000
    assert trace.step_ns == 2000 + 6500


def test_a_collective_goes_on_at_full_speed_while_compute_waits():
    waits = [collective("all_gather", 8000), Record("dp", "done"), Wait(COMPUTE, "done"), work(10)]
    trace = execute(program(dict.fromkeys(range(8), waits)), slowed(0.5, 0.25))
    assert trace.step_ns == 7010


def test_a_collective_is_as_slow_as_its_busiest_member():
    # rank 0 computes for 1000, the others not at all
    ranks = {r: [collective("all_gather", 8000), work(1000 if r == 0 else 0)] for r in range(8)}
    trace = execute(program(ranks), slowed(1.0, 0.25))
    assert trace.step_ns == 1000 + 6750


def test_nothing_is_slowed_by_a_message():
    trace = execute(program({0: [Send("pp", 1, 500.0, "x"), work(1000)], 1: [Recv(0, "x")]}), slowed(0.5, 0.5))
    assert lane_spans(trace, 0)[0][2] == 1000
    assert lane_spans(trace, 0, "pp")[0][2] == 500


def test_equal_programs_give_equal_traces():
    ranks = {r: [collective(name=f"{i}") for i in range(5)] + [work(10_000)] for r in range(8)}
    assert columns(execute(program(ranks), H100)) == columns(execute(program(ranks), H100))
