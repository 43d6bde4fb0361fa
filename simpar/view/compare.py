"""A prediction and a measurement on one time axis: two timelines, one above the other, and how operations differ.

Both timelines are those of :mod:`simpar.view.timeline`; here they are only moved and scaled to share an axis. Below
them lies a bar for each kind of operation: by how much it was predicted too short (to the right) or too long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from simpar.trace.trace import IntColumn, MemoryEvents, Trace
from simpar.units import format_time
from simpar.view.hover import TimeUnit, step_text, time_unit
from simpar.view.level_of_detail import extent_ns
from simpar.view.page import write_page
from simpar.view.palette import Palette, palette
from simpar.view.timeline import Timeline, timeline

MOST_DIFFERENCES = 14
"""Operations that are drawn, at most: those that differ by the most time."""

_GAP = 1.1  # between the two timelines, in lane heights
_HEADROOM = 0.9  # above the first one, for its word: plotly hides what is annotated outside of an axis
_BAR_PX, _BETWEEN_PX, _TOP_PX, _BOTTOM_PX = 22, 84, 118, 56


@dataclass(frozen=True, slots=True)
class Difference:
    """All spans of one name, added up over ranks and microbatches.

    Attributes:
        name: of the operation or kernel.
        count: spans that were paired.
        predicted_ns: their predicted lengths together.
        measured_ns: their measured lengths together.
    """

    name: str
    count: int
    predicted_ns: int
    measured_ns: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ns / self.measured_ns - 1


def compare(
    predicted: Trace,
    measured: Trace,
    differences: Sequence[Difference] = (),
    *,
    title: str = "",
    subtitle: str = "",
    dark: bool = False,
    budget: int = 5000,
) -> go.Figure:
    """Draws both traces from a common zero.

    Args:
        predicted: drawn above.
        measured: drawn below.
        differences: of operations, in any order.
        title: heading.
        subtitle: second line; behind it stands the error of the step.
        dark: dark instead of light surfaces.
        budget: bars of each trace at most.

    Returns:
        A figure whose x is time in µs, ms or s for both.
    """
    colours = palette(dark)
    unit = time_unit(max(extent_ns(trace, trace.spans) for trace in (predicted, measured)))
    shown = sorted(differences, key=lambda d: -abs(d.predicted_ns - d.measured_ns))[:MOST_DIFFERENCES]
    parts = [
        timeline(replace(trace, memory=_NO_MEMORY), dark=dark, budget=budget // 2) for trace in (predicted, measured)
    ]
    heights = [_height(part) for part in parts]
    offsets = [0.0, heights[0] + _GAP]
    figure = Timeline()
    for word, part, trace, offset in zip(("predicted", "measured"), parts, (predicted, measured), offsets, strict=True):
        _move(figure, part, word, offset, time_unit(extent_ns(trace, trace.spans)).ns / unit.ns)
        _add_word(figure, word, offset, colours)
        if trace.step_ns > 0:
            _add_end(figure, trace.step_ns, unit, (offset, offset + _height(part)), colours)
    _lay_out(figure, parts, offsets, sum(heights) + _GAP, unit, colours, len(shown))
    end = max(extent_ns(trace, trace.spans) for trace in (predicted, measured)) / unit.ns
    figure.update_xaxes(range=[-0.004 * end, 1.03 * end], minallowed=-0.05 * end, maxallowed=1.08 * end, selector=0)
    if shown:
        _add_differences(figure, shown[::-1], colours)
    error = predicted.step_ns / measured.step_ns - 1 if measured.step_ns else 0.0
    told = f"predicted {format_time(predicted.step_s)}, measured {format_time(measured.step_s)}: {error:+.1%}"
    _add_heading(figure, title, " · ".join(text for text in (subtitle, told) if text), colours)
    return figure


def combine(figures: Mapping[str, go.Figure]) -> go.Figure:
    """One figure with a menu that shows one of several comparisons at a time; the first is shown at the start.

    Raises:
        ValueError: there are none.
    """
    if not figures:
        raise ValueError("there are no comparisons to combine; give at least one")
    combined = Timeline()
    shown = next(iter(figures))
    buttons = []
    for name, figure in figures.items():
        for trace in figure.data:
            combined.add_trace(trace)
            combined.data[-1].visible = name == shown
        visible = [other == name for other, one in figures.items() for _ in one.data]
        layout = figure.layout.to_plotly_json()
        layout.pop("template", None)
        # what one figure lacks must not stay from the one before
        layout.setdefault("xaxis2", {"visible": False})
        layout.setdefault("yaxis2", {"visible": False})
        layout.setdefault("shapes", [])
        buttons.append({"label": name, "method": "update", "args": [{"visible": visible}, layout]})
    combined.update_layout(figures[shown].layout)
    tallest = max(figure.layout.height for figure in figures.values())
    for button in buttons:
        button["args"][1] = {**button["args"][1], "height": tallest}  # type: ignore[index]
    menu = {
        "buttons": buttons,
        "x": 1,
        "xanchor": "right",
        "y": 1,
        "yanchor": "bottom",
        "pad": {"b": 44},
        "showactive": True,
    }
    combined.update_layout(height=tallest, updatemenus=[menu] if len(figures) > 1 else [])
    return combined


def write_comparison(figure: go.Figure, path: str, *, title: str) -> None:
    """Writes a comparison as one HTML file that opens anywhere, without a network.

    Raises:
        OutputError: if the folder of ``path`` does not exist or the file cannot be written.
    """
    write_page(figure, path, title=title)


_EMPTY: IntColumn = np.zeros(0, np.int64)
_NO_MEMORY = MemoryEvents(time_ns=_EMPTY, rank=_EMPTY, category=_EMPTY, delta_bytes=_EMPTY)


def _height(part: go.Figure) -> float:
    """Height of a timeline in lane heights."""
    bottom, top = part.layout.yaxis.range
    return float(bottom + top)


def _move(figure: go.Figure, part: go.Figure, word: str, offset: float, scale: float) -> None:
    """Adds a timeline's bars and the labels of its lanes, moved down and scaled to the common unit of time."""
    known = {trace.legendgroup for trace in figure.data}
    for bar in part.data:
        bar.base = np.asarray(bar.base, float) * scale
        bar.x = np.asarray(bar.x, float) * scale
        bar.customdata = bar.x
        bar.y = np.asarray(bar.y, float) + offset
        bar.hovertemplate = f"<b>{word}</b><br>%{{hovertext}}<extra></extra>"
        bar.showlegend = bar.legendgroup not in known
        known.add(bar.legendgroup)
        figure.add_trace(bar)
    for note in part.layout.annotations:
        if note.yref == "y":
            note.y += offset
            figure.add_annotation(note)
    for shape in part.layout.shapes:
        if shape.yref in (None, "y"):
            shape.update(y0=shape.y0 + offset, y1=shape.y1 + offset)
            figure.add_shape(shape)


def _add_word(figure: go.Figure, word: str, top: float, colours: Palette) -> None:
    """Which timeline it is, above it."""
    figure.add_annotation(
        text=f"<b>{word}</b>",
        x=0,
        xref="paper",
        xanchor="left",
        y=top - 0.08,
        yanchor="bottom",
        showarrow=False,
        font={"size": 13, "color": colours.text},
    )


def _add_end(figure: go.Figure, step_ns: int, unit: TimeUnit, edges: tuple[float, float], colours: Palette) -> None:
    """A dashed line where a timeline's step ends."""
    (top, bottom), end = edges, step_ns / unit.ns
    line = {"color": colours.faint, "width": 1.2, "dash": "dash"}
    figure.add_shape(type="line", x0=end, x1=end, y0=top, y1=bottom, line=line)
    figure.add_annotation(
        text=step_text(step_ns),
        x=end,
        xanchor="right",
        y=top - 0.08,
        yanchor="bottom",
        showarrow=False,
        font={"size": 11, "color": colours.faint},
    )


def _lay_out(  # noqa: PLR0917 - all of them are geometry
    figure: go.Figure,
    parts: Sequence[go.Figure],
    offsets: Sequence[float],
    total: float,
    unit: TimeUnit,
    colours: Palette,
    bars: int,
) -> None:
    first = parts[0].layout
    lanes_px = sum(part.layout.height - part.layout.margin.t - part.layout.margin.b for part in parts) + 54
    below_px = _BETWEEN_PX + _BAR_PX * bars if bars else 0
    plot_px = lanes_px + below_px
    axis = first.yaxis.to_plotly_json()
    axis |= {
        "domain": [below_px / plot_px, 1.0],
        "range": [total + 0.05, -_HEADROOM],
        "tickvals": [v + o for part, o in zip(parts, offsets, strict=True) for v in part.layout.yaxis.tickvals or ()],
        "ticktext": [text for part in parts for text in part.layout.yaxis.ticktext or ()],
    }
    figure.update_layout(
        template=colours.template,
        paper_bgcolor=colours.surface,
        plot_bgcolor=colours.surface,
        font=first.font,
        barmode="overlay",
        dragmode="pan",
        hovermode="closest",
        hoverlabel=first.hoverlabel,
        height=round(plot_px + _TOP_PX + _BOTTOM_PX),
        margin={"l": max(part.layout.margin.l for part in parts), "r": 28, "t": _TOP_PX, "b": _BOTTOM_PX, "pad": 4},
        legend={**first.legend.to_plotly_json(), "y": 1.0 + 26 / plot_px},
        xaxis={
            **first.xaxis.to_plotly_json(),
            "title": {"text": f"time ({unit.name})", "standoff": 8},
            "anchor": "y",
        },
        yaxis=axis,
    )
    if bars:
        figure.update_layout(yaxis2={"domain": [0.0, _BAR_PX * bars / plot_px]})


def _add_differences(figure: go.Figure, shown: Sequence[Difference], colours: Palette) -> None:
    """A bar per operation on axes of its own: measured less predicted time, with the signed error beside it."""
    unit = time_unit(max(abs(d.measured_ns - d.predicted_ns) for d in shown))
    names = [escape(d.name) for d in shown]
    figure.add_bar(
        orientation="h",
        x=[(d.measured_ns - d.predicted_ns) / unit.ns for d in shown],
        y=names,
        xaxis="x2",
        yaxis="y2",
        width=0.7,
        marker={
            "color": [colours.alarm if d.measured_ns > d.predicted_ns else colours.kinds["forward"] for d in shown]
        },
        text=[f"{d.error:+.0%}" for d in shown],
        textposition="auto",
        textangle=0,
        name="measured − predicted",
        showlegend=False,
        hovertext=[
            f"<b>{name}</b>  {d.error:+.1%}<br>predicted {format_time(d.predicted_ns * 1e-9)}, measured "
            f"{format_time(d.measured_ns * 1e-9)}<br>{d.count:,} span{'s' if d.count != 1 else ''} of all ranks"
            for name, d in zip(names, shown, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    axis: dict[str, Any] = {"gridcolor": colours.line, "zeroline": True, "zerolinecolor": colours.faint}
    figure.update_layout(
        xaxis2={
            **axis,
            "anchor": "y2",
            "title": {
                "text": f"measured − predicted ({unit.name}), with the prediction's signed error",
                "standoff": 8,
            },
        },
        yaxis2={
            "anchor": "x2",
            "showgrid": False,
            "fixedrange": True,
            "automargin": True,
            "tickfont": {"size": 10, "color": colours.faint},
        },
    )


def _add_heading(figure: go.Figure, title: str, subtitle: str, colours: Palette) -> None:
    figure.update_layout(
        title={
            "text": f"<b>{escape(title)}</b>" if title else "",
            "x": 0,
            "xanchor": "left",
            "xref": "container",
            "y": 1,
            "yanchor": "top",
            "yref": "container",
            "pad": {"l": 14, "t": 14},
            "font": {"size": 18},
            "subtitle": {"text": subtitle, "font": {"size": 12, "color": colours.faint}},
        }
    )
