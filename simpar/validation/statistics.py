"""How far predictions lie from measurements: errors by group, also after scaling, rank correlation, regret.

Errors are relative (predicted over measured, minus one) and absolute where it says so.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from simpar.errors import RunsError, nearest
from simpar.validation.predict import Prediction
from simpar.validation.runs import Run

Floats = npt.NDArray[np.float64]
_SMALLEST_QUESTION = 3  # with fewer configurations there is nothing to rank


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupError:
    """The errors of a group of runs; None where a figure cannot be had.

    Attributes:
        group: name of the group.
        n: predicted rows.
        refused: rows that could not be simulated.
        median, mean, p90: of the absolute error.
        bias: median of the signed error.
        scaled_median, scaled_p90: of the absolute error after one scale factor per source, GPU and precision, which is
            the median of measured over predicted time of the other rows (leave one out).
        spearman: rank correlation of predicted and measured times among the configurations of one model, machine and
            batch: the median over such questions of at least 3 configurations.
        regret: measured time of the predicted best over the measured best, mean over the same questions.
        questions: how many these are.
        memory_median: of the absolute error of the peak memory, where one was measured.
        covered: share of measured times within their interval.
    """

    group: str
    n: int
    refused: int
    median: float | None = None
    mean: float | None = None
    p90: float | None = None
    bias: float | None = None
    scaled_median: float | None = None
    scaled_p90: float | None = None
    spearman: float | None = None
    regret: float | None = None
    questions: int = 0
    memory_median: float | None = None
    covered: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As a mapping."""
        return asdict(self)


def summarise(predictions: Sequence[Prediction], group: str) -> GroupError:
    """The errors of some predictions as one group."""
    done = [p for p in predictions if p.predicted_s is not None]
    refused = len(predictions) - len(done)
    if not done:
        return GroupError(group=group, n=0, refused=refused)
    errors = np.array([p.error for p in done])
    scaled = np.abs(np.array([e for e in scaled_errors(done).values() if e is not None]))
    memory = [abs(e) for p in done if (e := p.memory_error) is not None]
    correlations, regrets = _rankings(done)
    within = [low <= p.run.step_time_s <= high for p in done if p.interval_s for low, high in (p.interval_s,)]
    return GroupError(
        group=group,
        n=len(done),
        refused=refused,
        median=float(np.median(np.abs(errors))),
        mean=float(np.mean(np.abs(errors))),
        p90=float(np.quantile(np.abs(errors), 0.9)),
        bias=float(np.median(errors)),
        scaled_median=float(np.median(scaled)) if len(scaled) else None,
        scaled_p90=float(np.quantile(scaled, 0.9)) if len(scaled) else None,
        spearman=float(np.median(correlations)) if correlations else None,
        regret=float(np.mean(regrets)) if regrets else None,
        questions=len(regrets),
        memory_median=float(np.median(memory)) if memory else None,
        covered=float(np.mean(within)) if within else None,
    )


def by_group(predictions: Sequence[Prediction], columns: Sequence[str]) -> list[GroupError]:
    """The errors of each combination of values that these columns have.

    Raises:
        RunsError: a column is not one of a run.
    """
    for column in columns:
        if column not in Run.model_fields:
            raise RunsError(
                f"runs have no column '{column}' to group by{nearest(column, list(Run.model_fields))}; "
                f"name some of {', '.join(Run.model_fields)}"
            )
    groups: defaultdict[str, list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        groups[" ".join(str(getattr(prediction.run, column)) for column in columns)].append(prediction)
    return [summarise(members, name) for name, members in groups.items()]


def scaled_errors(predictions: Iterable[Prediction]) -> Mapping[str, float | None]:
    """Per row, its error after the scale factor of its level, which the row itself has no part in; None if alone."""
    levels: defaultdict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for prediction in predictions:
        if prediction.predicted_s is not None:
            levels[prediction.run.level].append(prediction)
    found: dict[str, float | None] = {}
    for members in levels.values():
        ratios = np.array([1.0 / (1.0 + p.error) for p in members])
        for index, prediction in enumerate(members):
            others = np.delete(ratios, index)
            found[prediction.run.id] = (
                float((1.0 + prediction.error) * np.median(others) - 1.0) if len(others) else None
            )
    return found


def _rankings(done: Sequence[Prediction]) -> tuple[list[float], list[float]]:
    """Rank correlation and regret of each question that offers a choice."""
    questions: defaultdict[tuple[object, ...], list[Prediction]] = defaultdict(list)
    for prediction in done:
        questions[prediction.run.question].append(prediction)
    correlations, regrets = [], []
    for members in questions.values():
        if len(members) < _SMALLEST_QUESTION:
            continue
        measured = np.array([p.run.step_time_s for p in members])
        predicted = np.array([p.predicted_s or 0.0 for p in members])
        correlations.append(spearman(measured, predicted))
        regrets.append(float(measured[np.argmin(predicted)] / measured.min()))
    return correlations, regrets


def spearman(first: Floats, second: Floats) -> float:
    """Spearman's rank correlation; ties share their mean rank.

    >>> spearman(np.array([1.0, 2.0, 3.0]), np.array([10.0, 20.0, 15.0]))
    0.5
    """
    ranks = [_mean_ranks(values) for values in (first, second)]
    centred = [rank - rank.mean() for rank in ranks]
    norm = float(np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum() / norm) if norm else 0.0


def _mean_ranks(values: Floats) -> Floats:
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    mean: Floats = last - (count - 1) / 2.0
    return mean[place]


Regime = Callable[[Run], str]
REGIMES: Mapping[str, Regime] = {
    "GPUs": lambda run: _bin(run.num_gpus, (1, 8, 32, 128, 512)),
    "tokens per microbatch and GPU": lambda run: _bin((run.micro_batch or 1) * (run.seq_len or 1), (2048, 8192, 32768)),
    "hidden": lambda run: _bin(run.hidden or 1, (1024, 2048, 4096, 8192)),
    "tensor parallel": lambda run: f"tp {run.tp}",
    "pipeline": lambda run: f"pp {run.pp}",
    "ZeRO": lambda run: f"zero {run.zero}",
    "recompute": lambda run: run.recompute or "not said",
}
"""Ways to cut runs into regimes, by name."""


def _bin(value: float, edges: Sequence[int]) -> str:
    upper = next((edge for edge in edges if value <= edge), None)
    return f"≤ {upper:,}" if upper is not None else f"> {edges[-1]:,}"
