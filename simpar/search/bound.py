"""Lower bounds of a plan's step time and memory, far cheaper than its simulation and never above it.

The time is that of the busiest pipeline rank: what must run on other stages before its first forward pass, all its
passes at the engine's own block prices, what must run after its last one, and the optimizer; or that of its
data-parallel stream, or of the memory of hosts that run the optimizer. Every order, overlap and contention that the
engine knows only adds to these: a run of a block never undercuts the block's price
(:class:`~simpar.search.blocks.BlockTimes`), a transfer never undercuts its time alone, and the time of a collective is
concave in its bytes, so that one collective over a sum undercuts those over its parts.
"""

from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simpar.hardware.cluster import Cluster
from simpar.model.transformer import Transformer
from simpar.plan.layout import Layout, Model, lay_out
from simpar.plan.offload import offloads_activations, offloads_optimizer
from simpar.plan.placement import places
from simpar.plan.plan import Plan
from simpar.program.buffers import buffer_bytes
from simpar.program.states import rank_states
from simpar.program.unit import Held
from simpar.schedule.registry import shortened
from simpar.search.blocks import is_even
from simpar.search.live import Shape, shape_of
from simpar.search.stages import Cut, Cutter
from simpar.search.step_time import StepTime, least
from simpar.search.transfers import Transfers
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
        self._transfers = Transfers(cluster)
        self._model = model
        self._cutter = Cutter(model, cluster, axes, without_experts=without_experts)
        self._shapes: dict[tuple[object, ...], Shape] = {}
        # what a layout says about plans that differ in these is the same; modules refuse some ways to recompute
        shared = {"vpp", "schedule"} | ({"recompute"} if isinstance(model, Transformer) else set())
        self._laying = tuple(axis for axis in axes if axis not in shared)
        self._layouts: dict[tuple[object, ...], Layout] = {}
        self._known_states: dict[tuple[object, ...], int] = {}

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
        step_ns = (
            self._kernels_ns(layout, cut)
            if self._is_loose(layout, cut)
            else StepTime(self._transfers, layout, cut).bound_ns()
        )
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
        forward, backward = cut.forward.opened, cut.backward.opened
        start = least(cut.before(forward), shape.rank_of_stage, pp)
        busy = m * cut.per_rank(cut.total(forward) + cut.total(backward))
        drain = 0 if shape.splits_backward else least(cut.before(backward), shape.rank_of_stage, pp)
        launches = m * cut.per_rank(cut.total(cut.units.launches))
        ends = (start + drain) // layout.steps  # one step may fill while the one before it drains
        return _seconds(max((ends + busy).max(), launches.max() * ns(layout.launch_s)))

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
        """Those of trained parameters: frozen weights, and what stays beside states, only add to them."""
        plan, shards = layout.plan, (layout.shard, layout.expert_shard if trained.experts else 0)
        held_as = (layout.precision, layout.grad_dtype, plan.optimizer, plan.optimizer_dtype)
        kept, on_host = layout.framework.keeps_compute_gradients, offloads_optimizer(plan)
        served = layout.server is not None  # where the servers run, they hold the optimizer's states
        key = (trained, plan.zero, *shards, *held_as, kept, layout.framework.keeps_compute_shard, on_host, served)
        found = self._known_states.get(key)
        if found is None:
            if len(self._known_states) >= _MOST_STATES:
                self._known_states.clear()
            found = self._known_states[key] = sum(rank_states(trained, layout).values())
        return found


def _seconds(step_ns: float) -> float:
    """Seconds of a bound, less what rounding may take from the simulation."""
    return float(step_ns) * (1 - _ROUNDING) * 1e-9
