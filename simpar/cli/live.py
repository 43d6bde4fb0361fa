"""``simpar app``: the live page on this machine."""

from pathlib import Path
from typing import Annotated

import typer


def app(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.yaml", help="Job file to begin with.", show_default=False)
    ] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, metavar="N", help="Port on the loopback interface.")] = 8050,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser, where there is a screen.")] = True,
) -> None:
    """Open a page that simulates while one moves its sliders; answers on this machine alone."""
    from simpar.cli.jobfile import read_draft  # noqa: PLC0415
    from simpar.errors import JobError  # noqa: PLC0415
    from simpar.view.what_if import from_job  # noqa: PLC0415

    first = from_job(read_draft(job).fields) if job is not None else None
    try:
        from simpar.view.app import serve  # noqa: PLC0415
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "dash":
            raise
        raise JobError("simpar app needs dash, which is not installed; pip install 'simpar[app]'") from None
    serve(first, port=port, browser=browser, began=lambda address: typer.echo(f"{address} (Ctrl-C ends it)", err=True))
