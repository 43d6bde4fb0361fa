"""Puts the delays of a late data loader into a program, before the microbatches that wait for it."""

from dataclasses import replace

from simpar.faults.description import Faults
from simpar.faults.noise import LOADER, happens, lognormal
from simpar.plan.layout import Layout
from simpar.program.ir import Delay, Instruction, Program, RankProgram, Run


def with_delays(program: Program, layout: Layout, faults: Faults) -> Program:
    """The program with a :class:`~simpar.program.ir.Delay` before microbatches on the first stage's ranks."""
    if not faults.loader.strikes:
        return program
    ranks = tuple(_delayed(rank, layout, faults) if rank.stage == 0 else rank for rank in program.ranks)
    return replace(program, ranks=ranks)


def _delayed(rank: RankProgram, layout: Layout, faults: Faults) -> RankProgram:
    loader = faults.loader
    index = rank.rank // layout.plan.tp % layout.replicas // layout.plan.cp
    if loader.replicas is not None and index not in loader.replicas:
        return rank
    key = (faults.seed, LOADER, index)
    count = layout.microbatches * layout.steps
    delays = lognormal(loader.delay_s, loader.spread, count, key=key) * happens(loader.probability, count, key=key)
    instructions: list[Instruction] = []
    seen: set[int] = set()
    step = 0
    for instruction in rank.instructions:
        if isinstance(instruction, Run):
            if instruction.operation.phase == "optimizer":  # the next step begins
                seen.clear()
                step += 1
            elif instruction.microbatch not in seen:
                seen.add(instruction.microbatch)
                delay_s = float(delays[step * layout.microbatches + instruction.microbatch])
                instructions += [Delay(delay_s)] if delay_s else []
        instructions.append(instruction)
    return replace(rank, instructions=tuple(instructions))
