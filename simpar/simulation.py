"""From a job to its result: lay out, lower, check memory, run."""

import gc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from simpar.cost.kernel import extrapolated, kernel_s
from simpar.engine.simulate import execute
from simpar.errors import DoesNotFitError, PlanError
from simpar.job import Job
from simpar.model.transformer import Transformer
from simpar.plan.layout import Layout, lay_out
from simpar.plan.plan import Plan
from simpar.program.footprint import Footprint, footprints
from simpar.program.ir import Launch, Program
from simpar.program.lower import lower
from simpar.program.work import block_runs, recomputed_share
from simpar.result import Result
from simpar.trace.trace import Trace
from simpar.units import format_bytes

_NEARLY_FULL = 0.9
_LAUNCH_BOUND = 0.05
_NOTABLE = 0.02  # share of compute time below which extrapolated kernels do not matter


def simulate(job: Job | dict[str, Any], *, allow_oom: bool = False, fold: bool = True) -> Result:
    """Simulates one training step.

    Args:
        job: the job, or its fields.
        allow_oom: simulate also a job that does not fit its devices.
        fold: let one replica stand for all equal ones; switched off, every rank is simulated, with the same result.

    Raises:
        PlanError: the plan breaks a rule of model or cluster.
        DoesNotFitError: the job needs more memory than a device has.
        pydantic.ValidationError: a field of the job is wrong.

    >>> result = simulate(dict(model="llama3-8b", cluster="h100-sxm:1x8", plan=dict(tp=8, zero=1)))
    >>> result.fits
    True
    """
    job = Job.model_validate(job)
    layout = lay_out(job.plan, job.model, job.cluster)
    with _collector_paused():
        program = lower(job.model, job.cluster, layout, fold=fold)
        memory = footprints(program)
        if not allow_oom:
            _check_fit(job, memory)
        trace = execute(program, job.cluster)
    share = recomputed_share(program)
    return Result(job, layout, trace, memory, share, tuple(_warnings(job, layout, program, memory, trace)))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pauses Python's cycle collector: the objects of a step all live on, and rescanning them doubles its cost."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:
            # freezing and thawing makes young objects old without looking at them: no scan right after the run either
            gc.freeze()
            gc.unfreeze()
        gc.enable()


def _check_fit(job: Job, memory: tuple[Footprint, ...]) -> None:
    capacity = job.cluster.device.memory_bytes
    worst = max(memory, key=lambda f: f.peak_bytes)
    if worst.peak_bytes <= capacity:
        return
    parts = sorted(worst.by_category.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts[:3])
    raise DoesNotFitError(
        f"stage {worst.stage} needs {format_bytes(worst.peak_bytes)} ({shown}), but {job.cluster.device.name} has "
        f"{format_bytes(capacity)}; {_what_fits(job)}, or simulate it anyway with allow_oom (--allow-oom)"
    )


def _what_fits(job: Job) -> str:
    """Up to three changes of the plan that make the job fit, smallest first."""
    fitting = []
    for change in _relief(job.plan):
        try:
            plan = job.plan.replace(**change)
            layout = lay_out(plan, job.model, job.cluster)
            peak = max(f.peak_bytes for f in footprints(lower(job.model, job.cluster, layout)))
        except (PlanError, ValueError):
            continue  # this change breaks another rule
        if peak <= job.cluster.device.memory_bytes:
            shown = " ".join(
                f"{name}={value}" if value is not None else f"without {name}"
                for name, value in change.items()
                if value is not None or getattr(job.plan, name) is not None
            )
            fitting.append(f"{shown} ({format_bytes(peak)})")
        if len(fitting) == 3:
            break
    return (
        f"what would fit: {'; '.join(fitting)}"
        if fitting
        else "none of the usual changes of the plan would fit; use more GPUs"
    )


def _relief(plan: Plan) -> Iterator[dict[str, Any]]:
    """Changes that save memory, roughly by what they cost in time."""
    if plan.dp_shard is not None:
        yield {"dp_shard": None}
    if plan.zero < 1:
        yield {"zero": 1}
    if plan.recompute == "none":
        yield {"recompute": "selective"}
    smaller = [n for n in range(plan.micro_batch // 2, 0, -1) if plan.micro_batch % n == 0]
    for micro_batch in smaller:
        # as many samples as before
        more = None if plan.global_batch is not None else (plan.grad_accum or 1) * (plan.micro_batch // micro_batch)
        yield {"micro_batch": micro_batch, "grad_accum": more}
        if micro_batch == 1 and plan.recompute != "full":
            yield {"micro_batch": 1, "grad_accum": more, "recompute": "full"}
    if plan.tp > 1 and not plan.sequence_parallel:
        yield {"sequence_parallel": True}
    if plan.recompute != "full":
        yield {"recompute": "full", "zero": max(plan.zero, 1)}
    for zero in (2, 3):
        if plan.zero < zero:
            yield {"zero": zero}
    for factor in (2, 4, 8, 16):
        yield {
            "tp": plan.tp * factor,
            "sequence_parallel": True,
            "dp": None,
            "dp_shard": None,
            "zero": max(plan.zero, 1),
        }
        yield {"pp": plan.pp * factor, "dp": None, "dp_shard": None, "zero": max(plan.zero, 1)}
        yield {
            "tp": min(plan.tp * factor, 8),
            "pp": plan.pp * factor,
            "sequence_parallel": True,
            "dp": None,
            "dp_shard": None,
            "zero": max(plan.zero, 1),
            "recompute": "full",
        }
    yield {"zero": 3, "recompute": "full"}


def _warnings(job: Job, layout: Layout, program: Program, memory: tuple[Footprint, ...], trace: Trace) -> Iterator[str]:
    plan, cluster, device = layout.plan, job.cluster, job.cluster.device
    peak = max(f.peak_bytes for f in memory)
    if peak > device.memory_bytes:
        yield (
            f"does not fit: needs {format_bytes(peak)} of {format_bytes(device.memory_bytes)}; "
            "the step time is hypothetical"
        )
    elif peak > _NEARLY_FULL * device.memory_bytes:
        yield (
            f"memory is {peak / device.memory_bytes:.0%} full; allocators fragment above {_NEARLY_FULL:.0%}, "
            "so it may run out of memory or slow down"
        )
    if plan.tp > cluster.gpus_per_node:
        yield (
            f"tp {plan.tp} spans nodes of {cluster.gpus_per_node} GPUs; "
            "its collectives go over the network in every layer"
        )
    waiting = _longest_host_wait_s(trace)
    if trace.step_ns and waiting > _LAUNCH_BOUND * trace.step_s:
        yield (
            f"launch-bound: the device waits for the host {waiting / trace.step_s:.0%} of the step "
            f"({layout.launch_s * 1e6:.3g} µs per kernel launch); CUDA graphs or compilation would help"
        )
    if isinstance(job.model, Transformer) and job.model.note:
        yield job.model.note
    yield from _extrapolations(job, program)


def _longest_host_wait_s(trace: Trace) -> float:
    if trace.details is None or not len(trace.spans):
        return 0.0
    return float(np.bincount(trace.spans.lane, weights=trace.details.host_wait_ns).max()) * 1e-9


def _extrapolations(job: Job, program: Program) -> Iterator[str]:
    """Kernels outside what was measured, by reason, where they make up a share of compute that matters."""
    device = job.cluster.device
    runs = block_runs(program)
    time_s: defaultdict[Launch, float] = defaultdict(float)
    for block, count in runs.items():
        for launch in block.body:
            if isinstance(launch, Launch):
                time_s[launch] += kernel_s(launch.kernel, device) * count
    total = sum(time_s.values())
    if device.fit_from is not None:
        yield f"{device.name} was not measured: its kernels are assumed to do as well as those of {device.fit_from}"
        return
    reasons: dict[str, defaultdict[str, float]] = {}
    for launch, spent in time_s.items():
        reason = extrapolated(launch.kernel, device)
        if reason:
            reasons.setdefault(reason, defaultdict(float))[launch.name] += spent
    for reason, names in reasons.items():
        share = sum(names.values()) / total
        if share > _NOTABLE:
            shown = ", ".join(sorted(names, key=lambda name: -names[name])[:4])
            yield f"{share:.0%} of compute time is extrapolated ({reason}): {shown}"
