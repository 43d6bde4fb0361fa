"""Text of actions and schedules: round trips, torch's own dumps, and what is wrong with bad input."""

from pathlib import Path

import pytest

from simpar.errors import DeadlockError, PlanError
from simpar.schedule import Action, build, from_csv, makespan, peak_live, read_csv, to_csv, validate


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
            "0F0,,(0F1;nB0)OVERLAP_F_B\n",
            "row 1, cell 3: 'nB0' is not an action; write stage, one of F B I W, and microbatch without spaces, such "
            "as 2F0",
        ),
        (
            "0F0,(0B0;0F1)OVERLAP_F_B,0B1\n",
            "row 1, cell 2: '(0B0;0F1)OVERLAP_F_B' overlaps 0B0 with 0F1; pair a forward with a backward",
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


def test_pairs_that_overlap_round_trip() -> None:
    text = "0F0,1F0,1B0,(0F1;0B0)OVERLAP_F_B,1F1,1B1,0B1\n"
    schedule = from_csv(text)
    assert schedule.overlapped == {Action("F", 0, 1)}
    assert to_csv(schedule) == text


def test_a_second_copy_of_the_model_is_known_by_its_microbatches() -> None:
    dual = build("dualpipe", pp=4, microbatches=8)
    read = from_csv(to_csv(dual))
    assert (read.copies, read.depth, read.rank_of_stage) == (2, 4, (0, 1, 2, 3, 3, 2, 1, 0))
    assert from_csv("0F0,0B0\n1F0,1B0\n").copies == 1


def _saved(tmp_path: Path, text: str) -> str:
    path = tmp_path / "schedule.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_file_is_the_schedule_that_was_written(tmp_path: Path) -> None:
    for name, chunks in (("1f1b", 1), ("zb-1p", 3), ("zb-v", 1), ("dualpipev", 2), ("dualpipe", 1)):
        made = build(name, pp=4, microbatches=8, chunks=chunks)
        path = _saved(tmp_path, to_csv(made))
        read = build(path, pp=4, microbatches=8)
        assert (read.ranks, read.rank_of_stage, read.copies, read.overlapped) == (
            made.ranks,
            made.rank_of_stage,
            made.copies,
            made.overlapped,
        )


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("0F0,0B\n", {}, "row 1, cell 2: '0B' is not an action; write stage, one of F B I W, and microbatch without"),
        (
            "0F0,0B0\n1F0,1B0\n",
            {"pp": 3},
            "is a schedule of 2 pipeline ranks (rows), but the plan has 3; set pp=2 or give another file",
        ),
        ("0F0,0B0\n1F0,1B0\n", {"microbatches": 4}, "of 1 microbatches, but the plan has 4; set grad_accum=1 or give"),
        ("0F0,0B0\n1F0,1B0\n", {"chunks": 2}, "of 1 chunks a rank, but the plan has 2; set vpp=1 or give another file"),
        ("0F0,2F0,2B0,0B0\n1F0,1B0\n", {}, "spreads 3 stages over 2 rows, but each rank holds equally many; name 2"),
        ("0F0\n1F0,1B0\n", {}, "never runs 0B0, but each stage runs each microbatch forward and backward; add it to"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, options: dict[str, int], message: str) -> None:
    path = _saved(tmp_path, text)
    with pytest.raises(PlanError) as error:
        read_csv(path, **{"pp": 2, "microbatches": 1, **options})
    assert path in str(error.value)
    assert message in str(error.value)


def test_a_file_whose_ranks_wait_for_each_other(tmp_path: Path) -> None:
    path = _saved(tmp_path, "0B0,0F0\n1F0,1B0\n")
    with pytest.raises(DeadlockError, match="rank 0 waits at 0B0 for 0F0, rank 1 waits at 1F0 for 0F0"):
        build(path, pp=2, microbatches=1)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"schedule file 'none.csv' cannot be read: No such file or directory; give"):
        build("none.csv", pp=2, microbatches=1)
    (tmp_path / "latin.csv").write_bytes(b"0F0,\xe4")
    with pytest.raises(PlanError, match=r"cannot be read: it is no UTF-8 text; give the path of a .csv file"):
        build(str(tmp_path / "latin.csv"), pp=1, microbatches=1)
    with pytest.raises(PlanError, match="takes no microbatch_group=4; its rows are the order; drop it"):
        build("none.csv", pp=2, microbatches=4, group=4)
