"""What bounds a step, and how two steps differ, as figures."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from simpar.units import format_time
from simpar.view.figure import dress
from simpar.view.palette import palette
from simpar.whatif.comparison import Comparison
from simpar.whatif.explanation import Explanation

_BAR_PX, _WATERFALL_PX = 26, 420
_ABOVE_PX = 26  # for the titles of the panels
_NOTABLE = 1e-3  # share of the step below which a bar would not be seen


def explanation_figure(found: Explanation, *, dark: bool = False) -> go.Figure:
    """Three panels: the critical path by kind of work, the most that each resource could give, and the elasticities."""
    colours, step_s = palette(dark), found.result.step_time_s or 1.0
    longest = sorted(found.path_ns.items(), key=lambda part: -part[1])
    path = [(name, spent * 1e-9) for name, spent in longest if spent * 1e-9 > _NOTABLE * step_s]
    rooms = [(room.resource, room.gain_s) for room in found.headroom if room.gain_s > _NOTABLE * step_s]
    steep = sorted(found.sensitivities, key=lambda s: -s.seconds)
    slopes = [(s.parameter.label, s.share) for s in steep if s.share > _NOTABLE]
    figure = make_subplots(
        rows=2,
        cols=2,
        specs=[[{"rowspan": 2}, {}], [None, {}]],
        subplot_titles=(
            "critical path by kind of work",
            "step time saved if it cost no time at all",
            "% of step time per % of the parameter",
        ),
        row_heights=[max(len(rooms), 1), max(len(slopes), 1)],
        horizontal_spacing=0.2,
        vertical_spacing=0.16,
    )
    timed = [f"{format_time(spent)} · {spent / step_s:.1%}" for _, spent in path]
    _bars(figure, path, timed, colours.kinds["forward"], row=1, col=1)
    _bars(
        figure,
        rooms,
        [f"−{gain / step_s:.1%} → {format_time(step_s - gain)}" for _, gain in rooms],
        colours.kinds["optimizer"],
        row=1,
        col=2,
    )
    _bars(figure, slopes, [f"{share:.2f}" for _, share in slopes], colours.kinds["backward"], row=2, col=2)
    rows = max(len(path), len(rooms) + len(slopes) + 3)
    made = dress(
        figure,
        colours,
        title=found.result.title,
        subtitle="\n".join(found.words),
        height=rows * _BAR_PX,
        above=_ABOVE_PX,
    )
    return made.update_xaxes(showgrid=False)


def comparison_figure(found: Comparison, *, dark: bool = False) -> go.Figure:
    """A waterfall from the step time of A to that of B, by kind of work."""
    colours = palette(dark)
    largest = max(found.a.step_time_s, found.b.step_time_s) or 1.0
    moved = [p for p in found.parts if abs(p.difference_ns) * 1e-9 > _NOTABLE * largest]
    rest = found.difference_ns - sum(p.difference_ns for p in moved)
    steps = [(p.name, p.difference_ns) for p in moved] + ([("all else", rest)] if rest else [])
    names = ["A", *(name for name, _ in steps), "B"]
    values = [found.a.step_time_s, *(difference * 1e-9 for _, difference in steps), 0.0]
    texts = [
        format_time(found.a.step_time_s),
        *(f"{'+' if d > 0 else '−'}{format_time(abs(d) * 1e-9)}" for _, d in steps),
        format_time(found.b.step_time_s),
    ]
    figure = go.Figure(
        go.Waterfall(
            x=names,
            y=values,
            measure=["absolute", *["relative"] * len(steps), "total"],
            text=texts,
            textposition="outside",
            hovertemplate="%{x}: %{text}<extra></extra>",
            totals={"marker": {"color": colours.kinds["forward"]}},
            increasing={"marker": {"color": colours.kinds["backward"]}},
            decreasing={"marker": {"color": colours.kinds["p2p"]}},
            connector={"line": {"color": colours.line}},
            cliponaxis=False,
        )
    )
    figure.update_yaxes(title="step time, s", rangemode="tozero", gridcolor=colours.line)
    said = "\n".join((f"A: {found.a.title}", f"B: {found.b.title}", *found.words))
    made = dress(figure, colours, title="from step A to step B", subtitle=said, height=_WATERFALL_PX)
    return made.update_xaxes(showgrid=False)


def _bars(
    figure: go.Figure, values: Sequence[tuple[str, float]], texts: Sequence[str], colour: str, *, row: int, col: int
) -> None:
    figure.add_bar(
        orientation="h",
        y=[name for name, _ in values],
        x=[value for _, value in values],
        text=list(texts),
        textposition="outside",
        cliponaxis=False,
        marker={"color": colour},
        hovertemplate="%{y}: %{text}<extra></extra>",
        showlegend=False,
        row=row,
        col=col,
    )
    most = max((value for _, value in values), default=1.0)
    figure.update_xaxes(range=[0, most * 1.45], visible=False, row=row, col=col)
    figure.update_yaxes(autorange="reversed", row=row, col=col)
