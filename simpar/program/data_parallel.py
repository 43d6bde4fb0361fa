"""Data parallelism of one rank: when gradients are reduced and parameters gathered, as orders of instructions.

Two strategies with the same four hooks: :class:`Replicated` (every rank holds the weights: DDP, ZeRO-1 and ZeRO-2) and
:class:`FullySharded` (weights are gathered layer by layer: ZeRO-3, FSDP, HSDP). Experts are held by other ranks than
the rest of a layer, so their gradients and weights have collectives of their own (:mod:`simpar.program.groups`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from simpar.cost.memory import weight_bytes
from simpar.model.work import MemoryBound
from simpar.plan.layout import Layout
from simpar.program.compression import Compression, Exchange
from simpar.program.groups import STREAM, Chains, Groups
from simpar.program.ir import Launch
from simpar.program.offload import HostUpdate
from simpar.program.unit import Held, Placed
from simpar.program.writer import Writer


class Runner(Protocol):
    """Runs units ``first`` to ``last`` (exclusive) of the present chunk; ``beside`` if dp traffic may run meanwhile."""

    def __call__(self, first: int, last: int, *, beside: bool) -> None:
        """Adds the run."""


class Bucket(NamedTuple):
    """A run of units of a chunk, and the gradients that are complete once the first of them ran backward."""

    first: int
    last: int
    held: Held
    tensors: int


def _whole(placed: Sequence[Placed]) -> Bucket:
    """All units of a chunk as one bucket."""
    held = sum((p.unit.trained for p in placed), Held())
    return Bucket(0, len(placed), held, sum(p.unit.tensors for p in placed))


class Replicated:
    """DDP and the distributed optimizer: gradients bucket by bucket behind (or beside) the last backward pass."""

    def __init__(
        self,
        layout: Layout,
        groups: Groups,
        writer: Writer,
        chunks: Sequence[Sequence[Placed]],
        host: HostUpdate | None = None,
    ) -> None:
        self._layout = layout
        self._host = host
        self._groups = groups
        self._writer = writer
        self._chunks = chunks
        self._whole = [_whole(placed) for placed in chunks]  # each chunk as one bucket
        self._gathered: dict[tuple[int, int], list[int]] = {}
        self._reduced: dict[str, int] = {}  # the last event of each kind of parameters, by its stream
        self._pending: list[tuple[Chains, int, Bucket, int]] = []  # what is reduced after the last backward pass
        self._left: int | None = None  # the last gradients are on the host from this event on
        plan = layout.plan
        has_experts = any(p.unit.trained.experts for placed in chunks for p in placed)
        copies = max(layout.reducing, layout.expert_replicas if has_experts and plan.sync_every == 1 else 1)
        shards = max(layout.shard, layout.expert_shard if has_experts else 1)
        self._reduces = copies > 1 or host is not None
        self._by_bucket = bool(layout.overlap.grad_reduce) and self._reduces
        self._gathers = plan.zero in (1, 2) and shards > 1
        self._waits_for_shards = plan.zero == 1 and shards > 1 and layout.framework.optimizer.waits_for_shards
        self._gathers_ahead = self._gathers and layout.overlap.param_gather
        self._each_microbatch = plan.zero == 2 and self._reduces
        packs = copies > 1 and plan.grad_compression != "none"
        self._exchange = Exchange(Compression.of(layout), groups.dense.all, writer) if packs else None
        self._unsent: list[tuple[int, int]] = []  # parameters and microbatch of what is compressed after backward

    def begin_step(self) -> None:
        """Starts to gather the last step's updated parameters, in the order in which they will be needed."""
        if not self._gathers_ahead:
            return
        for chunk in range(len(self._chunks)):
            for bucket in self._buckets(chunk):
                chains = self._groups.gathers(bucket.held)
                for chain in chains:
                    self._writer.add(*chain)
                events = [self._writer.record(chain[-1].group.stream) for chain in chains]
                self._gathered[chunk, bucket.first] = events or [self._writer.record(STREAM)]

    def forward(self, run: Runner, chunk: int, *, first: bool) -> None:
        """One forward pass; the first one of a chunk waits for its parameters bucket by bucket."""
        if not (first and self._gathers_ahead):
            run(0, len(self._chunks[chunk]), beside=False)
            return
        for bucket in self._buckets(chunk):
            for event in self._gathered[chunk, bucket.first]:
                self._writer.wait(event)
            run(bucket.first, bucket.last, beside=True)

    def backward(self, run: Runner, chunk: int, microbatch: int, *, last: bool) -> None:
        """One backward pass; the last one of a chunk (every one with ZeRO-2) reduces gradients."""
        reduces = last or self._each_microbatch
        buckets = self._buckets(chunk) if reduces and self._by_bucket else [self._whole[chunk]]
        for bucket in reversed(buckets):
            run(bucket.first, bucket.last, beside=reduces and self._by_bucket)
            if not reduces:
                continue
            if self._exchange is not None:
                self._unsent.append((bucket.held.total, microbatch))
                if self._by_bucket:
                    self._send()
                continue
            chains = self._in_buckets(bucket, microbatch)
            self._copy_shards(bucket)
            if self._by_bucket:
                self._reduce(chains, chunk, bucket, microbatch)
                if self._waits_for_shards:
                    self._wait()
            elif self._each_microbatch:
                self._reduce(chains, chunk, bucket, microbatch)
                self.before_update()  # the full gradient's memory is needed again at once
            else:
                self._pending.append((chains, chunk, bucket, microbatch))

    def backward_input(self, run: Runner, chunk: int) -> None:
        """The first half of a split backward pass, which brings no gradients yet; the second is :meth:`backward`."""
        run(0, len(self._chunks[chunk]), beside=False)

    def backward_weight(self, run: Runner, chunk: int, microbatch: int, *, last: bool) -> None:
        """The second half of a split backward pass."""
        self.backward(run, chunk, microbatch, last=last)

    def is_quiet(self, *, first: bool, last: bool) -> bool:
        """Whether a forward and a backward pass bring no communication, so that both may be one run."""
        return not (first and self._gathers_ahead) and not (self._reduces and (last or self._each_microbatch))

    def _in_buckets(self, bucket: Bucket, microbatch: int) -> Chains:
        """The gradients of units that fill a bucket; a unit larger than that comes in several, tensor by tensor."""
        chains = []
        for held in (Held(dense=bucket.held.dense), Held(experts=bucket.held.experts)):
            pieces = 1
            if self._by_bucket and not self._layout.buckets_first_chunk_only:
                pieces = max(1, min(bucket.tensors, -(-held.total // self._layout.bucket_parameters)))
            share = Held(-(-held.dense // pieces), -(-held.experts // pieces))
            chains += [chain * pieces for chain in self._groups.reductions(share, microbatch)]
        return chains

    def _copy_shards(self, bucket: Bucket) -> None:
        """Frameworks that shard tensor by tensor copy each tensor's part of each rank in and out of flat buffers."""
        layout = self._layout
        each_s = layout.framework.optimizer.shard_copy_s
        if layout.plan.zero not in (1, 2) or layout.shard == 1 or not each_s:
            return
        copies = bucket.tensors * layout.shard
        launches = max(1, round(copies * each_s / layout.launch_s)) if layout.launch_s else 1
        nbytes = 2 * weight_bytes(layout.precision) * bucket.held.total
        self._writer.add(Launch(MemoryBound(int(nbytes * layout.traffic)), "copy shards", "optimizer", launches))

    def _reduce(self, chains: Chains, chunk: int, bucket: Bucket, microbatch: int) -> None:
        """Reduces gradients, and sends them to the host where it updates."""
        # kinds are issued before any is waited for: neither stands in the other's way
        done = self._writer.record() if chains else 0
        ends: list[int] = []
        for chain in chains:
            end = self._writer.after(chain, done)
            if end is not None:
                self._reduced[chain[0].group.stream] = end
                ends.append(end)
        if self._host is not None:
            if self._each_microbatch:
                self._wait_for_host()  # the gradients of one bucket leave while those of the next come
            left = self._host.gradients((chunk, bucket.first), bucket.held, ends, microbatch)
            self._left = self._left if left is None else left

    def _send(self) -> None:
        """Compresses gradients and sends them off."""
        assert self._exchange is not None, "the plan compresses"
        for parameters, microbatch in self._unsent:
            if parameters:
                self._exchange.start(parameters, microbatch)
        self._unsent = []

    def before_update(self) -> None:
        """The update needs all gradients."""
        if self._exchange is not None:
            self._send()
            self._exchange.finish()
        for pending in self._pending:
            self._reduce(*pending)
        self._pending = []
        self._wait()
        self._wait_for_host()

    def _wait(self) -> None:
        """Lets the compute stream wait for all that is being reduced."""
        for event in self._reduced.values():
            self._writer.wait(event)
        self._reduced = {}

    def _wait_for_host(self) -> None:
        """Lets it wait until all gradients that leave have left."""
        if self._left is not None:
            self._writer.wait(self._left)
            self._left = None

    def end_step(self) -> None:
        """Gathers updated parameters, unless the next step does it beside its first forward pass."""
        if not self._gathers or self._gathers_ahead:
            return
        held = sum((bucket.held for bucket in self._whole), Held())
        chains = self._groups.gathers(held)
        begin = self._writer.record() if chains else 0
        for event in [self._writer.after(chain, begin) for chain in chains]:
            if event is not None:
                self._writer.wait(event)
        for bucket in self._whole:
            self._copy_shards(bucket)

    def _buckets(self, chunk: int) -> list[Bucket]:
        """Runs of units that fill a bucket, in forward order; they fill from the model's end, as gradients come.

        Both kinds of parameters fill buckets of their own. A run ends where one is full; what the other kind has by
        then waits for its own bucket. Unless told a size, Megatron-Core buckets the first chunk of the first stage
        only, which ends the step.
        """
        placed, limit = self._chunks[chunk], self._layout.bucket_parameters
        if self._layout.buckets_first_chunk_only and (self._groups.stage, chunk) != (0, 0):
            return [self._whole[chunk]]
        found: list[Bucket] = []
        end, filled, tensors = len(placed), Held(), 0
        for index in range(len(placed) - 1, -1, -1):
            filled += placed[index].unit.trained
            tensors += placed[index].unit.tensors
            full = Held(filled.dense * (filled.dense >= limit), filled.experts * (filled.experts >= limit))
            if index == 0:
                full = filled
            if index == 0 or full.total:
                found.append(Bucket(index, end, full, tensors))
                end, tensors = index, 0
                filled = Held(filled.dense - full.dense, filled.experts - full.experts)
        return found[::-1]


class FullySharded:
    """ZeRO-3 / FSDP2: gathers each unit before it runs, reduces its gradients after its backward pass.

    A unit is gathered when it runs and its parameters are not there: forward gives them back (all but the last unit's,
    which backward needs at once) unless ``reshard_after_forward`` is off, backward always does. At most two units are
    gathered ahead of their turn at a time: the one that runs and, with ``overlap.param_gather``, the next (implicit
    prefetch). Before a unit's gradients are reduced, compute waits for the previous reduce-scatter, so that at most two
    full gradients are held; without ``overlap.grad_reduce`` it waits for its own.
    """

    def __init__(
        self,
        layout: Layout,
        groups: Groups,
        writer: Writer,
        chunks: Sequence[Sequence[Placed]],
        host: HostUpdate | None = None,
    ) -> None:
        self._layout = layout
        self._host = host
        self._groups = groups
        self._writer = writer
        self._chunks = chunks
        self._there: set[tuple[int, int]] = set()  # (chunk, unit) whose parameters are gathered
        self._scattered: list[int] = []
        self._reduced: dict[str, int] = {}

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
        self._pass(run, chunk, self._trained(chunk), then=lambda unit: self._reduce(chunk, unit, microbatch))
        self._there -= {(chunk, unit) for unit in range(len(self._chunks[chunk]))}

    def backward_input(self, run: Runner, chunk: int) -> None:
        """The first half of a split backward pass, which is the one that reads the parameters."""
        self._pass(run, chunk, self._trained(chunk))
        self._there -= {(chunk, unit) for unit in range(len(self._chunks[chunk]))}

    def backward_weight(self, run: Runner, chunk: int, microbatch: int, *, last: bool) -> None:  # noqa: ARG002
        """The second half: runs unit by unit, reduces."""
        for unit in self._trained(chunk):
            run(unit, unit + 1, beside=True)
            self._reduce(chunk, unit, microbatch)

    def is_quiet(self, *, first: bool, last: bool) -> bool:  # noqa: ARG002
        """Every pass gathers."""
        return False

    def _trained(self, chunk: int) -> list[int]:
        """Units that run backward, last one first."""
        placed = self._chunks[chunk]
        return [unit for unit in range(len(placed) - 1, -1, -1) if placed[unit].unit.has_backward]

    def _reduce(self, chunk: int, unit: int, microbatch: int) -> None:
        placed = self._chunks[chunk][unit]
        chains = self._groups.reductions(placed.unit.trained, microbatch, placed.layer)
        for event in self._scattered:
            self._writer.wait(event)
        scattered = [(chain, self._writer.after(chain[:1])) for chain in chains]
        for chain, begun in scattered:
            end = self._writer.after(chain[1:], begun) or begun
            if end is not None:
                self._reduced[chain[0].group.stream] = end
        self._scattered = [begun for _, begun in scattered if begun is not None] or self._scattered
        if self._host is not None:
            ends = [self._reduced[chain[0].group.stream] for chain in chains]
            left = self._host.gradients((chunk, unit), placed.unit.trained, ends, microbatch)
            if left is not None:
                self._reduced["host"] = left
                self._scattered = self._scattered if chains else [left]  # what nobody shares leaves as a whole
        if not self._layout.overlap.grad_reduce:
            self.before_update()

    def _pass(
        self, run: Runner, chunk: int, order: Sequence[int], *, then: Callable[[int], None] | None = None
    ) -> None:
        writer, ahead = self._writer, int(bool(self._layout.overlap.param_gather))
        arrived: list[int | None] = []
        done: list[int] = []

        def gather(position: int) -> None:
            unit = order[position]
            placed = self._chunks[chunk][unit]
            read = placed.unit.held + Held(placed.unit.borrowed_parameters)
            chains = [] if (chunk, unit) in self._there else self._groups.gathers(read, placed.layer)
            collectives = [each for chain in chains for each in chain]  # FSDP2 has one stream for all of them
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
        for event in self._reduced.values():
            self._writer.wait(event)

    def end_step(self) -> None:
        """Updated shards stay where they are."""


DataParallel = Replicated | FullySharded
