"""The space of plans: what each field may be, given those before it.

A field of :class:`~simpar.plan.plan.Plan` joins the search with one line in ``AXES``.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from simpar.errors import PlanError, nearest
from simpar.hardware.cluster import Cluster
from simpar.model.transformer import Transformer
from simpar.plan.layout import Model
from simpar.plan.plan import Plan
from simpar.schedule.registry import SCHEDULES

Fields = dict[str, Any]


class Setting(NamedTuple):
    """What a choice may depend on: the job, and the fields chosen so far."""

    model: Model
    cluster: Cluster
    global_batch: int
    fields: Fields

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.model.layers if isinstance(self.model, Transformer) else len(self.model.layers)

    @property
    def is_transformer(self) -> bool:
        """Whether the model can be split inside a layer."""
        return isinstance(self.model, Transformer)

    @property
    def left(self) -> int:
        """GPUs per model-parallel group: what is left for data parallelism; 0 if the degrees do not divide."""
        taken = self.fields.get("tp", 1) * self.fields.get("pp", 1) * self.fields.get("cp", 1)
        return 0 if self.cluster.gpus % taken else self.cluster.gpus // taken

    @property
    def schedule(self) -> str:
        """The pipeline schedule chosen."""
        return str(self.fields.get("schedule", "1f1b"))


Choice = Callable[[Setting], Iterable[Any]]


def divisors(number: int) -> list[int]:
    """All divisors, smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0] if number > 0 else []


def _schedules(setting: Setting) -> Iterable[str]:
    """1F1B and its interleaved form, which never lose to GPipe; others are asked for by name."""
    return ("1f1b", "interleaved") if setting.fields.get("pp", 1) > 1 else ("1f1b",)


def _chunks(setting: Setting) -> Iterable[int]:
    recipe = SCHEDULES.get(setting.schedule)
    if recipe is None or "chunks" not in recipe.options:
        return (1,)
    return range(2, setting.layers // setting.fields.get("pp", 1) + 1)


def _recompute(setting: Setting) -> Iterable[str]:
    return ("none", "selective", "full") if setting.is_transformer else ("none", "full")


def _tensor_degrees(setting: Setting) -> Iterable[int]:
    if not isinstance(setting.model, Transformer):
        return (1,)
    return [tp for tp in divisors(setting.cluster.gpus) if setting.model.heads % tp == 0]


def _expert_degrees(setting: Setting) -> Iterable[int]:
    moe = setting.model.moe if isinstance(setting.model, Transformer) else None
    return divisors(moe.experts) if moe is not None else (1,)


# Fields on which a unit of work depends come first, so that plans that share it follow each other.
AXES: Mapping[str, Choice] = MappingProxyType(
    {
        "tp": _tensor_degrees,
        "cp": lambda _: (1,),  # worth its space for long sequences only: asked for by name
        "ep": _expert_degrees,
        "pp": lambda s: [pp for pp in divisors(s.left) if pp <= s.layers],
        "micro_batch": lambda s: divisors(s.global_batch // s.left) if s.left and s.global_batch % s.left == 0 else (),
        "sequence_parallel": lambda s: (False, True) if s.fields.get("tp", 1) > 1 else (False,),
        "recompute": _recompute,
        "schedule": _schedules,
        "vpp": _chunks,
        "zero": lambda s: (0, 1, 2, 3) if s.left * s.fields.get("cp", 1) > 1 else (0,),
    }
)
"""The fields that are searched, in order; a search may restrict them, and add any other field of a plan."""


def axes_of(choices: Mapping[str, Iterable[Any]]) -> tuple[str, ...]:
    """The fields in which the plans of a search differ.

    Raises:
        PlanError: a plan has no such field, or a field has no value.
    """
    for name, values in choices.items():
        if name not in Plan.model_fields:
            raise PlanError(
                f"'{name}' is not a field of a plan{nearest(name, list(Plan.model_fields))}; choose values for fields "
                "of a plan only"
            )
        if not list(values):
            raise PlanError(f"{name} is given no value to choose from; give one or more, or leave it out")
    known = [name for name in AXES if name in Plan.model_fields]
    return (*known, *(name for name in choices if name not in known))


def plans(model: Model, cluster: Cluster, base: Plan, choices: Mapping[str, Iterable[Any]]) -> Iterator[Fields]:
    """Every combination of choices, as the fields that differ from ``base``; some may yet break a rule.

    Args:
        model: the model.
        cluster: the machines.
        base: all other fields; its ``global_batch`` is set.
        choices: values of fields that replace those of ``AXES``.
    """
    axes = axes_of(choices)
    batch = base.global_batch
    assert batch is not None, "a search keeps the batch"

    def extend(fields: Fields, number: int) -> Iterator[Fields]:
        if number == len(axes):
            yield dict(fields)
            return
        name = axes[number]
        offered = AXES[name](Setting(model, cluster, batch, fields)) if name in AXES else choices[name]
        wanted = list(choices[name]) if name in choices else None
        values = _wanted(name, offered, wanted)
        for value in values:
            fields[name] = value
            yield from extend(fields, number + 1)
            del fields[name]

    yield from extend({}, 0)


# What these may be follows from other fields, so that a list restricts the choice; lists of others replace it.
_BOUND = frozenset({"pp", "micro_batch", "sequence_parallel", "vpp", "zero"})


def _wanted(name: str, offered: Iterable[Any], wanted: list[Any] | None) -> Iterable[Any]:
    if wanted is None:
        return offered
    return [value for value in offered if value in wanted] if name in _BOUND else wanted
