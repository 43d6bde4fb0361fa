"""From the end of the step back to its beginning: by how much each cost on the way moves the end.

The chain of causes is that of the critical path. Where a collective slows compute beside it, the end of the compute
also depends on when the collective began and ended, so the way branches there and carries fractions. With w the work
of an operation and r_k its rate in the k-th stretch between instants t_k, from its start t_0 = s to its end t_m = e,

    w = Σ r_k (t_k+1 - t_k),  so  de = [dw + r_0 ds + Σ (r_k - r_k-1) dt_k - Σ dr_k (t_k+1 - t_k)] / r_m-1.

So it is where a transfer shares links with others: s is then when its latency is over, and 1/r_k the time that it would
stream in the company of the k-th stretch (:mod:`simpar.sensitivity.shares`).

This is the derivative, exact where no two instants tie (there it is that of one side, or between both). Such changes
may add up: one flow ends later, so another is slower, and so on. Where hundreds of flows go their own ways (workers
that do not wait for each other on a graph with few links) costs may cancel to many times the step, and the derivative
says nothing of a change of 1 %, since flows soon begin and end in another order. For these jobs flows may be taken as
*steady*: with what slows them, their stretches grow in proportion. That is an estimate that adds up to the step, too.

Approximations: where collectives slow an operation of many kernels, all of its kernels count as slowed alike; and what
slows a transfer beyond its company (compute beside it, a fault) is taken to slow it by the same factor after a small
change.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from typing import TypeVar

from simpar.program.ir import COMPUTE, Collective, Launch, Operation, Run
from simpar.sensitivity.blocks import Blocks
from simpar.sensitivity.ends import last_end
from simpar.sensitivity.flows import Carried, Flows, Stretch
from simpar.sensitivity.prices import Prices, Transfer, Weights, transfer_of
from simpar.sensitivity.shares import Pace
from simpar.sensitivity.steps import Steps
from simpar.sensitivity.waits import causes_of
from simpar.trace.trace import NONE

K = TypeVar("K")
_NEGLIGIBLE = 1e-9  # of the step's own weight 1
_START, _END = 0, 1  # at one instant, starts come first on the way back


def weigh(
    steps: Steps, prices: Prices, blocks: Blocks, ends: Mapping[int, float] | None = None, *, steady: bool = False
) -> Weights:
    """The weights of all costs, by which ends of spans depend on them to first order.

    Args:
        steps: program and trace.
        prices: on the machine of the trace.
        blocks: run there alone.
        ends: rows with the weights of their ends; None is the end of the trace.
        steady: flows keep their order; see above.
    """
    return _Walk(steps, prices, _Parts(prices, blocks), steady).run(last_end(steps) if ends is None else ends)


@dataclass
class _Parts:
    """How operations depend on the costs of their parts: that of their blocks, each of which is walked like a step."""

    prices: Prices
    blocks: Blocks
    _device: dict[tuple[Operation, int], Weights] = field(default_factory=dict)
    _alone: dict[int, Weights] = field(default_factory=dict)

    def device(self, operation: Operation, kind: int, first: int = 0) -> Weights:
        """Of the blocks from the ``first`` on, issued long ago."""
        total = Weights()
        for block in operation.blocks[first:]:
            total.add(self._weights(self.blocks.alone(block, kind, hosted=False)), 1.0)
        return total

    def whole(self, operation: Operation, kind: int) -> Weights:
        """Of all blocks, issued long ago."""
        if (operation, kind) not in self._device:
            self._device[operation, kind] = self.device(operation, kind)
        return self._device[operation, kind]

    def issued(self, operation: Operation, kind: int) -> Weights:
        """Of an operation whose end its launches decide, from the first of them on."""
        issued = self.blocks.issued(operation, kind)
        total = self.device(operation, kind, issued.block + 1)
        total.launches += issued.launches
        total.add(self._weights(self.blocks.alone(operation.blocks[issued.block], kind, hosted=True)), 1.0)
        return total

    def _weights(self, steps: Steps) -> Weights:
        found = self._alone.get(id(steps))
        if found is None:
            found = self._alone[id(steps)] = _Walk(steps, self.prices, self).run(last_end(steps))
        return found


@dataclass(frozen=True, slots=True)
class _Beside:
    """A collective of the same rank: its row, when it ran, and how hard it works the device."""

    row: int
    start_ns: int
    end_ns: int
    transfer: Transfer
    intensity: float


_start_of, _end_of = attrgetter("start_ns"), attrgetter("end_ns")


@dataclass
class _Walk:
    """One walk from the end of the step to its beginning."""

    steps: Steps
    prices: Prices
    parts: _Parts
    steady: bool = False
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        trace = self.steps.trace
        self._causes = causes_of(self.steps, self.prices, self.parts.blocks)
        self._start, self._end = trace.spans.start_ns.tolist(), trace.spans.end_ns.tolist()
        self._pending: dict[tuple[int, int, int], float] = {}
        self._queue: list[tuple[int, int, int]] = []
        self._collectives: dict[int, dict[str, list[_Beside]]] = {}  # by rank and stream, in order
        for row, step in enumerate(self.steps.of):
            if isinstance(step.instruction, Collective):
                transfer = transfer_of(step.instruction, step.rank)
                found = _Beside(row, self._start[row], self._end[row], transfer, self.prices.intensity(transfer))
                self._collectives.setdefault(step.rank, {}).setdefault(transfer.stream, []).append(found)

    @cached_property
    def _flows(self) -> Flows:
        return Flows(self.steps, self.prices)

    def run(self, ends: Mapping[int, float]) -> Weights:
        """Walks from the ends of these rows, with these weights."""
        for row, weight in ends.items():
            self._push(_END, row, weight)
        while self._queue:
            key = heapq.heappop(self._queue)
            weight = self._pending.pop(key)
            if abs(weight) < _NEGLIGIBLE:
                continue
            _, side, row = key
            if side == _START:
                self._to_cause(row, weight)
            elif self.steps.trace.lanes[self.steps.trace.spans.lane[row]].stream == COMPUTE:
                self._through_compute(row, weight)
            else:
                self._through_transfer(row, weight)
        return self.weights

    def _push(self, side: int, row: int, weight: float) -> None:
        time = self._end[row] if side == _END else self._start[row]
        key = (-time, side, row)
        if key not in self._pending:
            heapq.heappush(self._queue, key)
            self._pending[key] = 0.0
        self._pending[key] += weight

    def _to_cause(self, row: int, weight: float) -> None:
        if self._start[row] == 0:
            return
        cause = self._causes.of(row)
        if cause != NONE:
            self._push(_END, cause, weight)
            return
        self._to_host(row, weight)

    def _to_host(self, row: int, weight: float) -> None:
        """The host's calls since it last waited for the device, and what it waited for."""
        began = self._causes.host(row)
        self.weights.launches += weight * began.calls
        if began.row != NONE:
            self._push(_END, began.row, weight)

    def _through_transfer(self, row: int, weight: float) -> None:
        own = self._flows.of(row)
        if own.begin_ns >= own.end_ns:
            self._begin(own, weight)
            return
        parts = self._flows.stretches(row)
        if self.steady:
            for part in parts:
                self._at_pace(part.pace, weight * (part.end_ns - part.begin_ns) / part.pace.streaming_ns)
            self._begin(own, weight)
            return
        last = parts[-1].pace.streaming_ns
        for part in parts:
            self._at_pace(part.pace, weight * last * (part.end_ns - part.begin_ns) / part.pace.streaming_ns**2)
        for before, behind in pairwise(parts):
            change = last / behind.pace.streaming_ns - last / before.pace.streaming_ns
            if change:
                self._to_company(before, behind, weight * change)
        self._begin(own, weight * last / parts[0].pace.streaming_ns)

    def _at_pace(self, pace: Pace, weight: float) -> None:
        for transfer, share in pace.streams.items():
            _add(self.weights.streams, transfer, weight * share)
        for way, share in pace.links.items():
            _add(self.weights.links, way, weight * share)

    def _begin(self, carried: Carried, weight: float) -> None:
        """A flow begins when its transfer's latency is over."""
        _add(self.weights.latencies, carried.flow.transfer, weight)
        self._push(_START, carried.row, weight)

    def _to_company(self, before: Stretch, after: Stretch, change: float) -> None:
        """A speed that changes because other flows begin or end: the change is theirs, in equal shares."""
        begins, ends = self._flows.changes(after.begin_ns, before.company, after.company)
        for other in begins:
            self._begin(other, change / (len(begins) + len(ends)))
        for other in ends:
            self._push(_END, other.row, change / (len(begins) + len(ends)))

    def _through_compute(self, row: int, weight: float) -> None:
        step = self.steps.of[row]
        instruction, kind = step.instruction, self.prices.kind_of(step.rank)
        if self._causes.waits_for_host(row):
            assert isinstance(instruction, Run), "only operations wait for the host within their span"
            self.weights.add(self.parts.issued(instruction.operation, kind), weight)
            self._to_host(row, weight)
            return
        done, last = self._through_stretches(row, step.rank, weight)
        if isinstance(instruction, Run):
            base = self.parts.blocks.device_ns(instruction.operation, kind)
            stretched = done / base if base else 1.0
            self.weights.add(self.parts.whole(instruction.operation, kind), weight / last * stretched)
        else:
            assert isinstance(instruction, Launch), "a compute stream executes operations and kernels"
            base = self.prices.kernel_ns(instruction.kernel, kind)
            _add(self.weights.kernels, (instruction.kernel, kind), weight / last * (done / base if base else 1.0))

    def _beside(self, row: int, rank: int) -> list[_Beside]:
        """The collectives of a rank during a span."""
        start, end = self._start[row], self._end[row]
        return [
            each
            for mine in self._collectives.get(rank, {}).values()
            for each in mine[bisect_right(mine, start, key=_end_of) : bisect_left(mine, end, key=_start_of)]
        ]

    def _through_stretches(self, row: int, rank: int, weight: float) -> tuple[float, float]:
        """Books what depends on collectives beside the row; returns the work done and the last rate."""
        start, end = self._start[row], self._end[row]
        beside = self._beside(row, rank)
        kind = self.prices.kind_of(rank)
        slow = 1.0 - self.prices.compute_rate(kind)
        if not beside or not slow:
            self._push(_START, row, weight)
            return float(end - start), 1.0
        edges = sorted({start, end, *(t for b in beside for t in (b.start_ns, b.end_ns) if start < t < end)})
        stretches = []
        for first, then in pairwise(edges):
            running = [b for b in beside if b.start_ns < then and b.end_ns > first]
            stretches.append((first, then, running, sum(b.intensity for b in running)))
        rates = [1.0 - slow * min(total, 1.0) for *_, total in stretches]
        last = rates[-1]
        for first, then, running, total in stretches:
            _add(self.weights.rates, kind, -weight / last * min(total, 1.0) * (then - first))
            if total < 1.0:
                for b in running:
                    _add(self.weights.intensities, b.transfer, weight / last * slow * (then - first))
        for number in range(1, len(stretches)):
            self._to_edge(stretches[number][0], beside, weight / last * (rates[number] - rates[number - 1]))
        self._push(_START, row, weight / last * rates[0])
        return sum(rate * (then - first) for rate, (first, then, *_) in zip(rates, stretches, strict=True)), last

    def _to_edge(self, time: int, beside: list[_Beside], change: float) -> None:
        """A rate that changes because collectives begin or end: the change is theirs, in equal shares."""
        edges = [(_START, b.row) for b in beside if b.start_ns == time]
        edges += [(_END, b.row) for b in beside if b.end_ns == time]
        for side, row in edges:
            self._push(side, row, change / len(edges))


def _add(totals: dict[K, float], key: K, value: float) -> None:
    totals[key] = totals.get(key, 0.0) + value
