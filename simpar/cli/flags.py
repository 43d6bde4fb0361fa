"""Flags that several commands share: a job in a few words, in place of a file or over it."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Preset, config.json or mlp:784-500-10.", show_default=False)
]
Cluster = Annotated[
    str | None, typer.Option("--cluster", "-c", help="Such as h100-sxm:64x8, or a preset.", show_default=False)
]
Framework = Annotated[
    str | None,
    typer.Option(
        "--framework", metavar="NAME", help="Training software, such as torchtitan, or a YAML file.", show_default=False
    ),
]
JobFile = Annotated[
    Path | None, typer.Argument(metavar="JOB.yaml", help="Job file; flags override it.", show_default=False)
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="FIELD=VALUE", help="Any field, such as plan.tp=4; repeatable."),
]
