"""How far the step time swings when one parameter of the machine is better or worse: simulated, not extrapolated."""

from dataclasses import dataclass

import plotly.graph_objects as go

from simpar.result import Result
from simpar.sensitivity.parameters import slowed
from simpar.sensitivity.step import sensitivities
from simpar.simulation import simulate
from simpar.units import format_time
from simpar.view.figure import dress, legend_above
from simpar.view.page import View
from simpar.view.palette import palette

_NOTABLE = 5e-4  # share of the step below which a bar would not be seen
_ROW_PX = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """What one parameter does to the step.

    Attributes:
        label: of the parameter.
        better_s: step time with its times divided by ``1 + change`` (its rates multiplied).
        worse_s: step time with its times multiplied by ``1 + change``.
    """

    label: str
    better_s: float
    worse_s: float


def swings(result: Result, *, change: float = 0.2, most: int = 10) -> tuple[Swing, ...]:
    """Simulates the step with the steepest parameters better and worse, the widest swing first.

    Args:
        result: a step.
        change: by which share.
        most: parameters to simulate.
    """
    steep = sorted((s for s in sensitivities(result) if s.share > _NOTABLE), key=lambda s: -s.share)[:most]
    found = []
    for each in steep:
        better, worse = (
            simulate(slowed(result.job, each.parameter, factor), allow_oom=True).step_time_s
            for factor in (1 / (1 + change), 1 + change)
        )
        found.append(Swing(label=each.parameter.label, better_s=better, worse_s=worse))
    seen = [swing for swing in found if swing.worse_s - swing.better_s > _NOTABLE * result.step_time_s]
    return tuple(sorted(seen, key=lambda swing: swing.better_s - swing.worse_s))


def tornado(result: Result, *, change: float = 0.2, most: int = 10, dark: bool = False, title: str = "") -> go.Figure:
    """Bars from the step time as it is to that with a parameter better (left) and worse (right).

    Args:
        result: a step.
        change: by which share.
        most: parameters to show.
        dark: dark instead of light surfaces.
        title: heading; left out, that of the step.
    """
    colours, step_s = palette(dark), result.step_time_s or 1.0
    found = swings(result, change=change, most=most)
    figure = View()
    sides = (("better", "forward", "better_s"), ("worse", "backward", "worse_s"))
    for word, kind, end in sides:
        times = [getattr(swing, end) for swing in found]
        figure.add_bar(
            orientation="h",
            y=[swing.label for swing in found],
            x=[100 * (time / step_s - 1) for time in times],
            name=f"{change:.0%} {word}",
            marker={"color": colours.kinds[kind]},
            text=[f"{time / step_s - 1:+.1%}".replace("-", "−") for time in times],
            textposition="outside",
            cliponaxis=False,
            customdata=[format_time(time) for time in times],
            hovertemplate=f"<b>%{{y}}</b> {change:.0%} {word}<br>step %{{customdata}} (%{{text}})<extra></extra>",
        )
    reach = max((abs(100 * (t / step_s - 1)) for s in found for t in (s.better_s, s.worse_s)), default=1.0)
    figure.update_layout(barmode="overlay", bargap=0.3, legend=legend_above(colours))
    figure.update_xaxes(
        title="change of the step time",
        range=[-1.25 * reach, 1.25 * reach],
        ticksuffix=" %",
        zeroline=True,
        zerolinewidth=2,
    )
    figure.update_yaxes(autorange="reversed", ticklabelstandoff=6)
    said = (
        f"step {format_time(step_s)}; each parameter alone {change:.0%} better and {change:.0%} worse, simulated again"
    )
    height = max(_ROW_PX * len(found), 120)
    return dress(figure, colours, title=title or result.title, subtitle=said, height=height, above=30)
