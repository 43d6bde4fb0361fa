"""Pairs the spans of a prediction with those of a measurement, one by one."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simpar.trace.trace import KINDS, IntColumn, Trace


class SpanKey(NamedTuple):
    """What a span is, apart from when; ``occurrence`` counts spans of a lane that are otherwise alike, from 0."""

    rank: int
    stream: str
    kind: str
    name: str
    microbatch: int
    chunk: int
    layer: int
    occurrence: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Match:
    """Paired spans.

    Attributes:
        keys: what was paired, in the prediction's order.
        predicted_ns: their predicted lengths.
        measured_ns: their measured lengths.
        only_predicted: spans that were not measured.
        only_measured: spans that were not predicted.
    """

    keys: tuple[SpanKey, ...]
    predicted_ns: IntColumn
    measured_ns: IntColumn
    only_predicted: tuple[SpanKey, ...]
    only_measured: tuple[SpanKey, ...]

    def __len__(self) -> int:
        return len(self.keys)


def match(predicted: Trace, measured: Trace, *, kernels: bool = False) -> Match:
    """Pairs spans by rank, stream, kind, name, microbatch, chunk and layer; of those that are alike, in order of start.

    Args:
        predicted: of the engine, with every rank simulated.
        measured: of the replay of the same program.
        kernels: pair the kernels and collectives inside operations instead of the operations.

    Returns:
        The pairs, and what has no partner.
    """
    ours, theirs = lengths(predicted, kernels=kernels), lengths(measured, kernels=kernels)
    keys = [key for key in ours if key in theirs]
    return Match(
        keys=tuple(keys),
        predicted_ns=_column([ours[key] for key in keys]),
        measured_ns=_column([theirs[key] for key in keys]),
        only_predicted=tuple(key for key in ours if key not in theirs),
        only_measured=tuple(key for key in theirs if key not in ours),
    )


def lengths(trace: Trace, *, kernels: bool = False) -> dict[SpanKey, int]:
    """Nanoseconds of every operation (or of every kernel) of a trace, by what it is, in order of start."""
    spans = trace.kernels() if kernels else trace.spans
    # spans are ordered by start, but on one lane a span of no length may share its start with the next one
    order = np.lexsort((spans.end_ns, spans.start_ns))
    names = ("lane", "kind", "name", "microbatch", "chunk", "layer", "duration_ns")
    found: dict[SpanKey, int] = {}
    seen: Counter[SpanKey] = Counter()
    for lane, kind, name, microbatch, chunk, layer, duration in zip(
        *(getattr(spans, column)[order].tolist() for column in names), strict=True
    ):
        place = trace.lanes[lane]
        key = SpanKey(place.rank, place.stream, KINDS[kind], trace.names[name], microbatch, chunk, layer)
        found[key._replace(occurrence=seen[key])] = duration
        seen[key] += 1
    return found


def _column(values: Sequence[int]) -> IntColumn:
    return np.array(values, np.int64)
