"""Lower bounds of a plan's step time and memory, far cheaper than its simulation and never above it.

The time is that of the busiest pipeline rank: what must run on other stages before its first forward pass, all its
passes at the engine's own block prices, what must run after its last one, and the optimizer; or that of its
data-parallel stream. Every order, overlap and contention that the engine knows only adds to these: a run of a block
never undercuts the block's price (:class:`~simpar.search.blocks.BlockTime`), a transfer never undercuts its time alone,
and the time of a collective is concave in its bytes, so that one collective over a sum undercuts those over its parts.
"""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simpar.cost.memory import state_bytes
from simpar.engine.costs import Costs
from simpar.hardware.cluster import Cluster
from simpar.model.transformer import Transformer
from simpar.plan.layout import Layout, Model, lay_out
from simpar.plan.offload import offloads_activations, offloads_optimizer
from simpar.plan.placement import places
from simpar.plan.plan import Plan
from simpar.program.buffers import buffer_bytes
from simpar.program.groups import Groups
from simpar.program.ir import Collective
from simpar.program.unit import Held
from simpar.search.blocks import is_even
from simpar.search.live import Shape, shape_of, shortened
from simpar.search.stages import Cut, Cutter
from simpar.units import ns

IntArray = npt.NDArray[np.int64]

_ROUNDING = 1e-6  # the engine rounds each of thousands of durations to a nanosecond
_MOST_LAYOUTS, _MOST_STATES = 1000, 100_000  # that are remembered


class Bound(NamedTuple):
    """What a plan takes at least.

    Attributes:
        step_s: seconds of a step; 0 where the memory alone rules the plan out.
        memory_bytes: of the fullest rank.
    """

    step_s: float
    memory_bytes: int


class Load(NamedTuple):
    """A transfer alone: how long, and how much compute beside it is set back, both in nanoseconds."""

    time_ns: float
    setback_ns: float


class Bounds:
    """Bounds of plans for one model on one cluster.

    Args:
        model: the model.
        cluster: the machines.
        axes: fields in which the plans differ; they agree in all others.
        without_experts: leave experts out of all layers: bounds of plans that differ in how these are spread, too.
        prunes: whether a plan may be ruled out by its memory.
    """

    def __init__(
        self,
        model: Model,
        cluster: Cluster,
        axes: tuple[str, ...],
        *,
        without_experts: bool = False,
        prunes: bool = True,
    ) -> None:
        self.cluster = cluster
        self.capacity_bytes: float = max(device.memory_bytes for device in cluster.devices) if prunes else inf
        self._context_bytes = min(device.context_bytes for device in cluster.devices)
        self._is_even = is_even(cluster)
        self._model = model
        self._cutter = Cutter(model, cluster, axes, without_experts=without_experts)
        self._costs: dict[str, Costs] = {}  # by the algorithm of collectives
        self._shapes: dict[tuple[object, ...], Shape] = {}
        # what a layout says about plans that differ in these is the same; modules refuse some ways to recompute
        shared = {"vpp", "schedule"} | ({"recompute"} if isinstance(model, Transformer) else set())
        self._laying = tuple(axis for axis in axes if axis not in shared)
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._messages: dict[tuple[object, ...], IntArray] = {}
        self._letters: dict[tuple[int, int, int], int] = {}
        self._known_states: dict[tuple[object, ...], int] = {}
        self._loads: dict[tuple[object, ...], Load] = {}

    def of(self, plan: Plan) -> Bound:
        """The bound of a plan.

        Raises:
            PlanError: the plan breaks a rule of model, cluster or schedule.
        """
        layout = self.lay_out(plan)
        cut = self.cut(layout, plan.schedule, plan.vpp)
        memory = self.memory_bytes(layout, cut, with_buffers=True)
        if memory > self.capacity_bytes or self._is_unsure(layout):
            return Bound(0.0, memory)
        step_ns = self._kernels_ns(layout, cut) if self._is_loose(layout, cut) else _Step(self, layout, cut).bound_ns()
        return Bound(_seconds(step_ns), memory)

    def lay_out(self, plan: Plan) -> Layout:
        """The plan laid out; one that differs only in its schedule shares the rest.

        Raises:
            PlanError: the plan breaks a rule of model or cluster.
        """
        key = tuple([getattr(plan, axis) for axis in self._laying])
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            found = self._layouts[key] = lay_out(plan, self._model, self.cluster)
        return found if found.plan is plan else replace(found, plan=plan)

    def cut(self, layout: Layout, schedule: str, chunks: int) -> Cut:
        """The units of a plan cut into virtual stages, for any schedule in place of the plan's own.

        Raises:
            PlanError: the schedule cannot run so many microbatches, or the layers cannot be split so.
        """
        plan = layout.plan
        fewer = shortened(schedule, plan.pp, layout.microbatches, plan.microbatch_group)
        key = (schedule, plan.pp, *fewer, chunks)
        shape = self._shapes.get(key)
        if shape is None:
            shape = shape_of(schedule, plan.pp, layout.microbatches, chunks, plan.microbatch_group)
            self._shapes[key] = shape
        return self._cutter.cut(layout, shape)

    def passes_s(self, layout: Layout, cut: Cut) -> float:
        """Seconds that the passes alone take at least: the bound without messages, data parallelism and slowdowns.

        A part of the bound of the plan, and of those of plans with a lower ZeRO stage, or that recompute more.
        """
        if self._is_unsure(layout):
            return 0.0
        if self._is_loose(layout, cut):
            return _seconds(self._kernels_ns(layout, cut))
        shape, pp, m = cut.shape, layout.plan.pp, layout.microbatches // cut.shape.schedule.copies
        forward, backward = cut.forward.calm, cut.backward.calm
        start = _least(cut.before(forward), shape.rank_of_stage, pp)
        busy = m * cut.per_rank(cut.total(forward) + cut.total(backward))
        drain = 0 if shape.splits_backward else _least(cut.before(backward), shape.rank_of_stage, pp)
        launches = m * cut.per_rank(cut.total(cut.units.launches))
        return _seconds(max((start + busy + drain).max(), launches.max() * ns(layout.launch_s)))

    def _is_unsure(self, layout: Layout) -> bool:
        """Whether nothing is known before the simulation: samples of several lengths, workers that servers part."""
        return layout.samples is not None or layout.server is not None

    def _is_loose(self, layout: Layout, cut: Cut) -> bool:
        """Whether only kernels are sure: where passes are woven, or groups lie on the cluster in different ways."""
        weaves = bool(cut.shape.schedule.overlapped)
        return weaves or not self._is_even or places(layout, self.cluster) is not None

    def _kernels_ns(self, layout: Layout, cut: Cut) -> float:
        """The kernels of the busiest rank."""
        microbatches = layout.microbatches // cut.shape.schedule.copies
        times = cut.total(cut.forward.kernels) + cut.total(cut.backward.kernels)
        return float(microbatches * cut.per_rank(times).max())

    # ---- memory -----------------------------------------------------------------------------------------------------

    def memory_bytes(self, layout: Layout, cut: Cut, *, with_buffers: bool = False) -> int:
        """States, and activations at their most; without what a split backward pass keeps longer, or hosts give back.

        But for buffers, the higher the ZeRO stage, the less.
        """
        held = self._states(layout, cut)
        if not self._is_unsure(layout) and not offloads_activations(layout.plan):
            held = [sum(both) for both in zip(held, cut.activations_per_rank.tolist(), strict=True)]
        if with_buffers and layout.plan.zero >= 2:
            buffers = (buffer_bytes(cut.units_of(rank), layout) for rank in range(layout.plan.pp))
            held = [sum(both) for both in zip(held, buffers, strict=True)]
        return max(held) + self._context_bytes

    def held_bytes(self, layout: Layout, cut: Cut) -> int:
        """The states alone, however little is kept of activations."""
        return max(self._states(layout, cut)) + self._context_bytes

    def _states(self, layout: Layout, cut: Cut) -> list[int]:
        """Bytes of states, by pipeline rank."""
        return [self._state_bytes(trained, layout) for trained in cut.trained_per_rank]

    def _state_bytes(self, trained: Held, layout: Layout) -> int:
        plan, shards = layout.plan, (layout.shard, layout.expert_shard if trained.experts else 0)
        held_as = (layout.precision, layout.grad_dtype, plan.optimizer, plan.optimizer_dtype)
        kept, on_host = layout.framework.keeps_compute_gradients, offloads_optimizer(plan)
        served = layout.server is not None  # where the servers run, they hold the optimizer's states
        key = (trained, plan.zero, *shards, *held_as, kept, layout.framework.keeps_compute_shard, on_host, served)
        found = self._known_states.get(key)
        if found is None:
            if len(self._known_states) >= _MOST_STATES:
                self._known_states.clear()
            found = self._known_states[key] = sum(
                nbytes
                for parameters, shard in ((trained.dense, shards[0]), (trained.experts, shards[1]))
                if parameters
                for category, nbytes in state_bytes(
                    parameters,
                    precision=layout.precision,
                    grad_dtype=layout.grad_dtype,
                    optimizer=plan.optimizer,
                    optimizer_dtype=plan.optimizer_dtype,
                    zero=plan.zero,
                    shard=shard,
                    compute_gradients=kept,
                    compute_shard=layout.framework.keeps_compute_shard,
                    offloaded=on_host,
                ).items()
                if not (served and category == "optimizer")
            )
        return found

    # ---- transfers --------------------------------------------------------------------------------------------------

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
            *(what, rank, trained, plan.zero == 0, plan.sync_every == 1, layout.precision, layout.grad_dtype),
            *(plan.tp, layout.replicas, layout.shard, layout.expert_ranks, layout.expert_shard),
            plan.collective_algorithm,
        )
        found = self._loads.get(key)
        if found is None:
            if len(self._loads) >= _MOST_STATES:
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


class _Step:
    """The time bound of one plan; arrays are per virtual stage (or per pipeline rank, where they say so), in ns."""

    def __init__(self, prices: Bounds, layout: Layout, cut: Cut) -> None:
        self._prices = prices
        self._layout = layout
        self._shape = cut.shape
        self._cut = cut
        self._microbatches = layout.microbatches // cut.shape.schedule.copies
        plan, forward, backward = layout.plan, cut.forward, cut.backward
        opened = self._opens_all
        self._calm_forward, self._calm_backward = cut.total(forward.calm), cut.total(backward.calm)
        self._forward = self._calm_forward if opened or plan.zero == 3 else cut.total(forward.alone)
        self._backward = self._calm_backward if opened or plan.zero >= 2 else cut.total(backward.alone)

    @property
    def _opens_all(self) -> bool:
        """Whether the engine may run every kernel by itself, as it does with groups beyond a leaf switch."""
        fabric = self._prices.cluster.fabric
        return fabric is not None and fabric.pod_nodes is not None

    def bound_ns(self) -> float:
        """Nanoseconds of the step."""
        pp, ranks, m = self._layout.plan.pp, self._shape.rank_of_stage, self._microbatches
        to_next = self._prices.messages_ns(self._layout, self._cut)
        back = to_next if self._cut.units.all_trained else np.zeros_like(to_next)
        # the first pass of a chunk and the last one may run beside gathers and reductions, kernel by kernel
        passes = (m - 1) * (self._forward + self._backward) + self._calm_forward + self._calm_backward
        sends = np.zeros_like(passes)
        if not self._layout.overlaps_messages:
            sends = m * (to_next + np.concatenate(([0], back[:-1])))
        before = self._gated(self._sums_before(self._calm_forward + to_next))
        after = self._sums_before(self._calm_backward + back)
        if self._shape.splits_backward:  # the weight gradients of other stages need not come after
            after = np.zeros_like(after)
        start, drain = _least(before, ranks, pp), _least(after, ranks, pp)
        busy, sent = np.bincount(ranks, passes, pp), np.bincount(ranks, sends, pp)
        ends = [
            (start + busy + sent + drain).max(),
            (before + passes + sends + after).max(),
            np.bincount(ranks, m * self._cut.total(self._cut.units.launches), pp).max() * ns(self._layout.launch_s),
        ]
        suspects = {0, min(1, pp - 1), pp - 1, int((start + busy).argmax())} if self._reduces else ()
        ends += [float(start[rank]) + self._occupied_ns(rank, busy[rank], sent[rank]) for rank in suspects]
        return float(max(ends))

    @property
    def _reduces(self) -> bool:
        """Whether gradients are added up over replicas in a way that is known here."""
        layout = self._layout
        several = layout.replicas > 1 or (layout.has_experts and layout.expert_replicas > 1)
        return several and layout.plan.grad_compression == "none"

    def _sums_before(self, times: IntArray) -> IntArray:
        """Per virtual stage, the sum over those before it in its model."""
        rows = times.reshape(self._shape.schedule.copies, -1)
        sums = rows.cumsum(axis=1) - rows
        return sums.ravel()

    def _gated(self, before: IntArray) -> IntArray:
        """When each stage is reached at the earliest: a first pass ends only once its gathered weights are there."""
        layout, cut = self._layout, self._cut
        if layout.plan.zero not in (1, 2) or not self._reduces or not layout.overlap.param_gather:
            return before
        rank = int(self._shape.rank_of_stage[0])
        arrives = max(self._prices.gather(layout, rank, kind).time_ns for kind in _kinds(cut.trained_of(0)))
        gate = max(int(arrives) - int(self._calm_forward[0]), 0)
        reached = before.reshape(self._shape.schedule.copies, -1).copy()
        reached[0] += gate
        return reached.ravel()

    def _occupied_ns(self, rank: int, busy: float, sent: float) -> float:
        """From the first pass of a rank to the end of its reductions, of whichever kind of parameters ends last.

        Gathers and reductions of a kind follow each other on one stream, and set back the passes beside which they run.
        What may have been gathered before the first pass does not count, and a wait for a message counts only once.
        """
        held = np.flatnonzero(self._shape.rank_of_stage == rank)
        if self._layout.plan.zero == 3:
            return max(self._beside_ns(stream, self._path_ns(rank), busy, sent) for stream in self._sharded(rank))
        chunks = zip(*(_kinds(self._cut.trained_of(stage)) for stage in held.tolist()), strict=True)
        reductions = [[self._prices.reduction(self._layout, rank, each) for each in kind] for kind in chunks]
        if self._layout.plan.zero < 2 or not self._layout.overlap.grad_reduce:
            # all that is sure: the last pass ends with the reduction of its own gradients after it began
            last = float(self._calm_backward[held].max()) + sent / self._microbatches
            return busy + sent - last + max(min(each.time_ns for each in kind) for kind in reductions)
        m = self._microbatches
        streams = [Load(m * sum(r.time_ns for r in kind), m * sum(r.setback_ns for r in kind)) for kind in reductions]
        return max(self._beside_ns(stream, self._path_ns(rank), busy, sent) for stream in streams)

    def _path_ns(self, rank: int) -> float:
        """All passes of a rank, where collectives count only as much as the rate of compute beside them."""
        times = self._cut.total(self._cut.forward.beside) + self._cut.total(self._cut.backward.beside)
        return float(self._microbatches * self._cut.per_rank(times)[rank])

    def _beside_ns(self, stream: Load, path: float, busy: float, sent: float) -> float:
        """A stream and the passes beside it, which it does not set back while they wait (see ``beside_ns``)."""
        rate = self._prices.cluster.device.compute_rate_during_collectives
        return max(stream.time_ns, busy + sent, path + rate * sent + stream.setback_ns)

    def _sharded(self, rank: int) -> list[Load]:
        """The streams of both kinds under ZeRO-3: reductions of every unit and microbatch, and gathers.

        The last unit of a chunk may still be there when it is needed; where forward gives the others back, they are
        gathered for each forward and backward pass, of which only the first may have its weights before it begins.
        """
        m = self._microbatches
        passes = 2 * m - 1 if self._layout.plan.reshard_after_forward else 0
        times, setbacks = [0.0, 0.0], [0.0, 0.0]
        for (trained, stays), count in self._cut.pieces(rank).items():
            for number, kind in enumerate(_kinds(trained)):
                reduction = self._prices.reduction(self._layout, rank, kind)
                gather = self._prices.gather(self._layout, rank, kind)
                gathers = 0 if stays else passes
                times[number] += count * (m * reduction.time_ns + gathers * gather.time_ns)
                setbacks[number] += count * (m * reduction.setback_ns + gathers * gather.setback_ns)
        return [Load(*both) for both in zip(times, setbacks, strict=True)]


def _kinds(held: Held) -> tuple[Held, Held]:
    """Parameters by who else holds them: those outside experts, those of experts."""
    return Held(dense=held.dense), Held(experts=held.experts)


def _seconds(step_ns: float) -> float:
    """Seconds of a bound, less what rounding may take from the simulation."""
    return float(step_ns) * (1 - _ROUNDING) * 1e-9


def _least(values: IntArray, ranks: IntArray, pp: int) -> IntArray:
    """Per pipeline rank, the least of its virtual stages' values."""
    found = np.full(pp, np.iinfo(np.int64).max)
    np.minimum.at(found, ranks, values)
    return found
