"""What the virtual stages of a plan cost: units are built once per kind, and summed over the layers of each stage."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from simpar.plan.layout import Layout, Model
from simpar.plan.plan import Plan
from simpar.program.place import place
from simpar.program.unit import Unit
from simpar.search.blocks import BlockTimes
from simpar.search.live import Shape

IntArray = npt.NDArray[np.int64]

# Fields that change how units are spread and ordered, not what a unit is (but for ZeRO-3, which gathers weights).
SPREADING = frozenset(
    {"pp", "vpp", "schedule", "microbatch_group", "dp", "dp_shard", "global_batch", "grad_accum", "zero"}
)
# Fields that no rule for splitting layers looks at: they scale all layers alike, or none.
_SCALING = frozenset({"micro_batch", "sequence_parallel"})


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of units, as sums from the first one up to each; shape (units + 1,).

    Attributes:
        alone, calm, kernels: as in :class:`~simpar.search.blocks.BlockTime`.
    """

    alone: IntArray
    calm: IntArray
    kernels: IntArray


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
        """Parameters of a rank that get a gradient, before ZeRO shards them.

        Without experts, whose other groups may be faster and shard their states further: a bound may leave them out.
        """
        return self._sums(lambda unit: unit.trained.dense)

    @cached_property
    def activations(self) -> IntArray:
        """Bytes kept from forward to backward."""
        return self._sums(lambda unit: unit.activation_bytes)

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
        return self._times("forward")

    @cached_property
    def backward(self) -> Times:
        """The backward pass."""
        return self._times("backward")

    @cached_property
    def split_backward(self) -> Times:
        """The two halves of a backward pass that is split."""
        inputs, weights = self._times("backward_input"), self._times("backward_weight")
        return Times(*(getattr(inputs, name) + getattr(weights, name) for name in Times.__slots__))

    @cached_property
    def launches(self) -> IntArray:
        """Calls that the host issues for both passes."""
        return self._sums(lambda unit: self.blocks.of(unit.forward).launches + self.blocks.of(unit.backward).launches)

    def _times(self, part: str) -> Times:
        found = {unit: self.blocks.of(getattr(unit, part)) for unit in dict.fromkeys(self.units)}
        return Times(
            self._sums(lambda unit: found[unit].alone_ns),
            self._sums(lambda unit: found[unit].calm_ns),
            self._sums(lambda unit: found[unit].kernels_ns),
        )

    def _sums(self, of: Callable[[Unit], int]) -> IntArray:
        known = {unit: of(unit) for unit in dict.fromkeys(self.units)}
        return np.array([0, *(known[unit] for unit in self.units)], np.int64).cumsum()


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
        """Per virtual stage, its parameters that get a gradient."""
        return self.total(self.units.trained)

    @cached_property
    def trained_per_rank(self) -> list[int]:
        """Per pipeline rank, its parameters that get a gradient."""
        return [int(count) for count in self.per_rank(self.trained)]

    @cached_property
    def activations_per_rank(self) -> IntArray:
        """Per pipeline rank, the most bytes of activations that it ever holds."""
        shape = self.shape
        kept, transient = np.zeros((2, shape.schedule.pp, shape.live.shape[1]), np.int64)
        place = shape.rank_of_stage, shape.chunk_of_stage
        kept[place] = self.total(self.units.activations)
        transient[place] = self._repeated(np.maximum.reduceat(self.units.transient, self.edges[:-1]))
        held = (shape.live * kept[shape.rank]).sum(axis=1) + transient[shape.rank, shape.chunk]
        most = np.zeros(shape.schedule.pp, np.int64)
        np.maximum.at(most, shape.rank, held)
        return most

    @cached_property
    def forward(self) -> Times:
        """Per virtual stage, the forward pass."""
        return self._total(self.units.forward)

    @cached_property
    def backward(self) -> Times:
        """Per virtual stage, the backward pass, in halves where the schedule has them apart."""
        return self._total(self.units.split_backward if self.shape.splits_backward else self.units.backward)

    def pieces(self, rank: int) -> Counter[tuple[int, bool]]:
        """How often a rank holds units of so many trained parameters, and whether as the last of a chunk."""
        found: Counter[tuple[int, bool]] = Counter()
        depth = len(self.edges) - 1
        for stage in np.flatnonzero(self.shape.rank_of_stage == rank):
            first, end = (int(edge) for edge in self.edges[stage % depth :][:2])
            found.update((self.units.units[i].trained.dense, i == end - 1) for i in range(first, end))
        return found

    def _total(self, times: Times) -> Times:
        return Times(self.total(times.alone), self.total(times.calm), self.total(times.kernels))

    def _repeated(self, values: IntArray) -> IntArray:
        copies = self.shape.schedule.copies
        return values if copies == 1 else np.tile(values, copies)


class Cutter:
    """Cuts one model for plans that differ only in the given axes."""

    def __init__(self, model: Model, axes: Sequence[str], blocks: BlockTimes) -> None:
        self._model = model
        self._axes = tuple(axis for axis in axes if axis not in SPREADING)
        self._blocks = blocks
        self._units: dict[tuple[object, ...], Units] = {}
        self._edges: dict[tuple[object, ...], tuple[IntArray, int]] = {}
        self._last: tuple[tuple[object, ...], Cut] | None = None

    def cut(self, plan: Plan, layout: Layout, shape: Shape) -> Cut:
        """The units of a plan, cut into the virtual stages of its schedule.

        Raises:
            PlanError: the layers cannot be split so.
        """
        kind = tuple([getattr(plan, axis) for axis in self._axes])
        key = (kind, plan.zero == 3, layout.tokens, id(shape))
        if self._last is None or self._last[0] != key:
            self._last = key, self._cut(plan, layout, shape, kind)
        return self._last[1]

    def _cut(self, plan: Plan, layout: Layout, shape: Shape, kind: tuple[object, ...]) -> Cut:
        schedule = shape.schedule
        by_position = plan.recompute_layers is not None  # then what a layer recomputes depends on the stage
        ends_meet = schedule.rank_of_stage[0] == schedule.rank_of_stage[-1]
        key = (kind, plan.zero == 3, ends_meet, schedule.depth if by_position else 0)
        spread = (schedule.depth, *[getattr(plan, axis) for axis in self._axes if axis not in _SCALING])
        units, found = self._units.get(key), self._edges.get(spread)
        narrowed = max(layout.tokens // (plan.tp if plan.sequence_parallel else 1), 1)
        if units is None or found is None:
            chunks, boundaries = place(self._model, layout, schedule)
            chunks = chunks[: schedule.depth]
            if units is None:
                units = Units(tuple(p.unit for chunk in chunks for p in chunk), self._blocks)
                self._units[key] = units
            if found is None:
                edges = np.cumsum([0, *map(len, chunks)])
                found = self._edges[spread] = edges, min(boundaries) // narrowed
        edges, per_token = found
        return Cut(units, edges, per_token * narrowed, shape)
