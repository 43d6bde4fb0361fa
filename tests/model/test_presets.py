import pytest

from simpar.errors import ModelError
from simpar.model.presets import preset, preset_names

# distinct parameters of the published checkpoints (a tied head counts once, also where the file stores it twice)
PUBLISHED = {
    "bloom-176b": 176_247_271_424,
    "bloom-7b1": 7_069_016_064,
    "dbrx": 131_596_523_520,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_404_352,
    "gemma2-27b": 27_227_128_320,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-12b": 11_766_034_176,
    "gemma3-1b": 999_885_952,
    "gemma3-27b": 27_009_346_304,
    "gemma3-4b": 3_880_263_168,
    "glm4.5": 352_797_814_784,
    "glm4.5-air": 106_852_245_504,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "grok-1": 315_684_820_992,
    "kimi-k2": 1_026_408_209_408,
    "llama-65b": 65_285_660_672,
    "llama-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama2-7b": 6_738_415_616,
    "llama3-70b": 70_553_706_496,
    "llama3-8b": 8_030_261_248,
    "llama3.1-405b": 405_853_388_800,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama4-maverick": 400_711_848_960,
    "llama4-scout": 107_769_861_120,
    "minimax-m2": 228_689_748_992,
    "minimax-text-01": 456_089_655_296,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-large-123b": 122_610_069_504,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x22b": 140_630_071_296,
    "mixtral-8x7b": 46_702_792_704,
    "mpt-7b": 6_649_286_656,
    "olmoe-1b-7b": 6_919_161_856,
    "phi3-medium-4k": 13_960_238_080,
    "phi3-mini-4k": 3_821_079_552,
    "phi3.5-moe": 41_873_153_344,
    "phi4": 14_659_507_200,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-next-80b-a3b": 79_674_391_296,
}

# billions that work on a token, as reports print them; gpt-oss counts no embedding table, MiniMax-01 no head either
ACTIVE = {
    "dbrx": (36, 0),
    "deepseek-v2": (21, 0),
    "deepseek-v2-lite": (2.7, 0),
    "glm4.5-air": (13, 0),
    "gpt-oss-120b": (5.13, 1),
    "gpt-oss-20b": (3.61, 1),
    "llama4-maverick": (17, 0),
    "llama4-scout": (17, 0),
    "minimax-text-01": (45.9, 2),
    "mixtral-8x22b": (39, 0),
    "mixtral-8x7b": (12.9, 0),
    "olmoe-1b-7b": (1.3, 0),
    "phi3.5-moe": (6.6, 0),
    "qwen1.5-moe-a2.7b": (2.7, 0),
    "qwen2-57b-a14b": (14, 0),
    "qwen3-235b-a22b": (22, 0),
}

# billions of parameters as papers print them: SC21 Table 1, Korthikanti Table 3
PRINTED = {
    "gpt3-1.7b": 1.7,
    "gpt3-3.6b": 3.6,
    "gpt3-7.5b": 7.5,
    "gpt3-18b": 18.4,
    "gpt3-39b": 39.1,
    "gpt3-76b": 76.1,
    "gpt3-145b": 145.6,
    "gpt3-310b": 310.1,
    "gpt3-530b": 529.6,
    "gpt3-1t": 1008.0,
    "gpt3-22b": 22,
    "gpt3-175b": 175,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert preset(name).parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_round_to_the_printed_billions(name):
    digits = 0 if isinstance(PRINTED[name], int) else 1
    assert round(preset(name).parameters / 1e9, digits) == PRINTED[name]


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_round_to_the_printed_billions(name):
    printed, tables = ACTIVE[name]
    model = preset(name)
    counted = model.active_parameters - tables * model.vocab * model.hidden
    digits = len(str(printed).partition(".")[2])
    assert round(counted / 1e9, digits) == printed


@pytest.mark.parametrize(
    ("name", "embedding", "layers"), [("nemotron4-15b", 3.2, 12.5), ("nemotron4-340b", 9.4, 331.6)]
)
def test_nemotron_splits_as_its_reports_say(name, embedding, layers):
    model = preset(name)
    outer = model.embedding_parameters + model.head_parameters
    assert outer / 1e9 == pytest.approx(embedding, abs=0.06)
    assert (model.parameters - outer) / 1e9 == pytest.approx(layers, abs=0.06)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_model_with_a_source(name):
    model = preset(name)
    assert model.name == name
    assert model.source


def test_the_gpt_family_is_that_of_the_papers():
    models = [preset(name) for name in preset_names() if name.startswith("gpt3-")]
    assert len(models) == len(PRINTED)
    assert {(m.vocab, m.max_positions, m.ffn_hidden // m.hidden, m.dropout) for m in models} == {
        (51_200, 2048, 4, True)
    }


def test_names_are_sorted_and_capitals_do_not_matter():
    assert list(preset_names()) == sorted(preset_names())
    assert preset("Llama3.1-70B") == preset("llama3.1-70b")


def test_an_unknown_name_brings_the_nearest():
    with pytest.raises(ModelError, match=r"no model preset 'lama3.1-405b'; did you mean 'llama3.1-405b'\?"):
        preset("lama3.1-405b")
