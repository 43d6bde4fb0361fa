"""Devices: datasheet rates, fitted kernel parameters and the errors of those fits.

No times live here; :mod:`simpar.cost` derives them. The catalog is data (``catalog/devices/*.yaml``), one
file a device, every number with its source. A file may name a ``base`` device of the catalog and state only
what differs: mappings merge, ``null`` removes a key, and what is inherited is marked "assumed from" in
``sources``. It may name a profile of the catalog as ``fit`` (:mod:`simpar.hardware.shipped`), from which it
takes all that it does not state, with sources and errors.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import Field, model_validator

from simpar.description import Description
from simpar.errors import ClusterError, SimparError, nearest
from simpar.hardware.shipped import shipped_profile, shipped_profile_names
from simpar.model.work import AttentionKernel, DType, MemoryClass
from simpar.reading import read_text, read_yaml
from simpar.units import GIB

ALIASES: Mapping[str, str] = {
    "a100": "a100-sxm-80gb",
    "a100-sxm": "a100-sxm-80gb",
    "a100-40gb": "a100-sxm-40gb",
    "a100-80gb": "a100-sxm-80gb",
    "a800": "a800-sxm",
    "b200": "b200-sxm",
    "b300": "b300-sxm",
    "gaudi-2": "gaudi2",
    "gaudi-3": "gaudi3",
    "h100": "h100-sxm",
    "h200": "h200-sxm",
    "h800": "h800-sxm",
    "p100": "p100-sxm",
    "tpu-v6e-trillium": "tpu-v6e",
    "tpu7x": "tpu-v7x",
    "trn2": "trainium2",
    "v100": "v100-sxm-32gb",
    "v100-sxm": "v100-sxm-32gb",
}
"""Short names that :func:`device` also understands."""

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]

_SUBSTITUTES: Mapping[DType, tuple[DType, ...]] = {
    "fp8": ("bf16", "fp16"),
    "bf16": ("fp16", "fp32"),
    "fp16": ("bf16", "fp32"),
    "tf32": ("fp32",),
    "fp32": ("tf32",),
}


class GemmFit(Description):
    """Parameters of one dtype's matrix products; efficiencies are relative to the datasheet rates.

    Attributes:
        peak_efficiency: share of the dense peak that a large product reaches.
        bandwidth_efficiency: share of the memory bandwidth that a traffic-bound product reaches.
        overhead_s: device time of an empty product, without the host's launch.
        k0: prologue and epilogue of an output tile, in units of the inner dimension.
        wave_exponent: how much of tile and wave quantisation is felt (0 on parts whose kernels hide it).
        quantize_bytes: traffic per element of A if the kernel also quantises its activations (fp8 serving
            engines).
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    peak_efficiency: Annotated[float, Field(gt=0, le=1.5)]
    bandwidth_efficiency: Annotated[float, Field(gt=0, le=2)]
    overhead_s: NonNegative
    k0: NonNegative = 0.0
    wave_exponent: Annotated[float, Field(ge=0, le=1)] = 0.0
    quantize_bytes: NonNegative = 0.0


class AttentionFit(Description):
    """Parameters of the fused forward attention of one head size.

    Attributes:
        efficiency: share of the dense peak that a long sequence reaches.
        overhead_s: device time of an empty call.
        bandwidth_efficiency: share of the memory bandwidth for reading Q, K, V and writing the output; above
            1 where the cache serves a part.
        parallelism: how much too few query blocks for the device's multiprocessors slow the kernel.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    efficiency: Annotated[float, Field(gt=0, le=1.5)]
    overhead_s: NonNegative
    bandwidth_efficiency: Annotated[float, Field(gt=0, le=2)]
    parallelism: NonNegative = 0.0


class AttentionBackwardFit(Description):
    """The backward pass of attention relative to its forward pass.

    Attributes:
        flop_factor: FLOP backward over FLOP forward.
        efficiency_ratio: efficiency backward over forward, by head size.
        linear_ratio: traffic backward over traffic forward.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    flop_factor: Positive = 2.5
    efficiency_ratio: dict[int, Positive] = Field(min_length=1)
    linear_ratio: Positive = 6.0


class MemoryFit(Description):
    """Kernels bound by memory traffic: share of the datasheet bandwidth reached, and time when empty."""

    error_type: ClassVar[type[SimparError]] = ClusterError

    bandwidth_efficiency: Annotated[float, Field(gt=0, le=2)]
    overhead_s: NonNegative


class Power(Description):
    """What a device draws in watts; between the two it is interpolated by how busy the device is.

    Attributes:
        idle_w: with its driver loaded and nothing to do.
        max_w: board power limit of the datasheet.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    idle_w: NonNegative
    max_w: Positive

    @model_validator(mode="after")
    def _check(self) -> "Power":
        if self.idle_w > self.max_w:
            raise ValueError(f"idle_w={self.idle_w:g} exceeds max_w={self.max_w:g}; both are watts of one device")
        return self


class UnalignedSpeed(Description):
    """Speed of 2-byte products whose rows are no multiple of 16 bytes (8 elements), relative to aligned ones.

    Attributes:
        plain: of a single product.
        batched: of a batch of products, such as those of unfused attention, whose n or k is the head size.
    """

    plain: Fraction
    batched: Fraction


class Device(Description):
    """One accelerator (or CPU), as its datasheet and measurements of its kernels describe it.

    Attributes:
        name: name in the catalog, such as ``h100-sxm``.
        title: full name of the product.
        peak_flop_per_s: dense peak (never the sparse one) of each dtype that the device has.
        memory_bytes: capacity that a process can see.
        memory_bytes_per_s: datasheet bandwidth.
        sms: streaming multiprocessors.
        gemm: fit of each dtype's matrix products.
        unaligned_gemm_speed: what products lose whose rows are no multiple of 8 elements; None if unmeasured.
        grouped_gemm_speed: speed of the products of several experts in one launch relative to one plain product.
        attention: fit of fused attention by head size.
        attention_kernel: the kernel generation that ``attention`` was measured with.
        attention_kernel_speed: speed of each generation that runs here relative to that one.
        attention_backward: backward relative to forward.
        memory_bound: fit of each class of memory-bound kernels.
        sustained_slowdown: how much longer matrix products and attention compute in long training than in the
            short bursts that the fits were measured in.
        launch_s: host time to launch one kernel.
        context_bytes: memory that CUDA, NCCL and library workspaces take from ``memory_bytes``.
        compute_rate_during_collectives: fraction of its speed at which compute goes on beside the kernels of a
            collective that uses all of the node link; one that moves less slows compute in proportion.
        collective_rate_during_compute: fraction of its speed at which a collective goes on beside compute.
        power: what it draws; None where nobody published it.
        fit_from: where the fits come from if they were not measured on this device; None when they were.
        machine: host of the one machine that calibration measured, whose rounds ``errors`` describe; None for a kind of
            device, of which others were measured.
        errors: relative errors of the fits by kernel class (``gemm.bf16``; with ``.p90`` the 90th percentile,
            else the median; ``level`` is the error that all kernels of a machine share: from one machine of the kind
            to another, or from one moment to another on ``machine``).
        sources: where each number comes from, by dotted path of the field or of one of its parents.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    name: str = Field(min_length=1)
    title: str = Field(min_length=1)
    peak_flop_per_s: dict[DType, Positive] = Field(min_length=1)
    memory_bytes: Annotated[int, Field(gt=0)]
    memory_bytes_per_s: Positive
    sms: Annotated[int, Field(gt=0)]
    gemm: dict[DType, GemmFit] = Field(min_length=1)
    unaligned_gemm_speed: UnalignedSpeed | None = None
    grouped_gemm_speed: Positive = 1.0
    attention: dict[int, AttentionFit] = Field(min_length=1)
    attention_kernel: AttentionKernel
    attention_kernel_speed: dict[AttentionKernel, Positive] = Field(min_length=1)
    attention_backward: AttentionBackwardFit
    memory_bound: dict[MemoryClass, MemoryFit]
    sustained_slowdown: Positive = 1.0
    launch_s: NonNegative = 6e-6
    context_bytes: Annotated[int, Field(ge=0)] = GIB
    compute_rate_during_collectives: Fraction = 0.38
    collective_rate_during_compute: Fraction = 1.0
    power: Power | None = None
    fit_from: str | None = None
    machine: str | None = None
    errors: dict[str, NonNegative] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> "Device":
        if set(self.gemm) != set(self.peak_flop_per_s):
            odd = ", ".join(sorted(set(self.gemm) ^ set(self.peak_flop_per_s)))
            raise ValueError(f"gemm and peak_flop_per_s must cover the same dtypes, but only one has {odd}; give both")
        if self.attention_kernel_speed.get(self.attention_kernel, 1.0) != 1.0:
            raise ValueError(
                f"attention_kernel_speed['{self.attention_kernel}'] must be 1, because the fit was measured "
                f"with that kernel; scale the other kernels instead"
            )
        if "unfused" in (self.attention_kernel, *self.attention_kernel_speed):
            raise ValueError("'unfused' attention is priced by its products and softmax; fit only fused kernels")
        if missing := {"elementwise", "activation", "norm"} - set(self.memory_bound):
            raise ValueError(f"memory_bound must fit every class; add {', '.join(sorted(missing))}")
        if self.context_bytes >= self.memory_bytes:
            raise ValueError("context_bytes must be smaller than memory_bytes; both are bytes")
        return self

    @property
    def fastest_attention(self) -> AttentionKernel:
        """The fused kernel that runs fastest here; that of the fits may not run, where they are another device's."""
        return max(self.attention_kernel_speed, key=lambda kernel: self.attention_kernel_speed[kernel])

    def peak(self, dtype: DType) -> float:
        """Dense peak of ``dtype`` in FLOP/s.

        Raises:
            ClusterError: the device does not compute in ``dtype``.
        """
        try:
            return self.peak_flop_per_s[dtype]
        except KeyError:
            raise ClusterError(self._no_dtype(dtype)) from None

    def gemm_fit(self, dtype: DType) -> GemmFit:
        """Fit of matrix products in ``dtype``.

        Raises:
            ClusterError: the device does not compute in ``dtype``.
        """
        try:
            return self.gemm[dtype]
        except KeyError:
            raise ClusterError(self._no_dtype(dtype)) from None

    def _no_dtype(self, dtype: DType) -> str:
        use = next((d for d in _SUBSTITUTES[dtype] if d in self.gemm), None) or next(iter(self.gemm))
        has = ", ".join(self.gemm)
        return f"device '{self.name}' does not compute in {dtype} (it has {has}); use {use} instead"


def device(name: str) -> Device:
    """The catalog's device of that name or alias.

    >>> device("h100").title
    'NVIDIA H100 SXM5 80 GB'

    Raises:
        ClusterError: no such device; the message names the nearest one.
    """
    canonical = ALIASES.get(name, name)
    if canonical not in device_names():
        hint = nearest(name, [*device_names(), *ALIASES])
        raise ClusterError(
            f"unknown device '{name}'{hint} (known: {', '.join(device_names())}; others through load_device)"
        )
    return _catalog_device(canonical)


@cache
def device_names() -> tuple[str, ...]:
    """Names of the catalog's devices, sorted, without aliases."""
    folder = files("simpar.hardware") / "catalog" / "devices"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def load_device(path: str | Path) -> Device:
    """Reads a device from a YAML file; a ``base`` in it names a device of the catalog.

    Raises:
        ClusterError: the file cannot be read or does not describe a device; the message names file and field.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise ClusterError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    return _build(_parse(text, str(path)), str(path))


@cache
def _catalog_device(name: str) -> Device:
    # The catalog is package data and a Device is frozen, so each file needs to be read only once.
    return _build(_catalog_data(name), f"{name}.yaml")


def _catalog_data(name: str) -> dict[str, Any]:
    text = (files("simpar.hardware") / "catalog" / "devices" / f"{name}.yaml").read_text(encoding="utf-8")
    return _parse(text, f"{name}.yaml")


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        data = read_yaml(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ClusterError(f"{origin}: is not valid YAML ({reason}); mend its syntax") from None
    if not isinstance(data, dict):
        raise ClusterError(f"{origin}: must be a mapping of device fields; start with 'name: ...'")
    fit = data.pop("fit", None)
    if fit is not None:
        if fit not in shipped_profile_names():
            raise ClusterError(
                f"{origin}: fit '{fit}' is not in the catalog{nearest(str(fit), shipped_profile_names())}; "
                f"use one of {', '.join(shipped_profile_names())}"
            )
        data = _merge(shipped_profile(fit)["device"], data)
    base = data.pop("base", None)
    if base is None:
        return dict(data)
    parent_name = ALIASES.get(str(base), str(base))
    if parent_name not in device_names():
        raise ClusterError(
            f"{origin}: base '{base}' is not in the catalog{nearest(str(base), device_names())}; "
            f"use one of {', '.join(device_names())}"
        )
    parent = _catalog_data(parent_name)
    parent["sources"] = {
        field: source if source.startswith("assumed from ") else f"assumed from {parent_name}: {source}"
        for field, source in parent.get("sources", {}).items()
    }
    parent["fit_from"] = parent.get("fit_from") or parent_name
    return _merge(parent, data)


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged


def _build(data: dict[str, Any], origin: str) -> Device:
    try:
        return Device.model_validate(data)
    except SimparError as error:
        raise ClusterError(f"{origin}: {error}") from None
