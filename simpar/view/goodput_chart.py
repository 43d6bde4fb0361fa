"""Goodput over the interval between checkpoints: simulated runs, Daly's closed form, and the optima."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from simpar.units import format_duration
from simpar.view.page import write_page
from simpar.view.palette import palette

if TYPE_CHECKING:
    from simpar.reliability.goodput import Goodput

_HEIGHT = 620
_TICKS_S = (1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800)


def goodput_chart(found: "Goodput", *, title: str = "", dark: bool = False) -> go.Figure:
    """Draws how much of the time trains against how seldom a checkpoint is written.

    Args:
        found: the simulated runs.
        title: of the job.
        dark: dark instead of light surfaces.
    """
    colours = palette(dark)
    points = found.points
    across = [point.interval_s for point in points]
    words = [format_duration(x) for x in across]
    figure = go.Figure()
    figure.add_trace(
        go.Scatter(
            x=across,
            y=[point.expected for point in points],
            customdata=words,
            name="Daly's formula",
            mode="lines",
            line={"color": colours.faint, "dash": "dash"},
            hovertemplate="%{y:.2%}",
        )
    )
    figure.add_trace(
        go.Scatter(
            x=across,
            y=[point.goodput for point in points],
            customdata=[[f"{p.low:.2%}", f"{p.high:.2%}", word] for p, word in zip(points, words, strict=True)],
            name=f"simulated, {len(found.runs)} runs of {found.failures.days:g} days",
            mode="lines+markers",
            line={"color": colours.accent},
            marker={"size": 8},
            error_y={
                "color": colours.accent,
                "thickness": 1,
                "array": [point.high - point.goodput for point in points],
                "arrayminus": [point.goodput - point.low for point in points],
            },
            hovertemplate="%{y:.2%} (%{customdata[0]} to %{customdata[1]}) every %{customdata[2]}",
        )
    )
    marks = (("Daly", found.daly_s, 0.0, "left"), ("best simulated", found.best.interval_s, 1.0, "right"))
    for name, at, height, anchor in marks:
        figure.add_vline(x=at, line={"color": colours.faint, "width": 1, "dash": "dot"})
        figure.add_annotation(
            x=math.log10(at),  # where an axis is logarithmic, annotations want the logarithm and shapes do not
            y=height,
            yref="paper",
            yanchor="bottom" if height == 0 else "top",
            xanchor=anchor,
            xshift=6 if anchor == "left" else -6,
            text=f"{name}: {format_duration(at)}",
            showarrow=False,
        )
    ticks = [x for x in _TICKS_S if across[0] <= x <= across[-1]]
    failures = found.failures
    figure.update_layout(
        template=colours.template,
        paper_bgcolor=colours.surface,
        plot_bgcolor=colours.surface,
        font={"color": colours.text, "size": 14},
        height=_HEIGHT,
        margin={"t": 110, "r": 30},
        title={
            "text": f"{title}<br><sup>a failure every {format_duration(failures.mtbf_s)} · checkpoints of "
            f"{format_duration(failures.checkpoint_s)} · restarts of {format_duration(failures.restart_s)}</sup>"
        },
        xaxis={
            "title": "training between two checkpoints",
            "type": "log",
            "tickvals": ticks,
            "ticktext": [format_duration(x) for x in ticks],
        },
        yaxis={"title": "goodput", "tickformat": ".0%"},
        legend={"orientation": "h", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "bottom"},
        hovermode="x unified",
    )
    return figure


def write_goodput(found: "Goodput", path: str | Path, *, title: str = "") -> None:
    """Writes the chart as one HTML file that needs no network.

    Raises:
        OutputError: the file cannot be written.
    """
    write_page(goodput_chart(found, title=title), path, title="simpar goodput")
