"""Where the time of a step goes, stage by stage and stream by stream, as bars."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from simpar.trace.breakdown import RankTime
from simpar.units import format_time
from simpar.view.figure import dress, legend_beside
from simpar.view.page import View
from simpar.view.palette import Palette, between, label, palette

MOST_BARS = 48
"""Ranks of a figure; more are not told apart."""

_ROW_PX = 30
_ABOVE_PX = 26  # for the title of the upper panel


def breakdown_bars(ranks: Sequence[RankTime], *, dark: bool = False, title: str = "") -> go.Figure:
    """Two panels: what each rank does all step long, and of its communication what is exposed and what is hidden.

    Args:
        ranks: of a result.
        dark: dark instead of light surfaces.
        title: heading.
    """
    colours = palette(dark)
    shown = sorted(ranks, key=lambda r: (r.stage, r.rank))[:MOST_BARS]
    names = [_name(rank) for rank in shown]
    step_s = max((_total(rank) for rank in shown), default=0.0)
    streams = list(dict.fromkeys(s for rank in shown for s in (*rank.exposed_s, *rank.hidden_s)))
    figure = make_subplots(
        figure=View(),
        rows=2 if streams else 1,
        cols=1,
        row_heights=[0.55, 0.45] if streams else None,
        vertical_spacing=0.12 if len(shown) > 4 else 0.18,
        subplot_titles=["the step of each rank", "its communication: exposed (full colour), hidden (pale)"][
            : 1 + bool(streams)
        ],
    )
    _add_step(figure, shown, names, step_s, colours)
    if streams:
        _add_streams(figure, shown, names, streams, colours)
    figure.update_layout(barmode="stack", legend=legend_beside(colours), bargap=0.22)
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    if figure.layout.annotations:
        figure.layout.annotations[0].update(yshift=2)
    figure.update_xaxes(ticksuffix=" s", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", ticklabelstandoff=6)
    left = len(ranks) - len(shown)
    said = f"step {format_time(step_s)}" + (f"; the first {len(shown)} of {len(ranks)} simulated ranks" if left else "")
    height = max(len(shown), 3) * _ROW_PX * (2 if streams else 1) + 120
    return dress(figure, colours, title=title or "breakdown", subtitle=said, height=height, above=_ABOVE_PX)


def _name(rank: RankTime) -> str:
    copies = f" ×{rank.replicas:,}" if rank.replicas > 1 else ""
    return f"<b>stage {rank.stage}</b> GPU {rank.rank}{copies}"


def _total(rank: RankTime) -> float:
    parts = (*rank.compute_s.values(), *rank.exposed_s.values())
    return sum(parts) + rank.optimizer_s + rank.interference_s + rank.host_wait_s + rank.bubble_s


def _add_step(figure: go.Figure, ranks: Sequence[RankTime], names: list[str], step_s: float, colours: Palette) -> None:
    def add(name: str, values: list[float], colour: str) -> None:
        if not any(value > 0 for value in values):
            return
        figure.add_bar(
            orientation="h",
            x=values,
            y=names,
            name=name,
            marker={"color": colour, "line": {"width": 0.5, "color": colours.surface}},
            text=[f"{value / step_s:.0%}" if step_s and value / step_s >= 0.03 else "" for value in values],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertemplate=f"<b>{name}</b> %{{x:.4g}} s<br>%{{customdata:.2%}} of the step<br>%{{y}}<extra></extra>",
            customdata=[value / step_s if step_s else 0.0 for value in values],
            row=1,
            col=1,
        )

    for kind in dict.fromkeys(kind for rank in ranks for kind in rank.compute_s):
        add(label(kind), [rank.compute_s.get(kind, 0.0) for rank in ranks], colours.kinds[kind])
    add("optimizer", [rank.optimizer_s for rank in ranks], colours.kinds["optimizer"])
    add("slowed by collectives", [rank.interference_s for rank in ranks], colours.alarm)
    add("waits for host", [rank.host_wait_s for rank in ranks], colours.kinds["host"])
    for stream in dict.fromkeys(stream for rank in ranks for stream in rank.exposed_s):
        add(f"exposed {stream}", [rank.exposed_s.get(stream, 0.0) for rank in ranks], colours.family(stream))
    add("bubble", [rank.bubble_s for rank in ranks], colours.kinds["warm-up"])


def _add_streams(
    figure: go.Figure, ranks: Sequence[RankTime], names: list[str], streams: list[str], colours: Palette
) -> None:
    for stream in streams:
        full = colours.family(stream)
        for word, colour in (("exposed", full), ("hidden", between(full, colours.surface, 0.6))):
            values = [getattr(rank, f"{word}_s").get(stream, 0.0) for rank in ranks]
            figure.add_bar(
                orientation="h",
                x=values,
                y=names,
                name=f"{word} {stream}",
                showlegend=word == "hidden" and any(values),
                marker={"color": colour, "line": {"width": 0.5, "color": colours.surface}},
                hovertemplate=f"<b>{stream}, {word}</b> %{{x:.4g}} s<br>%{{y}}<extra></extra>",
                row=2,
                col=1,
            )
