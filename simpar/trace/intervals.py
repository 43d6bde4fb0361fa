"""Sets of instants as intervals: arrays of shape (n, 2) with start and end in nanoseconds, disjoint and ordered."""

import numpy as np
import numpy.typing as npt

Intervals = npt.NDArray[np.int64]

EMPTY: Intervals = np.zeros((0, 2), np.int64)
"""No instants."""


def intervals(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> Intervals:
    """The union of the given intervals, in any order."""
    return union(np.stack([start, end], axis=1))


def union(pieces: Intervals) -> Intervals:
    """The same instants as disjoint, ordered intervals.

    >>> union(np.array([[4, 6], [0, 2], [1, 3]])).tolist()
    [[0, 3], [4, 6]]
    """
    if not len(pieces):
        return EMPTY
    ordered = pieces[np.argsort(pieces[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate([[True], ordered[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([ordered[first, 0], reach[last]], axis=1)


def covered_until(instants: npt.NDArray[np.int64], covered: Intervals) -> npt.NDArray[np.int64]:
    """Nanoseconds of ``covered`` before each instant."""
    if not len(covered):
        return np.zeros_like(instants)
    level = np.concatenate([[0], np.cumsum(covered[:, 1] - covered[:, 0])])
    begun = np.searchsorted(covered[:, 0], instants, side="right")
    # of the last interval that began, the part after the instant is still to come
    ahead = np.where(begun > 0, np.maximum(covered[begun - 1, 1] - instants, 0), 0)
    found: npt.NDArray[np.int64] = level[begun] - ahead
    return found


def overlap_ns(covered: Intervals, gaps: Intervals) -> int:
    """Nanoseconds of ``gaps`` that ``covered`` covers.

    >>> overlap_ns(np.array([[0, 4], [6, 9]]), np.array([[3, 7]]))
    2
    """
    return int((covered_until(gaps[:, 1], covered) - covered_until(gaps[:, 0], covered)).sum())


def split(gaps: Intervals, covered: Intervals) -> tuple[Intervals, npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Cuts ``gaps`` where ``covered`` begins and ends.

    Returns:
        The pieces, in order; the row of ``gaps`` that each is of; and whether ``covered`` covers it.

    >>> pieces, gap, inside = split(np.array([[0, 4], [6, 9]]), np.array([[2, 7]]))
    >>> pieces.tolist(), gap.tolist(), inside.tolist()
    ([[0, 2], [2, 4], [6, 7], [7, 9]], [0, 0, 1, 1], [False, True, True, False])
    """
    edges = np.unique(np.concatenate([gaps.ravel(), covered.ravel()]))
    pieces = np.stack([edges[:-1], edges[1:]], axis=1) if len(edges) > 1 else EMPTY
    gap = np.searchsorted(gaps[:, 0], pieces[:, 0], side="right") - 1
    kept = (gap >= 0) & (pieces[:, 0] < gaps[gap, 1]) if len(gaps) else np.zeros(len(pieces), np.bool_)
    pieces, gap = pieces[kept], gap[kept]
    inside = covered_until(pieces[:, 1], covered) > covered_until(pieces[:, 0], covered)
    return pieces, gap, inside
