"""How load falls on experts, and what a wrong mixture says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpar.errors import ModelError
from simpar.model.attention import LinearAttention
from simpar.model.experts import MoE
from simpar.model.transformer import Transformer

SMALL = {"name": "s", "layers": 4, "hidden": 64, "heads": 8, "gated_mlp": True, "vocab": 10, "tied_embeddings": True}
MLA = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 8}

mixtures = st.integers(1, 64).flatmap(
    lambda experts: st.builds(MoE, experts=st.just(experts), top_k=st.integers(1, experts), ffn_hidden=st.just(8))
)


@given(mixtures, st.floats(0, 4))
def test_shares_are_a_distribution_that_no_expert_exceeds(moe, skew):
    shares = moe.expert_shares(skew)
    assert sum(shares) == pytest.approx(1)
    assert max(shares) <= 1 / moe.top_k * (1 + 1e-12)
    assert list(shares) == sorted(shares, reverse=True)


@given(mixtures, st.floats(0, 3), st.floats(0.01, 1))
def test_more_skew_loads_the_busiest_more(moe, skew, more):
    assert moe.expert_shares(skew + more)[0] >= moe.expert_shares(skew)[0] - 1e-12


def test_shares_follow_the_power_law_where_no_limit_binds():
    shares = MoE(experts=8, top_k=1, ffn_hidden=8).expert_shares(0.5)
    assert [share / shares[0] for share in shares] == pytest.approx([n**-0.5 for n in range(1, 9)])


def test_balanced_load_is_even_on_experts_and_ranks():
    moe = MoE(experts=8, top_k=2, ffn_hidden=8)
    assert moe.expert_shares() == pytest.approx([1 / 8] * 8)
    assert moe.rank_shares(4) == pytest.approx([1 / 4] * 4)


def test_a_token_goes_to_an_expert_once():
    assert MoE(experts=4, top_k=4, ffn_hidden=8).expert_shares(3.0) == pytest.approx([1 / 4] * 4)
    assert MoE(experts=4, top_k=2, ffn_hidden=8).expert_shares(9.0)[0] == 0.5


def test_capacity_drops_what_is_above_it():
    moe = MoE(experts=4, top_k=2, ffn_hidden=8, capacity_factor=1.25)
    assert moe.expert_shares() == pytest.approx([1 / 4] * 4)
    assert moe.expert_shares(1.0) == pytest.approx([0.3125, 0.24, 0.16, 0.12])


@given(mixtures, st.floats(0, 2))
def test_ranks_share_what_their_experts_get(moe, skew):
    for ranks in (n for n in range(1, moe.experts + 1) if moe.experts % n == 0):
        shares = moe.rank_shares(ranks, skew)
        assert len(shares) == ranks
        assert sum(shares) == pytest.approx(1)
        assert max(shares) == shares[0]


@pytest.mark.parametrize("ranks", [0, 3, 16])
def test_experts_that_cannot_be_dealt_out_are_named(ranks):
    with pytest.raises(
        ModelError, match=f"8 experts cannot be dealt out evenly to {ranks} ranks; choose a divisor of 8"
    ):
        MoE(experts=8, top_k=2, ffn_hidden=8).rank_shares(ranks)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"moe": {"experts": 2, "top_k": 3, "ffn_hidden": 8}}, "top_k 3 is more than the 2 experts"),
        ({"moe": {"experts": 2, "top_k": 1, "ffn_hidden": 8, "shared_gate": True}}, "give shared_ffn_hidden"),
        ({"moe": {"experts": 2, "top_k": 1, "ffn_hidden": 8, "pattern": "DD"}}, "moe.pattern"),
        (
            {"moe": {"experts": 2, "top_k": 1, "ffn_hidden": 8, "first_dense": 4}},
            "moe gives none of the 4 layers experts",
        ),
        ({"moe": {"experts": "2", "top_k": 1, "ffn_hidden": 8}}, "moe.experts: '2' should be a whole number"),
        ({"ffn_hidden": 8, "mla": MLA, "head_dim": 16}, "drop kv_heads and head_dim"),
        ({"ffn_hidden": 8, "mla": MLA, "kv_heads": 2}, "not 2 kv_heads of head_dim 12; drop kv_heads and head_dim"),
        ({"ffn_hidden": 8, "mla": MLA, "qk_norm": True}, "latent attention has norms of its own and no gate"),
        ({"ffn_hidden": 8, "mla": {**MLA, "value_dim": 0}}, "mla.value_dim: 0 should be greater than 0"),
        ({"mla": MLA}, "a gated MLP has no customary width; give ffn_hidden"),
    ],
)
def test_a_wrong_description_says_what_is_wrong(fields, text):
    with pytest.raises(ModelError) as caught:
        Transformer.model_validate({**SMALL, **fields})
    assert text in str(caught.value)


def test_linear_layers_need_a_pattern_with_one():
    sizes = {"rule": "lightning", "key_heads": 1, "value_heads": 1, "key_dim": 8, "value_dim": 8}
    with pytest.raises(ModelError, match="pattern"):
        LinearAttention.model_validate({**sizes, "pattern": "FF"})
    assert [LinearAttention.model_validate({**sizes, "pattern": "LF"}).is_linear(i) for i in range(3)] == [
        True,
        False,
        True,
    ]


def test_widths_follow_from_the_parts():
    model = Transformer.model_validate({**SMALL, "mla": MLA, "moe": {"experts": 4, "top_k": 1, "ffn_hidden": 24}})
    assert (model.kv_heads, model.head_dim, model.value_dim, model.ffn_hidden) == (8, 12, 8, 24)
    assert (model.query_width, model.attention_width) == (96, 64)
    assert model.replace(layers=2).parameters < model.parameters
    assert hash(model) == hash(model.replace(layers=4))
