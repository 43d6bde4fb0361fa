"""The figures of explanations and comparisons show the numbers of their records."""

import pytest

from simpar.view.explain import comparison_figure, explanation_figure
from simpar.whatif.comparison import compare
from simpar.whatif.explanation import explain

JOB = {"model": "gpt2", "cluster": "h100-sxm:1x8", "plan": {"zero": 1, "micro_batch": 4}}


@pytest.mark.parametrize("dark", [False, True])
def test_bars_of_the_path_add_up_to_the_step(dark: bool) -> None:
    found = explain(JOB)
    figure = explanation_figure(found, dark=dark)
    path, rooms, slopes = figure.data
    assert sum(path.x) == pytest.approx(found.result.step_time_s, rel=5e-3)  # what is too small to see is left out
    assert list(path.x) == sorted(path.x, reverse=True)
    assert list(rooms.x) == sorted(rooms.x, reverse=True)
    assert list(slopes.x) == sorted(slopes.x, reverse=True)
    assert all(sentence.split(",")[0] in figure.layout.title.subtitle.text for sentence in found.words)


def test_the_waterfall_leads_from_a_to_b() -> None:
    found = compare(JOB, {**JOB, "plan": {"zero": 0, "micro_batch": 8}})
    (fall,) = comparison_figure(found).data
    assert fall.y[0] == found.a.step_time_s
    assert sum(fall.y) == pytest.approx(found.b.step_time_s)
    assert list(fall.measure)[0 :: len(fall.measure) - 1] == ["absolute", "total"]
