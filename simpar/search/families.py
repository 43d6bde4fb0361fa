"""Families of plans: what none of their plans can undercut, known before any of them is looked at by itself.

The plans of a family are made of the same kernels and collectives. So its passes are added up once for each way to
recompute and each order, and memory likewise; only data parallelism and messages tell its other plans apart. A family
whose passes alone take longer than the best plans found is left unopened, and so is one of which nothing fits: not with
the highest ZeRO stage, however much it recomputes.

Families that differ only in how experts are spread form a branch. What their layers take without experts is the same,
so it is added up once for all of them, and a branch for which that is too much already is never looked into.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from simpar.errors import SimparError
from simpar.plan.layout import Layout
from simpar.plan.plan import Plan
from simpar.search.bound import Bound, Bounds
from simpar.search.space import Fields, Pipeline, Space
from simpar.search.stages import Cut


class Outlook(NamedTuple):
    """What is known of a family, or a branch of them, before its plans are looked at one by one.

    Attributes:
        bound: what each of its plans that fit takes at least; None if none fits, or none is valid.
        plans: how many it has.
        invalid, too_large: of these, those known to break a rule, or not to fit in memory.
    """

    bound: Bound | None
    plans: int
    invalid: int
    too_large: int


class Opened(NamedTuple):
    """A family whose plans have been looked at one by one.

    Attributes:
        plans: those that fit and may take no longer than was asked for, with their bounds.
        bounded: how many plans had a bound of their own.
        invalid, too_large, pruned: what became of the others.
    """

    plans: list[tuple[Fields, Bound]]
    bounded: int
    invalid: int
    too_large: int
    pruned: int


class _Least(NamedTuple):
    """Of plans that differ in their ZeRO stage, the layout of the one that takes least; None if all break a rule.

    ``broken`` counts those that do.
    """

    layout: Layout | None
    broken: int


class Families:
    """The families of a space, and their bounds.

    Args:
        space: the plans.
        bounds: of single plans.
        base: fields that all plans share.
        common: bounds of the same plans without experts; only branches need them.
    """

    def __init__(self, space: Space, bounds: Bounds, base: Plan, common: Bounds | None = None) -> None:
        self._space = space
        self._bounds = bounds
        self._base = base
        self._common = Families(space, common, base) if common is not None else None

    def branch_outlook(self, branch: Sequence[Fields]) -> Outlook:
        """The bound of families that differ only in how experts are spread: that of a family without any.

        Whole experts on every rank forbid no number of stages. Where the cost of experts decides which stage has which
        layers, nothing is known.
        """
        assert self._common is not None, "branches need bounds without experts"
        plans = sum(pipeline.size for family in branch for pipeline in self._space.pipelines(family))
        first = branch[0]
        # ranks that hold the same tokens must split experts as they split everything else
        etp = 1 if first["sequence_parallel"] else first["tp"]
        common = {**first, "ep": 1, "etp": etp}
        if not self._common.splits_evenly(common):
            return Outlook(Bound(0.0, 0), plans, 0, 0)
        found = self._common.outlook(common)
        if found.bound is not None:
            return Outlook(found.bound, plans, 0, 0)
        return Outlook(None, plans, 0, plans) if found.too_large else Outlook(None, plans, plans, 0)

    def splits_evenly(self, family: Fields) -> bool:
        """Whether stages have layers by their number, whatever these cost."""
        layouts = (self._least(p, recompute).layout for p in self._space.pipelines(family) for recompute in p.recompute)
        layout = next((found for found in layouts if found is not None), None)
        return layout is None or layout.layer_split == "uniform" or isinstance(layout.layer_split, tuple)

    def outlook(self, family: Fields) -> Outlook:
        """The bound of a family, by its fields."""
        found: list[Bound] = []
        plans = invalid = too_large = 0
        for pipeline in self._space.pipelines(family):
            plans += pipeline.size
            layouts = {recompute: self._least(pipeline, recompute) for recompute in pipeline.recompute}
            for order in pipeline.orders:
                bound, bad, large = self._order(pipeline, layouts, order)
                found += [bound] if bound is not None else []
                invalid, too_large = invalid + bad, too_large + large
        if not found:
            return Outlook(None, plans, invalid, too_large)
        least = Bound(min(bound.step_s for bound in found), min(bound.memory_bytes for bound in found))
        return Outlook(least, plans, invalid, too_large)

    def _order(
        self, pipeline: Pipeline, layouts: Mapping[str, _Least], order: tuple[str, int]
    ) -> tuple[Bound | None, int, int]:
        """The bound of all plans of one order, and how many are known to be invalid and too large.

        The more is recomputed, the longer it takes, so that the first way that fits tells the least time; of memory,
        what no way to recompute spares is sure.
        """
        invalid = too_large = 0
        for least in layouts.values():
            cut = self._cut(least, order)
            if cut is None or least.layout is None:
                invalid += len(pipeline.zero)
                continue
            invalid += least.broken
            if self._bounds.memory_bytes(least.layout, cut) <= self._bounds.capacity_bytes:
                step_s = self._bounds.passes_s(least.layout, cut)
                return Bound(step_s, self._bounds.held_bytes(least.layout, cut)), invalid, too_large
            too_large += len(pipeline.zero) - least.broken
        return None, invalid, too_large

    def _least(self, pipeline: Pipeline, recompute: str) -> _Least:
        """Of the ZeRO stages, the one that keeps least and runs least.

        The highest stage shards most, and writes weight gradients once where others add them up.
        """
        for broken, zero in enumerate(reversed(pipeline.zero)):
            try:
                plan = self._plan(pipeline.plan(recompute, pipeline.orders[0], zero))
                return _Least(self._bounds.lay_out(plan), broken)
            except (SimparError, ValueError):
                continue
        return _Least(None, len(pipeline.zero))

    def _cut(self, least: _Least, order: tuple[str, int]) -> Cut | None:
        if least.layout is None:
            return None
        try:
            return self._bounds.cut(least.layout, *order)
        except (SimparError, ValueError):
            return None

    def _plan(self, fields: Fields) -> Plan:
        # rules of its own a plan breaks only when it is simulated: to check each would take the most time
        return self._base.model_copy(update=fields)

    def opened(self, family: Fields, limit_s: float) -> Opened:
        """Looks at the plans of a family.

        Args:
            family: its fields.
            limit_s: step time beyond which a plan is of no interest.
        """
        plans: list[tuple[Fields, Bound]] = []
        bounded = invalid = too_large = pruned = 0
        for pipeline, recompute, order in self._groups(family):
            least = self._least(pipeline, recompute)
            cut = self._cut(least, order)
            if cut is None or least.layout is None:
                invalid += len(pipeline.zero)
                continue
            if self._bounds.passes_s(least.layout, cut) > limit_s:
                invalid, pruned = invalid + least.broken, pruned + len(pipeline.zero) - least.broken
                continue
            for zero in pipeline.zero:
                fields = pipeline.plan(recompute, order, zero)
                bound = self._bound(fields)
                if bound is None:
                    invalid += 1
                    continue
                bounded += 1
                if bound.memory_bytes > self._bounds.capacity_bytes:
                    too_large += 1
                elif bound.step_s > limit_s:
                    pruned += 1
                else:
                    plans.append((fields, bound))
        return Opened(plans, bounded, invalid, too_large, pruned)

    def _groups(self, family: Fields) -> Iterator[tuple[Pipeline, str, tuple[str, int]]]:
        for pipeline in self._space.pipelines(family):
            for recompute in pipeline.recompute:
                for order in pipeline.orders:
                    yield pipeline, recompute, order

    def _bound(self, fields: Fields) -> Bound | None:
        try:
            return self._bounds.of(self._plan(fields))
        except (SimparError, ValueError):
            return None
