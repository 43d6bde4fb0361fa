"""Bubbles and their causes, against the breakdown, which counts the same nanoseconds in its own way."""

import numpy as np
import pytest
from synthetic import even_model, ideal_cluster, ideal_device, job, small_transformer

from simpar.simulation import simulate
from simpar.trace.breakdown import breakdown
from simpar.trace.bubbles import BUBBLE_CAUSES, bubbles, compute_lanes, inner_bubbles
from simpar.trace.trace import NONE, Trace
from simpar.trace.utilisation import busy_share, communicator


def pipeline(**plan: object) -> Trace:
    model = even_model(8, forward=100, backward=200, parameters=64, sent=50)
    return simulate(job(model, ideal_cluster(1, 8), pp=4, micro_batch=1, global_batch=16, **plan)).trace


def sharded() -> Trace:
    model = small_transformer(layers=2)
    return simulate(job(model, ideal_cluster(1, 4), zero=3, seq_len=128, global_batch=8)).trace


def tensor_parallel() -> Trace:
    device = ideal_device(launch_s=3e-6)
    model = small_transformer(layers=2)
    return simulate(job(model, ideal_cluster(1, 4, device=device), tp=4, seq_len=128, global_batch=2)).trace


TRACES = {"1f1b": pipeline, "gpipe": lambda: pipeline(schedule="gpipe"), "fsdp": sharded, "tp": tensor_parallel}


@pytest.mark.parametrize("name", TRACES)
def test_bubbles_are_what_the_breakdown_calls_bubble_and_exposed(name: str) -> None:
    trace = TRACES[name]()
    found = bubbles(trace)
    inside = inner_bubbles(trace, trace.kernels())
    times = {time.rank: time for time in breakdown(trace)}
    for lane in compute_lanes(trace):
        mine = found.lane == lane
        busy = trace.spans.duration_ns[trace.spans.lane == lane].sum()
        assert found.duration_ns[mine].sum() + busy == trace.step_ns
        time = times[trace.lanes[lane].rank]
        exposed = mine & (found.cause == BUBBLE_CAUSES.index("exposed communication"))
        assert found.duration_ns[mine & ~exposed].sum() * 1e-9 == pytest.approx(time.bubble_s, abs=2e-9)
        assert (found.awaited[exposed] != NONE).all()
        for stream in {communicator(trace.lanes[i].stream) for i in found.awaited[exposed].tolist()}:
            waited = [i for i, x in enumerate(trace.lanes) if communicator(x.stream) == stream]
            total = found.duration_ns[exposed & np.isin(found.awaited, waited)].sum() * 1e-9
            assert total == pytest.approx(time.exposed_s[stream], abs=2e-9)
        within = inside.lane == lane
        host = within & (inside.cause == BUBBLE_CAUSES.index("host"))
        assert inside.duration_ns[host].sum() * 1e-9 == pytest.approx(time.host_wait_s, abs=1e-6)


def test_places_of_a_pipeline_s_bubbles() -> None:
    trace = pipeline()
    found = bubbles(trace)
    first, last = compute_lanes(trace)[0], compute_lanes(trace)[-1]
    causes = {
        lane: {BUBBLE_CAUSES[cause] for cause in found.cause[found.lane == lane].tolist()} for lane in (first, last)
    }
    assert {"warm-up", "cool-down"} <= causes[first]
    assert "warm-up" in causes[last]
    at_start = found.start_ns[(found.lane == last) & (found.cause == BUBBLE_CAUSES.index("warm-up"))]
    assert at_start.min() == 0  # the last stage waits for the first microbatch


def test_links_are_busy_as_long_as_their_spans() -> None:
    trace = pipeline()
    edges = np.linspace(0, trace.step_ns, 12).astype(np.int64)
    shares = busy_share((trace.spans, trace.kernels()), trace.lanes, edges)
    for name, share in shares.items():
        lanes = [i for i, lane in enumerate(trace.lanes) if communicator(lane.stream) == name]
        assert ((share >= 0) & (share <= 1)).all()
        mine = np.isin(trace.spans.lane, lanes)
        ranks = {trace.lanes[i].rank for i in trace.spans.lane[mine].tolist()}
        union = sum(_union_ns(trace, lanes, rank) for rank in ranks)
        assert (share * np.diff(edges)).sum() == pytest.approx(union / len(ranks), rel=1e-9)


def _union_ns(trace: Trace, lanes: list[int], rank: int) -> int:
    mine = [i for i in range(len(trace.spans)) if trace.spans.lane[i] in lanes]
    busy = {
        t
        for i in mine
        if trace.lanes[trace.spans.lane[i]].rank == rank
        for t in range(int(trace.spans.start_ns[i]), int(trace.spans.end_ns[i]))
    }
    return len(busy)
