"""The report on a table of runs: what was predicted, how far off, and what could not be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from simpar.validation.predict import Prediction
from simpar.validation.statistics import GroupError, by_group, scaled_errors, summarise

WORST = 10


@dataclass(frozen=True)
class ValidationReport:
    """Predictions of a table of runs; those flagged as suspicious count apart.

    Attributes:
        predictions: in the order of the table.
        columns: what groups are made of.
    """

    predictions: tuple[Prediction, ...]
    columns: tuple[str, ...] = ("source", "gpu", "framework")

    @cached_property
    def clean(self) -> tuple[Prediction, ...]:
        """Rows without a flag."""
        return tuple(p for p in self.predictions if not p.run.flag)

    @cached_property
    def suspicious(self) -> tuple[Prediction, ...]:
        """Rows with a flag."""
        return tuple(p for p in self.predictions if p.run.flag)

    @cached_property
    def groups(self) -> list[GroupError]:
        """Errors of rows without a flag, by group."""
        return by_group(self.clean, self.columns)

    @cached_property
    def overall(self) -> GroupError:
        """Errors of all rows without a flag."""
        return summarise(self.clean, "all")

    @cached_property
    def flagged(self) -> GroupError:
        """Errors of the flagged rows."""
        return summarise(self.suspicious, "flagged")

    @property
    def worst(self) -> list[Prediction]:
        """The rows without a flag that are furthest off, by ratio."""
        done = [p for p in self.clean if p.predicted_s is not None]
        return sorted(done, key=lambda p: -abs(math.log1p(p.error)))[:WORST]

    @property
    def refusals(self) -> list[tuple[str, list[Prediction]]]:
        """Why rows were not simulated, with the rows, most frequent first."""
        reasons: dict[str, list[Prediction]] = {}
        for prediction in self.predictions:
            if prediction.predicted_s is None:
                reasons.setdefault(prediction.refusal, []).append(prediction)
        return sorted(reasons.items(), key=lambda item: -len(item[1]))

    def to_dict(self) -> dict[str, Any]:
        """Groups, all, flagged ones and rows, as mappings of plain values."""
        scaled = {**scaled_errors(self.clean), **scaled_errors(self.suspicious)}
        return {
            "groups": [group.to_dict() for group in self.groups],
            "overall": self.overall.to_dict(),
            "flagged": self.flagged.to_dict(),
            "rows": _rows(self.predictions, scaled),
        }


def _rows(predictions: Sequence[Prediction], scaled: dict[str, float | None]) -> list[dict[str, Any]]:
    return [
        {
            "id": p.run.id,
            "source": p.run.source,
            "measured_s": p.run.step_time_s,
            "predicted_s": p.predicted_s,
            "interval_s": list(p.interval_s) if p.interval_s else None,
            "error": p.error if p.predicted_s is not None else None,
            "scaled_error": scaled.get(p.run.id),
            "memory_error": p.memory_error,
            "flag": p.run.flag,
            "refusal": p.refusal,
            "assumptions": list(p.assumptions),
        }
        for p in predictions
    ]
