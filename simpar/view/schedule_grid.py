"""A pipeline schedule as the field draws it: a row per rank, a column per unit of time, microbatches as numbers.

Times are uniform (a forward 1, a backward 2, its halves 1 each), so that the picture shows the order and its bubbles
and nothing else; the timeline shows the same with the times of a job.
"""

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from simpar.schedule.measure import Span, timetable
from simpar.schedule.schedule import Action, Schedule
from simpar.view.figure import dress, legend_above
from simpar.view.page import View
from simpar.view.palette import Palette, between, palette, readable_on, shade

_WORDS = {"F": "forward", "B": "backward", "I": "backward: input gradient", "W": "backward: weight gradient"}
_GAP = 0.04  # between cells, in units of time; and of a row
_MOST_BARS = 3000  # with a number and a hover each; more of them take a browser seconds

_FIGURE_SPACE = "\u2007"

Cell = tuple[Action, Span, float, float]  # with lower and upper edge


def schedule_grid(
    schedule: Schedule, *, forward: int = 1, backward: int = 2, dark: bool = False, title: str = ""
) -> go.Figure:
    """Draws a schedule.

    Args:
        schedule: the orders.
        forward: time of a forward pass through a virtual stage.
        backward: time of a backward pass; where it is split, half of it are weight gradients.
        dark: dark instead of light surfaces.
        title: heading; left out, the name of the schedule.

    Raises:
        DeadlockError: ranks wait for each other for ever.
    """
    colours = palette(dark)
    spans = timetable(schedule, forward=forward, backward=backward, weight=backward // 2)
    cells = list(_cells(schedule, spans))
    end = max((span.end for span in spans.values()), default=1)
    figure = View()
    _add_ranks(figure, schedule.pp, end, colours)
    held = [schedule.stages_of(rank) for rank in range(schedule.pp)]
    chunks = max(map(len, held), default=1)
    chunk_of = {stage: chunk for stages in held for chunk, stage in enumerate(stages)}
    groups: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell[0].op, chunk_of[cell[0].stage]), []).append(cell)
    order = sorted(groups, key=lambda key: ("FBIW".index(key[0]), key[1]))
    for op, chunk in order:
        colour = _colour(op, chunk, chunks, colours)
        draw = _add_bars if len(cells) <= _MOST_BARS else _add_cells
        draw(figure, groups[op, chunk], _WORDS[op], colour, chunk if chunks > 1 else None)
    busy = sum((span.end - span.start) * (top - bottom) for _, span, bottom, top in cells)
    bubble = 1 - busy / (schedule.pp * end * (1 - 2 * _GAP)) if spans else 0.0
    _frame(figure, schedule.pp, end, colours)
    said = (
        f"{schedule.pp:,} ranks, {schedule.microbatches:,} microbatches, forward {forward}, backward {backward}: "
        f"{end:,} slots, {max(bubble, 0.0):.1%} of them bubble"
    )
    height = min(max(34 * schedule.pp, 120), 900)
    return dress(figure, colours, title=title or schedule.name, subtitle=said, height=height, above=30)


def _cells(schedule: Schedule, spans: dict[Action, Span]) -> Iterable[Cell]:
    """Where actions lie; two that overlap share the height of their rank."""
    for rank in range(schedule.pp):
        for turn in schedule.turns(rank):
            height = (1 - 2 * _GAP) / len(turn)
            for place, action in enumerate(turn):
                low = rank + _GAP + place * height
                yield action, spans[action], low, low + height


def _colour(op: str, chunk: int, chunks: int, colours: Palette) -> str:
    kinds = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_grad"}
    colour = colours.kinds[kinds[op]]
    if op == "I":
        colour = between(colour, colours.surface, 0.25)
    return shade(colour, chunk, chunks, colours.surface)


def _add_ranks(figure: go.Figure, pp: int, end: int, colours: Palette) -> None:
    """What is not covered later is bubble."""
    for rank in range(pp):
        figure.add_shape(
            type="rect",
            x0=0,
            x1=end,
            y0=rank + _GAP,
            y1=rank + 1 - _GAP,
            fillcolor=colours.kinds["warm-up"],
            line_width=0,
            layer="below",
        )


def _entry(name: str, chunk: int | None) -> dict[str, Any]:
    """One entry of the legend for all chunks."""
    shown = name if chunk is None else f"{name} (later chunks paler)"
    return {"name": shown, "legendgroup": name, "showlegend": not chunk}


def _add_cells(figure: go.Figure, cells: list[Cell], name: str, colour: str, chunk: int | None) -> None:
    """All rectangles of a colour as one path, which stays fast for tens of thousands."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for _, span, low, high in cells:
        left, right = span.start + _GAP / 2, span.end - _GAP / 2
        xs += [left, right, right, left, left, None]
        ys += [low, low, high, high, low, None]
    figure.add_trace(
        go.Scatter(
            x=xs,
            y=ys,
            mode="lines",
            fill="toself",
            fillcolor=colour,
            line={"width": 0},
            **_entry(name, chunk),
            hoverinfo="skip",
        )
    )


def _add_bars(figure: go.Figure, cells: list[Cell], name: str, colour: str, chunk: int | None) -> None:
    """One bar per cell, with its number where that fits and words where the pointer is."""
    digits = len(str(max(action.microbatch for action, *_ in cells)))
    part = "" if chunk is None else f" · chunk {chunk}"
    figure.add_trace(
        go.Bar(
            orientation="h",
            base=[span.start + _GAP / 2 for _, span, _, _ in cells],
            x=[span.end - span.start - _GAP for _, span, _, _ in cells],
            y=[(low + high) / 2 for _, _, low, high in cells],
            width=[high - low for _, _, low, high in cells],
            marker={"color": colour, "line": {"width": 0}},
            **_entry(name, chunk),
            # of equal width, so that all of them show or none
            text=[str(action.microbatch).rjust(digits, _FIGURE_SPACE) for action, *_ in cells],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            insidetextfont={"size": 11, "color": readable_on(colour)},
            constraintext="inside",
            customdata=[
                [str(action), action.microbatch, action.stage, span.start, span.end] for action, span, *_ in cells
            ],
            hovertemplate=f"<b>{name}</b> microbatch %{{customdata[1]}}<br>virtual stage %{{customdata[2]}}{part}<br>"
            "slots %{customdata[3]} to %{customdata[4]} · %{customdata[0]}<extra></extra>",
        )
    )


def _frame(figure: go.Figure, pp: int, end: int, colours: Palette) -> None:
    step = max(1, pp // 16)
    figure.update_layout(
        legend=legend_above(colours),
        hovermode="closest",
        dragmode="pan",
        barmode="overlay",
        uniformtext={"mode": "hide", "minsize": 6},
    )
    figure.update_xaxes(title="slots", range=[-0.003 * end, 1.003 * end], zeroline=False, showgrid=False)
    figure.update_yaxes(
        range=[pp + 0.02, -0.02],
        tickvals=[rank + 0.5 for rank in range(0, pp, step)],
        ticktext=[f"rank {rank} " for rank in range(0, pp, step)],
        zeroline=False,
        showgrid=False,
        fixedrange=True,
    )
