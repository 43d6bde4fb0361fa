"""What a search finds: plans with their figures, groups that cannot be told apart, and the Pareto front."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from simpar.job import Job
from simpar.search.records import data_frame

if TYPE_CHECKING:
    import pandas as pd  # noqa: TID251 - for who asks for a table


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One plan that was simulated.

    Attributes:
        plan: the fields in which it differs from the other plans of the search.
        cluster: its number among the clusters of the search.
        step_time_s: seconds of a step.
        low_s, high_s: the range in which that lies, by the errors of the fits; None where it was not asked for, that
            is, below the top plans unless the whole front was searched.
        memory_bytes: of the fullest rank.
        gpus: of the whole cluster.
        tokens_per_s: over the whole cluster; for a module, samples.
        mfu: model FLOP utilisation.
        cost_per_step: in the currency of the cluster's price; None without one.
        bound_s: the lower bound that let it be simulated.
    """

    plan: dict[str, Any]
    cluster: int = 0
    step_time_s: float
    low_s: float | None
    high_s: float | None
    memory_bytes: int
    gpus: int
    tokens_per_s: float
    mfu: float
    cost_per_step: float | None = None
    bound_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Flat: fields of the plan, then the figures."""
        figures = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "plan"}
        return {**self.plan, **figures}

    @property
    def goals(self) -> tuple[float, ...]:
        """What one wants little of: time, memory, GPUs, and cost where there is a price."""
        return (self.step_time_s, self.memory_bytes, self.gpus, self.cost_per_step or 0.0)


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the plans of a search.

    Attributes:
        enumerated: combinations of choices.
        invalid: those found to break a rule of model, cluster or schedule.
        too_large: others that do not fit in memory.
        pruned: those whose bound, or that of whose family, is above what was found; they may also not fit, or break a
            rule that only a simulation looks at.
        simulated: the rest.
        resumed: of these, answers that were on disk already.
        lost: plans that took their worker down each time they were tried.
        families: families of plans, each with a bound of its own.
        opened: those whose plans were looked at one by one.
        bounded: plans that had a bound of their own; all others were ruled out with others.
    """

    enumerated: int
    invalid: int
    too_large: int
    pruned: int
    simulated: int
    resumed: int = 0
    lost: int = 0
    families: int = 0
    opened: int = 0
    bounded: int = 0

    @property
    def valid(self) -> int:
        """Plans not known to break a rule: they could run if memory were no matter."""
        return self.enumerated - self.invalid

    def __str__(self) -> str:
        before = f" ({self.resumed:,} of them before)" if self.resumed else ""
        lost = f", {self.lost:,} lost with their worker" if self.lost else ""
        of = f"{self.enumerated:,} combinations, of them " if self.invalid else ""
        return (
            f"{of}{self.valid:,} valid plans: {self.too_large:,} do not fit, "
            f"{self.pruned:,} cannot be among the best, {self.simulated:,} simulated{before}{lost}"
        )


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The outcome of a search.

    Attributes:
        found: plans that were simulated and fit, the fastest first.
        counts: what became of all.
        top: so many of ``found`` are the fastest of all valid plans; the others are just what was simulated.
        jobs: the base job of each cluster, of which plans change fields.
        whole_front: whether :meth:`front` is that of all valid plans, not only of those simulated.
        choices: values of the fields to which the search was restricted, and of those that were added to it.
    """

    found: tuple[Found, ...]
    counts: Counts
    top: int
    jobs: tuple[Job, ...]
    whole_front: bool
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def best(self) -> Found:
        """The fastest plan of all that fit.

        Raises:
            IndexError: none fits.
        """
        return self.found[0]

    def job(self, found: Found) -> Job:
        """The whole job of a plan, to simulate it again and look at its timeline."""
        base = self.jobs[found.cluster]
        return base.replace(plan=base.plan.replace(**found.plan))

    def groups(self) -> list[tuple[Found, ...]]:
        """The top plans by rank: a group's intervals all overlap that of its fastest plan."""
        return group(self.found[: self.top])

    def front(self) -> tuple[Found, ...]:
        """Plans that no other one beats in time, memory, GPUs and cost at once, the fastest first."""
        return pareto(self.found)

    def records(self) -> list[dict[str, Any]]:
        """Every simulated plan as a flat record, the fastest first."""
        return [found.to_dict() for found in self.found]

    def to_dataframe(self) -> "pd.DataFrame":
        """:meth:`records` as a pandas table.

        Raises:
            JobError: pandas is not installed.
        """
        return data_frame(self.records())


def shown_plan(plan: Mapping[str, Any], fields: Iterable[str] | None = None) -> str:
    """A plan in one line, without what changes nothing.

    Args:
        plan: its fields, or a flat record that has them.
        fields: those to show; left out, all.

    >>> shown_plan({"tp": 8, "pp": 1, "schedule": "1f1b", "vpp": 1, "zero": 1, "recompute": "none"})
    'tp=8 zero=1'
    """
    quiet = {"tp": 1, "pp": 1, "cp": 1, "ep": 1, "vpp": 1, "zero": 0, "recompute": "none", "sequence_parallel": False}
    quiet["etp"] = plan.get("tp", 1)  # what it is unless the plan says otherwise
    if plan.get("pp", 1) == 1:
        quiet["schedule"] = plan.get("schedule", "1f1b")
    words = {"sequence_parallel": "sp", "micro_batch": "mb"}
    shown = {name: plan.get(name) for name in (plan if fields is None else fields)}
    parts = (
        words.get(name, name) if value is True else f"{words.get(name, name)}={value}"
        for name, value in shown.items()
        if value is not None and quiet.get(name) != value
    )
    return " ".join(parts) or "plain"


def group(found: Sequence[Found]) -> list[tuple[Found, ...]]:
    """Cuts plans, the fastest first, into groups that cannot be told apart from their fastest plan."""
    groups: list[list[Found]] = []
    for each in found:
        low_s = each.step_time_s if each.low_s is None else each.low_s
        high_s = groups[-1][0].high_s if groups else None
        if high_s is not None and low_s <= high_s:
            groups[-1].append(each)
        else:
            groups.append([each])
    return [tuple(members) for members in groups]


def pareto(found: Iterable[Found]) -> tuple[Found, ...]:
    """Those that no other beats; of equals, the first."""
    front: list[Found] = []
    for each in sorted(found, key=lambda one: one.goals):
        # whoever comes later is not faster, so that only those before can beat it
        if not any(all(a <= b for a, b in zip(other.goals, each.goals, strict=True)) for other in front):
            front.append(each)
    return tuple(front)
