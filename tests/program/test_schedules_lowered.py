"""Every schedule as a program: times against the schedules' own timetable, memory, messages, gradients."""

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from synthetic import even_model, ideal_cluster, job, lane_spans, pipeline, small_transformer, split_model

from simpar import Cluster, Plan, Result, Transformer, simulate
from simpar.engine.simulate import execute
from simpar.errors import PlanError
from simpar.framework.framework import framework_names
from simpar.model.layer import LayerKind
from simpar.plan.layout import lay_out
from simpar.program.ir import Alloc, Block, Collective, Launch, Program, Run, Send
from simpar.program.lower import lower
from simpar.program.transformer import TransformerParts
from simpar.schedule import SCHEDULES, Schedule, bubble_fraction, build, makespan, peak_live, timetable, to_csv
from simpar.trace.breakdown import RankTime

GRADIENT = 9000  # of the input, in ns


def _compute_s(rank: RankTime) -> float:
    return sum(rank.compute_s.values())


def _chunks(name: str) -> int:
    return 2 if "chunks" in SCHEDULES[name].options else 1


def _made(name: str, pp: int, m: int) -> Schedule:
    return build(name, pp=pp, microbatches=m, chunks=_chunks(name))


def _simulated(name: str, pp: int, m: int, *, kept: int = 0, sent: int = 0, **plan: Any) -> Result:
    model = split_model(_made(name, pp, m).depth, forward=7000, input_gradient=GRADIENT, kept=kept, sent=sent)
    cluster = ideal_cluster(gpus_per_node=pp, bytes_per_s=1e24)
    return simulate(job(model, cluster, pp=pp, grad_accum=m, schedule=name, vpp=_chunks(name), **plan))


@cache
def _weight_ns() -> int:
    """What the weight product takes, alone."""
    model = split_model(1, forward=7000, input_gradient=GRADIENT)
    return simulate(job(model, ideal_cluster(gpus_per_node=1))).trace.step_ns - 7000 - GRADIENT


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", [0, 5])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 9), (6, 12)])
def test_every_action_runs_when_the_timetable_says(name: str, pp: int, m: int, transfer: int) -> None:
    if m % 2 and name in ("dualpipe", "interleaved", "zb-1p"):
        pytest.skip("needs another number of microbatches")
    schedule = _made(name, pp, m)
    times = {"forward": 11, "backward": 17, "weight": 6}
    table = timetable(schedule, **times, transfer=transfer)
    trace = execute(pipeline(schedule, **times), ideal_cluster(bytes_per_s=1e24, latency_s=transfer * 1e-9))
    for rank in range(pp):
        seen = {name: (start, end) for name, start, end in lane_spans(trace, rank)}
        for turn in schedule.turns(rank):
            together = [seen[str(action)] for action in turn]
            assert (together[0][0], together[-1][1]) == table[turn[0]]
    assert trace.step_ns == makespan(schedule, **times, transfer=transfer)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 16)])
def test_lowered_schedules_take_as_long_as_their_timetable(name: str, pp: int, m: int) -> None:
    schedule = _made(name, pp, m)
    result = _simulated(name, pp, m)
    times = {"forward": 7000, "backward": GRADIENT + _weight_ns(), "weight": _weight_ns()}
    assert result.trace.step_ns == makespan(schedule, **times)
    assert result.bubble_fraction == pytest.approx(bubble_fraction(schedule, **times), rel=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("how", [{"stage_sync": "condition_variable"}, {"stage_buffer": 1}, {"stage_buffer": 2}])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (3, 6), (4, 12)])
def test_stages_may_meet_or_have_small_buffers(name: str, how: dict[str, Any], pp: int, m: int) -> None:
    if name == "dualpipe" and pp == 3:
        pytest.skip("needs an even number of ranks")
    free = _simulated(name, pp, m, sent=50)
    assert _simulated(name, pp, m, sent=50, **how).trace.step_ns >= free.trace.step_ns


@pytest.mark.parametrize("name", framework_names())
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"])
def test_stages_may_meet_whatever_a_framework_overlaps(name: str, schedule: str) -> None:
    plan = {"pp": 4, "grad_accum": 8, "vpp": 2 if schedule == "interleaved" else 1, "zero": 1, "seq_len": 256}
    how = {"framework": name, "schedule": schedule, "stage_sync": "condition_variable"}
    met = simulate({"model": "gpt2", "cluster": "h100-sxm:1x8", "plan": {**plan, **how}})
    assert met.layout.overlaps_messages
    assert met.step_time_s > 0


@pytest.mark.parametrize("split", [(2, 0), (0, 2)])
def test_a_stage_of_a_module_needs_a_layer(split: Any) -> None:
    with pytest.raises(PlanError, match=r"^layer_split gives stage [01] none of the 2 layers of mlp:784-500-10"):
        simulate({"model": "mlp:784-500-10", "cluster": "h100-sxm:1x8", "plan": {"pp": 2, "layer_split": split}})


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_module_keeps_its_activations_to_the_end_of_its_weight_gradients(name: str) -> None:
    result = _simulated(name, 4, 8, kept=1000)
    assert [f.peak_bytes for f in result.footprints] == [1000 * live for live in peak_live(_made(name, 4, 8))]


# ---- halves of a transformer's backward -----------------------------------------------------------------------------

GPT = Transformer(
    name="gpt",
    layers=8,
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
S, B, H = 2048, 3, 1024
SBH = S * B * H


def _parts(**plan: Any) -> TransformerParts:
    cluster = Cluster.parse("a100-sxm:8")
    return TransformerParts(GPT, lay_out(Plan(seq_len=S, micro_batch=B, attention="unfused", **plan), GPT, cluster))


def test_the_weight_half_of_a_layer_needs_32_sbh() -> None:
    """Qi et al. 2024, arXiv:2401.10241, table 1: of the four products 14 sbh of inputs and 18 of gradients."""
    assert _parts().layer(LayerKind(), "none").deferred_bytes == 32 * SBH


@pytest.mark.parametrize("t", [2, 4])
def test_tensor_parallelism_splits_all_but_the_ends_of_the_products(t: int) -> None:
    # column inputs (4) and the gradients of row outputs (4) are whole; sequence parallelism leaves the latter gathered
    assert _parts(tp=t).layer(LayerKind(), "none").deferred_bytes == SBH * (8 + 24 / t)
    assert _parts(tp=t, sequence_parallel=True).layer(LayerKind(), "none").deferred_bytes == SBH * (4 + 28 / t)


def _kernels(*blocks: Block) -> Counter[tuple[str, Any]]:
    return Counter((i.name, i.kernel) for block in blocks for i in block.body if isinstance(i, Launch))


def _collectives(*blocks: Block) -> Counter[tuple[str, float]]:
    return Counter((i.op, i.nbytes) for block in blocks for i in block.body if isinstance(i, Collective))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "plan", [{}, {"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"tp": 2, "overlap": {"tp": "none"}}]
)
def test_both_halves_are_the_whole(plan: dict[str, Any], recompute: str) -> None:
    parts = _parts(**plan)
    for unit in (parts.layer(LayerKind(), recompute), parts.embedding(), parts.head(shares_embedding=False)):
        halves = (unit.backward_input, unit.backward_weight)
        assert _kernels(unit.backward) == _kernels(*halves)
        assert _collectives(unit.backward) == _collectives(*halves)
        weights = [i for i in unit.backward_weight.body if isinstance(i, Launch)]
        assert unit.name == "embedding" or {i.phase for i in weights} == {"weight_grad"}
        assert all("wgrad" not in name for name, _ in _kernels(unit.backward_input))


# ---- transformers under every schedule ------------------------------------------------------------------------------


def _lowered(name: str, *, model: Transformer | None = None, gpus: str = "h100-sxm:1x4", **plan: Any) -> Program:
    described = model or small_transformer(layers=8)
    cluster = Cluster.parse(gpus)
    fields = {"pp": 4, "seq_len": 512, "grad_accum": 8, "schedule": name, "vpp": _chunks(name), **plan}
    return lower(described, cluster, lay_out(Plan(**fields), described, cluster))


def _all(program: Program, kind: type) -> list[Any]:
    return [i for rank in program.ranks for i in rank.instructions if isinstance(i, kind)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_all_schedules_run_the_same_kernels(name: str) -> None:
    def kernels(program: Program) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for run in _all(program, Run):
            if run.operation.name != "optimizer":
                found += _kernels(*run.operation.blocks)
        return found

    assert kernels(_lowered(name)) == kernels(_lowered("1f1b"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_cross_ranks_only(name: str) -> None:
    schedule = _made(name, 4, 8)
    crossings = sum(
        schedule.rank_of_stage[stage] != schedule.rank_of_stage[stage + 1]
        for stage in range(schedule.stages - 1)
        if schedule.after(stage) is not None
    )
    sends = _all(_lowered(name), Send)
    assert len(sends) == 2 * crossings * 8 // schedule.copies
    assert {send.nbytes for send in sends} == {512 * 512 * 2}


@pytest.mark.parametrize("name", SCHEDULES)
def test_memory_comes_back(name: str) -> None:
    for recompute in ("none", "full"):
        for rank in _lowered(name, recompute=recompute).ranks:
            held = 0
            for instruction in rank.instructions:
                if isinstance(instruction, Alloc):
                    held += instruction.nbytes
                    assert held >= 0
            assert held == 0


def test_zb_h1_keeps_less_than_a_module_would() -> None:
    """After the input half only the operands of the products stay, so the peak is 1F1B's on the first rank."""
    one, zero = (
        simulate(job(GPT, Cluster.parse("a100-sxm:8"), pp=4, grad_accum=8, schedule=s)) for s in ("1f1b", "zb-h1")
    )
    first, *_, last = [f.by_category["activations"] for f in zero.footprints]
    assert first == one.footprints[0].by_category["activations"]
    assert last > one.footprints[-1].by_category["activations"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_reduced_as_often_as_with_1f1b(name: str, zero: int) -> None:
    def reduced(schedule: str) -> float:
        program = _lowered(schedule, gpus="h100-sxm:1x8", zero=zero)
        return sum(c.nbytes for c in _all(program, Collective) if c.name == "gradients")

    # both copies of a model reduce theirs; ZeRO-2 and 3 do so each microbatch, of which a copy runs half
    expected = reduced("1f1b") * (2 if name == "dualpipe" and zero < 2 else 1)
    assert reduced(name) == pytest.approx(expected, rel=1e-12)
    assert simulate(
        job(
            small_transformer(layers=8),
            Cluster.parse("h100-sxm:1x8"),
            pp=4,
            grad_accum=8,
            seq_len=512,
            schedule=name,
            vpp=_chunks(name),
            zero=zero,
        )
    ).step_time_s


def test_the_copies_of_dualpipe_add_their_gradients() -> None:
    program = _lowered("dualpipe")
    exchanges = [c for c in _all(program, Collective) if c.name == "gradients of both copies"]
    assert [c.group.ranks for c in exchanges] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    once = sum(dict(rank.resident)["gradients"] for rank in _lowered("1f1b").ranks)
    assert sum(c.nbytes for c in exchanges) == 2 * once
    assert sum(dict(rank.resident)["weights"] for rank in program.ranks) == once  # bf16 twice, against fp32 once


@pytest.mark.parametrize("zero", [1, 2])
def test_the_copies_of_dualpipe_add_no_more_than_the_shard_that_a_rank_has_reduced(zero: int) -> None:
    def added(zero: int) -> float:
        program = _lowered("dualpipe", gpus="h100-sxm:1x8", zero=zero)
        return sum(c.nbytes for c in _all(program, Collective) if c.name == "gradients of both copies")

    assert added(zero) == added(0) / 2  # 4 stages of 2 replicas


@pytest.mark.parametrize("name", ["zb-v", "dualpipev", "dualpipe"])
def test_where_both_ends_lie_on_one_rank_a_tied_embedding_is_there_once(name: str) -> None:
    model = small_transformer(layers=8, tied_embeddings=True)
    program = _lowered(name, model=model)
    assert not [c for c in _all(program, Collective) if c.name == "tied embedding"]
    weights = sum(dict(rank.resident)["weights"] for rank in program.ranks)
    assert weights == 2 * model.parameters * (2 if name == "dualpipe" else 1)


def test_tied_ends_on_two_ranks_still_add_their_gradients() -> None:
    program = _lowered("zb-h1", model=small_transformer(layers=8, tied_embeddings=True))
    assert [c.group.ranks for c in _all(program, Collective) if c.name == "tied embedding"] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe"])
def test_folded_equals_unfolded(name: str) -> None:
    model, cluster = small_transformer(layers=8), Cluster.parse("h100-sxm:4x4")
    fields = {"pp": 4, "tp": 2, "seq_len": 512, "grad_accum": 8, "schedule": name, "zero": 1}
    layout = lay_out(Plan(**fields), model, cluster)
    folded, whole = (execute(lower(model, cluster, layout, fold=fold), cluster) for fold in (True, False))
    assert folded.step_ns == whole.step_ns


# ---- options --------------------------------------------------------------------------------------------------------


def test_a_schedule_from_a_file_is_as_good_as_its_name(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    path.write_text(to_csv(_made("zb-v", 4, 8)), encoding="utf-8")
    model, cluster = split_model(8, forward=700, input_gradient=900), ideal_cluster(gpus_per_node=4)
    by_name, by_file = (
        simulate(job(model, cluster, pp=4, grad_accum=8, schedule=s)).trace.step_ns for s in ("zb-v", str(path))
    )
    assert by_file == by_name


def test_pairs_hide_the_collectives_of_each_other(tmp_path: Path) -> None:
    """The same order without its pairs shows all tensor-parallel communication."""
    schedule = _made("dualpipev", 2, 8)
    path = tmp_path / "plain.csv"
    path.write_text("\n".join(",".join(map(str, order)) for order in schedule.ranks), encoding="utf-8")
    model, cluster = small_transformer(layers=8), Cluster.parse("h100-sxm:1x8")
    plan = {"pp": 2, "tp": 4, "seq_len": 1024, "micro_batch": 8, "grad_accum": 8, "launch_s": 0.0}
    pairs, plain = (simulate(job(model, cluster, schedule=s, **plan)) for s in ("dualpipev", str(path)))
    assert sum(rank.exposed_s["tp"] for rank in pairs.ranks) < 0.8 * sum(rank.exposed_s["tp"] for rank in plain.ranks)
    assert pairs.step_time_s < plain.step_time_s
    assert sum(map(_compute_s, pairs.ranks)) >= sum(map(_compute_s, plain.ranks)) * (1 - 1e-9)


def test_any_group_of_microbatches() -> None:
    model, cluster = even_model(8, forward=100, backward=200), ideal_cluster(gpus_per_node=4, bytes_per_s=1e24)
    plan = {"pp": 4, "grad_accum": 9, "schedule": "interleaved", "vpp": 2}
    with pytest.raises(PlanError, match="take 8 or 12 microbatches, or microbatch_group=5"):
        simulate(job(model, cluster, **plan))
    result = simulate(job(model, cluster, **plan, microbatch_group=5))
    order = build("interleaved", pp=4, microbatches=9, chunks=2, group=5)
    assert result.trace.step_ns == makespan(order, forward=100, backward=200)


def test_layers_per_virtual_stage_of_a_v() -> None:
    model = even_model(9, forward=100, backward=200)
    cluster = ideal_cluster(gpus_per_node=2, bytes_per_s=1e24)
    result = simulate(job(model, cluster, pp=2, grad_accum=4, schedule="zb-v", layer_split=(1, 2, 3, 3)))
    assert [_compute_s(rank) for rank in result.ranks] == pytest.approx([4 * 4 * 300e-9, 4 * 5 * 300e-9])


def test_more_recomputed_layers_than_a_stage_has_are_refused() -> None:
    with pytest.raises(PlanError) as error:
        _lowered("1f1b", recompute="full", recompute_layers=3)
    assert str(error.value) == (
        "recompute_layers 3 is more than the 2 layers of the largest stage; set recompute_layers lower or drop it to "
        "recompute all"
    )
    _lowered("1f1b", recompute="full", recompute_layers=2)


# ---- frozen layers --------------------------------------------------------------------------------------------------


def _upper_half(model: Transformer) -> int:
    """Parameters of half the layers and the head."""
    embedding, head = model.embedding_parameters, model.head_parameters + model.final_norm_parameters
    return (model.parameters - embedding - head) // 2 + head


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_frozen_encoder_runs_forward_only(name: str) -> None:
    model = small_transformer(layers=8)
    program, whole = _lowered(name, frozen_layers=4), _lowered(name)
    frozen = {
        layer
        for run in _all(program, Run)
        if run.operation.name not in ("forward", "optimizer")
        for layer in run.operation.layers
    } & set(range(4))
    assert not frozen
    copies = 2 if name == "dualpipe" else 1
    assert sum(dict(rank.resident)["gradients"] for rank in program.ranks) == copies * 4 * _upper_half(model)
    assert sum(dict(rank.resident)["weights"] for rank in program.ranks) == sum(
        dict(rank.resident)["weights"] for rank in whole.ranks
    )
    assert len(_all(program, Send)) < len(_all(whole, Send))


def test_stages_before_the_first_gradient_have_no_way_back() -> None:
    """Two of four stages are frozen: the step is the way down, and 1F1B on the other two."""
    program = _lowered("1f1b", frozen_layers=4)
    assert [sum(isinstance(i, Send) for i in rank.instructions) for rank in program.ranks] == [8, 8, 8, 8]
    assert [next(i.stream for i in rank.instructions if isinstance(i, Send)) for rank in program.ranks] == [
        *["pp_forward"] * 3,
        "pp_backward",
    ]
    assert all(i.nbytes == 0 for rank in program.ranks[:2] for i in rank.instructions if isinstance(i, Alloc))
    assert [any(r.operation.name == "optimizer" for r in _all_runs(rank)) for rank in program.ranks] == [
        False,
        False,
        True,
        True,
    ]


def _all_runs(rank: Any) -> list[Run]:
    return [i for i in rank.instructions if isinstance(i, Run)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_layers_are_not_reduced(zero: int) -> None:
    model = small_transformer(layers=8)
    program = _lowered("1f1b", gpus="h100-sxm:1x8", frozen_layers=4, zero=zero, grad_accum=4)
    reduced = sum(c.nbytes for c in _all(program, Collective) if c.name == "gradients")
    assert reduced == 4 * _upper_half(model) * (4 if zero >= 2 else 1)


def test_layers_of_a_module_that_need_no_gradient_have_none() -> None:
    model = even_model(4, forward=100, backward=200, parameters=10)
    first = replace(model.layers[0], trainable_parameters=0, backward_forms=())
    model = replace(model, layers=(first, *model.layers[1:]))
    cluster = ideal_cluster(gpus_per_node=2, bytes_per_s=1e24)
    result = simulate(job(model, cluster, pp=2, grad_accum=4))
    assert _compute_s(result.ranks[0]) == pytest.approx(4 * (100 + 100 + 200) * 1e-9)
    assert [dict(f.by_category).get("optimizer") for f in result.footprints] == [120, 240]


def test_frozen_layers_count_once_in_the_model_flop() -> None:
    """A third of their forward and backward is forward."""
    model, cluster = small_transformer(layers=8), Cluster.parse("h100-sxm:1x4")
    plan = {"pp": 4, "seq_len": 512, "grad_accum": 4}
    whole, half, none = (simulate(job(model, cluster, **plan, frozen_layers=n)).model_flop for n in (None, 4, 8))
    head = 3 * 2.0 * 4 * 512 * model.hidden * model.vocab
    assert none == pytest.approx(head + (whole - head) / 3)
    assert half == pytest.approx((whole + none) / 2)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({}, "frozen_layers 9 is more than the 8 layers of small; set frozen_layers to at most 8"),
        (
            {"tied_embeddings": True, "layers": 12},
            "frozen_layers 9 freezes the embedding, which is also the head of small; set tied_embeddings=false or drop "
            "frozen_layers",
        ),
    ],
)
def test_layers_that_cannot_be_frozen(model: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as error:
        _lowered("1f1b", model=small_transformer(**{"layers": 8, **model}), frozen_layers=9)
    assert str(error.value) == text


def test_modules_freeze_by_their_own_flags() -> None:
    with pytest.raises(PlanError, match="frozen_layers 1 has no meaning for the module even; drop it and trace"):
        simulate(job(even_model(4, forward=1, backward=1), ideal_cluster(), frozen_layers=1))
