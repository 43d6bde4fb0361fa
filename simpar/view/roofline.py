"""The step's kernels under the roofs of their device: work per byte against the rate at which it was done.

Matrix products and attention lie on the classic roofline (Williams, Waterman and Patterson 2009). Kernels that only
move memory have no FLOP that anybody counts; a second panel shows the bandwidth that they reach over the bytes of a
launch. Bytes are those that a kernel must move (each operand and result once), so a kernel above the slanted roof has
operands that stay in cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from simpar.trace.trace import KERNEL_KINDS, KINDS, Trace
from simpar.units import TFLOP, format_bytes, format_time
from simpar.view.figure import dress, legend_beside
from simpar.view.page import View
from simpar.view.palette import Palette, label, palette

_LARGEST_PX, _SMALLEST_PX = 46.0, 5.0
_ABOVE_PX = 26  # for the titles of the panels
_NAMED = 6  # labels a panel; more would lie on each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """All launches of one kernel and shape.

    Attributes:
        kind: of ``KERNEL_KINDS``.
        name: of the kernel.
        launches: on the simulated ranks, each with the ranks that it stands for.
        seconds: of all launches.
        flop: of one launch.
        nbytes: moved by one launch.
        share: of the time of all kernels.
    """

    kind: str
    name: str
    launches: int
    seconds: float
    flop: float
    nbytes: float
    share: float

    @property
    def flop_per_s(self) -> float:
        """Achieved rate."""
        return self.flop * self.launches / self.seconds

    @property
    def bytes_per_s(self) -> float:
        """Achieved bandwidth."""
        return self.nbytes * self.launches / self.seconds

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flop / self.nbytes


def points(trace: Trace) -> tuple[Point, ...]:
    """The kernels of a step by kind, name and shape, the longest first; without those that move nothing."""
    kernels = trace.kernels()
    computes = np.isin(kernels.kind, [KINDS.index(kind) for kind in KERNEL_KINDS])
    rows = np.flatnonzero(computes & (kernels.duration_ns > 0) & (kernels.nbytes > 0))
    if not len(rows):
        return ()
    keys = np.stack([kernels.kind[rows], kernels.name[rows], kernels.flop[rows], kernels.nbytes[rows]], axis=1)
    shapes, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.reshape(-1)
    weight = np.array([lane.replicas for lane in trace.lanes], np.int64)[kernels.lane[rows]]
    launches = np.bincount(group, weight, len(shapes))
    seconds = np.bincount(group, weight * kernels.duration_ns[rows], len(shapes)) * 1e-9
    whole = float(seconds.sum())
    found = [
        Point(
            kind=KINDS[int(kind)],
            name=trace.names[int(name)],
            launches=int(launches[i]),
            seconds=float(seconds[i]),
            flop=float(flop),
            nbytes=float(nbytes),
            share=float(seconds[i]) / whole,
        )
        for i, (kind, name, flop, nbytes) in enumerate(shapes.tolist())
    ]
    return tuple(sorted(found, key=lambda point: -point.seconds))


def roofline(
    trace: Trace,
    *,
    peaks_flop_per_s: Mapping[str, float],
    memory_bytes_per_s: float,
    dark: bool = False,
    title: str = "",
) -> go.Figure:
    """Draws the kernels of a step; the area of a point is its share of the time of all kernels.

    Args:
        trace: of a step, with kernels.
        peaks_flop_per_s: dense peaks to draw as roofs, by their name.
        memory_bytes_per_s: datasheet bandwidth.
        dark: dark instead of light surfaces.
        title: heading.
    """
    colours, found = palette(dark), points(trace)
    working = [p for p in found if p.flop > 0]
    moving = [p for p in found if p.flop <= 0]
    figure = make_subplots(
        figure=View(),
        rows=1,
        cols=2,
        column_widths=[0.62, 0.38],
        horizontal_spacing=0.09,
        subplot_titles=["kernels with products", "kernels that move memory only"],
    )
    _add_roofs(figure, working, peaks_flop_per_s, memory_bytes_per_s, colours)
    _add_points(figure, working, colours, col=1)
    _add_points(figure, moving, colours, col=2)
    reach = memory_bytes_per_s * 1e-12
    if moving:
        figure.add_hline(y=reach, line={"color": colours.alarm, "dash": "dash", "width": 1.4}, row=1, col=2)
        _note(figure, f"{reach:.3g} TB/s", 0.02, reach, colours, col=2)
    figure.update_xaxes(type="log", title="FLOP per byte", exponentformat="none", dtick="D2", row=1, col=1)
    figure.update_yaxes(type="log", title="TFLOP/s", exponentformat="none", dtick="D2", row=1, col=1)
    figure.update_xaxes(type="log", title="bytes of a launch", exponentformat="SI", dtick=1, row=1, col=2)
    figure.update_yaxes(title="TB/s", rangemode="tozero", range=[0, reach * 1.15], row=1, col=2)
    figure.update_layout(legend=legend_beside(colours), hovermode="closest")
    figure.update_annotations(selector={"yanchor": "bottom", "xref": "paper"}, font={"size": 13})
    said = "the area of a point is its share of the time of all kernels"
    if not found:
        said = "this trace has no kernels to show"
    return dress(figure, colours, title=title or "roofline", subtitle=said, height=520, above=_ABOVE_PX)


def _add_roofs(
    figure: go.Figure, working: Sequence[Point], peaks: Mapping[str, float], memory: float, colours: Palette
) -> None:
    if not peaks:
        return
    ridge = max(peaks.values()) / memory
    intensities = [p.intensity for p in working] or [ridge]
    low, high = min(*intensities, ridge) / 3, max(*intensities, ridge) * 3
    rates = [p.flop_per_s for p in working] or [min(peaks.values())]
    floor = min(*rates, low * memory) / TFLOP
    figure.update_xaxes(range=[log10(low), log10(high)], row=1, col=1)
    figure.update_yaxes(range=[log10(max(floor / 2, 1e-6)), log10(max(peaks.values()) / TFLOP * 1.5)], row=1, col=1)
    line = {"color": colours.alarm, "dash": "dash", "width": 1.4}
    for number, (name, peak) in enumerate(peaks.items()):
        start = low if number == 0 else peak / memory
        figure.add_scatter(
            x=[start, peak / memory, high],
            y=[min(start * memory, peak) / TFLOP, peak / TFLOP, peak / TFLOP],
            mode="lines",
            line=line,
            hoverinfo="skip",
            showlegend=False,
            row=1,
            col=1,
        )
        _note(
            figure, f"{name} dense peak {peak / TFLOP:,.0f} TFLOP/s", log10(high), log10(peak / TFLOP), colours, col=1
        )
    slant = low * 1.6
    _note(
        figure, f"{memory * 1e-12:.3g} TB/s", log10(slant), log10(slant * memory / TFLOP), colours, col=1, right=False
    )


def _note(figure: go.Figure, text: str, x: float, y: float, colours: Palette, *, col: int, right: bool = True) -> None:
    inside = col == 2
    figure.add_annotation(
        text=text,
        x=x,
        y=y,
        xref="x2 domain" if inside else "x",
        yref=f"y{col}" if col > 1 else "y",
        xanchor="right" if right and not inside else "left",
        yanchor="bottom",
        yshift=2,
        xshift=0 if right or inside else 16,
        showarrow=False,
        font={"size": 11, "color": colours.alarm},
    )


def _add_points(figure: go.Figure, found: Sequence[Point], colours: Palette, *, col: int) -> None:
    largest = max((p.share for p in found), default=1.0)
    kinds = sorted({p.kind for p in found}, key=KERNEL_KINDS.index)
    named = {id(p) for p in _spread(found, col)}
    for kind in kinds:
        of_kind = [p for p in found if p.kind == kind]
        figure.add_scatter(
            x=[p.intensity if col == 1 else p.nbytes for p in of_kind],
            y=[p.flop_per_s / TFLOP if col == 1 else p.bytes_per_s * 1e-12 for p in of_kind],
            mode="markers+text",
            name=label(kind),
            text=[p.name if id(p) in named else "" for p in of_kind],
            textposition="bottom center",
            textfont={"size": 10, "color": colours.faint},
            cliponaxis=False,
            marker={
                "size": [max(_LARGEST_PX * (p.share / largest) ** 0.5, _SMALLEST_PX) for p in of_kind],
                "color": colours.kinds[kind],
                "opacity": 0.75,
                "line": {"width": 1, "color": colours.surface},
            },
            customdata=[_hover(p) for p in of_kind],
            hovertemplate="%{customdata}<extra></extra>",
            row=1,
            col=col,
        )


def _spread(found: Sequence[Point], col: int) -> list[Point]:
    """The longest kernels whose labels do not lie on each other."""
    chosen: list[tuple[Point, float, float]] = []
    for point in found:
        x = log10(point.intensity if col == 1 else point.nbytes)
        y = log10(max(point.flop_per_s, 1.0)) if col == 1 else point.bytes_per_s * 1e-12
        if all(abs(x - a) > 0.45 or abs(y - b) > (0.12 if col == 1 else 0.22) for _, a, b in chosen):
            chosen.append((point, x, y))
        if len(chosen) == _NAMED:
            break
    return [point for point, _, _ in chosen]


def _hover(point: Point) -> str:
    lines = [
        f"<b>{label(point.kind)}: {point.name}</b>",
        f"{point.launches:,} launches of {format_time(point.seconds / point.launches)}",
        f"{point.share:.1%} of the time of all kernels",
        f"{format_bytes(point.nbytes)} · {point.bytes_per_s * 1e-12:.3g} TB/s",
    ]
    if point.flop > 0:
        lines.append(f"{point.flop / TFLOP:.3g} TFLOP · {point.flop_per_s / TFLOP:.4g} TFLOP/s")
        lines.append(f"{point.intensity:.4g} FLOP per byte")
    return "<br>".join(lines)
