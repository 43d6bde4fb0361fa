"""What a search is asked to choose from: values of fields of a plan, each checked once, before any plan is made."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Self

from pydantic import model_validator

from simpar.errors import PlanError, nearest
from simpar.plan.plan import Plan

# Plans of other work cannot be ranked by the time of a step; parts with fields of their own are no values of an axis.
_SHARED: Mapping[str, str] = MappingProxyType(
    {
        "global_batch": "plans share the batch; sweep it",
        "seq_len": "plans share the samples; sweep it",
        "data": "plans share the samples; sweep it",
        "framework": "plans share the framework; sweep it, or search once for each",
        "overlap": "plans share it; sweep its fields, or search once for each",
        "sync": "plans share it; sweep it, or search once for each",
    }
)


class _Single(Plan):
    """A plan of which one field is looked at: whether fields go together is known once all are chosen."""

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        return self


def read_choices(choices: Mapping[str, Iterable[Any]]) -> dict[str, tuple[Any, ...]]:
    """The values to choose from by field, as a plan holds them; equal ones count once.

    Raises:
        PlanError: a plan has no such field, all plans of a search share it, or a value is none of the field's.

    >>> read_choices({"zero": [1, 3, 1], "layer_split": [[6, 6], "balanced"]})
    {'zero': (1, 3), 'layer_split': ((6, 6), 'balanced')}
    """
    return {name: _read(name, values) for name, values in choices.items()}


def _read(name: str, values: Any) -> tuple[Any, ...]:
    if name not in Plan.model_fields:
        raise PlanError(
            f"'{name}' is not a field of a plan{nearest(name, list(Plan.model_fields))}; choose values for fields "
            "of a plan only"
        )
    if name in _SHARED:
        raise PlanError(f"{name} is no choice of a search: {_SHARED[name]}")
    if isinstance(values, (str, Mapping)) or not isinstance(values, Iterable):
        raise PlanError(f"{name}: {values!r} is no list of values to choose from; write [{values!r}]")
    found = dict.fromkeys(getattr(_Single(**{name: value}), name) for value in values)
    if not found:
        raise PlanError(f"{name} is given no value to choose from; give one or more, or leave it out")
    return tuple(found)
