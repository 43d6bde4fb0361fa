"""Measured runs against their predictions: every row, and the error by regime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from simpar.units import format_time
from simpar.validation.predict import Prediction
from simpar.validation.report import ValidationReport
from simpar.validation.statistics import REGIMES
from simpar.view.figure import dress, legend_above
from simpar.view.page import View, write_page
from simpar.view.palette import LIGHT

# twelve hues that stay apart for colour-blind readers too (Okabe and Ito 2008, then Tol's muted set)
_HUES = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#332288",
    "#999933",
    "#882255",
    "#44AA99",
    "#DDCC77",
    "#AA4499",
)
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")  # of each dozen groups
_FEW = 20  # rows of a box that are shown one by one
_FLAGGED = "#B8BEC8"
_LEGEND_PX, _LEGEND_TOP_PX = 116, 70
_BANDS = ((0.1, "rgba(10, 72, 214, 0.10)"), (0.25, "rgba(10, 72, 214, 0.06)"))


def accuracy(report: ValidationReport) -> go.Figure:
    """Predicted against measured step time (log-log, a colour and a shape a group), and below the error by regime."""
    columns = 3
    rows = 1 + -(-len(REGIMES) // columns)
    blank = rows * columns - columns - len(REGIMES)  # cells of the last row without a plot
    figure = make_subplots(
        figure=View(),
        rows=rows,
        cols=columns,
        specs=[
            [{"colspan": columns - 1}, *[None] * (columns - 2), {}],
            *[[{}] * columns for _ in range(rows - 2)],
            [*[{}] * (columns - blank), *[None] * blank],
        ],
        row_heights=[0.46, *[0.54 / (rows - 1)] * (rows - 1)],
        vertical_spacing=0.085,
        horizontal_spacing=0.07,
        subplot_titles=[
            "predicted against measured",
            "how often an error occurs",
            *(f"error by {name}" for name in REGIMES),
        ],
    )
    done = [p for p in report.clean if p.predicted_s is not None]
    flagged = [p for p in report.suspicious if p.predicted_s is not None]
    _diagonal(figure, [*done, *flagged])
    if flagged:
        _dots(figure, flagged, "flagged rows", _FLAGGED)
    groups: dict[str, list[Prediction]] = {}
    for prediction in done:
        name = " ".join(str(getattr(prediction.run, column)) for column in report.columns)
        groups.setdefault(name, []).append(prediction)
    for number, (name, members) in enumerate(groups.items()):
        dozen, hue = divmod(number, len(_HUES))
        _dots(figure, members, name, _HUES[hue], _SYMBOLS[dozen % len(_SYMBOLS)])
    _histogram(figure, done, columns)
    for number, regime in enumerate(REGIMES.values()):
        where = {"row": 2 + number // columns, "col": 1 + number % columns}
        cells: dict[str, list[float]] = {}
        for prediction in done:
            cells.setdefault(regime(prediction.run), []).append(prediction.error)
        _boxes(figure, cells, where)
    _decorate(figure, report)
    return figure


def write_accuracy(report: ValidationReport, path: str | Path) -> None:
    """Writes :func:`accuracy` as one page that needs no network."""
    write_page(accuracy(report), path, title="simpar: predicted and measured")


def _diagonal(figure: go.Figure, predictions: Sequence[Prediction]) -> None:
    if not predictions:
        return
    times = [t for p in predictions for t in (p.run.step_time_s, p.predicted_s or p.run.step_time_s)]
    ends = np.array([min(times) / 1.5, max(times) * 1.5])
    for width, colour in _BANDS:
        figure.add_scatter(
            x=[*ends, *ends[::-1]],
            y=[*(ends * (1 + width)), *(ends[::-1] / (1 + width))],
            fill="toself",
            fillcolor=colour,
            line_width=0,
            mode="lines",
            hoverinfo="skip",
            name=f"within {width:.0%}",
            row=1,
            col=1,
        )
    line = {"color": LIGHT.faint, "width": 1}
    figure.add_scatter(x=ends, y=ends, mode="lines", line=line, hoverinfo="skip", showlegend=False, row=1, col=1)


def _dots(figure: go.Figure, members: Sequence[Prediction], name: str, colour: str, symbol: str = "circle") -> None:
    figure.add_scatter(
        x=[p.run.step_time_s for p in members],
        y=[p.predicted_s for p in members],
        mode="markers",
        marker={"color": colour, "symbol": symbol, "size": 6, "opacity": 0.75, "line": {"width": 0}},
        name=f"{name} ({len(members):,})",
        text=[_hover(p) for p in members],
        hovertemplate="%{text}<extra></extra>",
        row=1,
        col=1,
    )


def _hover(prediction: Prediction) -> str:
    run = prediction.run
    assert prediction.predicted_s is not None, "refused rows are not drawn"
    degrees = {"tp": run.tp, "pp": run.pp, "cp": run.cp, "ep": run.ep, "dp": run.dp or 1, "vpp": run.vpp}
    shown = " ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    flag = f"<br>flagged: {run.flag}" if run.flag else ""
    return (
        f"<b>{run.id}</b> {run.model} on {run.num_gpus:,} {run.gpu}<br>{shown or 'one GPU'} zero {run.zero} "
        f"micro-batch {run.micro_batch} × {run.grad_accum}, {run.seq_len:,} tokens, recompute {run.recompute}<br>"
        f"measured {format_time(run.step_time_s)}, predicted {format_time(prediction.predicted_s)} "
        f"({prediction.error:+.1%}){flag}"
    )


def _histogram(figure: go.Figure, done: Sequence[Prediction], column: int) -> None:
    figure.add_histogram(
        x=[p.error for p in done],
        xbins={"start": -1.0, "end": 1.0, "size": 0.05},
        marker={"color": LIGHT.accent, "opacity": 0.55, "line": {"width": 1, "color": LIGHT.surface}},
        hovertemplate="error %{x}: %{y} rows<extra></extra>",
        showlegend=False,
        row=1,
        col=column,
    )
    figure.add_vline(x=0, line={"color": LIGHT.faint, "width": 1}, row=1, col=column)
    figure.update_xaxes(tickformat="+.0%", range=[-0.75, 0.75], title_text="error", row=1, col=column)
    figure.update_yaxes(title_text="rows", row=1, col=column)


def _boxes(figure: go.Figure, cells: dict[str, list[float]], where: dict[str, int]) -> None:
    def order(label: str) -> tuple[bool, float, str]:
        digits = "".join(c for c in label if c.isdigit())
        return (label.startswith(">"), float(digits or 0), label)

    for label in sorted(cells, key=order):
        figure.add_box(
            y=cells[label],
            name=f"{label} ({len(cells[label]):,})",
            marker_color=LIGHT.accent,
            line_width=1,
            boxpoints="all" if len(cells[label]) <= _FEW else False,
            pointpos=0,
            jitter=0.4,
            marker_size=4,
            showlegend=False,
            hoverinfo="y",
            **where,
        )
    figure.update_yaxes(
        tickformat="+.0%", range=[-0.6, 0.6], dtick=0.25, zeroline=True, zerolinecolor=LIGHT.faint, **where
    )
    figure.update_xaxes(tickfont_size=10, **where)


def _decorate(figure: go.Figure, report: ValidationReport) -> None:
    whole = report.overall
    said = "no row could be predicted"
    if whole.median is not None and whole.p90 is not None and whole.bias is not None:
        said = (
            f"{whole.n:,} rows without a flag: median error {whole.median:.1%}, 90th percentile {whole.p90:.1%}, "
            f"bias {whole.bias:+.1%}"
        )
    figure.update_annotations(font_size=13)
    figure.update_layout(legend=legend_above(LIGHT), bargap=0.03, boxgap=0.4)
    dress(figure, LIGHT, title="Predicted and measured step times", subtitle=said, height=1000, above=_LEGEND_PX)
    figure.update_layout(legend={"y": 1.0, "yref": "container", "yanchor": "top"})
    figure.layout.legend.y = 1 - _LEGEND_TOP_PX / figure.layout.height
    figure.update_xaxes(type="log", title_text="measured step time (s)", exponentformat="none", dtick=1, row=1, col=1)
    figure.update_yaxes(type="log", title_text="predicted step time (s)", exponentformat="none", dtick=1, row=1, col=1)
