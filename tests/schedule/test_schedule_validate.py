"""Wrong schedules are refused with the action and the rank that are wrong."""

from dataclasses import replace

import pytest

from simpar.errors import DeadlockError, PlanError
from simpar.schedule import Action, build, from_csv, gpipe, makespan, one_f_one_b, validate


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0,0F0", "schedule 'csv' runs 0F0 twice, but each action runs once; drop one"),
        (
            "0F0,0B0,0F1",
            "schedule 'csv' never runs 0B1, but each stage runs each microbatch forward and backward; add it to rank 0",
        ),
        (
            "0F0,0I0",
            "schedule 'csv' never runs 0W0, but each stage runs each microbatch forward and backward; add it to rank 0",
        ),
        ("0F0,0I0,0W0,0B0", "schedule 'csv' runs 0B0 and 0I0, but B is I and W in one; drop either"),
    ],
)
def test_incomplete(text: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        validate(from_csv(text))
    assert str(error.value) == message


def test_wrong_rank() -> None:
    schedule = gpipe(2, 1)
    with pytest.raises(PlanError) as error:
        validate(replace(schedule, ranks=schedule.ranks[::-1]))
    assert str(error.value) == "schedule 'gpipe' runs 1F0 on rank 0, but stage 1 lies on rank 1; move it there"


def test_out_of_range() -> None:
    with pytest.raises(PlanError) as error:
        validate(replace(gpipe(2, 2), microbatches=1))
    assert str(error.value) == (
        "schedule 'gpipe' runs 0F1 on rank 0, but has stages 0 … 1 and microbatches 0 … 0; drop it"
    )


def test_unknown_op() -> None:
    ranks = ((Action("X", 0, 0),),)  # type: ignore[arg-type]
    with pytest.raises(PlanError) as error:
        validate(replace(gpipe(1, 1), ranks=ranks))
    assert str(error.value) == "schedule 'gpipe' runs 0X0, which is none of F B I W; take one"


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("0B0,0F0", "rank 0 waits at 0B0 for 0F0"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1"),
        (
            "0F0,0B0\n1F0,1B0\n2B0,2F0",
            "rank 0 waits at 0B0 for 1B0, rank 1 waits at 1B0 for 2B0, rank 2 waits at 2B0 for 2F0",
        ),
        ("0F0,0W0,0I0", "rank 0 waits at 0W0 for 0I0"),
    ],
)
def test_deadlock_names_who_waits_for_what(text: str, waits: str) -> None:
    with pytest.raises(DeadlockError) as error:
        validate(from_csv(text))
    assert str(error.value) == (
        f"schedule 'csv' deadlocks: {waits}; "
        "reorder these ranks so that each action comes after those that it waits for"
    )


def test_too_short_a_warmup_deadlocks() -> None:
    """One forward less ahead on the first rank, and 1F1B stands still; this is what the warm-up is for."""
    first, *others = one_f_one_b(3, 4).ranks
    order = list(first)
    order[1], order[2], order[3] = order[3], order[1], order[2]
    assert [str(a) for a in order[:4]] == ["0F0", "0B0", "0F1", "0F2"]
    late = replace(one_f_one_b(3, 4), ranks=(tuple(order), *others))
    with pytest.raises(DeadlockError, match="rank 0 waits at 0B0 for 1B0, rank 1 waits at 1F1 for 0F1, rank 2"):
        makespan(late, forward=1, backward=1)


def test_a_microbatch_of_the_other_copy() -> None:
    dual = build("dualpipe", pp=2, microbatches=4)
    orders = (dual.ranks[0], (*dual.ranks[1], Action("F", 1, 3)))
    with pytest.raises(PlanError) as error:
        validate(replace(dual, ranks=orders))
    assert str(error.value) == (
        "schedule 'dualpipe' runs 1F3 on rank 1, but microbatches 0 … 1 pass stage 1 of its 2 models; drop it"
    )
