"""Pydantic's validation errors as short sentences: the path of a field, and what is wrong with its value."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from simpar.errors import FieldPath, SimparError, nearest

MAX_PROBLEMS = 8
"""More lines help nobody; the rest is counted."""

_FIELD = re.compile(r"[a-z_0-9][\w.-]*")
_BRANCHES = {"str", "int", "float", "bool", "none"}  # what pydantic calls a branch of a union that is no description
_SHOWN = 40
_MOST_BITS = 10_000
_RULES: Mapping[str, str] = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "model_type": "a mapping of fields",
    "model_attributes_type": "a mapping of fields",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}


def problems(error: ValidationError) -> Iterator[tuple[FieldPath, str]]:
    """Path and sentence of each problem, those that belong together in one.

    The branches of a union become one sentence, missing fields of one mapping too, and an unknown key is part of the
    path instead of the text.
    """
    found: dict[FieldPath, list[Any]] = {}
    branch: set[FieldPath] = set()
    for each in error.errors(include_url=False):
        path = tuple(part for part in each["loc"] if isinstance(part, int) or _names_field(part))
        if len(path) < len(each["loc"]) or each["type"] == "too_short":  # wrong items do not count as items
            branch.add(path)
        found.setdefault(path, []).append(each)
    # What is wrong inside one branch of a union says more than that another branch wants something else.
    for path in branch:
        if any(len(other) > len(path) and other[: len(path)] == path for other in found):
            del found[path]
    sentences = list(_sentences(found))
    yield from sentences[:MAX_PROBLEMS]
    if len(sentences) > MAX_PROBLEMS:
        yield (), f"{len(sentences) - MAX_PROBLEMS} more problems"


def _sentences(found: Mapping[FieldPath, Sequence[Any]]) -> Iterator[tuple[FieldPath, str]]:
    missing: dict[FieldPath, list[str]] = {}
    for path, errors in found.items():
        if errors[0]["type"] == "missing":
            missing.setdefault(path[:-1], []).append(str(path[-1]))
    for parent, names in missing.items():
        if len(names) == 1:
            yield (*parent, names[0]), "is missing"
        else:
            yield parent, f"{', '.join(names[:-1])} and {names[-1]} are missing"
    for path, errors in found.items():
        if errors[0]["type"] == "missing":
            continue
        said = [error for error in errors if error["type"] == "value_error"]
        unknown = [error["ctx"] for error in errors if error["type"] == "unknown_key"]
        if unknown:
            yield from (((*path, each["key"]), f"unknown key{each['hint']}") for each in unknown)
        elif said:
            yield from _said(path, said[0])
        else:
            yield path, _should_be(errors)


def _said(path: FieldPath, error: Any) -> Iterator[tuple[FieldPath, str]]:
    """What a validator said; where it built a description itself, the problems of that, below its own path."""
    cause = error["ctx"]["error"]
    if isinstance(cause, SimparError) and cause.problems:
        yield from (((*path, *inner), text) for inner, text in cause.problems)
    else:
        yield path, error["msg"].removeprefix("Value error, ")


def _names_field(part: str) -> bool:
    return part not in _BRANCHES and _FIELD.fullmatch(part) is not None


def _should_be(errors: Sequence[Any]) -> str:
    value = errors[0]["input"]
    if errors[0]["type"] == "json_invalid":
        return f"is not valid JSON ({errors[0]['ctx']['error']})"
    rule = " or ".join(dict.fromkeys(_rule(error) for error in errors)).replace(" or be ", " or ")
    if isinstance(value, (str, int, float)) or value is None:
        return f"{shown(value)} should {rule}{_hint(value, errors)}"
    return f"should {rule}, not {_kind(value)}"


def _rule(error: Any) -> str:
    known = _RULES.get(error["type"])
    message: str = error["msg"]
    return f"be {known}" if known else message.partition(" should ")[2].partition(", not ")[0] or message


def _hint(value: Any, errors: Sequence[Any]) -> str:
    if not isinstance(value, str):
        return ""
    expected = [error["ctx"]["expected"] for error in errors if error["type"] == "literal_error"]
    return nearest(value, re.findall(r"'([^']*)'", " ".join(expected)))


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, (list, tuple)) else f"a value of type {type(value).__name__}"


def shown(value: Any) -> str:
    """A value as YAML writes it, shortened.

    >>> shown("eight"), shown(True), shown(None), shown(10**5000)
    ("'eight'", 'true', 'null', 'a number of about 5001 digits')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:  # Python refuses to write such numbers
        return f"a number of about {math.ceil(value.bit_length() * math.log10(2))} digits"
    text = str(value) if not isinstance(value, str) else f"'{' '.join(value.split())}'"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
