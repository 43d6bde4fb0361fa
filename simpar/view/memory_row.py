"""The memory row below the lanes: what the fullest rank holds over time, by category, and what the others hold."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from simpar.trace.trace import MEMORY_CATEGORIES, FloatColumn, IntColumn, Trace
from simpar.units import GIB, format_bytes
from simpar.view.hover import TimeUnit
from simpar.view.palette import Palette

_BINS = 100
_MOST_OTHERS = 16


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Step lines: from ``time_ns[i]`` on, the rank holds ``held_gib[i]``, made up of ``by_category[:, i]``."""

    rank: int
    stage: int
    time_ns: IntColumn
    held_gib: FloatColumn
    by_category: npt.NDArray[np.float64]

    @property
    def peak_gib(self) -> float:
        """The most that it holds."""
        return float(self.held_gib.max())


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
        change = np.zeros((len(MEMORY_CATEGORIES), len(time)))
        change[trace.memory.category[mine], np.arange(len(time))] = trace.memory.delta_bytes[mine] / GIB
        parts = np.cumsum(change, axis=1)
        held = np.cumsum(trace.memory.delta_bytes[mine]) / GIB
        # What is held before the step (weights, optimizer) shows as a level, not as a jump from zero.
        first = int(np.searchsorted(time, 0, side="right"))
        before = first - 1 if first else None
        kept = first + _thin(time[first:], held[first:], bins)
        end = max(trace.step_ns, int(time[-1]))
        begin = np.zeros((len(parts), 1)) if before is None else parts[:, [before]]
        lines.append(
            MemoryLine(
                rank,
                stage,
                np.concatenate([[0], time[kept], [end]]).astype(np.int64),
                np.concatenate([[0.0 if before is None else held[before]], held[kept], held[-1:]]),
                np.concatenate([begin, parts[:, kept], parts[:, -1:]], axis=1),
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


def add_memory(
    figure: go.Figure, trace: Trace, unit: TimeUnit, colours: Palette, capacity_bytes: float | None, *, axis: str
) -> None:
    """Draws the fullest rank by category, the totals of the others, and the capacity of a device if it is given.

    Args:
        figure: gets the traces.
        trace: whose memory.
        unit: of the time axis.
        colours: of the categories and the lines.
        capacity_bytes: of a device.
        axis: number of the y axis and of the legend, as plotly writes it (``"2"``).
    """
    lines = memory_lines(trace)
    fullest = max(lines, key=lambda line: line.peak_gib)
    of = f" of {format_bytes(capacity_bytes)}" if capacity_bytes else ""
    since = f"since %{{x:,.{unit.decimals}f}} {unit.name}"
    common = {"yaxis": f"y{axis}", "legend": f"legend{axis}", "mode": "lines"}
    for category, name in enumerate(MEMORY_CATEGORIES):
        part = fullest.by_category[category]
        if part.max() <= 0:
            continue
        figure.add_scatter(
            x=fullest.time_ns / unit.ns,
            y=part,
            **common,
            line={"shape": "hv", "width": 0},
            stackgroup=f"memory{axis}",
            fillcolor=colours.memory[name],
            name=name,
            hovertemplate=f"<b>{name}</b> of stage {fullest.stage}  %{{y:.2f}} GiB{of}<br>{since}<extra></extra>",
        )
    others = [line for line in lines if line is not fullest][:_MOST_OTHERS]
    for index, line in enumerate(others):
        figure.add_scatter(
            x=line.time_ns / unit.ns,
            y=line.held_gib,
            **common,
            line={"shape": "hv", "width": 1.0, "color": colours.faint},
            name="other ranks, all categories",
            legendgroup="others",
            showlegend=index == 0,
            hovertemplate=(f"<b>stage {line.stage}, GPU {line.rank}</b>  %{{y:.2f}} GiB{of}<br>{since}<extra></extra>"),
        )
    highest = max(fullest.peak_gib, (capacity_bytes or 0.0) / GIB)
    figure.update_layout(
        {
            f"yaxis{axis}": {
                "title": {"text": f"stage {fullest.stage}<br>GiB", "standoff": 10, "font": {"size": 12}},
                "range": [0, 1.12 * highest or 1.0],
                "gridcolor": colours.line,
                "zeroline": False,
                "fixedrange": True,
                "nticks": 6,
                "tickfont": {"size": 10, "color": colours.faint},
            }
        }
    )
    if capacity_bytes:
        _add_capacity(figure, capacity_bytes, colours, axis)


def _add_capacity(figure: go.Figure, capacity_bytes: float, colours: Palette, axis: str) -> None:
    y = capacity_bytes / GIB
    line = {"color": colours.alarm, "width": 1.2, "dash": "dash"}
    figure.add_shape(type="line", x0=0, x1=1, xref="paper", y0=y, y1=y, yref=f"y{axis}", line=line)
    figure.add_annotation(
        text=f"capacity {format_bytes(capacity_bytes)}",
        x=0,
        xref="paper",
        xanchor="left",
        y=y,
        yref=f"y{axis}",
        yanchor="bottom",
        showarrow=False,
        font={"size": 10, "color": colours.alarm},
    )
