"""Blocks run alone: an operation is made of them, and how it depends on its parts is how they do.

The engine composes an operation of (max,+) maps of its blocks (:mod:`simpar.engine.price`). Each map comes of running
the block alone: issued long ago, and as the host issues it. So do programs and traces of blocks here, which can be
walked as a step is.
"""

from typing import NamedTuple

from simpar.engine.simulate import execute
from simpar.program.ir import Block, Operation, Program, RankProgram, Run, host_launches, open_run
from simpar.sensitivity.prices import Prices
from simpar.sensitivity.steps import Steps, match
from simpar.trace.trace import NONE


class Issued(NamedTuple):
    """How an operation runs whose end is decided by its launches.

    Attributes:
        length_ns: from its first launch to its end, on a stream that is free.
        block: index of the last block that waits for launches; those behind it run as if issued long ago.
        launches: calls of the host for the blocks before that.
    """

    length_ns: int
    block: int
    launches: int


class Blocks:
    """Runs blocks alone, each once.

    Args:
        prices: on the machine where they run.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._alone: dict[tuple[Block, int, bool], Steps] = {}
        self._issued: dict[tuple[Operation, int], Issued] = {}

    def alone(self, block: Block, kind: int, *, hosted: bool) -> Steps:
        """Program and trace of a block on a kind of device, issued long ago or (``hosted``) from the beginning on."""
        found = self._alone.get((block, kind, hosted))
        if found is None:
            rank, whole = self._prices.home(kind), self._prices.program
            run = Run(Operation(block.name, "forward", (block,), (NONE,)))
            program = Program(
                ranks=(RankProgram(rank, 0, 1, (), tuple(open_run(run, rank, 0))),),
                launch_s=self._prices.machine.launch_s if hosted else 0.0,
                algorithm=whole.algorithm,
                guests=whole.guests,
            )
            trace = execute(program, self._prices.machine.cluster)
            found = self._alone[block, kind, hosted] = match(program, trace)
        return found

    def device_ns(self, operation: Operation, kind: int) -> int:
        """Length of an operation when everything was issued long ago."""
        return sum(self.alone(block, kind, hosted=False).trace.step_ns for block in operation.blocks)

    def issued(self, operation: Operation, kind: int) -> Issued:
        """How an operation runs from its first launch on, on a stream that is free."""
        found = self._issued.get((operation, kind))
        if found is None:
            length_ns, last, launches = 0, Issued(0, 0, 0), 0
            for number, block in enumerate(operation.blocks):
                behind = length_ns + self.alone(block, kind, hosted=False).trace.step_ns
                here = launches * self._prices.launch_ns + self.alone(block, kind, hosted=True).trace.step_ns
                length_ns = max(behind, here)
                if number == 0 or here > behind:
                    last = Issued(0, number, launches)
                launches += host_launches(block.body)
            found = self._issued[operation, kind] = last._replace(length_ns=length_ns)
        return found
