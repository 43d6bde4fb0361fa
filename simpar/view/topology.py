"""A cluster as a figure: its parts and cables, coloured by the share of the step that each cable was busy.

Needs the extra with plotly. A link's load is its bytes over what it could have carried in the step, from the trace's
link totals. In a folded trace ranks that were not simulated have the loads of those that stand for them.
"""

from collections.abc import Mapping
from math import atan2, ceil, pi, remainder
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from simpar.hardware.cluster import Cluster
from simpar.view.layout import FONT, add_heading
from simpar.view.page import View
from simpar.view.palette import Palette, palette
from simpar.view.sketch import Cable, Sketch, Vertex, sketch

if TYPE_CHECKING:
    from simpar.trace.trace import Trace

_STEPS = 12  # colours of cables; a trace of plotly has one colour
_FEW = 100  # vertices that all have room for a name
_SIDES = {"bottom center": -pi / 2, "top center": pi / 2, "middle right": 0.0, "middle left": pi}
_CORNERS = {"top right": pi / 4, "bottom right": -pi / 4}  # where cables leave no side free
_RATHER_SIDES = 0.6
_MANY = 300  # cables of a figure from which on they are drawn thinner
_STUB = 0.45  # how far a cable that leads round a torus is drawn, in distances of chips


def loads(trace: "Trace") -> dict[str, float]:
    """Share of the step in which each link direction was busy, by name."""
    whole = max(trace.step_s, 1e-12)
    return {link.name: link.nbytes / link.capacity_bytes_per_s / whole for link in trace.links}


def topology_figure(
    cluster: Cluster, trace: "Trace | None" = None, *, dark: bool = False, title: str = ""
) -> go.Figure:
    """Draws a cluster.

    Args:
        cluster: what is drawn; very large ones in part, which the title says.
        trace: of a step on it, which gives cables their colours.
        dark: light on dark.
        title: over the figure.
    """
    colours, drawn = palette(dark), sketch(cluster)
    busy = _of_cables(drawn, trace)
    top = max(ceil(max(busy.values(), default=0.0) * 10) / 10, 0.1)  # the scale ends at whole tens of per cent
    figure = View()
    for step in range(-1, _STEPS):
        _add_cables(figure, drawn, {cable: load / top for cable, load in busy.items()}, step, colours)
    _add_labels(figure, drawn, busy)
    _add_vertices(figure, drawn, colours)
    if trace is not None:
        figure.add_trace(_colour_bar(top, colours))
    said = "" if trace is None else "colour: share of the step in which the busier direction of a cable carries"
    axis = {"visible": False, "showgrid": False, "zeroline": False}
    is_grid = not any(vertex.kind == "switch" for vertex in drawn.vertices.values())
    figure.update_layout(
        template=colours.template,
        paper_bgcolor=colours.surface,
        plot_bgcolor=colours.surface,
        font={"color": colours.text, "family": FONT, "size": 12},
        xaxis=axis,
        yaxis={**axis, "scaleanchor": "x"} if is_grid else axis,
        showlegend=False,
        hovermode="closest",
        height=720,
        margin={"l": 20, "r": 20, "t": 66, "b": 20},
    )
    add_heading(figure, title, " · ".join(text for text in (drawn.note, said) if text), colours)
    return figure


def _of_cables(drawn: Sketch, trace: "Trace | None") -> dict[Cable, float]:
    """Load of the busier direction of each cable."""
    if trace is None:
        return dict.fromkeys(drawn.cables, 0.0)
    known = loads(trace)
    stands = _representatives(trace)
    return {
        cable: max((known.get(name, known.get(stands(name), 0.0)) for name in cable.links), default=0.0)
        for cable in drawn.cables
    }


class _Stands:
    """Finds the link of the rank that stands for a link's own rank."""

    def __init__(self, counts: Mapping[int, int]) -> None:
        self._of = {rank + copy: rank for rank, count in counts.items() for copy in range(count)}

    def __call__(self, name: str) -> str:
        kind = name[:3]
        digits = name[3:].split(".", maxsplit=1)[0].rstrip("><+-")
        if kind not in ("gpu", "nic", "ici") or not digits.isdecimal():
            return name
        rank = int(digits)
        return f"{kind}{self._of.get(rank, rank)}{name[3 + len(digits) :]}"


def _representatives(trace: "Trace") -> _Stands:
    return _Stands({lane.rank: lane.replicas for lane in trace.lanes})


def _step(load: float) -> int:
    return -1 if load <= 0 else min(int(load * _STEPS), _STEPS - 1)


def _add_cables(figure: go.Figure, drawn: Sketch, busy: Mapping[Cable, float], step: int, colours: Palette) -> None:
    xs: list[float | None] = []
    ys: list[float | None] = []
    for cable in drawn.cables:
        if _step(busy[cable]) == step:
            for (x, y), (to_x, to_y) in _lines(drawn, cable):
                xs += [x, to_x, None]
                ys += [y, to_y, None]
    if xs:
        colour = colours.line if step < 0 else colours.ramp_at((step + 0.5) / _STEPS)
        thin = 1.0 if len(drawn.cables) <= _MANY else 0.4  # many cables lie on each other
        line = {"color": colour, "width": 1.2 if step < 0 else thin * (1.5 + 3.0 * (step + 0.5) / _STEPS)}
        figure.add_trace(go.Scatter(x=xs, y=ys, mode="lines", line=line, hoverinfo="skip"))


def _lines(drawn: Sketch, cable: Cable) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    a, b = drawn.vertices[cable.a], drawn.vertices[cable.b]
    if not cable.stub:
        return [((a.x, a.y), (b.x, b.y))]
    away = ((a.x - b.x) ** 2 + (a.y - b.y) ** 2) ** 0.5 or 1.0
    dx, dy = (a.x - b.x) / away * _STUB, (a.y - b.y) / away * _STUB
    return [((a.x, a.y), (a.x + dx, a.y + dy)), ((b.x, b.y), (b.x - dx, b.y - dy))]


def _add_labels(figure: go.Figure, drawn: Sketch, busy: Mapping[Cable, float]) -> None:
    """Points to hover over, in the middle of cables."""
    middles = [_lines(drawn, cable)[0] for cable in drawn.cables]
    texts = [
        f"{c.a} – {c.b}<br>busy {busy[c]:.1%} of the step<br>{', '.join(c.links[:2])}{', …' * (len(c.links) > 2)}"
        for c in drawn.cables
    ]
    figure.add_trace(
        go.Scatter(
            x=[(a[0] + b[0]) / 2 for a, b in middles],
            y=[(a[1] + b[1]) / 2 for a, b in middles],
            mode="markers",
            marker={"size": 9, "opacity": 0},
            text=texts,
            hovertemplate="%{text}<extra></extra>",
        )
    )


def _add_vertices(figure: go.Figure, drawn: Sketch, colours: Palette) -> None:
    few = len(drawn.vertices) <= _FEW
    free = _free_sides(drawn)
    for kind, symbol, size in (("gpu", "circle", 9), ("switch", "square", 12)):
        chosen = [vertex for vertex in drawn.vertices.values() if vertex.kind == kind]
        if not chosen:
            continue
        crowded = len(chosen) > 16
        named = few or (kind == "switch" and len(chosen) <= 40)
        figure.add_trace(
            go.Scatter(
                x=[vertex.x for vertex in chosen],
                y=[vertex.y for vertex in chosen],
                mode="markers+text",
                text=[_label(vertex, named=named, short=crowded) for vertex in chosen],
                textposition=[free[vertex.name] for vertex in chosen],
                customdata=[vertex.name for vertex in chosen],
                textfont={"size": 11 if few else 10, "color": colours.faint},
                cliponaxis=False,
                marker={
                    "symbol": symbol,
                    "size": size if few else size * 0.6,
                    "color": colours.text if kind == "switch" else colours.faint,
                    "line": {"width": 1, "color": colours.surface},
                },
                hovertemplate="%{customdata}<extra></extra>",
            )
        )


def _label(vertex: Vertex, *, named: bool, short: bool) -> str:
    """The label of a vertex; of a GPU or leaf, where there is no room for its name, the number."""
    if vertex.label is not None:
        return vertex.label
    if not named:
        return ""
    return vertex.name.removeprefix("gpu").removeprefix("leaf") if short else vertex.name


def _free_sides(drawn: Sketch) -> dict[str, str]:
    """On which side of each vertex its name lies farthest from the cables that end there."""
    xs, ys = ([getattr(v, axis) for v in drawn.vertices.values()] for axis in "xy")
    wide, high = max(xs) - min(xs) or 1.0, max(ys) - min(ys) or 1.0
    ways: dict[str, list[float]] = {name: [] for name in drawn.vertices}
    for cable in drawn.cables:
        a, b = drawn.vertices[cable.a], drawn.vertices[cable.b]
        # figures are about twice as wide as high, whatever their axes say
        angle = atan2((b.y - a.y) / high, 2 * (b.x - a.x) / wide) + (pi if cable.stub else 0.0)
        ways[cable.a].append(angle)
        ways[cable.b].append(angle + pi)

    return {name: _free_side(angles) for name, angles in ways.items()}


def _free_side(angles: list[float]) -> str:
    free = {
        side: round(weight * min((abs(remainder(angle - at, 2 * pi)) for angle in angles), default=pi), 3)
        for sides, weight in ((_SIDES, 1.0), (_CORNERS, _RATHER_SIDES))
        for side, at in sides.items()
    }
    return max(free, key=lambda side: free[side])


def _colour_bar(top: float, colours: Palette) -> go.Scatter:
    """An invisible trace that carries the scale."""
    scale = [(step / 10, colours.ramp_at(step / 10)) for step in range(11)]
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker={
            "color": [0.0],
            "cmin": 0.0,
            "cmax": top,
            "colorscale": scale,
            "showscale": True,
            "colorbar": {
                "title": {"text": "busy, share<br>of the step"},
                "tickformat": ".0%",
                "thickness": 14,
                "len": 0.7,
            },
        },
        hoverinfo="skip",
    )
