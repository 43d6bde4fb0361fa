"""Every view of a result by its name."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from simpar.errors import JobError, nearest
from simpar.model.work import DType
from simpar.schedule.registry import build
from simpar.view.breakdown import breakdown_bars
from simpar.view.memory_stages import memory_stages
from simpar.view.roofline import roofline
from simpar.view.schedule_grid import schedule_grid
from simpar.view.topology import topology_figure
from simpar.view.tornado import tornado

if TYPE_CHECKING:
    from simpar.result import Result


def view(result: "Result", kind: str, *, dark: bool = False) -> go.Figure:
    """A figure of a result.

    Args:
        result: a simulated step.
        kind: of :data:`VIEWS`.
        dark: dark instead of light surfaces.

    Raises:
        JobError: there is no such view.
    """
    if kind not in VIEWS:
        raise JobError(f"there is no view '{kind}'{nearest(kind, list(VIEWS))}; take one of {', '.join(VIEWS)}")
    return VIEWS[kind](result, dark)


def _timeline(result: "Result", dark: bool) -> go.Figure:
    return result.timeline(dark=dark)


def _schedule(result: "Result", dark: bool) -> go.Figure:
    layout = result.layout
    plan = layout.plan
    schedule = build(
        plan.schedule, pp=plan.pp, microbatches=layout.microbatches, chunks=plan.vpp, group=plan.microbatch_group
    )
    return schedule_grid(schedule, dark=dark, title=f"{plan.schedule}: {result.title}")


def _topology(result: "Result", dark: bool) -> go.Figure:
    return topology_figure(result.job.cluster, result.trace, dark=dark, title=result.title)


def _breakdown(result: "Result", dark: bool) -> go.Figure:
    return breakdown_bars(result.ranks, dark=dark, title=result.title)


def _memory(result: "Result", dark: bool) -> go.Figure:
    capacity = result.job.cluster.device.memory_bytes
    return memory_stages(result.footprints, capacity_bytes=capacity, dark=dark, title=result.title)


def _roofline(result: "Result", dark: bool) -> go.Figure:
    device, dtype = result.job.cluster.device, result.layout.precision
    names: tuple[DType, ...] = ("fp8", "bf16") if dtype == "fp8" else (dtype,)  # attention stays in bf16
    return roofline(
        result.trace,
        peaks_flop_per_s={name: device.peak(name) for name in names},
        memory_bytes_per_s=device.memory_bytes_per_s,
        dark=dark,
        title=result.title,
    )


def _tornado(result: "Result", dark: bool) -> go.Figure:
    return tornado(result, dark=dark)


VIEWS: dict[str, Callable[["Result", bool], go.Figure]] = {
    "timeline": _timeline,
    "schedule": _schedule,
    "breakdown": _breakdown,
    "memory": _memory,
    "roofline": _roofline,
    "topology": _topology,
    "tornado": _tornado,
}
"""What :func:`view` draws, by name."""
