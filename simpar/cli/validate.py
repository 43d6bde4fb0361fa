"""``simpar validate``: measured runs beside their predictions."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpar.cli.terminal import check_outputs, console, narrowed, show
from simpar.errors import JobError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simpar.validation.predict import Prediction
    from simpar.validation.report import ValidationReport
    from simpar.validation.statistics import GroupError

# columns that a narrow terminal does without, the least important first
_LEAST = ("mean", "rank\ncorr.", "scaled\np90", "regret", "memory", "scaled\nmedian", "in\ninterval", "bias")
_NAME_WIDTH = 24  # of a group's name, which wraps beyond
_WORDS = ("row", "model", "plan")
_REFUSALS = 8  # reasons that are shown; JSON has all


def validate(  # noqa: PLR0917 - Typer names the options after them
    runs: Annotated[Path, typer.Argument(help="CSV table of measured runs, a row each", metavar="RUNS.csv")],
    by: Annotated[str, typer.Option(help="columns that make a group, comma-separated")] = "source,gpu,framework",
    scale: Annotated[
        str, typer.Option(help="leave-one-out: also show errors after one scale factor per source, GPU and precision")
    ] = "leave-one-out",
    workers: Annotated[int | None, typer.Option(min=1, help="processes; one per core if left out")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
    html: Annotated[Path | None, typer.Option(help="write an interactive page", metavar="FILE")] = None,
) -> None:
    """Predict every measured run of a table with the ordinary engine, and report the errors.

    Rows that are flagged as suspicious are reported apart, rows that cannot be simulated are listed with the reason.
    """
    from simpar.validation.predict import predict_all  # noqa: PLC0415
    from simpar.validation.report import ValidationReport  # noqa: PLC0415
    from simpar.validation.runs import read_runs  # noqa: PLC0415
    from simpar.validation.statistics import by_group  # noqa: PLC0415

    if scale not in ("leave-one-out", "none"):
        raise JobError(f"--scale: '{scale}' is not known; give leave-one-out or none")
    columns = tuple(name.strip() for name in by.split(",") if name.strip())
    table = read_runs(runs)
    by_group((), columns)  # a wrong column is told before the work
    if html is not None:
        check_outputs({"--html": html}, runs)
    with _Bar(len(table)) as bar:
        predictions = predict_all(table, workers=workers, progress=bar.show)
    report = ValidationReport(tuple(predictions), columns)
    if html is not None:
        from simpar.view.accuracy import write_accuracy  # noqa: PLC0415

        write_accuracy(report, html)
        typer.echo(f"wrote {html}", err=True)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), ensure_ascii=False))
    else:
        show(*_tables(report, scaled=scale != "none", width=console().width))
    if all(each.predicted_s is None for each in predictions):
        raise typer.Exit(2)  # the reasons have been told


class _Bar:
    """A progress bar on stderr; nothing where nobody looks."""

    def __init__(self, total: int) -> None:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

        console = Console(stderr=True)
        columns = (TextColumn("predicting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("predicting", total=total)

    def __enter__(self) -> "_Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, done: int) -> None:
        """So many rows are done."""
        self._progress.update(self._task, completed=done)


def _tables(report: "ValidationReport", *, scaled: bool, width: int) -> "list[RenderableType]":
    from rich.table import Table  # noqa: PLC0415

    groups = [each for each in [*report.groups, report.overall, report.flagged] if each.n + each.refused]
    name = " ".join(report.columns)
    cells = [{name: group.group, **_cells(group, scaled=scaled)} for group in groups]
    parts = list(_narrowed("Error of the predicted step time", cells, _LEAST, width, wraps={name: _NAME_WIDTH}))
    if report.worst:
        furthest = [_worst(each) for each in sorted(report.worst, key=lambda each: -abs(each.error))]
        parts += _narrowed("Furthest off", furthest, ("model", "measured"), width, wraps={"row": 12, "plan": 20})
    if report.refusals:
        refused = Table(title="Not simulated", title_justify="left")
        refused.add_column("rows", justify="right")
        refused.add_column("first")
        refused.add_column("reason")
        for reason, members in report.refusals[:_REFUSALS]:
            refused.add_row(f"{len(members):,}", members[0].run.id, reason)
        parts.append(refused)
        left = sum(len(members) for _, members in report.refusals[_REFUSALS:])
        if left:
            parts.append(f"and {left:,} rows for {len(report.refusals) - _REFUSALS:,} other reasons (--json has all)")
    return parts


def _narrowed(
    title: str, rows: "list[dict[str, str]]", least: tuple[str, ...], width: int, *, wraps: dict[str, int]
) -> "Iterator[RenderableType]":
    """A table of the columns that there is room for, and what is left out."""
    from rich.table import Table  # noqa: PLC0415

    heads = list(rows[0])
    shown = narrowed(rows, heads, least, width, wraps=wraps)
    table = Table(title=title, title_justify="left")
    for head in shown:
        words = head in _WORDS or head in wraps
        table.add_column(head, justify="left" if words else "right", no_wrap=head not in wraps, overflow="fold")
    for row in rows:
        table.add_row(*(row[head] for head in shown))
    yield table
    left_out = [" ".join(head.split()) for head in heads if head not in shown]
    if left_out:
        yield f"left out for want of width: {', '.join(left_out)} (--json has all)"


def _cells(group: "GroupError", *, scaled: bool) -> dict[str, str]:
    rows = f"{group.n:,}" + (f" (+{group.refused:,} refused)" if group.refused else "")
    return {
        "rows": rows,
        "median": _percent(group.median),
        "mean": _percent(group.mean),
        "p90": _percent(group.p90),
        "bias": _percent(group.bias, signed=True),
        **(
            {"scaled\nmedian": _percent(group.scaled_median), "scaled\np90": _percent(group.scaled_p90)}
            if scaled
            else {}
        ),
        "rank\ncorr.": f"{group.spearman:.2f}" if group.spearman is not None else "",
        "regret": f"{group.regret:.2f}" if group.regret is not None else "",
        "memory": _percent(group.memory_median),
        "in\ninterval": _percent(group.covered),
    }


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _worst(prediction: "Prediction") -> dict[str, str]:
    run = prediction.run
    degrees = {"tp": run.tp, "pp": run.pp, "cp": run.cp, "ep": run.ep, "vpp": run.vpp, "dp": run.dp or 1}
    plan = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "1 GPU"
    plan += f" zero{run.zero} micro-batch {'?' if run.micro_batch is None else f'{run.micro_batch:g}'}"
    assert prediction.predicted_s is not None, "refused rows have no error"
    return {
        "row": run.id,
        "model": run.model,
        "plan": plan,
        "measured": f"{run.step_time_s:.3g} s",
        "predicted": f"{prediction.predicted_s:.3g} s",
        "error": f"{prediction.error:+.1%}",
    }
