"""Every registered schedule is whole, runs to its end, round-trips, and keeps the bounds that any schedule
keeps."""

from collections import Counter

import pytest

from simpar.errors import PlanError
from simpar.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    bubble_fraction,
    build,
    from_csv,
    interleaved,
    makespan,
    peak_live,
    to_csv,
    validate,
    zb_1p,
)

MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 12, 16)
FORWARD, BACKWARD, WEIGHT = 3, 7, 2


def _runs(name: str, pp: int, m: int) -> bool:
    """The published rules, apart from the generators."""
    if name in ("interleaved", "zb-1p"):
        return m % max(1, m // pp) == 0
    if name == "dualpipe":
        return pp % 2 == 0 and m % 2 == 0 and m >= 2 * pp
    return name != "dualpipev" or m >= 2 * pp


def _cases() -> list[tuple[str, int, int, int]]:
    return [
        (name, pp, m, chunks)
        for name, recipe in SCHEDULES.items()
        for pp in (1, 2, 3, 4, 6, 8)
        for m in MICROBATCHES
        for chunks in ((2, 3) if "chunks" in recipe.options else (1,))
        if _runs(name, pp, m)
    ]


@pytest.fixture(params=_cases(), ids=lambda case: "{}-pp{}-m{}-v{}".format(*case))
def schedule(request: pytest.FixtureRequest) -> Schedule:
    name, pp, microbatches, chunks = request.param
    return build(name, pp=pp, microbatches=microbatches, chunks=chunks)


def test_conforms(schedule: Schedule) -> None:
    chunks = schedule.stages // schedule.pp
    share = schedule.microbatches // schedule.copies

    # By counting, apart from validate(): each pass once, backward whole or in its two halves.
    seen = Counter(action for order in schedule.ranks for action in order)
    assert set(seen.values()) == {1}
    for stage in range(schedule.stages):
        first = stage // (schedule.stages // schedule.copies) * share
        for m in range(first, first + share):
            ops = "".join(op for op in "FBIW" if Action(op, stage, m) in seen)  # type: ignore[arg-type]
            assert ops in ("FB", "FIW")
    assert len({(a.stage, a.microbatch) for a in seen}) == schedule.stages * share

    for rank, order in enumerate(schedule.ranks):
        assert {a.stage for a in order} == set(schedule.stages_of(rank))
        assert [schedule.chunk_of(stage) for stage in schedule.stages_of(rank)] == list(range(chunks))
        for stage in schedule.stages_of(rank):
            passes = [a.microbatch for a in order if a.op == "F" and a.stage == stage]
            assert passes == list(schedule.microbatches_of(stage))
            gradients = [a.microbatch for a in order if a.op in ("B", "I") and a.stage == stage]
            assert gradients in (passes, passes[::-1])
            weights = [a.microbatch for a in order if a.op == "W" and a.stage == stage]
            assert weights == sorted(weights)
    validate(schedule)

    assert from_csv(to_csv(schedule), name=schedule.name) == schedule


def test_length_and_memory_keep_the_bounds_of_any_schedule(schedule: Schedule) -> None:
    per_rank = schedule.microbatches // schedule.copies * (schedule.stages // schedule.pp)
    times = {"forward": FORWARD, "backward": BACKWARD, "weight": WEIGHT}
    busy = per_rank * (FORWARD + BACKWARD)
    way = schedule.depth * FORWARD + schedule.depth * (BACKWARD - WEIGHT)
    length = makespan(schedule, **times)
    assert max(busy, way) <= length <= schedule.pp * busy
    assert length <= makespan(schedule, **times, transfer=2)
    assert bubble_fraction(schedule, **times) == pytest.approx(1 - busy / length)
    assert all(1 <= peak <= per_rank for peak in peak_live(schedule))


@pytest.mark.parametrize("pp", range(1, 6))
@pytest.mark.parametrize("chunks", [2, 4])
def test_every_legal_group_runs(pp: int, chunks: int) -> None:
    legal = 0
    for m in range(1, 3 * pp + 3):
        for group in range(1, m + 2):
            rest = m % group
            # Megatron-Core's rule; below pp, torch's: one group.
            if group <= m and (group >= pp or group == m) and (rest == 0 or rest >= pp):
                validate(interleaved(pp, m, chunks, group))
                validate(zb_1p(pp, m, chunks, group))
                legal += 1
            else:
                for generate in (interleaved, zb_1p):
                    with pytest.raises(PlanError, match=r"; (set microbatch_group=|take )"):
                        generate(pp, m, chunks, group)
    assert legal >= 3 * pp


def test_registry_names_the_nearest() -> None:
    with pytest.raises(PlanError) as error:
        build("1f1", pp=2, microbatches=2)
    assert str(error.value) == (
        "schedule '1f1' is not known; did you mean '1f1b'?; take one of gpipe, 1f1b, interleaved, looped-bfs, zb-h1, "
        "zb-h2, zb-1p, zb-v, dualpipe, dualpipev, or the path of a .csv file"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "1f1b", "pp": 2, "microbatches": 4, "chunks": 2},
            "schedule '1f1b' always has 1 chunk (vpp) a rank, not 2; drop vpp or take schedule 'interleaved', "
            "'looped-bfs' or 'zb-1p'",
        ),
        (
            {"name": "gpipe", "pp": 2, "microbatches": 4, "group": 2},
            "schedule 'gpipe' takes no microbatch_group=2; drop it or take schedule 'interleaved' or 'zb-1p'",
        ),
        (
            {"name": "zb-v", "pp": 2, "microbatches": 4, "chunks": 3},
            "schedule 'zb-v' always has 2 chunks (vpp) a rank, not 3; drop vpp or take schedule 'interleaved', "
            "'looped-bfs' or 'zb-1p'",
        ),
        (
            {"name": "looped-bfs", "pp": 2, "microbatches": 4},
            "schedule 'looped-bfs' needs at least 2 chunks (vpp) a rank, not 1; raise vpp or take schedule 'gpipe'",
        ),
        (
            {"name": "zb-1p", "pp": 2, "microbatches": 4},
            "schedule 'zb-1p' needs at least 2 chunks (vpp) a rank, not 1; raise vpp or take schedule 'zb-h1'",
        ),
        (
            {"name": "dualpipe", "pp": 3, "microbatches": 8},
            "schedule 'dualpipe' mirrors one half of the ranks in the other, but pp is 3; set pp=4, or take schedule "
            "'dualpipev'",
        ),
        (
            {"name": "dualpipe", "pp": 4, "microbatches": 11},
            "schedule 'dualpipe' needs an even number of at least 2 · pp = 8 microbatches, not 11; set grad_accum=12",
        ),
        (
            {"name": "dualpipev", "pp": 4, "microbatches": 7},
            "schedule 'dualpipev' needs at least 2 · pp = 8 microbatches, not 7; set grad_accum=8, or take schedule "
            "'zb-v'",
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
            "microbatch_group 3 lies outside 4 … 8, but holds at least pp=4 microbatches (or all, if they are fewer) "
            "and at most all; set microbatch_group=4",
        ),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError) as error:
        build(**arguments)  # type: ignore[arg-type]
    assert str(error.value) == message
