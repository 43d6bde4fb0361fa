"""The report of a simulated step for people, as Rich renderables: a reader of the result that prints nothing itself.

Tables have one row a part and one column a stage, so that they stay narrow however many parts there are. Of many stages
the first, the slowest (or fullest) and the last stand for the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from simpar.program.footprint import Footprint, devices
from simpar.result import Result
from simpar.trace.breakdown import RankTime
from simpar.units import GB, GIB, KIB, MB, MIB, MS, TFLOP, US, format_bytes, format_count, format_time

T = TypeVar("T")

_LABEL_WIDTH, _COLUMN_WIDTH, _MOST_COLUMNS = 40, 10, 8  # the label's with those of mean and share
_LINKS = 5
_KINDS = {
    "gemm": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise",
    "activation": "activation",
    "norm": "norm, softmax",
}
_STREAMS = {
    "tp": "tensor parallel",
    "dp": "data parallel",
    "dp_replicas": "data parallel, between replicas",
    "dp_experts": "data parallel, experts",
    "dp_expert_replicas": "data parallel, replicas of experts",
    "pp": "pipeline",
    "cp": "context",
    "ep": "experts",
    "etp": "tensor parallel, experts",
}
_SHORT = {
    "host": "host copies",
    "cpu": "host updates",
    "dp_replicas": "dp replicas",
    "dp_experts": "experts' dp",
    "dp_expert_replicas": "experts' replicas",
    "ep": "experts",
    "etp": "experts' tp",
}
_CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buffers", "context")

Row = tuple[str, list[float], str]
"""Label, a value for each column, and a Rich style."""


def report(result: Result, *, all_stages: bool = False, width: int = 100) -> Group:
    """Main figures, time per stage, communication, links, memory and warnings.

    Args:
        result: what to report.
        all_stages: show every stage, also where there are many; they then fill several tables.
        width: characters of a line; it decides how many stages stand side by side.
    """
    columns = min(max((width - _LABEL_WIDTH) // _COLUMN_WIDTH, 3), _MOST_COLUMNS)
    parts: list[RenderableType] = [Text(result.title, style="bold"), Text(_setting(result), style="dim"), Text()]
    parts += [Padding(_figures(result), (0, 2)), Text()]
    parts += [*_times(result, all_stages, columns), *_memory(result, all_stages, columns)]
    parts += [*_communication(result), *_links(result)]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in result.warnings]
    return Group(*parts)


def _setting(result: Result) -> str:
    plan, layout, cluster = result.job.plan, result.layout, result.job.cluster
    words = [f"{cluster.nodes:,} × {cluster.gpus_per_node} GPUs"]
    if layout.seq_len > 1:
        words.append(f"{layout.seq_len:,} tokens per sample")
    plural = "" if layout.microbatches == 1 else "es"
    batch = f"{layout.microbatches:,} microbatch{plural} × {plan.micro_batch} × dp {layout.dp}"
    words += [f"global batch {layout.global_batch:,} = {batch}", layout.precision]
    if plan.recompute != "none":
        words.append(f"{plan.recompute} recomputation")
    if result.expert_load is not None and plan.expert_skew:
        words.append(f"fullest experts' rank {result.expert_load:.2f} × the mean")
    if plan.offload != "none":
        what = {"both": "optimizer and activations"}.get(plan.offload, plan.offload)
        words.append(f"{what} on hosts ({format_bytes(result.host_bytes)} each)")
    return " · ".join(words)


def _figures(result: Result) -> Table:
    """Name, value and remark of each main figure."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(style="bold")
    grid.add_column(justify="right", style="bold cyan", no_wrap=True)
    grid.add_column(style="dim")
    gpus, unit, layout = result.job.cluster.gpus, result.unit, result.layout
    achieved = result.model_flop / result.step_time_s / gpus
    worst, device = result.fullest
    rows = [
        ("step time", format_time(result.step_time_s), f"{format_count(result.layout.global_batch)} samples"),
        ("throughput", f"{format_count(result.tokens_per_s)} {unit}/s", f"{result.tokens_per_s_per_gpu:,.1f} a GPU"),
        ("model FLOP", _rate(achieved), "a GPU, without recomputation"),
        (
            "MFU",
            f"{result.mfu:.1%}",
            f"of {_rate(result.peak_flop_per_s / gpus)} dense {layout.precision}, full attention counted",
        ),
        ("HFU", f"{result.hfu:.1%}", "with recomputation"),
        ("bubble", f"{result.bubble_fraction:.1%}", "of the step, mean of all GPUs"),
        (
            "peak memory",
            format_bytes(worst.peak_bytes),
            f"{worst.peak_bytes / device.memory_bytes:.0%} of {format_bytes(device.memory_bytes)} ({device.title})",
        ),
    ]
    for name, value, remark in rows:
        grid.add_row(name, value, remark)
    return grid


def _rate(flop_per_s: float) -> str:
    size, prefix = _scale(flop_per_s, ((TFLOP, "T"), (GB, "G"), (MB, "M")))
    return (
        f"{flop_per_s / size:,.3g} {prefix}FLOP/s"
        if flop_per_s < 1000 * size
        else f"{flop_per_s / size:,.0f} {prefix}FLOP/s"
    )


# ---- time -----------------------------------------------------------------------------------------------------------


def _times(result: Result, all_stages: bool, columns: int) -> Iterator[RenderableType]:
    ranks = result.ranks
    size, unit = _scale(result.step_time_s, ((1.0, "s"), (MS, "ms"), (US, "µs")))
    slowest = _index_of_most(ranks, lambda rank: -rank.bubble_s)
    chosen = _choose(len(ranks), slowest, len(ranks) if all_stages else columns)
    heads = _heads([rank.stage for rank in ranks], chosen, slowest, "slowest")
    total = sum(rank.replicas for rank in ranks)

    def mean(value: Callable[[RankTime], float]) -> float:
        return sum(value(rank) * rank.replicas for rank in ranks) / total

    rows = [
        (label, [*(value(ranks[i]) / size for i in chosen), mean(value) / size], style)
        for label, value, style in _time_parts(ranks, result.step_time_s)
    ]
    shares = [row[1][-1] * size / result.step_time_s for row in rows]
    title = f"where the time goes, {unit}" + (f" ({len(ranks)} stages)" if len(chosen) < len(ranks) else "")
    yield from _tables(title, heads, rows, columns, shares, with_mean=len(ranks) > 1)


def _time_parts(ranks: Sequence[RankTime], step_s: float) -> Iterator[tuple[str, Callable[[RankTime], float], str]]:
    """Rows that add up to the step, then what runs beside compute; parts that are nowhere are left out."""

    def part(label: str, of: Callable[[RankTime], float]) -> Iterator[tuple[str, Callable[[RankTime], float], str]]:
        if any(of(rank) > 0 for rank in ranks):
            yield label, of, ""

    for kind in dict.fromkeys(kind for rank in ranks for kind in rank.compute_s):
        yield from part(_KINDS.get(kind, kind), _entry("compute_s", kind))
    yield from part("slowed by collectives", lambda r: r.interference_s)
    yield from part("optimizer", lambda r: r.optimizer_s)
    for stream in _ordered({stream for rank in ranks for stream in rank.exposed_s}):
        label = f"waits for {_SHORT.get(stream, stream)}"
        yield from part(label, _entry("exposed_s", stream))
    yield from part("waits for host", lambda r: r.host_wait_s)
    yield from part("bubble", lambda r: r.bubble_s)
    yield "step", lambda _: step_s, "bold"
    for stream in _ordered({stream for rank in ranks for stream in rank.hidden_s}):
        label = f"hidden {_SHORT.get(stream, stream)}"
        for name, of, _ in part(label, _entry("hidden_s", stream)):
            yield name, of, "dim"


def _entry(field: str, key: str) -> Callable[[Any], float]:
    """Reads ``key`` of the mapping ``field``, 0 where it is not there."""
    return lambda of: float(getattr(of, field).get(key, 0.0))


def _ordered(streams: set[str]) -> list[str]:
    return sorted(streams, key=lambda stream: (list(_STREAMS).index(stream) if stream in _STREAMS else 99, stream))


# ---- memory ---------------------------------------------------------------------------------------------------------


def _memory(result: Result, all_stages: bool, columns: int) -> Iterator[RenderableType]:
    prints, cluster = result.footprints, result.job.cluster
    capacities = [device.memory_bytes for device in devices(prints, result.layout, cluster)]
    size, unit = _scale(result.peak_memory_bytes, ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")))
    fullest = _index_of_most(prints, lambda f: f.peak_bytes)
    chosen = _choose(len(prints), fullest, len(prints) if all_stages else columns)

    def row(label: str, of: Callable[[Footprint], float], style: str) -> Row:
        return label, [of(prints[i]) / size for i in chosen], style

    rows = [
        row(category, _entry("by_category", category), "")
        for category in _CATEGORIES
        if any(f.by_category.get(category) for f in prints)
    ]
    rows.append(row("peak", lambda f: f.peak_bytes, "bold"))
    free = [capacity - f.peak_bytes for capacity, f in zip(capacities, prints, strict=True)]
    rows.append(("free", [free[i] / size for i in chosen], "red" if min(free) < 0 else "dim"))
    shown = " or ".join(f"{capacity / size:,.1f}" for capacity in dict.fromkeys(capacities))
    title = f"memory at its peak, {unit} (capacity {shown})"
    yield from _tables(title, _heads([f.stage for f in prints], chosen, fullest, "fullest"), rows, columns)


# ---- communication --------------------------------------------------------------------------------------------------


def _communication(result: Result) -> Iterator[RenderableType]:
    carried = result.communication_bytes
    if not carried:
        return
    table = _table("group", ["bytes"])
    for stream in sorted(carried, key=lambda stream: -carried[stream]):
        base, _, direction = stream.partition("_")
        name = _STREAMS.get(stream) or f"{_STREAMS.get(base, base)}{f', {direction}' if direction else ''}"
        table.add_row(name, format_bytes(carried[stream]))
    yield _titled("what a GPU communicates in a step", table)


def _links(result: Result) -> Iterator[RenderableType]:
    links = [link for link in result.to_dict()["links"] if link["bytes"]]
    if not links:
        return
    more = f" ({_LINKS} of {len(links)})" if len(links) > _LINKS else ""
    table = _table("link", ["bytes", "capacity, GB/s", "mean use"])
    for link in links[:_LINKS]:
        used = f"{link['utilisation']:.1%}"
        table.add_row(_direction(link["link"]), format_bytes(link["bytes"]), f"{link['capacity_gb_per_s']:,.3g}", used)
    yield _titled(f"busiest links{more}", table)


def _direction(link: str) -> str:
    """A link's name with its direction in words."""
    return {">": f"{link[:-1]} out", "<": f"{link[:-1]} in"}.get(link[-1:], link)


# ---- tables ---------------------------------------------------------------------------------------------------------


def _tables(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Row],
    columns: int,
    shares: Sequence[float] = (),
    *,
    with_mean: bool = False,
) -> Iterator[RenderableType]:
    """One table, or several where the columns are too many to stand side by side.

    ``with_mean`` says that the last value of each row is a mean, which every table repeats.
    """
    for first in range(0, len(heads), columns):
        block = heads[first : first + columns]
        table = _table("stage", [*block, *(["mean"] if with_mean else []), *(["share"] if shares else [])])
        for number, (label, values, style) in enumerate(rows):
            cells = [_number(value) for value in values[first : first + len(block)]]
            if with_mean:
                cells.append(_number(values[-1]))
            if shares:
                cells.append(f"{shares[number]:.1%}")
            table.add_row(label, *cells, style=style)
        yield _titled(title, table)


def _table(first: str, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _titled(title: str, table: Table) -> Group:
    """A table below its title; one of Rich's own titles would wrap at the width of the table."""
    return Group(Text(title, style="bold"), table, Text())


def _number(value: float) -> str:
    """A value in the unit of its table: aligned decimals, and no digits where there is nothing."""
    return f"{value:,.3f}" if abs(value) >= 5e-4 else ("–" if value == 0 else "~0")


def _heads(stages: Sequence[int], chosen: Sequence[int], top: int, most: str) -> list[str]:
    """Headings of the chosen stages; where some are left out, they say why these stand here."""
    if len(stages) == 1:
        return ["all"]
    if len(chosen) == len(stages):
        return [str(stages[i]) for i in chosen]
    reasons = [(0, "first"), (top, most), (len(stages) - 1, "last")]
    return [f"{stages[i]}\n{', '.join(reason for at, reason in reasons if at == i)}" for i in chosen]


def _choose(count: int, most: int, room: int) -> list[int]:
    if count <= room:
        return list(range(count))
    return sorted({0, most, count - 1})


def _index_of_most(values: Sequence[T], key: Callable[[T], float]) -> int:
    return max(range(len(values)), key=lambda i: key(values[i]))


def _scale(value: float, steps: Sequence[tuple[float, str]]) -> tuple[float, str]:
    return next((step for step in steps if value >= step[0]), steps[-1])
