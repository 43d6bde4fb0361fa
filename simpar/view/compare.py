"""Two traces on one time axis: two plans, or a prediction and a measurement, and by how much operations differ.

Traces of the same ranks share lanes: the upper half is the first's, the lower half the second's, and a strip shows the
signed error of every operation that both have. Traces of different ranks lie one below the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np
import plotly.graph_objects as go

from simpar.trace.pairing import Pairs, Side, pair, pair_in_order
from simpar.trace.trace import Spans, Trace
from simpar.units import format_time
from simpar.view.bars import Drawing, add_bars
from simpar.view.differences import BAR_PX, Difference, add_differences, signed
from simpar.view.hover import TimeUnit, step_text, time_unit
from simpar.view.layout import Panel, add_heading, add_lane_names, lay_out
from simpar.view.level_of_detail import to_rectangles
from simpar.view.marker import add_step_end
from simpar.view.page import write_page
from simpar.view.palette import BUBBLES_FROM, Palette, palette
from simpar.view.rows import Rows, place_below, place_halves
from simpar.view.scene import Scene, scene, side_by_side, taken
from simpar.view.timeline import Timeline
from simpar.view.timeline_page import Contents, Errors, Step

__all__ = ["Difference", "combine", "compare", "write_comparison"]

MOST_DIFFERENCES = 14
"""Operations that are drawn, at most: those that differ by the most time."""

_STRIP_PX, _MOST_POINTS = 84, 4000
_STEPS_PX = 30
"""Room for two step marks between the legend and the lanes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """What is drawn; pairs that are made in order are those of the lowest level that the first trace has."""

    traces: tuple[Trace, Trace]
    words: tuple[str, str]
    shown: Scene
    rows: Rows
    pairs: Pairs | None
    in_order: bool
    unit: TimeUnit
    colours: Palette

    @property
    def has_strip(self) -> bool:
        """Whether there are errors to show: the traces have most operations in common."""
        return self.pairs is not None and len(self.pairs) > (0 if self.in_order else self.pairs.unpaired)

    @property
    def table(self) -> Spans:
        """The spans that the pairs count rows of."""
        return self.shown.kernels if self.in_order and len(self.shown.kernels) else self.shown.operations

    @property
    def edges(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Top and bottom of either trace, in lane heights."""
        if self.pairs is not None:
            return (0.0, self.rows.total), (0.0, self.rows.total)
        lanes = len(self.traces[0].lanes)
        first = [g for g in self.rows.groups if g.lane < lanes]
        second = [g for g in self.rows.groups if g.lane >= lanes]
        return (
            (first[0].top, first[-1].bottom) if first else (0.0, 0.0),
            (second[0].top, second[-1].bottom) if second else (0.0, 0.0),
        )


def compare(
    first: Trace,
    second: Trace,
    differences: Sequence[Difference] = (),
    *,
    words: tuple[str, str] = ("predicted", "measured"),
    title: str = "",
    subtitle: str = "",
    dark: bool = False,
    budget: int = 5000,
) -> go.Figure:
    """Draws both traces from a common zero.

    Args:
        first: drawn above.
        second: drawn below.
        differences: of operations, in any order; bars below the timeline.
        words: what the traces are called.
        title: heading.
        subtitle: second line; behind it stand both steps and the first over the second, less one.
        dark: dark instead of light surfaces; its page opens light only where the reader's system prefers that, too.
        budget: bars of both traces, at most.

    Returns:
        A figure whose x is time in µs, ms or s for both.
    """
    drawn = _comparison(first, second, words, dark)
    drawing = Drawing(
        shown=drawn.shown,
        rectangles=to_rectangles(drawn.shown.operations, drawn.shown.kernels, end_ns=drawn.shown.end_ns, budget=budget),
        rows=drawn.rows,
        unit=drawn.unit,
        colours=drawn.colours,
    )
    figure = Timeline()
    add_bars(figure, drawing)
    shown = sorted(differences, key=lambda d: -abs(d.predicted_ns - d.measured_ns))[:MOST_DIFFERENCES]
    strip = drawn.has_strip
    panels = (
        *((Panel("3", _STRIP_PX),) if strip else ()),
        *((Panel("2", BAR_PX * len(shown) + 30),) if shown else ()),
    )
    lay_out(
        figure,
        drawn.shown.lanes,
        drawn.rows,
        panels,
        drawn.unit,
        drawn.shown.end_ns,
        drawn.colours,
        above_px=_STEPS_PX,
    )
    figure.update_layout(xaxis={"anchor": "y3" if strip else "y"})
    add_lane_names(figure, drawn.shown.lanes, drawn.rows, drawn.colours)
    for index, (trace, word) in enumerate(zip(drawn.traces, words, strict=True)):
        # both texts stand above the same lanes where these are shared
        lift = 13 * index if drawn.pairs is not None else 0
        edges = drawn.edges[index]
        add_step_end(figure, trace.step_ns, drawn.unit, drawn.colours, word=word, edges=edges, lift_px=lift)
    if strip:
        _add_strip(figure, drawn)
    if shown:
        add_differences(figure, shown[::-1], drawn.colours)
    headline = _headline(drawn)
    told = ", ".join(f"{name}: {value}" for name, value in headline.items())
    second_line = " · ".join(text for text in (subtitle, told, _paired_text(drawn)) if text)
    add_heading(figure, escape(title), second_line, drawn.colours)
    figure.carry(_contents(drawn, headline, subtitle, dark))
    return figure


def combine(figures: dict[str, go.Figure]) -> go.Figure:
    """One figure with a menu that shows one of several comparisons at a time; the first is shown at the start.

    Raises:
        ValueError: there are none.
    """
    if not figures:
        raise ValueError("there are no comparisons to combine; give at least one")
    combined = Timeline()
    shown = next(iter(figures))
    tallest = max(figure.layout.height for figure in figures.values())
    buttons = []
    for name, figure in figures.items():
        for trace in figure.data:
            combined.add_trace(trace)
            combined.data[-1].visible = name == shown
        layout = figure.layout.to_plotly_json()
        layout.pop("template", None)
        # what one figure lacks must not stay from the one before
        for axis in ("xaxis2", "yaxis2", "yaxis3"):
            layout.setdefault(axis, {"visible": False})
        layout.setdefault("shapes", [])
        layout.pop("height", None)  # all have that of the tallest, or of the window
        visible = [other == name for other, one in figures.items() for _ in one.data]
        buttons.append({"label": name, "method": "update", "args": [{"visible": visible}, layout]})
    combined.update_layout(figures[shown].layout)
    menu = {
        "buttons": buttons,
        "x": 1,
        "xanchor": "right",
        "y": 1,
        "yanchor": "bottom",
        "pad": {"b": 44 + _STEPS_PX},
        "showactive": True,
    }
    combined.update_layout(height=tallest, updatemenus=[menu] if len(figures) > 1 else [])
    return combined


def write_comparison(figure: go.Figure, path: str, *, title: str) -> None:
    """Writes comparisons as one HTML file that opens anywhere, without a network.

    Raises:
        OutputError: if the folder of ``path`` does not exist or the file cannot be written.
    """
    write_page(figure, path, title=title)


def _comparison(first: Trace, second: Trace, words: tuple[str, str], dark: bool) -> _Comparison:
    scenes = scene(first), scene(second)
    shown = side_by_side(*scenes, words)
    halves = _ranks(scenes[0]) == _ranks(scenes[1]) or not all(len(s.operations) for s in scenes)
    pairs, in_order = None, False
    if halves:
        pairs, in_order = _pairs(*scenes)
    rows = (place_halves if halves else place_below)(first.lanes, second.lanes, shown.used, words)
    return _Comparison(
        traces=(first, second),
        words=words,
        shown=shown,
        rows=rows,
        pairs=pairs,
        in_order=in_order,
        unit=time_unit(shown.end_ns),
        colours=palette(dark),
    )


def _pairs(first: Scene, second: Scene) -> tuple[Pairs, bool]:
    """What both have, and whether it is paired in order only; rows are those of the first, and so of both together."""
    found = _pairs_of(pair, (first, first.operations), (second, second.operations))
    if len(found) or not len(first.operations) or not len(second.operations):
        return found, False
    lowest = [(shown, shown.kernels if len(shown.kernels) else shown.operations) for shown in (first, second)]
    return _pairs_of(pair_in_order, *lowest), True


def _pairs_of(how: Callable[[Side, Side], Pairs], *tables: tuple[Scene, Spans]) -> Pairs:
    """Pairs of what is no bubble."""
    busy = [np.flatnonzero(table.kind < BUBBLES_FROM) for _, table in tables]
    first, second = (
        Side(spans=taken(table, rows), lanes=shown.lanes, names=shown.names)
        for (shown, table), rows in zip(tables, busy, strict=True)
    )
    found = how(first, second)
    return replace(found, row=busy[0][found.row])


def _ranks(shown: Scene) -> set[tuple[int, int]]:
    """Ranks and stages with anything on them."""
    return {(shown.lanes[i].rank, shown.lanes[i].stage) for i in shown.used.tolist()}


def _headline(drawn: _Comparison) -> dict[str, str]:
    (first, second), (a, b) = drawn.traces, drawn.words
    headline = {a: format_time(first.step_s), b: format_time(second.step_s)}
    if second.step_ns:
        headline[f"{a} / {b} − 1"] = signed(first.step_ns / second.step_ns - 1, ".1%")
    return headline


def _paired_text(drawn: _Comparison) -> str:
    if drawn.pairs is None or not drawn.has_strip:
        return ""
    alone = f", {drawn.pairs.unpaired:,} without a partner" if drawn.pairs.unpaired else ""
    what = "spans paired by kind and order" if drawn.in_order else "operations paired"
    return f"{len(drawn.pairs):,} {what}{alone}"


def _add_strip(figure: go.Figure, drawn: _Comparison) -> None:
    """A point per operation: where it lies in the first trace, and its signed error; the longest if they are many."""
    pairs, colours, unit = drawn.pairs, drawn.colours, drawn.unit
    assert pairs is not None, "only traces of the same ranks have a strip"
    longest = (-pairs.first_ns).argsort(kind="stable")[:_MOST_POINTS]
    row, error = pairs.row[longest], 100 * pairs.error[longest]
    spans = drawn.table
    figure.add_scatter(
        x=(spans.start_ns[row] + pairs.first_ns[longest] / 2) / unit.ns,
        y=error,
        yaxis="y3",
        mode="markers",
        marker={"size": 5, "color": [colours.alarm if e > 0 else colours.accent for e in error.tolist()]},
        showlegend=False,
        hovertext=[_strip_text(drawn, r, e) for r, e in zip(row.tolist(), error.tolist(), strict=True)],
        hovertemplate="%{hovertext}<extra></extra>",
        name="error",
    )
    most = max(1.0, float(abs(error).max()))
    figure.update_layout(
        yaxis3={
            "title": {"text": "error %", "standoff": 10, "font": {"size": 12}},
            "range": [-1.1 * most, 1.1 * most],
            "gridcolor": colours.line,
            "zeroline": True,
            "zerolinecolor": colours.faint,
            "fixedrange": True,
            "nticks": 5,
            "tickfont": {"size": 10, "color": colours.faint},
        }
    )


def _strip_text(drawn: _Comparison, row: int, error: float) -> str:
    spans, shown = drawn.table, drawn.shown
    number = f" · microbatch {spans.microbatch[row]}" if spans.microbatch[row] >= 0 else ""
    name, where = escape(shown.names[spans.name[row]]), escape(shown.where(int(spans.lane[row])))
    return f"<b>{signed(error, '.1f')} %</b>  {name}{number}<br>{where}"


def _contents(drawn: _Comparison, headline: dict[str, str], subtitle: str, dark: bool) -> Contents:
    (first, second), (a, b) = drawn.traces, drawn.words
    steps = tuple(
        Step(at_ns=trace.step_ns, text=f"{word} {step_text(trace.step_ns)}", top=edges[0], bottom=edges[1], tone=tone)
        for trace, word, edges, tone in zip(drawn.traces, drawn.words, drawn.edges, ("accent", "alarm"), strict=True)
        if trace.step_ns > 0
    )
    errors = None
    if drawn.has_strip and drawn.pairs is not None:
        errors = Errors(
            title=f"{a} / {b} − 1",
            kernels=drawn.table is drawn.shown.kernels,
            row=drawn.pairs.row,
            error=drawn.pairs.error,
        )
    ends = sorted((first.step_ns, second.step_ns))
    return Contents(
        shown=drawn.shown,
        rows=drawn.rows,
        steps=steps,
        band=(ends[0], ends[1], "accent" if first.step_ns > second.step_ns else "alarm"),
        notes=tuple(text for text in (subtitle, _paired_text(drawn)) if text),
        headline=headline,
        errors=errors,
        dark=dark or None,
    )
