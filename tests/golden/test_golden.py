"""Timelines as text, for diffing: what changed in a step, when, and on which rank.

They are rewritten only by ``pytest --update-golden``; read the diff before committing it.
"""

from pathlib import Path
from typing import Any

import pytest
from synthetic import even_model, ideal_cluster, ideal_device, job, small_transformer

from simpar import Overlap, simulate
from simpar.trace.trace import NONE, Trace

HERE = Path(__file__).parent

JOBS: dict[str, dict[str, Any]] = {
    # two stages, messages of 300 bytes at a byte per nanosecond
    "1f1b": job(
        even_model(4, forward=1000, backward=2000, parameters=50, sent=300),
        ideal_cluster(gpus_per_node=2),
        pp=2,
        grad_accum=4,
    ),
    # two replicas of two stages of two chunks; gradients are reduced beside the last backward passes
    "interleaved-zero1": job(
        even_model(4, forward=1000, backward=2000, parameters=400, sent=300),
        ideal_cluster(gpus_per_node=4, device=ideal_device(compute_rate_during_collectives=0.5)),
        pp=2,
        vpp=2,
        schedule="interleaved",
        grad_accum=2,
        zero=1,
        bucket_parameters=400,
    ),
    # each layer is gathered before it runs, its gradient reduced after it
    "fully-sharded": job(
        even_model(3, forward=1000, backward=2000, parameters=600),
        ideal_cluster(gpus_per_node=4, latency_s=100e-9),
        zero=3,
        grad_accum=2,
    ),
    # launches decide; a transfer starts when both sides are there
    "gpipe-rendezvous-launch-bound": job(
        even_model(4, forward=100, backward=900, parameters=50, sent=300),
        ideal_cluster(gpus_per_node=2),
        pp=2,
        grad_accum=3,
        schedule="gpipe",
        stage_sync="condition_variable",
        launch_s=400e-9,
    ),
    # a transformer's collectives inside and beside its operations
    "transformer": job(
        small_transformer(layers=2, vocab=1024),
        ideal_cluster(
            2,
            2,
            bytes_per_s=20e9,
            device=ideal_device(memory_bytes_per_s=1e11, peak_flop_per_s=dict.fromkeys(("bf16", "fp16", "fp32"), 1e14)),
        ),
        tp=2,
        sequence_parallel=True,
        zero=3,
        seq_len=128,
        overlap=Overlap(tp="bulk"),
        launch_s=0.0,
    ),
}


def as_text(trace: Trace) -> str:
    """One line a span: stream, operation, microbatch, chunk, start and end in nanoseconds; rank by rank."""
    spans = trace.spans
    lines = [f"step {trace.step_ns}"]
    for number, lane in enumerate(trace.lanes):
        if number == 0 or trace.lanes[number - 1].rank != lane.rank:
            lines += ["", f"rank {lane.rank} stage {lane.stage} replicas {lane.replicas}"]
        for row in (spans.lane == number).nonzero()[0]:
            where = [("mb", spans.microbatch[row]), ("chunk", spans.chunk[row]), ("layer", spans.layer[row])]
            named = " ".join(f"{what}{value}" for what, value in where if value != NONE)
            what = f"{lane.stream:<11} {trace.names[spans.name[row]]:<12} {named:<15}"
            lines.append(f"  {what} {spans.start_ns[row]:>8} {spans.end_ns[row]:>8}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", JOBS)
def test_timeline(name, update_golden):
    path = HERE / f"{name}.txt"
    text = as_text(simulate(JOBS[name]).trace)
    if update_golden:
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_there_is_no_golden_without_a_job():
    assert {path.stem for path in HERE.glob("*.txt")} == set(JOBS)
