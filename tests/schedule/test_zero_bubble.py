"""Schedules that split backward, and those that overlap: events in integer time against the papers' closed forms.

F, I and W are a stage's times forward, for the input's gradient and for the weights' gradients; B = I + W. Sources: Qi
et al. 2024, arXiv:2401.10241, table 2 and section 6; DeepSeek-V3, arXiv:2412.19437, table 2, and the schedule published
with it.
"""

import pytest

from simpar.schedule import Schedule, bubble_fraction, build, makespan, peak_live, timetable

SHAPES = [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16), (8, 32)]
EQUAL = [(1, 1, 1), (5, 5, 5)]
TIMES = [*EQUAL, (3, 4, 2), (5, 5, 1), (10, 9, 5)]


def _times(forward: int, input_gradient: int, weight: int) -> dict[str, int]:
    return {"forward": forward, "backward": input_gradient + weight, "weight": weight}


def _own_bubble(schedule: Schedule, **times: int) -> int:
    """The longest idle time of a rank between its own begin and its own end, as the paper counts it."""
    spans = timetable(schedule, **times)
    return max(
        max(spans[a].end for a in order)
        - min(spans[a].start for a in order)
        - sum(spans[a].end - spans[a].start for a in order)
        for order in schedule.ranks
    )


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("pp", "m"), SHAPES)
def test_zb_h1_takes_a_third_of_1f1b_s_bubble(pp: int, m: int, times: tuple[int, int, int]) -> None:
    f, i, w = times
    length = makespan(build("zb-h1", pp=pp, microbatches=m), **_times(*times))
    assert length - m * (f + i + w) == (pp - 1) * (f + i - w)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("pp", "m"), SHAPES)
def test_zb_h2_takes_none_where_the_three_are_equal(pp: int, m: int, times: tuple[int, int, int]) -> None:
    f, i, w = times
    schedule = build("zb-h2", pp=pp, microbatches=m)
    assert m >= 2 * pp - 1
    assert _own_bubble(schedule, **_times(*times)) == (pp - 1) * (f + i - 2 * w)


@pytest.mark.parametrize(("f", "i", "w"), EQUAL)
@pytest.mark.parametrize(("pp", "m"), SHAPES)
def test_a_parallelogram_ends_one_forward_later_per_rank(pp: int, m: int, f: int, i: int, w: int) -> None:
    for name, chunks in (("zb-h2", 1), ("zb-v", 2)):
        schedule = build(name, pp=pp, microbatches=m)
        assert _own_bubble(schedule, **_times(f, i, w)) == 0
        assert makespan(schedule, **_times(f, i, w)) == chunks * m * (f + i + w) + (pp - 1) * f


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("pp", "rounds"), [(2, 2), (3, 2), (4, 1), (4, 4), (8, 2)])
@pytest.mark.parametrize("chunks", [2, 3])
def test_zb_1p_divides_zb_h1_s_bubble_by_the_chunks(
    pp: int, rounds: int, chunks: int, times: tuple[int, int, int]
) -> None:
    f, i, w = times  # of a chunk
    schedule = build("zb-1p", pp=pp, microbatches=rounds * pp, chunks=chunks)
    work = rounds * pp * chunks * (f + i + w)
    assert makespan(schedule, **_times(*times)) - work == (pp - 1) * (f + i - w)


def test_memory_in_microbatches() -> None:
    """Table 2 of the paper: as much as 1F1B, and 2p - 1; ZB-V's chunks are half as large."""
    assert peak_live(build("zb-h1", pp=8, microbatches=32)) == (8,) * 8
    assert peak_live(build("zb-h2", pp=8, microbatches=32)) == (15,) * 8
    assert peak_live(build("zb-v", pp=8, microbatches=32)) == (16,) * 8
    # DeepSeek's table counts stages of a pipeline of p ranks: p + 1 each
    assert peak_live(build("dualpipe", pp=8, microbatches=32)) == (9,) * 8
    assert peak_live(build("dualpipev", pp=4, microbatches=16)) == (9,) * 4


@pytest.mark.parametrize(("f", "w"), [(1, 1), (5, 5), (5, 1), (9, 4)])
@pytest.mark.parametrize(("pp", "m"), [(2, 4), (4, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("saved", [0, 1])
def test_dualpipe_idles_as_published(pp: int, m: int, f: int, w: int, saved: int) -> None:
    """(p/2 - 1)(F&B + B - 3W) for F = I, where a pair takes F&B <= F + B; outer ranks may idle less."""
    backward = f + w
    pair = f + backward - saved
    published = (pair + backward - 3 * w) * (pp // 2 - 1)
    for name, ranks, microbatches in (("dualpipe", pp, m), ("dualpipev", pp // 2, m // 2)):
        schedule = build(name, pp=ranks, microbatches=microbatches)
        times = {**_times(f, f, w), "pair": pair}
        length, spans = makespan(schedule, **times), timetable(schedule, **times)
        idle = [
            length - sum(spans[turn[0]].end - spans[turn[0]].start for turn in schedule.turns(rank))
            for rank in range(ranks)
        ]
        assert max(idle) == published
        if not saved:
            assert min(idle) == published
        assert bubble_fraction(schedule, **times) == pytest.approx(sum(idle) / length / ranks)


def test_a_pair_starts_and_ends_together() -> None:
    schedule = build("dualpipev", pp=2, microbatches=8)
    spans = timetable(schedule, **_times(3, 4, 2), pair=8)
    pairs = [turn for rank in range(2) for turn in schedule.turns(rank) if len(turn) == 2]
    assert pairs
    assert all(spans[forward] == spans[backward] for forward, backward in pairs)
    assert all(spans[forward].end - spans[forward].start == 8 for forward, _ in pairs)


def test_few_microbatches_cost_a_bubble_but_run() -> None:
    for name in ("zb-h1", "zb-h2", "zb-v"):
        for m in (1, 2, 3):
            schedule = build(name, pp=4, microbatches=m)
            assert _own_bubble(schedule, **_times(1, 1, 1)) > 0
