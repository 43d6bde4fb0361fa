"""Where time goes: traces made by hand, and real ones whose parts must add up to the step."""

import pytest
from synthetic import even_model, ideal_cluster, ideal_device, job, program, small_transformer, work

from simpar import Cluster, Overlap, simulate
from simpar.engine.simulate import execute
from simpar.program.body import Body
from simpar.program.ir import COMPUTE, Block, Collective, Group, Operation, Record, Recv, Run, Send, Wait
from simpar.trace.breakdown import RankTime, breakdown, bubble_fraction

ALL = Group("dp", range(8))
NS = 1e-9


def run(*blocks: Block, phase="forward") -> Run:
    return Run(Operation(phase, phase, tuple(blocks), tuple(range(len(blocks)))), 0)


def busy(duration_ns: int, phase="forward") -> Run:
    body = Body(phase=phase)
    body.run(work(duration_ns).kernel, "k")
    return run(body.block("b"), phase=phase)


def gather(duration_ns: int, group=ALL) -> Collective:
    """An all-gather that streams for so long on the ideal cluster."""
    size = len(group.ranks)
    return Collective("all_gather", duration_ns * size / (size - 1), group, "gather")


def total(time: RankTime) -> float:
    parts = (time.optimizer_s, time.interference_s, time.host_wait_s, time.bubble_s)
    return sum(time.compute_s.values()) + sum(time.exposed_s.values()) + sum(parts)


def times(ranks, cluster=None, **fields) -> tuple[RankTime, ...]:
    trace = execute(program(ranks, **fields), cluster or ideal_cluster())
    found = breakdown(trace)
    for time in found:
        assert total(time) == pytest.approx(trace.step_s, abs=1e-12)
    return found


def test_a_hidden_collective_costs_nothing():
    (first, *_) = times({rank: [gather(300), busy(1000)] for rank in range(8)})
    assert first.compute_s == {"elementwise": pytest.approx(1000 * NS)}
    assert first.exposed_s == {}
    assert first.hidden_s == {"dp": pytest.approx(300 * NS)}
    assert first.bubble_s == 0


def test_what_compute_does_not_cover_is_exposed():
    wait = [gather(1000), busy(300), Record("dp", "done"), Wait(COMPUTE, "done"), busy(50)]
    (first, *_) = times(dict.fromkeys(range(8), wait))
    assert first.exposed_s == {"dp": pytest.approx(700 * NS)}
    assert first.hidden_s == {"dp": pytest.approx(300 * NS)}
    assert first.bubble_s == 0


def test_waiting_for_a_slower_rank_is_a_bubble():
    # rank 7 computes for 500 more; the others' collective begins only then
    def steps(more):
        return [
            busy(100 + more),
            Record(COMPUTE, "e"),
            Wait("dp", "e"),
            gather(70),
            Record("dp", "d"),
            Wait(COMPUTE, "d"),
            busy(10),
        ]

    found = times({rank: steps(500 if rank == 7 else 0) for rank in range(8)})
    assert found[0].bubble_s == pytest.approx(500 * NS)
    assert found[0].exposed_s == {"dp": pytest.approx(70 * NS)}
    assert found[7].bubble_s == pytest.approx(0, abs=1e-15)


def test_a_message_that_its_receiver_waits_for_is_exposed_and_the_time_before_it_a_bubble():
    first = [busy(100), Record(COMPUTE, "e"), Wait("pp_forward", "e"), Send("pp_forward", 1, 40.0, "x"), busy(200)]
    found = times({0: first, 1: [Recv(0, "x"), busy(160)]})
    assert found[1].bubble_s == pytest.approx(100 * NS)
    assert found[1].exposed_s == {"pp": pytest.approx(40 * NS)}
    # the sender goes on: nothing exposed there
    assert found[0].exposed_s == {}
    assert found[0].compute_s == {"elementwise": pytest.approx(300 * NS)}


def test_a_message_that_arrives_early_is_no_exposed_time():
    found = times({0: [Send("pp_forward", 1, 40.0, "x"), busy(300)], 1: [busy(200), Recv(0, "x"), busy(100)]})
    assert found[1].exposed_s == {}
    assert found[1].bubble_s == pytest.approx(0, abs=1e-15)


def test_two_streams_in_one_gap_count_once():
    both = [
        gather(100),
        gather(150, Group("ep", range(8))),
        *(step for s in ("dp", "ep") for step in (Record(s, s), Wait(COMPUTE, s))),
        busy(10),
    ]
    (first, *_) = times(dict.fromkeys(range(8), both))
    # the two share the links: 100 each by 200, then 50 alone
    assert sum(first.exposed_s.values()) == pytest.approx(250 * NS)


def test_slowed_compute_is_interference():
    cluster = ideal_cluster(device=ideal_device(compute_rate_during_collectives=0.5))
    (first, *_) = times({rank: [gather(400), busy(1000)] for rank in range(8)}, cluster)
    assert first.compute_s == {"elementwise": pytest.approx(1000 * NS)}
    assert first.interference_s == pytest.approx(200 * NS)
    assert first.hidden_s == {"dp": pytest.approx(400 * NS)}


def test_waiting_for_launches_is_host_time():
    (only,) = times({0: [busy(30), busy(30)]}, launch_s=100e-9)
    assert only.host_wait_s == pytest.approx(170 * NS)
    assert only.bubble_s == pytest.approx(0, abs=1e-15)


def test_the_optimizer_is_apart():
    (only,) = times({0: [busy(30), busy(70, phase="optimizer")]})
    assert only.optimizer_s == pytest.approx(70 * NS)
    assert only.compute_s == {"elementwise": pytest.approx(30 * NS)}


def test_collectives_inside_an_operation_are_tensor_parallel_time():
    group = Group("tp", range(2))
    body = Body(group)
    body.run(work(100).kernel, "a")
    body.exchange("all_gather", 80.0, "waited for")  # 40 ns
    hidden = body.begin("all_gather", 60.0, "hidden")  # 30 ns
    body.run(work(100).kernel, "b")
    body.join(hidden)
    found = times({rank: [run(body.block("b"))] for rank in range(2)})
    assert found[0].exposed_s == {"tp": pytest.approx(40 * NS)}
    assert found[0].hidden_s == {"tp": pytest.approx(30 * NS)}
    assert found[0].compute_s == {"elementwise": pytest.approx(200 * NS)}


def test_the_bubble_of_a_pipeline_weighs_replicas():
    model = even_model(2, forward=100, backward=200)
    result = simulate(job(model, ideal_cluster(gpus_per_node=8, bytes_per_s=1e24), pp=2, grad_accum=3))
    assert bubble_fraction(result.trace) == pytest.approx(1 / 4)
    assert [time.replicas for time in result.ranks] == [4, 4]


def test_an_empty_step_has_no_bubble():
    assert bubble_fraction(execute(program({0: []}), ideal_cluster())) == 0.0


PLANS = [
    {"zero": 1},
    {"zero": 3, "grad_accum": 2},
    {"tp": 8, "sequence_parallel": True},
    {"tp": 2, "pp": 4, "grad_accum": 6, "zero": 2},
    {"pp": 4, "tp": 4, "grad_accum": 4, "launch_s": 2e-5},
    {"pp": 2, "vpp": 2, "schedule": "interleaved", "grad_accum": 4, "tp": 2, "recompute": "full"},
    {"zero": 3, "tp": 4, "overlap": Overlap(grad_reduce=False, param_gather=False, tp="none")},
    {"zero": 3, "dp_shard": 4, "tp": 2, "sequence_parallel": True, "overlap": Overlap(tp="pipelined")},
]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("fold", [True, False])
def test_the_parts_of_a_step_add_up_to_it(plan, fold):
    cluster = Cluster.parse("h100-sxm:2x8")
    result = simulate(job(small_transformer(), cluster, seq_len=512, **plan), fold=fold)
    for time in result.ranks:
        assert total(time) == pytest.approx(result.step_time_s, abs=1e-9)
        numbers = (
            *time.compute_s.values(),
            *time.exposed_s.values(),
            *time.hidden_s.values(),
            time.optimizer_s,
            time.interference_s,
            time.host_wait_s,
            time.bubble_s,
        )
        assert min(numbers) >= -1e-9
    if not fold:
        assert len(result.ranks) == 16


@pytest.mark.parametrize("plan", PLANS)
def test_folded_ranks_spend_their_time_as_unfolded_ones(plan):
    cluster = Cluster.parse("h100-sxm:2x8")
    wanted = job(small_transformer(), cluster, seq_len=512, **plan)
    folded, unfolded = (simulate(wanted, fold=fold) for fold in (True, False))
    assert folded.bubble_fraction == pytest.approx(unfolded.bubble_fraction, abs=1e-9)
    of_rank = {time.rank: time for time in unfolded.ranks}
    for time in folded.ranks:
        other = of_rank[time.rank]
        assert time.compute_s == pytest.approx(other.compute_s)
        assert time.exposed_s == pytest.approx(other.exposed_s)
        assert time.hidden_s == pytest.approx(other.hidden_s)
        assert time.bubble_s == pytest.approx(other.bubble_s, abs=1e-9)


def test_rows_of_a_lane_are_found_as_one_looks_for_them():
    trace = simulate({"model": "gpt2", "cluster": "h100-sxm:1x8", "plan": {"tp": 2, "pp": 2, "grad_accum": 4}}).trace
    for spans in (trace.spans, trace.kernels()):
        rows = spans.rows_by_lane(len(trace.lanes))
        assert len(rows) == len(trace.lanes)
        for lane, found in enumerate(rows):
            assert found.tolist() == [row for row, where in enumerate(spans.lane) if where == lane]
            for column, other in zip(spans.times(found), (spans.start_ns, spans.end_ns), strict=True):
                assert column.tolist() == other[found].tolist()
    assert trace.spans.rows_by_lane(len(trace.lanes) + 2)[-1].tolist() == []
