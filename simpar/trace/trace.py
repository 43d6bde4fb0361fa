"""The trace: what every lane did when, as numpy columns.

A trace is a plain record. The engine (and, on real devices, the replay) writes it; reports, views and exports read it.
Spans come in two levels: *operations* (one span per microbatch operation, collective or message), which the engine
records, and *kernels* (their children), which :meth:`Trace.kernels` expands on demand because there are many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]
FloatColumn = npt.NDArray[np.float64]

COMPUTE_KINDS = ("forward", "backward", "weight_grad", "recompute", "optimizer")
KERNEL_KINDS = ("gemm", "attention", "elementwise", "activation", "norm")
COMMUNICATION_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift", "p2p", "copy")
KINDS = (*COMPUTE_KINDS, *KERNEL_KINDS, *COMMUNICATION_KINDS)
"""Every kind of span; ``Spans.kind`` holds indices into this tuple."""

MEMORY_CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buffers", "context")
"""What memory is held for; ``MemoryEvents.category`` holds indices into this tuple."""

NONE = -1
"""Stands in integer columns for "does not apply"."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One stream of one rank, or of the ``replicas`` equal ranks that it stands for.

    Attributes:
        rank: global rank of the representative.
        stage: its pipeline stage.
        stream: ``compute``, or the communicator that the stream serves (``tp``, ``pp``, ``dp``, ``cp``, ``ep``).
        replicas: how many ranks of the job behave exactly like this one (itself included).
    """

    rank: int
    stage: int
    stream: str
    replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Columns of equal length, one row per span, ordered by start.

    Attributes:
        start_ns: start on the integer clock.
        duration_ns: length; the end is ``start_ns + duration_ns``.
        lane: index into ``Trace.lanes``.
        kind: index into ``KINDS``.
        name: index into ``Trace.names`` ("forward", "qkv", "layers 0–11", ...).
        microbatch: microbatch number, or -1.
        chunk: model chunk (virtual stage) on this rank, or -1.
        layer: index of the model's layer, or -1.
        nbytes: bytes that a communication carries (its buffer), or that a kernel moves.
        flop: FLOP done.
        parent: row of the enclosing operation in ``Trace.spans`` (kernels), or -1 (operations).
        predecessor: row in ``Trace.spans`` of the operation whose end let this one start, or -1.
    """

    start_ns: IntColumn
    duration_ns: IntColumn
    lane: IntColumn
    kind: IntColumn
    name: IntColumn
    microbatch: IntColumn
    chunk: IntColumn
    layer: IntColumn
    nbytes: FloatColumn
    flop: FloatColumn
    parent: IntColumn
    predecessor: IntColumn

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> IntColumn:
        """End of each span on the integer clock."""
        return self.start_ns + self.duration_ns

    def rows_by_lane(self, lanes: int) -> list[IntColumn]:
        """Rows of each of so many lanes, in order: found at once, since there may be as many lanes as spans."""
        order = np.argsort(self.lane, kind="stable")
        return np.split(order, np.searchsorted(self.lane[order], np.arange(1, lanes)))

    def times(self, rows: IntColumn) -> tuple[IntColumn, IntColumn]:
        """Start and end of some spans."""
        start = self.start_ns[rows]
        return start, start + self.duration_ns[rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEvents:
    """Changes of the memory held on a rank, in time order: columns of equal length."""

    time_ns: IntColumn
    rank: IntColumn
    category: IntColumn
    delta_bytes: IntColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What the operations of one shape are made of, when nothing disturbs them.

    Attributes:
        busy_ns: per kind, time its kernels and collectives run (they may overlap).
        exposed_ns: time in which the compute stream waits for a collective of the operation's own.
        gpu_ns: length when everything was issued long ago.
        stream_busy_ns: per communication stream, time its collectives run.
    """

    busy_ns: Mapping[str, int]
    exposed_ns: int
    gpu_ns: int
    stream_busy_ns: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationDetails:
    """Columns beside ``Spans``, one row per span.

    Attributes:
        template: index into ``templates``, or -1 for communication.
        gpu_ns: time on the device; more than the template's where collectives slowed it.
        host_wait_ns: time in which the device waited for launches.
        templates: the distinct operations.
    """

    template: IntColumn
    gpu_ns: IntColumn
    host_wait_ns: IntColumn
    templates: tuple[Template, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkUse:
    """Total traffic of one link direction during the step."""

    name: str
    nbytes: float
    capacity_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What happened in one step.

    Attributes:
        step_ns: length of the step.
        lanes: the lanes, in drawing order (rank by rank, compute first).
        names: the texts that ``Spans.name`` points into.
        spans: operations.
        memory: allocations and releases.
        links: traffic per link.
        details: composition of the operations, for breakdowns that need not expand them.
        expand: makes the kernel spans; use :meth:`kernels`.
        traffic: tells how hard spans work links; use :meth:`link_s_per_byte`.
    """

    step_ns: int
    lanes: tuple[Lane, ...]
    names: tuple[str, ...]
    spans: Spans
    memory: MemoryEvents
    links: tuple[LinkUse, ...] = ()
    details: OperationDetails | None = None
    expand: Callable[[], Spans] | None = field(default=None, repr=False, compare=False)
    traffic: Callable[[], FloatColumn] | None = field(default=None, repr=False, compare=False)

    def kernels(self) -> Spans:
        """The children of the operations: every kernel and every collective inside a block, with ``parent`` set."""
        return self.expand() if self.expand is not None else empty_spans()

    def link_s_per_byte(self) -> FloatColumn | None:
        """Seconds that the busiest link of a lane's transfers needs at its capacity for each byte of a span.

        Returns:
            Shape (lanes, kinds), 0 where a lane carries nothing of a kind; None of a measured trace: nobody knows.
        """
        return self.traffic() if self.traffic is not None else None

    def to_perfetto(self, path: "str | Path", *, kernels: bool = False) -> None:
        """Writes the trace for ui.perfetto.dev and chrome://tracing (gzipped if ``path`` ends in .gz)."""
        from simpar.trace.export import to_perfetto  # noqa: PLC0415 - the record knows its readers only by name

        to_perfetto(self, path, kernels=kernels)

    def to_csv(self, path: "str | Path", *, kernels: bool = False) -> None:
        """Writes the spans as a table."""
        from simpar.trace.export import to_csv  # noqa: PLC0415

        to_csv(self, path, kernels=kernels)

    @property
    def step_s(self) -> float:
        """Length of the step in seconds."""
        return self.step_ns * 1e-9


_FLOAT_COLUMNS = {"nbytes", "flop"}


def spans_from_columns(columns: Mapping[str, "npt.ArrayLike"]) -> Spans:
    """Spans of the given columns, each cast to its dtype; columns must have equal length."""
    made: dict[str, Any] = {
        name: np.asarray(columns[name], dtype=np.float64 if name in _FLOAT_COLUMNS else np.int64)
        for name in Spans.__dataclass_fields__
    }
    return Spans(**made)


def empty_spans() -> Spans:
    """No spans."""
    return spans_from_columns(dict.fromkeys(Spans.__dataclass_fields__, ()))
