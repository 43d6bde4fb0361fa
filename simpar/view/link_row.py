"""The row of communication below the lanes: how busy the streams of each communicator are, from the raw spans."""

import numpy as np
import plotly.graph_objects as go

from simpar.trace.utilisation import busy_share
from simpar.view.hover import TimeUnit
from simpar.view.palette import Palette
from simpar.view.scene import Scene

_BINS = 300


def has_links(shown: Scene) -> bool:
    """Whether any stream but compute carries anything."""
    return any(shown.lanes[lane].stream != "compute" for lane in shown.used.tolist())


def add_links(figure: go.Figure, shown: Scene, unit: TimeUnit, colours: Palette, *, axis: str) -> None:
    """Draws a step line per communicator on the y axis of that number."""
    edges = np.unique(np.linspace(0, shown.end_ns, _BINS + 1).astype(np.int64))
    shares = busy_share((shown.operations, shown.kernels), shown.lanes, edges)
    for name, share in shares.items():
        figure.add_scatter(
            x=edges / unit.ns,
            y=100 * np.append(share, share[-1:]),
            yaxis=f"y{axis}",
            legend=f"legend{axis}",
            mode="lines",
            line={"shape": "hv", "width": 1.2, "color": colours.families.get(name, colours.faint)},
            name=name,
            hovertemplate=f"<b>{name}</b> busy %{{y:.0f}} % of the time<br>at %{{x:,.{unit.decimals}f}} {unit.name}"
            "<extra></extra>",
        )
    figure.update_layout(
        {
            f"yaxis{axis}": {
                "title": {"text": "links<br>busy %", "standoff": 10, "font": {"size": 12}},
                "range": [0, 105],
                "tickvals": [0, 50, 100],
                "gridcolor": colours.line,
                "zeroline": False,
                "fixedrange": True,
                "tickfont": {"size": 10, "color": colours.faint},
            }
        }
    )
