"""Transfers of a plan, alone: messages between stages, collectives of data parallelism, and what these wait behind."""

from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simpar.engine.costs import Costs
from simpar.hardware.cluster import Cluster
from simpar.plan.layout import Layout
from simpar.program.groups import Groups
from simpar.program.ir import Collective
from simpar.program.unit import Held
from simpar.search.live import Turns, turns_of
from simpar.search.stages import Cut

IntArray = npt.NDArray[np.int64]

_MOST_LOADS = 100_000  # that are remembered


class Load(NamedTuple):
    """A transfer alone: how long, and how much compute beside it is set back, both in nanoseconds."""

    time_ns: float
    setback_ns: float


class Transfers:
    """Times of transfers on one cluster.

    Args:
        cluster: the machines.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._costs: dict[str, Costs] = {}  # by the algorithm of collectives
        self._messages: dict[tuple[object, ...], IntArray] = {}
        self._letters: dict[tuple[int, int, int], int] = {}
        self._loads: dict[tuple[object, ...], Load] = {}
        self._turns: dict[tuple[object, ...], Turns] = {}

    def messages_ns(self, layout: Layout, cut: Cut) -> IntArray:
        """From each virtual stage to the next one; 0 within a rank, and after the last of a model."""
        shape, nbytes = cut.shape, cut.boundary_bytes
        key = (id(shape), nbytes, layout.rank(1))
        found = self._messages.get(key)
        if found is None:
            ranks = shape.schedule.rank_of_stage
            found = self._messages[key] = np.zeros(len(ranks), np.int64)
            for stage, (here, there) in enumerate(pairwise(ranks)):
                if here != there and (stage + 1) % shape.schedule.depth:
                    found[stage] = self._message_ns(layout, nbytes, layout.rank(here), layout.rank(there))
        return found

    def _message_ns(self, layout: Layout, nbytes: int, source: int, target: int) -> int:
        key = (nbytes, source, target)
        found = self._letters.get(key)
        if found is None:
            transfer = self._costs_of(layout).message(nbytes, source, target, (0,))
            found = self._letters[key] = transfer.latency_ns + transfer.stream_ns
        return found

    def reduction(self, layout: Layout, rank: int, trained: Held) -> Load:
        """What a pipeline rank does for the gradients of so many parameters, all of one kind, on their stream."""
        return self._load("reduce", layout, rank, trained)

    def gather(self, layout: Layout, rank: int, trained: Held) -> Load:
        """What it does on their stream to gather so many parameters, all of one kind."""
        return self._load("gather", layout, rank, trained)

    def _load(self, what: str, layout: Layout, rank: int, trained: Held) -> Load:
        plan = layout.plan
        key = (
            *(what, rank, trained, plan.zero == 0, plan.sync_every == 1, layout.precision, layout.reduce_dtype),
            *(plan.tp, layout.replicas, layout.shard, layout.expert_ranks, layout.expert_shard),
            plan.collective_algorithm,
        )
        found = self._loads.get(key)
        if found is None:
            if len(self._loads) >= _MOST_LOADS:
                self._loads.clear()
            groups, experts = Groups(layout, rank, 0, 0, folded=False), trained.experts > 0
            ask = groups.gather if what == "gather" else partial(groups.reduce, microbatch=0)
            collectives = ask(trained.total, experts=experts)
            # an all-reduce between replicas of the shards may run beside the stream
            found = self._loads[key] = self._alone(layout, collectives[0]) if collectives else Load(0.0, 0.0)
        return found

    def _costs_of(self, layout: Layout) -> Costs:
        algorithm = layout.plan.collective_algorithm
        if algorithm not in self._costs:
            self._costs[algorithm] = Costs(self.cluster, algorithm)
        return self._costs[algorithm]

    def _alone(self, layout: Layout, collective: Collective) -> Load:
        group = collective.group
        transfer = self._costs_of(layout).collective(collective.op, collective.nbytes, group, group.ranks[0])
        time_ns = transfer.latency_ns + transfer.stream_ns
        slowed = (1.0 - self.cluster.device.compute_rate_during_collectives) * transfer.intensity
        return Load(time_ns, slowed * time_ns)

    def turns(self, layout: Layout, rank: int) -> Turns:
        """What follows the backward passes of a pipeline rank."""
        plan = layout.plan
        key = (plan.schedule, rank, plan.pp, layout.microbatches, plan.vpp, plan.microbatch_group)
        found = self._turns.get(key)
        if found is None:
            m, group = layout.microbatches, plan.microbatch_group
            found = turns_of(plan.schedule, rank, pp=plan.pp, microbatches=m, chunks=plan.vpp, group=group)
            self._turns[key] = found
        return found
