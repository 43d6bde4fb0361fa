"""The ``simpar`` command.

Exit codes: 0 done, 1 the job does not fit its devices, 2 a mistake of the user (one line on stderr), 130 interrupted.
Results go to stdout, everything else to stderr. Each command imports what it needs when it runs, so that ``--help`` and
``--version`` answer at once; the flags are therefore typed loosely here and checked with the job.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simpar import __version__
from simpar.cli import search, sweep
from simpar.cli.terminal import NARROWEST, check_outputs, console, show, simulated
from simpar.errors import DoesNotFitError, SimparError

if TYPE_CHECKING:
    from simpar.result import Result

DONE, DOES_NOT_FIT, MISTAKE, INTERRUPTED = 0, 1, 2, 130

# Typer may bring its own copy of click: the base of its usage errors is the one name that both ways share.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="simpar",
    help="Predicts how long a training step of a large model takes on a cluster, for every way to parallelise it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_JOB, _DEGREES, _BATCH, _KERNELS, _OUTPUT = (
    "Job",
    "Plan: degrees and schedule",
    "Plan: batch",
    "Plan: kernels",
    "Output",
)

_EPILOG = """\
A job file is YAML with three sections, of which [bold]plan[/] may be left out:

[cyan]model: llama3-70b[/] or configs/config.json (relative to the file), mlp:784-500-10, a mapping of fields, \
{base: llama3-70b, layers: 40}

[cyan]cluster: h100-sxm:64x8[/] or h100-sxm:64x8@fabric, a preset, a mapping of device, nodes, gpus_per_node, \
node_link, fabric, {base: h100-sxm:64x8, fabric: {nic_gbps: 800}}

[cyan]plan: {tp: 8, pp: 4, micro_batch: 1, global_batch: 512, seq_len: 8192}[/]; "simpar schema" has every field

Flags override the file, --set overrides both. Exit code 1: the job does not fit; 2: a mistake in the job.
"""


def main(arguments: Sequence[str] | None = None) -> int:  # noqa: PLR0911 - one code for each way to end
    """Runs the command and returns its exit code; what users get wrong ends in a message, never in a traceback.

    Args:
        arguments: words of the command line; left out, those of the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the caller: nobody could read anything
            return MISTAKE
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show × still gets its numbers
    _widen()
    try:
        words = sys.argv[1:] if arguments is None else list(arguments)
        code = app(args=words, prog_name="simpar", standalone_mode=False)
        sys.stdout.flush()
        if code == INTERRUPTED and words[:1] != ["calibrate"]:  # Typer turned it into a code; calibrate has said so
            return _fail("interrupted", INTERRUPTED)
        return code if isinstance(code, int) else DONE
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _drop_stdout()  # the reader (head, a pager) has seen enough
        return DONE
    except OSError as error:
        _drop_stdout()
        return _fail(f"simpar: cannot write the output: {error.strerror or error}", MISTAKE)
    except DoesNotFitError as error:
        return _fail(error.on_command_line, DOES_NOT_FIT)
    except SimparError as error:
        return _fail(str(error), MISTAKE)
    except _UsageError as error:
        return _fail(f"simpar: {error.format_message()}", MISTAKE)  # type: ignore[attr-defined]
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        NameError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        # the last resort: one line that asks for a report, and not 1, a traceback's code, which means something else
        return _fail(
            f"simpar: {type(error).__name__}: {error}; simpar did not expect this input, please report it", MISTAKE
        )


def _widen() -> None:
    """Corrects a width that no text fits into; COLUMNS=0 means that the width is unknown."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < NARROWEST:
        if int(columns):
            os.environ["COLUMNS"] = str(NARROWEST)
        else:
            del os.environ["COLUMNS"]


def _drop_stdout() -> None:
    """Lets nothing that is still buffered raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    from rich.text import Text  # noqa: PLC0415

    console(stderr=True).print(Text(message, style="red"), soft_wrap=True)
    return code


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"simpar {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback answers
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _option(*names: str, panel: str, text: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=False, metavar=metavar)


@app.command(epilog=_EPILOG)
def simulate(  # noqa: PLR0917 - Typer reads its flags from the signature
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.yaml", help="Job file; flags override it.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, _option("--model", "-m", panel=_JOB, text="Preset, config.json or mlp:784-500-10.")
    ] = None,
    cluster: Annotated[
        str | None, _option("--cluster", "-c", panel=_JOB, text="Such as h100-sxm:64x8, or a preset.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        _option("--set", "-s", panel=_JOB, metavar="FIELD=VALUE", text="Any field, such as plan.tp=4; repeatable."),
    ] = None,
    tp: Annotated[str | None, _option("--tp", panel=_DEGREES, metavar="N", text="Tensor-parallel degree.")] = None,
    pp: Annotated[str | None, _option("--pp", panel=_DEGREES, metavar="N", text="Pipeline-parallel degree.")] = None,
    dp: Annotated[
        str | None, _option("--dp", panel=_DEGREES, metavar="N", text="Data-parallel degree; else what is left.")
    ] = None,
    cp: Annotated[str | None, _option("--cp", panel=_DEGREES, metavar="N", text="Context-parallel degree.")] = None,
    ep: Annotated[str | None, _option("--ep", panel=_DEGREES, metavar="N", text="Expert-parallel degree.")] = None,
    etp: Annotated[
        str | None, _option("--etp", panel=_DEGREES, metavar="N", text="Ranks that share an expert; else tp.")
    ] = None,
    dp_shard: Annotated[
        str | None, _option("--dp-shard", panel=_DEGREES, metavar="N", text="Ranks over which ZeRO shards.")
    ] = None,
    zero: Annotated[
        str | None,
        _option("--zero", panel=_DEGREES, metavar="0-3", text="Shard optimizer (1), gradients (2), parameters (3)."),
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        _option("--sequence-parallel/--no-sequence-parallel", panel=_DEGREES, text="Shard activations along tokens."),
    ] = None,
    schedule: Annotated[
        str | None,
        _option(
            "--schedule",
            panel=_DEGREES,
            metavar="NAME",
            text="gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-1p, zb-v, dualpipe, dualpipev.",
        ),
    ] = None,
    vpp: Annotated[
        str | None, _option("--vpp", panel=_DEGREES, metavar="N", text="Model chunks per rank, for interleaved.")
    ] = None,
    layer_split: Annotated[
        str | None,
        _option(
            "--layer-split", panel=_DEGREES, metavar="HOW", text="uniform, balanced, or counts such as 20,22,22,16."
        ),
    ] = None,
    micro_batch: Annotated[
        str | None, _option("--micro-batch", panel=_BATCH, metavar="N", text="Samples per microbatch and replica.")
    ] = None,
    global_batch: Annotated[
        str | None, _option("--global-batch", panel=_BATCH, metavar="N", text="Samples per step.")
    ] = None,
    grad_accum: Annotated[
        str | None, _option("--grad-accum", panel=_BATCH, metavar="N", text="Microbatches per step and replica.")
    ] = None,
    seq_len: Annotated[str | None, _option("--seq-len", panel=_BATCH, metavar="N", text="Tokens per sample.")] = None,
    recompute: Annotated[
        str | None, _option("--recompute", panel=_KERNELS, metavar="WHAT", text="none, selective or full.")
    ] = None,
    recompute_layers: Annotated[
        str | None,
        _option("--recompute-layers", panel=_KERNELS, metavar="N", text="With full: layers of each virtual stage."),
    ] = None,
    offload: Annotated[
        str | None,
        _option(
            "--offload",
            panel=_KERNELS,
            metavar="WHAT",
            text="What lies on hosts: none, optimizer, activations or both.",
        ),
    ] = None,
    framework: Annotated[
        str | None,
        _option(
            "--framework", panel=_KERNELS, metavar="NAME", text="Training software, such as torchtitan, or a YAML file."
        ),
    ] = None,
    compile_: Annotated[
        bool | None, _option("--compile/--no-compile", panel=_KERNELS, text="Compile the model, which fuses kernels.")
    ] = None,
    precision: Annotated[
        str | None, _option("--precision", panel=_KERNELS, metavar="DTYPE", text="bf16, fp16, tf32, fp32 or fp8.")
    ] = None,
    attention: Annotated[
        str | None,
        _option("--attention", panel=_KERNELS, metavar="KERNEL", text="auto, unfused, flash1, flash2 or flash3."),
    ] = None,
    optimizer: Annotated[
        str | None, _option("--optimizer", panel=_KERNELS, metavar="RULE", text="adam, sgd or momentum.")
    ] = None,
    json_: Annotated[
        bool, _option("--json", panel=_OUTPUT, text="Print one JSON object instead of the report.")
    ] = False,
    tokens: Annotated[
        float | None,
        _option("--tokens", panel=_OUTPUT, metavar="N", text="Time, energy and money of a run of N tokens, as 15e12."),
    ] = None,
    stages: Annotated[bool, _option("--stages", panel=_OUTPUT, text="Report every stage, however many.")] = False,
    timeline: Annotated[
        Path | None, _option("--timeline", panel=_OUTPUT, metavar="OUT.html", text="Write the timeline as a page.")
    ] = None,
    trace: Annotated[
        Path | None,
        _option(
            "--trace",
            panel=_OUTPUT,
            metavar="OUT.json.gz",
            text="Write the trace: .json.gz or .pb for ui.perfetto.dev, .parquet, .csv, .kineto (a folder).",
        ),
    ] = None,
    csv: Annotated[
        Path | None, _option("--csv", panel=_OUTPUT, metavar="OUT.csv", text="Write the trace's spans as CSV.")
    ] = None,
    kernels: Annotated[
        bool, _option("--kernels", panel=_OUTPUT, text="In these files, show single kernels too.")
    ] = False,
    allow_oom: Annotated[bool, _option("--allow-oom", panel=_OUTPUT, text="Simulate even if it does not fit.")] = False,
) -> None:
    """Simulate one training step of JOB.yaml, or of a job given by flags."""
    replaced = trace is not None and trace.suffix.lower() == ".kineto" and trace.is_dir()  # checked with the format
    outputs = {"--timeline": timeline, "--trace": None if replaced else trace, "--csv": csv}
    check_outputs({flag: path for flag, path in outputs.items() if path is not None}, job)
    if trace is not None:
        from simpar.trace.formats import check_output  # noqa: PLC0415

        check_output(trace)
    flags = {
        "model": model,
        "cluster": cluster,
        "plan.tp": tp,
        "plan.pp": pp,
        "plan.dp": dp,
        "plan.cp": cp,
        "plan.ep": ep,
        "plan.etp": etp,
        "plan.dp_shard": dp_shard,
        "plan.zero": zero,
        "plan.sequence_parallel": sequence_parallel,
        "plan.schedule": schedule,
        "plan.vpp": vpp,
        "plan.layer_split": _layer_split(layer_split),
        "plan.micro_batch": micro_batch,
        "plan.global_batch": global_batch,
        "plan.grad_accum": grad_accum,
        "plan.seq_len": seq_len,
        "plan.recompute": recompute,
        "plan.recompute_layers": recompute_layers,
        "plan.offload": offload,
        "plan.framework": framework,
        "plan.compile": compile_,
        "plan.precision": precision,
        "plan.attention": attention,
        "plan.optimizer": optimizer,
    }
    result = simulated(job, flags, changes or (), allow_oom)
    if json_:
        import json  # noqa: PLC0415

        typer.echo(json.dumps(result.to_dict(tokens), indent=2, allow_nan=False))
    else:
        from simpar.cli.budget import budget  # noqa: PLC0415
        from simpar.cli.report import report  # noqa: PLC0415

        show(report(result, all_stages=stages, width=console().width), *budget(result, tokens))
    _write(result, timeline=timeline, trace=trace, csv=csv, kernels=kernels)


def _layer_split(text: str | None) -> Any:
    """``20,22,22,16`` as a list; anything else as it is."""
    return text.strip("[]").split(",") if text is not None and text[:1] in "[0123456789" else text


def _write(result: "Result", *, timeline: Path | None, trace: Path | None, csv: Path | None, kernels: bool) -> None:
    from simpar.trace.export import to_csv  # noqa: PLC0415
    from simpar.trace.formats import write_trace  # noqa: PLC0415

    if timeline is not None:
        result.write_timeline(str(timeline), kernels=kernels)
    if trace is not None:
        write_trace(result.trace, trace, kernels=kernels)
    if csv is not None:
        to_csv(result.trace, csv, kernels=kernels)
    for path in (timeline, trace, csv):
        if path is not None:
            typer.echo(f"wrote {path}", err=True)


@app.command()
def models() -> None:
    """List the models that have a name."""
    from simpar.cli.listing import list_models  # noqa: PLC0415

    show(list_models())


@app.command()
def clusters() -> None:
    """List devices, node links, fabrics and clusters that have a name."""
    from simpar.cli.listing import list_clusters  # noqa: PLC0415

    show(list_clusters())


@app.command()
def schema() -> None:
    """Print the JSON Schema of job files, for editors."""
    import json  # noqa: PLC0415

    from simpar.cli.schema import job_schema  # noqa: PLC0415

    typer.echo(json.dumps(job_schema(), indent=2, ensure_ascii=False))


app.command(epilog=search.EPILOG)(search.search)
app.command(epilog=sweep.EPILOG)(sweep.sweep)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def calibrate(context: typer.Context) -> None:
    """Measure devices, fit the costs, and check predictions against real steps."""
    from calibrate.cli import main as run  # noqa: PLC0415 - the one place where simpar hands over to its sister package

    raise typer.Exit(run(context.args))


def _add_commands() -> None:
    from simpar.cli.compare import compare  # noqa: PLC0415 - they use this module's console
    from simpar.cli.explain import explain  # noqa: PLC0415
    from simpar.cli.goodput import goodput  # noqa: PLC0415
    from simpar.cli.live import app as live  # noqa: PLC0415
    from simpar.cli.topology import topology  # noqa: PLC0415
    from simpar.cli.validate import validate  # noqa: PLC0415
    from simpar.cli.views import view  # noqa: PLC0415

    app.command()(explain)
    app.command()(compare)
    app.command()(topology)
    app.command()(goodput)
    app.command()(validate)
    app.command()(view)
    app.command("app")(live)


_add_commands()
