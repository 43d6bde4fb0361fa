"""Noise of compute: gives the steps of a rank the time that they take this once."""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from simpar.engine.gpu import RunStep, Step
from simpar.engine.price import BlockPrice, IntArray, OperationPrice
from simpar.engine.rows import KIND, Label, OpenedRun, Recorder
from simpar.faults.description import Faults
from simpar.faults.noise import JITTER, lognormal
from simpar.trace.trace import NONE

_OPTIMIZER = KIND["optimizer"]
_DIGITS = 3  # of a factor, so that operations of equal factors share their price


class Noise:
    """The jitter of one step.

    Args:
        faults: with the jitter and its seed.
        launch_ns: one call of the host.
    """

    def __init__(self, faults: Faults, launch_ns: int) -> None:
        self._jitter = faults.jitter
        self._seed = faults.seed
        self._launch_ns = launch_ns
        self._blocks: dict[tuple[int, float], BlockPrice] = {}
        self._prices: dict[tuple[int, float], OperationPrice] = {}

    def disturbed(self, rank: int, steps: Sequence[Step], recorder: Recorder) -> list[Step]:
        """The steps of a rank's compute stream, each computation with its noise.

        Args:
            rank: who; its draws do not depend on those of others.
            steps: as they are without noise.
            recorder: of the run; it knows labels, and the runs that are simulated kernel by kernel.
        """
        labels = recorder.labels
        drawers: list[Hashable] = []
        updates = 0  # of the optimizer: where a program has several steps, each has noise of its own
        for number, step in enumerate(steps):
            updates += isinstance(step, RunStep) and labels[step.task.label].kind == _OPTIMIZER
            drawers.append(self._drawer(number, updates, step, recorder.opened, labels))
        numbers = {drawer: i for i, drawer in enumerate(dict.fromkeys(d for d in drawers if d is not None))}
        factors = lognormal(1.0, self._jitter.spread, len(numbers), key=(self._seed, JITTER, rank)).round(_DIGITS)
        return [
            self._stretched(step, float(factors[numbers[drawer]])) if isinstance(step, RunStep) else step
            for step, drawer in zip(steps, drawers, strict=True)
        ]

    def _drawer(
        self, number: int, updates: int, step: Step, opened: Sequence[OpenedRun], labels: Sequence[Label]
    ) -> Hashable:
        """What shares a factor with this step; None for what takes no time."""
        if not isinstance(step, RunStep):
            return None
        label, microbatch, chunk = labels[step.task.label], step.microbatch, step.chunk
        if step.opened != NONE:
            label, microbatch, chunk = opened[step.opened]
        if self._jitter.per == "kernel" or microbatch == NONE:
            return number
        return (updates, label.kind, microbatch, chunk)

    def _stretched(self, step: RunStep, factor: float) -> RunStep:
        task = step.task
        if task.price is None:
            gpu_ns = round(task.gpu_ns * factor)
            return step._replace(task=task._replace(gpu_ns=gpu_ns, host_ns=task.host_ns - task.gpu_ns + gpu_ns))
        key = (id(task.price), factor)
        price = self._prices.get(key)
        if price is None:
            blocks = tuple(self._block(block, factor) for block in task.price.blocks)
            price = self._prices[key] = OperationPrice(blocks, task.price.layers)
        return step._replace(task=task._replace(gpu_ns=price.gpu_ns, host_ns=price.host_ns, price=price))

    def _block(self, block: BlockPrice, factor: float) -> BlockPrice:
        """A block whose kernels all take ``factor`` times as long; it has no collectives.

        Issued long ago, it takes ``factor`` times as long. Bound by launches, it ends no earlier than its work after
        the first launch, and than before but for what it saves: exact where it is bound by either throughout.
        """
        found = self._blocks.get((id(block), factor))
        if found is None:
            gpu_ns = round(block.gpu_ns * factor)
            saved = max(block.gpu_ns - gpu_ns, 0)
            start, end = (_scaled(times, factor) for times in (block.gpu_start_ns, block.gpu_end_ns))
            found = self._blocks[id(block), factor] = replace(
                block,
                gpu_ns=gpu_ns,
                host_ns=max(self._launch_ns + gpu_ns, block.host_ns - saved),
                busy_ns=_scaled_parts(block.busy_ns, factor),
                exposed_ns=round(block.exposed_ns * factor),
                gpu_start_ns=start,
                gpu_end_ns=end,
                host_start_ns=np.maximum(block.host_start_ns - saved, start + self._launch_ns),
                host_end_ns=np.maximum(block.host_end_ns - saved, end + self._launch_ns),
            )
        return found


def _scaled_parts(parts: tuple[tuple[int, int], ...], factor: float) -> tuple[tuple[int, int], ...]:
    """Parts that follow each other: sums are rounded, so that they add up to what all of them take."""
    sums = np.cumsum([0, *(busy for _, busy in parts)])
    busy = np.diff(_scaled(sums, factor)).tolist()
    return tuple(zip((kind for kind, _ in parts), busy, strict=True))


def _scaled(times: IntArray, factor: float) -> IntArray:
    # edges are rounded, not lengths, so that neighbours never overlap
    scaled: IntArray = np.rint(times * factor).astype(np.int64)
    return scaled
