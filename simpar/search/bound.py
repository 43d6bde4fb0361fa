"""Lower bounds of a plan's step time and memory, far cheaper than its simulation and never above it.

The time is that of the busiest pipeline rank: what must run on other stages before its first forward pass, all its
passes at the engine's own block prices, what must run after its last one, and the optimizer; or that of its
data-parallel stream. Every order, overlap and contention that the engine knows only adds to these: a run of a block
never undercuts the block's price (:class:`~simpar.search.blocks.BlockTime`), a transfer never undercuts its time alone,
and the time of a collective is concave in its bytes, so that one collective over a sum undercuts those over its parts.
"""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simpar.cost.memory import state_bytes
from simpar.engine.costs import Costs
from simpar.hardware.cluster import Cluster
from simpar.model.transformer import Transformer
from simpar.plan.layout import Layout, Model, lay_out
from simpar.plan.placement import places
from simpar.plan.plan import Plan
from simpar.program.groups import Groups
from simpar.program.ir import Collective
from simpar.search.blocks import BlockTimes, is_even
from simpar.search.live import Shape, shape_of
from simpar.search.stages import Cut, Cutter
from simpar.units import ns

IntArray = npt.NDArray[np.int64]

_ROUNDING = 1e-6  # the engine rounds each of thousands of durations to a nanosecond


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
        algorithm: of collectives, as in the plans.
    """

    def __init__(self, model: Model, cluster: Cluster, axes: tuple[str, ...], algorithm: str = "auto") -> None:
        self.cluster = cluster
        self.capacity_bytes = max(device.memory_bytes for device in cluster.devices)
        self._is_even = is_even(cluster)
        # experts are reduced over other groups than the rest, possibly over none
        self.reduces_all = not (isinstance(model, Transformer) and model.moe is not None)
        self._model = model
        self._cutter = Cutter(model, axes, BlockTimes(cluster, algorithm))
        self._costs = Costs(cluster, algorithm)
        self._shapes: dict[tuple[str, int, int, int, int | None], Shape] = {}
        self._axes = axes
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._messages: dict[tuple[object, ...], IntArray] = {}
        self._letters: dict[tuple[int, int, int], int] = {}
        self._states: dict[tuple[object, ...], int] = {}
        self._loads: dict[tuple[object, ...], Load] = {}

    def of(self, plan: Plan) -> Bound:
        """The bound of a plan.

        Raises:
            PlanError: the plan breaks a rule of model, cluster or schedule.
        """
        layout = self._layout(plan)
        cut = self._cutter.cut(plan, layout, self._shape(plan, layout.microbatches))
        memory = self._memory(layout, cut)
        if memory > self.capacity_bytes:
            return Bound(0.0, memory)
        loose = cut.shape.schedule.overlapped or not self._is_even or places(layout, self.cluster) is not None
        step_ns = self._kernels_ns(layout, cut) if loose else _Step(self, layout, cut).bound_ns()
        return Bound(step_ns * (1 - _ROUNDING) * 1e-9, memory)

    def _kernels_ns(self, layout: Layout, cut: Cut) -> float:
        """The kernels of the busiest rank: all that is sure where passes are woven, or places differ."""
        microbatches = layout.microbatches // cut.shape.schedule.copies
        return float(microbatches * cut.per_rank(cut.forward.kernels + cut.backward.kernels).max())

    def _layout(self, plan: Plan) -> Layout:
        """The plan laid out; one that differs only in its chunks shares the rest."""
        key = tuple([getattr(plan, axis) for axis in self._axes if axis != "vpp"])
        found = self._layouts.get(key)
        if found is None:
            found = self._layouts[key] = lay_out(plan, self._model, self.cluster)
        return found if found.plan is plan else replace(found, plan=plan)

    def _shape(self, plan: Plan, microbatches: int) -> Shape:
        key = (plan.schedule, plan.pp, microbatches, plan.vpp, plan.microbatch_group)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = shape_of(*key)
        return found

    # ---- memory -----------------------------------------------------------------------------------------------------

    def _memory(self, layout: Layout, cut: Cut) -> int:
        """States, and activations at their most; without buffers and what a split backward pass keeps longer."""
        states = [self._state_bytes(parameters, layout) for parameters in cut.trained_per_rank]
        most = max(map(sum, zip(states, cut.activations_per_rank.tolist(), strict=True)))
        return int(most) + min(device.context_bytes for device in self.cluster.devices)

    def _state_bytes(self, parameters: int, layout: Layout) -> int:
        plan = layout.plan
        key = (parameters, plan.zero, layout.shard)
        found = self._states.get(key)
        if found is None:
            states = state_bytes(
                parameters,
                precision=layout.precision,
                grad_dtype=layout.grad_dtype,
                optimizer=plan.optimizer,
                optimizer_dtype=plan.optimizer_dtype,
                zero=plan.zero,
                shard=layout.shard,
            )
            found = self._states[key] = sum(states.values())
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
                    found[stage] = self._message_ns(nbytes, layout.rank(here), layout.rank(there))
        return found

    def _message_ns(self, nbytes: int, source: int, target: int) -> int:
        key = (nbytes, source, target)
        found = self._letters.get(key)
        if found is None:
            transfer = self._costs.message(nbytes, source, target, (0,))
            found = self._letters[key] = transfer.latency_ns + transfer.stream_ns
        return found

    def reduction(self, layout: Layout, rank: int, parameters: int) -> Load:
        """What the data-parallel stream of a pipeline rank does for the gradients of so many parameters."""
        return self._load("reduce", layout, rank, parameters)

    def gather(self, layout: Layout, rank: int, parameters: int) -> Load:
        """What the data-parallel stream of a pipeline rank does for so many sharded parameters."""
        return self._load("gather", layout, rank, parameters)

    def _load(self, what: str, layout: Layout, rank: int, parameters: int) -> Load:
        plan = layout.plan
        key = (what, plan.zero == 0, plan.tp, layout.replicas, layout.shard, rank, parameters)
        found = self._loads.get(key)
        if found is None:
            groups = Groups(layout, rank, 0, 0, folded=False)
            collectives = groups.gather(parameters) if what == "gather" else groups.reduce(parameters, 0)
            # an all-reduce between replicas of the shards may run beside the stream
            found = self._loads[key] = self._alone(collectives[0]) if collectives else Load(0.0, 0.0)
        return found

    def _alone(self, collective: Collective) -> Load:
        group = collective.group
        transfer = self._costs.collective(collective.op, collective.nbytes, group, group.ranks[0])
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
        self._calm_forward, self._calm_backward = forward.calm, backward.calm
        self._forward = forward.calm if opened or plan.zero == 3 else forward.alone
        self._backward = backward.calm if opened or plan.zero >= 2 else backward.alone

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
        if self._layout.replicas > 1 and self._prices.reduces_all:
            suspects = {0, min(1, pp - 1), pp - 1, int((start + busy).argmax())}
            ends += [float(start[rank]) + self._occupied_ns(rank, busy[rank], sent[rank]) for rank in suspects]
        return float(max(ends))

    def _sums_before(self, times: IntArray) -> IntArray:
        """Per virtual stage, the sum over those before it in its model."""
        rows = times.reshape(self._shape.schedule.copies, -1)
        sums = rows.cumsum(axis=1) - rows
        return sums.ravel()

    def _gated(self, before: IntArray) -> IntArray:
        """When each stage is reached at the earliest: a first pass ends only once its gathered weights are there."""
        if self._layout.plan.zero not in (1, 2) or self._layout.replicas == 1 or not self._prices.reduces_all:
            return before
        parameters = int(self._cut.trained[0])
        gather = self._prices.gather(self._layout, int(self._shape.rank_of_stage[0]), parameters)
        gate = max(int(gather.time_ns) - int(self._calm_forward[0]), 0)
        reached = before.reshape(self._shape.schedule.copies, -1).copy()
        reached[0] += gate
        return reached.ravel()

    def _occupied_ns(self, rank: int, busy: float, sent: float) -> float:
        """From the first pass of a rank to the end of its reductions.

        Gathers and reductions follow each other on one stream, and set back the passes beside which they run. What may
        have been gathered before the first pass does not count, and a wait for a message counts only once.
        """
        held = np.flatnonzero(self._shape.rank_of_stage == rank)
        if self._layout.plan.zero == 3:
            stream = self._sharded(rank)
        else:
            trained = self._cut.trained[held].tolist()
            reductions = [self._prices.reduction(self._layout, rank, parameters) for parameters in trained]
            if self._layout.plan.zero < 2 or not self._layout.overlap.grad_reduce:
                # all that is sure: the last pass ends with the reduction of its own gradients after it began
                last = float(self._calm_backward[held].max()) + sent / self._microbatches
                return busy + sent - last + min(reduction.time_ns for reduction in reductions)
            m = self._microbatches
            stream = Load(m * sum(r.time_ns for r in reductions), m * sum(r.setback_ns for r in reductions))
        slowed = 1.0 - self._prices.cluster.device.compute_rate_during_collectives
        return max(stream.time_ns, busy + sent + max(stream.setback_ns - slowed * sent, 0.0))

    def _sharded(self, rank: int) -> Load:
        """The data-parallel stream under ZeRO-3: gathers and reductions of every unit and microbatch but the first.

        The last unit of a chunk may still be there when it is needed; the others are gathered for each forward pass,
        and where forward gives them back for each backward pass too.
        """
        passes = 2 if self._layout.plan.reshard_after_forward is True else 0
        time_ns = setback_ns = 0.0
        for (parameters, stays), count in self._cut.pieces(rank).items():
            reduction = self._prices.reduction(self._layout, rank, parameters)
            gather = self._prices.gather(self._layout, rank, parameters)
            gathers = 0 if stays else passes
            time_ns += count * (reduction.time_ns + gathers * gather.time_ns)
            setback_ns += count * (reduction.setback_ns + gathers * gather.setback_ns)
        m = self._microbatches - 1
        return Load(m * time_ns, m * setback_ns)


def _least(values: IntArray, ranks: IntArray, pp: int) -> IntArray:
    """Per pipeline rank, the least of its virtual stages' values."""
    found = np.full(pp, np.iinfo(np.int64).max)
    np.minimum.at(found, ranks, values)
    return found
