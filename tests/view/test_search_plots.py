"""Plans as points and lines: the front, the fields that differ, and what is left out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simpar.errors import JobError
from simpar.view.parallel import parallel_coordinates
from simpar.view.search_plots import front, plan_fields, plan_text, search_scatter


def row(time: float, memory: int, **more: Any) -> dict[str, Any]:
    return {"tp": 1, "pp": 1, "step_time_s": time, "memory_bytes": memory, "fits": True, "mfu": 0.4, **more}


ROWS = [
    row(1.0, 30, tp=8),
    row(2.0, 10, tp=4, sequence_parallel=True),
    row(2.5, 20, tp=2),
    row(0.5, 90, tp=1, fits=False),
    {"tp": 3, "error": "tp 3 does not divide"},
]


def test_the_front_is_what_nothing_beats_and_fits() -> None:
    assert front(ROWS) == [0, 1]
    assert front([row(1.0, 30, cost_per_step=2.0), row(2.0, 40, cost_per_step=1.0)]) == [0, 1]
    assert front([row(1.0, 30), row(1.0, 30)]) == [0]


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=12))
def test_every_plan_is_beaten_by_one_on_the_front_or_on_it(plans: list[tuple[int, int, int]]) -> None:
    rows = [row(time, memory, cost_per_step=cost) for time, memory, cost in plans]
    best = front(rows)
    for time, memory, cost in plans:
        assert any(plans[i][0] <= time and plans[i][1] <= memory and plans[i][2] <= cost for i in best)
    for i in best:
        assert not any(
            all(a <= b for a, b in zip(other, plans[i], strict=True)) and other != plans[i] for other in plans
        )


def test_fields_are_those_that_differ_and_of_a_sweep_those_that_vary() -> None:
    assert plan_fields(ROWS) == ["tp", "pp", "sequence_parallel"]
    assert plan_fields([{"plan.tp": 1, "dp": 8}, {"plan.tp": 2, "dp": 4}]) == ["plan.tp"]
    assert plan_text(ROWS[1], ["tp", "sequence_parallel"]) == "tp=4 sp"
    assert plan_text({"tp": 1, "pp": 2, "schedule": "1f1b", "etp": 1}, ["tp", "pp", "schedule", "etp"]) == (
        "pp=2 schedule=1f1b"
    )
    assert plan_text({"tp": 2, "etp": 2, "pp": 1}, ["etp", "pp"]) == "plain"
    assert plan_text({"tp": 2, "etp": 1, "pp": 1}, ["etp", "pp"]) == "etp=1"


def test_the_scatter_shows_what_fits_apart_and_joins_the_front() -> None:
    figure = search_scatter(ROWS, capacity_bytes=80)
    fits, misfits, line, best = figure.data
    assert (len(fits.x), len(misfits.x), list(line.x), list(best.x)) == (3, 1, [1.0, 2.0], [1.0, 2.0])
    assert "4 plans; the fastest that fits: tp=8, 1 s" in figure.layout.title.subtitle.text
    priced = search_scatter([row(1.0, 3, cost_per_step=5.0), row(2.0, 2, cost_per_step=4.0)])
    assert list(priced.data[0].marker.color) == [5.0, 4.0]


def test_every_plan_is_a_line_over_all_axes() -> None:
    figure = parallel_coordinates(ROWS)
    lines = [trace for trace in figure.data if trace.mode == "lines"]
    axes = len(figure.layout.shapes)
    assert axes == 2 + 3  # tp, sequence_parallel; memory, MFU, step time
    assert sum(trace.x.count(None) for trace in lines) == 4
    assert all(0 <= y <= 1 for trace in lines for y in trace.y if y is not None)


def test_without_figures_there_is_nothing_to_plot() -> None:
    for draw in (search_scatter, parallel_coordinates):
        with pytest.raises(JobError, match="no plan has a step time, so there is nothing to plot"):
            draw([{"tp": 3, "error": "no"}])
