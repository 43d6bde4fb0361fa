"""The chart of goodput by interval shows what was simulated, and marks the optima."""

import math

import pytest

from simpar.reliability.failures import Failures
from simpar.reliability.goodput import goodput

pytest.importorskip("plotly", reason="views need plotly")
from simpar.view.goodput_chart import goodput_chart

FOUND = goodput(Failures(gpus=512, mtbf_gpu_h=20_000, checkpoint_s=30, restart_s=300, days=30), runs=2)


@pytest.mark.parametrize("dark", [False, True])
def test_points_and_formula(dark: bool):
    figure = goodput_chart(FOUND, title="a job", dark=dark)
    formula, simulated = figure.data
    assert list(formula.x) == list(simulated.x) == [point.interval_s for point in FOUND.points]
    assert list(simulated.y) == [point.goodput for point in FOUND.points]
    assert list(formula.y) == [point.expected for point in FOUND.points]
    assert all(array >= 0 for array in (*simulated.error_y.array, *simulated.error_y.arrayminus))
    assert figure.layout.title.text.startswith("a job")


def test_marks_stand_at_the_optima():
    figure = goodput_chart(FOUND)
    assert [shape.x0 for shape in figure.layout.shapes] == [FOUND.daly_s, FOUND.best.interval_s]
    assert [10**note.x for note in figure.layout.annotations] == pytest.approx([FOUND.daly_s, FOUND.best.interval_s])
    assert figure.layout.xaxis.type == "log"
    assert all(math.isfinite(x) for x in figure.layout.xaxis.tickvals)
