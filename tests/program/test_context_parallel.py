"""Context parallelism: causal work and traffic of its three methods add up to those of the whole sequence."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import small_transformer

from simpar import Cluster, Plan, PlanError, Transformer, simulate
from simpar.model.work import Attention
from simpar.plan.layout import lay_out
from simpar.program.ir import Collective, Launch, Run, Wait
from simpar.program.lower import lower

CLUSTER = Cluster.parse("h100-sxm:2x4")
SEQ = 1024
METHODS = ("ring", "all_gather", "all_to_all")


def layer(phase: str, described: Transformer | None = None, **plan: Any) -> tuple[Any, ...]:
    """What one rank runs of the model's first layer in one pass."""
    described = described or small_transformer(kv_heads=8)
    layout = lay_out(Plan(**{"seq_len": SEQ, **plan}), described, CLUSTER)
    runs = [i.operation for i in lower(described, CLUSTER, layout).ranks[0].instructions if isinstance(i, Run)]
    found = next(run for run in runs if run.phase == phase)
    return found.blocks[found.layers.index(0)].body


def cores(body: tuple[Any, ...]) -> list[Attention]:
    return [i.kernel for i in body if isinstance(i, Launch) and isinstance(i.kernel, Attention)]


def flop(body: tuple[Any, ...]) -> float:
    return sum(core.work.flop for core in cores(body))


def test_what_goes_around_a_ring_is_counted_without_tensor_parallelism_too():
    model = small_transformer(kv_heads=8)
    found = simulate({"model": model, "cluster": CLUSTER, "plan": {"cp": 2, "seq_len": SEQ}}).communication_bytes
    # keys and values of half a sequence forward; both with their gradient backward, and the gradient home
    once = SEQ // 2 * 2 * 8 * model.head_dim * 2
    assert found["cp"] == model.layers * once * (1 + 2 + 1)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_causal_work_is_even_and_adds_up(cp, method, phase):
    whole = flop(layer(phase))
    assert cp * flop(layer(phase, cp=cp, cp_method=method)) == pytest.approx(whole, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.integers(1, 4).map(lambda n: 16 * n))
def test_zigzag_pieces_hold_as_many_pairs_as_the_causal_mask(cp, piece):
    """Counted pair by pair: rank r holds pieces r and 2·cp - 1 - r."""
    pairs = [0] * cp
    for query in range(2 * cp):
        rank = min(query, 2 * cp - 1 - query)
        pairs[rank] += query * piece * piece + piece * piece // 2  # pieces before it, and half of its own
    assert len(set(pairs)) == 1
    body = layer("forward", cp=cp, seq_len=2 * cp * piece)
    width = 2 * 8 * 2 * 64  # two products of eight heads
    assert flop(body) == width * pairs[0]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_windowed_layers_compute_what_their_queries_see(kind, method):
    described = small_transformer(kv_heads=8, window=128, window_kind=kind)
    whole = flop(layer("forward", described))
    found = 4 * flop(layer("forward", described, cp=4, cp_method=method))
    # all but the corner before the sequence's beginning, which one rank lacks
    corner = 2 * 8 * 2 * 64 * 128**2 / 2 if kind == "sliding" and method != "all_to_all" else 0
    assert found == pytest.approx(whole + corner, rel=1e-12)


def bytes_of(body: tuple[Any, ...]) -> dict[str, int]:
    found: dict[str, int] = {}
    for i in body:
        if isinstance(i, Collective) and i.group.stream == "cp":
            found[i.op] = found.get(i.op, 0) + int(i.nbytes)
    return found


@pytest.mark.parametrize("cp", [2, 4])
def test_bytes_of_each_method(cp):
    keys_and_values = 2 * 512 * 2  # bytes a token, of eight heads of 64
    token, local = SEQ // cp, SEQ // cp * keys_and_values
    # a ring passes them on cp - 1 times; backward with their gradient, which goes one step further, home
    assert bytes_of(layer("forward", cp=cp)) == {"shift": (cp - 1) * local}
    assert bytes_of(layer("backward", cp=cp)) == {"shift": (2 * (cp - 1) + 1) * local}
    gathered = {"cp": cp, "cp_method": "all_gather"}
    assert bytes_of(layer("forward", **gathered)) == {"all_gather": cp * local}
    assert bytes_of(layer("backward", **gathered)) == {"all_gather": cp * local, "reduce_scatter": cp * local}
    traded = {"cp": cp, "cp_method": "all_to_all"}
    for phase in ("forward", "backward"):
        assert bytes_of(layer(phase, **traded)) == {"all_to_all": token * (3 * 512 + 512) * 2}


def test_latent_keys_and_values_are_passed_on_per_head():
    mla = {"kv_rank": 128, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}
    found = bytes_of(layer("forward", small_transformer(mla=mla), cp=2))
    assert found == {"shift": SEQ // 2 * 8 * (64 + 32 + 64) * 2}


def test_linear_layers_trade_sequence_for_heads_whatever_the_method():
    linear = {"rule": "lightning", "pattern": "L", "key_heads": 8, "value_heads": 8, "key_dim": 32, "value_dim": 64}
    found = bytes_of(layer("forward", small_transformer(linear=linear), cp=4))
    assert found == {"all_to_all": SEQ // 4 * (2 * 256 + 512 + 512) * 2}


def test_a_ring_s_transfers_run_beside_attention():
    body = layer("forward", cp=4)
    inside = [i for i in body if isinstance(i, Collective | Wait | Launch)]
    order = [
        "shift" if isinstance(i, Collective) else "attention" if isinstance(i, Launch) else "wait"
        for i in inside
        if (isinstance(i, Collective) and i.group.stream == "cp")
        or (isinstance(i, Launch) and isinstance(i.kernel, Attention))
        or (isinstance(i, Wait) and i.stream == "compute")
    ]
    assert order == ["shift", "attention", *(2 * ["wait", "shift", "attention"]), "wait", "attention"]


@pytest.mark.parametrize("method", METHODS)
def test_long_sequences_take_less_time_and_memory_on_more_ranks(method):
    def found(cp: int) -> Any:
        plan = Plan(seq_len=16384, cp=cp, cp_method=method, zero=1, launch_s=0.0)
        return simulate(
            {"model": small_transformer(max_positions=16384), "cluster": CLUSTER.replace(nodes=1), "plan": plan}
        )

    one, four = found(1), found(4)
    # a rank alone runs a sample of its own; four share one
    assert 0.25 < four.step_time_s / one.step_time_s < 0.6
    assert max(f.by_category["activations"] for f in four.footprints) < 0.3 * max(
        f.by_category["activations"] for f in one.footprints
    )


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"cp": 4, "seq_len": 1020},
            "cp 4 cuts seq_len 1020 into 8 pieces, so that causal work is even, but these do not divide it; set "
            "seq_len to a multiple of 8",
        ),
        (
            {"cp": 8, "tp": 2, "cp_method": "all_to_all", "cluster": "h100-sxm:4x4"},
            "cp 8 with cp_method 'all_to_all' splits the 4 heads of a rank of small, which it does not divide; set cp "
            "to a divisor, or cp_method=ring",
        ),
    ],
    ids=["pieces", "heads"],
)
def test_sequences_and_heads_must_divide(plan, message):
    cluster = Cluster.parse(plan.pop("cluster", "h100-sxm:2x4"))
    with pytest.raises(PlanError) as error:
        lay_out(Plan(**plan), small_transformer(), cluster)
    assert str(error.value) == message
