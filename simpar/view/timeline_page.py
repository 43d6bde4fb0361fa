"""The page of a timeline: one HTML file with every span, which cuts what its window shows while it moves.

plotly.js alone is two megabytes of a file, gzipped, and takes a browser seconds to unpack and run; so this page draws
by itself, on canvas. ``assets/`` holds its script, in the order of :data:`_SCRIPTS`. The page loads nothing and sends
nothing; a content security policy in it forbids that.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from simpar.trace.export import write_whole
from simpar.trace.trace import (
    COMMUNICATION_KINDS,
    KINDS,
    MEMORY_CATEGORIES,
    FloatColumn,
    IntColumn,
    MemoryEvents,
    Trace,
)
from simpar.trace.utilisation import communicator, link_line
from simpar.view.pack import pack, span_columns
from simpar.view.palette import BUBBLES_FROM, DRAWN_KINDS, Palette, label, palette
from simpar.view.rows import Rows, role, who
from simpar.view.scene import Scene

_SCRIPTS = (
    *("unpack.js", "cut.js", "text.js", "panels.js", "folds.js"),
    *("lanes.js", "below.js", "over.js", "view.js", "hover.js", "page.js"),
)
_NOTHING: IntColumn = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the memory panel shows.

    Attributes:
        events: of all ranks, in time order.
        ranks: rank and stage of those that have events.
        capacity_bytes: of a device.
    """

    events: MemoryEvents
    ranks: tuple[tuple[int, int], ...]
    capacity_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A mark where a step ends.

    Attributes:
        at_ns: when.
        text: beside it.
        top: upper end, in lane heights.
        bottom: lower end.
        tone: colour, a field of the palette; or "".
    """

    at_ns: int
    text: str
    top: float
    bottom: float
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """A strip of signed errors, one per operation.

    Attributes:
        title: of the strip.
        kernels: whether they are kernels, not operations.
        row: its row in the operations or kernels of the scene.
        error: predicted over measured, less one.
    """

    title: str
    kernels: bool
    row: IntColumn
    error: FloatColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Everything that a page shows.

    Attributes:
        shown: lanes and spans.
        rows: where the lanes lie.
        steps: marks.
        band: stretch between two ends, and its colour, a field of the palette.
        notes: lines below the heading.
        headline: main figures by name.
        memory: for the panel, if any.
        errors: for the strip, if any.
        dark: whether the page opens dark; None leaves it to what the reader's system prefers.
    """

    shown: Scene
    rows: Rows
    steps: tuple[Step, ...]
    band: tuple[int, int, str] | None = None
    notes: tuple[str, ...] = ()
    headline: Mapping[str, str] = field(default_factory=dict)
    memory: Memory | None = None
    errors: Errors | None = None
    dark: bool | None = None


def memory_of(trace: Trace, capacity_bytes: float | None) -> Memory | None:
    """The memory panel of a trace; None if it has no memory events."""
    known = set(np.unique(trace.memory.rank).tolist())
    ranks = sorted({(lane.stage, lane.rank) for lane in trace.lanes if lane.rank in known})
    if not ranks:
        return None
    return Memory(
        events=trace.memory,
        ranks=tuple((rank, stage) for stage, rank in ranks),
        capacity_bytes=capacity_bytes,
    )


def write_contents(contents: Contents, path: str | Path, *, title: str) -> None:
    """Writes the page, whole or not at all.

    Raises:
        OutputError: if the folder of ``path`` does not exist or the file cannot be written.
    """
    write_whole(path, page(contents, title=title).encode())


def page(contents: Contents, *, title: str) -> str:
    """The page as text."""
    said, packed = packed_contents(contents, title=title)
    return fill_page(
        title=title,
        # "</script>" inside of the text would end it
        contents=json.dumps(said, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
        columns=packed,
        dark=contents.dark,
    )


def packed_contents(contents: Contents, *, title: str) -> tuple[dict[str, Any], str]:
    """What a page is to be told, and its columns as text."""
    columns, facts = _columns(contents)
    manifest, packed = pack(columns)
    return {**_facts(contents), **facts, "title": title, "manifest": manifest}, packed


def fill_page(*, title: str, contents: str, columns: str, dark: bool | None) -> str:
    """The page around its contents, which stand in it as given."""
    return Template(asset("timeline.html")).substitute(
        title=escape(title),
        style=asset("timeline.css"),
        script="\n".join(asset(name) for name in _SCRIPTS),
        contents=contents,
        columns=columns,
        colours=surfaces(dark, ("surface", "text", "faint", "line", "alarm")),
    )


def surfaces(dark: bool | None, names: Sequence[str]) -> str:
    """Style of a page until its script paints it: variables of these colours, of one palette or as a system prefers."""

    def root(colours: Palette) -> str:
        return f":root {{ {' '.join(f'--{name}: {getattr(colours, name)};' for name in names)} }}"

    if dark is not None:
        return root(palette(dark))
    return f"{root(palette(False))}\n@media (prefers-color-scheme: dark) {{ {root(palette(True))} }}"


def asset(name: str) -> str:
    """A file of the pages' own."""
    return files("simpar.view").joinpath("assets", name).read_text(encoding="utf-8")


def _facts(contents: Contents) -> dict[str, Any]:
    shown, rows = contents.shown, contents.rows
    lanes = shown.lanes
    chunks = [int(table.chunk.max(initial=-1)) + 1 for table in (shown.operations, shown.kernels)]
    left_out = [f"{shown.dropped:,} kernels are left out"] if shown.dropped else []
    return {
        "end": shown.end_ns,
        "count": shown.spans,
        "idle": BUBBLES_FROM,
        "communication": KINDS.index(COMMUNICATION_KINDS[0]),
        "chunks": max(chunks),
        "dark": contents.dark,
        "notes": [*contents.notes, *left_out],
        "headline": list(contents.headline.items()),
        "names": shown.names,
        "kinds": [{"label": label(name)} for name in DRAWN_KINDS],
        "palettes": {"light": _colours(palette(False)), "dark": _colours(palette(True))},
        "total": rows.total,
        "lanes": [_lane(contents, index) for index in range(len(lanes))],
        "groups": [
            {
                "top": group.top,
                "bottom": group.bottom,
                "rank": lanes[group.lane].rank,
                "title": role(lanes[group.lane]),
                "note": who(lanes[group.lane]),
                "count": lanes[group.lane].replicas,
                "fold": fold,
            }
            for group, fold in zip(rows.groups, rows.stream_stretches(lanes), strict=True)
        ],
        "rules": rows.rules,
        "titles": [
            {"text": text, "top": top, "fold": fold}
            for (text, top), fold in zip(rows.titles, rows.title_stretches, strict=True)
        ],
        "band": contents.band,
        "linkWord": "busy" if shown.link_s_per_byte is None else "used",
        "steps": [
            {"at": step.at_ns, "label": step.text, "top": step.top, "bottom": step.bottom, "tone": step.tone}
            for step in contents.steps
        ],
    }


def _lane(contents: Contents, index: int) -> dict[str, Any]:
    shown, rows = contents.shown, contents.rows
    lane, drawn = shown.lanes[index], bool(np.isfinite(rows.top[index]))
    # of two sides that are compared, nobody wants the mean
    is_link = lane.stream != "compute" and drawn and not shown.words
    return {
        "y": float(rows.top[index]) if drawn else -1e6,
        "h": float(rows.height[index]) if drawn else 0.0,
        "stream": rows.label(shown.lanes, index),
        "where": shown.where(index),
        "rank": lane.rank,
        "replicas": lane.replicas,
        "use": _use(shown, index) if is_link else [],
        "link": _line(shown, lane.stream) if is_link else "",
    }


def _line(shown: Scene, stream: str) -> str:
    return communicator(stream) if shown.link_s_per_byte is None else link_line(stream)


def _use(shown: Scene, lane: int) -> list[tuple[int, float]]:
    """Kinds of a lane's spans with the seconds of its links that each of their bytes takes."""
    if shown.link_s_per_byte is None:
        return []
    return [(int(kind), float(shown.link_s_per_byte[lane, kind])) for kind in shown.link_s_per_byte[lane].nonzero()[0]]


def _colours(colours: Palette) -> dict[str, Any]:
    return {
        **{name: getattr(colours, name) for name in ("surface", "text", "faint", "line", "alarm", "accent")},
        "long": colours.alarm,
        "short": colours.accent,
        "kinds": [colours.kinds[name] for name in DRAWN_KINDS],
        "memory": dict(colours.memory),
        "families": dict(colours.families),
    }


def _columns(contents: Contents) -> tuple[dict[str, Any], dict[str, Any]]:
    """All columns of the page, and what is to be said about them."""
    shown, count = contents.shown, len(contents.shown.lanes)
    operations, place = span_columns(shown.operations, count)
    kernels, kernel_place = span_columns(shown.kernels, count, place)
    columns: dict[str, Any] = {f"operations_{name}": column for name, column in operations.items()}
    columns |= {f"kernels_{name}": column for name, column in kernels.items()}
    columns |= {f"path_{name}": shown.path[:, i] for i, name in enumerate(("lane", "start", "end"))}
    memory_columns, memory_facts = _memory(contents.memory)
    error_columns, error_facts = _errors(contents, place, kernel_place)
    return {**columns, **memory_columns, **error_columns}, {**memory_facts, **error_facts}


def _memory(memory: Memory | None) -> tuple[dict[str, Any], dict[str, Any]]:
    if memory is None:
        return {f"memory_{name}": _NOTHING for name in ("rank", "gap", "category", "change")}, {"memory": None}
    events, ranks = memory.events, [rank for rank, _ in memory.ranks]
    order = np.argsort(events.rank, kind="stable")
    order = order[np.isin(events.rank[order], ranks)]
    index = {rank: i for i, rank in enumerate(ranks)}
    number = np.array([index[rank] for rank in events.rank[order].tolist()], np.int64)
    time = events.time_ns[order]
    first = np.diff(number, prepend=-1) != 0
    peaks = [int(np.cumsum(events.delta_bytes[events.rank == rank]).max()) for rank in ranks]
    facts = {
        "categories": MEMORY_CATEGORIES,
        "capacity": memory.capacity_bytes,
        "fullest": ranks[int(np.argmax(peaks))],
        "ranks": [
            {"rank": rank, "title": f"stage {stage} · GPU {rank}", "peak": peak}
            for (rank, stage), peak in zip(memory.ranks, peaks, strict=True)
        ],
    }
    columns = {
        "memory_rank": number,
        "memory_gap": np.where(first, time, np.diff(time, prepend=0)),
        "memory_category": events.category[order],
        "memory_change": events.delta_bytes[order],
    }
    return columns, {"memory": facts}


def _errors(contents: Contents, operations: IntColumn, kernels: IntColumn) -> tuple[dict[str, Any], dict[str, Any]]:
    errors = contents.errors
    if errors is None or not len(errors.row):
        nothing = np.zeros(0)
        return {"error_at": nothing, "error": nothing, "error_row": _NOTHING}, {"errors": None}
    shown = contents.shown
    spans, place = (shown.kernels, kernels) if errors.kernels else (shown.operations, operations)
    middle = spans.start_ns[errors.row] + spans.duration_ns[errors.row] / 2
    order = np.argsort(middle, kind="stable")
    largest = float(np.quantile(np.abs(errors.error), 0.98))
    columns = {"error_at": middle[order], "error": errors.error[order], "error_row": place[errors.row[order]]}
    return columns, {
        "errors": {
            "most": _round_up(largest),
            "title": errors.title,
            "table": "kernels" if errors.kernels else "operations",
        }
    }


def _round_up(share: float) -> float:
    """The next handy end of an axis for ``share``."""
    ends: Sequence[float] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    return next((end for end in ends if end >= share), 10.0)
