"""What a run writes down: plain rows, in the order in which spans end."""

from typing import NamedTuple

from simpar.engine.price import OpenedPrice, OperationPrice
from simpar.trace.trace import KINDS, MEMORY_CATEGORIES, NONE

KIND = {kind: index for index, kind in enumerate(KINDS)}
CATEGORY = {category: index for index, category in enumerate(MEMORY_CATEGORIES)}


class Label(NamedTuple):
    """What a span is, apart from when: columns of ``Spans``."""

    kind: int = NONE
    name: int = NONE
    microbatch: int = NONE
    chunk: int = NONE
    layer: int = NONE


class Row(NamedTuple):
    """One span.

    ``value`` is FLOP for compute and bytes for communication, ``cause`` the row that let it start, ``opened`` the
    number of the opened run that it is a kernel of, or -1. A single kernel begins when it was launched;
    ``host_wait_ns`` is how long its stream waited for that.
    """

    start_ns: int
    end_ns: int
    lane: int
    label: Label
    value: float
    cause: int
    opened: int = NONE
    host_wait_ns: int = 0


class RunRow(NamedTuple):
    """How an operation's row came about: issue time of its first launch, time on the GPU, wait for the host."""

    row: int
    price: OperationPrice | OpenedPrice
    issue_ns: int
    gpu_ns: int
    host_wait_ns: int


class Recorder:
    """Rows in the order in which spans end."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.runs: list[RunRow] = []
        self.memory: list[tuple[int, int, int, int]] = []  # time, rank, category, delta
        self.opened: list[Label] = []
        self._names: dict[str, int] = {}

    def open(self, label: Label) -> int:
        """Announces an opened run; returns its number."""
        self.opened.append(label)
        return len(self.opened) - 1

    def name(self, text: str) -> int:
        """The number that stands for a text."""
        return self._names.setdefault(text, len(self._names))

    @property
    def names(self) -> tuple[str, ...]:
        """All texts, by number."""
        return tuple(self._names)

    def by_lane(self) -> list[Row]:
        """Rows lane by lane; within a lane they stand in stream order, whatever the times."""
        return sorted(self.rows, key=lambda row: row.lane)
