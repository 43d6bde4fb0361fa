"""``simpar calibrate check`` on a terminal: progress on stderr, the table or JSON on stdout, the page in its file."""

import json
import os
from pathlib import Path

from calibrate.check import report
from calibrate.check.cases import CheckError
from calibrate.check.run import Outcome, check
from calibrate.console import console, progress
from simpar.hardware.profile import load_profile

_PIPED_WIDTH = 200  # nothing wraps where a program reads


def check_command(
    *, profile: Path, plans: str | None, ranks: int, quick: bool, as_json: bool, html: Path | None
) -> Outcome:
    """Checks and prints; what cannot be written is found out before anything is measured.

    Raises:
        typer.Exit: interrupted; nothing was written.
        SimparError: see :func:`calibrate.check.run.check` and :func:`simpar.hardware.profile.load_profile`.
    """
    from rich.text import Text  # noqa: PLC0415

    loaded = load_profile(profile)
    if html is not None:
        check_place(html)
    wanted = [name.strip() for name in plans.split(",") if name.strip()] if plans is not None else None
    if wanted is not None and not wanted:
        raise CheckError(f"--plans '{plans}' names no plan; write it as in --plans dp,fsdp, or leave it out")
    with progress(lambda: "nothing was written") as show:
        outcome = check(
            loaded,
            plans=wanted,
            ranks=ranks,
            quick=quick,
            say=lambda what, done, total: show(done, total, what),
        )
    if html is not None:
        report.write_page(outcome, html)
    out = console(piped_width=_PIPED_WIDTH)
    if as_json:
        out.file.write(json.dumps(report.to_dict(outcome), indent=1, ensure_ascii=False) + "\n")
    else:
        for part in report.tables(outcome):
            out.print(part, soft_wrap=isinstance(part, Text))
        if html is not None:
            out.print(f"wrote {html}", markup=False, soft_wrap=True)
    return outcome


def check_place(html: Path) -> None:
    """Raises CheckError if the page cannot be written there."""
    if not html.parent.is_dir():
        problem = f"there is no folder '{html.parent}'; create it first"
    elif html.is_dir():
        problem = "it is a folder; add a file name"
    elif not os.access(html.parent, os.W_OK | os.X_OK):
        problem = f"there is no permission to write into '{html.parent}'; choose another place"
    else:
        return
    raise CheckError(f"--html: cannot write '{html}': {problem}")
