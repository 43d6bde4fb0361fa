"""The ``calibrate`` command, mounted as ``simpar calibrate`` and run as ``python -m calibrate``.

Exit codes: 0 done, 2 a mistake of the user (one line on stderr), 130 interrupted. Each command imports what it needs
when it runs.
"""

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from calibrate.console import INTERRUPTED, console
from calibrate.errors import MeasurementError
from simpar.errors import SimparError

if TYPE_CHECKING:
    from rich.table import Table

    from simpar.hardware.device import Device
    from simpar.hardware.profile import Accuracy, Profile

DONE, MISTAKE = 0, 2
_PIPED_WIDTH = 120  # nothing is cut where a program reads

_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # typer may bring its own copy of click

app = typer.Typer(
    name="calibrate",
    help="Measures devices and fits the costs with which simpar predicts.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _calibrate() -> None:
    """Measures devices and fits the costs with which simpar predicts."""


def register(parent: typer.Typer) -> None:
    """Adds these commands to another app, as ``calibrate``."""
    parent.add_typer(app, name="calibrate")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    Args:
        arguments: words of the command line; left out, those of the process.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        code = app(args=words, prog_name="simpar calibrate", standalone_mode=False)
        return code if isinstance(code, int) else DONE
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        return INTERRUPTED
    except _UsageError as error:
        typer.echo(error.format_message() if hasattr(error, "format_message") else str(error), err=True)
        return MISTAKE
    except SimparError as error:
        typer.echo(str(error), err=True)
        return MISTAKE


@app.command()
def fit(  # noqa: PLR0917 - Typer names the options after them
    files: Annotated[
        list[Path],
        typer.Argument(help="Recorded measurements: tables, JSON lines, logs of nccl-tests, torch profiles."),
    ],
    device: Annotated[str, typer.Option(help="Device that was measured, such as h100-sxm.")],
    out: Annotated[Path, typer.Option(help="Profile to write.")] = Path("profile.json"),
    base: Annotated[
        str | None, typer.Option(help="Catalog device with its datasheet rates, if --device is not in the catalog.")
    ] = None,
    stack: Annotated[
        list[str] | None,
        typer.Option(help="Only what one stack measured of a class: gemm.fp8=trtllm, collective=nccl/2.29.2. Repeat."),
    ] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="Only collectives over so many ranks. Repeat.", min=2)] = None,
    system: Annotated[str | None, typer.Option(help="Which system of a table with several; else as --device.")] = None,
    op: Annotated[
        str | None, typer.Option(help="Operation of logs of nccl-tests that do not name it, such as all_reduce.")
    ] = None,
    fabric: Annotated[str | None, typer.Option(help="Catalog fabric whose line rate the network has.")] = None,
    source: Annotated[str, typer.Option(help="Where the measurements come from, to record.")] = "",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every region and every way to hold out, a row each.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Fits a profile to recorded measurements and reports its errors by class and region, also on what was held out."""
    from calibrate.datasheet import with_datasheet  # noqa: PLC0415
    from calibrate.fit import fit_profile, select  # noqa: PLC0415
    from calibrate.tables import merge, read_any  # noqa: PLC0415
    from simpar.hardware.cluster import named_fabric  # noqa: PLC0415

    catalog = _catalog_device(device, base)
    systems = [system] if system else _systems(device, catalog.name)
    measurements = merge(read_any(file, systems=systems, op=op) for file in files)
    if stack or ranks:
        measurements = select(measurements, _stacks(stack or []), ranks or ())
    profile = fit_profile(
        measurements,
        with_datasheet(catalog, measurements.datasheet),
        name=catalog.name if base is None else device,
        source=source,
        command=_command(
            files,
            {
                "device": [device],
                "base": [base],
                "system": [system],
                "op": [op],
                "fabric": [fabric],
                "stack": stack or [],
                "ranks": ranks or [],
                "source": [source],
            },
        ),
        fabric=named_fabric(fabric) if fabric else None,
    )
    profile.write(out)
    if as_json:
        typer.echo(json.dumps(_outcome(profile, out), indent=1, ensure_ascii=False))
    else:
        _print(_every_region(profile) if verbose else _by_class(profile), profile, out)
        if not verbose:
            console().print(_summary(profile), markup=False)


@app.command()
def run(  # noqa: PLR0917 - Typer names the options after them
    out: Annotated[Path, typer.Option(help="Profile to write; the measurements go beside it.")] = Path("profile.json"),
    full: Annotated[
        bool, typer.Option("--full/--quick", help="More dtypes, sizes and rounds (minutes), or a minute's worth.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what an interrupted run measured.")] = False,
    job: Annotated[Path | None, typer.Option(help="Job file whose own products are measured too.")] = None,
    ranks: Annotated[
        int | None, typer.Option(help="Processes, one a GPU; all GPUs, or 2 on a CPU, by default.", min=1)
    ] = None,
    on: Annotated[str, typer.Option(help="auto (GPUs where there are any), cpu or cuda.")] = "auto",
    base: Annotated[
        str | None, typer.Option(help="Catalog device with the nearest datasheet, for a GPU that is not in it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Measures this machine, fits a profile to it, and reports what was measured and how well the fit does."""
    from calibrate.measure.command import run_command  # noqa: PLC0415

    words = [
        *(["--full"] if full else []),
        *(["--job", job.name] if job else []),
        *(["--on", on] if on != "auto" else []),
    ]
    words += ["--ranks", str(ranks)] if ranks else []
    words += ["--base", base] if base else []
    command = shlex.join(["simpar", "calibrate", "run", *words])
    outcome = run_command(out=out, full=full, resume=resume, job=job, ranks=ranks, on=on, base=base, command=command)
    if outcome is None:
        return  # another rank of a job of torchrun tells
    if as_json:
        typer.echo(json.dumps({**_outcome(outcome.profile, out), "measurements": str(outcome.raw)}, indent=1))
    else:
        from calibrate.measure.command import table  # noqa: PLC0415

        _print(table(outcome.profile, outcome.samples), outcome.profile, out)


@app.command()
def check(  # noqa: PLR0917 - Typer names the options after them
    profile: Annotated[Path, typer.Argument(help="Profile of this machine, as calibrate run wrote it.")],
    plans: Annotated[
        str | None, typer.Option(help="Of one, dp, zero1, fsdp, tp, gpipe, 1f1b, dp-pp, joined by commas; else all.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes, each with a device of its own.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer networks and rounds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Page to write: predicted and measured timelines.")] = None,
) -> None:
    """Predicts with a profile and measures here: replayed programs and real training steps, for each plan."""
    from calibrate.check.command import check_command  # noqa: PLC0415

    check_command(profile=profile, plans=plans, ranks=ranks, quick=quick, as_json=as_json, html=html)


@app.command()
def compare(  # noqa: PLR0917 - Typer names the options after them
    job: Annotated[Path, typer.Argument(help="Job file, which is predicted.")],
    trace: Annotated[Path, typer.Argument(help="One rank's profile of the same step, as torch.profiler exports it.")],
    step: Annotated[int | None, typer.Option(help="Number of its ProfilerStep; else the last complete one.")] = None,
    allow_oom: Annotated[bool, typer.Option("--allow-oom", help="Predict also what does not fit the devices.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Page to write: predicted and measured timeline.")] = None,
) -> None:
    """Predicts a job and lays a torch profile of it beside: step with interval, and the time of each kind of kernel."""
    from calibrate.compare import compare_command  # noqa: PLC0415

    compare_command(job=job, trace=trace, step=step, as_json=as_json, html=html, allow_oom=allow_oom)


@app.command()
def framework(  # noqa: PLR0917 - Typer names the options after them
    runs: Annotated[Path, typer.Argument(help="CSV table of measured steps, a row each (see simpar validate).")],
    out: Annotated[Path, typer.Option(help="YAML file to write; plans take it as framework.")],
    base: Annotated[str | None, typer.Option(help="Framework to start from; else the one that the rows name.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the new one; else that of the base.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Fits a training framework's few constants (host time, traffic, ...) to measured steps; about 40 rows will do."""
    from calibrate.framework import framework_command  # noqa: PLC0415

    framework_command(runs=runs, out=out, base=base, name=name, workers=workers, as_json=as_json)


def _catalog_device(name: str, base: str | None) -> "Device":
    from simpar.hardware.device import device  # noqa: PLC0415

    try:
        return device(base or name)
    except SimparError as error:
        if base is not None:
            raise
        raise MeasurementError(f"{error}; or name the catalog's nearest one with --base") from None


def _systems(*names: str) -> list[str]:
    """By what names a table may call a device: its own and its aliases."""
    from simpar.hardware.device import ALIASES  # noqa: PLC0415

    canonical = [ALIASES.get(name, name) for name in names]
    return [*names, *(alias for alias, name in ALIASES.items() if name in canonical)]


def _stacks(texts: Sequence[str]) -> dict[str, list[str]]:
    stacks: dict[str, list[str]] = {}
    for text in texts:
        what, equals, stack = text.partition("=")
        if not (what and equals and stack):
            raise MeasurementError(f"--stack '{text}' is no class with a stack; write it as in --stack gemm.fp8=trtllm")
        stacks.setdefault(what, []).append(stack)
    return stacks


def _command(files: Sequence[Path], options: Mapping[str, Sequence[str | int | None]]) -> str:
    """The command without folders, which say nothing to others."""
    words = ["simpar", "calibrate", "fit", *(file.name for file in files)]
    for name, values in options.items():
        for value in values:
            words += [f"--{name}", str(value)] if value else []
    return shlex.join(words)


def _outcome(profile: "Profile", out: Path) -> dict[str, Any]:
    return {
        "profile": str(out),
        "device": profile.device.name,
        "accuracy": [row.model_dump(mode="json") for row in profile.accuracy],
        "uncertainty": profile.uncertainty,
        "notes": list(profile.notes),
    }


_REGIONS = ("training", "large", "all")  # of a class, the first that it has matters most for training steps


def _by_class(profile: "Profile") -> "Table":
    """A row for each class: errors where it matters for training, as fitted and where they are worst held out."""
    from rich.table import Table  # noqa: PLC0415

    table = Table(title=f"{profile.name}: |predicted/measured - 1|", title_justify="left", box=None)
    for column in ("class", "region"):
        table.add_column(column, no_wrap=True)
    for column in ("points", "mean", "median", "held out"):
        table.add_column(column, no_wrap=True, justify="right")
    table.add_column("(the worst)")
    for row in _of_training(profile):
        held = _worst_held_out(profile, row)
        errors = [f"{value:.1%}" for value in (row.mean, row.median)]
        table.add_row(
            row.what,
            row.region,
            f"{row.count:,}",
            *errors,
            *((f"{held.mean:.1%}", held.split) if held is not None else ("", "")),
        )
    return table


def _of_training(profile: "Profile") -> "list[Accuracy]":
    """What was fitted, of each class in the region that matters most."""
    fitted = [row for row in profile.accuracy if row.split == "fitted"]
    found = []
    for what in dict.fromkeys(row.what for row in fitted):
        rows = {row.region: row for row in fitted if row.what == what}
        found.append(rows[next((region for region in _REGIONS if region in rows), next(iter(rows)))])
    return found


def _worst_held_out(profile: "Profile", fitted: "Accuracy") -> "Accuracy | None":
    """Of the ways to hold something out of the fit, the one that is predicted worst; None without any."""
    rows = [r for r in profile.accuracy if (r.what, r.region) == (fitted.what, fitted.region) and r.split != "fitted"]
    return max(rows, key=lambda row: row.mean, default=None)


def _summary(profile: "Profile") -> str:
    """How good the fit is, in one line."""
    rows = _of_training(profile)
    held = [each for each in (_worst_held_out(profile, row) for row in rows) if each is not None]
    worst = max(held, key=lambda row: row.mean, default=None)
    if not rows:
        return "nothing to judge the fit by"
    text = f"{len(rows)} classes, mean errors of {min(r.mean for r in rows):.1%} to {max(r.mean for r in rows):.1%}"
    if worst is not None:
        text += f"; worst held out: {worst.what} {worst.mean:.1%} ({worst.split})"
    return f"{text}; --verbose shows all {len(profile.accuracy)} rows"


def _every_region(profile: "Profile") -> "Table":
    from rich.table import Table  # noqa: PLC0415

    table = Table(title=f"{profile.name}: |predicted/measured - 1|, bias of log(predicted/measured)", box=None)
    for column in ("class", "region", "held out"):
        table.add_column(column, no_wrap=True)
    for column in ("points", "mean", "median", "p90", "bias"):
        table.add_column(column, no_wrap=True, justify="right")
    for row in profile.accuracy:
        held = "" if row.split == "fitted" else row.split
        errors = [f"{value:.1%}" for value in (row.mean, row.median, row.p90)]
        table.add_row(row.what, row.region, held, f"{row.count:,}", *errors, f"{row.bias:+.1%}")
    return table


def _print(table: "Table", profile: "Profile", out: Path) -> None:
    terminal = console(piped_width=_PIPED_WIDTH)
    terminal.print(table)
    for note in profile.notes:
        terminal.print(f"note: {note}", markup=False)
    terminal.print(f"wrote {out}", markup=False)
