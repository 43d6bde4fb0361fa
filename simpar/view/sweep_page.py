"""Every plan of a sweep or a search as one page without a network: table, selectors, points, and each plan's timeline.

The page (``assets/sweep.*``) holds the packed timelines of its plans, operations without their kernels, and opens the
chosen one in a frame of the timeline's own page, so that both look and behave alike.
"""

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from itertools import product
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from simpar.errors import JobError, SimparError
from simpar.job import Job
from simpar.result import Result
from simpar.search.vary import changed, locate
from simpar.simulation import simulate
from simpar.trace.export import write_whole
from simpar.view.palette import Palette, palette
from simpar.view.rows import place
from simpar.view.scene import scene
from simpar.view.search_plots import FIGURES, front, plan_fields, plan_text
from simpar.view.timeline import page_contents
from simpar.view.timeline_page import asset, fill_page, packed_contents, surfaces

if TYPE_CHECKING:
    from simpar.search.found import SearchResult

MOST_TIMELINES = 60
"""Plans with a timeline; those on the front and the fastest come first."""

Progress = Callable[[int, int], None]

_SCRIPTS = ("unpack.js", "text.js", "sweep_plots.js", "sweep.js")
_SHARED = ("palettes", "kinds", "idle", "communication")  # equal in every timeline


def write_sweep_page(
    job: Job,
    vary: Mapping[str, Iterable[Any]],
    rows: Sequence[Mapping[str, Any]],
    path: str | Path,
    *,
    progress: Progress | None = None,
) -> None:
    """Writes the page of a sweep.

    Args:
        job: as given to :func:`simpar.search.sweep.sweep`.
        vary: as given there.
        rows: of the sweep.
        path: the file.
        progress: is told how many timelines are done, and of how many.

    Raises:
        JobError: no row has figures.
        OutputError: the file cannot be written.
    """
    values = {field: list(choices) for field, choices in vary.items()}
    places = [locate(job, field) for field in values]

    def job_of(row: int) -> Job:
        combination = next(c for n, c in enumerate(product(*values.values())) if n == row)
        return changed(job, zip(places, combination, strict=True))

    title = f"{job.model.name} on {job.cluster.gpus:,} {job.cluster.device.name}"
    write_plans(rows, job_of, path, title=title, fields=list(values), progress=progress)


def write_search_page(found: "SearchResult", path: str | Path, *, progress: Progress | None = None) -> None:
    """Writes the page of a search: what it simulated; arguments and errors as :func:`write_sweep_page`."""
    first, records = found.jobs[0], found.records()
    if len(found.jobs) > 1:
        names = [f"{job.cluster.gpus:,} {job.cluster.device.name}" for job in found.jobs]
        records = [{"on": names[record["cluster"]], **record} for record in records]
    names_of = dict.fromkeys(f"{job.cluster.gpus:,} {job.cluster.device.name}" for job in found.jobs)
    write_plans(
        records,
        lambda row: found.job(found.found[row]),
        path,
        title=f"{first.model.name} on {', '.join(names_of)}",
        notes=[str(found.counts)],
        progress=progress,
    )


def write_plans(
    records: Sequence[Mapping[str, Any]],
    job_of: Callable[[int], Job],
    path: str | Path,
    *,
    title: str,
    fields: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    most: int = MOST_TIMELINES,
    dark: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes the page of any set of plans.

    Args:
        records: a flat record per plan: its fields and the figures of :func:`simpar.search.sweep.figures`, or
            ``error``.
        job_of: the job of a row, simulated again for its timeline.
        path: the file.
        title: heading.
        fields: keys that say what a plan is; left out, those in which the records differ.
        notes: lines below the heading.
        most: plans with a timeline.
        dark: whether the page opens dark; else it opens as the reader's system prefers.
        progress: is told how many timelines are done, and of how many.

    Raises:
        JobError: no record has figures.
        OutputError: the file cannot be written.
    """
    best = front(records)
    if not any(record.get("step_time_s") for record in records):
        raise JobError("no plan has a step time, so there is no page to write; look at the errors of the rows")
    chosen = _chosen(records, best, most)
    timelines: dict[int, tuple[dict[str, Any], str]] = {}
    for number, row in enumerate(chosen):
        if progress is not None:
            progress(number, len(chosen))
        try:
            result = simulate(job_of(row), allow_oom=True)
        except SimparError:  # its row says why
            continue
        timelines[row] = packed_timeline(result)
    left = sum(1 for record in records if record.get("step_time_s")) - len(timelines)
    said = [*notes, *([f"timelines of the best {len(timelines)}"] if left > 0 else [])]
    keys = list(fields) if fields is not None else plan_fields(records)
    facts = {
        "title": title,
        "notes": said,
        "dark": dark or None,
        "fields": keys,
        "rows": [_row(record, keys) for record in records],
        "front": best,
        "palettes": {"light": _colours(palette(False)), "dark": _colours(palette(True))},
    }
    write_whole(path, _page(facts, timelines, title=title, dark=dark).encode())


def packed_timeline(result: Result) -> tuple[dict[str, Any], str]:
    """A timeline of operations, as the page of a timeline takes it; whether it is dark, the page around it says."""
    trace = replace(result.trace, expand=None)
    shown = scene(trace)
    unseen = {lane.stream for lane in trace.lanes} - {trace.lanes[lane].stream for lane in shown.used.tolist()}
    words = f"left out for size: {' and '.join(sorted(unseen))} inside layers ('simpar simulate --timeline' shows all)"
    contents = page_contents(
        trace,
        shown,
        place(shown.lanes, shown.used),
        subtitle=words if unseen else "",
        headline=result.headline,
        memory_capacity_bytes=result.job.cluster.device.memory_bytes,
    )
    return packed_contents(contents, title=result.title)


def _chosen(records: Sequence[Mapping[str, Any]], best: Sequence[int], most: int) -> list[int]:
    timed = [row for row, record in enumerate(records) if record.get("step_time_s")]
    fastest = sorted(timed, key=lambda row: (not records[row].get("fits", True), records[row]["step_time_s"]))
    return sorted(list(dict.fromkeys([*best, *fastest]))[:most])


def _row(record: Mapping[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    kept = {key: record.get(key) for key in FIGURES if record.get(key) is not None}
    return {**kept, "plan": [record.get(field) for field in fields], "text": plan_text(record, fields)}


def _page(facts: dict[str, Any], timelines: Mapping[int, tuple[dict[str, Any], str]], *, title: str, dark: bool) -> str:
    shared = {key: said[key] for said, _ in timelines.values() for key in _SHARED}
    told = {row: {k: v for k, v in said.items() if k not in _SHARED} for row, (said, _) in timelines.items()}
    frame = fill_page(title="timeline", contents="@CONTENTS@", columns="@COLUMNS@", dark=dark or None)
    everything = {**facts, "shared": shared, "timelines": told, "frame": frame}
    columns = {row: packed for row, (_, packed) in timelines.items()}
    return Template(asset("sweep.html")).substitute(
        title=escape(title),
        style=asset("sweep.css"),
        script="\n".join(asset(name) for name in _SCRIPTS),
        contents=_deflated(everything),
        columns=json.dumps(columns, separators=(",", ":")),
        colours=surfaces(dark or None, ("surface", "text", "faint", "line", "alarm", "accent")),
    )


def _deflated(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode("ascii")


def _colours(colours: Palette) -> dict[str, Any]:
    names = ("surface", "text", "faint", "line", "alarm", "accent")
    return {**{name: getattr(colours, name) for name in names}, "ramp": list(colours.ramp)}
