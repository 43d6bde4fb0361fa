"""A sweep as a chart: one figure of the step over the first varied field, one line per combination of the others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from simpar.errors import JobError
from simpar.view.page import View, write_page
from simpar.view.palette import palette

_NAMES = {
    "step_time_s": "step time (s)",
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "mfu": "MFU",
    "memory_bytes": "peak memory (bytes)",
    "bubble_fraction": "bubble",
    "cost_per_step": "cost per step",
}
_HEIGHT = 620


def sweep_chart(
    rows: Sequence[Mapping[str, Any]], varied: Sequence[str], *, value: str = "step_time_s", dark: bool = False
) -> go.Figure:
    """Draws a sweep; rows without the figure (because they broke a rule) are gaps, rows that do not fit are hollow.

    Args:
        rows: records of a sweep.
        varied: paths of the varied fields; the first one is the horizontal axis.
        value: the column to draw; step times come with their interval.
        dark: dark instead of light surfaces.

    Raises:
        JobError: no row has that figure.
    """
    if not any(isinstance(row.get(value), (int, float)) for row in rows):
        known = ", ".join(dict.fromkeys(key for row in rows for key, v in row.items() if isinstance(v, (int, float))))
        raise JobError(f"no row has a number in '{value}', so there is nothing to plot; take one of {known or 'none'}")
    colours = palette(dark)
    across, *others = varied
    ticks = list(dict.fromkeys(str(row[across]) for row in rows))
    lines: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault(" · ".join(f"{path.rpartition('.')[2]}={row[path]}" for path in others), []).append(row)
    lines = {name: members for name, members in lines.items() if any(row.get(value) is not None for row in members)}
    figure = View()
    for number, (name, members) in enumerate(lines.items()):
        colour = colours.ramp_at(number / max(len(lines) - 1, 1)) if len(lines) > 1 else colours.accent
        figure.add_trace(_line(name, members, across, value, colour))
    figure.update_layout(
        template=colours.template,
        paper_bgcolor=colours.surface,
        plot_bgcolor=colours.surface,
        font={"color": colours.text, "size": 14},
        height=_HEIGHT,
        margin={"t": 60, "r": 30},
        xaxis={"title": across, "type": "category", "categoryorder": "array", "categoryarray": ticks},
        yaxis={"title": _NAMES.get(value, value), "rangemode": "tozero"},
        showlegend=bool(others),
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        hovermode="x unified",
    )
    return figure


def _line(name: str, members: Sequence[Mapping[str, Any]], across: str, value: str, colour: str) -> go.Scatter:
    # parallel degrees and link rates grow by factors: even steps between what was asked for
    timed = value == "step_time_s"
    return go.Scatter(
        x=[str(row[across]) for row in members],
        y=[row.get(value) for row in members],
        name=name,
        mode="lines+markers",
        line={"color": colour},
        marker={"size": 9, "symbol": ["circle" if row.get("fits", True) else "circle-open" for row in members]},
        text=["" if row.get("fits", True) else "does not fit in memory" for row in members],
        hovertemplate="%{y:.4g} %{text}",
        error_y={
            "visible": timed,
            "color": colour,
            "thickness": 1,
            "array": [_off(row, "high_s", 1) for row in members],
            "arrayminus": [_off(row, "low_s", -1) for row in members],
        },
    )


def _off(row: Mapping[str, Any], end: str, sign: int) -> float:
    return sign * (row[end] - row["step_time_s"]) if end in row and row[end] is not None else 0.0


def write_sweep(
    rows: Sequence[Mapping[str, Any]], varied: Sequence[str], path: str | Path, *, value: str = "step_time_s"
) -> None:
    """Writes the chart as one HTML file that needs no network.

    Raises:
        JobError: no row has that figure.
        OutputError: the file cannot be written.
    """
    write_page(sweep_chart(rows, varied, value=value), path, title="simpar sweep")
