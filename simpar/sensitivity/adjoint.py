"""From the end of the step back to its beginning: by how much each cost on the way moves the end.

The chain of causes is that of the critical path. Where a collective slows compute beside it, the end of the compute
also depends on when the collective began and ended, so the way branches there and carries fractions. With w the work
of an operation and r_k its rate in the k-th stretch between instants t_k, from its start t_0 = s to its end t_m = e,

    w = Σ r_k (t_k+1 - t_k),  so  de = [dw + r_0 ds + Σ (r_k - r_k-1) dt_k - Σ dr_k (t_k+1 - t_k)] / r_m-1.

Approximations: a transfer that others slow down is taken to be slowed by the same factor after a small change, and so
is an operation whose own collectives share links with other streams.
"""

import heapq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from simpar.program.ir import COMPUTE, Collective, Launch, Run, Send
from simpar.sensitivity.prices import Prices, Transfer, Weights, transfer_of
from simpar.sensitivity.steps import Steps
from simpar.sensitivity.waits import causes_of
from simpar.trace.trace import NONE

K = TypeVar("K")
_NEGLIGIBLE = 1e-9  # of the step's own weight 1
_START, _END = 0, 1  # at one instant, starts come first on the way back


def weigh(steps: Steps, prices: Prices) -> Weights:
    """The weights of all costs, by which the step time depends on them to first order.

    Args:
        steps: program and trace.
        prices: on the machine of the trace.
    """
    return _Walk(steps, prices).run()


@dataclass(frozen=True, slots=True)
class _Beside:
    """A collective of the same rank: its row, when it ran, and how hard it works the device."""

    row: int
    start_ns: int
    end_ns: int
    transfer: Transfer
    intensity: float


@dataclass
class _Walk:
    """One walk from the end of the step to its beginning."""

    steps: Steps
    prices: Prices
    weights: Weights = field(default_factory=Weights)

    def __post_init__(self) -> None:
        trace = self.steps.trace
        self._causes = causes_of(self.steps, self.prices)
        self._start, self._end = trace.spans.start_ns.tolist(), trace.spans.end_ns.tolist()
        self._pending: dict[tuple[int, int, int], float] = {}
        self._queue: list[tuple[int, int, int]] = []
        self._beside: dict[int, list[_Beside]] = {}
        for row, step in enumerate(self.steps.of):
            if isinstance(step.instruction, Collective):
                transfer = transfer_of(step.instruction, step.rank)
                found = _Beside(row, self._start[row], self._end[row], transfer, self.prices.intensity(transfer))
                self._beside.setdefault(step.rank, []).append(found)
        self.prices.ask(
            self.prices.place(step.instruction.operation, step.rank)
            for step in self.steps.of
            if isinstance(step.instruction, Run)
        )

    def run(self) -> Weights:
        """Walks."""
        if self._end:
            self._push(_END, max(range(len(self._end)), key=lambda row: (self._end[row], -row)), 1.0)
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
        step = self.steps.of[row]
        own = step.instruction.launches if isinstance(step.instruction, Launch) else 0
        began = self._causes.host(row)
        self.weights.launches += weight * (step.launches + own - began.launches)
        if began.row != NONE:
            self._push(_END, began.row, weight)

    def _through_transfer(self, row: int, weight: float) -> None:
        step = self.steps.of[row]
        assert isinstance(step.instruction, (Collective, Send)), "other streams than compute carry only these"
        transfer = transfer_of(step.instruction, step.rank)
        alone, latency = self.prices.transfer_ns(transfer), self.prices.latency_ns(transfer)
        took = self._end[row] - self._start[row]
        stretch = (took - latency) / (alone - latency) if alone > latency else 1.0
        _add(self.weights.transfers, transfer, weight * stretch)
        _add(self.weights.latencies, transfer, weight * (1.0 - stretch))
        self._push(_START, row, weight)

    def _through_compute(self, row: int, weight: float) -> None:
        step = self.steps.of[row]
        instruction = step.instruction
        if self._causes.waits_for_host(row):
            assert isinstance(instruction, Run), "only operations wait for the host within their span"
            _add(self.weights.hosted, self.prices.place(instruction.operation, step.rank), weight)
            self._to_host(row, weight)
            return
        done, last = self._through_stretches(row, step.rank, weight)
        if isinstance(instruction, Run):
            placed = self.prices.place(instruction.operation, step.rank)
            base = self.prices.device_ns(placed)
            _add(self.weights.device, placed, weight / last * (done / base if base else 1.0))
        else:
            assert isinstance(instruction, Launch), "a compute stream executes operations and kernels"
            kind = self.prices.kind_of(step.rank)
            base = self.prices.kernel_ns(instruction.kernel, kind)
            _add(self.weights.kernels, (instruction.kernel, kind), weight / last * (done / base if base else 1.0))

    def _through_stretches(self, row: int, rank: int, weight: float) -> tuple[float, float]:
        """Books what depends on collectives beside the row; returns the work done and the last rate."""
        start, end = self._start[row], self._end[row]
        beside = [b for b in self._beside.get(rank, ()) if b.start_ns < end and b.end_ns > start]
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
