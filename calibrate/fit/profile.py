"""Puts a profile together: each class of measurements goes to its fit, the rest stays as the base device has it."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from calibrate.errors import MeasurementError
from calibrate.fit.attention import fit_backward, fit_forward
from calibrate.fit.draft import Draft, source_of
from calibrate.fit.gemm import fit_gemm, rounded
from calibrate.fit.grouped import fit_grouped
from calibrate.fit.machine import compare_updates, fit_interference, fit_launch, fit_links
from calibrate.fit.memory import fit_memory
from calibrate.samples import CollectiveSample, KernelSample, Measurements
from simpar.cost.error import MEDIAN, P90, error_at
from simpar.errors import nearest
from simpar.hardware.cluster import Fabric
from simpar.hardware.device import Device
from simpar.hardware.profile import Profile, Provenance
from simpar.model.work import Attention, Gemm, GroupedGemm, MemoryBound

SERVING_STACKS = ("vllm", "sglang", "trtllm")
"""Software whose tables quantise fp8 activations in the product and read keys and values from a paged cache."""

CLASSES = ("gemm", "grouped_gemm", "attention", "attention_backward", "memory_bound", "collective")
"""Names by which :func:`select` tells classes apart, each also with what follows a dot (``gemm.fp8``)."""


def kernel_class(sample: KernelSample) -> str:
    """The class of a kernel, as errors and sources name it; ``decode`` attention has one query a sequence."""
    kernel = sample.kernel
    if isinstance(kernel, Gemm):
        return f"gemm.{kernel.dtype}"
    if isinstance(kernel, GroupedGemm):
        return f"grouped_gemm.{kernel.dtype}"
    if isinstance(kernel, MemoryBound):
        return f"memory_bound.{kernel.memory_class}"
    if kernel.backward:
        return "attention_backward"
    return f"attention.{kernel.head_dim}" if kernel.seq_q > 1 else "decode"


def select(
    measurements: Measurements, stacks: Mapping[str, Sequence[str]], ranks: Collection[int] = ()
) -> Measurements:
    """Only those of some stacks, by class: ``{"gemm.fp8": ["trtllm"], "collective": ["nccl/2.29.2"]}``.

    Args:
        measurements: to choose from.
        stacks: by class, each with or without its version; classes that are not named keep all their stacks.
        ranks: group sizes of collectives to keep; empty keeps all.

    Raises:
        MeasurementError: an unknown class, or a stack that measured nothing of it.
    """
    for name in stacks:
        if name.split(".")[0] not in CLASSES:
            raise MeasurementError(
                f"'{name}' is no class of measurements{nearest(name, CLASSES)}; use one of {', '.join(CLASSES)}"
            )
    kept: dict[str, set[str]] = {name: set() for name in stacks}

    @cache  # of a few classes and stacks; there may be hundreds of thousands of samples
    def wanted(what: str, stack: str) -> bool:
        keys = [name for name in stacks if what == name or what.startswith(f"{name}.")]
        chosen = [name for name in keys if {stack, stack.partition("/")[0]} & set(stacks[name])]
        for name in chosen:
            kept[name].add(stack)
        return not keys or bool(chosen)

    kernels = tuple(s for s in measurements.kernels if wanted(kernel_class(s), s.stack))
    collectives = tuple(
        s for s in measurements.collectives if wanted(f"collective.{s.op}", s.stack) and (not ranks or s.ranks in ranks)
    )
    for name, found in kept.items():
        if not found:
            there = {s.stack for s in _samples(measurements) if s.stack}
            raise MeasurementError(
                f"no {name} of stack {' or '.join(stacks[name])} was measured; there are {', '.join(sorted(there))}"
            )
    return replace(measurements, kernels=kernels, collectives=collectives)


def fit_profile(
    measurements: Measurements,
    base: Device,
    *,
    name: str | None = None,
    source: str = "",
    command: str = "",
    fabric: Fabric | None = None,
    today: str | None = None,
) -> Profile:
    """Fits all that was measured; what was not keeps the value, source and error of the base.

    Args:
        measurements: of one machine, or of several of the same kind (one stack each).
        base: device with the datasheet's rates.
        name: of the profile and its device; the base's by default.
        source: where the measurements come from, for people; their own sources by default.
        command: what to record as having made the profile.
        fabric: the network that was measured, with its line rate; the base's usual one by default.
        today: day to record; today by default.

    Raises:
        MeasurementError: nothing was measured, or too little for a fit.
    """
    if not (measurements.kernels or measurements.collectives or measurements.launch_s):
        raise MeasurementError("there are no measurements to fit; give files that hold some")
    copies = {"errors": dict(base.errors), "sources": dict(base.sources)}
    draft = Draft({**dict(base), **copies, "name": name or base.name})
    classes: dict[str, list[KernelSample]] = {}
    for sample in measurements.kernels:
        classes.setdefault(kernel_class(sample), []).append(_native(sample, base))
    if base.fit_from is not None and any(what.startswith("gemm") for what in classes):
        draft.device["fit_from"] = None
        draft.device["errors"] = {}  # of another device; a class without errors of its own counts as unknown
    _fit_gemms(draft, classes, base, source)
    _fit_grouped(draft, classes, source)
    _fit_attention(draft, classes, base, source)
    _fit_memory(draft, classes, base, source)
    fit_launch(draft, measurements.launch_s)
    fit_interference(draft, measurements.interference)
    compare_updates(draft, measurements.updates)
    _level(draft, classes, measurements)
    node_link, network = fit_links(draft, measurements, base, fabric, source)
    if "decode" in classes:
        draft.notes.append(f"{len(classes['decode'])} decode attention kernels were left out; no form prices them yet")
    counts = Counter(s.source for s in _samples(measurements))
    return Profile(
        name=name or base.name,
        device=Device.model_validate(draft.device),
        node_link=node_link,
        fabric=network,
        uncertainty=draft.uncertainty,
        accuracy=tuple(draft.accuracy),
        notes=tuple(draft.notes),
        provenance=Provenance(
            command=command,
            date=today or date.today().isoformat(),
            host=measurements.provenance.get("host", ""),
            versions=_versions(),
            files=dict(sorted(counts.items())),
            facts={k: v for k, v in measurements.provenance.items() if k != "host"},
        ),
    )


def _samples(measurements: Measurements) -> tuple[KernelSample | CollectiveSample, ...]:
    return (*measurements.kernels, *measurements.collectives)


def _native(sample: KernelSample, base: Device) -> KernelSample:
    """A serving engine's attention is the fastest that the device has; its tables do not name the generation."""
    kernel = sample.kernel
    if isinstance(kernel, Attention) and _serving(sample):
        return replace(sample, kernel=replace(kernel, kernel=base.attention_kernel))
    return sample


def _serving(sample: KernelSample) -> bool:
    return sample.stack.split("/")[0] in SERVING_STACKS


def _level(draft: Draft, classes: Mapping[str, list[KernelSample]], measurements: Measurements) -> None:
    """What all kernels share: on a machine that was measured itself, how much its rounds differ."""
    host = measurements.provenance.get("host")
    if host and any(what.startswith("gemm") for what in classes):
        draft.device["machine"] = host
        for name in ("level", "level.p90"):  # between machines of the base's kind
            draft.device["errors"].pop(name, None)
    elif not measurements.kernel_spread:
        return
    if not measurements.kernel_spread:
        draft.notes.append("too few rounds were measured to see how much this machine's speed changes; it is assumed")
        return
    level = {
        "level": error_at(measurements.kernel_spread, MEDIAN),
        "level.p90": error_at(measurements.kernel_spread, P90),
    }
    draft.device["errors"] |= rounded(level, 3)
    draft.device["sources"]["errors.level"] = (
        "between rounds, and between the halves of the run: what kernels of a class share"
    )


def _fit_gemms(draft: Draft, classes: Mapping[str, list[KernelSample]], base: Device, source: str) -> None:
    fits = dict(base.gemm)
    measured = [dtype for dtype in base.gemm if f"gemm.{dtype}" in classes]
    for dtype in measured:
        samples = classes[f"gemm.{dtype}"]
        quantized = dtype == "fp8" and all(map(_serving, samples))
        found = fit_gemm(samples, dtype, base, quantized=quantized)
        fits[dtype] = found.fit
        draft.report(f"device.gemm.{dtype}", found.uncertainty, found.accuracy)
        what = f"gemm.{dtype}"
        draft.errors(what, what, ("training", "all"), found.unknowns)
        draft.errors(f"{what}.decode", what, ("decode",), found.unknowns)
        note = "; overhead and quantize_bytes include the quantisation of activations" if quantized else ""
        draft.device["sources"][what] = source_of(samples, source) + note
        # Dtypes that the base only assumes to behave like a measured one go on doing so.
        for other, fit in base.gemm.items():
            if f"gemm.{other}" not in classes and fit == base.gemm[dtype] and other != dtype:
                fits[other] = found.fit
                assumed = f"assumed from {dtype}"
                if not base.sources.get(f"gemm.{other}", "").startswith(assumed):
                    draft.device["sources"][f"gemm.{other}"] = f"{assumed}: same efficiencies of its own peak"
        if not any(map(_serving, samples)):
            draft.device["sustained_slowdown"] = 1.0
            draft.device["sources"]["sustained_slowdown"] = "1, because the fitted kernels ran in sustained bursts"
    for what in classes:
        if what.startswith("gemm.") and what.removeprefix("gemm.") not in base.gemm:
            draft.notes.append(f"{what} was left out: {base.name} has no {what.removeprefix('gemm.')}")
    draft.device["gemm"] = fits


def _fit_grouped(draft: Draft, classes: Mapping[str, list[KernelSample]], source: str) -> None:
    measured = {what: samples for what, samples in classes.items() if what.startswith("grouped_gemm.")}
    found = fit_grouped(measured, Device.model_validate(draft.device))
    if found is None:
        return
    draft.device["grouped_gemm_speed"] = found.speed
    draft.report("device", found.uncertainty, found.accuracy)
    for what in measured:
        draft.errors(what, what, ("all",), 1)
    draft.device["sources"]["grouped_gemm_speed"] = source_of([s for part in measured.values() for s in part], source)


def _fit_attention(draft: Draft, classes: Mapping[str, list[KernelSample]], base: Device, source: str) -> None:
    fits = dict(base.attention)
    sizes = sorted(int(what.removeprefix("attention.")) for what in classes if what.startswith("attention."))
    for size in sizes:
        what = f"attention.{size}"
        samples = [s for s in classes[what] if _runs(s, base)]
        paged = bool(samples) and all(map(_serving, samples))
        found = fit_forward(samples, size, base, paged=paged)
        if found is None:
            draft.notes.append(f"{what} was not fitted: {len(samples)} forward passes are too few")
            continue
        fits[size] = found.fit
        draft.report(f"device.{what}", found.uncertainty, found.accuracy)
        draft.errors(what, what, ("training", "all"), found.unknowns)
        draft.device["sources"][what] = source_of(samples, source)
        if paged:
            draft.device["sources"].setdefault(
                f"{what}.bandwidth_efficiency",
                f"taken from {base.name}, since the tables read a paged cache and training does not: "
                f"{_source_of(what, base)}",
            )
    draft.device["attention"] = dict(sorted(fits.items()))
    backward = [s for s in classes.get("attention_backward", []) if _runs(s, base)]
    found_backward = fit_backward(backward, Device.model_validate(draft.device))
    if found_backward is not None:
        draft.device["attention_backward"] = found_backward.fit
        draft.report("device.attention_backward", found_backward.uncertainty, found_backward.accuracy)
        draft.errors("attention_backward", "attention_backward", ("training", "all"), found_backward.unknowns)
        draft.device["sources"]["attention_backward"] = source_of(backward, source)
    else:
        draft.notes.append("attention backward was not measured; it keeps the base's ratios to forward")


def _runs(sample: KernelSample, base: Device) -> bool:
    kernel = sample.kernel
    return (
        isinstance(kernel, Attention)
        and kernel.kernel in base.attention_kernel_speed
        and kernel.dtype in base.peak_flop_per_s
    )


def _source_of(path: str, device: Device) -> str:
    keys = [key for key in device.sources if path == key or path.startswith(f"{key}.")]
    return device.sources[max(keys, key=len)] if keys else "no source"


def _fit_memory(draft: Draft, classes: Mapping[str, list[KernelSample]], base: Device, source: str) -> None:
    fits = dict(base.memory_bound)
    missing = []
    for memory_class in base.memory_bound:
        what = f"memory_bound.{memory_class}"
        samples = classes.get(what, [])
        found = fit_memory(samples, memory_class, base)
        if found is None:
            missing.append(memory_class)
            continue
        fits[memory_class] = found.fit
        draft.report(f"device.{what}", found.uncertainty, found.accuracy)
        draft.errors(what, what, ("large", "all"), found.unknowns)
        draft.device["sources"][what] = source_of(samples, source)
    if missing:
        draft.notes.append(f"memory-bound {', '.join(missing)} not measured; kept as the base has them")
    draft.device["memory_bound"] = fits


def _versions() -> dict[str, str]:
    found = {}
    for package in ("simpar", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            from simpar import __version__  # noqa: PLC0415 - a checkout that is not installed

            found[package] = __version__ if package == "simpar" else "unknown"
    return found
