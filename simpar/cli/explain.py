"""``simpar explain``: what bounds a step, and what one could gain at most by removing it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpar.cli.flags import Changes, Cluster, Framework, JobFile, Model
from simpar.cli.terminal import check_outputs, show, simulated

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from simpar.whatif.explanation import Explanation

_PARAMETERS = 8  # the steepest ones; the JSON has all


def explain(  # noqa: PLR0917 - Typer reads its flags from the signature
    job: JobFile = None,
    model: Model = None,
    cluster: Cluster = None,
    framework: Framework = None,
    changes: Changes = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words and tables.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Write a plot as a page.", show_default=False)
    ] = None,
    allow_oom: Annotated[bool, typer.Option("--allow-oom", help="Explain even if it does not fit.")] = False,
) -> None:
    """Say what bounds the step of JOB.yaml (or of a job given by flags), and what removing it could gain at most."""
    from simpar.whatif.explanation import explain as run  # noqa: PLC0415

    check_outputs({"--html": html} if html is not None else {}, job)
    flags = {"model": model, "cluster": cluster, "plan.framework": framework}
    found = run(simulated(job, flags, changes or (), allow_oom, command="explain"))
    if json_:
        typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        show(_report(found))
    if html is not None:
        from simpar.view.explain import explanation_figure  # noqa: PLC0415
        from simpar.view.page import write_page  # noqa: PLC0415

        write_page(explanation_figure(found), html, title=found.result.title)
        typer.echo(f"wrote {html}", err=True)


def _report(found: "Explanation") -> "Group":
    from rich.console import Group  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    words = [Text(sentence) for sentence in found.words]
    parts = [_path(found), _headroom(found), _sensitivities(found)]
    spaced = [piece for part in parts for piece in (Text(), part)]
    return Group(Text(found.result.title, style="bold"), Text(), *words, *spaced)


def _path(found: "Explanation") -> "Table":
    from simpar.units import format_time  # noqa: PLC0415

    table = _table("critical path", ["time", "share"])
    for name, spent in found.path_ns.items():
        table.add_row(name, format_time(spent * 1e-9), f"{spent / found.result.trace.step_ns:.1%}")
    table.add_row("step", format_time(found.result.step_time_s), "100.0%", style="bold")
    return table


def _headroom(found: "Explanation") -> "Table":
    from simpar.units import format_time  # noqa: PLC0415

    table = _table("if it cost no time", ["step", "gain at most"])
    for room in found.headroom:
        table.add_row(room.resource, format_time(room.step_s), f"{room.gain_s / found.result.step_time_s:.1%}")
    return table


def _sensitivities(found: "Explanation") -> "Table":
    table = _table("parameter, 1% better", ["shortens the step by"])
    for each in sorted(found.sensitivities, key=lambda s: -s.seconds)[:_PARAMETERS]:
        if each.share > 0:
            table.add_row(each.parameter.label, f"{each.share * 1e-2:.3%}")
    return table


def _table(first: str, columns: list[str]) -> "Table":
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(first, no_wrap=True, min_width=34)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
