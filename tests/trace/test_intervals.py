"""Interval arithmetic, against sets of whole nanoseconds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simpar.trace.intervals import EMPTY, Intervals, covered_until, intervals, overlap_ns, split, union

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8)


def made(pairs: list[tuple[int, int]]) -> Intervals:
    return np.array([(start, start + length) for start, length in pairs], np.int64).reshape(-1, 2)


def instants(pieces: Intervals) -> set[int]:
    return {t for start, end in pieces.tolist() for t in range(start, end)}


@given(PAIRS)
def test_a_union_has_the_same_instants_in_order_and_apart(pairs: list[tuple[int, int]]) -> None:
    joined = union(made(pairs))
    assert instants(joined) == instants(made(pairs))
    assert (joined[1:, 0] > joined[:-1, 1]).all()
    assert (intervals(made(pairs)[:, 0], made(pairs)[:, 1]) == joined).all()


@given(PAIRS, PAIRS)
def test_overlap_and_split_count_common_instants(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    gaps, covered = union(made(first)), union(made(second))
    both = instants(gaps) & instants(covered)
    assert overlap_ns(covered, gaps) == len(both)
    pieces, gap, inside = split(gaps, covered)
    assert instants(pieces[inside]) == both
    assert instants(pieces[~inside]) == instants(gaps) - instants(covered)
    assert all(gaps[g, 0] <= piece[0] and piece[1] <= gaps[g, 1] for g, piece in zip(gap, pieces, strict=True))


@given(PAIRS, st.lists(st.integers(-2, 60), min_size=1))
def test_covered_until_counts_what_lies_before(pairs: list[tuple[int, int]], times: list[int]) -> None:
    covered = union(made(pairs))
    found = covered_until(np.array(times), covered)
    assert found.tolist() == [len([t for t in instants(covered) if t < time]) for time in times]


def test_nothing_overlaps_nothing() -> None:
    assert overlap_ns(EMPTY, EMPTY) == 0
    assert len(split(EMPTY, EMPTY)[0]) == 0
