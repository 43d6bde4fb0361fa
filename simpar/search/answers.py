"""What the lines of a search's file must hold: answers come back from disk only as what a search writes."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from simpar.errors import JobError
from simpar.search.found import Counts

Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0)]


class _Answer(BaseModel):
    """Fields of a plan, and the number of its cluster."""

    model_config = ConfigDict(extra="forbid", strict=True)

    plan: dict[str, Any]
    cluster: Whole


class _Refused(_Answer):
    """A plan that does not fit, or breaks a rule."""

    error: str


class _Simulated(_Answer):
    """A plan that was simulated, as in :class:`~simpar.search.found.Found`."""

    step_time_s: Finite
    low_s: Finite | None
    high_s: Finite | None
    memory_bytes: Whole
    gpus: Whole
    tokens_per_s: Finite
    mfu: Finite
    cost_per_step: Finite | None = None


class _Shown(_Simulated):
    """The same in the result."""

    bound_s: Finite


class _Ended(BaseModel):
    """The result of a search that has ended."""

    model_config = ConfigDict(extra="forbid", strict=True)

    ended: dict[str, Any]
    counts: Counts
    found: list[_Shown]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.found) != self.counts.simulated:
            raise ValueError(f"{len(self.found)} plans are listed, but {self.counts.simulated} were simulated")
        return self


def check_answers(records: Sequence[Any], path: str, clusters: int) -> None:
    """Refuses a file with lines that no search has written.

    Args:
        records: the lines after the first one, as values.
        path: of the file, for messages.
        clusters: how many the search has.

    Raises:
        JobError: a line is none; the message names it.
    """
    for line, record in enumerate(records, start=2):
        keys = record if isinstance(record, dict) else {}
        try:
            kind = _Ended if "ended" in keys else _Refused if "error" in keys else _Simulated
            answer = kind.model_validate_json(json.dumps(record))
            if isinstance(answer, _Answer) and answer.cluster >= clusters:
                raise ValueError(f"cluster {answer.cluster} is none of the {clusters}")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            value = "" if first["type"] == "missing" else f" is {repr(first['input'])[:40]}"
            text = f"{where}{value}: {first['msg']}" if where else first["msg"]
            raise JobError(_text(path, line, text)) from None
        except ValueError as error:
            raise JobError(_text(path, line, str(error))) from None


def _text(path: str, line: int, why: str) -> str:
    return f"{path}:{line}: is no answer of a search ({why}); remove that line, and the plan is asked again"
