"""Weaves two blocks into one, so that the collectives of each run beside the kernels of the other (DualPipe)."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from simpar.program.ir import COMPUTE, Block, Instruction, Record, Wait


def weave(first: Block, second: Block) -> Block:
    """Both blocks as one: each hands over where it would wait for a collective of its own.

    >>> from simpar.model.work import MemoryBound
    >>> from simpar.program.ir import Collective, Group, Launch
    >>> launch, both = Launch(MemoryBound(1), "a"), Group("tp", range(2))
    >>> body = (launch, Collective("all_reduce", 8, both), Record("tp", 0), Wait("compute", 0), launch)
    >>> woven = weave(Block("forward", body), Block("backward", (launch._replace(name="b"),)))
    >>> [i.name for i in woven.body if isinstance(i, Launch)]
    ['a', 'b', 'a']
    """
    body: list[Instruction] = []
    for pieces in zip_longest(_pieces(first.body), _pieces(second.body), fillvalue=()):
        for which, piece in enumerate(pieces):
            body += (_renamed(instruction, which) for instruction in piece)
    return Block(f"{first.name} & {second.name}", tuple(body))


def _pieces(body: Sequence[Instruction]) -> Iterator[tuple[Instruction, ...]]:
    """The body, cut before each wait of the compute stream."""
    begin = 0
    for index, instruction in enumerate(body):
        if isinstance(instruction, Wait) and instruction.stream == COMPUTE and index > begin:
            yield tuple(body[begin:index])
            begin = index
    yield tuple(body[begin:])


def _renamed(instruction: Instruction, which: int) -> Instruction:
    if isinstance(instruction, Record | Wait):
        return instruction._replace(event=(which, instruction.event))
    return instruction
