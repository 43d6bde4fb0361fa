"""The critical path, against programs whose path can be read off by hand, and as a whole that fills every step."""

from itertools import pairwise

import pytest
from synthetic import ideal_cluster, ideal_device, pipeline, program, work

from simpar.engine.simulate import execute
from simpar.program.ir import COMPUTE, Collective, Group, Launch, Record, Recv, Send, Wait
from simpar.schedule.registry import build
from simpar.simulation import simulate
from simpar.trace.critical_path import critical_path
from simpar.trace.trace import Trace, empty_spans

LATE = ideal_cluster(latency_s=10e-9)


def path(trace: Trace) -> list[tuple[str, int, int, str]]:
    """Name of the span, start, end and bound of every part."""
    return [
        (trace.names[trace.spans.name[part.row]], part.start_ns, part.end_ns, part.bound)
        for part in critical_path(trace)
    ]


def test_an_empty_trace_has_an_empty_path() -> None:
    nothing = execute(program({0: []}), LATE)
    assert len(nothing.spans) == 0
    assert empty_spans().start_ns.size == 0
    assert critical_path(nothing) == ()


def test_it_runs_through_the_sender_and_the_message_that_the_receiver_waits_for() -> None:
    sends = [work(100, "first"), Record(COMPUTE, "e"), Wait("pp", "e"), Send("pp", 1, 50.0, "x")]
    trace = execute(program({0: sends, 1: [work(30, "early"), Recv(0, "x"), work(200, "last")]}), LATE)
    assert path(trace) == [
        ("first", 0, 100, "device"),
        ("pp", 100, 160, "communication"),
        ("last", 160, 360, "device"),
    ]


def test_it_stays_on_the_receiver_that_comes_late() -> None:
    sends = [work(100, "first"), Record(COMPUTE, "e"), Wait("pp", "e"), Send("pp", 1, 50.0, "x")]
    trace = execute(program({0: sends, 1: [work(300, "long"), Recv(0, "x"), work(200, "last")]}), LATE)
    assert path(trace) == [("long", 0, 300, "device"), ("last", 300, 500, "device")]


def test_a_collective_starts_when_its_last_member_does() -> None:
    both = Group("dp", range(2))

    def member(before: int, name: str) -> list[object]:
        return [
            work(before, name),
            Record(COMPUTE, "e"),
            Wait("dp", "e"),
            Collective("all_gather", 100.0, both, "gather"),
            Record("dp", "done"),
            Wait(COMPUTE, "done"),
            work(20, "after"),
        ]

    trace = execute(program({0: member(10, "early"), 1: member(70, "late")}), LATE)
    assert [name for name, *_ in path(trace)] == ["late", "gather", "after"]
    assert path(trace)[0][1:3] == (0, 70)


def test_a_rendezvous_runs_through_the_receiver_that_was_not_there() -> None:
    sends = [work(10, "first"), Record(COMPUTE, "e"), Wait("pp", "e"), Send("pp", 1, 50.0, "x")]
    ranks = {0: sends, 1: [work(90, "busy"), Recv(0, "x"), work(5, "last")]}
    trace = execute(program(ranks, stage_sync="condition_variable"), LATE)
    assert [part[0] for part in path(trace)] == ["busy", "pp", "last"]


def test_a_full_buffer_runs_through_the_receiver_that_empties_it() -> None:
    def send(tag: str) -> list[object]:
        return [Record(COMPUTE, tag), Wait("pp", tag), Send("pp", 1, 50.0, tag)]

    ranks = {
        0: [work(10, "a"), *send("x"), work(10, "b"), *send("y")],
        1: [work(200, "busy"), Recv(0, "x"), Recv(0, "y"), work(5, "last")],
    }
    trace = execute(program(ranks, stage_buffer=1), LATE)
    assert [part[0] for part in path(trace)] == ["busy", "pp", "last"]  # y could leave when x was taken, at 200
    assert path(trace)[1][1:3] == (200, 260)


def test_a_launch_bound_step_is_the_host_s() -> None:
    cluster = ideal_cluster(device=ideal_device(launch_s=50e-9))
    trace = execute(program({0: [work(10, "a"), work(10, "b"), work(10, "c")]}, launch_s=50e-9), cluster)
    assert trace.step_ns == 160
    assert path(trace) == [("c", 0, 150, "host"), ("c", 150, 160, "device")]


def test_of_one_kernel_that_takes_several_calls_the_device_s_part_is_the_kernel() -> None:
    trace = execute(program({0: [Launch(work(10).kernel, "k", launches=3)]}, launch_s=50e-9), LATE)
    assert path(trace) == [("k", 0, 150, "host"), ("k", 150, 160, "device")]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_path_of_an_even_pipeline_is_its_closed_form(name: str) -> None:
    chunks = 2 if name == "interleaved" else 1
    schedule = build(name, pp=4, microbatches=8, chunks=chunks)
    trace = execute(pipeline(schedule, forward=10, backward=20), ideal_cluster())
    parts = critical_path(trace)
    # without cost of messages: (m + (p - 1)/v) · (f + b), all of it compute
    assert sum(part.duration_ns for part in parts if part.bound == "device") == trace.step_ns
    assert trace.step_ns == (8 * chunks + 3) * 30


JOBS = {
    "pipeline": {"model": "gpt2", "cluster": "h100-sxm:1x8", "plan": {"pp": 4, "grad_accum": 8}},
    "interleaved": {
        "model": "gpt2",
        "cluster": "h100-sxm:1x8",
        "plan": {"pp": 2, "schedule": "interleaved", "vpp": 3, "grad_accum": 4},
    },
    "rendezvous": {
        "model": "gpt2",
        "cluster": "h100-sxm:1x8",
        "plan": {"pp": 4, "grad_accum": 8, "stage_sync": "condition_variable"},
    },
    "fsdp": {"model": "gpt2", "cluster": "h100-sxm:2x8", "plan": {"zero": 3}},
    "launches": {"model": "gpt2", "cluster": "h100-sxm:1x8", "plan": {"seq_len": 128, "launch_s": 30e-6}},
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("fold", [True, False])
def test_the_parts_lie_end_to_end_and_fill_the_step(name: str, fold: bool) -> None:
    trace = simulate(JOBS[name], fold=fold).trace
    parts = critical_path(trace)
    assert parts[0].start_ns == 0
    assert parts[-1].end_ns == trace.step_ns
    assert all(before.end_ns == after.start_ns for before, after in pairwise(parts))
    for part in parts:
        if part.bound != "host":
            assert part.start_ns == trace.spans.start_ns[part.row]
            assert part.end_ns == trace.spans.end_ns[part.row]
