"""How ranks spread over equal blocks of them: nodes, pods."""

from collections import Counter
from collections.abc import Sequence
from math import gcd


def span(ranks: Sequence[int], gpus_per_node: int) -> tuple[int, int]:
    """Over how many nodes ranks are spread, and how many of them the fullest node has.

    For a range this takes constant time in its length.

    >>> span(range(0, 64, 4), 8), span([0, 1, 8], 8)
    ((8, 2), (2, 2))
    """
    if not ranks:
        return 0, 0
    if not isinstance(ranks, range):
        per_node = Counter(rank // gpus_per_node for rank in ranks)
        return len(per_node), max(per_node.values())
    ranks = ranks if ranks.step > 0 else ranks[::-1]
    step = ranks.step
    if step >= gpus_per_node:
        return len(ranks), 1
    first, last = ranks[0] // gpus_per_node, ranks[-1] // gpus_per_node
    # The pattern of ranks on nodes repeats after this many nodes; the first and last node may be cut.
    period = step // gcd(step, gpus_per_node)
    most = max(_in_node(ranks, node, gpus_per_node) for node in {*range(first, min(last, first + period) + 1), last})
    return last - first + 1, most


def within(ranks: Sequence[int], number: int, block: int) -> "range | tuple[int, ...]":
    """The ranks of one block, counted from its first."""
    start = number * block
    if not isinstance(ranks, range):
        return tuple(rank - start for rank in ranks if rank // block == number)
    ranks = ranks if ranks.step > 0 else ranks[::-1]
    first, last = (max(0, min(len(ranks), -((ranks.start - edge) // ranks.step))) for edge in (start, start + block))
    return range(ranks.start + first * ranks.step - start, ranks.start + last * ranks.step - start, ranks.step)


def per_block(ranks: Sequence[int], block: int) -> dict[int, int]:
    """How many ranks lie in each block of so many; for a range in constant time a block."""
    if not isinstance(ranks, range):
        return Counter(rank // block for rank in ranks)
    ranks = ranks if ranks.step > 0 else ranks[::-1]
    blocks = range(ranks[0] // block, ranks[-1] // block + 1)
    counts = {number: _in_node(ranks, number, block) for number in blocks}
    return {number: count for number, count in counts.items() if count}


def _in_node(ranks: range, node: int, gpus_per_node: int) -> int:
    start = node * gpus_per_node
    below = [max(0, min(len(ranks), -((ranks.start - edge) // ranks.step))) for edge in (start, start + gpus_per_node)]
    return below[1] - below[0]
