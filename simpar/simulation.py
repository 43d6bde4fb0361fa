"""From a job to its result: lay out, lower, check memory, run."""

import gc
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np

from simpar.cost.kernel import extrapolated, kernel_s, runnable
from simpar.description import Description
from simpar.engine.simulate import execute
from simpar.errors import DoesNotFitError, FieldPath, JobError, ModelError, PlanError
from simpar.faults.description import Faults
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import device_names
from simpar.job import Job
from simpar.model.layer import MOST_LAYERS
from simpar.model.presets import preset, preset_names
from simpar.model.transformer import Transformer
from simpar.plan.layout import Layout, lay_out
from simpar.plan.samples import StepSamples
from simpar.problems import shown
from simpar.program.fold import simulated
from simpar.program.footprint import Footprint, footprints, fullest, host_bytes
from simpar.program.ir import Launch, Program
from simpar.program.lower import lower
from simpar.program.relief import fitting, usual_changes
from simpar.program.work import block_runs, recomputed_share
from simpar.result import Result
from simpar.trace.breakdown import bubble_fraction
from simpar.trace.trace import Trace
from simpar.units import format_bytes

_MOST_OPERATIONS = 2_000_000  # forward and backward of each microbatch on each virtual stage; some minutes and GB
_LAUNCHES_PER_LAYER = 16  # of one pass, about
_MOST_RELIEFS = 3  # changes that are offered where a job does not fit
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
        JobError: a field of the job is wrong, or so large or small that no time comes out.
        PlanError: the plan breaks a rule of model or cluster.
        DoesNotFitError: the job needs more memory than a device has.

    >>> result = simulate(dict(model="llama3-8b", cluster="h100-sxm:1x8", plan=dict(tp=8, zero=1)))
    >>> result.fits
    True
    """
    job = Job.model_validate(job)
    try:
        return _simulate(job, allow_oom=allow_oom, fold=fold)
    except (ArithmeticError, MemoryError):
        raise JobError.of_fields([_most_extreme(job)]) from None


def check_size(job: Job, layout: Layout) -> None:
    """Refuses what would run for hours.

    Raises:
        ModelError: the model has too many layers.
        PlanError: the step has too many operations.
    """
    layers = len(job.model.layers) if isinstance(job.model.layers, tuple) else job.model.layers
    if layers > MOST_LAYERS:
        text = f"{layers:,} layers are more than the {MOST_LAYERS:,} that can be simulated; describe a smaller model"
        raise ModelError.of_fields([(("model", "layers"), text)])
    stages = job.plan.pp * job.plan.vpp
    operations = 2 * layout.microbatches * stages * layout.steps
    if operations > _MOST_OPERATIONS:
        several = f" in {layout.steps:,} steps (sync_every, sync.steps)" if layout.steps > 1 else ""
        fewer = f"{'simulate fewer steps, ' if layout.steps > 1 else ''}raise micro_batch or lower global_batch"
        text = (
            f"{layout.microbatches:,} microbatches on {stages} virtual stages{several} are {operations:,} operations, "
            f"more than the {_MOST_OPERATIONS:,} that can be simulated; {fewer} or grad_accum"
        )
        raise PlanError.of_fields([(("plan",), text)])


def _simulate(job: Job, *, allow_oom: bool, fold: bool) -> Result:
    layout = lay_out(job.plan, job.model, job.cluster)
    check_size(job, layout)
    faults = job.faults if job.faults.any else None
    _check_ranks(job, layout, faults, fold=fold)
    with _collector_paused():
        program = lower(job.model, job.cluster, layout, fold=fold, faults=faults)
        memory, on_host = footprints(program), host_bytes(program, layout, job.cluster)
        if not allow_oom:
            _check_fit(job, layout, memory)
            _check_hosts(job, on_host)
        trace = execute(program, job.cluster, faults)
    share = recomputed_share(program)
    warnings = (*_warnings(job, layout, program, memory, trace), *_host_warnings(job, on_host))
    return Result(job, layout, trace, memory, share, warnings, on_host)


def _check_ranks(job: Job, layout: Layout, faults: Faults | None, *, fold: bool) -> None:
    """Refuses a job of many ranks that unfolds into what would run for hours."""
    chosen = simulated(layout, job.cluster, faults, fold=fold)
    if chosen.folded:
        return
    plan, layers, replicas = layout.plan, job.model.layers, len(chosen.replicas)
    ranks = plan.tp * plan.pp
    passes = 2 * layout.microbatches * layout.steps
    layers = len(layers) if isinstance(layers, tuple) else layers
    depth = layers / plan.pp
    whole = passes * ranks * replicas * (depth if plan.zero == 3 else plan.vpp)  # each layer gathers its parameters
    opened = passes * depth * _LAUNCHES_PER_LAYER * ranks * len(chosen.opened)
    messages = 0.0
    if layout.server is not None:
        buckets = min(max(job.model.parameters / layout.bucket_parameters, 1.0), layers + 2.0)  # of whole layers
        parts = layout.server.count(replicas, job.cluster.nodes) if layout.server.sharding == "sliced" else 1
        messages = 2 * layout.steps * buckets * parts * plan.tp * replicas
    operations = whole + opened + messages
    if operations > _MOST_OPERATIONS:
        struck = faults is not None and simulated(layout, job.cluster, None, fold=fold).folded
        why = "tell the ranks apart" if struck else _told_apart(job, layout)
        fewer = ", or slow GPUs and links of few replicas instead of jitter" if struck else ""
        text = (
            f"{why}, so that {ranks * replicas:,} of them would be simulated with some {operations:,.0f} operations, "
            f"more than the {_MOST_OPERATIONS:,} that can be; take a smaller cluster, or fewer microbatches{fewer}"
        )
        field: FieldPath = ("faults",) if struck else ()
        raise JobError.of_fields([(field, text)])


def _told_apart(job: Job, layout: Layout) -> str:
    """Why one replica cannot stand for all."""
    cluster = job.cluster
    reasons = {
        "parameter servers tell the ranks apart": layout.server is not None,
        "a graph tells the ranks apart": cluster.graph is not None,
        "a placement tells the ranks apart": cluster.placement is not None,
        "samples of different lengths tell the ranks apart": layout.samples is not None,
        "kinds of nodes tell the ranks apart": len(cluster.devices) > 1,
        "groups lie on nodes or leaf switches in different ways": True,
    }
    return next(reason for reason, holds in reasons.items() if holds)


def _most_extreme(job: Job) -> tuple[FieldPath, str]:
    """The field that lies farthest from what is usual, for an arithmetic that overflowed, and what to do about it."""
    found, usual = dict(_numbers((), job)), dict(_numbers((), _usual(job)))
    distance = {
        path: math.log(abs(value)) - math.log(abs(usual.get(path) or 1)) for path, value in found.items() if value
    }
    path = max(distance, key=lambda path: abs(distance[path]))
    return path, f"{shown(found[path])} is too {'large' if distance[path] > 0 else 'small'} to be simulated; check it"


def _usual(job: Job) -> Job:
    """A job of catalog values, where there are any by the names of this one, and of defaults."""
    device, model = job.cluster.device.name, job.model.name
    return Job(
        model=preset(model if model in preset_names() else "llama3-8b"),
        cluster=Cluster.model_validate({"device": device if device in device_names() else "h100-sxm"}),
    )


def _numbers(path: FieldPath, value: Any) -> Iterator[tuple[FieldPath, int | float]]:
    """The numbers of a description and of all that it is made of."""
    if isinstance(value, (int, float)):
        yield path, value
    elif isinstance(value, (Description, Mapping)):
        for name, inner in dict(value).items():
            yield from _numbers((*path, name), inner)


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


def _check_fit(job: Job, layout: Layout, memory: tuple[Footprint, ...]) -> None:
    worst, device = fullest(memory, layout, job.cluster)
    capacity = device.memory_bytes
    if worst.peak_bytes <= capacity:
        return
    parts = sorted(worst.by_category.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts[:3])
    reliefs = list(islice(fitting(job.model, job.cluster, job.plan, usual_changes(job.plan)), _MOST_RELIEFS))
    offers = [
        f"what would fit: {'; '.join(ways)}"
        if ways
        else "none of the usual changes of the plan would fit; use more GPUs"
        for ways in ([way.in_python for way in reliefs], [way.on_command_line for way in reliefs])
    ]
    raise _does_not_fit(
        f"stage {worst.stage} needs {format_bytes(worst.peak_bytes)} ({shown}), but {device.name} has "
        f"{format_bytes(capacity)}",
        *offers,
    )


def _does_not_fit(problem: str, in_python: str, on_command_line: str) -> DoesNotFitError:
    """The error with what helps, in the words of either way to ask."""
    return DoesNotFitError(
        f"{problem}; {in_python}, or simulate it anyway with allow_oom=True",
        on_command_line=f"{problem}; {on_command_line}, or simulate it anyway with --allow-oom",
    )


def _check_hosts(job: Job, held: int) -> None:
    host = job.cluster.host.device
    if held > host.memory_bytes:
        mend = "raise zero or the number of nodes, give cluster.host more memory"
        raise _does_not_fit(
            f"offload '{job.plan.offload}' keeps {format_bytes(held)} on a host, but {host.title or host.name} has "
            f"{format_bytes(host.memory_bytes)}",
            mend,
            mend,
        )


def _host_warnings(job: Job, held: int) -> Iterator[str]:
    host = job.cluster.host.device
    if held > host.memory_bytes:
        yield (
            f"hosts are too small: offload keeps {format_bytes(held)} on one of {format_bytes(host.memory_bytes)}; "
            "the step time is hypothetical"
        )
    elif held > _NEARLY_FULL * host.memory_bytes:
        yield (
            f"the memory of hosts is {held / host.memory_bytes:.0%} full with what is offloaded alone; data loaders "
            "and the operating system need some, too"
        )


def _warnings(job: Job, layout: Layout, program: Program, memory: tuple[Footprint, ...], trace: Trace) -> Iterator[str]:
    plan, cluster = layout.plan, job.cluster
    worst, device = fullest(memory, layout, cluster)
    peak = worst.peak_bytes
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
    known = cluster.node_link.known_gpus
    if known is not None and cluster.gpus_per_node > known and cluster.graph is None:
        yield (
            f"a node of {cluster.gpus_per_node} GPUs goes beyond the {known} that such links are known to join; "
            f"write {device.name}:{-(-cluster.gpus // known)}x{known} for nodes of that size"
        )
    waiting = _longest_host_wait_s(trace)
    # where data come late, the host waits for these
    if trace.step_ns and waiting > _LAUNCH_BOUND * trace.step_s and not job.faults.loader.strikes:
        yield (
            f"launch-bound: the device waits for the host {waiting / trace.step_s:.0%} of the step "
            f"({layout.launch_s * 1e6:.3g} µs per kernel launch); CUDA graphs or compilation would help"
        )
    if layout.samples is not None:
        yield _imbalance(layout.samples, trace)
    if isinstance(job.model, Transformer) and job.model.note:
        yield job.model.note
    if job.faults.any:
        yield from _fault_warnings(job, trace)
    yield from _extrapolations(job, program)


def _fault_warnings(job: Job, trace: Trace) -> Iterator[str]:
    yield f"with faults: {job.faults.summary()}"
    used = {link.name for link in trace.links}
    idle = [name for name in job.faults.link_rates if name not in used]
    if idle:
        yield f"faults change nothing on {', '.join(idle)}: no simulated transfer uses a link of that name"


def _imbalance(samples: StepSamples, trace: Trace) -> str:
    """How unevenly the samples are spread, and what that costs."""
    waits = bubble_fraction(trace)
    return (
        f"samples of {min(samples.lengths):,} to {max(samples.lengths):,} tokens: the fullest replica has "
        f"{samples.imbalance:.1%} more than the mean, {samples.padding:.1%} of the tokens are padding; ranks wait for "
        f"others (the slowest replica among them) {waits:.1%} of the step"
    )


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
                time_s[launch] += kernel_s(runnable(launch.kernel, device), device) * count
    total = sum(time_s.values())
    if device.fit_from is not None:
        yield f"{device.name} was not measured: its kernels are assumed to do as well as those of {device.fit_from}"
        return
    reasons: dict[str, defaultdict[str, float]] = {}
    for launch, spent in time_s.items():
        reason = extrapolated(runnable(launch.kernel, device), device)
        if reason:
            reasons.setdefault(reason, defaultdict(float))[launch.name] += spent
    for reason, names in reasons.items():
        share = sum(names.values()) / total
        if share > _NOTABLE:
            shown = ", ".join(sorted(names, key=lambda name: -names[name])[:4])
            yield f"{share:.0%} of compute time is extrapolated ({reason}): {shown}"
