"""``simpar search``: the fastest plans of all."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpar.cli.flags import Framework, Model
from simpar.cli.terminal import between, check_outputs, console, show
from simpar.errors import DoesNotFitError, JobError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simpar.cli.jobfile import Draft
    from simpar.search.found import Found, SearchResult
    from simpar.search.run import Progress

EPILOG = """\
Every valid tp, cp, pp, micro_batch, sequence_parallel, recompute, schedule (1f1b, interleaved), vpp and zero is \
looked at, and with experts ep and etp (1, or that of tp), for the batch and the other fields of the job. \
[cyan]--choose[/] restricts a field ([cyan]--choose tp=4,8[/], [cyan]--choose cp=1[/]) or adds one \
([cyan]--choose cp_method=ring,all_to_all[/], [cyan]--choose schedule=1f1b,zb-h1[/]).
"""


def search(  # noqa: PLR0917 - Typer reads its flags from the signature
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.yaml", help="Job file; of its plan, what is searched is left out.")
    ] = None,
    model: Model = None,
    cluster: Annotated[
        list[str] | None, typer.Option("--cluster", "-c", help="Such as h100-sxm:64x8; several are compared.")
    ] = None,
    framework: Framework = None,
    global_batch: Annotated[int | None, typer.Option(metavar="N", help="Samples per step.")] = None,
    seq_len: Annotated[int | None, typer.Option(metavar="N", help="Tokens per sample.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Any field of the job; repeatable.")
    ] = None,
    choose: Annotated[
        list[str] | None, typer.Option("--choose", metavar="FIELD=VALUES", help="Values of a plan's field; repeatable.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="So many plans are the fastest for sure.")] = 5,
    front: Annotated[
        bool, typer.Option("--front", help="Simulate all that may be on the front of time, memory, GPUs and cost.")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=1, metavar="N", help="Processes; else one per core.")] = None,
    dask: Annotated[str | None, typer.Option(metavar="tcp://…", help="Run on the workers of a Dask scheduler.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Stream every answer to this file.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the file of --output.")] = False,
    table: Annotated[
        Path | None, typer.Option(metavar="OUT.csv", help="Write what was simulated: .csv, .parquet or .jsonl.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="OUT.html", help="Write a page with plans and their timelines.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Search all plans for the fastest ones that fit."""
    from simpar.search.records import check_format  # noqa: PLC0415
    from simpar.search.run import search as run  # noqa: PLC0415

    outputs = {"--output": output, "--table": table, "--html": html}
    check_outputs({flag: path for flag, path in outputs.items() if path is not None}, job)
    if table is not None:
        check_format(table)
    _check_changes(changes or ())
    flags = {"framework": framework, "global_batch": global_batch, "seq_len": seq_len}
    drafts = [_draft(job, model, one, flags, changes or ()) for one in (cluster or (None,))]
    jobs = [draft.job() for draft in drafts]
    if any(job.faults.any for job in jobs):
        raise JobError("faults: a search compares plans where nothing is slow; drop them, and sweep the plans it finds")
    plan = jobs[0].plan
    if plan.global_batch is None:
        raise JobError("simpar search: plans share the batch; give --global-batch, or plan.global_batch in the job")
    if resume and output is None:
        raise JobError("--resume: goes on with the file of --output; name it")
    with executor_of(dask) as executor, progress_bar() as progress:
        result = run(
            jobs[0].model,
            [each.cluster for each in jobs],
            global_batch=plan.global_batch,
            seq_len=plan.seq_len,
            plan=_kept(plan),
            choices=once(map(_choice, choose or ()), "--choose"),
            top=top,
            whole_front=front,
            executor=executor,
            workers=workers,
            output=output,
            resume=resume,
            progress=progress,
        )
        if html is not None and result.found:
            from functools import partial  # noqa: PLC0415

            from simpar.view.sweep_page import write_search_page  # noqa: PLC0415

            write_search_page(result, html, progress=partial(progress, "timelines"))
            typer.echo(f"wrote {html}", err=True)
    if table is not None:
        from simpar.search.records import write_records  # noqa: PLC0415

        write_records(result.records(), table)
        typer.echo(f"wrote {table}", err=True)
    _report(result, as_json=json_)


def _draft(
    job: Path | None, model: str | None, cluster: str | None, plan: Mapping[str, Any], changes: Sequence[str]
) -> "Draft":
    """The job that plans start from; ``plan`` are flags of its fields, and ``changes`` override flags."""
    from simpar.cli.jobfile import parse_change, read_draft  # noqa: PLC0415

    if job is None and model is None:
        raise JobError("simpar search: give a job file, or --model and --cluster; see simpar search --help")
    flags: list[tuple[tuple[str, ...], Any]] = []
    flags += [(("model",), model)] if model is not None else []
    flags += [(("cluster",), cluster)] if cluster is not None else []
    flags += [(("plan", name), value) for name, value in plan.items() if value is not None]
    return read_draft(job, [*flags, *(parse_change(text) for text in changes)])


def _check_changes(changes: Sequence[str]) -> None:
    """Refuses to set what is searched: of a job file such fields are left out, but a flag means what it says."""
    from simpar.cli.jobfile import parse_change  # noqa: PLC0415

    for text in changes:
        (section, *rest), value = parse_change(text)
        named = {rest[0]: value} if rest else value
        for name in named if section == "plan" and isinstance(named, Mapping) else ():
            if name in _searched():
                raise JobError(f"--set '{text}': {name} is searched; restrict it by --choose {name}={named[name]}")


def _searched() -> set[str]:
    """Fields of a plan that are searched, or follow from those that are."""
    from simpar.search.space import AXES  # noqa: PLC0415

    return {*AXES, "dp", "grad_accum"}


def _kept(plan: Any) -> dict[str, Any]:
    """What a job's plan says about fields that are not searched and do not follow from those that are."""
    given = plan.model_fields_set - _searched() - {"global_batch", "seq_len"}
    return {name: getattr(plan, name) for name in given}


def _choice(text: str) -> tuple[str, list[Any]]:
    from simpar.search.vary import parse_vary  # noqa: PLC0415

    field, values = parse_vary(text, flag="--choose")
    return field.removeprefix("plan."), values


def once(given: Iterable[tuple[str, list[Any]]], flag: str) -> dict[str, list[Any]]:
    """Values by field, where each field is given once.

    Raises:
        JobError: a field is given twice, of which the second would win in silence.
    """
    found: dict[str, list[Any]] = {}
    for field, values in given:
        if field in found:
            raise JobError(f"{flag}: '{field}' is given twice; name all its values at once, such as {field}=1,2,4")
        found[field] = values
    return found


@contextmanager
def executor_of(dask: str | None) -> "Iterator[Executor | None]":
    """The executor that the flags ask for; None for processes of this machine."""
    with ExitStack() as stack:
        if dask is None:
            yield None
            return
        from simpar.search.dask import dask_executor  # noqa: PLC0415

        yield stack.enter_context(dask_executor(dask))


@contextmanager
def progress_bar() -> "Iterator[Progress]":
    """A bar on stderr, while that is a terminal; redrawn when told, since a thread of its own and forks do not mix."""
    from rich import progress as rich  # noqa: PLC0415
    from rich.progress import Progress as Bar  # noqa: PLC0415

    columns = (
        rich.TextColumn("{task.description:12}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
    )
    terminal = console(stderr=True)
    with Bar(*columns, console=terminal, transient=True, auto_refresh=False, disable=not terminal.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what)
            bar.update(tasks[what], completed=done, total=total, refresh=True)

        yield show


# ---- report ---------------------------------------------------------------------------------------------------------


def _report(result: "SearchResult", *, as_json: bool) -> None:
    """Prints what was found.

    Raises:
        DoesNotFitError: nothing was, which it explains.
    """
    if as_json:
        import json  # noqa: PLC0415
        from dataclasses import asdict  # noqa: PLC0415

        shown = {
            "counts": asdict(result.counts),
            "groups": [[found.to_dict() for found in members] for members in result.groups()],
            "front": [found.to_dict() for found in result.front()],
        }
        typer.echo(json.dumps(shown, indent=2, allow_nan=False))
    else:
        from rich.console import Group  # noqa: PLC0415

        show(Group(*_parts(result)))
    if not result.found:
        from simpar.search.unsearched import unsearched  # noqa: PLC0415

        ways = "; ".join(map(str, unsearched(result)))
        raise DoesNotFitError(
            f"no plan fits; with what was not searched some would: {ways}"
            if ways
            else "no plan fits, and no usual change of what was not searched would help; use more GPUs, or larger ones"
        )


def _parts(result: "SearchResult") -> "Iterator[RenderableType]":
    from rich.text import Text  # noqa: PLC0415

    first = result.jobs[0]
    names = ", ".join(f"{job.cluster.gpus:,} {job.cluster.device.name}" for job in result.jobs)
    yield Text(f"{first.model.name} on {names}, {first.plan.global_batch:,} samples a step", style="bold")
    yield Text(str(result.counts))
    if not result.found:
        return
    groups = result.groups()
    for number, members in enumerate(groups):
        title = "Fastest" if number == 0 else "Then"
        together = f": {len(members)} plans that the errors of the model cannot tell apart" if len(members) > 1 else ""
        yield _table(f"{title}{together}", members, several=len(result.jobs) > 1)
    rest = "" if result.whole_front else "; of what was simulated, --front for all"
    priced = result.found[0].cost_per_step is not None
    goals = ["time", "memory", *(["GPUs"] if len(result.jobs) > 1 else []), *(["cost"] if priced else [])]
    front = result.front()
    yield _table(f"Not beaten in {', '.join(goals)}{rest}", front, several=len(result.jobs) > 1)
    if any(found.low_s is None for found in front):
        yield Text(f"–: worked out for the {result.top} fastest only; --front does it for all", style="dim")


def _table(title: str, members: "Sequence[Found]", *, several: bool) -> "RenderableType":
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from simpar.search.found import shown_plan  # noqa: PLC0415
    from simpar.uncertainty import USUAL_LEVEL  # noqa: PLC0415
    from simpar.units import format_bytes, format_time  # noqa: PLC0415

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", overflow="fold")
    priced = any(found.cost_per_step is not None for found in members)
    heads = [
        *(["GPUs"] if several else []),
        "step",
        f"{USUAL_LEVEL:.0%} interval",
        "MFU",
        "memory",
        *(["cost/step"] if priced else []),
    ]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for found in members:
        interval = between(found.low_s, found.high_s) if found.low_s is not None and found.high_s is not None else "–"
        cells = [f"{found.gpus:,}"] if several else []
        cells += [format_time(found.step_time_s), interval, f"{found.mfu:.1%}", format_bytes(found.memory_bytes)]
        cells += [f"{found.cost_per_step:,.2f}"] if found.cost_per_step is not None else []
        table.add_row(shown_plan(found.plan), *cells)
    return table
