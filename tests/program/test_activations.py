"""Memory of activations: Korthikanti et al. 2022 (arXiv:2205.05198), table 2; and its course over the step."""

import numpy as np
import pytest
from synthetic import even_model, ideal_cluster, job, small_transformer

from simpar import Cluster, Plan, Transformer, simulate
from simpar.model.layer import LayerKind
from simpar.plan.layout import lay_out
from simpar.program.transformer import TransformerParts
from simpar.program.transformer.bricks import Bricks
from simpar.program.transformer.layer import LayerBuilder
from simpar.program.transformer.sizes import Sizes
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
S, B, H, A = 2048, 4, 1024, 16
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


def test_where_the_fused_softmax_does_not_run_its_result_is_kept_in_fp32():
    # 3 sequences x 2 heads of a rank are no multiple of 4: 2 bytes more per score
    layout = lay_out(Plan(seq_len=S, micro_batch=3, tp=8, attention="unfused"), GPT, Cluster.parse("a100-sxm:8"))
    fused = S * 3 * H * (10 + 24 / 8 + 5 * A * S / H / 8)
    kept = TransformerParts(GPT, layout).layer(LayerKind(), "none").activation_bytes
    assert kept == fused + 2 * 3 * (A // 8) * S**2


def test_without_dropout_a_separate_softmax_also_keeps_what_enters_the_product():
    plain, cluster = GPT.replace(dropout=False), Cluster.parse("a100-sxm:8")
    kept = []
    for sequences in (3, 4):  # x 2 heads of a rank: 6 rows do not fuse, 8 do
        layout = lay_out(Plan(seq_len=S, micro_batch=sequences, tp=8, attention="unfused"), plain, cluster)
        parts = TransformerParts(plain, layout)
        kept.append(parts.layer(LayerKind(), "none").activation_bytes / sequences)
    assert kept[0] - kept[1] == 4 * (A // 8) * S**2


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


# ---- against what torch saves ---------------------------------------------------------------------------------------


def saved_bytes(run, *apart) -> int:
    """Bytes of the tensors that autograd saves in ``run``, each storage once, without those ``apart``."""
    torch = pytest.importorskip("torch")
    found = {}
    known = {tensor.untyped_storage().data_ptr() for tensor in apart}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor  # keeps the storage, and so its address, to itself

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    del result
    return sum(found.values())


def test_eager_swiglu_keeps_its_gate_as_well():
    """As nanotron writes it: ``down(silu(gate) * up)`` on a merged projection."""
    torch = pytest.importorskip("torch")
    tokens, hidden, inner = 96, 64, 160
    model = small_transformer(hidden=hidden, heads=4, ffn_hidden=inner)
    layout = lay_out(Plan(framework="nanotron", seq_len=tokens), model, Cluster.parse("h100-sxm:1"))
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    merge = torch.randn(2 * inner, hidden, dtype=torch.bfloat16, requires_grad=True)
    down = torch.randn(hidden, inner, dtype=torch.bfloat16, requires_grad=True)

    def run():
        gate, up = (x @ merge.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ down.T

    part = LayerBuilder.of(Bricks(Sizes(model, layout)), LayerKind()).mlp
    assert part.kept_bytes == saved_bytes(run, x, merge, down)


def test_an_unfused_loss_keeps_the_probabilities_in_fp32():
    torch = pytest.importorskip("torch")
    tokens, hidden, vocab = 32, 64, 512
    model = small_transformer(hidden=hidden, heads=4, ffn_hidden=128, vocab=vocab)
    layout = lay_out(Plan(framework="torchtitan", seq_len=tokens), model, Cluster.parse("h100-sxm:1"))
    logits = torch.randn(tokens, vocab, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocab, (tokens,))
    saved = saved_bytes(lambda: torch.nn.functional.cross_entropy(logits.float(), target), logits, target)
    head = TransformerParts(model, layout).head(shares_embedding=False)
    small = 4 * 2  # the loss and its weight
    assert head.activation_bytes - 2 * tokens * hidden * 2 == pytest.approx(saved, abs=small)
    # while it is made, the logits and their fp32 copy exist, too
    assert head.transient_bytes == logits.numel() * (2 + 4)
