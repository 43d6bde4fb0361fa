"""Since when the host issued without a break, for spans that waited for it: a program tells what a trace does not."""

import numpy as np

from simpar.program.ir import Launch, Run
from simpar.sensitivity.blocks import Blocks
from simpar.sensitivity.prices import Prices
from simpar.sensitivity.steps import Steps
from simpar.trace.critical_path import Causes, HostStart
from simpar.trace.trace import NONE


def causes_of(steps: Steps, prices: Prices, blocks: Blocks) -> Causes:
    """What let the spans of a trace start, the host's waits for the device included."""
    return Causes(steps.trace, _Waits(steps, prices, blocks).began)


class _Waits:
    """The waits of the hosts, and when they ended."""

    def __init__(self, steps: Steps, prices: Prices, blocks: Blocks) -> None:
        self._steps = steps
        self._prices = prices
        self._blocks = blocks
        spans = steps.trace.spans
        self._start, self._end = spans.start_ns, spans.end_ns
        self._computed: dict[int, list[int]] = {}
        for row, step in enumerate(steps.of):
            if isinstance(step.instruction, (Run, Launch)):
                self._computed.setdefault(step.rank, []).append(row)

    def began(self, row: int) -> HostStart:
        """Since when the host of a span that waited for it issued without a break.

        All that the host issues after a wait is late by the same time. So the span's own lateness tells when the wait
        ended, and what ended then is what it waited for.
        """
        step = self._steps.of[row]
        launch_ns = self._prices.launch_ns
        late = self._issued(row) - step.launches * launch_ns
        if late <= 0:
            return HostStart()
        for wait in reversed(step.waits):
            time = late + wait.launches * launch_ns
            found = self._ended(time, step.rank, wait.computed)
            if found != NONE:
                return HostStart(time, found, wait.launches)
        return HostStart()

    def _issued(self, row: int) -> int:
        """When the host had issued the span, or began to if it is compute."""
        step = self._steps.of[row]
        if isinstance(step.instruction, Run):
            issued = self._blocks.issued(step.instruction.operation, self._prices.kind_of(step.rank))
            return int(self._end[row]) - issued.length_ns
        own = step.instruction.launches if isinstance(step.instruction, Launch) else 0
        return int(self._start[row]) - own * self._prices.launch_ns

    def _ended(self, time: int, rank: int, computed: int) -> int:
        """What ended at an instant: what the rank computed last, else whatever its compute stream waited for."""
        mine = self._computed.get(rank, [])
        if 0 < computed <= len(mine) and self._end[mine[computed - 1]] == time:
            return mine[computed - 1]
        ended = np.flatnonzero(self._end == time).tolist()
        own = [row for row in ended if self._steps.of[row].rank == rank]
        return int((own or ended or [NONE])[0])
