"""Pairs the operations of two traces of one job, to see by how much each differs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simpar.trace.trace import NONE, FloatColumn, IntColumn, Lane, Spans


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Operations that both traces have: columns of equal length.

    Attributes:
        row: the first span of the operation in the first trace.
        first_ns: its length there; pieces of one operation together.
        second_ns: its length in the second trace.
        unpaired: operations that only one of them has.
    """

    row: IntColumn
    first_ns: IntColumn
    second_ns: IntColumn
    unpaired: int

    def __len__(self) -> int:
        return len(self.row)

    @property
    def error(self) -> FloatColumn:
        """First over second, less one."""
        return self.first_ns / np.maximum(self.second_ns, 1) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Spans, with what they point into."""

    spans: Spans
    lanes: Sequence[Lane]
    names: Sequence[str]


def pair(first: Side, second: Side) -> Pairs:
    """Pairs spans by rank, stream and kind, and by microbatch and chunk, else by name, layer and order of start.

    What a rank does of one kind for one microbatch and chunk counts as one operation, in however many pieces it runs.
    Pairs of which a side has no length are left out.
    """
    texts: dict[str, int] = {}
    keys = [_keys(side, texts) for side in (first, second)]
    _, number = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    number = number.ravel()
    count = int(number.max(initial=-1)) + 1
    ours, theirs = number[: len(keys[0])], number[len(keys[0]) :]
    first_ns, second_ns = (
        np.bincount(of, weights=side.spans.duration_ns, minlength=count).astype(np.int64)
        for of, side in ((ours, first), (theirs, second))
    )
    row = np.full(count, len(ours), np.int64)
    np.minimum.at(row, ours, np.arange(len(ours)))
    here, there = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    here[ours], there[theirs] = True, True
    both = here & there & (first_ns > 0) & (second_ns > 0)
    return Pairs(row=row[both], first_ns=first_ns[both], second_ns=second_ns[both], unpaired=int((here != there).sum()))


def pair_in_order(first: Side, second: Side) -> Pairs:
    """Pairs spans by rank and kind in order of start, where both traces have as many of a kind on a rank.

    For traces whose spans have neither names nor microbatches in common, such as an imported profile.
    """
    keys = [_rank_and_kind(side) for side in (first, second)]
    _, number = np.unique(np.concatenate(keys), axis=0, return_inverse=True)
    number = number.ravel()
    of = number[: len(keys[0])], number[len(keys[0]) :]
    counts = [np.bincount(mine, minlength=int(number.max(initial=-1)) + 1) for mine in of]
    equal = counts[0] == counts[1]
    rows = [
        order[equal[mine[order]]]
        for mine, side in zip(of, (first, second), strict=True)
        for order in (np.lexsort((side.spans.start_ns, mine)),)
    ]
    lengths = [side.spans.duration_ns[found] for side, found in zip((first, second), rows, strict=True)]
    positive = (lengths[0] > 0) & (lengths[1] > 0)
    return Pairs(
        row=rows[0][positive],
        first_ns=lengths[0][positive],
        second_ns=lengths[1][positive],
        unpaired=int((counts[0] + counts[1])[~equal].sum()),
    )


def _rank_and_kind(side: Side) -> npt.NDArray[np.int64]:
    rank = np.array([lane.rank for lane in side.lanes] or [NONE], np.int64)[side.spans.lane]
    return np.stack([rank, side.spans.kind], axis=1)


def _keys(side: Side, texts: dict[str, int]) -> npt.NDArray[np.int64]:
    """What each span is, apart from when: shape (spans, 8)."""
    spans = side.spans

    def numbers(found: Sequence[str]) -> IntColumn:
        return np.array([texts.setdefault(text, len(texts)) for text in found] or [NONE], np.int64)

    rank = np.array([lane.rank for lane in side.lanes] or [NONE], np.int64)[spans.lane]
    stream = numbers([lane.stream for lane in side.lanes])[spans.lane]
    numbered = spans.microbatch != NONE
    name = np.where(numbered, NONE, numbers(side.names)[spans.name])
    layer = np.where(numbered, NONE, spans.layer)
    keys = np.stack([rank, stream, spans.kind, spans.microbatch, spans.chunk, name, layer], axis=1)
    return np.concatenate([keys, np.where(numbered, 0, _occurrence(keys))[:, None]], axis=1)


def _occurrence(keys: npt.NDArray[np.int64]) -> IntColumn:
    """How many rows before each are like it."""
    if not len(keys):
        return np.zeros(0, np.int64)
    _, number = np.unique(keys, axis=0, return_inverse=True)
    number = number.ravel()
    order = np.argsort(number, kind="stable")
    sorted_number = number[order]
    begin = np.flatnonzero(np.diff(sorted_number, prepend=-1))
    within = np.arange(len(order)) - np.repeat(begin, np.diff(np.append(begin, len(order))))
    occurrence = np.empty(len(order), np.int64)
    occurrence[order] = within
    return occurrence
