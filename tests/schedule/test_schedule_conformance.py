"""Every registered schedule is whole, runs to its end, round-trips, and keeps the bounds that any schedule
keeps."""

import pytest

from simpar.errors import PlanError
from simpar.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    build,
    from_csv,
    interleaved,
    makespan,
    peak_live,
    to_csv,
    validate,
)

MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 12, 16)
FORWARD, BACKWARD = 3, 7


def _cases() -> list[tuple[str, int, int, int]]:
    return [
        (name, pp, m, chunks)
        for name, recipe in SCHEDULES.items()
        for pp in range(1, 9)
        for m in MICROBATCHES
        for chunks in ((2, 3) if "chunks" in recipe.options else (1,))
        if name != "interleaved" or m % max(1, m // pp) == 0
    ]


@pytest.fixture(params=_cases(), ids=lambda case: "{}-pp{}-m{}-v{}".format(*case))
def schedule(request: pytest.FixtureRequest) -> Schedule:
    name, pp, microbatches, chunks = request.param
    return build(name, pp=pp, microbatches=microbatches, chunks=chunks)


def test_conforms(schedule: Schedule) -> None:
    chunks = schedule.stages // schedule.pp
    per_rank = schedule.microbatches * chunks

    # By counting, apart from validate().
    assert sorted(action for order in schedule.ranks for action in order) == sorted(
        Action(op, stage, m)
        for op in ("F", "B")
        for stage in range(schedule.stages)
        for m in range(schedule.microbatches)
    )
    for rank, order in enumerate(schedule.ranks):
        assert {a.stage for a in order} == set(schedule.stages_of(rank))
        assert [schedule.chunk_of(stage) for stage in schedule.stages_of(rank)] == list(range(chunks))
        for op in "FB":
            for stage in schedule.stages_of(rank):
                passes = [a.microbatch for a in order if a.op == op and a.stage == stage]
                assert passes == list(range(schedule.microbatches))
    validate(schedule)

    assert from_csv(to_csv(schedule), name=schedule.name) == schedule

    busy = per_rank * (FORWARD + BACKWARD)
    fill = (schedule.stages - 1) * (FORWARD + BACKWARD)
    length = makespan(schedule, forward=FORWARD, backward=BACKWARD)
    assert max(busy, fill + FORWARD + BACKWARD) <= length <= schedule.pp * busy
    assert length <= makespan(schedule, forward=FORWARD, backward=BACKWARD, transfer=2)
    assert all(1 <= peak <= per_rank for peak in peak_live(schedule))


@pytest.mark.parametrize("pp", range(1, 7))
@pytest.mark.parametrize("chunks", [2, 4])
def test_every_legal_group_runs(pp: int, chunks: int) -> None:
    legal = 0
    for m in range(1, 3 * pp + 3):
        for group in range(1, m + 2):
            rest = m % group
            # Megatron-Core's rule; below pp, torch's: one group.
            if group <= m and (group >= pp or group == m) and (rest == 0 or rest >= pp):
                validate(interleaved(pp, m, chunks, group))
                legal += 1
            else:
                with pytest.raises(PlanError, match=r"; (set group=|take )"):
                    interleaved(pp, m, chunks, group)
    assert legal >= 3 * pp


def test_registry_names_the_nearest() -> None:
    with pytest.raises(PlanError) as error:
        build("1f1", pp=2, microbatches=2)
    assert str(error.value) == "schedule '1f1' is not known; did you mean '1f1b'?; take one of gpipe, 1f1b, interleaved"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "1f1b", "pp": 2, "microbatches": 4, "chunks": 2},
            "schedule '1f1b' takes no chunks=2; drop it or take schedule 'interleaved'",
        ),
        (
            {"name": "gpipe", "pp": 2, "microbatches": 4, "group": 2},
            "schedule 'gpipe' takes no group=2; drop it or take schedule 'interleaved'",
        ),
        (
            {"name": "interleaved", "pp": 2, "microbatches": 4},
            "schedule 'interleaved' needs at least 2 chunks (vpp) a rank, not 1; raise vpp or take schedule '1f1b'",
        ),
        (
            {"name": "1f1b", "pp": 0, "microbatches": 4},
            "schedule '1f1b' has pp=0, but needs at least 1; set pp=1 or more",
        ),
        (
            {"name": "gpipe", "pp": 1, "microbatches": 0},
            "schedule 'gpipe' has microbatches=0, but needs at least 1; set microbatches=1 or more",
        ),
        (
            {"name": "interleaved", "pp": 4, "microbatches": 8, "chunks": 2, "group": 3},
            "group 3 lies outside 4 … 8, but holds at least pp=4 microbatches (or all, if they are fewer) "
            "and at most all; set group=4",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as error:
        build(**arguments)  # type: ignore[arg-type]
    assert str(error.value) == message
