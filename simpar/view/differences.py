"""Bars of how operations differ between a prediction and a measurement, added up by name."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import plotly.graph_objects as go

from simpar.units import format_time
from simpar.view.hover import time_unit
from simpar.view.palette import Palette

BAR_PX = 22
"""Height of a bar with the gap around it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """All spans of one name, added up over ranks and microbatches.

    Attributes:
        name: of the operation or kernel.
        count: spans that were paired.
        predicted_ns: their predicted lengths together.
        measured_ns: their measured lengths together.
    """

    name: str
    count: int
    predicted_ns: int
    measured_ns: int

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_ns / self.measured_ns - 1


def add_differences(figure: go.Figure, shown: Sequence[Difference], colours: Palette) -> None:
    """A bar per operation on the figure's second axes: measured less predicted, with the signed error beside it."""
    unit = time_unit(max(abs(d.measured_ns - d.predicted_ns) for d in shown))
    names = [escape(d.name) for d in shown]
    figure.add_bar(
        orientation="h",
        x=[(d.measured_ns - d.predicted_ns) / unit.ns for d in shown],
        y=names,
        xaxis="x2",
        yaxis="y2",
        width=0.7,
        marker={
            "color": [colours.alarm if d.measured_ns > d.predicted_ns else colours.kinds["forward"] for d in shown]
        },
        text=[f"{d.error:+.0%}" for d in shown],
        textposition="auto",
        textangle=0,
        name="measured − predicted",
        showlegend=False,
        hovertext=[
            f"<b>{name}</b>  {d.error:+.1%}<br>predicted {format_time(d.predicted_ns * 1e-9)}, measured "
            f"{format_time(d.measured_ns * 1e-9)}<br>{d.count:,} span{'s' if d.count != 1 else ''} of all ranks"
            for name, d in zip(names, shown, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    axis: dict[str, Any] = {"gridcolor": colours.line, "zeroline": True, "zerolinecolor": colours.faint}
    figure.update_layout(
        xaxis2={
            **axis,
            "anchor": "y2",
            "title": {
                "text": f"measured − predicted ({unit.name}), with the prediction's signed error",
                "standoff": 8,
            },
        },
        yaxis2={
            "anchor": "x2",
            "showgrid": False,
            "fixedrange": True,
            "automargin": True,
            "tickfont": {"size": 10, "color": colours.faint},
        },
    )
