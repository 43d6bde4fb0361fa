"""The groups of one rank's data parallelism, and the collectives that they run.

Experts are held by other ranks than the rest of a layer, so they have groups and streams of their own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from simpar.cost.memory import weight_bytes
from simpar.model.work import DTYPE_BYTES
from simpar.plan.layout import Layout
from simpar.program.ir import Collective, Group
from simpar.program.unit import Held

STREAM = "dp"
REPLICAS = "dp_replicas"
EXPERTS = "dp_experts"
EXPERT_REPLICAS = "dp_expert_replicas"

Chains = list[list[Collective]]
"""Collectives that follow each other, once for each kind of parameters; the kinds do not wait for each other."""


@dataclass(frozen=True)
class Ring:
    """The ranks that hold the same parameters as one rank: ``count`` of a stage, ``step`` apart.

    Attributes:
        base: first rank of the stage.
        place: of the rank in its stage.
        count: ranks with the same parameters.
        step: how far apart they are.
        sharded: neighbours among them that shard states.
        streams: of all of them and of a shard; of those that hold the same shard.
        folded: whether the rank stands for all others of its stage.
    """

    base: int
    place: int
    count: int
    step: int
    sharded: int
    streams: tuple[str, str]
    folded: bool

    def _group(self, first: int, size: int, step: int, shifts: Iterable[int], stream: str) -> Group:
        """``size`` ranks, ``step`` places of the ring apart; folded, also those ``shifts`` places on."""
        start = self.base + self.place % self.step + first * self.step
        ranks = range(start, start + size * step * self.step, step * self.step)
        if not self.folded:
            return Group(stream, ranks)
        return Group(stream, ranks, tuple(shift * self.step + t for shift in shifts for t in range(self.step)))

    @cached_property
    def all(self) -> Group:
        """All that hold the same parameters."""
        return self._group(0, self.count, 1, (0,), self.streams[0])

    @cached_property
    def shard(self) -> Group:
        """The ranks that shard states with this one."""
        index = self.place // self.step
        shifts = range(0, self.count, self.sharded)
        return self._group(index - index % self.sharded, self.sharded, 1, shifts, self.streams[0])

    @cached_property
    def replicas(self) -> Group:
        """The ranks that hold the same shard; their all-reduce runs beside the collectives of the shards (FSDP2)."""
        index = self.place // self.step
        copies = self.count // self.sharded
        return self._group(index % self.sharded, copies, self.sharded, range(self.sharded), self.streams[1])


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
    def dense(self) -> Ring:
        """The ranks with the same parameters outside experts."""
        return self._ring(self.layout.replicas, self.layout.plan.tp, self.layout.shard, (STREAM, REPLICAS))

    @cached_property
    def experts(self) -> Ring:
        """The ranks with the same experts."""
        layout = self.layout
        return self._ring(layout.expert_replicas, layout.expert_ranks, layout.expert_shard, (EXPERTS, EXPERT_REPLICAS))

    def _ring(self, count: int, step: int, sharded: int, streams: tuple[str, str]) -> Ring:
        base = self.layout.rank(self.stage)
        place = self.layout.rank(self.stage, self.replica, self.tp_rank) - base
        return Ring(base, place, count, step, sharded, streams, self.folded)

    def reduce(self, parameters: int, microbatch: int, layer: int = -1, *, experts: bool = False) -> list[Collective]:
        """Gradients of ``parameters`` parameters: all-reduced, or reduced to shards and these all-reduced (HSDP)."""
        if not parameters:
            return []
        ring = self.experts if experts else self.dense
        name = "expert gradients" if experts else "gradients"
        nbytes = float(parameters * DTYPE_BYTES[self.layout.reduce_dtype])
        found = []
        in_step = self.layout.plan.sync_every == 1  # else replicas meet once a round
        if self.layout.plan.zero == 0:
            if ring.count > 1 and in_step:
                found.append(Collective("all_reduce", nbytes, ring.all, name, microbatch, -1, layer))
            return found
        if ring.sharded > 1:
            found.append(Collective("reduce_scatter", nbytes, ring.shard, name, microbatch, -1, layer))
        if ring.count > ring.sharded and in_step:
            found.append(Collective("all_reduce", nbytes / ring.sharded, ring.replicas, name, microbatch, -1, layer))
        return found

    def gather(self, parameters: int, layer: int = -1, *, experts: bool = False) -> list[Collective]:
        """The weights of ``parameters`` parameters from their shards."""
        ring = self.experts if experts else self.dense
        if ring.sharded == 1 or not parameters:
            return []
        nbytes = float(parameters * weight_bytes(self.layout.precision))
        name = "expert parameters" if experts else "parameters"
        return [Collective("all_gather", nbytes, ring.shard, name, -1, -1, layer)]

    def reductions(self, held: Held, microbatch: int, layer: int = -1) -> Chains:
        """Gradients of both kinds, each on streams of its own."""
        dense = self.reduce(held.dense, microbatch, layer)
        return [each for each in (dense, self.reduce(held.experts, microbatch, layer, experts=True)) if each]

    def gathers(self, held: Held, layer: int = -1) -> Chains:
        """Weights of both kinds."""
        dense = self.gather(held.dense, layer)
        return [each for each in (dense, self.gather(held.experts, layer, experts=True)) if each]
