"""What a run writes down: plain rows, in the order in which spans end."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simpar.engine.price import OpenedPrice, OperationPrice
from simpar.trace.trace import KINDS, MEMORY_CATEGORIES, NONE, FloatColumn, IntColumn

KIND = {kind: index for index, kind in enumerate(KINDS)}
CATEGORY = {category: index for index, category in enumerate(MEMORY_CATEGORIES)}


class Label(NamedTuple):
    """What a span is, apart from when and for which microbatch: columns of ``Spans``.

    ``value`` is FLOP for compute and bytes for communication.
    """

    kind: int
    name: int
    layer: int = NONE
    value: float = 0.0


class LabelColumns(NamedTuple):
    """Labels by number, as columns."""

    kind: IntColumn
    name: IntColumn
    layer: IntColumn
    value: FloatColumn


def label_columns(labels: Sequence[Label]) -> LabelColumns:
    """Labels as columns."""
    *columns, value = zip(*labels, strict=True) if labels else ((),) * 4
    kind, name, layer = (np.array(column, np.int64) for column in columns)
    return LabelColumns(kind, name, layer, np.array(value, np.float64))


class Row(NamedTuple):
    """One span; ``label`` counts in the recorder's labels, ``cause`` is the row that let it start."""

    start_ns: int
    end_ns: int
    lane: int
    label: int
    microbatch: int
    chunk: int
    cause: int


RowFields = tuple[int, int, int, int, int, int, int]
"""A :class:`Row` as it is written: a plain tuple costs a third of a named one."""

RunFields = tuple[int, int, OperationPrice | OpenedPrice, int, int]
"""How an operation's row came about: the row, its lane and price, issue time of its first launch, time on the GPU."""


class InnerRow(NamedTuple):
    """A row that is a kernel or a collective of the opened run of that number.

    A single kernel begins when it was launched; ``host_wait_ns`` is how long its stream waited for that.
    """

    row: int
    opened: int
    host_wait_ns: int = 0


class OpenedRun(NamedTuple):
    """A run that is simulated kernel by kernel: what its span shows."""

    label: Label
    microbatch: int
    chunk: int


class Recorder:
    """Rows in the order in which spans end.

    Attributes:
        rows: every span, as the fields of a :class:`Row`.
        runs: the operations among them.
        inner: kernels and collectives of opened runs among them, as the fields of an :class:`InnerRow`.
        memory: what is taken or given back: time, rank, category, bytes.
        opened: the runs that are simulated kernel by kernel.
    """

    def __init__(self) -> None:
        self.rows: list[RowFields] = []
        self.runs: list[RunFields] = []
        self.inner: list[tuple[int, int, int]] = []
        self.memory: list[tuple[int, int, int, int]] = []
        self.opened: list[OpenedRun] = []
        self._names: dict[str, int] = {}
        self._labels: dict[Label, int] = {}

    def open(self, run: OpenedRun) -> int:
        """Announces an opened run; returns its number."""
        self.opened.append(run)
        return len(self.opened) - 1

    def name(self, text: str) -> int:
        """The number that stands for a text."""
        return self._names.setdefault(text, len(self._names))

    def label(self, label: Label) -> int:
        """The number that stands for a label."""
        return self._labels.setdefault(label, len(self._labels))

    @property
    def names(self) -> tuple[str, ...]:
        """All texts, by number."""
        return tuple(self._names)

    @property
    def labels(self) -> tuple[Label, ...]:
        """All labels, by number."""
        return tuple(self._labels)

    def by_lane(self) -> list[Row]:
        """Rows lane by lane; within a lane they stand in stream order, whatever the times."""
        return sorted(map(Row._make, self.rows), key=lambda row: row.lane)
