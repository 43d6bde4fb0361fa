"""The frame of a timeline figure: panels, axes, legends, the names of the lanes, and the heading."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from simpar.trace.trace import Lane
from simpar.view.hover import TimeUnit
from simpar.view.palette import Palette
from simpar.view.rows import Rows, role, who

FONT = "system-ui, sans-serif"
_HEADER_PX, _FOOTER_PX = 132, 56
_SMALL_CHARACTER_PX = 5.9
_BETWEEN_PX = 46
HIGHEST = -0.05
"""Upper end of the lane axis in lane heights; plotly hides a text whose place lies beyond it."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A row below the lanes.

    Attributes:
        axis: number of its y axis and legend, as plotly writes it.
        height_px: without what lies between the panels.
    """

    axis: str
    height_px: int


def lay_out(  # noqa: PLR0917 - all of them are geometry
    figure: go.Figure,
    lanes: tuple[Lane, ...],
    rows: Rows,
    panels: tuple[Panel, ...],
    unit: TimeUnit,
    end_ns: int,
    colours: Palette,
    *,
    above_px: int = 0,
) -> None:
    """Sets axes, margins and legends; panels lie below the lanes in the given order, texts in ``above_px`` above."""
    below_px = sum(panel.height_px + _BETWEEN_PX for panel in panels)
    plot_px = rows.total * rows.unit_px + below_px
    end = end_ns / unit.ns
    shown = [lane for lane in range(len(lanes)) if np.isfinite(rows.top[lane])]
    figure.update_layout(
        template=colours.template,
        paper_bgcolor=colours.surface,
        plot_bgcolor=colours.surface,
        font={"color": colours.text, "family": FONT, "size": 12},
        barmode="overlay",
        dragmode="pan",
        hovermode="closest",
        hoverlabel={"align": "left", "namelength": -1, "font": {"family": FONT, "size": 12}},
        height=round(plot_px + above_px + _HEADER_PX + _FOOTER_PX),
        margin={"l": _left_px(lanes, rows), "r": 28, "t": above_px + _HEADER_PX, "b": _FOOTER_PX, "pad": 4},
        legend={**_legend(1.0 + above_px / plot_px, 12, colours.text), "itemsizing": "constant"},
        xaxis={
            "title": {"text": f"time ({unit.name})", "standoff": 8},
            "range": [-0.004 * end, 1.012 * end],
            "minallowed": -0.05 * end,
            "maxallowed": 1.06 * end,
            "anchor": f"y{panels[-1].axis}" if panels else "y",
            "gridcolor": colours.line,
            "zeroline": False,
            "exponentformat": "none",
            "separatethousands": True,
        },
        yaxis={
            "domain": [below_px / plot_px, 1.0],
            "range": [rows.total - HIGHEST, HIGHEST],
            "tickvals": [float(rows.top[lane] + rows.height[lane] / 2) for lane in shown],
            "ticktext": [rows.label(lanes, lane) for lane in shown],
            "tickfont": {"size": 10, "color": colours.faint},
            "fixedrange": True,
            "showgrid": False,
            "zeroline": False,
        },
    )
    top_px = below_px
    for panel in panels:
        top_px -= _BETWEEN_PX
        domain = [(top_px - panel.height_px) / plot_px, top_px / plot_px]
        figure.update_layout(
            {
                f"yaxis{panel.axis}": {"domain": domain, "anchor": "x"},
                f"legend{panel.axis}": _legend(domain[1], 11, colours.faint),
            }
        )
        top_px -= panel.height_px


def _left_px(lanes: tuple[Lane, ...], rows: Rows) -> int:
    """Room for the longest GPU label and the longest stream name beside each other."""
    shown = [lane for lane, top in zip(lanes, rows.top, strict=True) if np.isfinite(top)]
    longest = max((len(who(lane)) for lane in shown), default=0)
    stream = max((len(rows.label(lanes, i)) for i in np.flatnonzero(np.isfinite(rows.top)).tolist()), default=0)
    return round(36 + _SMALL_CHARACTER_PX * (max(longest, len("stage 00")) + stream))


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


def add_lane_names(figure: go.Figure, lanes: tuple[Lane, ...], rows: Rows, colours: Palette) -> None:
    """Stage and GPU at the left of each group of lanes, a thin line above it, and titles."""
    small = f"color:{colours.faint};font-size:10px"
    at_left = {"x": 0, "xref": "paper", "xanchor": "left", "align": "left", "showarrow": False, "yref": "y"}
    for index, group in enumerate(rows.groups):
        lane = lanes[group.lane]
        apart = "<br>" if (group.bottom - group.top) * rows.unit_px >= 28 else "  "
        figure.add_annotation(
            text=f"<b>{role(lane)}</b>{apart}<span style='{small}'>{who(lane)}</span>",
            xshift=14 - figure.layout.margin.l,
            y=(group.top + group.bottom) / 2,
            yanchor="middle",
            **at_left,
        )
        if index:
            y = rows.rules[index - 1]
            line = {"color": colours.line, "width": 1}
            figure.add_shape(type="line", x0=0, x1=1, xref="paper", y0=y, y1=y, line=line, layer="below")
    for title, top in rows.titles:
        figure.add_annotation(
            text=f"<b>{title}</b>", xshift=14 - figure.layout.margin.l, y=top, yanchor="top", **at_left
        )
    if not rows.groups:
        figure.add_annotation(text="this trace has no spans", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)


def add_heading(figure: go.Figure, title: str, subtitle: str, colours: Palette) -> None:
    """Title and second line at the upper left."""
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
            "subtitle": {"text": subtitle, "font": {"size": 12, "color": colours.faint}},
        }
    )
