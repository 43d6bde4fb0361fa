"""Predicts measured runs with the ordinary engine, in as many processes as wanted."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from simpar.errors import SimparError
from simpar.framework.framework import Peak
from simpar.program.footprint import Footprint
from simpar.search.workers import processes
from simpar.simulation import simulate
from simpar.units import GIB
from simpar.validation.jobs import describe
from simpar.validation.runs import Run

_CHUNK = 8  # rows a worker takes at a time


@dataclass(frozen=True, slots=True)
class Prediction:
    """A run beside its prediction.

    Attributes:
        run: what was measured.
        predicted_s: step time; None if the row cannot be simulated.
        interval_s: 80 % interval of the step time.
        peak_bytes: predicted peak memory, as the framework of the run counts it (:func:`counted_peak_bytes`).
        refusal: why the row cannot be simulated.
        assumptions: what the source does not say and was assumed.
    """

    run: Run
    predicted_s: float | None = None
    interval_s: tuple[float, float] | None = None
    peak_bytes: int | None = None
    refusal: str = ""
    assumptions: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Predicted over measured time, minus one."""
        assert self.predicted_s is not None, "a refused row has no error"
        return self.predicted_s / self.run.step_time_s - 1.0

    @property
    def memory_error(self) -> float | None:
        """Predicted over measured peak memory, minus one; None where nothing was measured."""
        if self.run.peak_mem_gib is None or self.peak_bytes is None:
            return None
        return self.peak_bytes / (self.run.peak_mem_gib * GIB) - 1.0


def predict(run: Run) -> Prediction:
    """The prediction of one run; what cannot be simulated comes back with its reason."""
    try:
        job, assumptions = describe(run)
        result = simulate(job, allow_oom=True)
    except SimparError as error:
        return Prediction(run, refusal=" ".join(str(error).split()))
    return Prediction(
        run,
        predicted_s=result.step_time_s,
        interval_s=result.step_time_interval(0.8),
        peak_bytes=counted_peak_bytes(result.footprints, result.layout.framework.peak, job.cluster.device.memory_bytes),
        assumptions=assumptions,
    )


def counted_peak_bytes(footprints: Sequence[Footprint], peak: Peak, memory_bytes: int) -> int:
    """The peak that a framework's own figure shows.

    Published peaks are those of the framework's allocator, which does not see the driver's context. Some are those of
    rank 0, whichever rank is fullest. Some count what the allocator reserved; it gives back what no tensor is in
    before it fails.

    Args:
        footprints: of all ranks.
        peak: what the framework counts.
        memory_bytes: of the device.

    Returns:
        Bytes.
    """
    of = footprints if peak.of == "fullest" else [f for f in footprints if f.stage == 0]
    return max(_reserved_bytes(f, peak.fragmentation, memory_bytes) for f in of)


def _reserved_bytes(footprint: Footprint, fragmentation: float, memory_bytes: int) -> int:
    context = footprint.by_category.get("context", 0)
    allocated = footprint.peak_bytes - context
    reserved = allocated + round(fragmentation * footprint.by_category.get("activations", 0))
    return max(allocated, min(reserved, memory_bytes - context))


def predict_all(
    runs: Sequence[Run], *, workers: int | None = None, progress: Callable[[int], None] | None = None
) -> list[Prediction]:
    """Predictions of all runs, in their order.

    Args:
        runs: what was measured.
        workers: processes; None takes one per core, 1 stays in this one.
        progress: told after every row how many are done.
    """
    count = min(workers or os.cpu_count() or 1, len(runs))
    found: list[Prediction] = []
    if count <= 1:
        for prediction in map(predict, runs):
            found.append(prediction)
            if progress:
                progress(len(found))
        return found
    # a fresh interpreter: forking a process with threads (a progress bar has one) may deadlock
    with processes(count, "spawn") as pool:
        for prediction in _in_order(pool, runs):
            found.append(prediction)
            if progress:
                progress(len(found))
    return found


def _in_order(pool: Executor, runs: Sequence[Run]) -> Iterator[Prediction]:
    return pool.map(predict, runs, chunksize=_CHUNK)
