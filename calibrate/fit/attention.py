"""Fits fused attention, forward and backward; a vectorised twin of :func:`simpar.cost.kernel.attention_s`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from calibrate.fit.accuracy import assess, kernel_splits
from calibrate.fit.gemm import level_factors, levels, rounded
from calibrate.fit.robust import FloatArray, Mask, Parameter, Solution, solve
from calibrate.samples import KernelSample
from simpar.hardware.device import AttentionBackwardFit, AttentionFit, Device
from simpar.hardware.profile import Accuracy
from simpar.model.work import Attention
from simpar.units import US

PRIORS = (
    Parameter("efficiency", 0.6, 0.4, 0.01, 1.5),
    Parameter("overhead_s", 12.0 * US, 1.0, 0.01 * US, 1.0),
    Parameter("bandwidth_efficiency", 0.5, 0.7, 0.02, 2.0),
    Parameter("parallelism", 0.7, 1.0, 1e-3, 30.0),
)
_FEWEST = 6
_ENOUGH = 12  # measurements in the training region from which on the others are left out of the fit


class FittedForward(NamedTuple):
    """Outcome for one head size: the fit, its parameters' relative uncertainty, errors, number of unknowns."""

    fit: AttentionFit
    uncertainty: dict[str, float]
    accuracy: list[Accuracy]
    unknowns: int


class FittedBackward(NamedTuple):
    """Outcome for all backward passes: the fit, its parameters' relative uncertainty, errors, number of unknowns."""

    fit: AttentionBackwardFit
    uncertainty: dict[str, float]
    accuracy: list[Accuracy]
    unknowns: int


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """Attention kernels as columns, each of shape (kernels,).

    Attributes:
        ideal_s: FLOP of the forward pass over the datasheet's peak.
        traffic_s: bytes of the forward pass over the datasheet's bandwidth.
        queries: queries over all heads.
        speed: of the kernel's generation.
        sequence: queries of a sequence.
        tokens: queries of the batch.
    """

    ideal_s: FloatArray
    traffic_s: FloatArray
    queries: FloatArray
    speed: FloatArray
    sequence: FloatArray
    tokens: FloatArray

    @classmethod
    def of(cls, kernels: Sequence[Attention], device: Device) -> "AttentionTable":
        """Columns of kernels that the device can run."""
        rows = []
        for kernel in kernels:
            work = replace(kernel, backward=False).work
            rows.append(
                (
                    work.flop / device.peak(kernel.dtype),
                    work.nbytes / device.memory_bytes_per_s,
                    kernel.batch * kernel.heads * kernel.seq_q,
                    device.attention_kernel_speed[kernel.kernel],
                    kernel.seq_q,
                    kernel.batch * kernel.seq_q,
                )
            )
        return cls(*np.array(rows, dtype=float).T)

    def where(self, mask: Mask) -> "AttentionTable":
        """The masked rows."""
        return AttentionTable(*(getattr(self, field)[mask] for field in AttentionTable.__slots__))


def forward_times(table: AttentionTable, values: Mapping[str, float], sms: int, slowdown: float = 1.0) -> FloatArray:
    """Twin of :func:`simpar.cost.kernel.attention_s` for forward passes of one head size.

    Args:
        table: the kernels.
        values: fields of an :class:`simpar.hardware.device.AttentionFit`.
        sms: multiprocessors of the device.
        slowdown: sustained over burst.
    """
    compute, traffic = _parts(table, values, sms, slowdown)
    return values["overhead_s"] + (compute + traffic) / table.speed


def backward_times(
    table: AttentionTable,
    forward: Mapping[str, float],
    sms: int,
    *,
    flop_factor: float,
    efficiency_ratio: float,
    linear_ratio: float,
    slowdown: float = 1.0,
) -> FloatArray:
    """Twin of :func:`simpar.cost.kernel.attention_s` for backward passes of one head size."""
    compute, traffic = _parts(table, forward, sms, slowdown)
    return forward["overhead_s"] + (compute * flop_factor / efficiency_ratio + traffic * linear_ratio) / table.speed


def _parts(
    table: AttentionTable, values: Mapping[str, float], sms: int, slowdown: float
) -> tuple[FloatArray, FloatArray]:
    compute = table.ideal_s / values["efficiency"] * slowdown
    compute = compute * (1.0 + values["parallelism"] * 128.0 * sms / table.queries)
    return compute, table.traffic_s / values["bandwidth_efficiency"]


def regions(table: AttentionTable, measured_s: FloatArray) -> dict[str, Mask]:
    """Training: at least 512 queries a sequence and 1,024 in all, more than 20 µs. And all."""
    return {
        "training": (table.sequence >= 512) & (table.tokens >= 1024) & (measured_s > 20.0 * US),
        "all": np.ones(measured_s.size, dtype=bool),
    }


def fit_forward(samples: Sequence[KernelSample], head_dim: int, base: Device, *, paged: bool) -> FittedForward | None:
    """Fits forward passes of one head size; None if there are too few.

    Args:
        samples: forward passes of that head size.
        head_dim: theirs.
        base: device with datasheet rates; where keys and values are ``paged``, also the training bandwidth.
        paged: whether the kernels read a paged cache, as those of serving engines do. Their bandwidth is fitted, so
            that it does not bend the other parameters, but training does not pay it: ``base``'s stays.
    """
    if len(samples) < _FEWEST:
        return None
    table = AttentionTable.of([s.kernel for s in samples if isinstance(s.kernel, Attention)], base)
    measured_s = np.array([s.time_s for s in samples])
    stacks = np.array([s.stack for s in samples])
    inside = regions(table, measured_s)["training"]
    if inside.sum() >= _ENOUGH:
        table, measured_s, stacks = table.where(inside), measured_s[inside], stacks[inside]
    names = sorted(set(stacks.tolist()))
    stack = np.searchsorted(names, stacks)
    parameters = [*PRIORS, *(levels(names) if len(names) > 1 else ())]

    def learn(mask: Mask) -> Solution:
        part = table.where(mask)

        def predict(values: Mapping[str, float]) -> FloatArray:
            times = forward_times(part, values, base.sms)
            return times * level_factors(values, names)[stack[mask]] if len(names) > 1 else times

        return solve(parameters, predict, measured_s[mask])

    full = learn(np.ones(measured_s.size, dtype=bool))

    def times(mask: Mask) -> FloatArray:
        return forward_times(table, (full if mask.all() else learn(mask)).values, base.sms)

    splits = kernel_splits(table.ideal_s, stacks.tolist(), _shapes(table))
    rows = assess(f"attention.{head_dim}", times, measured_s, regions(table, measured_s), splits)
    values = {p.name: full.values[p.name] for p in PRIORS}
    uncertainty = {p.name: full.uncertainty[p.name] for p in PRIORS}
    if paged:
        values["bandwidth_efficiency"] = nearest_fit(head_dim, base.attention).bandwidth_efficiency
        del uncertainty["bandwidth_efficiency"]
    return FittedForward(AttentionFit(**rounded(values)), uncertainty, rows, len(PRIORS))


def fit_backward(samples: Sequence[KernelSample], device: Device) -> FittedBackward | None:
    """Fits backward passes relative to forward ones of ``device``; None if there are too few.

    The FLOP factor stays; the efficiency ratio of each measured head size and one traffic ratio are fitted.
    """
    if len(samples) < _FEWEST:
        return None
    kernels = [s.kernel for s in samples if isinstance(s.kernel, Attention)]
    table = AttentionTable.of(kernels, device)
    measured_s = np.array([s.time_s for s in samples])
    dims = np.array([kernel.head_dim for kernel in kernels])
    base = device.attention_backward
    sizes = sorted(set(dims.tolist()))
    parameters = [
        Parameter("linear_ratio", base.linear_ratio, 0.5, 0.1, 100.0),
        *(Parameter(f"{size}", _nearest(size, base.efficiency_ratio), 0.3, 0.05, 10.0) for size in sizes),
    ]

    def predicted(values: Mapping[str, float], mask: Mask) -> FloatArray:
        times = np.empty(measured_s.size)
        for size in sizes:
            chosen = (dims == size) & mask
            times[chosen] = backward_times(
                table.where(chosen),
                dict(nearest_fit(size, device.attention)),
                device.sms,
                flop_factor=base.flop_factor,
                efficiency_ratio=values[f"{size}"],
                linear_ratio=values["linear_ratio"],
            )
        return times[mask]

    def learn(mask: Mask) -> Solution:
        return solve(parameters, lambda values: predicted(values, mask), measured_s[mask])

    everything = np.ones(measured_s.size, dtype=bool)
    full = learn(everything)

    def times(mask: Mask) -> FloatArray:
        return predicted((full if mask.all() else learn(mask)).values, everything)

    splits = kernel_splits(table.ideal_s, [s.stack for s in samples], _shapes(table))
    rows = assess("attention_backward", times, measured_s, regions(table, measured_s), splits)
    values = rounded(full.values)
    linear = values.pop("linear_ratio")
    ratios = {**base.efficiency_ratio, **{int(size): ratio for size, ratio in values.items()}}
    fit = AttentionBackwardFit(flop_factor=base.flop_factor, efficiency_ratio=ratios, linear_ratio=linear)
    uncertainty = {
        name if name == "linear_ratio" else f"efficiency_ratio.{name}": spread
        for name, spread in full.uncertainty.items()
    }
    return FittedBackward(fit, uncertainty, rows, len(parameters))


def _shapes(table: AttentionTable) -> FloatArray:
    return np.stack((table.ideal_s, table.traffic_s, table.queries, table.sequence), axis=1)


def nearest_fit(head_dim: int, fits: Mapping[int, AttentionFit]) -> AttentionFit:
    """The fit that the cost function takes for a head size."""
    return fits[min(fits, key=lambda size: (abs(size - head_dim), size))]


def _nearest(head_dim: int, ratios: Mapping[int, float]) -> float:
    return ratios[min(ratios, key=lambda size: (abs(size - head_dim), size))]
