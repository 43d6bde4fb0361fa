"""From the times of all ranks to a trace with the engine's columns and labels.

What a rank measures of communication includes the wait for its peers; the engine's span begins when the last one is
there. So a collective begins with its last member's start, and a message is under way from when both sides are ready to
when both are done.
"""

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from calibrate.replay.steps import Begin, Communicator, End, Listing, Step, communicator
from simpar.model.work import kernel_kind
from simpar.program.ir import COMPUTE, Alloc, Collective, Launch, Record, Recv, Run, Send, Wait
from simpar.trace.trace import (
    COMMUNICATION_KINDS,
    KINDS,
    MEMORY_CATEGORIES,
    NONE,
    IntColumn,
    Lane,
    MemoryEvents,
    OperationDetails,
    Spans,
    Template,
    Trace,
    spans_from_columns,
)


class _Row(NamedTuple):
    """One span; ``causes`` are rows, or (receiver, tag) of messages, of which the last to end let it start."""

    kind: int
    name: int
    microbatch: int
    chunk: int
    layer: int
    lane: int
    start_ns: int
    end_ns: int
    nbytes: float
    flop: float
    parent: int = NONE
    causes: tuple[Any, ...] = ()


def assemble(listing: Listing, times: Mapping[int, IntColumn]) -> Trace:
    """The trace of one step.

    Args:
        listing: the program.
        times: per rank, start and end of its steps in nanoseconds since the common start, shape (2, steps).
    """
    book = _Book(listing, times)
    for rank in listing.ranks:
        _Walk(book, rank).go(listing.steps[rank], times[rank])
    return book.trace()


class _Book:
    """What the walks over all ranks write down."""

    def __init__(self, listing: Listing, times: Mapping[int, IntColumn]) -> None:
        self.ranks = listing.ranks
        self.meetings = _meetings(listing, times)
        self.received = _received(listing, times)
        self.lanes: list[Lane] = []
        self.rows: list[_Row] = []
        self.children: list[_Row] = []
        self.sent: dict[Any, int] = {}  # (receiver, tag) -> row
        self._names: dict[str, int] = {}
        self._memory: list[tuple[int, int, int, int]] = []

    def name(self, text: str) -> int:
        """The number that stands for a text."""
        return self._names.setdefault(text, len(self._names))

    def remember(self, time: int, rank: int, category: str, nbytes: int) -> None:
        """Memory taken or given back."""
        if nbytes:
            self._memory.append((time, rank, MEMORY_CATEGORIES.index(category), nbytes))

    def trace(self) -> Trace:
        """Everything in columns, spans ordered by start."""
        rows = self.rows
        order = sorted(range(len(rows)), key=lambda i: (rows[i].start_ns, rows[i].end_ns, rows[i].lane))
        place = np.full(len(rows) + 1, NONE, np.int64)
        place[order] = np.arange(len(rows))
        children = [row._replace(parent=int(place[row.parent])) for row in self.children]
        children.sort(key=lambda row: (row.start_ns, row.lane))
        spans = _columns([rows[i] for i in order], [int(place[self._cause(rows[i])]) for i in order])
        kernels = _columns(children, [NONE] * len(children))
        memory = np.array(sorted(self._memory, key=lambda event: event[0]), np.int64).reshape(-1, 4)
        return Trace(
            step_ns=max((row.end_ns for row in rows), default=0),
            lanes=tuple(self.lanes),
            names=tuple(self._names),
            spans=spans,
            memory=MemoryEvents(
                time_ns=memory[:, 0], rank=memory[:, 1], category=memory[:, 2], delta_bytes=memory[:, 3]
            ),
            details=_details(spans, kernels, self.lanes),
            expand=partial(_same, kernels),
        )

    def _cause(self, row: _Row) -> int:
        """The row that ended last among those that this one had to wait for."""
        found = [self.sent[c] if isinstance(c, tuple) else c for c in row.causes]
        return max((c for c in found if c != NONE), key=lambda c: self.rows[c].end_ns, default=NONE)


class _Walk:
    """Walks the steps of one rank beside their times, in host order."""

    def __init__(self, book: _Book, rank: int) -> None:
        self._book, self._rank = book, rank
        self._lanes: dict[str, int] = {}
        self._causes: dict[str, list[Any]] = {}  # per stream, what its next span may have waited for
        self._events: dict[Hashable, int] = {}  # the row at whose end an event was recorded
        self._last: dict[str, int] = {}
        self._counts: dict[Communicator, int] = {}
        self._run: Run | None = None
        self._run_ns = 0
        self._run_causes: tuple[Any, ...] = ()

    def go(self, listed: Sequence[Step], times: IntColumn) -> None:
        """Writes the rank's lanes, spans and memory into the book."""
        self._lane(COMPUTE)
        for category, nbytes in self._book.ranks[self._rank].resident:
            self._book.remember(0, self._rank, category, nbytes)
        for step, start, end in zip(listed, times[0].tolist(), times[1].tolist(), strict=True):
            match step:
                case Record() | Wait():
                    self._event(step)
                case Recv():
                    self._causes.setdefault(COMPUTE, []).append((self._rank, step.tag))
                case Alloc(category, nbytes):
                    self._book.remember(start, self._rank, category, nbytes)
                case Begin(run):
                    self._run, self._run_ns = run, start
                    self._run_causes = tuple(self._causes.get(COMPUTE, ()))
                case End(run):
                    self._end(run, start)
                case Launch() | Collective() | Send():
                    self._work(step, start, end)

    def _lane(self, stream: str) -> int:
        if stream not in self._lanes:
            self._lanes[stream] = len(self._book.lanes)
            self._book.lanes.append(Lane(self._rank, self._book.ranks[self._rank].stage, stream))
        return self._lanes[stream]

    def _event(self, step: Record | Wait) -> None:
        self._lane(step.stream)
        if self._run is not None:
            return  # within a run nothing is told of what let its kernels start
        if isinstance(step, Record):
            self._events[step.event] = self._last.get(step.stream, NONE)
        else:
            self._causes.setdefault(step.stream, []).append(self._events[step.event])

    def _work(self, step: Launch | Collective | Send, start: int, end: int) -> None:
        stream, row = self._span(step, start, end)
        if self._run is not None:
            run = self._run
            # the operation's own row comes at its end
            place = row._replace(microbatch=run.microbatch, chunk=run.chunk, parent=len(self._book.rows))
            self._book.children.append(place)
            return
        if isinstance(step, Send):
            self._book.sent[step.peer, step.tag] = len(self._book.rows)
        self._add(stream, row._replace(causes=tuple(self._causes.get(stream, ()))))

    def _end(self, run: Run, end: int) -> None:
        operation, start = run.operation, self._run_ns
        layer = operation.layers[0] if len(operation.layers) == 1 else NONE
        kind, name = KINDS.index(operation.phase), self._book.name(operation.name)
        flop = sum(block.work.flop for block in operation.blocks)
        row = _Row(kind, name, run.microbatch, run.chunk, layer, self._lane(COMPUTE), start, end, 0.0, flop)
        self._run = None
        self._add(COMPUTE, row._replace(end_ns=max(end, start + 1), causes=self._run_causes))
        if run.transient_bytes:
            self._book.remember(start, self._rank, "activations", run.transient_bytes)
            self._book.remember(end, self._rank, "activations", -run.transient_bytes)

    def _add(self, stream: str, row: _Row) -> None:
        self._last[stream] = len(self._book.rows)
        self._causes[stream] = [len(self._book.rows)]
        self._book.rows.append(row)

    def _span(self, step: Launch | Collective | Send, start: int, end: int) -> tuple[str, _Row]:
        """Stream and span of one step, labelled as the engine does."""
        microbatch = chunk = layer = NONE
        nbytes = flop = 0.0
        match step:
            case Launch():
                stream, kind, name, layer = COMPUTE, kernel_kind(step.kernel), step.name, step.layer
                nbytes, flop = step.kernel.work.nbytes, step.kernel.work.flop
            case Collective():
                stream, kind, name, nbytes = step.group.stream, step.op, step.name or step.op, step.nbytes
                microbatch, chunk, layer = step.microbatch, step.chunk, step.layer
                start = min(max(start, self._met_ns(step)), end - 1)
            case Send():
                stream, kind, name, nbytes = step.stream, "p2p", step.stream, step.nbytes
                microbatch = step.microbatch
                posted, arrived = self._book.received[step.peer, step.tag]
                start, end = max(start, posted), max(end, arrived)
        labels = (KINDS.index(kind), self._book.name(name), microbatch, chunk, layer, self._lane(stream))
        return stream, _Row(*labels, start, max(end, start + 1), nbytes, flop)

    def _met_ns(self, step: Collective) -> int:
        members = communicator(step)
        self._counts[members] = self._counts.get(members, -1) + 1
        return self._book.meetings[members, self._counts[members]]


def _received(listing: Listing, times: Mapping[int, IntColumn]) -> dict[Any, tuple[int, int]]:
    """By receiver and tag, when the receiver was ready for a message, and when it had it."""
    return {
        (rank, step.tag): (int(times[rank][0, index]), int(times[rank][1, index]))
        for rank, listed in listing.steps.items()
        for index, step in enumerate(listed)
        if isinstance(step, Recv)
    }


def _meetings(listing: Listing, times: Mapping[int, IntColumn]) -> dict[tuple[Communicator, int], int]:
    """When the last member of each collective was there."""
    found: dict[tuple[Communicator, int], int] = {}
    for rank, listed in listing.steps.items():
        counts: dict[Communicator, int] = {}
        for index, step in enumerate(listed):
            if isinstance(step, Collective):
                members = communicator(step)
                counts[members] = counts.get(members, -1) + 1
                key = (members, counts[members])
                found[key] = max(found.get(key, 0), int(times[rank][0, index]))
    return found


def _columns(rows: Sequence[_Row], predecessors: Sequence[int]) -> Spans:
    columns: dict[str, Any] = {name: [getattr(row, name, None) for row in rows] for name in _Row._fields}
    columns["duration_ns"] = [row.end_ns - row.start_ns for row in rows]
    columns["predecessor"] = predecessors
    return spans_from_columns(columns)


def _details(spans: Spans, kernels: Spans, lanes: Sequence[Lane]) -> OperationDetails:
    """What each operation was made of, measured: one template each, so nothing counts as interference."""
    count = len(spans)
    template, gpu, host = np.full(count, NONE, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
    made: list[Template] = []
    order = np.argsort(kernels.parent, kind="stable")
    bounds = np.searchsorted(kernels.parent[order], np.arange(count + 1))
    computes = np.array([lane.stream == COMPUTE for lane in lanes], np.bool_)
    communicates = len(KINDS) - len(COMMUNICATION_KINDS)
    for row in np.flatnonzero(computes[spans.lane] & (spans.kind < communicates)):
        mine = order[bounds[row] : bounds[row + 1]]
        if not len(mine):
            continue
        length = int(spans.duration_ns[row])
        busy = np.bincount(kernels.kind[mine], weights=kernels.duration_ns[mine], minlength=len(KINDS))
        on_compute = computes[kernels.lane[mine]]
        exposed = _exposed(spans, int(row), kernels, mine[on_compute], mine[~on_compute])
        waited = length - int(busy[:communicates].sum()) - exposed
        template[row], gpu[row], host[row] = len(made), length - waited, waited
        busy_ns = {KINDS[kind]: int(busy[kind]) for kind in np.flatnonzero(busy)}
        made.append(Template(busy_ns=busy_ns, exposed_ns=exposed, gpu_ns=length - waited))
    return OperationDetails(template=template, gpu_ns=gpu, host_wait_ns=host, templates=tuple(made))


def _exposed(spans: Spans, row: int, kernels: Spans, compute: IntColumn, communication: IntColumn) -> int:
    """Nanoseconds of the gaps between an operation's kernels in which it communicates, or waits for its peers to."""
    if not len(communication):
        return 0
    # kernels of one stream are in order; the operation's edges bound the first and the last gap
    first = np.concatenate([spans.start_ns[row : row + 1], kernels.end_ns[compute]])
    last = np.concatenate([kernels.start_ns[compute], spans.end_ns[row : row + 1]])
    begins = np.searchsorted(np.sort(kernels.start_ns[communication]), last)
    ends = np.searchsorted(np.sort(kernels.end_ns[communication]), first, side="right")
    return int((last - first)[begins > ends].sum())


def _same(kernels: Spans) -> Spans:
    return kernels
