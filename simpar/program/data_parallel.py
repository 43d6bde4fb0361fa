"""Data parallelism of one rank: when gradients are reduced and parameters gathered, as orders of instructions.

Two strategies with the same four hooks: :class:`Replicated` (every rank holds the weights: DDP, ZeRO-1 and ZeRO-2) and
:class:`FullySharded` (weights are gathered layer by layer: ZeRO-3, FSDP, HSDP).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

from simpar.cost.memory import weight_bytes
from simpar.model.work import DTYPE_BYTES
from simpar.plan.layout import Layout
from simpar.program.ir import Collective, Group
from simpar.program.unit import Placed
from simpar.program.writer import Writer

STREAM = "dp"
REPLICAS = "dp_replicas"


class Runner(Protocol):
    """Runs units ``first`` to ``last`` (exclusive) of the present chunk; ``beside`` if dp traffic may run meanwhile."""

    def __call__(self, first: int, last: int, *, beside: bool) -> None:
        """Adds the run."""


@dataclass(frozen=True)
class Groups:
    """The data-parallel groups of one rank and the collectives that they run.

    Attributes:
        layout: the plan laid over model and cluster.
        stage: pipeline rank.
        replica: data-parallel index.
        tp_rank: tensor-parallel index.
        folded: whether this rank stands for the other tensor-parallel ranks and for other replicas.
    """

    layout: Layout
    stage: int
    replica: int
    tp_rank: int
    folded: bool

    @cached_property
    def all(self) -> Group:
        """All replicas."""
        return self._group(0, self.layout.dp, 1, copies=1)

    @cached_property
    def shard(self) -> Group:
        """The ranks that shard states with this one."""
        shard = self.layout.shard
        return self._group(self.replica - self.replica % shard, shard, 1, copies=self.layout.dp // shard)

    @cached_property
    def replicas(self) -> Group:
        """The ranks that hold the same shard; their all-reduce runs beside the collectives of the shards (FSDP2)."""
        shard = self.layout.shard
        return self._group(self.replica % shard, self.layout.dp // shard, shard, copies=shard, stream=REPLICAS)

    def _group(self, first: int, count: int, step: int, *, copies: int, stream: str = STREAM) -> Group:
        """``count`` replicas from ``first`` on; the stage has ``copies`` such groups per tensor-parallel rank."""
        tp = self.layout.plan.tp
        start = self.layout.rank(self.stage, first, self.tp_rank)
        ranks = range(start, start + count * step * tp, step * tp)
        if not self.folded:
            return Group(stream, ranks)
        # copies are shifted by whole groups (shards) or by neighbours (replicas), and by every tensor-parallel index
        stride = tp * (count if step == 1 else 1)
        base = self.layout.rank(self.stage) - self.layout.rank(self.stage, first if step == 1 else first % step)
        return Group(stream, ranks, tuple(base + i * stride + t for i in range(copies) for t in range(tp)))

    def reduce(self, parameters: int, microbatch: int, layer: int = -1) -> list[Collective]:
        """Gradients of ``parameters`` parameters: all-reduced, or reduced to shards and these all-reduced (HSDP)."""
        nbytes = float(parameters * DTYPE_BYTES[self.layout.grad_dtype])
        dp, shard = self.layout.dp, self.layout.shard
        found = []
        if self.layout.plan.zero == 0:
            if dp > 1:
                found.append(Collective("all_reduce", nbytes, self.all, "gradients", microbatch, -1, layer))
            return found
        if shard > 1:
            found.append(Collective("reduce_scatter", nbytes, self.shard, "gradients", microbatch, -1, layer))
        if dp > shard:
            found.append(Collective("all_reduce", nbytes / shard, self.replicas, "gradients", microbatch, -1, layer))
        return found

    def gather(self, parameters: int, layer: int = -1) -> list[Collective]:
        """The weights of ``parameters`` parameters from their shards."""
        if self.layout.shard == 1:
            return []
        nbytes = float(parameters * weight_bytes(self.layout.precision))
        return [Collective("all_gather", nbytes, self.shard, "parameters", -1, -1, layer)]


def _parameters(placed: Sequence[Placed]) -> int:
    return sum(p.unit.parameters for p in placed)


class Replicated:
    """DDP and the distributed optimizer: gradients bucket by bucket behind (or beside) the last backward pass."""

    def __init__(self, layout: Layout, groups: Groups, writer: Writer, chunks: Sequence[Sequence[Placed]]) -> None:
        self._layout = layout
        self._groups = groups
        self._writer = writer
        self._chunks = chunks
        self._gathered: dict[tuple[int, int], int] = {}
        self._reduced: int | None = None
        self._pending: list[list[Collective]] = []  # what is reduced after the last backward pass
        plan = layout.plan
        self._by_bucket = plan.overlap.grad_reduce and layout.dp > 1
        self._gathers = plan.zero in (1, 2) and layout.shard > 1
        self._gathers_ahead = self._gathers and plan.overlap.param_gather
        self._each_microbatch = plan.zero == 2 and layout.dp > 1

    def begin_step(self) -> None:
        """Starts to gather the last step's updated parameters, in the order in which they will be needed."""
        if not self._gathers_ahead:
            return
        for chunk, placed in enumerate(self._chunks):
            for first, last in self._buckets(chunk):
                self._writer.add(*self._groups.gather(_parameters(placed[first:last])))
                self._gathered[chunk, first] = self._writer.record(STREAM)

    def forward(self, run: Runner, chunk: int, *, first: bool) -> None:
        """One forward pass; the first one of a chunk waits for its parameters bucket by bucket."""
        if not (first and self._gathers_ahead):
            run(0, len(self._chunks[chunk]), beside=False)
            return
        for begin, end in self._buckets(chunk):
            self._writer.wait(self._gathered[chunk, begin])
            run(begin, end, beside=True)

    def backward(self, run: Runner, chunk: int, microbatch: int, *, last: bool) -> None:
        """One backward pass; the last one of a chunk (every one with ZeRO-2) reduces gradients."""
        placed = self._chunks[chunk]
        reduces = last or self._each_microbatch
        buckets = self._buckets(chunk) if reduces and self._by_bucket else [(0, len(placed))]
        for begin, end in reversed(buckets):
            run(begin, end, beside=reduces and self._by_bucket)
            if not reduces:
                continue
            collectives = self._groups.reduce(_parameters(placed[begin:end]), microbatch)
            if self._by_bucket:
                self._reduce(collectives)
            elif self._each_microbatch:
                self._reduce(collectives)
                self.before_update()  # the full gradient's memory is needed again at once
            else:
                self._pending.append(collectives)

    def _reduce(self, collectives: list[Collective]) -> None:
        self._reduced = self._writer.after(collectives) or self._reduced

    def before_update(self) -> None:
        """The update needs all gradients."""
        for collectives in self._pending:
            self._reduce(collectives)
        self._pending = []
        if self._reduced is not None:
            self._writer.wait(self._reduced)

    def end_step(self) -> None:
        """Gathers updated parameters, unless the next step does it beside its first forward pass."""
        if self._gathers and not self._gathers_ahead:
            total = sum(_parameters(placed) for placed in self._chunks)
            done = self._writer.after(self._groups.gather(total))
            if done is not None:
                self._writer.wait(done)

    def _buckets(self, chunk: int) -> list[tuple[int, int]]:
        """Runs of units that fill a bucket, in forward order; they fill from the model's end, as gradients come.

        Unless told a size, Megatron-Core buckets the first chunk of the first stage only, which ends the step.
        """
        placed = self._chunks[chunk]
        if self._layout.buckets_first_chunk_only and (self._groups.stage, chunk) != (0, 0):
            return [(0, len(placed))]
        cuts, filled = [len(placed)], 0
        for index in range(len(placed) - 1, 0, -1):
            filled += placed[index].unit.parameters
            if filled >= self._layout.bucket_parameters:
                cuts.append(index)
                filled = 0
        cuts.append(0)
        return list(pairwise(reversed(cuts)))


class FullySharded:
    """ZeRO-3 / FSDP2: gathers each unit before it runs, reduces its gradients after its backward pass.

    A unit is gathered when it runs and its parameters are not there: forward gives them back (all but the last unit's,
    which backward needs at once) unless ``reshard_after_forward`` is off, backward always does. At most two units are
    gathered ahead of their turn at a time: the one that runs and, with ``overlap.param_gather``, the next (implicit
    prefetch). Before a unit's gradients are reduced, compute waits for the previous reduce-scatter, so that at most two
    full gradients are held; without ``overlap.grad_reduce`` it waits for its own.
    """

    def __init__(self, layout: Layout, groups: Groups, writer: Writer, chunks: Sequence[Sequence[Placed]]) -> None:
        self._layout = layout
        self._groups = groups
        self._writer = writer
        self._chunks = chunks
        self._there: set[tuple[int, int]] = set()  # (chunk, unit) whose parameters are gathered
        self._scattered: int | None = None
        self._reduced: int | None = None

    def begin_step(self) -> None:
        """Nothing is gathered ahead of the step."""

    def forward(self, run: Runner, chunk: int, *, first: bool) -> None:  # noqa: ARG002 - the hooks are alike
        """Gathers and runs unit by unit."""
        count = len(self._chunks[chunk])
        self._pass(run, chunk, range(count))
        kept = range(count - 1, count) if self._layout.plan.reshard_after_forward else range(count)
        self._there |= {(chunk, unit) for unit in kept}

    def backward(self, run: Runner, chunk: int, microbatch: int, *, last: bool) -> None:  # noqa: ARG002
        """Gathers again what forward gave back, runs, reduces."""

        def reduce(unit: int) -> None:
            placed = self._chunks[chunk][unit]
            collectives = self._groups.reduce(placed.unit.parameters, microbatch, placed.layer)
            if self._scattered is not None:
                self._writer.wait(self._scattered)
            self._scattered = self._writer.after(collectives[:1]) or self._scattered
            self._reduced = self._writer.after(collectives[1:], self._scattered) or self._scattered
            if not self._layout.plan.overlap.grad_reduce:
                self.before_update()

        self._pass(run, chunk, range(len(self._chunks[chunk]) - 1, -1, -1), then=reduce)
        self._there -= {(chunk, unit) for unit in range(len(self._chunks[chunk]))}

    def _pass(
        self, run: Runner, chunk: int, order: Sequence[int], *, then: Callable[[int], None] | None = None
    ) -> None:
        writer, ahead = self._writer, int(self._layout.plan.overlap.param_gather)
        arrived: list[int | None] = []
        done: list[int] = []

        def gather(position: int) -> None:
            unit = order[position]
            placed = self._chunks[chunk][unit]
            read = placed.unit.parameters + placed.unit.borrowed_parameters
            collectives = [] if (chunk, unit) in self._there else self._groups.gather(read, layer=placed.layer)
            # a unit's memory is free for position p + 1 + ahead once position p ran
            freed = done[position - 1 - ahead] if position > ahead else None
            arrived.append(writer.after(collectives, freed))

        for position in range(min(ahead, len(order))):
            gather(position)
        for position, unit in enumerate(order):
            if position + ahead < len(order):
                gather(position + ahead)
            event = arrived[position]
            if event is not None:
                writer.wait(event)
            run(unit, unit + 1, beside=True)
            done.append(writer.record())
            if then is not None:
                then(unit)

    def before_update(self) -> None:
        """The update needs all gradients."""
        if self._reduced is not None:
            self._writer.wait(self._reduced)

    def end_step(self) -> None:
        """Updated shards stay where they are."""


DataParallel = Replicated | FullySharded
