"""What the commands share on a terminal: a progress bar, one line when they are interrupted, a table for pipes too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = 130

Show = Callable[[int, int, str], None]
"""Hears how much is done, of how much (0 if that is not known yet), and what is going on."""


@contextmanager
def progress(left: Callable[[], str]) -> Iterator[Show]:
    """A progress bar on stderr while something goes on, if that is a terminal.

    Args:
        left: what an interruption leaves, in a clause that follows "interrupted; ".

    Raises:
        typer.Exit: it was interrupted, which has been said; with :data:`INTERRUPTED`.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    errors = console(stderr=True)
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda done, total, text: bar.update(task, completed=done, total=total or None, description=text)
    except KeyboardInterrupt:
        say(f"interrupted; {left()}")
        raise typer.Exit(INTERRUPTED) from None


def say(text: str) -> None:
    """One line on stderr."""
    console(stderr=True).print(text, markup=False, soft_wrap=True)


def console(*, stderr: bool = False, piped_width: int | None = None) -> "Console":
    """A console that styles nothing by guessing; where a program reads, lines are ``piped_width`` wide."""
    from rich.console import Console  # noqa: PLC0415

    found = Console(stderr=stderr, highlight=False)
    if piped_width and not found.is_terminal:
        found.width = piped_width
    return found
