"""Pairing of operations, on traces small enough to pair by hand."""

import numpy as np

from simpar.trace.pairing import Side, pair, pair_in_order
from simpar.trace.trace import KINDS, Lane, Spans, spans_from_columns

NAMES = ("forward", "gradients", "norm")
LANES = (Lane(0, 0, "compute"), Lane(0, 0, "dp"))


def side(*rows: tuple[int, str, str, int, int], names: tuple[str, ...] = NAMES) -> Side:
    """Rows of lane, kind, name, microbatch and length, one after the other."""
    columns: dict[str, list[int]] = {name: [0] * len(rows) for name in Spans.__dataclass_fields__}
    for i, (lane, kind, name, microbatch, length) in enumerate(rows):
        columns["start_ns"][i] = 1000 * i
        columns["lane"][i], columns["kind"][i], columns["name"][i] = lane, KINDS.index(kind), names.index(name)
        columns["microbatch"][i], columns["duration_ns"][i] = microbatch, length
    return Side(spans=spans_from_columns(columns), lanes=LANES, names=names)


def test_pieces_of_a_microbatch_are_one_operation() -> None:
    first = side((0, "forward", "forward", 0, 100), (0, "forward", "forward", 1, 300))
    second = side((0, "forward", "forward", 0, 50), (0, "forward", "forward", 0, 30), (0, "forward", "forward", 1, 300))
    found = pair(first, second)
    assert sorted(zip(found.row.tolist(), found.first_ns, found.second_ns, strict=True)) == [
        (0, 100, 80),
        (1, 300, 300),
    ]
    assert sorted(np.round(found.error, 9).tolist()) == [0.0, 0.25]
    assert found.unpaired == 0


def test_what_has_no_microbatch_pairs_by_name_and_order_whatever_the_numbers_of_names() -> None:
    reduce = "all_reduce"
    first = side((1, reduce, "gradients", -1, 10), (1, reduce, "gradients", -1, 20), (1, reduce, "norm", -1, 5))
    second = side(
        (1, reduce, "norm", -1, 4), (1, reduce, "gradients", -1, 10), (1, reduce, "gradients", -1, 40),
        names=("norm", "gradients", "forward"),
    )  # fmt: skip
    found = pair(first, second)
    assert sorted(zip(found.row.tolist(), found.second_ns.tolist(), strict=True)) == [(0, 10), (1, 40), (2, 4)]


def test_in_order_pairs_kinds_of_which_both_have_as_many() -> None:
    first = side((0, "gemm", "norm", 0, 10), (0, "gemm", "norm", 0, 20), (0, "norm", "norm", 0, 5))
    second = side(
        (0, "gemm", "a", -1, 11), (0, "norm", "b", -1, 1), (0, "gemm", "c", -1, 40), (0, "norm", "b", -1, 2),
        names=("a", "b", "c"),
    )  # fmt: skip
    found = pair_in_order(first, second)
    assert list(zip(found.row.tolist(), found.first_ns.tolist(), found.second_ns.tolist(), strict=True)) == [
        (0, 10, 11), (1, 20, 40)
    ]  # fmt: skip
    assert found.unpaired == 3
    assert len(pair_in_order(side(), side())) == 0


def test_alone_and_without_length() -> None:
    first = side((0, "forward", "forward", 0, 100), (0, "forward", "forward", 1, 0))
    second = side((0, "forward", "forward", 1, 10), (0, "forward", "forward", 2, 10))
    found = pair(first, second)
    assert (len(found), found.unpaired) == (0, 2)
    assert len(pair(side(), side())) == 0
