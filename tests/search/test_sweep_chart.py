"""The chart of a sweep: its axes, its lines, its gaps."""

import pytest

from simpar import sweep
from simpar.errors import JobError
from simpar.view.sweep_chart import sweep_chart

JOB = {"model": "gpt2", "cluster": "h100-sxm:4"}


def test_one_line_per_combination_of_the_other_fields():
    found = sweep(JOB, {"plan.tp": [1, 2, 3], "plan.zero": [0, 1]}, workers=1)
    figure = sweep_chart(found.rows, found.varied)
    assert [line.name for line in figure.data] == ["zero=0", "zero=1"]
    assert list(figure.data[0].x) == ["1", "2", "3"]
    times = list(figure.data[0].y)
    assert times[0] == found.rows[0]["step_time_s"]
    assert times[2] is None
    assert figure.data[0].error_y.array[0] == pytest.approx(found.rows[0]["high_s"] - times[0])
    assert figure.layout.xaxis.title.text == "plan.tp"


def test_other_figures_have_no_interval_and_what_does_not_fit_is_hollow():
    found = sweep({"model": "llama3-70b", "cluster": "h100-sxm:8"}, {"plan.zero": [0, 3]}, workers=1)
    figure = sweep_chart(found.rows, found.varied, value="mfu")
    assert not figure.data[0].error_y.visible
    assert set(figure.data[0].marker.symbol) == {"circle-open"}
    assert not figure.layout.showlegend


def test_a_column_without_numbers_is_refused():
    with pytest.raises(JobError, match=r"no row has a number in 'speed'.* take one of .*step_time_s"):
        sweep_chart(sweep(JOB, {"plan.tp": [1]}, workers=1).rows, ("plan.tp",), value="speed")
