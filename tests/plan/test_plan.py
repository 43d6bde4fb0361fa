"""Plans by themselves: frozen, checked field by field, every error with value, rule and mend."""

from typing import get_args

import pytest

from simpar import Overlap, Plan, PlanError
from simpar.plan.plan import ScheduleName
from simpar.schedule import SCHEDULES


def problem(**fields) -> str:
    with pytest.raises(PlanError) as caught:
        Plan(**fields)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"vpp": 2, "pp": 2},
            "schedule '1f1b' always has 1 chunk (vpp) a rank, not 2; drop vpp or take schedule 'interleaved', "
            "'looped-bfs' or 'zb-1p'",
        ),
        (
            {"schedule": "interleaved"},
            "schedule 'interleaved' needs pp of at least 2, not 1; set schedule=1f1b or raise pp",
        ),
        (
            {"schedule": "zb-h1"},
            "schedule 'zb-h1' needs pp of at least 2, not 1; set schedule=1f1b or raise pp",
        ),
        (
            {"stage_sync": "condition_variable"},
            "stage_sync 'condition_variable' has no meaning with pp 1, where no stage hands over to another; "
            "drop it or raise pp",
        ),
        (
            {"stage_buffer": 2},
            "stage_buffer 2 has no meaning with pp 1, where no stage hands over to another; drop it or raise pp",
        ),
        (
            {"pp": 2, "microbatch_group": 4},
            "microbatch_group 4 has no meaning with schedule '1f1b'; drop it or take schedule 'interleaved' or 'zb-1p'",
        ),
        (
            {"pp": 2, "schedule": "zb-v", "layer_split": (4, 4)},
            "layer_split names 2 stages, but pp 2 × 2 chunks (vpp) = 4; name one layer count per virtual stage",
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
            "layer_split names 3 stages, but pp 2 × 1 chunks (vpp) = 2; name one layer count per virtual stage",
        ),
        (
            {"pp": 2, "vpp": 2, "schedule": "interleaved", "layer_split": (4, 4)},
            "layer_split names 2 stages, but pp 2 × 2 chunks (vpp) = 4; name one layer count per virtual stage",
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
    assert text == f"{typed}: unknown key; did you mean '{meant}'?"


def test_a_key_that_is_like_none_names_all():
    assert problem(zzz=1).startswith("zzz: unknown key (known: ")


def test_an_unknown_key_of_overlap_names_the_nearest():
    with pytest.raises(PlanError, match=r"overlap\.grad_reduc: unknown key; did you mean 'grad_reduce'"):
        Plan(overlap={"grad_reduc": False})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tp": 0}, "tp: 0 should be greater than or equal to 1"),
        ({"micro_batch": -1}, "micro_batch: -1 should be greater than or equal to 1"),
        ({"zero": 4}, "zero: 4 should be 0, 1, 2 or 3"),
        (
            {"schedule": "dual-pipe"},
            "schedule: schedule 'dual-pipe' is not known; did you mean 'dualpipe'?; take one of gpipe, 1f1b, "
            "interleaved, looped-bfs, zb-h1, zb-h2, zb-1p, zb-v, dualpipe, dualpipev, or the path of a .csv file",
        ),
        ({"launch_s": -1e-6}, "launch_s: -1e-06 should be greater than or equal to 0"),
        ({"launch_s": float("inf")}, "launch_s: inf should be a finite number"),
        ({"precision": "int8"}, "precision: 'int8' should be 'bf16', 'fp16', 'tf32', 'fp32' or 'fp8'"),
    ],
)
def test_values_out_of_range(fields, text):
    assert problem(**fields) == text


def test_a_plan_is_frozen_and_varied_by_copy():
    plan = Plan(tp=2)
    with pytest.raises(PlanError, match=r"tp: a Plan is frozen; make another one with \.replace\(tp=…\)"):
        plan.tp = 4
    with pytest.raises(TypeError):
        Plan(2)
    assert plan.replace(pp=2) == Plan(tp=2, pp=2)
    assert plan == Plan(tp=2)
    with pytest.raises(PlanError, match=r"always has 1 chunk \(vpp\) a rank, not 2"):
        plan.replace(vpp=2)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(tp=2, pp=4, vpp=2, schedule="interleaved", layer_split=(1,) * 8, overlap=Overlap(tp="pipelined")),
        Plan(pp=2, zero=3, dp_shard=4, recompute="full", recompute_layers=2, launch_s=0.0, stage_buffer=3),
        Plan(pp=2, schedule="zb-1p", vpp=3, microbatch_group=4, frozen_layers=2),
        Plan(pp=2, schedule="orders/mine.csv"),
    ],
)
def test_a_plan_survives_a_round_trip(plan):
    assert Plan.model_validate(plan.model_dump()) == plan
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert hash(Plan.model_validate(plan.model_dump())) == hash(plan)


def test_plans_name_every_schedule():
    assert get_args(ScheduleName) == tuple(SCHEDULES)
