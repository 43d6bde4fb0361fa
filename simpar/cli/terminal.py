"""What the commands share: the terminal, the check of output files, a job simulated as its file and flags say."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from simpar.errors import DoesNotFitError, JobError, PlanError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from simpar.result import Result

NARROWEST = 40  # columns; below, tables and help would lose their words, and a terminal wraps by itself
_BETWEEN_COLUMNS = 3  # blanks and a line
_PIPED_WIDTH = 10_000  # nothing wraps where a program reads, or a file is grepped


def console(*, stderr: bool = False) -> "Console":
    """A console that styles nothing by guessing, wide enough for whole words."""
    from rich.console import Console  # noqa: PLC0415

    found = Console(stderr=stderr, highlight=False)
    found.width = max(found.width, NARROWEST) if found.is_terminal else _PIPED_WIDTH
    return found


def show(*parts: "RenderableType") -> None:
    """Writes to stdout; where it is no terminal, without the blanks that pad the cells of a table."""
    terminal = console()
    if terminal.is_terminal:
        terminal.print(*parts)
        return
    with terminal.capture() as captured:
        terminal.print(*parts)
    typer.echo("\n".join(line.rstrip() for line in captured.get().rstrip().splitlines()))


def between(low_s: float, high_s: float) -> str:
    """An interval of times in few characters.

    >>> between(2.75, 3.02), between(0.75, 1.25)
    ('2.75 to 3.02 s', '750 ms to 1.25 s')
    """
    from simpar.units import format_time  # noqa: PLC0415

    low, high = format_time(low_s), format_time(high_s)
    number, _, unit = low.rpartition(" ")
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def narrowed(
    rows: Sequence[Mapping[str, str]],
    heads: Sequence[str],
    least: Sequence[str],
    width: int,
    *,
    wraps: Mapping[str, int],
) -> list[str]:
    """The columns that a table shows in a width, each with its cells whole.

    Args:
        rows: a cell for each head.
        heads: all columns.
        least: those that may be left out, the least important first.
        width: characters of a line.
        wraps: columns that may wrap, and the width that they need at least.
    """
    from rich.cells import cell_len  # noqa: PLC0415

    def need(head: str) -> int:
        cells = (*head.split("\n"), *(row[head] for row in rows))
        widest = max(map(cell_len, cells))
        longest_word = max(cell_len(word) for cell in cells for word in cell.split() or [""])
        return max(min(widest, wraps[head]), longest_word) if head in wraps else widest

    needs = {head: need(head) for head in heads}
    shown = list(heads)
    for head in least:
        if sum(needs[name] + _BETWEEN_COLUMNS for name in shown) <= width:
            break
        shown.remove(head)
    return shown


def simulated(
    job: Path | None, flags: Mapping[str, Any], changes: Sequence[str], allow_oom: bool, *, command: str = "simulate"
) -> "Result":
    """The result of a job file changed by flags and ``--set``; its mistakes name file and field."""
    from simpar.cli.jobfile import parse_change, read_draft  # noqa: PLC0415

    if job is None and all(value is None for value in flags.values()) and not changes:
        raise JobError(f"simpar {command}: give a job file, or --model and --cluster; see simpar {command} --help")
    overrides = [(tuple(path.split(".")), _yaml(value)) for path, value in flags.items() if value is not None]
    draft = read_draft(job, [*overrides, *(parse_change(text) for text in changes)])
    checked = draft.job()
    draft.lay_out(checked)
    from simpar.simulation import simulate as run  # noqa: PLC0415

    try:
        with console(stderr=True).status(f"simulating {checked.model.name} …"):
            return run(checked, allow_oom=allow_oom)
    except DoesNotFitError as error:
        raise DoesNotFitError(f"{draft.source}: {error.on_command_line}") from None
    except (JobError, PlanError) as error:
        raise draft.explain(error) from None


def _yaml(value: Any) -> Any:
    """A flag's whole number as one (a literal such as ``zero`` takes no text); the rest as it is."""
    return int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 100 else value


def check_outputs(paths: dict[str, Path], job: Path | None) -> None:
    """Finds out before the work whether its files can be written.

    Raises:
        JobError: one of them cannot, or would replace another or the job.
    """
    taken = {job.resolve(): "the job file"} if job is not None else {}
    for flag, path in paths.items():
        parent = path.parent
        problem = ""
        if not parent.is_dir():
            problem = f"there is no folder '{parent}'; create it first"
        elif path.is_dir():
            problem = "it is a folder; add a file name"
        elif path.exists() and not path.is_file():
            problem = "it is not a regular file; choose another name"
        elif not os.access(parent, os.W_OK | os.X_OK):
            problem = f"the folder '{parent}' does not let you; choose another one"
        elif path.resolve() in taken:
            problem = f"it is {taken[path.resolve()]} already; choose another name"
        if problem:
            raise JobError(f"{flag}: cannot write '{path}': {problem}")
        taken[path.resolve()] = f"the file of {flag}"
