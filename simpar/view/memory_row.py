"""The memory row below the lanes: what each rank of the trace holds over time, in GiB."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import plotly.graph_objects as go

from simpar.trace.trace import FloatColumn, IntColumn, Trace
from simpar.units import GIB, format_bytes
from simpar.view.hover import TimeUnit
from simpar.view.palette import Palette

_BINS = 100
_LEGEND_LINES = 8


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """A step line: from ``time_ns[i]`` on, the rank holds ``held_gib[i]``."""

    rank: int
    stage: int
    time_ns: IntColumn
    held_gib: FloatColumn


def memory_lines(trace: Trace, *, bins: int = _BINS) -> list[MemoryLine]:
    """One line per rank that has memory events, by stage and rank, from 0 to the end of the step.

    A line has at most ``3 * bins + 2`` points: with more events than that it keeps the lowest level, the
    highest and the last of each bin of time, so that no peak is lost and every bin hands the right level to
    the next.
    """
    ranks = sorted({(lane.stage, lane.rank) for lane in trace.lanes})
    lines = []
    for stage, rank in ranks:
        mine = trace.memory.rank == rank
        if not mine.any():
            continue
        time = trace.memory.time_ns[mine]
        held = np.cumsum(trace.memory.delta_bytes[mine]) / GIB
        # What is held before the step (weights, optimizer) shows as a level, not as a jump from zero.
        first = int(np.searchsorted(time, 0, side="right"))
        before = held[first - 1] if first else 0.0
        kept = first + _thin(time[first:], held[first:], bins)
        end = max(trace.step_ns, int(time[-1]))
        lines.append(
            MemoryLine(
                rank,
                stage,
                np.concatenate([[0], time[kept], [end]]).astype(np.int64),
                np.concatenate([[before], held[kept], held[-1:]]),
            )
        )
    return lines


def _thin(time: IntColumn, held: FloatColumn, bins: int) -> IntColumn:
    """Rows to keep, in order."""
    if len(time) <= 3 * bins:
        return np.arange(len(time), dtype=np.int64)
    cuts = np.searchsorted(time, np.linspace(time[0], time[-1] + 1, bins + 1)).tolist()
    kept: set[int] = set()
    for low, high in pairwise(cuts):
        if low < high:
            window = held[low:high]
            kept |= {low + int(window.argmin()), low + int(window.argmax()), high - 1}
    return np.array(sorted(kept), dtype=np.int64)


def add_memory(figure: go.Figure, trace: Trace, unit: TimeUnit, colours: Palette, capacity_bytes: float | None) -> None:
    """Draws the lines, and the capacity of a device if it is given, on the figure's second y axis."""
    lines = memory_lines(trace)
    several = len({line.stage for line in lines}) < len(lines)
    for index, line in enumerate(lines):
        name = f"GPU {line.rank}" if several else f"stage {line.stage}"
        of = f" of {format_bytes(capacity_bytes)}" if capacity_bytes else ""
        since = f"since %{{x:,.{unit.decimals}f}} {unit.name}"
        figure.add_scatter(
            x=line.time_ns / unit.ns,
            y=line.held_gib,
            yaxis="y2",
            mode="lines",
            line={"shape": "hv", "width": 1.4, "color": colours.ramp_at(index / max(1, len(lines) - 1))},
            name=name,
            legend="legend2",
            showlegend=len(lines) <= _LEGEND_LINES or index in (0, len(lines) - 1),
            hovertemplate=f"<b>{name}</b>  %{{y:.2f}} GiB{of}<br>{since}<extra></extra>",
        )
    highest = max((float(line.held_gib.max()) for line in lines), default=0.0)
    figure.update_layout(
        yaxis2={
            "anchor": "x",
            "title": {"text": "memory (GiB)", "standoff": 10, "font": {"size": 12}},
            "range": [0, 1.12 * max(highest, (capacity_bytes or 0.0) / GIB) or 1.0],
            "gridcolor": colours.line,
            "zeroline": False,
            "fixedrange": True,
            "nticks": 6,
            "tickfont": {"size": 10, "color": colours.faint},
        }
    )
    if capacity_bytes:
        _add_capacity(figure, capacity_bytes, colours)


def _add_capacity(figure: go.Figure, capacity_bytes: float, colours: Palette) -> None:
    y = capacity_bytes / GIB
    line = {"color": colours.alarm, "width": 1.2, "dash": "dash"}
    figure.add_shape(type="line", x0=0, x1=1, xref="paper", y0=y, y1=y, yref="y2", line=line)
    figure.add_annotation(
        text=f"capacity {format_bytes(capacity_bytes)}",
        x=0,
        xref="paper",
        xanchor="left",
        y=y,
        yref="y2",
        yanchor="bottom",
        showarrow=False,
        font={"size": 10, "color": colours.alarm},
    )
