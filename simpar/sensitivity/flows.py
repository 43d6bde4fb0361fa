"""How fast transfers stream while others share their links: read off the trace, by the network's own rule.

A flow begins when the latency of its transfer is over. From then on its rate changes only when flows begin or end that
share with it links which want more than they can carry, directly or through others.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from simpar.program.ir import Collective, Group, HostWork, Send
from simpar.sensitivity.prices import Flow, Prices, transfer_of
from simpar.sensitivity.shares import Pace, Shares
from simpar.sensitivity.steps import Steps

_SLACK = 1 + 1e-9  # as the network has it


class Carried(NamedTuple):
    """A flow in the trace: the span of its transfer (a collective's first member's), and when it streamed."""

    row: int
    flow: Flow
    begin_ns: int
    end_ns: int


class Stretch(NamedTuple):
    """A time in which a flow has the same company, and its pace there."""

    begin_ns: int
    end_ns: int
    company: frozenset[int]
    pace: Pace


class Flows:
    """All flows of a trace.

    Args:
        steps: program and trace.
        prices: on the machine of the trace.
    """

    def __init__(self, steps: Steps, prices: Prices) -> None:
        self._shares = Shares(prices)
        self._prices = prices
        self._all: list[Carried] = []
        self._of: dict[int, int] = {}  # row -> number of its flow
        self._begin: defaultdict[int, list[int]] = defaultdict(list)  # instant -> numbers of flows
        self._end: defaultdict[int, list[int]] = defaultdict(list)
        start, end = steps.trace.spans.start_ns.tolist(), steps.trace.spans.end_ns.tolist()
        for rows, flow in _flows(steps):
            carried = Carried(rows[0], flow, start[rows[0]] + prices.cost(flow).latency_ns, end[rows[0]])
            self._of.update(dict.fromkeys(rows, len(self._all)))
            if carried.begin_ns < carried.end_ns:
                self._begin[carried.begin_ns].append(len(self._all))
                self._end[carried.end_ns].append(len(self._all))
            self._all.append(carried)

    def of(self, row: int) -> Carried:
        """The flow of a transfer's span."""
        return self._all[self._of[row]]

    def stretches(self, row: int) -> list[Stretch]:
        """The times in which the flow of a span had the same company, from its beginning to its end."""
        number = self._of[row]
        courses = [*self._courses[number], (self._all[number].end_ns, frozenset[int]())]
        return [
            Stretch(begin, end, company, self._pace(number, company))
            for (begin, company), (end, _) in pairwise(courses)
        ]

    def changes(
        self, time_ns: int, before: frozenset[int], after: frozenset[int]
    ) -> tuple[list[Carried], list[Carried]]:
        """Flows that begin, and flows that end, where one company becomes another."""
        begins = [self._all[number] for number in self._begin.get(time_ns, ()) if number in after]
        return begins, [self._all[number] for number in self._end.get(time_ns, ()) if number in before]

    def _pace(self, number: int, company: frozenset[int]) -> Pace:
        return self._shares.pace(self._all[number].flow, tuple(self._all[other].flow for other in sorted(company)))

    @cached_property
    def _courses(self) -> dict[int, list[tuple[int, frozenset[int]]]]:
        """Per flow, the instants from which on it had which company (itself included)."""
        courses: dict[int, list[tuple[int, frozenset[int]]]] = {}
        links = _Links()
        for time in sorted({*self._begin, *self._end}):
            touched: dict[int, None] = {}
            for number in self._end.get(time, ()):
                touched.update(links.beside(number))
                links.remove(number)
            for number in self._begin.get(time, ()):
                links.add(number, self._wanted(self._all[number].flow))
                touched[number] = None
            for number in self._begin.get(time, ()):
                touched.update(links.beside(number))
            seen: set[int] = set()
            for number in touched:
                if number not in seen and links.has(number):
                    company = links.company(number)
                    seen |= company
                    for member in company:
                        courses.setdefault(member, []).append((time, company))
        return courses

    def _wanted(self, flow: Flow) -> dict[str, float]:
        """Share of each link that a flow would take alone."""
        cost = self._prices.cost(flow)
        found: dict[str, float] = {}
        for link, nbytes, _ in cost.loads:
            share = nbytes / (cost.stream_ns * 1e-9 * link.capacity_bytes_per_s)
            found[link.name] = found.get(link.name, 0.0) + share
        return found


class _Links:
    """Who streams at an instant, and which links want more than they can carry."""

    def __init__(self) -> None:
        self._wanted: dict[int, dict[str, float]] = {}
        self._on: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._full: set[str] = set()

    def has(self, number: int) -> bool:
        """Whether a flow streams."""
        return number in self._wanted

    def add(self, number: int, wanted: dict[str, float]) -> None:
        """A flow begins."""
        self._wanted[number] = wanted
        for link, share in wanted.items():
            self._on[link][number] = share
        self._look_at(wanted)

    def remove(self, number: int) -> None:
        """A flow ends."""
        wanted = self._wanted.pop(number)
        for link in wanted:
            del self._on[link][number]
        self._look_at(wanted)

    def beside(self, number: int) -> Iterator[tuple[int, None]]:
        """Flows on full links of a flow, itself included."""
        for link in self._wanted[number]:
            if link in self._full:
                yield from dict.fromkeys(self._on[link]).items()

    def company(self, number: int) -> frozenset[int]:
        """A flow, and all that full links connect it with."""
        found, queue = {number}, [number]
        while queue:
            for other, _ in self.beside(queue.pop()):
                if other not in found:
                    found.add(other)
                    queue.append(other)
        return frozenset(found)

    def _look_at(self, links: Iterable[str]) -> None:
        for link in links:
            if sum(self._on[link].values()) > _SLACK:
                self._full.add(link)
            else:
                self._full.discard(link)


def _flows(steps: Steps) -> Iterator[tuple[Sequence[int], Flow]]:
    """Flows with their spans; a collective is one flow of all members that are simulated."""
    meetings: dict[tuple[Group, int], list[int]] = {}
    for row, step in enumerate(steps.of):
        instruction = step.instruction
        if isinstance(instruction, Collective):
            meetings.setdefault((instruction.group, step.turn), []).append(row)
        elif isinstance(instruction, (Send, HostWork)):
            yield [row], Flow(transfer_of(instruction, step.rank))
    for rows in meetings.values():
        first = steps.of[rows[0]]
        assert isinstance(first.instruction, Collective), "only collectives have meetings"
        members = tuple(sorted(steps.of[row].rank for row in rows))
        yield rows, Flow(transfer_of(first.instruction, first.rank), members)
