"""The classic picture of a schedule: every action one cell of its length, rows and numbers in their places."""

import pytest

from simpar.errors import DeadlockError
from simpar.schedule import SCHEDULES, Action, Schedule, build, makespan
from simpar.view.schedule_grid import schedule_grid

_CHUNKED = {"interleaved", "looped-bfs", "zb-1p"}


def made(name: str) -> Schedule:
    chunks = 2 if name in _CHUNKED else 1
    return build(name, pp=4, microbatches=8, chunks=chunks, group=None)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_is_a_bar_in_its_rank_s_row(name: str) -> None:
    schedule = made(name)
    figure = schedule_grid(schedule)
    cells = [
        (data[0], base, base + length, y, width)
        for bar in figure.data
        for data, base, length, y, width in zip(bar.customdata, bar.base, bar.x, bar.y, bar.width, strict=True)
    ]
    expected = sorted(str(action) for order in schedule.ranks for action in order)
    assert sorted(text for text, *_ in cells) == expected
    for text, start, end, y, _ in cells:
        rank = schedule.rank_of_stage[Action.parse(text).stage]
        assert rank < y < rank + 1
        assert 0 < start < end
    area = sum(round(end - start + 0.04) * width / 0.92 for _, start, end, _, width in cells)
    weights = {"F": 1, "B": 2, "I": 1, "W": 1}
    single = sum(weights[Action.parse(text).op] for text in expected)
    assert area == pytest.approx(single, rel=0.35 if schedule.overlapped else 1e-9)


def test_the_heading_counts_slots_and_bubble() -> None:
    # 1F1B with pp 4, m 8: (m + pp - 1)(1 + 2) slots, of which (pp - 1) / (m + pp - 1) are bubble
    said = schedule_grid(made("1f1b")).layout.title.subtitle.text
    assert "33 slots, 27.3% of them bubble" in said
    assert makespan(made("1f1b"), forward=1, backward=2) == 33


def test_numbers_are_those_of_the_microbatches_and_equally_wide() -> None:
    figure = schedule_grid(build("1f1b", pp=2, microbatches=12))
    texts = [text for bar in figure.data for text in bar.text]
    assert {len(text) for text in texts} == {2}
    assert sorted({int(text.strip("\u2007")) for text in texts}) == list(range(12))


def test_a_large_schedule_is_drawn_as_few_paths() -> None:
    figure = schedule_grid(build("1f1b", pp=16, microbatches=256))
    assert {trace.type for trace in figure.data} == {"scatter"}
    assert len(figure.data) == 2
    assert sum(trace.x.count(None) for trace in figure.data) == 2 * 16 * 256


def test_a_schedule_that_cannot_end_is_refused() -> None:
    stuck = Schedule("stuck", ((Action("B", 0, 0), Action("F", 0, 0)),), 1, (0,))
    with pytest.raises(DeadlockError, match="schedule 'stuck' deadlocks"):
        schedule_grid(stuck)
