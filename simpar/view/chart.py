"""A chart of a few named series: lines over what grows, or bars side by side or stacked. Scenarios end with one."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import wrap
from typing import Literal

import plotly.graph_objects as go

from simpar.errors import JobError
from simpar.view.page import write_page
from simpar.view.palette import palette

Number = int | float | None
Form = Literal["lines", "bars", "stack"]
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
_DASHES = ("solid", "dash", "dot")
_HEIGHT = 640
_LINE_OF_TITLE = 18  # pixels
_WIDTH = 150  # characters of a line of the answer
_LONG_LABEL = 14  # characters, from which on a label of the axis breaks at its commas


def chart(
    series: Mapping[str, Mapping[str, Number]],
    *,
    title: str,
    answer: str = "",
    across: str,
    value: str,
    form: Form = "lines",
    dark: bool = False,
) -> go.Figure:
    """Draws series; a number that is None is a gap.

    Args:
        series: by name, numbers by what stands on the horizontal axis, in the order in which they are to stand there.
        title: the question.
        answer: what the numbers say; stands below the title.
        across: label of the horizontal axis.
        value: label of the vertical axis, with its unit.
        form: lines with markers, bars side by side, or bars on top of each other.
        dark: dark instead of light surfaces.

    Raises:
        JobError: there is no number to draw.
    """
    if not any(number is not None for numbers in series.values() for number in numbers.values()):
        raise JobError(f"no series of '{title}' has a number, so there is nothing to draw; give one or more")
    colours = palette(dark)
    tones = list(colours.memory.values())
    lines = [part for line in answer.splitlines() for part in wrap(line, _WIDTH)]
    names = list(dict.fromkeys(name for numbers in series.values() for name in numbers))
    figure = go.Figure()
    for number, (name, numbers) in enumerate(series.items()):
        tone = tones[number % len(tones)]
        common = {"name": name, "x": list(numbers), "y": list(numbers.values()), "hovertemplate": "%{y:.4g}"}
        if form == "lines":
            figure.add_scatter(
                **common,
                mode="lines+markers",
                line={"color": tone, "dash": _DASHES[number // len(tones) % len(_DASHES)]},
                marker={"size": 9, "symbol": _SYMBOLS[number % len(_SYMBOLS)]},
            )
        else:
            figure.add_bar(**common, marker={"color": tone})
    figure.update_layout(
        template=colours.template,
        paper_bgcolor=colours.surface,
        plot_bgcolor=colours.surface,
        font={"color": colours.text, "size": 14},
        height=_HEIGHT + _LINE_OF_TITLE * len(lines),
        margin={"t": 70 + _LINE_OF_TITLE * len(lines), "r": 30},
        title={"text": title, "x": 0, "xref": "paper", "y": 1, "yanchor": "top", "pad": {"t": 20}},
        barmode="stack" if form == "stack" else "group",
        xaxis={"title": across, "type": "category", "tickvals": names, "ticktext": [_broken(name) for name in names]},
        yaxis={"title": value, "rangemode": "tozero"},
        showlegend=len(series) > 1,
        hovermode="x unified",
    )
    if lines:
        figure.add_annotation(
            text="<br>".join(lines),
            xref="paper",
            yref="paper",
            x=0,
            y=1,
            xanchor="left",
            yanchor="bottom",
            yshift=12,
            align="left",
            showarrow=False,
        )
    return figure


def _broken(label: str) -> str:
    return label.replace(", ", ",<br>") if len(label) > _LONG_LABEL else label


def write_chart(
    path: str | Path,
    series: Mapping[str, Mapping[str, Number]],
    *,
    title: str,
    answer: str = "",
    across: str,
    value: str,
    form: Form = "lines",
) -> None:
    """Writes :func:`chart` as one HTML file that needs no network.

    Raises:
        JobError: there is no number to draw.
        OutputError: the file cannot be written.
    """
    write_page(chart(series, title=title, answer=answer, across=across, value=value, form=form), path, title=title)
