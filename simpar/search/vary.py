"""Values to vary: the text forms of a sweep, and how a value gets to its place in a job."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from simpar.description import Description
from simpar.errors import JobError, nearest
from simpar.job import Job

SECTIONS = ("model", "cluster", "plan", "faults")
_MOST_VALUES = 100_000


def parse_vary(text: str, flag: str = "--vary") -> tuple[str, list[Any]]:
    """Reads ``plan.tp=1,2,4,8`` or ``cluster.nic_gbps=200..800``; values are typed as YAML types them.

    A range doubles from its start (200, 400, 800); with a step behind a colon it adds that (``1..8:2`` is 1, 3, 5, 7).
    A comma inside brackets belongs to the value (``plan.layer_split=[20,20],[22,18]``).

    >>> parse_vary("cluster.nic_gbps=200..800"), parse_vary("plan.zero=0,3")
    (('cluster.nic_gbps', [200, 400, 800]), ('plan.zero', [0, 3]))

    Args:
        text: field and values.
        flag: for messages, where the text was given.

    Raises:
        JobError: it is no field with values.
    """
    where, equals, values = text.partition("=")
    if not equals or not where.strip() or not values.strip():
        raise JobError(f"{flag} '{text}': is not a field and its values; write it as in {flag} plan.tp=1,2,4,8")
    found: list[Any] = []
    for part in _split(values):
        found += _range(part, f"{flag} '{text}'") if ".." in part else [_value(part, f"{flag} '{text}'")]
    return where.strip(), found


def _split(values: str) -> list[str]:
    """The parts between commas that stand in no bracket."""
    parts, depth = [""], 0
    for letter in values:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _value(part: str, given: str) -> Any:
    try:
        return yaml.safe_load(part)
    except (yaml.YAMLError, ValueError):
        raise JobError(f"{given}: '{part.strip()}' is not a value; quote it as in YAML") from None


def _range(part: str, given: str) -> list[Any]:
    span, colon, step = part.partition(":")
    ends = [_value(end, given) for end in span.split("..")]
    add = _value(step, given) if colon else None
    numbers = [*ends, *([add] if colon else [])]
    if len(ends) != 2 or not all(isinstance(n, (int, float)) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise JobError(
            f"{given}: '{part}' is not a range; write 200..800, which doubles, or 1..8:2, which adds 2, with "
            "numbers above 0"
        )
    first, last = ends
    found: list[Any] = []
    value = first
    while value <= last:
        found.append(value)
        if len(found) > _MOST_VALUES:
            raise JobError(f"{given}: '{part}' is more than {_MOST_VALUES:,} values; take a larger step")
        value = 2 * value if add is None else first + len(found) * add
    if not found:
        raise JobError(f"{given}: '{part}' begins above its end; write it as {last}..{first}")
    return found


def locate(job: Job, path: str) -> tuple[str, ...]:
    """Where a field lies; one that its section has only in a part (``cluster.nic_gbps``) is found there.

    Raises:
        JobError: there is no such field, or several parts have it.
    """
    section, *rest = path.split(".")
    if section not in SECTIONS:
        if not rest and section in type(job.plan).model_fields:
            raise JobError(f"'{path}' is not a section of a job; did you mean 'plan.{path}'?")
        raise JobError(f"'{path}' does not begin with a section of a job; start with plan., model. or cluster.")
    place: list[str] = [section]
    here: Any = getattr(job, section)
    for name in rest:
        if not isinstance(here, Description):
            raise JobError(f"{path}: {'.'.join(place)} has no fields that can be varied; vary it whole")
        if name not in type(here).model_fields:
            place.append(_part_with(here, name, path))
            here = getattr(here, place[-1])
        place.append(name)
        here = getattr(here, name)
    return tuple(place)


def _part_with(owner: Description, name: str, path: str) -> str:
    parts = {key: part for key, part in owner if isinstance(part, Description)}
    holders = [key for key, part in parts.items() if name in type(part).model_fields]
    if len(holders) == 1:
        return holders[0]
    if holders:
        choices = " or ".join(path.removesuffix(name) + f"{key}.{name}" for key in holders)
        raise JobError(f"{path}: several parts have '{name}'; write {choices}")
    known = [*type(owner).model_fields, *(field for part in parts.values() for field in type(part).model_fields)]
    raise JobError(f"{path}: there is no field '{name}'{nearest(name, known)}")


def changed(job: Job, changes: Iterable[tuple[Sequence[str], Any]]) -> Job:
    """The job with values at their places; all fields of one description change at once.

    Raises:
        SimparError: a value breaks a rule.
    """
    tree: dict[str, Any] = {}
    for place, value in changes:
        node = tree
        for name in place[:-1]:
            node = node.setdefault(name, {})
        node[place[-1]] = _Leaf(value)
    varied: Job = _apply(job, tree)
    return varied


class _Leaf:
    def __init__(self, value: Any) -> None:
        self.value = value


def _apply(owner: Any, tree: Mapping[str, Any]) -> Any:
    new: dict[str, Any] = {}
    for name, change in tree.items():
        new[name] = change.value if isinstance(change, _Leaf) else _apply(getattr(owner, name), change)
    return owner.replace(**new)
