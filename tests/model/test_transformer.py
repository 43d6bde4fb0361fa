import pytest

from simpar.errors import ModelError
from simpar.model.transformer import ModelFlop, Transformer

SMALL = {
    "name": "small",
    "layers": 4,
    "hidden": 64,
    "heads": 8,
    "gated_mlp": False,
    "vocab": 1000,
    "tied_embeddings": False,
}


def small(**changes):
    return Transformer.model_validate({**SMALL, **changes})


def test_widths_have_their_customary_defaults():
    model = small()
    assert (model.kv_heads, model.head_dim, model.ffn_hidden) == (8, 8, 256)
    explicit = small(kv_heads=2, head_dim=16, ffn_hidden=100)
    assert (explicit.kv_heads, explicit.head_dim, explicit.ffn_hidden) == (2, 16, 100)


def test_replace_keeps_what_was_derived_and_checks_again():
    model = small()
    assert model.replace(layers=8).ffn_hidden == 256
    with pytest.raises(ModelError, match="kv_heads 8 does not divide heads 12"):
        model.replace(heads=12)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"heads": 7},
            "hidden 64 is not divisible by heads 7, so there is no default head_dim; give head_dim",
        ),
        (
            {"kv_heads": 3},
            "kv_heads 3 does not divide heads 8: query heads share key/value heads in equal groups",
        ),
        ({"gated_mlp": True}, "a gated MLP has no customary width; give ffn_hidden"),
        ({"position": "learned"}, "learned positions need the length of their table; give max_positions"),
        ({"layers": 0}, "layers: 0 should be greater than 0"),
        ({"layers": "4"}, "layers: '4' should be a whole number"),
        ({"hidden": "64"}, "hidden: '64' should be a whole number"),
        ({"norm": "batchnorm"}, "norm: 'batchnorm' should be 'layernorm' or 'rmsnorm'"),
        ({"window": 8, "window_pattern": "WX"}, "window_pattern: 'WX' should match pattern '^[WF]+$'"),
        ({"kv_head": 2}, "kv_head: unknown key; did you mean 'kv_heads'"),
    ],
)
def test_a_wrong_description_says_what_is_wrong(changes, text):
    with pytest.raises(ModelError) as caught:
        small(**changes)
    assert text in str(caught.value)


def test_parameters_add_up_by_hand():
    model = small(norm="layernorm", qkv_bias=True, out_bias=True, mlp_bias=True, position="learned", max_positions=32)
    attention = 4 * 64 * 64 + 4 * 64
    mlp = 64 * 256 + 256 + 256 * 64 + 64
    assert model.attention_parameters == attention
    assert model.mlp_parameters == mlp
    assert model.layer_parameters(model.layer_kind(0)) == attention + mlp + 2 * 128
    assert model.embedding_parameters == 1000 * 64 + 32 * 64
    assert model.head_parameters == 64_000
    assert model.replace(tied_embeddings=True).head_parameters == 0
    assert model.parameters == 66_048 + 4 * (attention + mlp + 256) + 128 + 64_000


def test_norms_and_gates_count():
    plain = small(gated_mlp=False, ffn_hidden=256)
    assert small(gated_mlp=True, ffn_hidden=256).parameters - plain.parameters == 4 * 64 * 256
    assert small(qk_norm=True).parameters - plain.parameters == 4 * 2 * 8
    assert small(norms_per_layer=4).parameters - plain.parameters == 4 * 2 * 64
    assert small(norm="layernorm").parameters - plain.parameters == (4 * 2 + 1) * 64
    assert small(norm="layernorm", norm_bias=False).parameters == plain.parameters
    assert small(embedding_norm=True).parameters - plain.parameters == 64


@pytest.mark.parametrize(("multiple", "padded"), [(128, 50_304), (1024, 51_200), (1, 50_257), (50_257, 50_257)])
def test_vocabulary_is_padded_up(multiple, padded):
    assert small(vocab=50_257).padded_vocab(multiple) == padded


def test_step_flop_is_the_megatron_formula():
    # Korthikanti et al. 2022, eq. in appendix A: 72 B L s h² (1 + s / 6h + v / 12hL), attention counted in full
    batch, seq_len, hidden, layers, vocab = 3, 128, 64, 4, 1000
    published = 72 * batch * layers * seq_len * hidden**2
    published *= 1 + seq_len / (6 * hidden) + vocab / (12 * hidden * layers)
    assert small().step_flop(batch * seq_len, seq_len, "full").total == pytest.approx(published, rel=1e-12)


def test_grouped_keys_and_gates_change_the_projections_only():
    model = small(kv_heads=2, gated_mlp=True, ffn_hidden=256)
    per_layer = 2 * 64 * 64 * 2 + 2 * 64 * 16 * 2 + 3 * 2 * 64 * 256  # q and o, k and v, gate up down
    flop = model.flop_per_token(128)
    assert flop.matmul == 4 * per_layer + 2 * 64 * 1000
    assert flop.attention == small().flop_per_token(128).attention


@pytest.mark.parametrize("window", [1, 16, 100, 128, 500])
def test_causal_count_is_the_mask_less_half_a_diagonal(window):
    seq_len = 128
    kept = sum(key <= query < key + window for query in range(seq_len) for key in range(seq_len))
    flop = small(window=window).flop_per_token(seq_len, "causal").attention * seq_len
    per_pair = 4 * 4 * 64
    assert kept - flop / per_pair == pytest.approx(min(window, seq_len) / 2)


def test_attention_counts_of_a_mixed_stack():
    model = small(window=32, window_pattern="WF")
    assert [model.layer_window(layer) for layer in range(4)] == [32, None, 32, None]
    unit = 4 * 64
    assert model.flop_per_token(128, "full").attention == unit * (2 * 32 + 2 * 128)
    assert model.flop_per_token(128, "halved").attention == unit * (2 * 16 + 2 * 64)
    assert model.flop_per_token(128, "causal").attention == unit * (2 * 28 + 2 * 64)
    assert model.flop_per_token(16).attention == small().flop_per_token(16).attention


def test_flop_scale_and_add_up():
    flop = ModelFlop(matmul=3.0, attention=4.0)
    assert flop.total == 7.0
    assert 2 * flop == flop * 2 == ModelFlop(6.0, 8.0)
