"""What a program computes in all: blocks and their FLOP, without a clock."""

from collections import Counter
from typing import NamedTuple

from simpar.model.work import Attention, Gemm
from simpar.program.ir import Block, Launch, Program, Run


def block_runs(program: Program) -> Counter[Block]:
    """How often each block runs on the simulated ranks."""
    operations = Counter(i.operation for rank in program.ranks for i in rank.instructions if type(i) is Run)
    blocks: Counter[Block] = Counter()
    for operation, count in operations.items():
        for block in operation.blocks:
            blocks[block] += count
    return blocks


class Share(NamedTuple):
    """Part of the forward pass, by FLOP: of products with weights, and of the attention core."""

    products: float
    attention: float


def recomputed_share(program: Program) -> Share:
    """How much of the forward pass runs again."""
    flop: Counter[tuple[str, bool]] = Counter()
    for block, count in block_runs(program).items():
        for launch in block.body:
            if isinstance(launch, Launch):
                kernel = launch.kernel
                is_core = isinstance(kernel, Attention) or (isinstance(kernel, Gemm) and kernel.batch > 1)
                flop[launch.phase, is_core] += kernel.work.flop * count  # type: ignore[assignment]  # counts are floats
    shares = (
        flop["recompute", core] / flop["forward", core] if flop["forward", core] else 0.0 for core in (False, True)
    )
    return Share(*shares)
