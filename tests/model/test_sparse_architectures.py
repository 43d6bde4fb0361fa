"""Configurations of mixtures, latent and linear attention; counts are those of transformers 5.24's modules."""

import pytest

from simpar.errors import ModelError
from simpar.model.huggingface import from_config
from simpar.model.layer import LayerKind

UNTIED = {"tie_word_embeddings": False}
DEEPSEEK = {
    **UNTIED,
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V2 = {
    **DEEPSEEK,
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "n_shared_experts": 2,
    "n_routed_experts": 160,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
QWEN2 = {
    **UNTIED,
    "model_type": "qwen2_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
    "use_sliding_window": False,
}
QWEN3 = {
    **UNTIED,
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "mlp_only_layers": [],
}
NEXT = {
    **UNTIED,
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
    "full_attention_interval": 4,
}
GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
}
LLAMA4 = {
    "model_type": "llama4_text",
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
}
GLM = {
    **UNTIED,
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_shared_experts": 1,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
MINIMAX = {
    **UNTIED,
    "model_type": "minimax_text_01",
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 2,
    "attn_type_list": ([0] * 7 + [1]) * 10,
}
MIXTRAL = {
    **UNTIED,
    "model_type": "mixtral",
    "vocab_size": 32768,
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

# name -> what the file says (only fields that matter), all parameters, parameters that work on one token
FILES = {
    "deepseek-v2": (V2, 235_741_434_880, 21_375_800_320),
    "deepseek-v2-lite": (
        {
            **V2,
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "n_routed_experts": 64,
            "q_lora_rank": None,
        },
        15_706_484_224,
        2_661_150_208,
    ),
    "deepseek-v3": (DEEPSEEK, 671_026_404_352, 37_552_282_624),
    "kimi-k2": (
        {
            **DEEPSEEK,
            "model_type": "kimi_k2",
            "vocab_size": 163840,
            "num_attention_heads": 64,
            "n_routed_experts": 384,
            "first_k_dense_replace": 1,
        },
        1_026_408_209_408,
        32_861_477_888,
    ),
    "glm-4.7-flash": (
        {
            **DEEPSEEK,
            "model_type": "glm4_moe_lite",
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "v_head_dim": 256,
        },
        29_943_390_976,
        3_896_763_136,
    ),
    "qwen1.5-moe-a2.7b": (QWEN2, 14_315_784_192, 2_689_173_504),
    "qwen2-moe with dense layers": (
        {**QWEN2, "decoder_sparse_step": 2, "mlp_only_layers": [3, 7]},
        7_047_403_520,
        2_202_982_400,
    ),
    "qwen3-30b-a3b": (QWEN3, 30_532_122_624, 3_353_032_704),
    "qwen3-next-80b-a3b": (NEXT, 79_674_391_296, 3_874_929_408),
    "qwen3.5-35b-a3b without intermediate_size": (
        {
            **{key: value for key, value in NEXT.items() if key != "intermediate_size"},
            "model_type": "qwen3_5_moe_text",
            "vocab_size": 248320,
            "num_hidden_layers": 40,
            "num_experts": 256,
            "num_experts_per_tok": 8,
        },
        34_660_610_688,
        3_454_988_928,
    ),
    "qwen3.5-9b": (
        {
            **UNTIED,
            "model_type": "qwen3_5_text",
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
        },
        8_953_803_264,
        8_953_803_264,
    ),
    "mixtral-8x22b": (MIXTRAL, 140_630_071_296, 39_161_468_928),
    "gpt-oss-20b": (GPT_OSS, 20_914_757_184, 4_187_440_704),
    "llama-4-maverick": (LLAMA4, 400_711_848_960, 17_184_691_200),
    "glm-4.5": (GLM, 352_797_814_784, 33_632_251_904),
    "glm-4.5-air": (
        {
            **GLM,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
        },
        106_852_245_504,
        13_424_123_904,
    ),
    "minimax-text-01": (MINIMAX, 456_089_655_296, 48_403_306_496),
    "minimax-m2": (
        {
            **UNTIED,
            "model_type": "minimax_m2",
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_hidden_layers": 62,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        228_689_748_992,
        11_030_537_216,
    ),
    # no module of the library: 64 layers of 8 experts (3 · 6144 · 32768), their router, attention and 4 norms
    "grok-1": (
        {
            "model_type": "grok-1",
            "vocab_size": 131072,
            "hidden_size": 6144,
            "intermediate_size": 32768,
            "num_hidden_layers": 64,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
        64 * (8 * 3 * 6144 * 32768 + 6144 * (8 + 2 * 6144 + 2 * 1024 + 4)) + 6144 * (131072 + 1),
        64 * (2 * 3 * 6144 * 32768 + 6144 * (8 + 2 * 6144 + 2 * 1024 + 4)) + 6144 * (131072 + 1),
    ),
    "dbrx": (
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "n_heads": 48,
            "n_layers": 40,
            "vocab_size": 100352,
            "attn_config": {"kv_n_heads": 8},
            "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        },
        131_596_523_520,
        36_469_708_800,
    ),
    "phi-3.5-moe": (
        {
            **UNTIED,
            "model_type": "phimoe",
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 6400,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 131072,
            "max_position_embeddings": 131072,
        },
        41_873_153_344,
        6_640_999_744,
    ),
    "olmoe-1b-7b": (
        {
            "model_type": "olmoe",
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        6_919_161_856,
        1_282_017_280,
    ),
    "dots1": (
        {
            **GLM,
            "model_type": "dots1",
            "vocab_size": 152064,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "attention_bias": False,
            "n_shared_experts": 2,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
        },
        142_774_373_888,
        14_016_581_120,
    ),
    "granite-3b-a800m": (
        {
            "model_type": "granitemoe",
            "vocab_size": 49155,
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": True,
        },
        3_298_793_472,
        882_874_368,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_have_the_parameters_of_their_modules(name):
    config, parameters, active = FILES[name]
    model = from_config(config, name)
    assert (model.parameters, model.active_parameters) == (parameters, active)
    assert model.embedding_parameters == config["vocab_size"] * model.hidden


def kinds(config):
    model = from_config(config)
    return [model.layer_kind(layer) for layer in range(model.layers)]


def test_dense_and_expert_layers_follow_their_architecture():
    def experts(config):
        return "".join("E" if kind.mlp == "experts" else "D" for kind in kinds(config))

    assert experts(DEEPSEEK) == "DDD" + 58 * "E"
    assert experts(LLAMA4) == 24 * "DE"
    assert experts({**LLAMA4, "moe_layers": [0, 47]}) == "E" + 46 * "D" + "E"
    assert experts({**QWEN3, "mlp_only_layers": [1]}) == "ED" + 46 * "E"
    assert experts({**DEEPSEEK, "moe_layer_freq": 2, "num_hidden_layers": 8}) == "DDDDEDED"


def test_attention_kinds_follow_their_architecture():
    assert kinds(DEEPSEEK)[0] == LayerKind("latent", "dense")
    assert kinds(NEXT)[:4] == [LayerKind("linear", "experts")] * 3 + [LayerKind("full", "experts")]
    assert [kind.attention for kind in kinds(MINIMAX)[:8]] == ["linear"] * 7 + ["full"]
    assert kinds(GPT_OSS)[:2] == [LayerKind("full", "experts", 128), LayerKind("full", "experts")]
    chunk = LayerKind("full", "dense", 8192, chunked=True)
    assert kinds(LLAMA4)[:5:2] == [chunk, chunk, chunk]
    assert kinds(LLAMA4)[3] == LayerKind("full", "experts")
    named = {**NEXT, "num_hidden_layers": 4, "layer_types": ["full_attention"] + 3 * ["linear_attention"]}
    assert [kind.attention for kind in kinds(named)] == ["full", "linear", "linear", "linear"]


def test_what_is_left_out_is_noted():
    assert from_config(GLM).note == "1 multi-token-prediction layer left out"
    assert from_config({**DEEPSEEK, "num_nextn_predict_layers": 2}).note == "2 multi-token-prediction layers left out"
    multimodal = {"model_type": "llama4", "text_config": LLAMA4, "vision_config": {}}
    assert from_config(multimodal).note == "text tower of llama4; other towers are left out"


def test_a_window_as_long_as_the_longest_sequence_is_none():
    assert from_config(FILES["phi-3.5-moe"][0]).window is None


@pytest.mark.parametrize(
    ("config", "changes", "text"),
    [
        (QWEN3, {"num_experts": "8"}, "config: num_experts is '8', but must be a positive integer"),
        (QWEN3, {"num_experts": None}, "config: field num_experts (or num_local_experts) is missing"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "config: moe: top_k 9 is more than the 8 experts"),
        (QWEN2, {"shared_expert_intermediate_size": None}, "field shared_expert_intermediate_size is missing"),
        (QWEN3, {"mlp_only_layers": [1.5]}, "mlp_only_layers is [1.5], but must be a list of integers"),
        (DEEPSEEK, {"n_shared_experts": -1}, "n_shared_experts is -1, but must be an integer of 0 or more"),
        (DEEPSEEK, {"v_head_dim": 0}, "config: v_head_dim is 0, but must be a positive integer"),
        (NEXT, {"layer_types": ["mamba"]}, "layer_types has 'mamba', but layers of this architecture attend fully"),
        (MINIMAX, {"shared_intermediate_size": 64}, "shared_intermediate_size 64 is not supported"),
        (QWEN3, {"model_type": "qwen3_mo"}, "did you mean 'qwen3_moe'?"),
    ],
)
def test_mistakes_are_named(config, changes, text):
    with pytest.raises(ModelError) as caught:
        from_config({**config, **changes})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("jamba", "model_type 'jamba' has state-space (Mamba) layers, whose scan is not described; choose a model of"),
        ("deepseek_v32", "model_type 'deepseek_v32' chooses the keys of each query by an indexer"),
        ("kimi_linear", "model_type 'kimi_linear' has Kimi Delta Attention"),
    ],
)
def test_layers_that_cannot_be_described_are_refused_by_name(model_type, text):
    with pytest.raises(ModelError) as caught:
        from_config({**MIXTRAL, "model_type": model_type})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_local_experts": 4},
            "num_local_experts is 4, but the architecture 'llama' has no experts; set model_type",
        ),
        ({"num_experts": "8"}, "num_experts is '8', but must be a positive integer"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512, but the architecture 'llama' has no latent attention"),
    ],
)
def test_a_dense_architecture_with_fields_of_others_is_refused(changes, text):
    dense = {key: value for key, value in MIXTRAL.items() if key not in ("num_local_experts", "num_experts_per_tok")}
    with pytest.raises(ModelError) as caught:
        from_config({**dense, "model_type": "llama", **changes})
    assert text in str(caught.value)
    assert from_config({**dense, "model_type": "llama", "num_local_experts": 1}).moe is None
