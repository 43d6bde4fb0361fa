"""The schedules by name, as plans and the command line call them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from simpar.errors import PlanError, nearest
from simpar.schedule.breadth_first import looped_bfs
from simpar.schedule.dualpipe import dualpipe, dualpipev
from simpar.schedule.gpipe import gpipe
from simpar.schedule.interleaved import equal_group, interleaved
from simpar.schedule.one_f_one_b import one_f_one_b
from simpar.schedule.schedule import Schedule
from simpar.schedule.text import read_csv
from simpar.schedule.zero_bubble import zb_1p, zb_h1, zb_h2
from simpar.schedule.zero_bubble_v import zb_v


class Recipe(NamedTuple):
    """How to make a schedule.

    Attributes:
        generate: takes ``pp`` and ``microbatches``, and the options by keyword.
        options: which of ``chunks`` and ``group`` it takes besides.
        chunks: stages of one model per rank, where it does not take ``chunks``.
    """

    generate: Callable[..., Schedule]
    options: frozenset[str] = frozenset()
    chunks: int = 1


_ROUNDS = 3  # groups (1F1B: microbatches per stage) after which an order has shown all that it ever holds
_CHUNKS, _GROUP = frozenset({"chunks"}), frozenset({"group"})

SCHEDULES: Mapping[str, Recipe] = MappingProxyType(
    {
        "gpipe": Recipe(gpipe),
        "1f1b": Recipe(one_f_one_b),
        "interleaved": Recipe(interleaved, _CHUNKS | _GROUP),
        "looped-bfs": Recipe(looped_bfs, _CHUNKS),
        "zb-h1": Recipe(zb_h1),
        "zb-h2": Recipe(zb_h2),
        "zb-1p": Recipe(zb_1p, _CHUNKS | _GROUP),
        "zb-v": Recipe(zb_v, chunks=2),
        "dualpipe": Recipe(dualpipe),
        "dualpipev": Recipe(dualpipev, chunks=2),
    }
)


def unknown(name: str) -> str:
    """What is said about a schedule that does not exist."""
    return (
        f"schedule '{name}' is not known{nearest(name, list(SCHEDULES))}; take one of {', '.join(SCHEDULES)}, "
        "or the path of a .csv file"
    )


def takers(option: str) -> str:
    """The schedules that take an option, for messages.

    >>> takers("group")
    "'interleaved' or 'zb-1p'"
    """
    *names, last = (f"'{name}'" for name, recipe in SCHEDULES.items() if option in recipe.options)
    return f"{', '.join(names)} or {last}"


def takes(name: str, option: str) -> bool:
    """Whether a schedule takes an option; one that is read from a file takes none."""
    return name in SCHEDULES and option in SCHEDULES[name].options


def chunks_per_rank(name: str, vpp: int) -> int:
    """Stages of one model that each rank of a schedule holds, where a plan asks for ``vpp``.

    Raises:
        PlanError: the schedule holds another number than what is asked for (1 asks for none).
    """
    if name not in SCHEDULES or takes(name, "chunks"):
        return vpp
    chunks = SCHEDULES[name].chunks
    if vpp not in (1, chunks):
        raise PlanError(
            f"schedule '{name}' always has {chunks} chunk{'s' * (chunks > 1)} (vpp) a rank, not {vpp}; "
            f"drop vpp or take schedule {takers('chunks')}"
        )
    return chunks


def build(name: str, *, pp: int, microbatches: int, chunks: int = 1, group: int | None = None) -> Schedule:
    """The schedule called ``name``, or the one in a file of torch's text form.

    Args:
        name: a key of ``SCHEDULES``, or a path that ends in ``.csv``.
        pp: pipeline ranks.
        microbatches: microbatches of a step.
        chunks: model chunks (virtual stages) per rank; 1 where the schedule or the file decides.
        group: microbatches that go through a chunk in a row; left open, the schedule decides.

    Raises:
        PlanError: no such schedule, an option that it does not take, or counts that it cannot run.
        DeadlockError: the ranks of a file wait for each other.
    """
    if name.endswith(".csv"):
        if group is not None:
            raise PlanError(f"schedule '{name}' takes no microbatch_group={group}; its rows are the order; drop it")
        return read_csv(name, pp=pp, microbatches=microbatches, chunks=chunks)
    if name not in SCHEDULES:
        raise PlanError(unknown(name))
    recipe = SCHEDULES[name]
    chunks = chunks_per_rank(name, chunks)
    options: dict[str, int | None] = {"chunks": chunks} if takes(name, "chunks") else {}
    if takes(name, "group"):
        options["group"] = group
    elif group is not None:
        raise PlanError(
            f"schedule '{name}' takes no microbatch_group={group}; drop it or take schedule {takers('group')}"
        )
    return recipe.generate(pp, microbatches, **options)


def shortened(name: str, pp: int, microbatches: int, group: int | None) -> tuple[int, int | None]:
    """The fewest microbatches whose order holds all that ``microbatches`` ever hold, and how many go in a row.

    1F1B turns back after as many microbatches as it has stages, and an interleaved order repeats itself after a few
    groups; other orders, and groups of a size that the plan asks for, are read as they are.

    Raises:
        PlanError: the microbatches form no equal groups.
    """
    if name == "1f1b":
        return min(microbatches, _ROUNDS * pp), group
    if takes(name, "group") and group is None:
        group = equal_group(pp, microbatches)
        return min(microbatches, _ROUNDS * group), group
    return microbatches, group
