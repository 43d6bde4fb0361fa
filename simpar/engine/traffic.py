"""How hard what streams carry works their links: bytes over capacity, for each byte of a span.

A span of the trace knows the bytes of its buffer; what of them passes which link follows from the program, the cost
functions and the routes. It is asked for by views, behind a run, so that it costs the clock nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from simpar.engine.costs import Costs, Load
from simpar.engine.rows import KIND
from simpar.program.ir import (
    Block,
    Collective,
    HostWork,
    Instruction,
    Operation,
    Program,
    RankProgram,
    Run,
    Send,
    open_run,
)
from simpar.trace.trace import KINDS, FloatColumn, Lane


def link_s_per_byte(program: Program, costs: Costs, lanes: Sequence[Lane]) -> FloatColumn:
    """Seconds that the busiest link of a lane's transfers needs at its full capacity, per byte of a span.

    Where one kind of transfer comes in several sizes that load links differently, it is their mean by bytes, so that
    the sum over a lane's spans is exact.

    Args:
        program: what ran.
        costs: bound to the cluster where it ran.
        lanes: of the trace.

    Returns:
        Shape (lanes, kinds), in s/B; 0 where a lane carries nothing of a kind.
    """
    row = {(lane.rank, lane.stream): i for i, lane in enumerate(lanes)}
    seconds, nbytes = np.zeros((2, len(lanes), len(KINDS)))
    for rank in program.ranks:
        for transfer, count in _transfers(rank).items():
            stream, kind, carried = _label(transfer)
            place = row[rank.rank, stream], KIND[kind]
            seconds[place] += count * _longest_s(_loads(transfer, rank.rank, costs), costs.slow.link_rates)
            nbytes[place] += count * carried
    return np.divide(seconds, nbytes, out=np.zeros_like(seconds), where=nbytes > 0)


_Transfer = Collective | Send | HostWork


def _transfers(rank: RankProgram) -> Counter[_Transfer]:
    """What a rank's streams carry and how often; those that load links alike are one."""
    found = Counter(_plain(rank.instructions))
    runs = Counter(instruction.operation for instruction in rank.instructions if isinstance(instruction, Run))
    blocks: Counter[Block] = Counter()
    for operation, count in runs.items():
        for block in operation.blocks:
            blocks[block] += count
    for block, count in blocks.items():
        opened = open_run(Run(Operation(block.name, "forward", (block,), (-1,))), rank.rank, 0, rank.replicas)
        for transfer in _plain(opened):
            found[transfer] += count
    return found


def _plain(instructions: Iterable[Instruction]) -> Iterator[_Transfer]:
    """Collectives and messages without what tells one from the next."""
    for instruction in instructions:
        if isinstance(instruction, Collective):
            yield Collective(instruction.op, instruction.nbytes, instruction.group)
        elif isinstance(instruction, Send):
            yield instruction._replace(tag=None, microbatch=-1)
        elif isinstance(instruction, HostWork) and instruction.op != "update":
            yield instruction._replace(name="", microbatch=-1, layer=-1)


def _label(transfer: _Transfer) -> tuple[str, str, float]:
    """Stream, kind and bytes of its span."""
    if isinstance(transfer, Collective):
        return transfer.group.stream, transfer.op, transfer.nbytes
    if isinstance(transfer, HostWork):
        return transfer.stream, "copy", transfer.nbytes
    return transfer.stream, "p2p", sum(nbytes for _, nbytes in transfer.parts)


def _loads(transfer: _Transfer, rank: int, costs: Costs) -> Iterator[Load]:
    if isinstance(transfer, Send):
        yield from costs.messages(transfer.parts, rank, transfer.copies).loads
    elif isinstance(transfer, HostWork):
        yield from costs.host_work(transfer.op, transfer.nbytes, rank, transfer.copies).loads
    else:
        yield from costs.collective(transfer.op, transfer.nbytes, transfer.group, rank).loads
        yield from costs.shared_loads(transfer.op, transfer.nbytes, transfer.group)


def _longest_s(loads: Iterable[Load], rates: Mapping[str, float]) -> float:
    return max(
        (load.nbytes / (load.link.capacity_bytes_per_s * rates.get(load.link.name, 1.0)) for load in loads),
        default=0.0,
    )
