"""The timeline: what every lane did when, as a plotly figure, with the memory that each stage holds below it.

Bars lie on a numeric time axis and on a numeric lane axis, so that each rectangle is where it is said to be.
(A date axis and ``plotly.express.timeline`` round to whole milliseconds, which hides most spans of a step.)
"""

from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from simpar.trace.trace import COMPUTE_KINDS, KERNEL_KINDS, KINDS, FloatColumn, Lane, Spans, Trace
from simpar.view.hover import TimeUnit, hover_texts, pixel_text, step_text, time_unit
from simpar.view.level_of_detail import (
    IDLE,
    PLOT_PIXELS,
    Rectangles,
    extent_ns,
    finest_spans,
    join_pieces,
    to_rectangles,
)
from simpar.view.memory_row import add_memory
from simpar.view.page import CONFIG, write_page
from simpar.view.palette import IDLE_NAME, Palette, label, palette, readable_on

MAX_LABELS = 1500
"""Numbers drawn inside bars, at most: text costs the browser far more than the bar around it."""

_FONT = "system-ui, sans-serif"
_COMPUTE_HEIGHT, _STREAM_HEIGHT, _GROUP_GAP, _FILL = 1.0, 0.55, 0.35, 0.92  # in lane heights
_HEADER_PX, _MEMORY_PX, _BETWEEN_PX, _FOOTER_PX = 106, 150, 46, 56
_SMALL_CHARACTER_PX = 5.9
_STREAM_ORDER = ("compute", "tp", "cp", "ep", "pp", "dp")
_OUTLINED_FROM_PX, _LABEL_PX, _DIGIT_PX = 5.0, 9.0, 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Where the lanes lie, in lane heights from the top; lanes without spans have no place (NaN)."""

    top: FloatColumn
    height: FloatColumn
    groups: tuple[tuple[int, float, float], ...]  # first lane, top and bottom of each rank that is drawn
    total: float

    @property
    def unit_px(self) -> float:
        """Pixels per lane height: roomy for few ranks, dense for many."""
        return float(np.clip(900 / self.total, 17.0, 30.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """All that the parts of the figure are drawn from."""

    trace: Trace
    spans: Spans
    rectangles: Rectangles
    rows: _Rows
    end_ns: int
    unit: TimeUnit
    colours: Palette

    def pixels(self, duration_ns: npt.ArrayLike) -> FloatColumn:
        """Width on a plot of the usual size, zoomed out."""
        return np.asarray(duration_ns) * (PLOT_PIXELS / self.end_ns)


def timeline(
    trace: Trace,
    *,
    title: str = "",
    subtitle: str = "",
    dark: bool = False,
    budget: int = 5000,
    memory_capacity_bytes: float | None = None,
    kernels: bool = False,
) -> go.Figure:
    """Draws ``trace``: lanes by pipeline stage from top to bottom, a bar per span, a colour per kind.

    Args:
        trace: what to draw.
        title: heading.
        subtitle: start of the second line, before the number of spans and the time that one pixel shows.
        dark: dark instead of light surfaces.
        budget: bars at most, if there are more spans than that: short neighbours are then merged into stacks
            in which the area of a kind is its busy time (:mod:`simpar.view.level_of_detail`).
        memory_capacity_bytes: capacity of a device, drawn as a line in the memory row.
        kernels: draw the kernels instead of the operations that they make up; for small jobs.

    Returns:
        A figure with one bar trace per kind; x is in µs, ms or s (the axis says which), y in lane heights.
    """
    spans = finest_spans(trace) if kernels else join_pieces(trace.spans)
    end_ns = extent_ns(trace, spans)
    drawing = _Drawing(
        trace=trace,
        spans=spans,
        rectangles=to_rectangles(spans, trace.lanes, end_ns=end_ns, budget=budget),
        rows=_rows(trace, spans),
        end_ns=end_ns,
        unit=time_unit(end_ns),
        colours=palette(dark),
    )
    figure = Timeline()
    _add_bars(figure, drawing)
    has_memory = len(trace.memory.time_ns) > 0
    _lay_out(figure, drawing, has_memory)
    if has_memory:
        add_memory(figure, trace, drawing.unit, drawing.colours, memory_capacity_bytes)
    _add_group_labels(figure, drawing)
    _add_step_end(figure, drawing)
    _add_heading(figure, drawing, title, subtitle)
    return figure


class Timeline(go.Figure):  # type: ignore[misc]  # plotly has no types
    """A figure whose files are whole: they need no network, and share nothing."""

    def write_html(self, file: Any, *args: Any, **kwargs: Any) -> None:
        """Writes one HTML file that opens anywhere; options of plotly's own ``write_html`` lead to plotly's page."""
        if args or kwargs:
            kwargs["config"] = {**CONFIG, **kwargs.get("config", {})}
            super().write_html(file, *args, **kwargs)
        else:
            write_timeline(self, file)

    def show(self, *args: Any, **kwargs: Any) -> None:
        """Shows the figure, without the button that sends it to a server."""
        kwargs["config"] = {**CONFIG, **kwargs.get("config", {})}
        super().show(*args, **kwargs)


def write_timeline(figure: go.Figure, path: str | Path) -> None:
    """Writes a timeline as one HTML file of some 2 MB that opens anywhere, without a network.

    Raises:
        OutputError: if the folder of ``path`` does not exist or the file cannot be written.
    """
    heading = unescape((figure.layout.title.text or "").removeprefix("<b>").removesuffix("</b>"))
    write_page(figure, path, title=heading or "simpar timeline")


def _rows(trace: Trace, spans: Spans) -> _Rows:
    """Places for the lanes that have spans: by stage, by rank, then compute before the communicators."""
    lanes = trace.lanes
    top, height = np.full(len(lanes), np.nan), np.full(len(lanes), np.nan)
    used = sorted(
        np.unique(spans.lane).tolist(),
        key=lambda i: (lanes[i].stage, lanes[i].rank, _stream_place(lanes[i].stream), i),
    )
    groups: list[tuple[int, float, float]] = []
    y = 0.0
    for lane in used:
        if not groups or lanes[groups[-1][0]].rank != lanes[lane].rank:
            y += _GROUP_GAP if groups else 0.0
            groups.append((lane, y, y))
        top[lane] = y
        height[lane] = _COMPUTE_HEIGHT if lanes[lane].stream == "compute" else _STREAM_HEIGHT
        y += float(height[lane])
        groups[-1] = (*groups[-1][:2], y)
    return _Rows(top=top, height=height, groups=tuple(groups), total=max(y, _COMPUTE_HEIGHT))


def _stream_place(stream: str) -> int:
    """Order of the lanes of a rank, by the communicator that a name such as ``pp_forward`` starts with."""
    family = stream.partition("_")[0]
    return _STREAM_ORDER.index(family) if family in _STREAM_ORDER else len(_STREAM_ORDER)


def _who(lane: Lane) -> str:
    return f"GPU {lane.rank}" + (f" ×{lane.replicas:,} equal" if lane.replicas > 1 else "")


def _left_px(drawing: _Drawing) -> int:
    """Room for the longest GPU label and the longest stream name beside each other."""
    lanes = [lane for lane, top in zip(drawing.trace.lanes, drawing.rows.top, strict=True) if np.isfinite(top)]
    who = max((len(_who(lane)) for lane in lanes), default=0)
    stream = max((len(lane.stream) for lane in lanes), default=0)
    return round(36 + _SMALL_CHARACTER_PX * (max(who, len("stage 00")) + stream))


def _add_bars(figure: go.Figure, drawing: _Drawing) -> None:
    """One bar trace per kind; idle time comes first, so that it lies beneath."""
    drawn, rows, unit = drawing.rectangles, drawing.rows, drawing.unit
    labels = _labels(drawing)
    texts = np.array(hover_texts(drawing.trace, drawing.spans, drawn, unit), dtype=object)
    for kind in (IDLE, *range(len(KINDS))):
        of_kind = np.flatnonzero(drawn.kind == kind)
        if not len(of_kind):
            continue
        part = drawn.take(of_kind)
        name = IDLE_NAME if kind == IDLE else KINDS[kind]
        colour = drawing.colours.kinds[name]
        fill = rows.height[part.lane] * _FILL
        middle = rows.top[part.lane] + rows.height[part.lane] / 2
        width_px = drawing.pixels(part.duration_ns)
        # A hairline parts wide neighbours of one colour; on narrow bars it would eat the bar.
        outlined = (part.span >= 0) & (width_px >= _OUTLINED_FROM_PX)
        figure.add_bar(
            orientation="h",
            base=part.start_ns / unit.ns,
            x=part.duration_ns / unit.ns,
            y=middle + fill * (0.5 - part.bottom - part.height / 2),  # y grows downward
            width=fill * part.height,
            name=label(name),
            legendgroup=name,
            legendrank=2000 if kind == IDLE else 1000 + kind,
            marker={
                "color": colour,
                "line": {"color": drawing.colours.surface, "width": np.where(outlined, 0.8, 0.0)},
            },
            customdata=part.duration_ns / unit.ns,  # %{x} of a bar with a base is its end, not its length
            hovertext=texts[of_kind].tolist(),
            hovertemplate="%{hovertext}<extra></extra>",
            **_text_options(labels[of_kind], width_px, readable_on(colour)),
        )


def _text_options(labels: npt.NDArray[np.object_], width_px: FloatColumn, colour: str) -> dict[str, Any]:
    """Text per bar only where there is any: the browser measures every text that it is given."""
    digits = np.array([len(text) for text in labels], dtype=np.int64)
    if not digits.any():
        return {"textposition": "none"}
    return {
        "text": labels.tolist(),
        "textposition": np.where(digits > 0, "inside", "none").tolist(),
        "insidetextanchor": "middle",
        "textangle": 0,
        # Else plotly keeps 3 px free on each side and shrinks the number beyond reading.
        "constraintext": "none",
        "textfont": {
            "size": np.clip((width_px - 1.5) / (0.6 * np.maximum(digits, 1)), 7, 11),
            "color": colour,
        },
    }


def _labels(drawing: _Drawing) -> npt.NDArray[np.object_]:
    """Microbatch numbers of the compute bars that are wide enough, the widest if they are many; else ''."""
    drawn = drawing.rectangles
    labels = np.full(len(drawn), "", dtype=object)
    numbered = [KINDS.index(kind) for kind in (*COMPUTE_KINDS, *KERNEL_KINDS)]
    rows = np.flatnonzero((drawn.span >= 0) & np.isin(drawn.kind, numbered))
    microbatch = drawing.spans.microbatch[drawn.span[rows]]
    more_digits = np.floor(np.log10(np.maximum(microbatch, 1)))
    wide = (microbatch >= 0) & (drawing.pixels(drawn.duration_ns[rows]) >= _LABEL_PX + _DIGIT_PX * more_digits)
    rows, microbatch = rows[wide], microbatch[wide]
    widest = np.argsort(-drawn.duration_ns[rows], kind="stable")[:MAX_LABELS]
    labels[rows[widest]] = [str(number) for number in microbatch[widest]]
    return labels


def _lay_out(figure: go.Figure, drawing: _Drawing, has_memory: bool) -> None:
    rows, unit, colours, lanes = drawing.rows, drawing.unit, drawing.colours, drawing.trace.lanes
    below_px = _MEMORY_PX + _BETWEEN_PX if has_memory else 0
    plot_px = rows.total * rows.unit_px + below_px
    end = drawing.end_ns / unit.ns
    shown = [lane for lane in range(len(lanes)) if np.isfinite(rows.top[lane])]
    figure.update_layout(
        template=colours.template,
        paper_bgcolor=colours.surface,
        plot_bgcolor=colours.surface,
        font={"color": colours.text, "family": _FONT, "size": 12},
        barmode="overlay",
        dragmode="pan",
        hovermode="closest",
        hoverlabel={"align": "left", "namelength": -1, "font": {"family": _FONT, "size": 12}},
        height=round(plot_px + _HEADER_PX + _FOOTER_PX),
        margin={"l": _left_px(drawing), "r": 28, "t": _HEADER_PX, "b": _FOOTER_PX, "pad": 4},
        legend={**_legend(1.0, 12, colours.text), "itemsizing": "constant"},
        xaxis={
            "title": {"text": f"time ({unit.name})", "standoff": 8},
            "range": [-0.004 * end, 1.012 * end],
            "minallowed": -0.05 * end,
            "maxallowed": 1.06 * end,
            "anchor": "y2" if has_memory else "y",
            "gridcolor": colours.line,
            "zeroline": False,
            "exponentformat": "none",
            "separatethousands": True,
        },
        yaxis={
            "domain": [below_px / plot_px, 1.0],
            "range": [rows.total + 0.05, -0.05],
            "tickvals": [float(rows.top[lane] + rows.height[lane] / 2) for lane in shown],
            "ticktext": [lanes[lane].stream.replace("_", " ") for lane in shown],
            "tickfont": {"size": 10, "color": colours.faint},
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
    )
    if has_memory:
        top = _MEMORY_PX / plot_px
        figure.update_layout(yaxis2={"domain": [0.0, top]}, legend2=_legend(top, 11, colours.faint))


def _legend(y: float, size: int, colour: str) -> dict[str, Any]:
    """A legend in a row above a panel whose upper edge is at ``y``."""
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": y,
        "yref": "paper",
        "yanchor": "bottom",
        "font": {"size": size, "color": colour},
    }


def _add_group_labels(figure: go.Figure, drawing: _Drawing) -> None:
    """Stage and GPU at the left of each group of lanes, and a thin line above it."""
    rows, colours = drawing.rows, drawing.colours
    small = f"color:{colours.faint};font-size:10px"
    for index, (first, top, bottom) in enumerate(rows.groups):
        lane = drawing.trace.lanes[first]
        apart = "<br>" if (bottom - top) * rows.unit_px >= 28 else "  "
        figure.add_annotation(
            text=f"<b>stage {lane.stage}</b>{apart}<span style='{small}'>{_who(lane)}</span>",
            x=0,
            xref="paper",
            xanchor="left",
            xshift=14 - figure.layout.margin.l,
            y=(top + bottom) / 2,
            yref="y",
            yanchor="middle",
            align="left",
            showarrow=False,
        )
        if index:
            y = top - _GROUP_GAP / 2
            line = {"color": colours.line, "width": 1}
            figure.add_shape(type="line", x0=0, x1=1, xref="paper", y0=y, y1=y, line=line, layer="below")
    if not rows.groups:
        figure.add_annotation(text="this trace has no spans", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)


def _add_step_end(figure: go.Figure, drawing: _Drawing) -> None:
    """A dashed line where the step ends, through all panels."""
    if drawing.trace.step_ns <= 0:
        return
    end, faint = drawing.trace.step_ns / drawing.unit.ns, drawing.colours.faint
    line = {"color": faint, "width": 1.2, "dash": "dash"}
    figure.add_shape(type="line", x0=end, x1=end, y0=0, y1=1, yref="paper", line=line)
    figure.add_annotation(
        text=step_text(drawing.trace.step_ns),
        x=end,
        y=1,
        yref="paper",
        xanchor="right",
        yanchor="bottom",
        showarrow=False,
        font={"size": 11, "color": faint},
    )


def _add_heading(figure: go.Figure, drawing: _Drawing, title: str, subtitle: str) -> None:
    count, bars = len(drawing.spans), int((drawing.rectangles.kind != IDLE).sum())
    counts = f"{count:,} span{'s' if count != 1 else ''}"
    if bars != count:
        counts += f" drawn as {bars:,} bars"
    counts += f", {pixel_text(drawing.end_ns, PLOT_PIXELS)}"
    figure.update_layout(
        title={
            "text": f"<b>{title}</b>" if title else "",
            "x": 0,
            "xanchor": "left",
            "xref": "container",
            "y": 1,
            "yanchor": "top",
            "yref": "container",
            "pad": {"l": 14, "t": 14},
            "font": {"size": 18},
            "subtitle": {
                "text": " · ".join(text for text in (subtitle, counts) if text),
                "font": {"size": 12, "color": drawing.colours.faint},
            },
        }
    )
