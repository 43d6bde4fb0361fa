"""The comparison figure, against the two traces that it draws."""

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from pipeline_traces import Recorder, pipeline_trace, trace_of

from simpar.trace.export import OutputError
from simpar.trace.trace import Lane, Trace
from simpar.view.compare import MOST_DIFFERENCES, Difference, combine, compare, write_comparison
from simpar.view.palette import DRAWN_KINDS, label, palette

LANES = (Lane(0, 0, "compute"), Lane(0, 0, "dp"))


def short_trace(factor: int) -> Trace:
    """Forward, backward, and an all-reduce, in units of ``factor`` µs."""
    record = Recorder()
    record.span(0, "forward", 0, 1000 * factor, microbatch=0)
    record.span(0, "backward", 1000 * factor, 2000 * factor, microbatch=0)
    record.span(1, "all_reduce", 2000 * factor, 1500 * factor)
    return trace_of(record.spans(), LANES, 3500 * factor, tuple(record.names))


def bars(figure: go.Figure, word: str) -> list[go.Bar]:
    """The bars of one side: rows of every bar trace whose text names it."""
    found = []
    for bar in figure.data:
        if bar.type != "bar" or bar.yaxis == "y2":
            continue
        rows = [i for i, text in enumerate(bar.hovertext) if f"<br>{word}: stage" in text]
        if rows:
            columns = {name: np.asarray(getattr(bar, name))[rows] for name in ("base", "x", "y", "width", "customdata")}
            found.append(go.Bar(name=bar.name, **columns))
    return found


def test_both_traces_share_one_axis_and_its_unit() -> None:
    # 3.5 ms against 3.5 µs: the axis is in ms, and the short one's own timeline would be in µs
    figure = compare(short_trace(1), short_trace(1000))
    assert figure.layout.xaxis.title.text == "time (ms)"
    for word, factor in (("predicted", 1), ("measured", 1000)):
        drawn = {bar.name: bar for bar in bars(figure, word)}
        for kind, start_us, length_us in (("forward", 0, 1), ("backward", 1, 2), ("all_reduce", 2, 1.5)):
            bar = drawn[label(kind)]
            assert bar.base == pytest.approx([start_us * factor * 1e-3])
            assert bar.x == pytest.approx([length_us * factor * 1e-3])
            assert np.array_equal(bar.customdata, bar.x)


def test_traces_of_the_same_ranks_share_each_lane_in_halves() -> None:
    figure = compare(pipeline_trace(3, 4), pipeline_trace(3, 4))
    upper = {bar.name: np.unique(np.round(bar.y, 9)) for bar in bars(figure, "predicted")}
    lower = {bar.name: np.unique(np.round(bar.y, 9)) for bar in bars(figure, "measured")}
    for kind, half in (("forward", 0.8), ("optimizer", 0.8), ("p2p", 0.44), ("all-reduce", 0.44)):
        assert lower[kind] - upper[kind] == pytest.approx([half] * len(upper[kind]))
    ticks = figure.layout.yaxis.ticktext
    assert ticks[:4] == ("compute predicted", "tp", "pp", "dp")
    assert ticks.count("measured") == 3
    assert len(ticks) == 3 * 8
    assert sum("<b>stage 1</b>" in note.text for note in figure.layout.annotations) == 1


def test_traces_of_other_ranks_lie_one_below_the_other() -> None:
    figure = compare(pipeline_trace(2, 4), pipeline_trace(3, 4), words=("pp 2", "pp 3"))
    lowest = max(float((np.asarray(bar.y) + np.asarray(bar.width) / 2).max()) for bar in bars(figure, "pp 2"))
    highest = min(float((np.asarray(bar.y) - np.asarray(bar.width) / 2).min()) for bar in bars(figure, "pp 3"))
    assert lowest + 0.5 < highest
    bottom, top = figure.layout.yaxis.range
    assert top < 0 < highest < bottom
    texts = [note.text for note in figure.layout.annotations]
    assert {"<b>pp 2</b>", "<b>pp 3</b>"} <= set(texts)
    # plotly hides an annotation whose place lies outside of the axis
    assert all(top < note.y < bottom for note in figure.layout.annotations if note.yref == "y")
    assert not [trace for trace in figure.data if trace.type == "scatter"]


def test_both_step_ends_are_marked_and_the_heading_has_the_signed_error() -> None:
    figure = compare(short_trace(90), short_trace(100), title="a < b", subtitle="profile x")
    ends = sorted(shape.x0 for shape in figure.layout.shapes if shape.line.dash == "dash")
    assert ends == pytest.approx([315.0, 350.0])
    assert figure.layout.title.text == "<b>a &lt; b</b>"
    subtitle = figure.layout.title.subtitle.text
    assert subtitle == (
        "profile x · predicted: 315 µs, measured: 350 µs, predicted / measured − 1: −10.0% · 3 operations paired"
    )
    words = {note.text: note for note in figure.layout.annotations}
    texts = [words["predicted step 315 µs"], words["measured step 350 µs"]]
    assert texts[0].yshift != texts[1].yshift  # else one would lie on the other


def test_step_marks_keep_to_the_lanes_and_below_the_legend() -> None:
    figure = compare(short_trace(90), short_trace(100), [Difference("x", 1, 1, 2)])
    marks = [shape for shape in figure.layout.shapes if shape.line.dash == "dash"]
    bottom, top = figure.layout.yaxis.range
    assert len(marks) == 2
    for mark in marks:
        assert mark.yref == "y"  # the strip and the bars below have axes of their own
        assert top <= mark.y0 < mark.y1 <= bottom
    notes = [note for note in figure.layout.annotations if "step" in note.text]
    assert all(note.yref == "y" and top <= note.y for note in notes)
    # two lines of text between the lanes and the legend
    plot_px = figure.layout.height - figure.layout.margin.t - figure.layout.margin.b
    assert (figure.layout.legend.y - 1) * plot_px >= max(note.yshift for note in notes) + 14


def test_the_strip_has_the_signed_error_of_every_operation_at_its_place() -> None:
    slower = short_trace(100)
    slower.spans.duration_ns[1] = 160_000  # the backward, predicted to take 200 µs
    (strip,) = [trace for trace in compare(short_trace(100), slower).data if trace.type == "scatter"]
    shown = {round(x, 6): y for x, y in zip(strip.x, strip.y, strict=True)}
    assert shown == pytest.approx({50.0: 0.0, 200.0: 25.0, 275.0: 0.0})
    assert any("<b>+25.0 %</b>  backward · microbatch 0" in text for text in strip.hovertext)


def test_an_imported_profile_is_paired_by_kind_and_order() -> None:
    predicted = pipeline_trace(1, 2)
    kernels = predicted.kernels()
    imported = replace(predicted, spans=replace(kernels, microbatch=kernels.microbatch - 9), expand=None)
    imported.spans.parent[:] = -1
    figure = compare(predicted, imported)
    (strip,) = [trace for trace in figure.data if trace.type == "scatter"]
    assert len(strip.x) == len(kernels)
    assert not np.any(strip.y)
    assert figure.layout.title.subtitle.text.endswith(f"{len(kernels)} spans paired by kind and order")


def test_legend_names_each_kind_once() -> None:
    figure = compare(short_trace(1), short_trace(2))
    shown = [bar.name for bar in figure.data if bar.showlegend is not False]
    assert sorted(shown) == sorted(set(shown))
    assert {label(kind) for kind in ("forward", "backward", "all_reduce")} <= set(shown)


def test_differences_are_sorted_signed_and_coloured() -> None:
    differences = [Difference("qkv", 4, 90_000, 100_000), Difference("<norm>", 1, 3_000_000, 1_000_000)]
    figure = compare(short_trace(1000), short_trace(1000), differences)
    (bar,) = [bar for bar in figure.data if bar.yaxis == "y2"]
    # y grows upward there, so the largest comes last
    assert bar.y == ("qkv", "&lt;norm&gt;")
    assert bar.x == pytest.approx([-0.01, 2.0])
    assert bar.text == ("−10%", "+200%")
    colours = palette(False)
    assert bar.marker.color == (colours.accent, colours.alarm)
    assert figure.layout.xaxis2.title.text == "predicted − measured (ms); beside each bar: predicted / measured − 1"
    low, high = figure.layout.xaxis2.range
    assert low < min(bar.x)
    assert high > max(bar.x)
    assert "4 spans of all ranks" in bar.hovertext[0]
    assert "1 span of all ranks" in bar.hovertext[1]
    assert figure.layout.yaxis2.domain[1] < figure.layout.yaxis.domain[0]


def test_only_the_largest_differences_are_drawn() -> None:
    many = [Difference(f"op {i}", 1, 1_000, 1_000 + 10 * i) for i in range(1, 30)]
    (bar,) = [bar for bar in compare(short_trace(1), short_trace(1), many).data if bar.yaxis == "y2"]
    assert len(bar.y) == MOST_DIFFERENCES
    assert bar.y[-1] == "op 29"
    assert "op 15" not in bar.y


def test_memory_and_empty_traces_do_no_harm() -> None:
    empty = replace(short_trace(1), spans=trace_of(Recorder().spans(), LANES, 0, ("",)).spans, step_ns=0)
    figure = compare(short_trace(1), empty)
    assert bars(figure, "predicted")
    assert not bars(figure, "measured")
    both = compare(pipeline_trace(2, 2), pipeline_trace(2, 2))
    assert {trace.yaxis for trace in both.data if trace.type == "scatter"} == {"y3"}


def test_menu_shows_one_comparison_at_a_time() -> None:
    first = compare(short_trace(1), short_trace(2), title="first")
    second = compare(pipeline_trace(2, 4), pipeline_trace(2, 4), [Difference("x", 1, 1, 2)], title="second")
    combined = combine({"one": first, "two": second})
    assert [bar.visible for bar in combined.data] == [True] * len(first.data) + [False] * len(second.data)
    (menu,) = combined.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["one", "two"]
    shown, layout = menu.buttons[1].args
    assert shown["visible"] == [False] * len(first.data) + [True] * len(second.data)
    assert layout["title"]["text"] == "<b>second</b>"
    # the axes of the second's differences go when the first comes back
    assert menu.buttons[0].args[1]["yaxis2"] == {"visible": False}
    assert combined.layout.height == max(first.layout.height, second.layout.height)
    assert not combine({"one": compare(short_trace(1), short_trace(1))}).layout.updatemenus
    with pytest.raises(ValueError, match="there are no comparisons to combine; give at least one"):
        combine({})


def test_page_is_whole_and_needs_no_network(tmp_path: Path) -> None:
    figure = compare(short_trace(1), short_trace(2), [Difference("x", 1, 1, 2)])
    write_comparison(figure, str(tmp_path / "page.html"), title="check")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>check</title>" in page
    found = re.search(r'id="content">([^<]*)<', page)
    assert found
    content = json.loads(gzip.decompress(base64.b64decode(found[1])))
    assert len(content["data"]) == len(figure.data)
    with pytest.raises(OutputError, match="there is no folder"):
        write_comparison(figure, str(tmp_path / "no" / "page.html"), title="check")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_kinds_keep_their_colours() -> None:
    figure = compare(short_trace(1), short_trace(1), dark=True)
    for bar in figure.data:
        if bar.type == "bar":
            kind = next(k for k in DRAWN_KINDS if label(k) == bar.name)
            assert bar.marker.color == palette(True).kinds[kind]
