"""The critical path of a step: the chain of spans, each of which let the next one start, from the end back to zero.

A reader of the trace. Its parts lie end to end and fill the step exactly, so whatever is counted along it adds up to
the step time. What a part is made of (products, latency, streaming, ...) needs the job; :mod:`simpar.sensitivity`
adds that.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from simpar.trace.trace import COMMUNICATION_KINDS, KINDS, NONE, Trace

_COMPUTE = "compute"
_P2P = KINDS.index("p2p")
_FIRST_COMMUNICATION = KINDS.index(COMMUNICATION_KINDS[0])

Bound = Literal["device", "host", "communication"]


@dataclass(frozen=True, slots=True)
class PathPart:
    """A stretch of the critical path.

    Attributes:
        row: the span in ``Trace.spans``. A stretch that the host bounds ends with the span's end if the span is compute
            (it waited for its launches), and with its start otherwise.
        start_ns: where the stretch begins.
        end_ns: where it ends, which is where the next one begins.
        bound: what fills it: the span on its device, the span on its links, or the host that issues work.
    """

    row: int
    start_ns: int
    end_ns: int
    bound: Bound

    @property
    def duration_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


class HostStart(NamedTuple):
    """Where the host began to issue without a break.

    Attributes:
        time_ns: the instant.
        row: the span that it had waited for, or -1.
        calls: how many it has made since, to issue the span in question.
    """

    time_ns: int = 0
    row: int = NONE
    calls: int = 0


def critical_path(trace: Trace, causes: "Causes | None" = None) -> tuple[PathPart, ...]:
    """The parts of the critical path in order of time; they fill the step without gaps or overlaps.

    Where several spans end the step at the same instant, the path of the first one is taken.

    Args:
        trace: what happened.
        causes: what let its spans start, if something is known beyond the trace.

    >>> from simpar.simulation import simulate
    >>> trace = simulate({"model": "gpt2", "cluster": "h100-sxm:8"}).trace
    >>> sum(part.duration_ns for part in critical_path(trace)) == trace.step_ns
    True
    """
    if not len(trace.spans):
        return ()
    causes = causes or Causes(trace)
    row, end = int(np.argmax(trace.spans.end_ns)), trace.step_ns
    parts: list[PathPart] = []
    seen: set[int] = set()
    while row != NONE and row not in seen:
        seen.add(row)
        start, cause = int(trace.spans.start_ns[row]), NONE
        hosted = causes.waits_for_host(row)
        if not hosted:
            parts.append(PathPart(row, start, end, "communication" if causes.communicates(row) else "device"))
            end, cause = start, causes.of(row)
        if hosted or (cause == NONE and end > 0):
            began = causes.host(row)
            parts.append(PathPart(row, began.time_ns, end, "host"))
            end, cause = began.time_ns, began.row
        row = cause
    assert end == 0, "the path leads back to the beginning of the step"
    return tuple(reversed(parts))


class Causes:
    """What let each span of a trace start.

    Args:
        trace: what happened.
        host: for a span that waited for the host, since when the host issued without a break. A trace does not tell;
            on its own it says "since the beginning", which holds unless a program makes the host wait for the device.
        told: what let a span start (see :meth:`of`), if a program tells; from the trace alone it is what ended then.
    """

    def __init__(
        self,
        trace: Trace,
        host: Callable[[int], HostStart] = lambda _: HostStart(),
        told: Callable[[int], int] | None = None,
    ) -> None:
        self.host = host
        self._told = told
        spans = trace.spans
        self._trace = trace
        self._start, self._end = spans.start_ns.tolist(), spans.end_ns.tolist()
        self._lane, self._kind = spans.lane.tolist(), spans.kind.tolist()
        self._predecessor = spans.predecessor.tolist()
        self._host_wait = None if trace.details is None else trace.details.host_wait_ns.tolist()
        self._meetings: dict[tuple[int, int, int, float, str], list[int]] | None = None
        self._receivers: dict[int, set[int]] | None = None
        self._computed_until: dict[tuple[int, int], int] | None = None

    def communicates(self, row: int) -> bool:
        """Whether the span is a collective or a message."""
        return bool(self._kind[row] >= _FIRST_COMMUNICATION)

    def waits_for_host(self, row: int) -> bool:
        """Whether launches, not the device, decided when the span ended."""
        return self._host_wait is not None and self._host_wait[row] > 0

    def of(self, row: int) -> int:
        """The span whose end let ``row`` start, or -1: the host had just issued it, or it starts the step.

        A collective starts when its last member arrives, so the cause may be another member's; a message may wait until
        its receiver takes it (or an earlier one, where buffers are bounded).
        """
        if self._told is not None:
            return self._told(row)
        start = self._start[row]
        own = self._ready(row)
        if own != NONE or start == 0:
            return own
        if self._kind[row] == _P2P:
            return self._receiver_ready(row)
        if self.communicates(row):
            return next((found for other in self._members(row) if (found := self._ready(other)) != NONE), NONE)
        return NONE

    def _ready(self, row: int) -> int:
        """The recorded predecessor, if its end is what ``row`` waited for."""
        before: int = self._predecessor[row]
        return before if before != NONE and self._end[before] == self._start[row] else NONE

    def _members(self, row: int) -> list[int]:
        """The spans of the other members of a collective: equal in time, kind, size and stream."""
        if self._meetings is None:
            self._meetings = defaultdict(list)
            for other in range(len(self._start)):
                if self.communicates(other):
                    self._meetings[self._meeting(other)].append(other)
        return self._meetings[self._meeting(row)]

    def _meeting(self, row: int) -> tuple[int, int, int, float, str]:
        stream = self._trace.lanes[self._lane[row]].stream
        nbytes = float(self._trace.spans.nbytes[row])
        return self._start[row], self._end[row], self._kind[row], nbytes, stream

    def _receiver_ready(self, row: int) -> int:
        """What the receiver of a message computed until the instant at which the message could leave."""
        if self._receivers is None or self._computed_until is None:
            self._receivers, self._computed_until = defaultdict(set), {}
            lanes = self._trace.lanes
            for other, before in enumerate(self._predecessor):
                rank = lanes[self._lane[other]].rank
                if before != NONE and self._kind[before] == _P2P and lanes[self._lane[before]].rank != rank:
                    self._receivers[self._lane[before]].add(rank)
                if lanes[self._lane[other]].stream == _COMPUTE:
                    self._computed_until[rank, self._end[other]] = other
        for rank in sorted(self._receivers.get(self._lane[row], ())):
            found = self._computed_until.get((rank, self._start[row]), NONE)
            if found != NONE:
                return found
        return NONE
