"""What configuration files in the wild leave out, repeat, nest or name otherwise, by architecture."""

import pytest
from configs import SIZES, sized

from simpar.errors import ModelError
from simpar.model.huggingface import ARCHITECTURES, from_config
from simpar.model.refused_architectures import REFUSED

SMALL = (101, 48, 80, 5, 6, 2)
EXPERTS = {"moe_intermediate_size": 24, "n_routed_experts": 5, "num_experts_per_tok": 2}
MISTRAL4 = sized("mistral4", SMALL, **EXPERTS, first_k_dense_replace=1)
ERNIE = sized("ernie4_5_moe", SMALL, moe_intermediate_size=24, moe_num_experts=5, moe_k=2)
HUNYUAN = sized("hunyuan_v1_moe", SMALL, num_experts=5, moe_topk=2)
LING = sized(
    "bailing_moe_v2", SMALL, moe_intermediate_size=24, num_experts=5, num_experts_per_tok=2, num_shared_experts=2
)
MICRO = sized(
    "granitemoehybrid",
    SMALL,
    layer_types=5 * ["attention"],
    num_local_experts=0,
    shared_intermediate_size=80,
    position_embedding_type="rope",
)
NEO = {
    "model_type": "gpt_neo",
    "vocab_size": 101,
    "hidden_size": 48,
    "num_layers": 4,
    "num_heads": 6,
    "max_position_embeddings": 33,
}


def test_every_architecture_is_either_imported_or_refused():
    assert not set(ARCHITECTURES) & set(REFUSED)


def windows(config):
    model = from_config(config)
    return "".join("W" if model.layer_window(layer) else "F" for layer in range(model.layers))


@pytest.mark.parametrize(
    ("model_type", "more", "expected"),
    [
        ("cohere2", {}, "WWWFW"),
        ("cohere2", {"sliding_window_pattern": 2}, "WFWFW"),
        ("cohere2", {"sliding_window": None}, "FFFFF"),
        ("cwm", {}, "FWWWF"),
        ("exaone4", {}, "WWWFW"),
        ("exaone4", {"sliding_window_pattern": "LG"}, "WFWFW"),
        ("exaone4", {"sliding_window_pattern": None, "sliding_window": None}, "FFFFF"),
        ("ministral", {}, "WWWWW"),
        ("ministral3", {}, "FFFFF"),
        ("olmo2", {}, "FFFFF"),
        ("olmo3", {}, "WWWFW"),
        ("smollm3", {}, "FFFFF"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16}, "FFFWF"),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 16, "no_rope_layers": [0, 1, 1, 1, 0]}, "WFFFW"),
        ("vaultgemma", {}, "WFWFW"),
    ],
)
def test_windows_follow_their_architecture(model_type, more, expected):
    assert windows(sized(model_type, SMALL, **more)) == expected


def test_the_windows_of_gpt_neo_follow_its_attention_types():
    assert windows(NEO) == "FWFW"
    assert windows({**NEO, "attention_types": [[["global", "local"], 2]]}) == "FWFW"
    assert windows({**NEO, "attention_types": [[["local"], 1], [["global"], 3]]}) == "WFFF"
    for wrong in ([[["global"], 3]], [[["near"], 4]], "global"):
        with pytest.raises(ModelError, match=r"attention_types is .* for each of 4 layers"):
            from_config({**NEO, "attention_types": wrong})


def test_positions_of_granite_and_baichuan_follow_their_files():
    assert from_config(MICRO).position == "rope"
    assert from_config({**MICRO, "position_embedding_type": "nope"}).position == "none"
    assert from_config(sized("baichuan", (64000, 4096, 11008, 32, 32))).position == "rope"
    assert from_config(sized("baichuan", (64000, 5120, 13696, 40, 40))).position == "none"


def experts(config):
    model = from_config(config)
    return "".join("E" if model.layer_kind(layer).mlp == "experts" else "D" for layer in range(model.layers))


def test_dense_and_expert_layers_follow_their_file():
    assert experts(ERNIE) == "DEEEE"
    assert experts({**ERNIE, "moe_layer_end_index": None}) == "DEEEE"
    assert experts({**ERNIE, "moe_layer_start_index": 0, "moe_layer_end_index": 3}) == "EEEED"
    assert experts({**ERNIE, "moe_layer_interval": 2}) == "DEDED"
    assert experts(MISTRAL4) == "DEEEE"
    kinds = ["dense", "sparse", "dense", "sparse", "sparse"]
    assert experts({**MISTRAL4, "mlp_layer_types": kinds}) == "DEDEE"
    with pytest.raises(ModelError, match="must name 'dense' or 'sparse' for each of 5 layers"):
        from_config({**MISTRAL4, "mlp_layer_types": kinds[1:]})


def test_shared_experts_have_their_own_width_where_a_file_names_it():
    def shared(**more):
        return from_config({**LING, **more}).moe.shared_ffn_hidden

    assert shared() == 2 * 24
    assert shared(moe_shared_expert_intermediate_size=32) == 2 * 32
    assert shared(num_shared_experts=0) == 0


def test_shared_experts_that_a_file_does_not_mention_follow_the_library():
    counts = {"deepseek_v2": 2, "deepseek_v3": 1, "glm4_moe": 1, "glm4_moe_lite": 1, "mistral4": 1, "solar_open": 1}
    for model_type, count in counts.items():
        assert from_config(sized(model_type, SMALL, **EXPERTS)).moe.shared_ffn_hidden == count * 24, model_type


def test_numbers_that_a_file_repeats_for_each_layer_must_be_alike():
    lists = {"moe_topk": 5 * [2], "moe_intermediate_size": 5 * [80], "num_shared_expert": 5 * [1]}
    assert from_config({**HUNYUAN, **lists}) == from_config(HUNYUAN)
    with pytest.raises(ModelError, match=r"config: moe_topk \[2, 4\] differs from layer to layer"):
        from_config({**HUNYUAN, "moe_topk": [2, 4]})
    with pytest.raises(ModelError, match="config: moe_topk is '8', but must be a positive integer"):
        from_config({**HUNYUAN, "moe_topk": ["8", "8"]})


def test_deepseek_v2_may_have_grouped_queries():
    v2 = sized("deepseek_v2", SMALL, **EXPERTS, n_shared_experts=1, first_k_dense_replace=1)
    assert from_config(v2).mla is not None
    grouped = from_config({**v2, "use_mla": False, "kv_lora_rank": None})
    assert (grouped.mla, grouped.kv_heads) == (None, 2)
    assert grouped.parameters == from_config({**v2, "model_type": "deepseek"}).parameters


def test_a_null_head_dim_is_hidden_over_heads_also_where_the_architecture_has_a_default():
    ernie = sized("ernie4_5", SMALL)
    assert from_config(ernie).head_dim == 128
    assert from_config({**ernie, "head_dim": None}).head_dim == 8
    assert from_config(sized("hunyuan_v1_dense", SMALL, attention_head_dim=12)).head_dim == 12


def test_fields_that_say_nothing_about_size_are_ignored():
    config = sized("glm", SMALL, tie_word_embeddings=False)
    wild = {"rope_scaling": {"type": "yarn", "factor": 4.0}, "torch_dtype": "bfloat16", "dtype": None}
    assert from_config({**config, **wild, "quantization_config": {"quant_method": "fp8"}}) == from_config(config)


@pytest.mark.parametrize(
    ("classes", "model_type"),
    [
        (["LlamaForCausalLM"], "llama"),
        (["Qwen3ForCausalLM"], "qwen3"),
        (["GPT2LMHeadModel"], "gpt2"),
        (["QWenLMHeadModel"], "qwen"),
        (["Ernie4_5_ForCausalLM"], "ernie4_5"),
        (["Gemma3ForConditionalGeneration"], "gemma3"),
    ],
)
def test_a_missing_model_type_follows_from_the_class(classes, model_type):
    sizes = {**sized("", SMALL), "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 9}
    del sizes["model_type"]
    model = from_config({**sizes, "architectures": classes})
    assert model.source == f"Hugging Face configuration, model_type {model_type}"


def test_a_class_that_is_not_known_is_named():
    with pytest.raises(ModelError, match="model_type 'FooForCausalLM' is not an architecture"):
        from_config({"architectures": ["FooForCausalLM"]})
    with pytest.raises(ModelError, match="model_type None is not an architecture"):
        from_config({"architectures": [], **dict.fromkeys(SIZES, 1)})
    with pytest.raises(ModelError, match=r"'jamba' has state-space \(Mamba\) layers"):
        from_config({"architectures": ["JambaForCausalLM"]})


OMNI = sized(
    "qwen3_omni_moe_text",
    (152064, 2048, 768, 48, 32, 4),
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
)
GLM4V = sized("glm4v_text", (151552, 4096, 13696, 40, 32, 2))


@pytest.mark.parametrize(
    ("config", "parameters", "note"),
    [
        (
            {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": OMNI}, "talker_config": {}},
            30_532_646_912,  # text tower 30,221,219,840, and the thinker's head
            "text tower of qwen3_omni_moe; other towers are left out",
        ),
        (
            {"architectures": ["Glm4vForConditionalGeneration"], "text_config": GLM4V, "vision_config": {}},
            9_400_279_040,  # text tower 8,779,522,048, and the head
            "text tower of glm4v; other towers are left out",
        ),
        (
            {"model_type": "internvl_chat", "llm_config": sized("internlm3", (128512, 4096, 10240, 48, 32, 2))},
            8_804_241_408,
            "text tower of internvl_chat; other towers are left out",
        ),
        (
            {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}},
            6_738_415_616 + 2 * 64 * 4096,  # Llama-7B with 64 more tokens
            "text tower of llava; other towers are left out",
        ),
        (
            {
                "model_type": "gemma3",
                "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240}
                | {"num_hidden_layers": 34},
            },
            3_880_263_168,
            "text tower of gemma3; other towers are left out",
        ),
    ],
)
def test_text_towers_are_found_with_the_librarys_defaults(config, parameters, note):
    model = from_config(config)
    assert (model.parameters, model.note) == (parameters, note)


def test_ties_of_a_tower_follow_what_encloses_it():
    outer = {"model_type": "qwen2_5_omni", "thinker_config": {"tie_word_embeddings": True, "text_config": {}}}
    text = sized("qwen2_5_omni_text", SMALL)
    outer["thinker_config"]["text_config"] = text
    assert from_config(outer).tied_embeddings
    outer["tie_word_embeddings"], outer["thinker_config"]["tie_word_embeddings"] = True, False
    assert not from_config(outer).tied_embeddings


def test_errors_in_a_tower_say_where():
    with pytest.raises(ModelError, match="config: thinker_config: text_config: hidden_size is 0, but must be"):
        from_config({"thinker_config": {"text_config": sized("llama", (101, 0, 80, 3, 6))}})
    with pytest.raises(ModelError, match="config: llm_config is 'x', but must be a JSON object"):
        from_config({"model_type": "internvl_chat", "llm_config": "x"})


def test_what_is_left_out_or_described_otherwise_is_noted():
    for model_type in ("mimo", "bailing_moe_v2"):
        noted = from_config({**LING, "model_type": model_type, "num_experts": None} | {"num_nextn_predict_layers": 1})
        assert noted.note == "1 multi-token-prediction layer left out"
    assert "528 parameters" in from_config(sized("olmo", SMALL)).note
    assert "side by side" in from_config(sized("phi", SMALL)).note
    assert "described as full attention" in from_config(sized("minicpm", SMALL, sparse_config={"topk": 64})).note
    assert from_config(sized("minicpm", SMALL)).note == ""


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({**MICRO, "layer_types": 4 * ["attention"] + ["mamba"]}, "'granitemoehybrid' has state-space (Mamba) layers"),
        ({**MICRO, "layer_types": None}, "'granitemoehybrid' has state-space (Mamba) layers"),
        ({**ERNIE, "use_bias": True}, "use_bias True is not supported: its shared experts"),
        ({**LING, "use_bias": True}, "use_bias True is not supported: its shared experts"),
        (sized("phi", SMALL, qk_layernorm=True), "qk_layernorm True is not supported"),
        (sized("cohere2", SMALL, use_qk_norm=True), "use_qk_norm True is not supported"),
        (sized("qwen", (101, 48, 81, 5, 6)), "intermediate_size 81 is odd"),
        (sized("chatglm", SMALL, num_layers=5), "field ffn_hidden_size is missing"),
        (sized("exaone4", SMALL, sliding_window_pattern="LX"), "sliding_window_pattern is 'LX', but must be"),
        (sized("openelm", SMALL), "'openelm' has layers of different widths"),
        (sized("lfm2", SMALL), "'lfm2' has short convolutions"),
        (sized("glm_moe_dsa", SMALL), "'glm_moe_dsa' chooses the keys of each query by an indexer"),
        ({"text_config": sized("gemma3n_text", SMALL)}, "'gemma3n_text' feeds each layer embeddings of its own"),
        (sized("jetmoe", SMALL), "'jetmoe' sends tokens to experts of the attention"),
    ],
)
def test_what_a_transformer_cannot_describe_is_refused(config, text):
    with pytest.raises(ModelError) as caught:
        from_config(config)
    assert text in str(caught.value)
