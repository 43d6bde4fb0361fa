"""Charts of named series show the numbers that they are given."""

from pathlib import Path

import pytest

from simpar.errors import JobError
from simpar.view.chart import chart, write_chart

SERIES = {"one": {"a": 1.0, "b": None}, "other": {"a": 2, "b": 3.5}}
LABELS = {"title": "Which?", "across": "case", "value": "time (s)"}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("form", "kind"), [("lines", "scatter"), ("bars", "bar"), ("stack", "bar")])
def test_series_are_drawn_as_given(form: str, kind: str, dark: bool) -> None:
    figure = chart(SERIES, form=form, dark=dark, **LABELS)
    assert [trace.type for trace in figure.data] == [kind, kind]
    assert {trace.name: dict(zip(trace.x, trace.y, strict=True)) for trace in figure.data} == SERIES
    assert figure.layout.barmode == ("stack" if form == "stack" else "group")
    assert len({trace.marker.color or trace.line.color for trace in figure.data}) == 2


def test_the_answer_stands_below_the_question_whole_and_in_lines() -> None:
    words = [f"word{number}" for number in range(60)]
    figure = chart(SERIES, answer=" ".join(words) + "\nlast", **LABELS)
    (answer,) = figure.layout.annotations
    assert answer.text.replace("<br>", " ").split() == [*words, "last"]
    assert max(map(len, answer.text.split("<br>"))) <= 150
    assert figure.layout.margin.t > chart(SERIES, **LABELS).layout.margin.t


def test_long_names_break_at_commas_and_short_ones_do_not() -> None:
    axis = chart({"one": {"a, b": 1, "gpt3-175b, 64 GPUs": 2}}, **LABELS).layout.xaxis
    assert list(axis.ticktext) == ["a, b", "gpt3-175b,<br>64 GPUs"]


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(
        JobError, match="no series of 'Which\\?' has a number, so there is nothing to draw; give one or"
    ):
        chart({"one": {"a": None}}, **LABELS)


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    write_chart(tmp_path / "chart.html", SERIES, **LABELS)
    page = (tmp_path / "chart.html").read_text(encoding="utf-8")
    assert "<title>Which?</title>" in page
    assert "default-src 'none'" in page
