"""``simpar goodput``: how much of a run of days trains, with failures, checkpoints and restarts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpar.cli.terminal import check_outputs, show
from simpar.errors import JobError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simpar.reliability.goodput import Goodput
    from simpar.result import Result


def goodput(  # noqa: PLR0917 - Typer reads its flags from the signature
    job: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="Job file.", show_default=False)],
    checkpoint_s: Annotated[
        float, typer.Option(metavar="S", help="How long training stands still for a checkpoint.", show_default=False)
    ],
    restart_s: Annotated[
        float, typer.Option(metavar="S", help="From a failure until training goes on.", show_default=False)
    ],
    days: Annotated[float, typer.Option(metavar="N", help="Wall time of the run.", show_default=False)],
    mtbf_gpu_h: Annotated[
        float | None, typer.Option(metavar="H", help="Hours between failures of one GPU.", show_default=False)
    ] = None,
    mtbf_node_h: Annotated[
        float | None, typer.Option(metavar="H", help="Hours between failures of one node, its GPUs aside.")
    ] = None,
    interval_s: Annotated[
        float | None, typer.Option(metavar="S", help="Training between checkpoints; else Daly's optimum.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, metavar="N", help="Simulated runs of each interval.")] = 8,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the first run's failures.")] = 0,
    changes: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Any field of the job; repeatable.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="OUT.html", help="Write goodput by interval as a page.")] = None,
) -> None:
    """Simulate a run of days: failures, restarts, checkpoints, and the best interval between these.

    The step comes from the ordinary simulation of the job. Failures are random with a constant rate.
    """
    from simpar.cli.jobfile import parse_change, read_draft  # noqa: PLC0415
    from simpar.reliability.failures import Failures  # noqa: PLC0415
    from simpar.reliability.goodput import goodput as run  # noqa: PLC0415
    from simpar.simulation import simulate  # noqa: PLC0415

    if html is not None:
        check_outputs({"--html": html}, job)
    draft = read_draft(job, map(parse_change, changes or ()))
    checked = draft.job()
    draft.lay_out(checked)
    if mtbf_gpu_h is None and mtbf_node_h is None:
        raise JobError("simpar goodput: how often something fails is not given; give --mtbf-gpu-h or --mtbf-node-h")
    failures = Failures(
        gpus=checked.cluster.gpus,
        gpus_per_node=checked.cluster.gpus_per_node,
        mtbf_gpu_h=mtbf_gpu_h,
        mtbf_node_h=mtbf_node_h,
        checkpoint_s=checkpoint_s,
        restart_s=restart_s,
        days=days,
    )
    result = simulate(checked)
    found = run(failures, interval_s=interval_s, step_s=result.step_time_s, seed=seed, runs=runs)
    if html is not None:
        from simpar.view.goodput_chart import write_goodput  # noqa: PLC0415

        write_goodput(found, html, title=result.title)
        typer.echo(f"wrote {html}", err=True)
    if json_:
        typer.echo(json.dumps({**_training(result, found), **found.to_dict()}, indent=2, allow_nan=False))
        return
    show(*_tables(result, found))


def _training(result: "Result", found: "Goodput") -> dict[str, Any]:
    """What the run gets done, on the mean of the simulated ones."""
    useful_s = found.goodput * found.failures.wall_s
    return {
        "step_time_s": result.step_time_s,
        "steps": useful_s / result.step_time_s,
        "tokens": useful_s * result.tokens_per_s,
        "tokens_per_s": found.goodput * result.tokens_per_s,
    }


def _tables(result: "Result", found: "Goodput") -> "list[RenderableType]":
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    from simpar.units import format_count, format_duration, format_time  # noqa: PLC0415

    done = _training(result, found)
    failures, runs = found.failures, found.runs
    made = sum(run.failures for run in runs) / len(runs)
    whole = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    whole.add_column()
    whole.add_column(justify="right")
    low, high = (pick(run.goodput for run in runs) for pick in (min, max))
    written = sum(run.checkpoints for run in runs) / len(runs)
    rows = {
        "a failure every": format_duration(failures.mtbf_s),
        f"failures in {failures.days:g} days": f"{made:,.0f}",
        f"checkpoints, every {format_duration(found.interval_s)}": f"{written:,.0f}",
        f"goodput ({len(runs)} runs)": f"{found.goodput:.1%} ({low:.1%} to {high:.1%})",
        "goodput by Daly's formula": f"{found.expected:.1%}",
        **{f"  {name}": f"{share:.1%}" for name, share in found.shares().items()},
        "step": format_time(result.step_time_s),
        f"{result.unit}/s, all counted": format_count(done["tokens_per_s"]),
        f"{result.unit} in {failures.days:g} days": format_count(done["tokens"]),
    }
    for name, text in rows.items():
        whole.add_row(name, text)
    best = Table(title="Interval between checkpoints", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "interval", "goodput"):
        best.add_column(name, justify="right" if name else "left")
    best.add_row("best of those simulated", format_duration(found.best.interval_s), f"{found.best.goodput:.2%}")
    daly = found.to_dict()["daly_best_goodput"]
    best.add_row("Daly", format_duration(found.daly_s), f"{daly:.2%} (formula)")
    best.add_row("Young", format_duration(found.young_s), "")
    return [Text(result.title), whole, best]
