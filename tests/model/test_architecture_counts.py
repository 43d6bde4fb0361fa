"""Configurations of further architectures; counts are those of transformers 5.24's modules on the meta device.

Parameters that are not trained (biases that only balance the experts' load) are not in the counts.
"""

import pytest
from configs import sized

from simpar.model.huggingface import from_config

# name -> what the file says (only fields that matter), all parameters, parameters that work on one token
FILES = {
    "apertus-8b": (
        sized("apertus", (131072, 4096, 21504, 32, 32, 8), tie_word_embeddings=False),
        8_053_338_176,
        8_053_338_176,
    ),
    "afm-4.5b": (sized("arcee", (128004, 2560, 18432, 36, 20, 4), head_dim=128), 4_619_184_640, 4_619_184_640),
    "command-r7b": (
        sized("cohere2", (256000, 4096, 14336, 32, 32, 8), sliding_window=4096, sliding_window_pattern=4),
        8_028_033_024,
        8_028_033_024,
    ),
    "cwm": (sized("cwm", (128256, 6144, 21504, 64, 48, 8), head_dim=128), 32_581_097_472, 32_581_097_472),
    "ernie-4.5-0.3b": (
        sized("ernie4_5", (103424, 1024, 3072, 18, 16, 2), head_dim=128, use_bias=False, tie_word_embeddings=True),
        360_748_032,
        360_748_032,
    ),
    "exaone-3.5-7.8b": (
        {
            "model_type": "exaone",
            "vocab_size": 102400,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        7_818_448_896,
        7_818_448_896,
    ),
    "exaone-4.0-32b": (
        sized(
            "exaone4",
            (102400, 5120, 27392, 64, 40, 8),
            head_dim=128,
            sliding_window=4096,
            sliding_window_pattern="LLLG",
        ),
        32_003_216_384,
        32_003_216_384,
    ),
    "glm-4-9b": (
        sized("glm", (151552, 4096, 13696, 40, 32, 2), head_dim=128, attention_bias=True),
        9_399_951_360,
        9_399_951_360,
    ),
    "glm-4-32b": (
        sized("glm4", (151552, 6144, 23040, 61, 48, 2), head_dim=128, attention_bias=False),
        32_566_081_536,
        32_566_081_536,
    ),
    "helium-1-2b": (sized("helium", (64000, 2048, 8192, 28, 16, 8), head_dim=128), 2_023_868_416, 2_023_868_416),
    "hunyuan-7b": (
        sized("hunyuan_v1_dense", (128167, 4096, 14336, 32, 32, 8), head_dim=128, tie_word_embeddings=True),
        7_504_568_320,
        7_504_568_320,
    ),
    "internlm3-8b": (
        sized("internlm3", (128512, 4096, 10240, 48, 32, 2), head_dim=128, bias=False, qkv_bias=False),
        8_804_241_408,
        8_804_241_408,
    ),
    "ministral-8b": (
        sized("ministral", (131072, 4096, 12288, 36, 32, 8), head_dim=128, sliding_window=32768),
        8_019_808_256,
        8_019_808_256,
    ),
    "ministral-3-14b": (
        sized("ministral3", (131072, 5120, 16384, 40, 32, 8), head_dim=128, sliding_window=None),
        13_506_073_600,
        13_506_073_600,
    ),
    "olmo-2-7b": (sized("olmo2", (100352, 4096, 11008, 32, 32, 32)), 7_298_617_344, 7_298_617_344),
    "olmo-3-32b": (
        sized("olmo3", (100278, 5120, 27648, 64, 40, 8), sliding_window=4096),
        32_233_522_176,
        32_233_522_176,
    ),
    "olmo-7b": (sized("olmo", (50304, 4096, 11008, 32, 32)), 6_888_095_744, 6_888_095_744),
    "smollm3-3b": (
        sized("smollm3", (128256, 2048, 11008, 36, 16, 4), tie_word_embeddings=True),
        3_075_098_624,
        3_075_098_624,
    ),
    "vaultgemma-1b": (sized("vaultgemma", (256000, 1152, 6912, 26, 4, 1), head_dim=256), 992_734_848, 992_734_848),
    "hyperclovax-14b": (
        sized("hyperclovax", (110592, 6144, 14336, 38, 48, 8), head_dim=128, use_post_norm=True),
        14_748_112_896,
        14_748_112_896,
    ),
    "phi-2": (sized("phi", (51200, 2560, 10240, 32, 32)), 2_779_683_840, 2_779_683_840),
    "gpt-j-6b": (
        {
            "model_type": "gptj",
            "vocab_size": 50400,
            "n_embd": 4096,
            "n_head": 16,
            "n_layer": 28,
            "n_positions": 2048,
            "n_inner": None,
            "tie_word_embeddings": False,
        },
        6_050_882_784,
        6_050_882_784,
    ),
    "codegen-2b": (
        {
            "model_type": "codegen",
            "vocab_size": 51200,
            "n_embd": 2560,
            "n_head": 32,
            "n_layer": 32,
            "n_positions": 2048,
            "n_ctx": 2048,
            "tie_word_embeddings": False,
        },
        2_779_356_160,
        2_779_356_160,
    ),
    "starcoder": (
        {
            "model_type": "gpt_bigcode",
            "vocab_size": 49152,
            "n_embd": 6144,
            "n_head": 48,
            "n_layer": 40,
            "n_positions": 8192,
            "n_inner": 24576,
            "multi_query": True,
        },
        15_517_456_384,
        15_517_456_384,
    ),
    "gpt-neo-2.7b": (
        {
            "model_type": "gpt_neo",
            "vocab_size": 50257,
            "hidden_size": 2560,
            "num_layers": 32,
            "num_heads": 20,
            "max_position_embeddings": 2048,
            "attention_types": [[["global", "local"], 16]],
            "window_size": 256,
            "intermediate_size": None,
        },
        2_651_307_520,
        2_651_307_520,
    ),
    "persimmon-8b": (sized("persimmon", (262144, 4096, 16384, 36, 64)), 9_397_175_296, 9_397_175_296),
    "xglm-564m": (
        {
            "model_type": "xglm",
            "vocab_size": 256008,
            "d_model": 1024,
            "num_layers": 24,
            "attention_heads": 16,
            "ffn_dim": 4096,
            "max_position_embeddings": 2048,
        },
        564_463_616,
        564_463_616,
    ),
    "ernie-4.5-21b-a3b": (
        sized(
            "ernie4_5_moe",
            (103424, 2560, 12288, 28, 20, 4),
            moe_intermediate_size=1536,
            moe_num_experts=64,
            moe_k=6,
            moe_num_shared_experts=2,
            moe_layer_start_index=1,
            tie_word_embeddings=True,
        ),
        21_825_436_160,
        3_352_148_480,
    ),
    "ernie with experts in every second layer": (
        sized(
            "ernie4_5_moe",
            (101, 48, 80, 7, 6, 2),
            head_dim=10,
            moe_intermediate_size=24,
            moe_num_experts=5,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_layer_start_index=2,
            moe_layer_end_index=5,
            moe_layer_interval=2,
            tie_word_embeddings=False,
        ),
        163_728,
        142_992,
    ),
    "flexolmo-7x7b": (
        sized("flex_olmo", (100352, 4096, 11008, 32, 32, 32), num_experts=7, num_experts_per_tok=5),
        33_270_665_216,
        24_613_621_760,
    ),
    "granite with a shared expert": (
        sized(
            "granitemoeshared",
            (49155, 1536, 512, 32, 24, 8),
            num_local_experts=40,
            num_experts_per_tok=8,
            shared_intermediate_size=1024,
            tie_word_embeddings=True,
        ),
        3_449_788_416,
        1_033_869_312,
    ),
    "granite-4.0-micro": (
        sized(
            "granitemoehybrid",
            (100352, 2560, 8192, 40, 40, 8),
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=8192,
            position_embedding_type="rope",
            tie_word_embeddings=True,
            layer_types=40 * ["attention"],
        ),
        3_402_836_480,
        3_402_836_480,
    ),
    "hunyuan-a13b": (
        sized(
            "hunyuan_v1_moe",
            (128167, 4096, 3072, 32, 32, 8),
            head_dim=128,
            num_experts=64,
            moe_topk=32 * [8],
            tie_word_embeddings=True,
        ),
        80_393_183_232,
        12_747_448_320,
    ),
    "minicpm3-4b": (
        sized(
            "minicpm3",
            (73448, 2560, 6400, 62, 40, 40),
            q_lora_rank=768,
            kv_lora_rank=256,
            qk_nope_head_dim=64,
            qk_rope_head_dim=32,
        ),
        4_073_875_968,
        4_073_875_968,
    ),
    "solar-open-100b": (
        {
            "model_type": "solar_open",
            "vocab_size": 196608,
            "hidden_size": 4096,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "n_shared_experts": 1,
        },
        102_651_793_408,
        12_054_827_008,
    ),
    "a small olmo2": (
        sized("olmo2", (101, 48, 80, 3, 6, 2), head_dim=10, attention_bias=True, tie_word_embeddings=True),
        63_468,
        63_468,
    ),
    "a small glm": (sized("glm", (101, 48, 80, 3, 6, 2), head_dim=10), 67_932, 67_932),
    "a small glm4": (sized("glm4", (101, 48, 80, 3, 6, 2), head_dim=10), 68_220, 68_220),
    "a small cohere2": (
        sized("cohere2", (101, 48, 80, 3, 6, 2), head_dim=10, attention_bias=True, tie_word_embeddings=False),
        67_932,
        67_932,
    ),
    "a small ernie4_5": (
        sized("ernie4_5", (101, 48, 80, 3, 6, 2), head_dim=10, use_bias=True, tie_word_embeddings=False),
        68_700,
        68_700,
    ),
    "a small hunyuan_v1_dense": (
        sized("hunyuan_v1_dense", (101, 48, 80, 3, 6, 2), head_dim=10, attention_bias=True),
        68_136,
        68_136,
    ),
    "a small apertus": (
        sized("apertus", (101, 48, 80, 3, 6, 2), head_dim=10, attention_bias=True, tie_word_embeddings=True),
        51_774,
        51_774,
    ),
    "a small arcee": (
        sized("arcee", (101, 48, 80, 3, 6, 2), head_dim=10, attention_bias=True, mlp_bias=True),
        56_940,
        56_940,
    ),
    "a small internlm3": (
        sized("internlm3", (101, 48, 80, 3, 6, 2), head_dim=10, attention_bias=True, mlp_bias=True),
        68_700,
        68_700,
    ),
    "a small exaone4": (
        sized("exaone4", (101, 48, 80, 3, 6, 2), head_dim=10, tie_word_embeddings=True),
        62_844,
        62_844,
    ),
    "a small phi": (sized("phi", (101, 48, 80, 3, 6, 2), head_dim=10, tie_word_embeddings=False), 57_089, 57_089),
    "a small mistral4": (
        sized(
            "mistral4",
            (101, 48, 80, 5, 6),
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=24,
            kv_lora_rank=16,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=10,
            attention_bias=True,
        ),
        188_196,
        105_252,
    ),
}

# what the note of such an import says is counted otherwise than in the module
DIFFERENCES = {
    "apertus-8b": -2 * 32,
    "a small apertus": -2 * 3,
    "olmo-7b": 4096 * (2 * 32 + 1),
    "persimmon-8b": -2 * 64 * 36,
}


@pytest.mark.parametrize("name", FILES)
def test_files_have_the_parameters_of_their_modules(name):
    config, parameters, active = FILES[name]
    model, difference = from_config(config, name), DIFFERENCES.get(name, 0)
    assert (model.parameters, model.active_parameters) == (parameters + difference, active + difference)
    positions = config.get("n_positions", 0) if model.position == "learned" else 0
    positions = config["max_position_embeddings"] if config["model_type"] == "gpt_neo" else positions
    assert model.embedding_parameters == (config["vocab_size"] + positions) * model.hidden


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_count_that_differs_is_noted(name):
    assert from_config(FILES[name][0]).note


def llama_like(vocab, hidden, ffn, layers, *, kv_width, extra=0):
    """Written out: two embeddings, attention, a gated MLP and two norms a layer, and what a layer has beside them."""
    layer = 2 * hidden * (hidden + kv_width) + 3 * hidden * ffn + 2 * hidden + extra
    return 2 * vocab * hidden + layers * layer + hidden


# architectures whose modules come with their checkpoints: published counts, or sums that are written out
REMOTE = {
    "baichuan2-7b": (
        sized("baichuan", (125696, 4096, 11008, 32, 32)),
        llama_like(125696, 4096, 11008, 32, kv_width=4096),
    ),
    "baichuan-13b": (
        sized("baichuan", (64000, 5120, 13696, 40, 40), model_max_length=4096),
        llama_like(64000, 5120, 13696, 40, kv_width=5120),
    ),
    "internlm2-7b": (sized("internlm2", (92544, 4096, 14336, 32, 32, 8), bias=False), 7_737_708_544),
    "internlm2 with biases": (
        sized("internlm2", (101, 48, 80, 3, 6, 2)),
        llama_like(101, 48, 80, 3, kv_width=16, extra=48 + 2 * 16 + 48),
    ),
    "qwen-7b": (
        sized("qwen", (151936, 4096, 22016, 32, 32), kv_channels=128, no_bias=True, seq_length=8192),
        7_721_324_544,
    ),
    "chatglm3-6b": (
        {
            "model_type": "chatglm",
            "add_bias_linear": False,
            "add_qkv_bias": True,
            "ffn_hidden_size": 13696,
            "hidden_size": 4096,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "num_attention_heads": 32,
            "num_layers": 28,
            "padded_vocab_size": 65024,
            "seq_length": 8192,
        },
        6_243_584_000,
    ),
    "minicpm-2b": (sized("minicpm", (122753, 2304, 5760, 40, 36, 36)), 2_724_880_896),
    "deepseek-moe-16b": (
        sized(
            "deepseek",
            (102400, 2048, 10944, 28, 16, 16),
            first_k_dense_replace=1,
            moe_intermediate_size=1408,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
        ),
        16_375_728_128,
    ),
    "mimo-7b": (
        sized("mimo", (151680, 4096, 11008, 36, 32, 8), head_dim=128, num_nextn_predict_layers=1),
        llama_like(151680, 4096, 11008, 36, kv_width=1024, extra=4096 + 2 * 1024),
    ),
    "ling-lite": (
        sized(
            "bailing_moe",
            (126464, 2048, 5632, 28, 16, 4),
            moe_intermediate_size=1408,
            num_experts=64,
            num_experts_per_tok=6,
            num_shared_experts=2,
            first_k_dense_replace=0,
            use_bias=False,
            use_qkv_bias=False,
        ),
        llama_like(126464, 2048, (64 + 2) * 1408, 28, kv_width=512, extra=64 * 2048),
    ),
    "ling-mini-2.0": (
        sized(
            "bailing_moe_v2",
            (157184, 2048, 5120, 20, 16, 4),
            head_dim=128,
            moe_intermediate_size=512,
            num_experts=256,
            num_experts_per_tok=8,
            num_shared_experts=1,
            first_k_dense_replace=1,
            moe_shared_expert_intermediate_size=512,
            use_qk_norm=True,
        ),
        llama_like(157184, 2048, (256 + 1) * 512, 20, kv_width=512, extra=256 * 2048 + 2 * 128)
        + 3 * 2048 * (5120 - (256 + 1) * 512)
        - 256 * 2048,
    ),
}


@pytest.mark.parametrize("name", REMOTE)
def test_architectures_with_code_of_their_own_have_the_parameters_of_their_checkpoint(name):
    config, parameters = REMOTE[name]
    assert from_config(config, name).parameters == parameters


def test_parameters_of_one_token_are_those_of_the_deepseek_moe_report():
    assert from_config(REMOTE["deepseek-moe-16b"][0]).active_parameters == 2_828_650_496
