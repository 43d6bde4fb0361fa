"""Plans as lines over parallel axes, one for each field in which they differ and for each figure.

Drawn as plain lines: plotly's own parallel coordinates need WebGL, which headless browsers and remote
desktops often lack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from simpar.units import GIB
from simpar.view.figure import dress
from simpar.view.page import View
from simpar.view.palette import Palette, palette
from simpar.view.search_plots import plan_fields, plan_hover, with_figures

_STEPS = 12  # colours of lines; a trace of plotly has one
_FIGURES: dict[str, tuple[str, float, str]] = {  # title, factor, and how a value reads
    "memory_bytes": ("memory", 1 / GIB, "{:.3g} GiB"),
    "bubble_fraction": ("bubble", 100.0, "{:.3g} %"),
    "cost_per_step": ("cost of a step", 1.0, "{:.3g}"),
    "mfu": ("MFU", 100.0, "{:.3g} %"),
    "step_time_s": ("step time", 1.0, "{:.3g} s"),
}


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis: its title, the place from 0 to 1 of every plan, and marks with their texts."""

    title: str
    places: list[float]
    marks: list[tuple[float, str]]


def parallel_coordinates(records: Sequence[Mapping[str, Any]], *, dark: bool = False, title: str = "") -> go.Figure:
    """One line per plan, coloured by its step time, the fastest on top.

    Args:
        records: of a search or sweep; rows without figures are left out.
        dark: dark instead of light surfaces.
        title: heading.

    Raises:
        JobError: no record has figures.
    """
    colours = palette(dark)
    rows = sorted(with_figures(records), key=lambda row: -row["step_time_s"])
    fields = plan_fields(rows)
    axes = [_field_axis(rows, name) for name in fields]
    axes += [_figure_axis(rows, key) for key in _FIGURES if all(row.get(key) is not None for row in rows)]
    times = [row["step_time_s"] for row in rows]
    shortest, longest = min(times), max(times)
    shares = [(time - shortest) / (longest - shortest) if longest > shortest else 0.0 for time in times]
    figure = View()
    for step in reversed(range(_STEPS)):
        members = [n for n, share in enumerate(shares) if min(int(share * _STEPS), _STEPS - 1) == step]
        if members:
            _add_lines(figure, axes, members, [plan_hover(rows[n], fields) for n in members], step, colours)
    _add_axes(figure, axes, colours)
    figure.add_trace(_scale(shortest, longest, colours))
    figure.update_xaxes(visible=False, range=[-0.25, len(axes) - 0.6])
    figure.update_yaxes(visible=False, range=[-0.09, 1.16])
    figure.update_layout(showlegend=False, hovermode="closest")
    return dress(figure, colours, title=title or "plans", subtitle=f"{len(rows):,} plans", height=470)


def _field_axis(rows: Sequence[Mapping[str, Any]], field: str) -> _Axis:
    """Even steps between the values that occur: degrees grow by factors, schedules have names."""
    values = [row.get(field) for row in rows]

    def order(value: Any) -> tuple[bool, float, str]:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return (not is_number, float(value) if is_number else 0.0, str(value))

    ticks = sorted({repr(value): value for value in values}.values(), key=order)
    place = {repr(tick): number / max(len(ticks) - 1, 1) for number, tick in enumerate(ticks)}
    words = {None: "–", True: "yes", False: "no"}
    texts = [
        str(tick) if isinstance(tick, (int, float, str)) and not isinstance(tick, bool) else words.get(tick, str(tick))
        for tick in ticks
    ]
    name = field.rpartition(".")[2].replace("_", " ")
    return _Axis(name, [place[repr(value)] for value in values], list(zip(place.values(), texts, strict=True)))


def _figure_axis(rows: Sequence[Mapping[str, Any]], key: str) -> _Axis:
    name, factor, text = _FIGURES[key]
    values = [row[key] * factor for row in rows]
    low, high = min(values), max(values)
    places = [(value - low) / (high - low) if high > low else 0.5 for value in values]
    marks = (
        [(share, text.format(low + share * (high - low))) for share in (0.0, 0.5, 1.0)]
        if high > low
        else [(0.5, text.format(low))]
    )
    return _Axis(name, places, marks)


def _add_lines(  # noqa: PLR0917 - what is drawn and how
    figure: go.Figure, axes: Sequence[_Axis], members: Sequence[int], words: Sequence[str], step: int, colours: Palette
) -> None:
    xs: list[float | None] = []
    ys: list[float | None] = []
    said: list[str] = []
    for number, text in zip(members, words, strict=True):
        xs += [*range(len(axes)), None]
        ys += [*(axis.places[number] for axis in axes), None]
        said += [text] * (len(axes) + 1)
    figure.add_scatter(
        x=xs,
        y=ys,
        mode="lines",
        line={"color": colours.ramp_at((step + 0.5) / _STEPS), "width": 1.6},
        opacity=0.75,
        text=said,
        hovertemplate="%{text}<extra></extra>",
    )


def _add_axes(figure: go.Figure, axes: Sequence[_Axis], colours: Palette) -> None:
    for number, axis in enumerate(axes):
        figure.add_shape(type="line", x0=number, x1=number, y0=0, y1=1, line={"color": colours.faint, "width": 1})
        figure.add_annotation(
            text=f"<b>{axis.title}</b>", x=number, y=1.1, showarrow=False, font={"size": 12, "color": colours.text}
        )
        for place, text in axis.marks:
            figure.add_annotation(
                text=text,
                x=number,
                y=place,
                xanchor="left",
                xshift=3,
                showarrow=False,
                font={"size": 11, "color": colours.text},
                bgcolor=colours.surface,
                opacity=0.85,
                borderpad=1,
            )


def _scale(shortest: float, longest: float, colours: Palette) -> go.Scatter:
    """An invisible trace that carries the scale."""
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        hoverinfo="skip",
        marker={
            "color": [shortest],
            "cmin": shortest,
            "cmax": longest if longest > shortest else shortest * 1.01,
            "colorscale": [(step / 10, colours.ramp_at(step / 10)) for step in range(11)],
            "showscale": True,
            "colorbar": {"title": {"text": "step (s)"}, "thickness": 12, "len": 0.85},
        },
    )
