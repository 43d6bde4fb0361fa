"""Text of actions and schedules: round trips, torch's own dumps, and what is wrong with bad input."""

import pytest

from simpar.errors import PlanError
from simpar.schedule import Action, from_csv, makespan, peak_live, to_csv, validate


@pytest.mark.parametrize("text", ["2F0", "0B13", "11I2", "3W4"])
def test_action_round_trip(text: str) -> None:
    assert str(Action.parse(text)) == text


def test_action_fields() -> None:
    assert Action.parse(" 12B3 ") == Action("B", stage=12, microbatch=3)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2 F0", "-1F0", "2F0B1", "2f0", "0RECV_F1", "²F0"])
def test_bad_action(text: str) -> None:
    with pytest.raises(PlanError) as error:
        Action.parse(text)
    assert str(error.value) == (
        f"'{text}' is not an action; write stage, one of F B I W, and microbatch without spaces, such as 2F0"
    )


def test_reads_torch_grids() -> None:
    """Idle cells and runtime actions, line ends of Python's csv module."""
    schedule = from_csv(
        "0UNSHARD,0F0,0SEND_F0,,,0RECV_B0,0B0,0REDUCE_GRAD\r\n,1RECV_F0,1F0,1B0,1SEND_B0,,\r\n", name="dump"
    )
    assert to_csv(schedule) == "0F0,0B0\n1F0,1B0\n"
    assert (schedule.name, schedule.microbatches, schedule.rank_of_stage) == ("dump", 1, (0, 1))


def test_reads_v_placement_and_split_backwards() -> None:
    """Two ranks that hold stages 0, 3 and 1, 2, with weight gradients put off."""
    schedule = from_csv("0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2I0,1I0,2W0,1W0\n")
    validate(schedule)
    assert schedule.rank_of_stage == (0, 1, 1, 0)
    assert schedule.stages_of(0) == (0, 3)
    assert [schedule.chunk_of(stage) for stage in range(4)] == [0, 0, 1, 1]
    # 4 forwards, then 3I, 3W on rank 0; 2I meets 3W, 1I, then 0I meets 2W and 0W meets 1W.
    assert makespan(schedule, forward=1, backward=2, weight=1) == 4 + 1 + 1 + 1 + 1 + 1
    assert makespan(schedule, forward=1, backward=2, weight=0) == 4 + 4 * 2


def test_a_split_backward_keeps_activations_to_its_weight_gradient() -> None:
    assert peak_live(from_csv("0F0,0I0,0W0,0F1,0I1,0W1")) == (1,)
    assert peak_live(from_csv("0F0,0I0,0F1,0I1,0W0,0W1")) == (2,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0F0,0B0\n1F0,oops\n",
            "row 2, cell 2: 'oops' is not an action; write stage, one of F B I W, and microbatch "
            "without spaces, such "
            "as 2F0",
        ),
        (
            "0F0,,(0F1;1B0)OVERLAP_F_B\n",
            "row 1, cell 3: '(0F1;1B0)OVERLAP_F_B' is not an action; write stage, one of F B I W, "
            "and microbatch without spaces, such as 2F0",
        ),
        (
            "0F0,0B0\n0F1,0B1\n",
            "row 2 runs 0F1, but stage 0 lies on row 1; keep all actions of a stage in one row",
        ),
        ("0F0,0B0\n,,\n", "row 2 has no action, but every rank runs some; drop the row"),
        ("0F0,0B0\n\n1F0,1B0", "row 2 has no action, but every rank runs some; drop the row"),
        ("", "the text has no row, but a schedule has one row per rank; write rows such as 0F0,0B0"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 lies on no row, but there is a stage 2; number stages from 0"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        from_csv(text)
    assert str(error.value) == message
