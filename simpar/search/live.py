"""What of a schedule does not grow with its microbatches: where stages lie, and what ranks hold at their fullest."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simpar.schedule.interleaved import equal_group
from simpar.schedule.registry import build, takes
from simpar.schedule.schedule import Schedule

IntArray = npt.NDArray[np.int64]

_ROUNDS = 3  # groups (1F1B: microbatches per stage) after which an order has shown all that it ever holds
_LIVE = {"F": 1, "B": -1, "I": -1, "W": 0}


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """The shape of a schedule.

    Attributes:
        schedule: a schedule of that shape, possibly of fewer microbatches.
        rank_of_stage: pipeline rank of each virtual stage; shape (stages,).
        chunk_of_stage: position of each virtual stage among those of its rank; shape (stages,).
        splits_backward: whether input and weight gradients are actions of their own.
        rank, chunk: of moments at which a rank begins a backward pass; shape (moments,).
        live: microbatches whose activations it then holds, by chunk; shape (moments, chunks).
    """

    schedule: Schedule
    rank_of_stage: IntArray
    chunk_of_stage: IntArray
    splits_backward: bool
    rank: IntArray
    chunk: IntArray
    live: IntArray


def shape_of(name: str, pp: int, microbatches: int, chunks: int, group: int | None) -> Shape:
    """The shape of a schedule; its order is that of :func:`shortened` microbatches.

    Raises:
        PlanError: no such schedule, or counts that it cannot run.
    """
    fewer, group = shortened(name, pp, microbatches, group)
    return read_shape(build(name, pp=pp, microbatches=fewer, chunks=chunks, group=group))


def shortened(name: str, pp: int, microbatches: int, group: int | None) -> tuple[int, int | None]:
    """The fewest microbatches whose order holds all that ``microbatches`` ever hold, and how many go in a row.

    1F1B turns back after as many microbatches as it has stages, and an interleaved order repeats itself after a few
    groups; other orders, and groups of a size that the plan asks for, are read as they are.

    Raises:
        PlanError: the microbatches form no equal groups.
    """
    if name == "1f1b":
        return min(microbatches, _ROUNDS * pp), group
    if takes(name, "group") and group is None:
        group = equal_group(pp, microbatches)
        return min(microbatches, _ROUNDS * group), group
    return microbatches, group


def read_shape(schedule: Schedule) -> Shape:
    """The shape of orders that are at hand."""
    rank_of_stage = np.array(schedule.rank_of_stage, np.int64)
    chunk_of_stage = np.zeros(schedule.stages, np.int64)
    for rank in range(schedule.pp):
        held = np.flatnonzero(rank_of_stage == rank)
        chunk_of_stage[held] = np.arange(len(held))
    moments = [_moments(schedule, rank, chunk_of_stage) for rank in range(schedule.pp)]
    return Shape(
        schedule=schedule,
        rank_of_stage=rank_of_stage,
        chunk_of_stage=chunk_of_stage,
        splits_backward=any(action.op in "IW" for order in schedule.ranks for action in order),
        rank=np.repeat(np.arange(schedule.pp), [len(found) for found in moments]),
        chunk=np.concatenate([found[:, -1] for found in moments]),
        live=np.concatenate([found[:, :-1] for found in moments]),
    )


def _moments(schedule: Schedule, rank: int, chunk_of_stage: IntArray) -> IntArray:
    """Each distinct moment at which a rank turns backward: live microbatches by chunk, and the chunk that runs."""
    order = schedule.ranks[rank]
    chunk = chunk_of_stage[[action.stage for action in order]]
    changes = np.array([_LIVE[action.op] for action in order], np.int64)
    live = np.zeros((len(order) + 1, int(chunk_of_stage.max()) + 1), np.int64)
    live[np.arange(1, len(order) + 1), chunk] = changes
    live = live.cumsum(axis=0)
    turns = np.flatnonzero(changes < 0)
    return np.unique(np.column_stack((live[turns], chunk[turns])), axis=0)
