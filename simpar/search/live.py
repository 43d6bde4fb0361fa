"""What bounds need of a schedule: where stages lie, what ranks hold at their fullest, what follows backward passes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simpar.schedule.registry import build, shortened
from simpar.schedule.schedule import Action, Schedule

IntArray = npt.NDArray[np.int64]

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


class Turns(NamedTuple):
    """How often passes come right after a backward pass of the same rank; by chunk.

    Attributes:
        forward: forward passes that do.
        fresh_forward: those of them that have no forward pass since the chunk's last backward pass before them.
        fresh_backward: backward passes of which this is true.
    """

    forward: IntArray
    fresh_forward: IntArray
    fresh_backward: IntArray


def turns_of(name: str, rank: int, *, pp: int, microbatches: int, chunks: int, group: int | None) -> Turns:
    """What follows the backward passes of a rank; of a split one, the half that brings gradients.

    An order that repeats itself is read until it has done so, and goes on alike.
    """
    fewer, group = shortened(name, pp, microbatches, group)
    found = read_turns(build(name, pp=pp, microbatches=fewer, chunks=chunks, group=group).ranks[rank])
    if fewer == microbatches:
        return found
    period = 1 if group is None else group
    before = read_turns(build(name, pp=pp, microbatches=fewer - period, chunks=chunks, group=group).ranks[rank])
    times = (microbatches - fewer) // period
    return Turns(*(late + times * (late - early) for late, early in zip(found, before, strict=True)))


def read_turns(order: Sequence[Action]) -> Turns:
    """The turns of an order that is at hand."""
    stages, chunk = np.unique([action.stage for action in order], return_inverse=True)
    changes = np.array([_LIVE[action.op] for action in order], np.int64)
    after = np.zeros(len(order), bool)
    after[1:] = [action.op in "BW" for action in order[:-1]]
    fresh = np.ones(len(order), bool)
    passes = np.flatnonzero(changes)
    by_chunk = passes[np.argsort(chunk[passes], kind="stable")]
    earlier, later = by_chunk[:-1], by_chunk[1:]
    fresh[later] = (chunk[earlier] != chunk[later]) | (changes[earlier] < 0)
    forward, backward = after & (changes > 0), after & (changes < 0)
    return Turns(
        *(np.bincount(chunk[which], minlength=len(stages)) for which in (forward, forward & fresh, backward & fresh))
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
