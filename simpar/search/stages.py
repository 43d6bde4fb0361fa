"""What the virtual stages of a plan cost: units are built once per kind, and summed over the layers of each stage."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simpar.hardware.cluster import Cluster
from simpar.model.transformer import Transformer
from simpar.plan.layout import Layout, Model
from simpar.program.ir import Block, host_launches
from simpar.program.place import place
from simpar.program.unit import Held, Unit
from simpar.search.blocks import BlockTimes
from simpar.search.live import Shape

IntArray = npt.NDArray[np.int64]

# Fields that change how units are spread and ordered, not what a unit is (but for ZeRO-3, which gathers weights).
SPREADING = frozenset(
    {"pp", "vpp", "schedule", "microbatch_group", "dp", "dp_shard", "global_batch", "grad_accum", "zero"}
)
# Fields that no rule for splitting layers looks at: they scale all layers alike, or none.
_SCALING = frozenset({"micro_batch", "sequence_parallel"})
_MOST_UNITS = 32  # kinds that are remembered: those of a family and some more


@dataclass(frozen=True)
class Times:
    """Nanoseconds of one pass of each unit, as sums from the first one up to each; shape (units + 1,).

    Attributes:
        units: in order.
        parts: which of a unit's blocks make up the pass.
        blocks: asked for times.
    """

    units: tuple[Unit, ...]
    parts: tuple[str, ...]
    blocks: BlockTimes

    @cached_property
    def alone(self) -> IntArray:
        """As in :meth:`~simpar.search.blocks.BlockTimes.alone_ns`."""
        return self._sums(self.blocks.alone_ns)

    @cached_property
    def opened(self) -> IntArray:
        """As in :meth:`~simpar.search.blocks.BlockTimes.opened_ns`."""
        return self._sums(self.blocks.opened_ns)

    @cached_property
    def collectives(self) -> IntArray:
        """As in :meth:`~simpar.search.blocks.BlockTimes.collectives_ns`."""
        return self._sums(self.blocks.collectives_ns)

    @cached_property
    def beside(self) -> IntArray:
        """As in :meth:`~simpar.search.blocks.BlockTimes.beside_ns`."""
        return self._sums(self.blocks.beside_ns)

    @cached_property
    def kernels(self) -> IntArray:
        """As in :meth:`~simpar.search.blocks.BlockTimes.kernels_ns`."""
        return self._sums(self.blocks.kernels_ns)

    def _sums(self, of: Callable[[Block], int]) -> IntArray:
        return sums(self.units, lambda unit: sum(of(getattr(unit, part)) for part in self.parts))


def sums(units: tuple[Unit, ...], of: Callable[[Unit], int]) -> IntArray:
    """A property of units, as sums from the first one up to each; shape (units + 1,)."""
    known = {unit: of(unit) for unit in dict.fromkeys(units)}
    return np.array([0, *(known[unit] for unit in units)], np.int64).cumsum()


@dataclass(frozen=True)
class Units:
    """The units of one model in order, with sums from the first one up to each; shape (units + 1,).

    Attributes:
        units: embedding, layers, head; or the layers of a module.
        blocks: asked for times.
    """

    units: tuple[Unit, ...]
    blocks: BlockTimes

    @cached_property
    def trained(self) -> IntArray:
        """Parameters of a rank that get a gradient, before ZeRO shards them; without experts."""
        return sums(self.units, lambda unit: unit.trained.dense)

    @cached_property
    def trained_experts(self) -> IntArray:
        """Those of experts, which other ranks hold and shard."""
        return sums(self.units, lambda unit: unit.trained.experts)

    @cached_property
    def activations(self) -> IntArray:
        """Bytes kept from forward to backward."""
        return sums(self.units, lambda unit: unit.activation_bytes)

    @cached_property
    def transient(self) -> IntArray:
        """Bytes that each unit holds while its backward pass runs; shape (units,)."""
        return np.array([unit.transient_bytes for unit in self.units], np.int64)

    @cached_property
    def all_trained(self) -> bool:
        """Whether every unit runs backward."""
        return all(unit.has_backward for unit in self.units)

    @cached_property
    def forward(self) -> Times:
        """The forward pass."""
        return Times(self.units, ("forward",), self.blocks)

    @cached_property
    def whole_backward(self) -> Times:
        """The backward pass."""
        return Times(self.units, ("backward",), self.blocks)

    @cached_property
    def split_backward(self) -> Times:
        """The two halves of a backward pass that is split."""
        return Times(self.units, ("backward_input", "backward_weight"), self.blocks)

    def backward(self, shape: Shape) -> Times:
        """The backward pass, in halves where a schedule has them apart."""
        return self.split_backward if shape.splits_backward else self.whole_backward

    @cached_property
    def launches(self) -> IntArray:
        """Calls that the host issues for both passes."""
        return sums(self.units, lambda unit: host_launches(unit.forward.body) + host_launches(unit.backward.body))


@dataclass(frozen=True, eq=False)
class Cut:
    """The units of a model cut into virtual stages: stage ``v`` holds units ``edges[v]`` to ``edges[v + 1]``.

    Attributes:
        units: of one model.
        edges: shape (depth + 1,).
        boundary_bytes: at least so much goes from one stage to the next per microbatch.
        shape: of the schedule that orders them; arrays are per virtual stage or per pipeline rank of it.
    """

    units: Units
    edges: IntArray
    boundary_bytes: int
    shape: Shape

    def total(self, sums: IntArray) -> IntArray:
        """Per virtual stage, what a column of sums adds up to."""
        ends = sums[self.edges]
        return self._repeated(ends[1:] - ends[:-1])

    def per_rank(self, values: IntArray) -> IntArray:
        """Per pipeline rank, the sum over its virtual stages."""
        sums = np.zeros(self.shape.schedule.pp, np.int64)
        np.add.at(sums, self.shape.rank_of_stage, values)
        return sums

    @cached_property
    def trained(self) -> IntArray:
        """Per virtual stage, its parameters that get a gradient, without experts."""
        return self.total(self.units.trained)

    @cached_property
    def trained_experts(self) -> IntArray:
        """Those of experts."""
        return self.total(self.units.trained_experts)

    @cached_property
    def trained_per_rank(self) -> list[Held]:
        """Per pipeline rank, its parameters that get a gradient."""
        dense, experts = self.per_rank(self.trained), self.per_rank(self.trained_experts)
        return [Held(*counts) for counts in zip(dense.tolist(), experts.tolist(), strict=True)]

    @cached_property
    def activations_per_rank(self) -> IntArray:
        """Per pipeline rank, the most bytes of activations that it ever holds."""
        shape = self.shape
        kept, transient = np.zeros((2, shape.schedule.pp, shape.live.shape[1]), np.int64)
        place = shape.rank_of_stage, shape.chunk_of_stage
        kept[place] = self.total(self.units.activations)
        largest = np.maximum.reduceat(np.append(self.units.transient, 0), self.edges[:-1])
        largest[self.edges[:-1] == self.edges[1:]] = 0  # of a stage without units, reduceat takes the next one's
        transient[place] = self._repeated(largest)
        held = (shape.live * kept[shape.rank]).sum(axis=1) + transient[shape.rank, shape.chunk]
        most = np.zeros(shape.schedule.pp, np.int64)
        np.maximum.at(most, shape.rank, held)
        return most

    @property
    def forward(self) -> Times:
        """The forward pass."""
        return self.units.forward

    @property
    def backward(self) -> Times:
        """The backward pass, in halves where the schedule has them apart."""
        return self.units.backward(self.shape)

    def before(self, times: IntArray) -> IntArray:
        """Per virtual stage, what a column of sums adds up to before it in its model."""
        return self._repeated(times[self.edges[:-1]])

    def trained_of(self, stage: int) -> Held:
        """Parameters of a virtual stage that get a gradient."""
        return Held(int(self.trained[stage]), int(self.trained_experts[stage]))

    def units_of(self, rank: int) -> list[Unit]:
        """The units of a pipeline rank."""
        return [
            unit for stage in np.flatnonzero(self.shape.rank_of_stage == rank) for unit in self.chunk_of(int(stage))
        ]

    def chunk_of(self, stage: int) -> tuple[Unit, ...]:
        """The units of a virtual stage."""
        first, end = self.edges[stage % (len(self.edges) - 1) :][:2]
        return self.units.units[first:end]

    def pieces(self, rank: int) -> Counter[tuple[Held, bool]]:
        """How often a rank holds units of so many trained parameters, and whether as the last of a chunk."""
        found: Counter[tuple[Held, bool]] = Counter()
        for stage in np.flatnonzero(self.shape.rank_of_stage == rank):
            chunk = self.chunk_of(int(stage))
            found.update((unit.trained, at == len(chunk)) for at, unit in enumerate(chunk, start=1))
        return found

    def _repeated(self, values: IntArray) -> IntArray:
        copies = self.shape.schedule.copies
        return values if copies == 1 else np.tile(values, copies)


class Cutter:
    """Cuts one model for plans that differ only in the given axes; best asked for plans of one family in a row.

    Args:
        model: the model.
        cluster: where units run, with the algorithm of collectives that each plan has.
        axes: fields in which the plans differ.
        without_experts: as in :func:`~simpar.program.place.place`.
    """

    def __init__(self, model: Model, cluster: Cluster, axes: Sequence[str], *, without_experts: bool = False) -> None:
        self._model = model
        self._without_experts = without_experts
        self._axes = tuple(axis for axis in axes if axis not in SPREADING)
        self._cluster = cluster
        self._blocks: dict[str, BlockTimes] = {}  # by the algorithm of collectives
        self._ties_ends = isinstance(model, Transformer) and model.tied_embeddings
        self._units: dict[tuple[object, ...], Units] = {}
        self._edges: dict[tuple[object, ...], tuple[IntArray, int]] = {}
        self._layout: Layout | None = None  # the last one, and what its plan is among the axes
        self._kind: tuple[object, ...] = ()
        self._last: Cut | None = None  # plans that differ in their ZeRO stage share it

    def cut(self, layout: Layout, shape: Shape) -> Cut:
        """The units of a plan, cut into virtual stages.

        Raises:
            PlanError: the layers cannot be split so.
        """
        if layout is not self._layout:
            self._layout, self._kind = layout, tuple([getattr(layout.plan, axis) for axis in self._axes])
        plan, schedule = layout.plan, shape.schedule
        by_position = plan.recompute_layers is not None  # then what a layer recomputes depends on the stage
        ends_meet = self._ties_ends and schedule.rank_of_stage[0] == schedule.rank_of_stage[-1]
        key = (self._kind, plan.zero == 3, ends_meet, schedule.depth if by_position else 0)
        spread = (schedule.depth, *self._split(layout))
        units, found = self._units.get(key), self._edges.get(spread)
        narrowed = max(layout.tokens // (plan.tp if plan.sequence_parallel else 1), 1)
        if units is None or found is None:
            chunks, boundaries = place(self._model, layout, schedule, without_experts=self._without_experts)
            chunks = chunks[: schedule.depth]
            if units is None:
                if len(self._units) >= _MOST_UNITS:
                    self._units.clear()
                units = Units(tuple(p.unit for chunk in chunks for p in chunk), self._times(plan.collective_algorithm))
                self._units[key] = units
            if found is None:
                edges = np.cumsum([0, *map(len, chunks)])
                found = self._edges[spread] = edges, min(boundaries) // narrowed
        last = self._last
        if last is None or last.units is not units or last.shape is not shape:
            last = self._last = Cut(units, found[0], found[1] * narrowed, shape)
        return last

    def _times(self, algorithm: str) -> BlockTimes:
        if algorithm not in self._blocks:
            self._blocks[algorithm] = BlockTimes(self._cluster, algorithm)
        return self._blocks[algorithm]

    def _split(self, layout: Layout) -> tuple[object, ...]:
        """What decides how layers are split: an even rule looks at no cost, the others at that of every layer."""
        if layout.layer_split == "uniform" or isinstance(layout.layer_split, tuple):
            return layout.layer_split, layout.precision
        costs = [getattr(layout.plan, axis) for axis in self._axes if axis not in _SCALING]
        return *costs, tuple([device.name for device in layout.stage_devices])
