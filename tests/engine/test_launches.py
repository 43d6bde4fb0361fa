"""Launch-bound and GPU-bound steps, and operations as one event against the same kernels run one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import even_model, ideal_cluster, ideal_device, job, lane_spans, program, small_transformer, work

from simpar import Cluster, Plan, simulate
from simpar.engine.simulate import execute
from simpar.plan.layout import lay_out
from simpar.program.body import Body
from simpar.program.ir import Alloc, Block, Group, Operation, Run
from simpar.program.lower import lower
from simpar.trace.breakdown import breakdown
from simpar.trace.trace import Trace


def test_tiny_kernels_take_as_long_as_their_launches():
    trace = execute(program({0: [work(3)] * 100}, launch_s=50e-9), ideal_cluster())
    assert trace.step_ns == 100 * 50 + 3


def test_long_kernels_hide_all_launches_but_the_first():
    trace = execute(program({0: [work(300)] * 100}, launch_s=50e-9), ideal_cluster())
    assert trace.step_ns == 50 + 100 * 300


def test_a_kernel_begins_when_it_is_launched_and_its_stream_is_free():
    # launched at 50, 100, 150; the second kernel is long
    trace = execute(program({0: [work(10, "a"), work(80, "b"), work(10, "c")]}, launch_s=50e-9), ideal_cluster())
    assert lane_spans(trace, 0) == [("a", 50, 60), ("b", 100, 180), ("c", 180, 190)]


@pytest.mark.parametrize("kernel_ns", [40, 5000])
def test_simulate_is_bound_by_launches_or_by_kernels(kernel_ns):
    model = even_model(3, forward=kernel_ns, backward=kernel_ns)
    result = simulate(job(model, ideal_cluster(gpus_per_node=1), launch_s=1e-6, grad_accum=5))
    kernels = 5 * 6
    assert result.trace.kernels().kind.size == kernels  # no parameters, so no optimizer
    if kernel_ns == 40:
        # the last kernel runs when it was launched
        assert result.trace.step_ns == kernels * 1000 + 40
        assert "launch-bound: the device waits for the host" in " ".join(result.warnings)
        assert result.ranks[0].host_wait_s == pytest.approx((kernels * 1000 + 40 - kernels * 40) * 1e-9)
    else:
        # by the time that the device is done, everything was launched long ago
        assert result.trace.step_ns == 1000 + kernels * 5000
        assert "launch-bound" not in " ".join(result.warnings)
        assert result.ranks[0].host_wait_s == pytest.approx(1e-6)


def test_launches_left_open_are_the_devices():
    cluster = ideal_cluster(gpus_per_node=1, device=ideal_device(launch_s=2e-6))
    model = even_model(1, forward=1, backward=1)
    by_device, by_plan = (simulate(job(model, cluster, **plan)).trace.step_ns for plan in ({}, {"launch_s": 4e-6}))
    last = 1  # the last kernel, which runs when it was launched
    assert by_plan - last == 2 * (by_device - last) > 0


# ---- one event or many ----------------------------------------------------------------------------------------------


def opened_and_closed(blocks: list[Block], cluster: Cluster, *, launch_ns: int, tp: int) -> tuple[Trace, Trace]:
    operation = Operation("forward", "forward", tuple(blocks), tuple(range(len(blocks))))
    made = []
    for opened in (False, True):
        run = [Run(operation, 0, -1, 64, opened=opened), Run(operation, 1, -1, 64, opened=opened)]
        made.append(execute(program(dict.fromkeys(range(tp), run), launch_s=launch_ns * 1e-9), cluster))
    return made[0], made[1]


def kernel_rows(trace: Trace) -> list[tuple[object, ...]]:
    spans = trace.kernels()
    return sorted(
        (trace.lanes[lane].rank, trace.lanes[lane].stream, start, length, trace.names[name], layer, mb, flop)
        for lane, start, length, name, layer, mb, flop in zip(
            spans.lane.tolist(),
            spans.start_ns.tolist(),
            spans.duration_ns.tolist(),
            spans.name.tolist(),
            spans.layer.tolist(),
            spans.microbatch.tolist(),
            spans.flop.tolist(),
            strict=True,
        )
    )


def memory_rows(trace: Trace) -> list[tuple[int, ...]]:
    """Events rank by rank; what different ranks do at the same instant has no order."""
    memory = trace.memory
    events = zip(*(getattr(memory, f).tolist() for f in ("rank", "time_ns", "category", "delta_bytes")), strict=True)
    return sorted(events, key=lambda event: event[0])


@st.composite
def blocks(draw, group):
    """A block with kernels, and with collectives beside them if there is a group."""
    body = Body(group)
    pending = []
    for index in range(draw(st.integers(1, 6))):
        body.run(work(draw(st.integers(0, 60))).kernel, f"k{index}")
        if group is not None and draw(st.booleans()):
            pending.append(body.begin("all_gather", float(draw(st.integers(1, 100))), f"c{index}"))
        if pending and draw(st.booleans()):
            body.join(pending.pop())
    for event in pending:
        body.join(event)
    return body.block("block")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_operation_as_one_event_equals_its_kernels_one_by_one(data):
    tp = data.draw(st.sampled_from([1, 2]))
    group = Group("tp", range(tp)) if tp > 1 else None
    kinds = [data.draw(blocks(group)) for _ in range(data.draw(st.integers(1, 2)))]
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    launch_ns = data.draw(st.sampled_from([0, 7, 25, 200]))
    closed, opened = opened_and_closed(chosen, ideal_cluster(), launch_ns=launch_ns, tp=tp)
    assert opened.step_ns == closed.step_ns
    starts = [trace.spans.start_ns.tolist() for trace in (closed, opened)]
    ends = [trace.spans.end_ns.tolist() for trace in (closed, opened)]
    assert starts[0] == starts[1]
    assert ends[0] == ends[1]
    assert opened.spans.flop.tolist() == closed.spans.flop.tolist()
    assert memory_rows(opened) == memory_rows(closed)
    # one event knows when each kernel ran as exactly as the simulation of each
    assert kernel_rows(opened) == kernel_rows(closed)


def test_the_last_kernel_of_a_launch_bound_operation_ends_with_it():
    body = Body()
    for duration in (10, 20, 30):
        body.run(work(duration).kernel, f"{duration}")
    trace, _ = opened_and_closed([body.block("b")], ideal_cluster(), launch_ns=100, tp=1)
    kernels = trace.kernels()
    assert kernels.start_ns.tolist() == [100, 200, 300, 400, 500, 600]
    assert kernels.end_ns.tolist() == [110, 220, 330, 410, 520, 630]
    assert trace.spans.start_ns.tolist() == [0, 330]
    assert trace.spans.end_ns.tolist() == [330, 630]
    (time,) = breakdown(trace)
    assert time.host_wait_s == pytest.approx((630 - 120) * 1e-9)


@pytest.mark.parametrize("launch_s", [0.0, 3e-6, 40e-6])
@pytest.mark.parametrize("plan", [{"tp": 1}, {"tp": 4}, {"tp": 4, "sequence_parallel": True, "recompute": "full"}])
def test_a_transformer_opened_equals_closed(plan, launch_s):
    cluster = Cluster.parse("a100-sxm:4").replace(gpus_per_node=plan["tp"])
    cluster = cluster.replace(device=cluster.device.replace(compute_rate_during_collectives=1.0))
    model = small_transformer()
    layout = lay_out(Plan(**plan, seq_len=256, grad_accum=2, launch_s=launch_s), model, cluster)
    closed, opened = (execute(lower(model, cluster, layout, opened=o), cluster) for o in (False, True))
    assert opened.step_ns == closed.step_ns
    times, other = breakdown(closed)[0], breakdown(opened)[0]
    assert other.compute_s == pytest.approx(times.compute_s)
    assert other.bubble_s == pytest.approx(times.bubble_s, abs=1e-12)
    assert memory_rows(opened) == memory_rows(closed)


@pytest.mark.parametrize("launch_s", [0.0, 1e-3])
def test_with_interference_both_regimes_are_exact(launch_s):
    # in between, a block takes the longer of both; where launches decide, nothing runs beside anything
    cluster = Cluster.parse("h100-sxm:4")
    assert cluster.device.compute_rate_during_collectives < 1
    model = small_transformer(hidden=1024, heads=16, ffn_hidden=4096)
    plan = Plan(tp=4, sequence_parallel=True, seq_len=1024, grad_accum=2, launch_s=launch_s)
    layout = lay_out(plan, model, cluster)
    closed, opened = (execute(lower(model, cluster, layout, opened=o), cluster) for o in (False, True))
    assert opened.step_ns == closed.step_ns
    assert kernel_rows(opened) == kernel_rows(closed)


def test_kernels_lie_in_their_operation_and_do_not_overlap():
    cluster = Cluster.parse("h100-sxm:8")
    result = simulate(job(small_transformer(), cluster, tp=8, sequence_parallel=True, seq_len=512, grad_accum=3))
    trace, kernels = result.trace, result.trace.kernels()
    assert len(kernels) > 100
    assert (kernels.start_ns >= trace.spans.start_ns[kernels.parent]).all()
    assert (kernels.end_ns <= trace.spans.end_ns[kernels.parent]).all()
    for lane in np.unique(kernels.lane):
        mine = kernels.lane == lane
        assert (kernels.start_ns[mine][1:] >= kernels.end_ns[mine][:-1]).all()


def test_memory_is_taken_in_the_stream_s_order():
    body = Body()
    body.run(work(10).kernel, "k")
    operation = Operation("forward", "forward", (body.block("b"),), (0,))
    trace = execute(
        program({0: [Alloc("activations", 5), Run(operation, 0, -1, 7), Alloc("activations", -5)]}), ideal_cluster()
    )
    assert list(zip(trace.memory.time_ns.tolist(), trace.memory.delta_bytes.tolist(), strict=True)) == [
        (0, 5),
        (0, 7),
        (10, -7),
        (10, -5),
    ]
