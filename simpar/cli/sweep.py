"""``simpar sweep``: one job with some fields varied, as a table."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpar.cli.flags import Cluster, Framework, Model
from simpar.cli.terminal import between, check_outputs, console, narrowed, show
from simpar.errors import JobError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simpar.search.sweep import Record, Sweep

_NOTE = ""  # head of the last column
_LEAST = ("bubble", "tokens/s", "MFU")  # columns that a narrow terminal does without, the least important first

EPILOG = """\
[cyan]--vary plan.tp=1,2,4,8[/] takes these values, [cyan]--vary cluster.nic_gbps=200..800[/] doubles from 200 to 800, \
[cyan]--vary plan.pp=1..8:1[/] adds 1. A field of a part (cluster.fabric.nic_gbps) may be named without it where only \
one part has it. Several --vary make every combination; one that breaks a rule is a row with the reason.
"""


def sweep(  # noqa: PLR0917 - Typer reads its flags from the signature
    job: Annotated[Path | None, typer.Argument(metavar="JOB.yaml", help="Job file.")] = None,
    model: Model = None,
    cluster: Cluster = None,
    framework: Framework = None,
    vary: Annotated[
        list[str] | None, typer.Option("--vary", metavar="FIELD=VALUES", help="Values of a field; repeatable.")
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Any field of the job; repeatable.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes; else one per core.")] = None,
    dask: Annotated[str | None, typer.Option(metavar="tcp://…", help="Run on the workers of a Dask scheduler.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Stream every row to this file.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the file of --output.")] = False,
    table: Annotated[
        Path | None, typer.Option(metavar="OUT.csv", help="Write the rows: .csv, .parquet or .jsonl.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write a plot as a page.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Write a page with every plan and its timeline.")
    ] = None,
    value: Annotated[str, typer.Option(metavar="COLUMN", help="What to plot.")] = "step_time_s",
    json_: Annotated[bool, typer.Option("--json", help="Print the rows as JSON instead of a table.")] = False,
) -> None:
    """Simulate a job with every combination of values."""
    from simpar.cli.jobfile import parse_change, read_draft  # noqa: PLC0415
    from simpar.cli.search import executor_of, once, progress_bar  # noqa: PLC0415
    from simpar.search.records import check_format  # noqa: PLC0415
    from simpar.search.sweep import sweep as run  # noqa: PLC0415
    from simpar.search.vary import parse_vary  # noqa: PLC0415

    if not vary:
        raise JobError("simpar sweep: nothing is varied; give --vary, such as --vary plan.tp=1,2,4,8")
    if resume and output is None:
        raise JobError("--resume: goes on with the file of --output; name it")
    outputs = {"--output": output, "--table": table, "--plot": plot, "--html": html}
    check_outputs({flag: path for flag, path in outputs.items() if path is not None}, job)
    if table is not None:
        check_format(table)
    flags: list[tuple[tuple[str, ...], Any]] = []
    flags += [(("model",), model)] if model is not None else []
    flags += [(("cluster",), cluster)] if cluster is not None else []
    flags += [(("plan", "framework"), framework)] if framework is not None else []
    draft = read_draft(job, [*flags, *map(parse_change, changes or ())])
    values = once(map(parse_vary, vary), "--vary")
    base = draft.job()
    with executor_of(dask) as executor, progress_bar() as progress:
        found = run(
            base,
            values,
            executor=executor,
            workers=workers,
            output=output,
            resume=resume,
            progress=partial(progress, "rows"),
        )
        if html is not None:
            from simpar.view.sweep_page import write_sweep_page  # noqa: PLC0415

            write_sweep_page(base, values, found.rows, html, progress=partial(progress, "timelines"))
            typer.echo(f"wrote {html}", err=True)
    _write(found, table, plot, value)
    if json_:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(found.records(), indent=2, allow_nan=False))
        return
    show(_table(found, console().width))


def _write(found: "Sweep", table: Path | None, plot: Path | None, value: str) -> None:
    if table is not None:
        found.write(table)
        typer.echo(f"wrote {table}", err=True)
    if plot is not None:
        from simpar.view.sweep_chart import write_sweep  # noqa: PLC0415

        write_sweep(found.records(), found.varied, plot, value=value)
        typer.echo(f"wrote {plot}", err=True)


def _table(found: "Sweep", width: int) -> "RenderableType":
    """The columns that there is room for; reasons of rows without figures stand below, each once."""
    from rich import box  # noqa: PLC0415
    from rich.console import Group  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    errors: dict[str, int] = {}  # numbers of the reasons
    for row in found.rows:
        if "error" in row:
            errors.setdefault(row["error"], len(errors) + 1)
    rows = [_cells(row, found.varied, errors) for row in found.rows]
    heads = list(dict.fromkeys(head for row in rows for head in row if head != _NOTE))
    rows = [{head: row.get(head, "") for head in (*heads, _NOTE)} for row in rows]
    shown = narrowed(rows, [*heads, _NOTE], _LEAST, width, wraps={})
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in shown:
        note = head == _NOTE
        table.add_column(head, justify="left" if note else "right", no_wrap=True, style="red" if note else "")
    for row in rows:
        table.add_row(*(row[head] for head in shown))
    left_out = [head for head in heads if head not in shown]
    below = [Text(f"error {number}: {reason}", style="red") for reason, number in errors.items()]
    if left_out:
        below.append(Text(f"left out for want of width: {', '.join(left_out)} (--json has all)", style="dim"))
    return Group(table, *below)


def _cells(row: "Record", varied: tuple[str, ...], errors: dict[str, int]) -> dict[str, str]:
    """Cells of a row by the head of their column."""
    from simpar.uncertainty import USUAL_LEVEL  # noqa: PLC0415
    from simpar.units import format_bytes, format_count, format_time  # noqa: PLC0415

    cells = {path: str(row[path]) for path in varied}
    if "error" in row:
        return {**cells, _NOTE: f"error {errors[row['error']]}"}
    return {
        **cells,
        "step": format_time(row["step_time_s"]),
        f"{USUAL_LEVEL:.0%} interval": between(row["low_s"], row["high_s"]),
        "MFU": f"{row['mfu']:.1%}",
        "tokens/s": format_count(row["tokens_per_s"]),
        "bubble": f"{row['bubble_fraction']:.1%}",
        "memory": format_bytes(row["memory_bytes"]),
        **({"cost/step": f"{row['cost_per_step']:,.2f}"} if "cost_per_step" in row else {}),
        _NOTE: "" if row["fits"] else "does not fit",
    }
