"""Schedules as comma-separated text, in the format that ``torch.distributed.pipelining`` dumps and loads.

One row per rank, one cell per action (``2F0``), or per pair of a forward and a backward that overlap
(``(2F4;5B0)OVERLAP_F_B``). Empty cells are the idle steps of torch's grid; a schedule
here knows no time, so they are read and dropped.
"""

import csv
import re
from collections.abc import Sequence

from simpar.errors import PlanError
from simpar.reading import read_text
from simpar.schedule.schedule import Action, Schedule
from simpar.schedule.validate import validate

# Actions of torch's runtime that follow from the compute order; lowering makes its own.
_RUNTIME = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB]\d+)", re.ASCII)
_PAIR = re.compile(r"\((\w+);(\w+)\)OVERLAP_F_B", re.ASCII)


def to_csv(schedule: Schedule) -> str:
    r"""The orders as text, one row per rank.

    >>> from simpar.schedule import build
    >>> to_csv(build("gpipe", pp=2, microbatches=1))
    '0F0,0B0\n1F0,1B0\n'
    """
    return "".join(",".join(map(_cell, schedule.turns(rank))) + "\n" for rank in range(schedule.pp))


def _cell(turn: tuple[Action, ...]) -> str:
    return str(turn[0]) if len(turn) == 1 else f"({';'.join(map(str, turn))})OVERLAP_F_B"


def from_csv(text: str, *, name: str = "csv") -> Schedule:
    """Reads the orders of all ranks; which rank holds a stage follows from the row that runs it.

    Communication that torch's runtime adds to its dumps (``SEND_F``, ``UNSHARD``, ``REDUCE_GRAD``, …) is
    skipped. Stages in the second half that run other microbatches than those in the first are a second copy of the
    model (DualPipe). Whether the schedule is whole and can run is for :func:`simpar.schedule.validate` to say.

    Args:
        text: one row per rank.
        name: name of the schedule.

    Raises:
        PlanError: a cell is no action, a stage lies on two ranks or on none, or a row is empty; with row and
            cell, both counted from 1.
    """
    overlapped: set[Action] = set()
    ranks = tuple(_order(row, cells, overlapped) for row, cells in enumerate(csv.reader(text.splitlines()), start=1))
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
    rank_of_stage = tuple(holder[stage] for stage in range(len(holder)))
    return Schedule(name, ranks, microbatches, rank_of_stage, _copies(ranks, len(holder)), frozenset(overlapped))


def read_csv(path: str, *, pp: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule in a file, checked; it must be made for this many ranks and microbatches.

    Args:
        path: the file.
        pp: pipeline ranks.
        microbatches: microbatches of a step.
        chunks: virtual stages per rank; 1 leaves it to the file.

    Raises:
        PlanError: the file cannot be read, a cell is wrong, or the file is for another pipeline.
        DeadlockError: its ranks wait for each other.
    """
    try:
        text = read_text(path)
    except OSError as error:
        reason = error.strerror
        raise PlanError(f"schedule file '{path}' cannot be read: {reason}; give the path of a .csv file") from None
    try:
        schedule = from_csv(text, name=path)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    for what, wanted, found, mend in (
        ("pipeline ranks (rows)", pp, schedule.pp, "pp"),
        ("microbatches", microbatches, schedule.microbatches, "grad_accum"),
        ("chunks a rank", chunks, schedule.depth // schedule.pp, "vpp"),
    ):
        if found != wanted and (mend, wanted) != ("vpp", 1):
            raise PlanError(
                f"{path} is a schedule of {found} {what}, but the plan has {wanted}; set {mend}={found} or give "
                "another file"
            )
    if schedule.depth % schedule.pp:
        raise PlanError(
            f"{path} spreads {schedule.stages} stages over {schedule.pp} rows, but each rank holds equally many; "
            f"name {schedule.pp} or a multiple of it"
        )
    validate(schedule)
    return schedule


def _copies(ranks: Sequence[Sequence[Action]], stages: int) -> int:
    """2 if no microbatch passes both halves of the stages, 1 otherwise."""
    halves: tuple[set[int], set[int]] = (set(), set())
    for order in ranks:
        for action in order:
            halves[2 * action.stage >= stages].add(action.microbatch)
    return 2 if stages % 2 == 0 and not halves[0] & halves[1] else 1


def _order(row: int, cells: list[str], overlapped: set[Action]) -> tuple[Action, ...]:
    order = []
    for column, cell in enumerate(map(str.strip, cells), start=1):
        if not cell or _RUNTIME.fullmatch(cell):
            continue
        try:
            pair = _PAIR.fullmatch(cell)
            if pair is None:
                order.append(Action.parse(cell))
            else:
                forward, backward = map(Action.parse, pair.groups())
                if forward.op != "F" or backward.op not in ("B", "I"):
                    raise PlanError(f"'{cell}' overlaps {forward} with {backward}; pair a forward with a backward")
                order += (forward, backward)
                overlapped.add(forward)
        except PlanError as error:
            raise PlanError(f"row {row}, cell {column}: {error}") from None
    if not order:
        raise PlanError(f"row {row} has no action, but every rank runs some; drop the row")
    return tuple(order)
