"""Memory of activations: Korthikanti et al. 2022 (arXiv:2205.05198), table 2; and its course over the step."""

import numpy as np
import pytest
from synthetic import even_model, ideal_cluster, job, small_transformer

from simpar import Cluster, Plan, Transformer, simulate
from simpar.model.layer import LayerKind
from simpar.plan.layout import lay_out
from simpar.program.transformer import TransformerParts
from simpar.schedule.measure import peak_live
from simpar.schedule.registry import build
from simpar.trace.trace import MEMORY_CATEGORIES, Trace

GPT = Transformer(
    name="gpt",
    layers=4,
    hidden=1024,
    heads=16,
    gated_mlp=False,
    vocab=51200,
    tied_embeddings=True,
    position="learned",
    max_positions=2048,
    norm="layernorm",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    dropout=True,
)
S, B, H, A = 2048, 3, 1024, 16
SBH = S * B * H


def layer_bytes(recompute: str = "none", **plan: object) -> float:
    cluster = Cluster.parse("a100-sxm:8")
    layout = lay_out(Plan(seq_len=S, micro_batch=B, attention="unfused", **plan), GPT, cluster)
    return TransformerParts(GPT, layout).layer(LayerKind(), recompute).activation_bytes


def test_a_layer_keeps_sbh_times_34_plus_5as_over_h():
    assert layer_bytes() == SBH * (34 + 5 * A * S / H)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallelism_leaves_10_of_the_34_whole(t):
    assert layer_bytes(tp=t) == SBH * (10 + 24 / t + 5 * A * S / H / t)


@pytest.mark.parametrize("t", [2, 4, 8])
def test_sequence_parallelism_divides_all(t):
    assert layer_bytes(tp=t, sequence_parallel=True) == SBH / t * (34 + 5 * A * S / H)


@pytest.mark.parametrize("t", [2, 8])
def test_selective_recomputation_drops_the_scores(t):
    assert layer_bytes("selective", tp=t, sequence_parallel=True) == SBH * 34 / t


def test_full_recomputation_keeps_the_layer_s_input():
    assert layer_bytes("full") == 2 * SBH
    # Korthikanti et al. keep a whole input even with sequence parallelism off; with it, a share
    assert layer_bytes("full", tp=4, sequence_parallel=True) == 2 * SBH / 4


# ---- over the step --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "pp", "m", "v"),
    [("gpipe", 4, 6, 1), ("1f1b", 4, 6, 1), ("1f1b", 4, 2, 1), ("interleaved", 2, 4, 2), ("interleaved", 3, 6, 2)],
)
def test_each_stage_keeps_as_many_microbatches_as_the_schedule_says(schedule, pp, m, v):
    model = even_model(pp * v, forward=100, backward=200, kept=1000)
    plan = {"pp": pp, "grad_accum": m, "schedule": schedule, "vpp": v}
    result = simulate(job(model, ideal_cluster(gpus_per_node=pp), **plan))
    live = peak_live(build(schedule, pp=pp, microbatches=m, chunks=v))
    assert [f.peak_bytes for f in result.footprints] == [1000 * pairs for pairs in live]
    assert [f.stage for f in result.footprints] == list(range(pp))


def course(trace: Trace, rank: int) -> np.ndarray:
    """Bytes held on a rank after each event, in order."""
    return np.cumsum(trace.memory.delta_bytes[trace.memory.rank == rank])


JOBS = [
    {"zero": 1, "pp": 2, "grad_accum": 4},
    {"zero": 3, "tp": 2, "grad_accum": 2},
    {"zero": 2, "pp": 2, "tp": 2, "grad_accum": 3, "recompute": "full", "sequence_parallel": True},
    {"pp": 2, "schedule": "interleaved", "vpp": 2, "grad_accum": 4, "recompute": "selective"},
    {"pp": 4, "grad_accum": 6, "schedule": "gpipe", "launch_s": 1e-4},
]


@pytest.mark.parametrize("plan", JOBS)
def test_memory_ends_where_it_began_and_peaks_where_the_program_says(plan):
    result = simulate(job(small_transformer(), Cluster.parse("h100-sxm:8"), seq_len=512, **plan))
    memory = result.trace.memory
    assert (np.diff(memory.time_ns) >= 0).all()
    for footprint in result.footprints:
        held = course(result.trace, footprint.rank)
        resident = memory.time_ns[memory.rank == footprint.rank] == 0
        states = [c for c in MEMORY_CATEGORIES if c != "activations"]
        mine = memory.rank == footprint.rank
        named = np.isin(memory.category, [MEMORY_CATEGORIES.index(c) for c in states]) & mine
        assert held[-1] == memory.delta_bytes[named].sum()
        assert (memory.time_ns[named] == 0).all()
        assert resident.any()
        assert held.min() >= 0
        assert held.max() == footprint.peak_bytes == sum(footprint.by_category.values())


def test_each_category_returns_to_what_it_was():
    result = simulate(job(small_transformer(), Cluster.parse("h100-sxm:8"), seq_len=512, **JOBS[2]))
    memory = result.trace.memory
    activations = memory.category == MEMORY_CATEGORIES.index("activations")
    assert activations.sum() > 10
    for rank in np.unique(memory.rank):
        assert memory.delta_bytes[activations & (memory.rank == rank)].sum() == 0


def test_zero_3_holds_two_gathered_layers_and_two_gradients():
    model = even_model(4, forward=100, backward=200, parameters=1000)
    cluster = ideal_cluster(gpus_per_node=4)
    (footprint,) = simulate(job(model, cluster, zero=3, grad_dtype="bf16")).footprints
    # bf16: two layers of 1000 weights, and the gradients of two
    assert footprint.by_category["buffers"] == 2 * 1000 * 2 + 2 * 1000 * 2
    (kept,) = simulate(job(model, cluster, zero=3, grad_dtype="bf16", reshard_after_forward=False)).footprints
    assert kept.by_category["buffers"] == 4 * 1000 * 2 + 2 * 1000 * 2
