"""The timeline: what every lane did when, as a plotly figure, with links and memory below it.

Bars lie on a numeric time axis and on a numeric lane axis, so that each rectangle is where it is said to be.
(A date axis and ``plotly.express.timeline`` round to whole milliseconds, which hides most spans of a step.)
A file of the figure is a page of its own (:mod:`simpar.view.timeline_page`) that holds every span.
"""

from collections.abc import Mapping
from html import unescape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from simpar.trace.bubbles import compute_lanes
from simpar.trace.trace import Trace
from simpar.view.bars import Drawing, add_bars, add_path
from simpar.view.hover import pixel_text, step_text, time_unit
from simpar.view.layout import Panel, add_heading, add_lane_names, lay_out
from simpar.view.level_of_detail import IDLE, PLOT_PIXELS, to_rectangles
from simpar.view.link_row import add_links, has_links
from simpar.view.marker import add_step_end
from simpar.view.memory_row import add_memory
from simpar.view.page import View, write_page
from simpar.view.palette import palette
from simpar.view.rows import Rows, place
from simpar.view.scene import Scene, scene
from simpar.view.timeline_page import Contents, Step, memory_of, write_contents

_LINK_PX, _MEMORY_PX = 70, 150


def timeline(
    trace: Trace,
    *,
    title: str = "",
    subtitle: str = "",
    headline: Mapping[str, str] | None = None,
    dark: bool = False,
    budget: int = 5000,
    memory_capacity_bytes: float | None = None,
    kernels: bool = False,
) -> go.Figure:
    """Draws ``trace``: lanes by pipeline, stage and stream from top to bottom, a bar per span, a colour per kind.

    Args:
        trace: what to draw.
        title: heading.
        subtitle: start of the second line, before the number of spans and the time that one pixel shows.
        headline: main figures by name, for the second line; the page sets them apart.
        dark: dark instead of light surfaces; its page opens light only where the reader's system prefers that, too.
        budget: bars at most: short neighbours are merged into stacks in which the area of a kind is its time
            (:mod:`simpar.view.level_of_detail`).
        memory_capacity_bytes: capacity of a device, drawn as a line in the memory row.
        kernels: draw kernels instead of operations, where they are wide enough.

    Returns:
        A figure with one bar trace per kind; x is in µs, ms or s (the axis says which), y in lane heights.
    """
    shown = scene(trace)
    colours, unit = palette(dark), time_unit(shown.end_ns)
    rows = place(shown.lanes, shown.used)
    drawing = Drawing(
        shown=shown,
        rectangles=to_rectangles(
            shown.operations,
            shown.kernels,
            end_ns=shown.end_ns,
            budget=budget,
            expand=compute_lanes(trace) if kernels else (),
        ),
        rows=rows,
        unit=unit,
        colours=colours,
    )
    figure = Timeline()
    add_bars(figure, drawing)
    add_path(figure, drawing)
    links, memory = has_links(shown), len(trace.memory.time_ns) > 0
    panels = (*((Panel("3", _LINK_PX),) if links else ()), *((Panel("2", _MEMORY_PX),) if memory else ()))
    lay_out(figure, shown.lanes, rows, panels, unit, shown.end_ns, colours)
    if links:
        add_links(figure, shown, unit, colours, axis="3")
    if memory:
        add_memory(figure, trace, unit, colours, memory_capacity_bytes, axis="2")
    add_lane_names(figure, shown.lanes, rows, colours)
    add_step_end(figure, trace.step_ns, unit, colours)
    told = " · ".join(f"{name} {value}" for name, value in (headline or {}).items())
    second = " · ".join(text for text in (subtitle, told, _count_text(drawing)) if text)
    add_heading(figure, title, second, colours)
    figure.carry(
        page_contents(
            trace,
            shown,
            rows,
            subtitle=subtitle,
            headline=headline or {},
            memory_capacity_bytes=memory_capacity_bytes,
            dark=dark or None,
        )
    )
    return figure


def page_contents(
    trace: Trace,
    shown: Scene,
    rows: Rows,
    *,
    subtitle: str = "",
    headline: Mapping[str, str],
    memory_capacity_bytes: float | None,
    dark: bool | None = None,
) -> Contents:
    """What the page of one trace shows; arguments as in :func:`timeline`, with the scene and its places.

    Where ``dark`` is None, the reader's system decides.
    """
    step = Step(at_ns=trace.step_ns, text=step_text(trace.step_ns), top=0.0, bottom=rows.total)
    return Contents(
        shown=shown,
        rows=rows,
        steps=(step,) if trace.step_ns > 0 else (),
        notes=(subtitle,) if subtitle else (),
        headline=headline,
        memory=memory_of(trace, memory_capacity_bytes),
        dark=dark,
    )


class Timeline(View):
    """A figure whose page holds every span."""

    _contents: Contents | None = None

    def carry(self, contents: Contents) -> None:
        """Gives the figure all spans, for its page."""
        self._contents = contents

    def write_html(self, file: Any, *args: Any, **kwargs: Any) -> None:
        """Writes one HTML file that opens anywhere and holds every span.

        Options of plotly's own ``write_html`` lead to plotly's page of the figure as it is.
        """
        if args or kwargs:
            super().write_html(file, *args, **kwargs)
        else:
            write_timeline(self, file)

    @property
    def contents(self) -> Contents | None:
        """All spans, if the figure carries them."""
        return self._contents


def write_timeline(figure: go.Figure, path: str | Path) -> None:
    """Writes a timeline as one HTML file that opens anywhere, without a network.

    Raises:
        OutputError: if the folder of ``path`` does not exist or the file cannot be written.
    """
    heading = unescape((figure.layout.title.text or "").removeprefix("<b>").removesuffix("</b>"))
    title = heading or "simpar timeline"
    contents = figure.contents if isinstance(figure, Timeline) else None
    if contents is None:
        write_page(figure, path, title=title)
    else:
        write_contents(contents, path, title=title)


def _count_text(drawing: Drawing) -> str:
    count, bars = drawing.shown.spans, int((drawing.rectangles.kind < IDLE).sum())
    counts = f"{count:,} span{'s' if count != 1 else ''}"
    if bars != count:
        counts += f" drawn as {bars:,} bars"
    return f"{counts}, {pixel_text(drawing.shown.end_ns, PLOT_PIXELS)}"
