"""The bars of a timeline figure: one trace per kind, with numbers in the bars that are wide enough."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from simpar.trace.trace import COMPUTE_KINDS, KERNEL_KINDS, KINDS, FloatColumn
from simpar.view.hover import TimeUnit, hover_texts
from simpar.view.level_of_detail import PLOT_PIXELS, Rectangles
from simpar.view.palette import BUBBLES_FROM, DRAWN_KINDS, Palette, label, readable_on, shade
from simpar.view.rows import Rows
from simpar.view.scene import Scene

MAX_LABELS = 1500
"""Numbers drawn inside bars, at most: text costs the browser far more than the bar around it."""

_FILL = 0.92  # of a lane's height
_OUTLINED_FROM_PX, _LABEL_PX, _DIGIT_PX = 5.0, 9.0, 2.5
_NUMBERED = tuple(KINDS.index(kind) for kind in (*COMPUTE_KINDS, *KERNEL_KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """All that bars are drawn from."""

    shown: Scene
    rectangles: Rectangles
    rows: Rows
    unit: TimeUnit
    colours: Palette

    def pixels(self, duration_ns: npt.ArrayLike) -> FloatColumn:
        """Width on a plot of the usual size, zoomed out."""
        return np.asarray(duration_ns) * (PLOT_PIXELS / self.shown.end_ns)

    def of_spans(self, column: str, fill: int) -> npt.NDArray[np.int64]:
        """A column of the spans that are drawn, ``fill`` for clusters."""
        both = np.concatenate([getattr(self.shown.operations, column), getattr(self.shown.kernels, column), [fill]])
        found: npt.NDArray[np.int64] = both[self.rectangles.span].astype(np.int64)
        return found


def add_bars(figure: go.Figure, drawing: Drawing) -> None:
    """One bar trace per kind; bubbles come first, so that they lie beneath."""
    drawn, rows, unit, colours = drawing.rectangles, drawing.rows, drawing.unit, drawing.colours
    labels = _labels(drawing)
    chunk = drawing.of_spans("chunk", -1)
    chunks = int(chunk.max(initial=0)) + 1
    texts = np.array(hover_texts(drawing.shown, drawn, unit), dtype=object)
    for kind in (*range(BUBBLES_FROM, len(DRAWN_KINDS)), *range(BUBBLES_FROM)):
        of_kind = np.flatnonzero(drawn.kind == kind)
        if not len(of_kind):
            continue
        of_kind = of_kind[np.argsort(chunk[of_kind], kind="stable")]  # the legend shows the colour of the first bar
        part = drawn.take(of_kind)
        name = DRAWN_KINDS[kind]
        colour = colours.kinds[name]
        shades: Any = colour
        if chunks > 1 and kind in _NUMBERED:
            shades = [shade(colour, c, chunks, colours.surface) for c in chunk[of_kind].tolist()]
        fill = rows.height[part.lane] * _FILL
        middle = rows.top[part.lane] + rows.height[part.lane] / 2
        width_px = drawing.pixels(part.duration_ns)
        # A hairline parts wide neighbours of one colour; on narrow bars it would eat the bar.
        outlined = (part.span >= 0) & (width_px >= _OUTLINED_FROM_PX)
        figure.add_bar(
            orientation="h",
            base=part.start_ns / unit.ns,
            x=part.duration_ns / unit.ns,
            y=middle + fill * (0.5 - part.bottom - part.height / 2),  # y grows downward
            width=fill * part.height,
            name=label(name),
            legendgroup=name,
            legendrank=1000 + kind,
            marker={"color": shades, "line": {"color": colours.surface, "width": np.where(outlined, 0.8, 0.0)}},
            customdata=part.duration_ns / unit.ns,  # %{x} of a bar with a base is its end, not its length
            hovertext=texts[of_kind].tolist(),
            hovertemplate="%{hovertext}<extra></extra>",
            **_text_options(labels[of_kind], width_px, readable_on(colour)),
        )


def add_path(figure: go.Figure, drawing: Drawing) -> None:
    """The critical path as a line along the upper edges of its lanes; the legend turns it on where it is long."""
    path, rows, unit = drawing.shown.path, drawing.rows, drawing.unit
    if not len(path):
        return
    figure.add_scatter(
        x=path[:, 1:].ravel() / unit.ns,
        y=np.repeat(rows.top[path[:, 0]], 2),
        mode="lines",
        line={"color": drawing.colours.alarm, "width": 1.8},
        name="critical path",
        legendrank=3000,
        visible=True if len(path) <= MAX_LABELS else "legendonly",
        hoverinfo="skip",
    )


def _text_options(labels: npt.NDArray[np.object_], width_px: FloatColumn, colour: str) -> dict[str, Any]:
    """Text per bar only where there is any: the browser measures every text that it is given."""
    digits = np.array([len(text) for text in labels], dtype=np.int64)
    if not digits.any():
        return {"textposition": "none"}
    return {
        "text": labels.tolist(),
        "textposition": np.where(digits > 0, "inside", "none").tolist(),
        "insidetextanchor": "middle",
        "textangle": 0,
        # Else plotly keeps 3 px free on each side and shrinks the number beyond reading.
        "constraintext": "none",
        "textfont": {
            "size": np.clip((width_px - 1.5) / (0.6 * np.maximum(digits, 1)), 7, 11),
            "color": colour,
        },
    }


def _labels(drawing: Drawing) -> npt.NDArray[np.object_]:
    """Microbatch numbers of the compute bars that are wide enough, the widest if they are many; else ''."""
    drawn = drawing.rectangles
    labels = np.full(len(drawn), "", dtype=object)
    rows = np.flatnonzero((drawn.span >= 0) & np.isin(drawn.kind, _NUMBERED))
    microbatch = drawing.of_spans("microbatch", -1)[rows]
    more_digits = np.floor(np.log10(np.maximum(microbatch, 1)))
    wide = (microbatch >= 0) & (drawing.pixels(drawn.duration_ns[rows]) >= _LABEL_PX + _DIGIT_PX * more_digits)
    rows, microbatch = rows[wide], microbatch[wide]
    widest = np.argsort(-drawn.duration_ns[rows], kind="stable")[:MAX_LABELS]
    labels[rows[widest]] = [str(number) for number in microbatch[widest]]
    return labels
