"""The mark at the end of a step: a dashed line and the step's length."""

import plotly.graph_objects as go

from simpar.view.hover import TimeUnit, step_text
from simpar.view.layout import HIGHEST
from simpar.view.palette import Palette


def add_step_end(
    figure: go.Figure,
    step_ns: int,
    unit: TimeUnit,
    colours: Palette,
    *,
    word: str = "",
    edges: tuple[float, float] | None = None,
    lift_px: int = 0,
) -> None:
    """Marks where a step ends; nothing for a trace without a step.

    Args:
        figure: gets the line and the text.
        step_ns: length of the step.
        unit: of the time axis.
        colours: for the line.
        word: whose step it is, if there are several.
        edges: upper and lower end on the lane axis; None is through all panels.
        lift_px: raises the text, above that of another step.
    """
    if step_ns <= 0:
        return
    end = step_ns / unit.ns
    top, bottom, reference = (1.0, 0.0, "paper") if edges is None else (*edges, "y")
    line = {"color": colours.faint, "width": 1.2, "dash": "dash"}
    figure.add_shape(type="line", x0=end, x1=end, y0=top, y1=bottom, yref=reference, line=line)
    figure.add_annotation(
        text=f"{word} {step_text(step_ns)}".strip(),
        x=end,
        y=top if edges is None else max(top - 0.08, HIGHEST),
        yref=reference,
        xanchor="right",
        yanchor="bottom",
        yshift=lift_px,
        showarrow=False,
        font={"size": 11, "color": colours.faint},
    )
