"""A sweep as a chart: one figure of the step over the first varied field, one line per combination of the others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from simpar.errors import JobError
from simpar.uncertainty import USUAL_LEVEL
from simpar.view.figure import dress, legend_above
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
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "star")
_HEIGHT = 500
_SPREAD = 0.24  # of the distance of two ticks, over which the lines of a tick stand beside each other
_MOST_REASONS = 4


def sweep_chart(
    rows: Sequence[Mapping[str, Any]],
    varied: Sequence[str],
    *,
    value: str = "step_time_s",
    dark: bool = False,
    title: str = "",
) -> go.Figure:
    """Draws a sweep; rows that do not fit are hollow, refused ones are gaps, and the heading says why they are refused.

    The points of a tick stand beside each other, so that their intervals do not lie on each other.

    Args:
        rows: records of a sweep.
        varied: paths of the varied fields; the first one is the horizontal axis.
        value: the column to draw; step times come with their interval.
        dark: dark instead of light surfaces.
        title: heading; left out, what is drawn over what.

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
        lines.setdefault(_name(row, others), []).append(row)
    lines = {name: members for name, members in lines.items() if any(row.get(value) is not None for row in members)}
    figure = View()
    for number, (name, members) in enumerate(lines.items()):
        share = number / max(len(lines) - 1, 1)
        figure.add_trace(
            _line(
                name,
                members,
                [_words(row, varied) for row in members],
                [ticks.index(str(row[across])) + _SPREAD * (share - 0.5) * (len(lines) > 1) for row in members],
                value,
                colours.ramp_at(share) if len(lines) > 1 else colours.accent,
                _SYMBOLS[number % len(_SYMBOLS)],
            )
        )
    drawn = _NAMES.get(value, value)
    figure.update_xaxes(
        title=across,
        tickvals=list(range(len(ticks))),
        ticktext=[_tick(tick, [row for row in rows if str(row[across]) == tick]) for tick in ticks],
        range=[-0.5, len(ticks) - 0.5],
        zeroline=False,
    )
    figure.update_yaxes(title=drawn, zeroline=False)  # differences are what a sweep is for: not from zero
    figure.update_layout(showlegend=bool(others), legend=legend_above(colours), hovermode="closest")
    by = f", by {' and '.join(path.rpartition('.')[2] for path in others)}" if others else ""
    said = [_key(rows, timed=value == "step_time_s"), *_reasons(rows, across, others)]
    return dress(
        figure,
        colours,
        title=title or f"{drawn} over {across.rpartition('.')[2]}{by}",
        subtitle="\n".join(said),
        height=_HEIGHT,
        above=34 if others else 8,
    )


def _name(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    return " · ".join(f"{path.rpartition('.')[2]}={row[path]}" for path in fields)


def _tick(tick: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A value of the axis, and below it whether the job is refused there."""
    refused = sum(bool(row.get("error")) for row in rows)
    if not refused:
        return tick
    return f"{tick}<br><i>refused</i>" if refused == len(rows) else f"{tick}<br><i>{refused} of {len(rows)} refused</i>"


def _key(rows: Sequence[Mapping[str, Any]], *, timed: bool) -> str:
    """What marks mean."""
    parts = [f"bars: {USUAL_LEVEL:.0%} interval"] if timed else []
    if not all(row.get("fits", True) for row in rows):
        parts.append("hollow: does not fit in memory")
    return " · ".join([*parts, "the vertical axis does not begin at zero"])


def _reasons(rows: Sequence[Mapping[str, Any]], across: str, others: Sequence[str]) -> list[str]:
    """Why rows are refused: one line for all that are refused for the same reason."""
    of: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("error"):
            of.setdefault(str(row["error"]), []).append(row)
    found = []
    for reason, members in list(of.items())[:_MOST_REASONS]:
        ticks = dict.fromkeys(str(row[across]) for row in members)
        whole = all(sum(str(row[across]) == tick for row in rows) == _count(members, across, tick) for tick in ticks)
        where = f"{across.rpartition('.')[2]}={', '.join(ticks)}"
        if not whole and others:
            where = "; ".join(_name(row, (across, *others)) for row in members[:3])
            where += f" and {len(members) - 3} more" if len(members) > 3 else ""
        found.append(f"refused at {where}: {reason}")
    left = sum(map(len, list(of.values())[_MOST_REASONS:]))
    return [*found, f"{left} more rows are refused for other reasons"] if left else found


def _count(rows: Sequence[Mapping[str, Any]], across: str, tick: str) -> int:
    return sum(str(row[across]) == tick for row in rows)


def _line(  # noqa: PLR0917 - what is drawn, where and how
    name: str,
    members: Sequence[Mapping[str, Any]],
    words: list[str],
    places: list[float],
    value: str,
    colour: str,
    symbol: str,
) -> go.Scatter:
    # parallel degrees and link rates grow by factors: even steps between what was asked for
    timed = value == "step_time_s"
    return go.Scatter(
        x=places,
        y=[row.get(value) for row in members],
        name=name,
        mode="lines+markers",
        line={"color": colour},
        marker={"size": 9, "symbol": [symbol + ("" if row.get("fits", True) else "-open") for row in members]},
        text=words,
        hovertemplate="<b>%{y:.4g}</b><br>%{text}<extra></extra>",
        error_y={
            "visible": timed,
            "color": colour,
            "thickness": 1,
            "array": [_off(row, "high_s", 1) for row in members],
            "arrayminus": [_off(row, "low_s", -1) for row in members],
        },
    )


def _words(row: Mapping[str, Any], varied: Sequence[str]) -> str:
    return _name(row, varied) + ("" if row.get("fits", True) else "<br>does not fit in memory")


def _off(row: Mapping[str, Any], end: str, sign: int) -> float:
    return sign * (row[end] - row["step_time_s"]) if end in row and row[end] is not None else 0.0


def write_sweep(
    rows: Sequence[Mapping[str, Any]],
    varied: Sequence[str],
    path: str | Path,
    *,
    value: str = "step_time_s",
    title: str = "",
) -> None:
    """Writes the chart as one HTML file that needs no network.

    Raises:
        JobError: no row has that figure.
        OutputError: the file cannot be written.
    """
    write_page(sweep_chart(rows, varied, value=value, title=title), path, title=title or "simpar sweep")
