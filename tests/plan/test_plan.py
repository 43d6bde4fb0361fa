"""Plans by themselves: frozen, checked field by field, every error with value, rule and mend."""

import pytest
from pydantic import ValidationError

from simpar import Overlap, Plan


def problem(**fields) -> str:
    with pytest.raises(ValidationError) as caught:
        Plan(**fields)
    (error,) = caught.value.errors()
    return error["msg"].removeprefix("Value error, ")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"vpp": 2, "pp": 2},
            "vpp 2 needs schedule 'interleaved', not '1f1b'; set schedule=interleaved or vpp=1",
        ),
        (
            {"schedule": "interleaved"},
            "schedule 'interleaved' needs pp of at least 2, not 1; set schedule=1f1b or raise pp",
        ),
        (
            {"recompute_layers": 3},
            "recompute_layers 3 needs recompute 'full', not 'none'; set recompute=full",
        ),
        (
            {"recompute_layers": 3, "recompute": "selective"},
            "recompute_layers 3 needs recompute 'full', not 'selective'; set recompute=full",
        ),
        (
            {"stage_sync": "condition_variable", "overlap": {"p2p": False}},
            "stage_sync 'condition_variable' with overlap.p2p=false deadlocks: two stages would wait for each other "
            "to take a message; set overlap.p2p=true or stage_sync=message_passing",
        ),
        (
            {"stage_sync": "condition_variable", "stage_buffer": 2},
            "stage_buffer 2 has no meaning with stage_sync 'condition_variable', which hands over without a buffer; "
            "drop one of the two",
        ),
        (
            {"pp": 2, "layer_split": (3, 4, 5)},
            "layer_split names 3 stages, but pp 2 × vpp 1 = 2; name one layer count per virtual stage",
        ),
        (
            {"pp": 2, "vpp": 2, "schedule": "interleaved", "layer_split": (4, 4)},
            "layer_split names 2 stages, but pp 2 × vpp 2 = 4; name one layer count per virtual stage",
        ),
    ],
)
def test_combinations_that_make_no_sense(fields, text):
    assert problem(**fields) == text


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("micro_bach", "micro_batch"), ("zerro", "zero"), ("tpp", "tp"), ("recompute_layer", "recompute_layers")],
)
def test_an_unknown_key_names_the_nearest(typed, meant):
    text = problem(**{typed: 1})
    assert text.startswith(f"unknown key '{typed}'; did you mean '{meant}'? (known: tp, pp, dp, ")


def test_an_unknown_key_of_overlap_names_the_nearest():
    with pytest.raises(ValidationError, match="unknown key 'grad_reduc'; did you mean 'grad_reduce'"):
        Plan(overlap={"grad_reduc": False})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tp": 0}, "Input should be greater than or equal to 1"),
        ({"micro_batch": -1}, "Input should be greater than or equal to 1"),
        ({"zero": 4}, "Input should be 0, 1, 2 or 3"),
        ({"schedule": "dualpipe"}, "Input should be 'gpipe', '1f1b' or 'interleaved'"),
        ({"launch_s": -1e-6}, "Input should be greater than or equal to 0"),
        ({"launch_s": float("inf")}, "Input should be a finite number"),
        ({"precision": "int8"}, "Input should be 'bf16', 'fp16', 'tf32', 'fp32' or 'fp8'"),
    ],
)
def test_values_out_of_range(fields, text):
    assert problem(**fields) == text


def test_a_plan_is_frozen_and_varied_by_copy():
    plan = Plan(tp=2)
    with pytest.raises(ValidationError, match="frozen"):
        plan.tp = 4
    with pytest.raises(TypeError):
        Plan(2)
    assert plan.replace(pp=2) == Plan(tp=2, pp=2)
    assert plan == Plan(tp=2)
    with pytest.raises(ValidationError, match="vpp 2 needs schedule 'interleaved'"):
        plan.replace(vpp=2)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(tp=2, pp=4, vpp=2, schedule="interleaved", layer_split=(1,) * 8, overlap=Overlap(tp="pipelined")),
        Plan(zero=3, dp_shard=4, recompute="full", recompute_layers=2, launch_s=0.0, stage_buffer=3),
    ],
)
def test_a_plan_survives_a_round_trip(plan):
    assert Plan.model_validate(plan.model_dump()) == plan
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert hash(Plan.model_validate(plan.model_dump())) == hash(plan)
