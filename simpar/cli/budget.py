"""Money and energy below the report of ``simpar simulate``."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from simpar.economics import S_PER_DAY, S_PER_HOUR, Cost, Run
from simpar.result import Result
from simpar.units import format_count


def budget(result: Result, tokens: float | None) -> tuple[RenderableType, ...]:
    """The lines on money and energy: of a step where a price is known, and of a run where its tokens are given."""
    found = result.cost(tokens)
    if tokens is None and found.step_price is None:
        return ()
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(justify="right", style="bold cyan", no_wrap=True)
    grid.add_column(style="dim")
    for row in [*_step(found, result.unit), *(_run(found.run, result.unit) if found.run is not None else ())]:
        grid.add_row(*row)
    return (Group(Text("money and energy", style="bold"), Padding(grid, (0, 2))),)


def _step(found: Cost, unit: str) -> Iterator[tuple[str, str, str]]:
    if found.tokens_per_price is not None:
        yield f"{unit} per unit of money", format_count(found.tokens_per_price), "at cluster.price_per_gpu_hour"
    if found.tokens_per_kwh is not None and found.gpu_w is not None:
        remark = f"{found.gpu_w:,.0f} W a GPU, {found.busy_fraction:.0%} busy between idle and its board limit"
        yield f"{unit} per kWh", format_count(found.tokens_per_kwh), remark


def _run(run: Run, unit: str) -> Iterator[tuple[str, str, str]]:
    yield "training run", f"{format_count(run.tokens)} {unit}", f"{run.steps:,.0f} steps without failures or restarts"
    long = run.time_s >= S_PER_DAY
    took = f"{run.time_s / S_PER_DAY:,.1f} days" if long else f"{run.time_s / S_PER_HOUR:,.2f} hours"
    yield "time", took, f"{run.gpu_hours:,.0f} GPU-hours"
    if run.energy_kwh is not None:
        yield "energy", f"{run.energy_kwh:,.0f} kWh", "GPUs, and cluster.overhead_w_per_gpu and pue where given"
    if run.price is not None:
        yield "money", f"{run.price:,.0f}", "in the currency of cluster.price_per_gpu_hour"
