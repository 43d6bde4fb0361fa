"""``simpar validate``: measured runs beside their predictions."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simpar.cli.terminal import check_outputs, show
from simpar.errors import JobError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simpar.validation.predict import Prediction
    from simpar.validation.report import ValidationReport
    from simpar.validation.statistics import GroupError

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
        return
    show(*_tables(report, scaled=scale != "none"))


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


def _tables(report: "ValidationReport", *, scaled: bool) -> "list[RenderableType]":
    from rich.table import Table  # noqa: PLC0415

    errors = Table(title="Error of the predicted step time", title_justify="left")
    errors.add_column(" ".join(report.columns))
    names = ["rows", "median", "mean", "p90", "bias"]
    names += ["scaled median", "scaled p90"] if scaled else []
    names += ["rank corr.", "regret", "memory", "in interval"]
    for name in names:
        errors.add_column(name, justify="right")
    for group in [*report.groups, report.overall, report.flagged]:
        if group.n + group.refused:
            errors.add_row(group.group, *_cells(group, scaled=scaled))
    parts: list[RenderableType] = [errors]
    if report.worst:
        worst = Table(title="Furthest off", title_justify="left")
        for name in ("row", "model", "plan"):
            worst.add_column(name)
        for name in ("measured", "predicted", "error"):
            worst.add_column(name, justify="right")
        for prediction in report.worst:
            worst.add_row(*_worst(prediction))
        parts.append(worst)
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


def _cells(group: "GroupError", *, scaled: bool) -> list[str]:
    rows = f"{group.n:,}" + (f" (+{group.refused:,} refused)" if group.refused else "")
    figures = [_percent(group.median), _percent(group.mean), _percent(group.p90), _percent(group.bias, signed=True)]
    if scaled:
        figures += [_percent(group.scaled_median), _percent(group.scaled_p90)]
    ranking = [f"{x:.2f}" if x is not None else "" for x in (group.spearman, group.regret)]
    return [rows, *figures, *ranking, _percent(group.memory_median), _percent(group.covered)]


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _worst(prediction: "Prediction") -> list[str]:
    run = prediction.run
    degrees = {"tp": run.tp, "pp": run.pp, "cp": run.cp, "ep": run.ep, "vpp": run.vpp, "dp": run.dp or 1}
    plan = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "1 GPU"
    plan += f" zero{run.zero} micro-batch {run.micro_batch or '?'}"
    assert prediction.predicted_s is not None, "refused rows have no error"
    return [
        run.id,
        run.model,
        plan,
        f"{run.step_time_s:.3g} s",
        f"{prediction.predicted_s:.3g} s",
        f"{prediction.error:+.1%}",
    ]
