"""Operations of a program: units of a virtual stage as one run, each distinct one made once."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal

from simpar.cost.memory import optimizer_traffic
from simpar.model.work import DTYPE_BYTES, MemoryBound
from simpar.plan.layout import Layout
from simpar.plan.offload import offloads_optimizer
from simpar.program.body import Body
from simpar.program.ir import Block, Operation, Phase
from simpar.program.queue import backward_bytes, forward_bytes
from simpar.program.unit import Chunk, Held
from simpar.program.weave import weave

Part = Literal["forward", "backward", "backward_input", "backward_weight"]
FORWARD: Part = "forward"
BACKWARD: Part = "backward"
# what a part of a unit is called, and the phase of its kernels
_PARTS: dict[Part, tuple[str, Phase]] = {
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "backward_input": ("input gradient", "backward"),
    "backward_weight": ("weight gradient", "weight_grad"),
}


class Operations:
    """Makes each distinct operation once."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        self._made: dict[tuple[int, Part, int, int], Operation] = {}
        self._pairs: dict[tuple[int, int, int], Operation] = {}
        self._woven: dict[tuple[Block, Block], Block] = {}
        self._transient: dict[tuple[int, int, int], int] = {}
        self._queued: dict[tuple[int, int, bool], int] = {}
        self._updates: dict[tuple[Held, int], Operation] = {}

    def units(self, stage: int, part: Part, first: int, last: int) -> Operation:
        """Units ``first`` to ``last`` (exclusive) of a virtual stage, one part of them."""
        key = (stage, part, first, last)
        if key not in self._made:
            placed = self.chunks[stage][first:last]
            if part != "forward":
                placed = placed[::-1]
            blocks: list[tuple[Block, int]] = [(getattr(p.unit, part), p.layer) for p in placed]
            blocks = [(block, layer) for block, layer in blocks if block.body]
            name, phase = _PARTS[part]
            self._made[key] = Operation(name, phase, tuple(b for b, _ in blocks), tuple(x for _, x in blocks))
        return self._made[key]

    def pair(self, forward: int, backward: int, other: "Operations") -> Operation:
        """A virtual stage forward and another one (of ``other``, for another length) backward, woven unit by unit."""
        key = (forward, backward, id(other))
        if key not in self._pairs:
            first = self.units(forward, FORWARD, 0, len(self.chunks[forward]))
            second = other.units(backward, BACKWARD, 0, len(other.chunks[backward]))
            units = list(zip_longest(first.blocks, second.blocks))
            blocks = tuple(self._weave(f, b) if f and b else f or b for f, b in units)
            self._pairs[key] = Operation("forward & backward", "backward", blocks, (-1,) * len(blocks))
        return self._pairs[key]

    def _weave(self, first: Block, second: Block) -> Block:
        if (first, second) not in self._woven:
            self._woven[first, second] = weave(first, second)
        return self._woven[first, second]

    def transient_bytes(self, stage: int, first: int, last: int) -> int:
        """What the hungriest of these units holds beside its activations while it runs backward."""
        key = (stage, first, last)
        if key not in self._transient:
            placed = self.chunks[stage][first:last]
            self._transient[key] = max((p.unit.transient_bytes for p in placed), default=0)
        return self._transient[key]

    def queued_bytes(self, stage: int, passes: int, *, backward: bool) -> int:
        """What collectives in the launch queue hold, beside activations (:mod:`~simpar.program.queue`)."""
        key = (stage, passes, backward)
        if key not in self._queued:
            units = [placed.unit for placed in self.chunks[stage]]
            self._queued[key] = backward_bytes(units) if backward else forward_bytes(units, passes)
        return self._queued[key]

    def update(self, parameters: Held, tensors: int, layout: Layout) -> Operation:
        """The optimizer step over the parameters that a rank holds, in so many tensors; no blocks if the host's."""
        if (parameters, tensors) not in self._updates:
            plan, optimizer = layout.plan, layout.framework.optimizer
            body = Body(phase="optimizer")
            share = shard_of(parameters, layout)
            traffic = optimizer_traffic(
                share,
                precision=layout.precision,
                grad_dtype=layout.grad_dtype,
                optimizer=plan.optimizer,
                optimizer_dtype=plan.optimizer_dtype,
                clips=layout.clips_gradients,
            )
            launches = max(1, round(optimizer.launches_per_tensor * tensors))
            on_host = offloads_optimizer(plan)
            for name, nbytes in traffic.items() if not on_host else ():
                is_update = name == plan.optimizer
                extra = optimizer.extra_bytes * share if is_update else 0
                kernel = MemoryBound(int((nbytes + extra) * layout.traffic))
                body.run(kernel, name, launches if is_update else 1)
            if layout.keeps_gradients and not (on_host and plan.zero >= 2):
                kept = share if plan.zero >= 2 else parameters.total
                body.run(MemoryBound(kept * DTYPE_BYTES[layout.grad_dtype]), "zero gradients")
            blocks = [block for block in [body.block("optimizer")] if block.body]
            self._updates[parameters, tensors] = Operation("optimizer", "optimizer", tuple(blocks), (-1,) * len(blocks))
        return self._updates[parameters, tensors]


def shard_of(parameters: Held, layout: Layout) -> int:
    """What a rank updates of parameters: with ZeRO its shard of those that it shares with others."""
    if not layout.plan.zero:
        return parameters.total
    return -(-parameters.dense // layout.shard) - (-parameters.experts // layout.expert_shard)
