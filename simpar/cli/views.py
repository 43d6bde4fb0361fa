"""``simpar view``: one picture of a step, as a page or a picture file."""

from pathlib import Path
from typing import Annotated

import typer

from simpar.cli.flags import Changes, Cluster, Framework, JobFile, Model
from simpar.cli.terminal import check_outputs, simulated


def view(  # noqa: PLR0917 - Typer reads its flags from the signature
    job: JobFile = None,
    model: Model = None,
    cluster: Cluster = None,
    framework: Framework = None,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            "-k",
            metavar="VIEW",
            help="timeline, schedule, breakdown, memory, roofline, topology or tornado.",
        ),
    ] = "timeline",
    output: Annotated[
        Path,
        typer.Option(
            "--html", "--output", "-o", metavar="OUT.html", help="The file: .html; .png or .svg with kaleido."
        ),
    ] = Path("view.html"),
    changes: Changes = None,
    dark: Annotated[bool, typer.Option("--dark", help="Light on dark.")] = False,
    allow_oom: Annotated[bool, typer.Option("--allow-oom", help="Simulate even if it does not fit.")] = False,
) -> None:
    """Draw one view of the step of JOB.yaml, or of a job given by flags."""
    from simpar.errors import JobError, nearest  # noqa: PLC0415
    from simpar.view.figure import PICTURES, write_figure  # noqa: PLC0415 - plotly takes a while
    from simpar.view.views import VIEWS  # noqa: PLC0415
    from simpar.view.views import view as draw  # noqa: PLC0415

    if kind not in VIEWS:
        raise JobError(
            f"--kind '{kind}': there is no such view{nearest(kind, list(VIEWS))}; take one of {', '.join(VIEWS)}"
        )
    if output.suffix.lower() not in (".html", *PICTURES):
        raise JobError(f"--html '{output}': is no format of a view; end the name with .html, {', '.join(PICTURES)}")
    check_outputs({"--html": output}, job)
    flags = {"model": model, "cluster": cluster, "plan.framework": framework}
    result = simulated(job, flags, changes or (), allow_oom, command="view")
    write_figure(draw(result, kind, dark=dark), output, title=f"{kind}: {result.title}")
    typer.echo(f"wrote {output}", err=True)
