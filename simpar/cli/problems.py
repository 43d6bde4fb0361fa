"""Pydantic's validation errors as short sentences: the path of a field, and what is wrong with its value."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from simpar.errors import nearest

Path = tuple[int | str, ...]

MAX_PROBLEMS = 8
"""More lines help nobody; the rest is counted."""

_FIELD = re.compile(r"[a-z_0-9][\w.-]*")
_UNKNOWN_KEY = re.compile(
    r"unknown key '(?P<key>.*?)'(?P<hint>; did you mean '.*?'\?)?(?P<known> \(known: .*\))?", re.S
)
_SHOWN = 40
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


def problems(error: ValidationError) -> Iterator[tuple[Path, str]]:
    """Path and sentence of each problem, those that belong together in one.

    The branches of a union become one sentence, missing fields of one mapping too, and an unknown key is part of the
    path instead of the text.
    """
    found: dict[Path, list[Any]] = {}
    branch: set[Path] = set()
    for each in error.errors(include_url=False):
        path = tuple(part for part in each["loc"] if isinstance(part, int) or _FIELD.fullmatch(part))
        if len(path) < len(each["loc"]):
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


def _sentences(found: Mapping[Path, Sequence[Any]]) -> Iterator[tuple[Path, str]]:
    missing: dict[Path, list[str]] = {}
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
        said = [error["msg"].removeprefix("Value error, ") for error in errors if error["type"] == "value_error"]
        unknown = _UNKNOWN_KEY.match(said[0]) if said else None
        if unknown:
            # Where one is near, the list of all of them only hides it.
            yield (*path, unknown["key"]), f"unknown key{unknown['hint'] or unknown['known'] or ''}"
        elif said:
            yield path, said[0]
        else:
            yield path, _should_be(errors)


def _should_be(errors: Sequence[Any]) -> str:
    value = errors[0]["input"]
    rule = " or ".join(dict.fromkeys(_rule(error) for error in errors))
    if isinstance(value, (str, int, float)) or value is None:
        return f"{shown(value)} should be {rule}{_hint(value, errors)}"
    return f"should be {rule}, not {'a list' if isinstance(value, (list, tuple)) else 'a mapping'}"


def _rule(error: Any) -> str:
    message: str = error["msg"]
    return _RULES.get(error["type"]) or message.removeprefix("Input should ").removeprefix("be ")


def _hint(value: Any, errors: Sequence[Any]) -> str:
    if not isinstance(value, str):
        return ""
    expected = [error["ctx"]["expected"] for error in errors if error["type"] == "literal_error"]
    return nearest(value, re.findall(r"'([^']*)'", " ".join(expected)))


def shown(value: Any) -> str:
    """A value as YAML writes it, shortened.

    >>> shown("eight"), shown(True), shown(None)
    ("'eight'", 'true', 'null')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value) if not isinstance(value, str) else f"'{' '.join(value.split())}'"
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
