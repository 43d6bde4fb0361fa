"""Pipelines in the engine against closed forms, and against the oracle of the schedules, which has no clock."""

import pytest
from synthetic import even_model, ideal_cluster, job, lane_spans, pipeline

from simpar import simulate
from simpar.engine.simulate import execute
from simpar.schedule.measure import makespan, timetable
from simpar.schedule.registry import build
from simpar.trace.breakdown import bubble_fraction

INSTANT = ideal_cluster(bytes_per_s=1e24)
SHAPES = [(2, 2), (2, 8), (3, 5), (4, 4), (4, 16), (8, 8), (8, 3)]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), SHAPES)
def test_equal_stages_with_free_transfers_take_m_plus_p_minus_1_slots(schedule, pp, m):
    trace = execute(pipeline(build(schedule, pp=pp, microbatches=m), forward=7, backward=13), INSTANT)
    assert trace.step_ns == (m + pp - 1) * (7 + 13)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), SHAPES)
def test_simulate_agrees_with_the_closed_form_and_adds_the_optimizer(schedule, pp, m):
    model = even_model(pp, forward=1000, backward=2300, parameters=100, sent=8)
    result = simulate(
        job(model, ideal_cluster(gpus_per_node=pp, bytes_per_s=1e24), pp=pp, grad_accum=m, schedule=schedule)
    )
    # per parameter: Adam reads 4 of gradient, and reads and writes two moments and the master (24); the cast reads 4
    # and writes 2; a module's gradients are neither clipped nor kept to be zeroed
    optimizer = 100 * (4 + 24 + 6)
    assert result.trace.step_ns == (m + pp - 1) * 3300 + optimizer


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), SHAPES)
def test_bubble_fraction_is_p_minus_1_over_m_plus_p_minus_1(schedule, pp, m):
    model = even_model(pp, forward=1000, backward=2000)
    result = simulate(
        job(model, ideal_cluster(gpus_per_node=pp, bytes_per_s=1e24), pp=pp, grad_accum=m, schedule=schedule)
    )
    assert result.bubble_fraction == pytest.approx((pp - 1) / (m + pp - 1), rel=1e-12)
    assert result.bubble_fraction == bubble_fraction(result.trace)


@pytest.mark.parametrize(("pp", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 4, 3), (3, 9, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(pp, m, v):
    model = even_model(pp * v, forward=100, backward=200)
    cluster = ideal_cluster(gpus_per_node=pp, bytes_per_s=1e24)
    result = simulate(job(model, cluster, pp=pp, grad_accum=m, schedule="interleaved", vpp=v))
    assert result.trace.step_ns == (m * v + pp - 1) * 300
    assert result.bubble_fraction == pytest.approx((pp - 1) / (m * v + pp - 1), rel=1e-12)


@pytest.mark.parametrize("transfer", [0, 5, 11])
@pytest.mark.parametrize(
    ("schedule", "pp", "m", "v"),
    [(s, p, m, 1) for s in ("gpipe", "1f1b") for p, m in ((2, 3), (4, 6), (5, 2))]
    + [("interleaved", 2, 4, 2), ("interleaved", 3, 6, 3), ("interleaved", 4, 8, 2), ("interleaved", 4, 2, 2)],
)
def test_every_action_runs_when_the_oracle_says(schedule, pp, m, v, transfer):
    order = build(schedule, pp=pp, microbatches=m, chunks=v)
    oracle = timetable(order, forward=11, backward=17, transfer=transfer)
    cluster = ideal_cluster(bytes_per_s=1e24, latency_s=transfer * 1e-9)
    trace = execute(pipeline(order, forward=11, backward=17), cluster)
    seen = {name: (start, end) for rank in range(pp) for name, start, end in lane_spans(trace, rank)}
    assert seen == {str(action): tuple(span) for action, span in oracle.items()}
    assert trace.step_ns == makespan(order, forward=11, backward=17, transfer=transfer)


def test_gpipe_and_1f1b_are_equally_long_but_keep_different_amounts():
    model = even_model(4, forward=500, backward=900, kept=1000)
    cluster = ideal_cluster(gpus_per_node=4, bytes_per_s=1e24)
    gpipe, one = (simulate(job(model, cluster, pp=4, grad_accum=12, schedule=s)) for s in ("gpipe", "1f1b"))
    assert gpipe.trace.step_ns == one.trace.step_ns
    assert [f.peak_bytes for f in gpipe.footprints] == [12_000] * 4
    assert [f.peak_bytes for f in one.footprints] == [4000, 3000, 2000, 1000]


def test_a_message_is_on_the_wire_for_its_bytes():
    # two stages, one microbatch: forward 100, 60 bytes across, forward 100, backward 200, 60 across, backward 200
    trace = execute(
        pipeline(build("1f1b", pp=2, microbatches=1), forward=100, backward=200, nbytes=60), ideal_cluster()
    )
    assert lane_spans(trace, 0, "pp_forward") == [("pp_forward", 100, 160)]
    assert lane_spans(trace, 1, "pp_backward") == [("pp_backward", 460, 520)]
    assert trace.step_ns == 720


def test_unequal_stages_are_bound_by_the_slowest():
    # layers 1 + 3: the second stage is the bottleneck, the first one's forward fills it and its backward drains it
    model = even_model(4, forward=100, backward=200)
    cluster = ideal_cluster(gpus_per_node=2, bytes_per_s=1e24)
    result = simulate(job(model, cluster, pp=2, grad_accum=10, layer_split=(1, 3)))
    assert result.trace.step_ns == 100 + 10 * 3 * 300 + 200
