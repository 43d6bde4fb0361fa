"""The row of communication below the lanes: how much of its links each communicator uses, from the raw spans."""

import numpy as np
import plotly.graph_objects as go

from simpar.trace.utilisation import busy_share, link_share
from simpar.view.hover import TimeUnit
from simpar.view.palette import Palette
from simpar.view.scene import Scene

_BINS = 300


def has_links(shown: Scene) -> bool:
    """Whether any stream but compute carries anything."""
    return any(shown.lanes[lane].stream != "compute" for lane in shown.used.tolist())


def add_links(figure: go.Figure, shown: Scene, unit: TimeUnit, colours: Palette, *, axis: str) -> None:
    """Draws a step line per communicator on the y axis of that number.

    It is bytes over capacity; in a measured trace, of which nobody knows what links carried, how busy the streams are.
    """
    edges = np.unique(np.linspace(0, shown.end_ns, _BINS + 1).astype(np.int64))
    tables = shown.operations, shown.kernels
    if shown.link_s_per_byte is None:
        shares, title, told = busy_share(tables, shown.lanes, edges), "links<br>busy %", "busy %{y:.0f} % of the time"
    else:
        shares = link_share(tables, shown.lanes, edges, shown.link_s_per_byte)
        title, told = "links<br>used %", "uses %{y:.0f} % of its links' capacity"
    for name, share in shares.items():
        figure.add_scatter(
            x=edges / unit.ns,
            y=100 * np.append(share, share[-1:]),
            yaxis=f"y{axis}",
            legend=f"legend{axis}",
            mode="lines",
            line={"shape": "hv", "width": 1.2, "color": colours.family(name)},
            name=name,
            hovertemplate=f"<b>{name}</b> {told}<br>at %{{x:,.{unit.decimals}f}} {unit.name}<extra></extra>",
        )
    figure.update_layout(
        {
            f"yaxis{axis}": {
                "title": {"text": title, "standoff": 10, "font": {"size": 12}},
                "range": [0, 105],
                "tickvals": [0, 50, 100],
                "gridcolor": colours.line,
                "zeroline": False,
                "fixedrange": True,
                "tickfont": {"size": 10, "color": colours.faint},
            }
        }
    )
