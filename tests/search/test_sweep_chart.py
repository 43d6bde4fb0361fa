"""The chart of a sweep: its axes, its lines, its gaps."""

from html import escape

import pytest

from simpar import sweep
from simpar.errors import JobError
from simpar.view.sweep_chart import sweep_chart

JOB = {"model": "gpt2", "cluster": "h100-sxm:4"}


def test_one_line_per_combination_of_the_other_fields():
    found = sweep(JOB, {"plan.tp": [1, 2, 3], "plan.zero": [0, 1]}, workers=1)
    figure = sweep_chart(found.rows, found.varied)
    assert [line.name for line in figure.data] == ["zero=0", "zero=1"]
    assert [round(x) for x in figure.data[0].x] == [0, 1, 2]
    # beside each other, so that intervals do not lie on each other
    assert all(first < second for first, second in zip(figure.data[0].x, figure.data[1].x, strict=True))
    assert list(figure.layout.xaxis.ticktext) == ["1", "2", "3<br><i>refused</i>"]
    refused = next(row["error"] for row in found.rows if "error" in row)
    assert escape(f"refused at tp=3: {refused}") in figure.layout.title.subtitle.text
    assert figure.layout.title.text == "<b>step time (s) over tp, by zero</b>"
    times = list(figure.data[0].y)
    assert times[0] == found.rows[0]["step_time_s"]
    assert times[2] is None
    assert figure.data[0].error_y.array[0] == pytest.approx(found.rows[0]["high_s"] - times[0])
    assert figure.layout.xaxis.title.text == "plan.tp"


def test_rows_that_are_refused_alone_are_named():
    rows = [{"a.x": x, "a.y": y, "mfu": 0.5} for x in (1, 2) for y in (1, 2)]
    rows[3] = {"a.x": 2, "a.y": 2, "error": "it is too much"}
    figure = sweep_chart(rows, ("a.x", "a.y"), value="mfu")
    assert list(figure.layout.xaxis.ticktext) == ["1", "2<br><i>1 of 2 refused</i>"]
    assert figure.layout.title.subtitle.text.endswith("<br>refused at x=2 · y=2: it is too much")


def test_other_figures_have_no_interval_and_what_does_not_fit_is_hollow():
    found = sweep({"model": "llama3-70b", "cluster": "h100-sxm:8"}, {"plan.zero": [0, 3]}, workers=1)
    figure = sweep_chart(found.rows, found.varied, value="mfu")
    assert not figure.data[0].error_y.visible
    assert set(figure.data[0].marker.symbol) == {"circle-open"}
    assert not figure.layout.showlegend


def test_a_column_without_numbers_is_refused():
    with pytest.raises(JobError, match=r"no row has a number in 'speed'.* take one of .*step_time_s"):
        sweep_chart(sweep(JOB, {"plan.tp": [1]}, workers=1).rows, ("plan.tp",), value="speed")
