import json
from pathlib import Path

import pytest

from simpar.errors import ModelError
from simpar.model.huggingface import from_config
from simpar.model.presets import preset

SAMPLES = Path(__file__).parents[3] / "shared" / "data" / "hf_configs"

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


# what each published file says (only fields that matter), and the parameters of the published checkpoint
FILES = {
    "llama-3.1-8b": (LLAMA, 8_030_261_248),
    "llama-7b without num_key_value_heads": (
        {**without(LLAMA, "num_key_value_heads"), "intermediate_size": 11008, "vocab_size": 32000},
        6_738_415_616,
    ),
    "mistral-nemo with an explicit head_dim": (
        {
            **LLAMA,
            "model_type": "mistral",
            "head_dim": 128,
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "vocab_size": 131072,
            "sliding_window": None,
        },
        12_247_782_400,
    ),
    "mistral with head_dim null": (
        {**LLAMA, "model_type": "mistral", "head_dim": None, "vocab_size": 32000},
        7_241_732_096,
    ),
    "qwen2.5-7b": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "sliding_window": 131072,
        },
        7_615_616_512,
    ),
    "qwen3-0.6b": (
        {
            "model_type": "qwen3",
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        596_049_920,
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_inner": None,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    "gpt-neox-20b": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_attention_heads": 64,
            "num_hidden_layers": 44,
            "max_position_embeddings": 2048,
            "vocab_size": 50432,
            "tie_word_embeddings": False,
        },
        20_554_567_680,
    ),
    "opt-125m": (
        {
            "model_type": "opt",
            "hidden_size": 768,
            "ffn_dim": 3072,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "max_position_embeddings": 2048,
            "vocab_size": 50272,
            "word_embed_proj_dim": 768,
            "do_layer_norm_before": True,
        },
        125_239_296,
    ),
    "phi-3-mini": (
        {
            "model_type": "phi3",
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "vocab_size": 32064,
            "sliding_window": 2047,
        },
        3_821_079_552,
    ),
    "gemma-7b": (
        {
            "model_type": "gemma",
            "head_dim": 256,
            "hidden_size": 3072,
            "intermediate_size": 24576,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 16,
            "vocab_size": 256000,
        },
        8_537_680_896,
    ),
    "gemma-2-2b": (
        {
            "model_type": "gemma2",
            "head_dim": 256,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "vocab_size": 256000,
            "sliding_window": 4096,
        },
        2_614_341_888,
    ),
    "mpt-7b": (
        {
            "model_type": "mpt",
            "attn_config": {"alibi": True, "attn_type": "multihead_attention", "qk_ln": False},
            "d_model": 4096,
            "expansion_ratio": 4,
            "max_seq_len": 2048,
            "n_heads": 32,
            "n_layers": 32,
            "no_bias": True,
            "vocab_size": 50432,
        },
        6_649_286_656,
    ),
    "bloom": (
        {
            "model_type": "bloom",
            "n_embed": 14336,
            "n_layer": 70,
            "num_attention_heads": 112,
            "vocab_size": 250880,
        },
        176_247_271_424,
    ),
    "falcon-7b": (
        {
            "model_type": "falcon",
            "alibi": False,
            "bias": False,
            "hidden_size": 4544,
            "multi_query": True,
            "new_decoder_architecture": False,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "parallel_attn": True,
            "vocab_size": 65024,
        },
        6_921_720_704,
    ),
    "starcoder2-3b": (
        {
            "model_type": "starcoder2",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_attention_heads": 24,
            "num_hidden_layers": 30,
            "num_key_value_heads": 2,
            "sliding_window": 4096,
            "use_bias": True,
            "vocab_size": 49152,
        },
        3_030_371_328,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_published_files_have_their_published_parameters(name):
    config, parameters = FILES[name]
    model = from_config(config, name)
    assert model.name == name
    assert model.parameters == parameters


def test_a_file_and_its_preset_agree():
    named = {"name": "", "source": "", "note": ""}
    assert from_config(LLAMA).replace(**{**named, "name": "x"}) == preset("llama3.1-8b").replace(
        **{**named, "name": "x"}
    )


@pytest.mark.parametrize(
    ("model_type", "tied"), [("llama", False), ("mistral", False), ("qwen3", False), ("gemma", True)]
)
def test_each_architecture_has_its_own_default_for_ties(model_type, tied):
    config = {**LLAMA, "model_type": model_type}
    assert from_config(config).tied_embeddings is tied
    assert from_config({**config, "tie_word_embeddings": not tied}).tied_embeddings is not tied
    assert from_config({**config, "tie_word_embeddings": None}).tied_embeddings is tied


def windows(config):
    model = from_config(config)
    return [model.layer_window(layer) for layer in range(model.layers)]


def test_windows_follow_their_architecture():
    four = {**LLAMA, "num_hidden_layers": 4, "sliding_window": 512}
    assert windows({**four, "model_type": "mistral"}) == [512] * 4
    assert windows({**four, "model_type": "gemma2"}) == [512, None, 512, None]
    assert windows({**four, "model_type": "qwen2"}) == [None] * 4
    lower = {**four, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3}
    assert windows(lower) == [None, None, None, 512]
    assert windows({**lower, "max_window_layers": 9}) == [None] * 4
    six = {**four, "model_type": "gemma3_text", "num_hidden_layers": 7}
    assert windows(six) == [512, 512, 512, 512, 512, None, 512]


def test_layer_types_overrule_the_architectures_pattern():
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = {
        **LLAMA,
        "model_type": "gemma2",
        "num_hidden_layers": 4,
        "sliding_window": 512,
        "layer_types": kinds,
    }
    assert windows(config) == [None, 512, 512, None]
    with pytest.raises(ModelError, match="layer_types has 'linear_attention'"):
        from_config({**config, "layer_types": ["linear_attention"] * 4})


def test_the_text_tower_of_a_multimodal_file_is_read_and_named():
    text = {**without(FILES["qwen3-0.6b"][0], "tie_word_embeddings"), "model_type": "qwen3_vl_text"}
    model = from_config(
        {"model_type": "qwen3_vl", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    )
    assert model.parameters == 596_049_920
    assert model.note == "text tower of qwen3_vl; other towers are left out"


def test_a_parallel_block_is_noted():
    assert "side by side" in from_config(FILES["gpt-neox-20b"][0]).note
    assert from_config({**FILES["gpt-neox-20b"][0], "use_parallel_residual": False}).note == ""


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_missing_field_is_named(key, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(without(LLAMA, key)))
    with pytest.raises(ModelError) as caught:
        from_config(path)
    assert str(caught.value) == f"{path}: field {key} is missing; add it as a positive integer"


@pytest.mark.parametrize("value", ["4096", -1, 0, 4096.0, True, [4096]])
def test_a_wrong_value_is_named(value):
    with pytest.raises(ModelError) as caught:
        from_config({**LLAMA, "hidden_size": value})
    assert str(caught.value) == f"config: hidden_size is {value!r}, but must be a positive integer"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tie_word_embeddings": "no"}, "config: tie_word_embeddings is 'no', but must be true or false"),
        ({"attention_dropout": "0"}, "config: attention_dropout is '0', but must be a number"),
        ({"num_key_value_heads": 5}, "config: kv_heads 5 does not divide heads 32"),
        ({"num_attention_heads": 31, "num_key_value_heads": 31}, "hidden 4096 is not divisible by heads 31"),
        ({"num_hidden_layers": 10**30}, "more than the 10,000 layers that can be simulated"),
        ({"text_config": 3}, "config: text_config is 3, but must be a JSON object"),
        (
            {"model_type": "lama"},
            "model_type 'lama' is not an architecture that can be imported; did you mean 'llama'?",
        ),
        ({"model_type": None}, "model_type None is not an architecture that can be imported"),
        (
            {"model_type": "nobody"},
            "see simpar.model.huggingface.ARCHITECTURES); describe it as a Transformer yourself",
        ),
        ({"model_type": "mamba"}, "has state-space (Mamba) layers"),
    ],
)
def test_other_mistakes_are_named(changes, text):
    with pytest.raises(ModelError) as caught:
        from_config({**LLAMA, **changes})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("opt-125m", {"do_layer_norm_before": False}, "do_layer_norm_before False is not supported"),
        ("opt-125m", {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512 differs from hidden_size 768"),
        ("mpt-7b", {"attn_config": {"qk_ln": True}}, "config: attn_config: qk_ln True is not supported"),
    ],
)
def test_variants_that_a_transformer_cannot_describe_are_refused(name, changes, text):
    with pytest.raises(ModelError, match=text):
        from_config({**FILES[name][0], **changes})


def test_broken_files_say_where(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama",\n "hidden_size": }')
    with pytest.raises(ModelError, match=r"config\.json: is not JSON: Expecting value at line 2, column 17"):
        from_config(path)
    path.write_text("[1, 2]")
    with pytest.raises(ModelError, match=r"config\.json: holds a list, but a configuration is a JSON object"):
        from_config(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"config\.json: is not UTF-8 text"):
        from_config(path)
    with pytest.raises(ModelError, match=r"missing\.json: cannot be read \(No such file or directory\)"):
        from_config(tmp_path / "missing.json")


def test_names_come_from_the_path(tmp_path):
    directory = tmp_path / "My-Llama"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    (directory / "meta--Other.json").write_text(json.dumps(LLAMA))
    assert from_config(directory).name == from_config(str(directory / "config.json")).name == "My-Llama"
    assert from_config(directory / "meta--Other.json").name == "Other"
    assert from_config({**LLAMA, "_name_or_path": "meta/Third"}).name == "Third"
    assert from_config(LLAMA).name == "llama"


# all, and those that work on one token; the reports' own figures are in the comments
SAMPLE_PARAMETERS = {
    "Qwen--Qwen3-0.6B.json": (596_049_920, 596_049_920),
    "Qwen--Qwen3-235B-A22B.json": (235_093_634_560, 22_190_763_520),  # 235B, 22B
    "Qwen--Qwen3-32B.json": (32_762_123_264, 32_762_123_264),
    "Qwen--Qwen3-VL-8B-Instruct.json": (8_190_735_360, 8_190_735_360),
    "deepseek-ai--DeepSeek-V3.json": (671_026_404_352, 37_552_282_624),  # 671B, 37B
    "meta-llama--Llama-4-Scout-17B-16E-Instruct.json": (107_769_861_120, 17_172_894_720),  # 109B with vision, 17B
    "meta-llama--Meta-Llama-3.1-405B.json": (405_853_388_800, 405_853_388_800),
    "meta-llama--Meta-Llama-3.1-70B.json": (70_553_706_496, 70_553_706_496),
    "meta-llama--Meta-Llama-3.1-8B.json": (8_030_261_248, 8_030_261_248),
    "mistralai--Mixtral-8x7B-v0.1.json": (46_702_792_704, 12_879_925_248),  # 46.7B, 12.9B
    "openai--gpt-oss-120b.json": (116_829_156_672, 5_711_982_912),  # 116.83B, 5.13B without the embedding
}


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the collected configurations are not beside this checkout")
def test_collected_files_import():
    found = sorted(SAMPLES.glob("*.json"))
    assert [path.name for path in found] == sorted(SAMPLE_PARAMETERS)
    for path in found:
        model, config = from_config(path), json.loads(path.read_text())
        assert (model.parameters, model.active_parameters) == SAMPLE_PARAMETERS[path.name], path.name
        text = config.get("text_config", config)
        assert model.embedding_parameters == text["vocab_size"] * text["hidden_size"], path.name
