"""Peak memory of each stage by what it is held for, under the capacity of a device."""

from collections.abc import Sequence

import plotly.graph_objects as go

from simpar.program.footprint import Footprint
from simpar.trace.trace import MEMORY_CATEGORIES
from simpar.units import GIB, format_bytes
from simpar.view.figure import dress, legend_above
from simpar.view.page import View
from simpar.view.palette import palette, readable_on

_MOST_BARS = 64


def memory_stages(
    footprints: Sequence[Footprint],
    *,
    capacity_bytes: float | None = None,
    dark: bool = False,
    title: str = "",
) -> go.Figure:
    """One bar per simulated rank, stacked by category.

    Args:
        footprints: of a result.
        capacity_bytes: of a device, drawn as a line.
        dark: dark instead of light surfaces.
        title: heading.
    """
    colours = palette(dark)
    ordered = sorted(footprints, key=lambda f: (f.stage, f.rank))
    shown = ordered[:_MOST_BARS]
    several = len({f.stage for f in shown}) < len(shown)
    names = [f"stage {f.stage}" + (f"<br>GPU {f.rank}" if several else "") for f in shown]
    figure = View()
    highest = max([f.peak_bytes for f in shown] + [capacity_bytes or 0]) or 1
    for category in MEMORY_CATEGORIES:
        held = [f.by_category.get(category, 0) for f in shown]
        if not any(held):
            continue
        figure.add_bar(
            x=names,
            y=[nbytes / GIB for nbytes in held],
            name=category,
            marker={"color": colours.memory[category], "line": {"width": 0.5, "color": colours.surface}},
            text=[format_bytes(nbytes) if nbytes > 0.04 * highest and len(shown) <= 16 else "" for nbytes in held],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": readable_on(colours.memory[category])},
            textangle=0,
            customdata=[format_bytes(nbytes) for nbytes in held],
            hovertemplate=f"<b>{category}</b> %{{customdata}}<br>%{{x}}<extra></extra>",
        )
    for name, f in zip(names, shown, strict=True):
        over = capacity_bytes is not None and f.peak_bytes > capacity_bytes
        figure.add_annotation(
            x=name,
            y=f.peak_bytes / GIB,
            text=f"<b>{format_bytes(f.peak_bytes)}</b>" if len(shown) <= 24 else "",
            showarrow=False,
            yanchor="bottom",
            font={"color": colours.alarm if over else colours.text},
        )
    fullest = max((f.peak_bytes for f in ordered), default=0)
    said = f"at the fullest moment of each rank; the fullest holds {format_bytes(fullest)}"
    if capacity_bytes:
        figure.add_hline(
            y=capacity_bytes / GIB,
            line={"color": colours.alarm, "dash": "dash", "width": 1.6},
            annotation={
                "text": f"capacity {format_bytes(capacity_bytes)}",
                "font": {"color": colours.alarm},
                "yanchor": "bottom",
            },
            annotation_position="top right",
        )
        said += f" of {format_bytes(capacity_bytes)}"
    if len(ordered) > len(shown):
        said += f"; the first {len(shown)} of {len(ordered)} simulated ranks"
    figure.update_layout(barmode="stack", legend=legend_above(colours), bargap=0.35)
    figure.update_yaxes(title="memory (GiB)", range=[0, 1.1 * highest / GIB])
    return dress(figure, colours, title=title or "memory", subtitle=said, height=470, above=34)
