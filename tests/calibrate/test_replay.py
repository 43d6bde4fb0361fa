"""Programs on this machine's devices: every span that the engine predicts is measured, once, in order, on its lane."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from devices import DyingAdapter, FakeCudaAdapter, exits_at_once, hangs, raises_at_once
from synthetic import program, small_transformer

import simpar
from calibrate.match import lengths, match
from calibrate.replay import CpuAdapter, ReplayError, Workers, replay, replay_all
from calibrate.replay.steps import Listing, communicator
from simpar import Cluster, Plan
from simpar.engine.simulate import execute
from simpar.model.work import Gemm, MemoryBound
from simpar.plan.layout import lay_out
from simpar.program.ir import COMPUTE, Collective, Group, Launch, Program, Record, Recv, Send, Wait
from simpar.program.lower import lower
from simpar.trace.breakdown import breakdown
from simpar.trace.trace import KINDS, Trace

TINY = small_transformer(layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=128, vocab=256)
DEEP = small_transformer(layers=4, hidden=64, heads=4, ffn_hidden=128, vocab=256, tied_embeddings=True)
MLP = simpar.mlp("784-500-10", loss="mse")
WIDE = simpar.mlp("256-512-512-256-10", loss="mse")
ONE_RANK = program({0: [Launch(MemoryBound(8000), "work")]})


def lowered(model: Any, ranks: int, *, opened: bool = False, **plan: Any) -> tuple[Program, Cluster]:
    cluster = Cluster.parse(f"cpu:1x{ranks}")
    layout = lay_out(Plan(**{"precision": "fp32", **plan}), model, cluster)
    return lower(model, cluster, layout, fold=False, opened=opened), cluster


CASES: dict[str, tuple[Any, int, dict[str, Any]]] = {
    "dp": (MLP, 2, {"micro_batch": 64, "optimizer": "sgd"}),
    "dp in buckets": (WIDE, 2, {"micro_batch": 16, "grad_accum": 2, "bucket_parameters": 200_000}),
    "zero 1": (WIDE, 2, {"micro_batch": 16, "zero": 1, "bucket_parameters": 200_000}),
    "fsdp": (WIDE, 2, {"micro_batch": 16, "grad_accum": 2, "zero": 3}),
    "tp": (TINY, 2, {"tp": 2, "seq_len": 32}),
    "tp opened": (TINY, 2, {"tp": 2, "seq_len": 32, "sequence_parallel": True, "opened": True}),
    "gpipe": (WIDE, 2, {"pp": 2, "schedule": "gpipe", "micro_batch": 8, "grad_accum": 4}),
    "1f1b": (WIDE, 2, {"pp": 2, "micro_batch": 8, "grad_accum": 4}),
    "rendezvous": (WIDE, 2, {"pp": 2, "micro_batch": 8, "grad_accum": 4, "stage_sync": "condition_variable"}),
    "one buffer": (WIDE, 2, {"pp": 2, "micro_batch": 8, "grad_accum": 4, "stage_buffer": 1}),
    "interleaved": (DEEP, 2, {"pp": 2, "vpp": 2, "schedule": "interleaved", "grad_accum": 4, "seq_len": 16}),
    "dp × pp": (TINY, 4, {"pp": 2, "seq_len": 16, "grad_accum": 3, "zero": 1, "opened": True}),
}
ON_FAKE_CUDA = ("dp in buckets", "fsdp", "tp opened", "1f1b", "rendezvous", "one buffer", "interleaved", "dp × pp")


@pytest.fixture(scope="module")
def pools() -> Iterator[list[Workers]]:
    found: list[Workers] = []
    yield found
    for pool in found:
        pool.close()


@pytest.fixture
def workers(pools: list[Workers]) -> Workers:
    """Four processes, started once; anew only after a test that ended them."""
    if not pools or not pools[-1].process_ids:
        pools.append(Workers(4, timeout_s=90.0))
    return pools[-1]


def case(name: str) -> tuple[Program, Cluster]:
    model, ranks, plan = CASES[name]
    return lowered(model, ranks, **plan)


def assert_in_order(trace: Trace) -> None:
    """Spans have a length and never overlap on a lane; children lie in their operation; the step holds all."""
    kernels = trace.kernels()
    for spans in (trace.spans, kernels):
        assert (spans.duration_ns > 0).all()
        assert (spans.start_ns >= 0).all()
        assert (spans.end_ns <= trace.step_ns).all()
        assert (np.diff(spans.start_ns) >= 0).all()
        for lane in range(len(trace.lanes)):
            rows = np.flatnonzero(spans.lane == lane)
            assert (spans.start_ns[rows][1:] >= spans.end_ns[rows][:-1]).all()
    assert (kernels.start_ns >= trace.spans.start_ns[kernels.parent]).all()
    assert (kernels.end_ns <= trace.spans.end_ns[kernels.parent]).all()
    assert trace.step_ns == trace.spans.end_ns.max()


def assert_causes_come_first(trace: Trace) -> None:
    """No span starts before the end of what let it start (messages are handed over a moment before their span ends)."""
    spans = trace.spans
    rows = np.flatnonzero((spans.predecessor >= 0) & (spans.kind[spans.predecessor] != KINDS.index("p2p")))
    assert len(rows)
    assert (spans.end_ns[spans.predecessor[rows]] <= spans.start_ns[rows]).all()


def carried(trace: Trace) -> dict[tuple[int, str], float]:
    """Bytes of all collectives and messages of each lane, inside operations and between them."""
    totals: dict[tuple[int, str], float] = {}
    for spans in (trace.spans, trace.kernels()):
        for index, lane in enumerate(trace.lanes):
            if lane.stream != COMPUTE:
                amount = float(spans.nbytes[spans.lane == index].sum())
                totals[lane.rank, lane.stream] = totals.get((lane.rank, lane.stream), 0.0) + amount
    return totals


@pytest.mark.parametrize(
    ("name", "adapter"),
    [(name, CpuAdapter) for name in CASES] + [(name, FakeCudaAdapter) for name in ON_FAKE_CUDA],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_predicted_span_is_measured_once(name, adapter, workers):
    replayed, cluster = case(name)
    predicted = execute(replayed, cluster)
    measured = replay(replayed, adapter=adapter, repeats=1, warmup=0, workers=workers)
    assert_in_order(measured)
    assert_causes_come_first(measured)
    assert set(measured.lanes) == set(predicted.lanes)
    for kernels in (False, True):
        pairs = match(predicted, measured, kernels=kernels)
        assert pairs.only_predicted == ()
        assert pairs.only_measured == ()
        assert len(pairs) == len(predicted.kernels() if kernels else predicted.spans)
        assert (pairs.measured_ns > 0).all()
    assert carried(measured) == carried(predicted)
    assert measured.spans.flop.sum() == predicted.spans.flop.sum()
    assert measured.kernels().flop.sum() == pytest.approx(predicted.kernels().flop.sum())


def test_memory_is_taken_and_given_back_as_predicted(workers):
    replayed, cluster = case("1f1b")
    predicted, measured = execute(replayed, cluster), replay(replayed, adapter="cpu", repeats=1, workers=workers)
    for rank in (0, 1):
        courses = [
            np.cumsum(trace.memory.delta_bytes[trace.memory.rank == rank]).tolist() for trace in (predicted, measured)
        ]
        assert courses[0] == courses[1]


def test_the_step_of_each_rank_adds_up(workers):
    replayed, _ = case("tp")
    for rank in breakdown(replay(replayed, adapter="cpu", repeats=1, workers=workers)):
        assert rank.compute_s["gemm"] > 0
        assert rank.exposed_s["tp"] > 0
        assert rank.host_wait_s >= 0
        assert rank.bubble_s >= 0
        assert rank.interference_s == 0


def test_a_message_lies_between_the_stage_that_sends_and_the_stage_that_needs_it(workers):
    replayed, _ = case("1f1b")
    trace = replay(replayed, adapter="cpu", repeats=1, workers=workers)
    found = {}
    for lane, name, microbatch, start, end in zip(
        *(getattr(trace.spans, c).tolist() for c in ("lane", "name", "microbatch", "start_ns", "end_ns")), strict=True
    ):
        found[trace.lanes[lane].rank, trace.names[name], microbatch] = (start, end)
    for microbatch in range(4):
        assert found[0, "forward", microbatch][1] <= found[0, "pp_forward", microbatch][0]
        # the receiver's next operation starts once it has the message, up to when the sender notices that it is gone
        assert found[0, "pp_forward", microbatch][0] < found[1, "forward", microbatch][0]
        assert found[1, "backward", microbatch][1] <= found[1, "pp_backward", microbatch][0]
        assert found[1, "pp_backward", microbatch][0] < found[0, "backward", microbatch][0]


def test_all_repeats_come_back(workers):
    traces = replay_all(case("dp")[0], adapter="cpu", repeats=3, warmup=1, workers=workers)
    assert len({trace.step_ns for trace in traces}) == 3


@pytest.mark.parametrize(
    ("lengths_ns", "repeat", "expected"),
    [((5, 1, 3), None, 3), ((5, 1, 3), 0, 5), ((5, 1, 3), 2, 3), ((4, 1, 2, 3), None, 2), ((7,), None, 7)],
)
def test_the_median_or_the_named_repeat_is_chosen(lengths_ns, repeat, expected, monkeypatch):
    traces = [SimpleNamespace(step_ns=length) for length in lengths_ns]
    monkeypatch.setattr("calibrate.replay.replay_all", lambda *arguments, **options: tuple(traces))
    chosen = replay(ONE_RANK, adapter="cpu", repeats=len(traces), repeat=repeat)
    assert chosen.step_ns == expected


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (raises_at_once, "rank [01] failed: ZeroDivisionError: "),
        (exits_at_once, "the process of rank [01] ended with exit code 3 during the replay; look at its output"),
    ],
    ids=["failure", "death"],
)
def test_a_failure_is_one_sentence_and_leaves_no_process(adapter, message):
    workers = Workers(2)
    processes = workers.process_ids
    with workers, pytest.raises(ReplayError, match=message) as raised:
        replay(case("dp")[0], adapter=adapter, repeats=1, workers=workers)
    assert "\n" not in str(raised.value)
    assert len(processes) == 2
    assert not any(exists(process) for process in processes)
    with pytest.raises(ReplayError, match="these workers were ended; start new ones"):
        replay(case("dp")[0], adapter="cpu", workers=workers)


def test_a_replay_that_takes_too_long_is_given_up():
    workers = Workers(1, timeout_s=0.5)
    processes = workers.process_ids
    with workers, pytest.raises(ReplayError, match=r"ranks 0 did not finish within 0.5 s; check with a simulation"):
        replay(ONE_RANK, adapter=hangs, workers=workers)
    assert not any(exists(process) for process in processes)


def exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_die_with_a_parent_that_is_killed():
    script = textwrap.dedent(
        """
        import os, time
        from calibrate.replay import Workers
        if __name__ == "__main__":
            workers = Workers(1)
            print(*workers.process_ids, workers.folder, flush=True)
            time.sleep(60)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process, folder = parent.stdout.readline().split()
        child = int(process)
        assert exists(child)
        parent.kill()
    deadline = time.monotonic() + 20
    while exists(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not exists(child)
    assert not Path(folder).exists()


# ---- programs that cannot be replayed -------------------------------------------------------------------------------

PAIR = Group("dp", range(2))


def gather(nbytes: float = 8.0) -> Collective:
    return Collective("all_gather", nbytes, PAIR)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (program({}), "the program has no ranks"),
        (program({1: []}), "a replay runs every rank; lower the job with fold=False"),
        (program({0: [Recv(1, "t")], 1: []}), "rank 0 waits for message 't' of rank 1, which never sends it"),
        (program({0: [Send("pp", 1, 8, "t")], 1: []}), "rank 1 never receives message 't' that it is sent"),
        (
            program({0: [Send("pp", 1, 8, "t")] * 2, 1: [Recv(0, "t")]}),
            "rank 0 sends a second message 't' to rank 1; give each its own tag",
        ),
        (program({0: [gather()], 1: []}), "rank 0 and rank 1 run different collectives in their dp group [0, 1]"),
        (program({0: [gather()], 1: [gather(16)]}), "give all members the same order of the same sizes"),
        (program({0: [gather()]}), "rank 0 and rank 1 run different collectives"),
        (program({0: [Wait(COMPUTE, "e"), Record(COMPUTE, "e")]}), "event 'e' before its host records it"),
        (program({0: [Launch(Gemm(8, 8, 8, "fp8"), "product")]}), "kernel 'product' is fp8"),
    ],
)
def test_a_program_that_cannot_be_replayed_is_refused_before_anything_starts(broken, message):
    with pytest.raises(ReplayError) as raised:
        replay(broken, adapter="cpu")
    assert message in str(raised.value)


def test_a_folded_program_is_refused():
    cluster = Cluster.parse("cpu:1x2")
    folded = lower(MLP, cluster, lay_out(Plan(precision="fp32"), MLP, cluster))
    with pytest.raises(ReplayError, match="simulates 1 ranks that stand for 2, but a replay runs every rank"):
        replay(folded)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeat": 5}, "repeat 5 is none of the 5 repeats"),
        ({"repeats": 0}, "a replay of 0 repeats and 2 warm-up steps measures nothing"),
        ({"adapter": "tpu"}, "unknown adapter 'tpu'; choose one of auto, cpu, cuda"),
        ({"adapter": lambda index, count: None}, "cannot be handed to another process"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ReplayError) as raised:
        replay(ONE_RANK, **options)
    assert message in str(raised.value)


def test_too_many_ranks_and_too_few_workers_are_refused(workers):
    with pytest.raises(ReplayError, match="1000 ranks are too many for"):
        CpuAdapter(0, 1000)
    five = program({rank: [Launch(MemoryBound(8), "work")] for rank in range(5)})
    with pytest.raises(ReplayError, match=r"has 5 ranks, but only 4 processes were started; start Workers\(5\)"):
        replay(five, adapter="cpu", workers=workers)


def test_every_collective_of_a_program_has_a_group_and_messages_have_one_per_direction():
    replayed, _ = case("dp × pp")
    listing = Listing(replayed)
    listing.check()
    groups = listing.communicators
    used = {communicator(s) for steps in listing.steps.values() for s in steps if isinstance(s, Collective)}
    assert used < set(groups)
    assert len(set(groups)) == len(groups)
    # two pipelines of two stages, forward and backward
    assert sorted(g.stream for g in set(groups) - used) == [
        "pp_backward 2>0",
        "pp_backward 3>1",
        "pp_forward 0>2",
        "pp_forward 1>3",
    ]


# ---- inside a process group -----------------------------------------------------------------------------------------


def test_a_process_of_a_group_replays_its_own_rank(tmp_path):
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trace = replay(ONE_RANK, adapter="cpu", repeats=1)
        with pytest.raises(ReplayError, match="the program has 2 ranks, but this job has 1 processes"):
            replay(case("dp")[0], adapter="cpu")
    finally:
        dist.destroy_process_group()
    assert [key.name for key in lengths(trace)] == ["work"]


# ---- a rank that is lost while the others wait for it ---------------------------------------------------------------


def test_a_rank_that_is_lost_in_a_step_ends_all(workers):
    processes = workers.process_ids
    began = time.monotonic()
    with pytest.raises(ReplayError, match="the process of rank 1 was killed by signal 9 during the replay"):
        replay(case("tp")[0], adapter=DyingAdapter, repeats=1, workers=workers)
    assert time.monotonic() - began < 30  # not the 90 seconds after which every replay is given up
    assert not any(exists(process) for process in processes)
