"""Plans of a search or a sweep as points: time, memory and cost, with their front."""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from simpar.errors import JobError
from simpar.search.found import shown_plan
from simpar.units import GIB, format_bytes, format_time
from simpar.view.figure import dress, legend_above
from simpar.view.page import View
from simpar.view.palette import Palette, palette

Record = Mapping[str, Any]

FIGURES = (
    "step_time_s", "low_s", "high_s", "bound_s", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "bubble_fraction",
    "compute_s", "exposed_communication_s", "memory_bytes", "cost_per_step", "fits", "gpus", "cluster", "error",
)  # fmt: skip
"""Keys of a record that are outcomes; the others say what the plan is."""

_MOST_TEXTS = 3


def plan_fields(records: Sequence[Record]) -> list[str]:
    """The fields of plans in which the records differ.

    >>> plan_fields([{"tp": 1, "pp": 2, "mfu": 0.1}, {"tp": 2, "pp": 2, "mfu": 0.2}])
    ['tp']
    """
    keys = dict.fromkeys(key for record in records for key in record if key not in FIGURES)
    paths = [key for key in keys if key.startswith(("plan.", "model.", "cluster."))]
    if paths:  # of a sweep, whose other columns follow from these
        return [key for key in paths if len({repr(record.get(key)) for record in records}) > 1]
    return [key for key in keys if len({repr(record.get(key)) for record in records}) > 1]


def goals(record: Record) -> tuple[float, ...]:
    """What one wants little of."""
    return (record["step_time_s"], record["memory_bytes"], record.get("gpus") or 0, record.get("cost_per_step") or 0)


def front(records: Sequence[Record]) -> list[int]:
    """The rows that no other one beats in time, memory, GPUs and cost at once, the fastest first.

    Those that do not fit are left out, and of equals the first is in.
    """
    rows = [i for i, r in enumerate(records) if r.get("step_time_s") and r.get("fits", True)]
    kept: list[int] = []
    for row in sorted(rows, key=lambda i: (goals(records[i]), i)):
        mine = goals(records[row])
        if not any(all(a <= b for a, b in zip(goals(records[other]), mine, strict=True)) for other in kept):
            kept.append(row)
    return kept


def search_scatter(
    records: Sequence[Record], *, capacity_bytes: float | None = None, dark: bool = False, title: str = ""
) -> go.Figure:
    """Step time against memory, coloured by cost (MFU where there is no price); plans on the front are joined.

    Args:
        records: of a search or sweep; rows without figures are left out.
        capacity_bytes: of a device, drawn as a line.
        dark: dark instead of light surfaces.
        title: heading.

    Raises:
        JobError: no record has figures.
    """
    colours, rows = palette(dark), with_figures(records)
    priced = any(row.get("cost_per_step") is not None for row in rows)
    best, varied = front(rows), plan_fields(rows)
    figure = View()
    for fits in (True, False):
        members = [row for row in rows if bool(row.get("fits", True)) is fits]
        if members:
            figure.add_trace(_points(members, varied, colours, fits=fits, priced=priced))
    # only time and memory are axes: the line joins those that are best in these two
    flat = [i for n, i in enumerate(best) if all(rows[i]["memory_bytes"] < rows[j]["memory_bytes"] for j in best[:n])]
    figure.add_scatter(
        x=[rows[i]["step_time_s"] for i in flat],
        y=[rows[i]["memory_bytes"] / GIB for i in flat],
        mode="lines",
        line={"color": colours.accent, "width": 1.4, "shape": "hv", "dash": "dot"},
        name="not beaten in time and memory",
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[rows[i]["step_time_s"] for i in best],
        y=[rows[i]["memory_bytes"] / GIB for i in best],
        mode="markers+text",
        marker={"size": 16, "color": "rgba(0,0,0,0)", "line": {"width": 2, "color": colours.accent}},
        text=[plan_text(rows[i], varied) if n < _MOST_TEXTS and i in flat else "" for n, i in enumerate(best)],
        textposition="top right",
        textfont={"size": 10, "color": colours.faint},
        cliponaxis=False,
        name="front of time, memory" + (" and cost" if priced else ""),
        hoverinfo="skip",
    )
    if capacity_bytes:
        _add_capacity(figure, capacity_bytes, colours)
    figure.update_xaxes(title="step time", ticksuffix=" s")
    figure.update_yaxes(title="memory of the fullest GPU (GiB)", rangemode="tozero")
    figure.update_layout(legend=legend_above(colours), hovermode="closest")
    said = f"{len(rows):,} plans"
    if best:
        said += (
            f"; the fastest that fits: {plan_text(rows[best[0]], varied)}, {format_time(rows[best[0]]['step_time_s'])}"
        )
    return dress(figure, colours, title=title or "plans", subtitle=said, height=540, above=34)


def plan_text(record: Record, fields: Sequence[str]) -> str:
    """What a plan is, by the fields in which it differs; of a search only what changes something.

    >>> plan_text({"tp": 8, "cp": 1}, ["tp", "cp"]), plan_text({"plan.tp": 8, "plan.cp": 1}, ["plan.tp", "plan.cp"])
    ('tp=8', 'tp=8 cp=1')
    """
    if not any("." in field for field in fields):
        return shown_plan(record, fields)
    words = {"sequence_parallel": "sp", "micro_batch": "mb"}
    parts = []
    for field in fields:
        value, name = record.get(field), field.rpartition(".")[2]
        if value is None or value is False or (name in ("recompute", "schedule") and value == "none"):
            continue
        name = words.get(name, name)
        parts.append(name if value is True else f"{name}={value}")
    return " ".join(parts) or "as it is"


def with_figures(records: Sequence[Record]) -> list[Record]:
    """The records that have a step time and memory.

    Raises:
        JobError: none has.
    """
    rows = [r for r in records if isinstance(r.get("step_time_s"), (int, float)) and r.get("memory_bytes") is not None]
    if not rows:
        raise JobError("no plan has a step time, so there is nothing to plot; look at the errors of the rows")
    return rows


def _points(rows: Sequence[Record], varied: Sequence[str], colours: Palette, *, fits: bool, priced: bool) -> go.Scatter:
    key, name, scale = ("cost_per_step", "cost of<br>a step", 1.0) if priced else ("mfu", "MFU (%)", 100.0)
    ramp = [(0.0, colours.ramp[0]), (0.5, colours.ramp[1]), (1.0, colours.ramp[2])]
    marker: dict[str, Any] = {"size": 9, "line": {"width": 0.5, "color": colours.surface}, "color": colours.faint}
    if fits:
        marker |= {
            "color": [(row.get(key) or 0.0) * scale for row in rows],
            "colorscale": ramp,
            "colorbar": {"title": {"text": name}, "thickness": 12, "len": 0.9},
        }
    else:
        marker |= {"symbol": "x-thin", "line": {"width": 1.4, "color": colours.faint}}
    return go.Scatter(
        x=[row["step_time_s"] for row in rows],
        y=[row["memory_bytes"] / GIB for row in rows],
        mode="markers",
        name="fits" if fits else "does not fit",
        marker=marker,
        customdata=[plan_hover(row, varied) for row in rows],
        hovertemplate="%{customdata}<extra></extra>",
    )


def plan_hover(row: Record, varied: Sequence[str]) -> str:
    """What a point says when the pointer is on it."""
    lines = [f"<b>{plan_text(row, varied)}</b>", f"step {format_time(row['step_time_s'])}"]
    if row.get("mfu") is not None:
        lines[-1] += f" · MFU {row['mfu']:.1%}"
    lines.append(f"memory {format_bytes(row['memory_bytes'])}")
    if row.get("cost_per_step") is not None:
        lines.append(f"cost of a step {row['cost_per_step']:,.2f}")
    return "<br>".join(lines)


def _add_capacity(figure: go.Figure, capacity_bytes: float, colours: Palette) -> None:
    figure.add_hline(
        y=capacity_bytes / GIB,
        line={"color": colours.alarm, "dash": "dash", "width": 1.4},
        annotation={"text": f"capacity {format_bytes(capacity_bytes)}", "font": {"color": colours.alarm}},
        annotation_position="top right",
    )
