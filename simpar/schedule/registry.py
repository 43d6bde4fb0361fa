"""The schedules by name, as plans and the command line call them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from simpar.errors import PlanError, nearest
from simpar.schedule.gpipe import gpipe
from simpar.schedule.interleaved import interleaved
from simpar.schedule.one_f_one_b import one_f_one_b
from simpar.schedule.schedule import Schedule


class Recipe(NamedTuple):
    """How to make a schedule.

    Attributes:
        generate: takes ``pp`` and ``microbatches``, and the options by keyword.
        options: which of ``chunks`` and ``group`` it takes besides.
    """

    generate: Callable[..., Schedule]
    options: frozenset[str] = frozenset()


SCHEDULES: Mapping[str, Recipe] = MappingProxyType(
    {
        "gpipe": Recipe(gpipe),
        "1f1b": Recipe(one_f_one_b),
        "interleaved": Recipe(interleaved, frozenset({"chunks", "group"})),
    }
)


def build(name: str, *, pp: int, microbatches: int, chunks: int = 1, group: int | None = None) -> Schedule:
    """The schedule called ``name``.

    Args:
        name: a key of ``SCHEDULES``.
        pp: pipeline ranks.
        microbatches: microbatches of a step.
        chunks: model chunks (virtual stages) per rank.
        group: microbatches that go through a chunk in a row; left open, the schedule decides.

    Raises:
        PlanError: no such schedule, an option that it does not take, or counts that it cannot run.
    """
    if name not in SCHEDULES:
        raise PlanError(
            f"schedule '{name}' is not known{nearest(name, list(SCHEDULES))}; take one of {', '.join(SCHEDULES)}"
        )
    recipe = SCHEDULES[name]
    options: dict[str, int | None] = {}
    for option, value, default in (("chunks", chunks, 1), ("group", group, None)):
        if option in recipe.options:
            options[option] = value
        elif value != default:
            takers = " or ".join(f"'{n}'" for n, r in SCHEDULES.items() if option in r.options)
            raise PlanError(f"schedule '{name}' takes no {option}={value}; drop it or take schedule {takers}")
    return recipe.generate(pp, microbatches, **options)
