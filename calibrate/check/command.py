"""``simpar calibrate check`` on a terminal: progress on stderr, the table or JSON on stdout, the page in its file."""

import json
import os
from pathlib import Path

from calibrate.check import report
from calibrate.check.cases import CheckError
from calibrate.check.run import Outcome, check
from simpar.hardware.profile import load_profile

_PIPED_WIDTH = 200  # nothing wraps where a program reads


def check_command(
    *, profile: Path, plans: str | None, ranks: int, quick: bool, as_json: bool, html: Path | None
) -> Outcome:
    """Checks and prints; what cannot be written is found out before anything is measured.

    Raises:
        KeyboardInterrupt: interrupted; nothing was written.
        SimparError: see :func:`calibrate.check.run.check` and :func:`simpar.hardware.profile.load_profile`.
    """
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    loaded = load_profile(profile)
    if html is not None:
        _check_place(html)
    wanted = [name.strip() for name in plans.split(",") if name.strip()] if plans is not None else None
    if wanted is not None and not wanted:
        raise CheckError(f"--plans '{plans}' names no plan; write it as in --plans dp,fsdp, or leave it out")
    errors = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task("starting processes")
            outcome = check(
                loaded,
                plans=wanted,
                ranks=ranks,
                quick=quick,
                say=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
            )
    except KeyboardInterrupt:
        errors.print("interrupted; nothing was written", markup=False, soft_wrap=True)
        raise
    if html is not None:
        report.write_page(outcome, html)
    console = Console(highlight=False)
    if as_json:
        print_json = json.dumps(report.to_dict(outcome), indent=1, ensure_ascii=False)
        console.file.write(print_json + "\n")
    else:
        if not console.is_terminal:
            console.width = _PIPED_WIDTH
        for part in report.tables(outcome):
            console.print(part, soft_wrap=isinstance(part, Text))
        if html is not None:
            console.print(f"wrote {html}", markup=False, soft_wrap=True)
    return outcome


def _check_place(html: Path) -> None:
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
