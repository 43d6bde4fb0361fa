"""Schedules as comma-separated text, in the format that ``torch.distributed.pipelining`` dumps and loads.

One row per rank, one cell per action (``2F0``). Empty cells are the idle steps of torch's grid; a schedule
here knows no time, so they are read and dropped.
"""

import csv
import re

from simpar.errors import PlanError
from simpar.schedule.schedule import Action, Schedule

# Actions of torch's runtime that follow from the compute order; lowering makes its own.
_RUNTIME = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)", re.ASCII)


def to_csv(schedule: Schedule) -> str:
    r"""The orders as text, one row per rank.

    >>> from simpar.schedule import build
    >>> to_csv(build("gpipe", pp=2, microbatches=1))
    '0F0,0B0\n1F0,1B0\n'
    """
    return "".join(",".join(map(str, order)) + "\n" for order in schedule.ranks)


def from_csv(text: str, *, name: str = "csv") -> Schedule:
    """Reads the orders of all ranks; which rank holds a stage follows from the row that runs it.

    Communication that torch's runtime adds to its dumps (``SEND_F``, ``UNSHARD``, ``REDUCE_GRAD``, …) is
    skipped. Whether the schedule is whole and can run is for :func:`simpar.schedule.validate` to say.

    Args:
        text: one row per rank.
        name: name of the schedule.

    Raises:
        PlanError: a cell is no action, a stage lies on two ranks or on none, or a row is empty; with row and
            cell, both counted from 1.
    """
    ranks = tuple(_order(row, cells) for row, cells in enumerate(csv.reader(text.splitlines()), start=1))
    holder: dict[int, int] = {}
    for rank, order in enumerate(ranks):
        for action in order:
            if holder.setdefault(action.stage, rank) != rank:
                raise PlanError(
                    f"row {rank + 1} runs {action}, but stage {action.stage} lies on row "
                    f"{holder[action.stage] + 1}; keep all actions of a stage in one row"
                )
    if not holder:
        raise PlanError("the text has no row, but a schedule has one row per rank; write rows such as 0F0,0B0")
    missing = next(stage for stage in range(len(holder) + 1) if stage not in holder)
    if missing < len(holder):
        raise PlanError(f"stage {missing} lies on no row, but there is a stage {max(holder)}; number stages from 0")
    microbatches = 1 + max(action.microbatch for order in ranks for action in order)
    return Schedule(name, ranks, microbatches, tuple(holder[stage] for stage in range(len(holder))))


def _order(row: int, cells: list[str]) -> tuple[Action, ...]:
    order = []
    for column, cell in enumerate(map(str.strip, cells), start=1):
        if not cell or _RUNTIME.fullmatch(cell):
            continue
        try:
            order.append(Action.parse(cell))
        except PlanError as error:
            raise PlanError(f"row {row}, cell {column}: {error}") from None
    if not order:
        raise PlanError(f"row {row} has no action, but every rank runs some; drop the row")
    return tuple(order)
