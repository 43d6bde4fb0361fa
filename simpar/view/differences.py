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

_TEXT_SHARE = 0.12  # room for the text beside the longest bar, in its lengths


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


def signed(value: float, form: str) -> str:
    """A number with its sign, as plots write it.

    >>> signed(-0.016, ".1%"), signed(0.3, ".0%")
    ('−1.6%', '+30%')
    """
    return f"{value:+{form}}".replace("-", "−")


def add_differences(figure: go.Figure, shown: Sequence[Difference], colours: Palette) -> None:
    """A bar per operation on the figure's second axes, to the right where it was predicted too long, and its error."""
    unit = time_unit(max(abs(d.measured_ns - d.predicted_ns) for d in shown))
    names = [escape(d.name) for d in shown]
    figure.add_bar(
        orientation="h",
        x=[(d.predicted_ns - d.measured_ns) / unit.ns for d in shown],
        y=names,
        xaxis="x2",
        yaxis="y2",
        width=0.7,
        marker={"color": [colours.alarm if d.predicted_ns > d.measured_ns else colours.accent for d in shown]},
        text=[signed(d.error, ".0%") for d in shown],
        textposition="outside",
        cliponaxis=False,
        textangle=0,
        name="predicted − measured",
        showlegend=False,
        hovertext=[
            f"<b>{name}</b>  {signed(d.error, '.1%')}<br>predicted {format_time(d.predicted_ns * 1e-9)}, measured "
            f"{format_time(d.measured_ns * 1e-9)}<br>{d.count:,} span{'s' if d.count != 1 else ''} of all ranks"
            for name, d in zip(names, shown, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )
    reach = max(abs(d.predicted_ns - d.measured_ns) for d in shown) / unit.ns or 1.0
    low = min(0.0, *((d.predicted_ns - d.measured_ns) / unit.ns for d in shown))
    high = max(0.0, *((d.predicted_ns - d.measured_ns) / unit.ns for d in shown))
    axis: dict[str, Any] = {"gridcolor": colours.line, "zeroline": True, "zerolinecolor": colours.faint}
    figure.update_layout(
        xaxis2={
            **axis,
            "anchor": "y2",
            "range": [
                low - (_TEXT_SHARE * reach if low < 0 else 0),
                high + (_TEXT_SHARE * reach if high > 0 or low == 0 else 0),
            ],
            "title": {
                "text": f"predicted − measured ({unit.name}); beside each bar: predicted / measured − 1",
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
