"""``simpar compare``: two jobs side by side."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpar.cli.terminal import check_outputs, show, simulated

if TYPE_CHECKING:
    from rich.console import Group

    from simpar.whatif.comparison import Comparison

_CHANGE = "FIELD=VALUE"


def compare(  # noqa: PLR0917 - Typer reads its flags from the signature
    a: Annotated[Path, typer.Argument(metavar="A.yaml", help="Job file.", show_default=False)],
    b: Annotated[Path, typer.Argument(metavar="B.yaml", help="The other job file.", show_default=False)],
    both: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar=_CHANGE, help="Change a field of both; repeatable.")
    ] = None,
    only_a: Annotated[
        list[str] | None, typer.Option("--set-a", metavar=_CHANGE, help="Change a field of A; repeatable.")
    ] = None,
    only_b: Annotated[
        list[str] | None, typer.Option("--set-b", metavar=_CHANGE, help="Change a field of B; repeatable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words and a table.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Write a plot as a page.", show_default=False)
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline", metavar="OUT.html", help="Write both timelines on one axis as a page.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws behind the probability.")] = 0,
    allow_oom: Annotated[bool, typer.Option("--allow-oom", help="Compare even if one does not fit.")] = False,
) -> None:
    """Say where the difference between A.yaml and B.yaml comes from, and how likely A is the faster one."""
    from simpar.whatif.comparison import compare as run  # noqa: PLC0415

    outputs = {flag: path for flag, path in (("--html", html), ("--timeline", timeline)) if path is not None}
    check_outputs(outputs, a)
    check_outputs(outputs, b)
    one, other = (
        simulated(path, {}, [*(both or ()), *(own or ())], allow_oom) for path, own in ((a, only_a), (b, only_b))
    )
    found = run(one, other, seed=seed)
    if json_:
        typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        show(_report(found))
    if html is not None:
        from simpar.view.explain import comparison_figure  # noqa: PLC0415
        from simpar.view.page import write_page  # noqa: PLC0415

        write_page(comparison_figure(found), html, title="simpar compare")
        typer.echo(f"wrote {html}", err=True)
    if timeline is not None:
        one.compare(other, words=("A", "B")).write_html(timeline)
        typer.echo(f"wrote {timeline}", err=True)


def _report(found: "Comparison") -> "Group":
    from rich import box  # noqa: PLC0415
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from simpar.units import format_time  # noqa: PLC0415

    def signed(nanoseconds: int) -> str:
        return f"{'+' if nanoseconds > 0 else '−' if nanoseconds else ''}{format_time(abs(nanoseconds) * 1e-9)}"

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("critical path", no_wrap=True, min_width=28)
    for column in ("A", "B", "B − A"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in found.parts:
        times = (format_time(part.a_ns * 1e-9), format_time(part.b_ns * 1e-9))
        table.add_row(part.name, *times, signed(part.difference_ns))
    steps = (format_time(found.a.step_time_s), format_time(found.b.step_time_s))
    table.add_row("step", *steps, signed(found.difference_ns), style="bold")
    titles = [Text(f"{name}: {result.title}", style="bold") for name, result in (("A", found.a), ("B", found.b))]
    return Group(*titles, Text(), *(Text(sentence) for sentence in found.words), Text(), table)
