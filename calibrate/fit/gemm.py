"""Fits matrix products; a vectorised twin of :func:`simpar.cost.kernel.gemm_s` and the unknowns in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from calibrate.errors import MeasurementError
from calibrate.fit.accuracy import SEED, assess, kernel_splits
from calibrate.fit.robust import FloatArray, Mask, Parameter, Solution, solve
from calibrate.samples import KernelSample
from simpar.cost.kernel import unaligned_factor
from simpar.hardware.device import Device, GemmFit
from simpar.hardware.profile import Accuracy
from simpar.model.work import DTYPE_BYTES, DType, Gemm
from simpar.units import US

# Medians and relative spreads before anything is measured, wide enough for every part from A100 to a plain CPU.
PRIORS = (
    Parameter("peak_efficiency", 0.75, 0.4, 0.02, 1.5),
    Parameter("bandwidth_efficiency", 0.8, 0.4, 0.02, 2.0),
    Parameter("overhead_s", 4.0 * US, 1.0, 0.01 * US, 1.0),
    # 1 is as good as none: hardly any inner dimension is below 64. Beyond 300 it would stand for other effects.
    Parameter("k0", 100.0, 1.0, 1.0, 300.0),
)
# A CPU has no tiles, which few shapes must not learn from the prior; its library copies B before it computes, and what
# stands for its memory's bandwidth is an assumption, so the share that it reaches may be far from a GPU's.
_CPU_PRIORS = (
    PRIORS[0],
    Parameter("bandwidth_efficiency", 0.3, 1.0, 0.01, 2.0),
    Parameter("overhead_s", 10.0 * US, 1.0, 0.01 * US, 1.0),
    Parameter("k0", 10.0, 1.5, 1.0, 300.0),
)
_QUANTIZE = Parameter("quantize_bytes", 8.0, 0.5, 0.1, 100.0)
LEVEL_SPREAD = 0.06  # by which whole collections on the same model of GPU differ (clocks, power, library versions)
_PREFIX = "level "
_FEWEST = 6  # products for five unknowns with priors
_PLENTY = 20_000  # of products tell the same as all of them; fits that only judge take no more
_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4)


class Fitted(NamedTuple):
    """Outcome of one class's fit.

    Attributes:
        fit: the description that goes into the device.
        uncertainty: relative standard deviation of each of its parameters.
        accuracy: errors by region and split.
        unknowns: number of parameters that were fitted.
    """

    fit: GemmFit
    uncertainty: dict[str, float]
    accuracy: list[Accuracy]
    unknowns: int


@dataclass(frozen=True, slots=True)
class GemmTable:
    """Products of one dtype as columns, each of shape (products,).

    Attributes:
        m: rows.
        n: columns.
        k: inner dimension.
        results: elements of C over the whole batch.
        operands: elements of A over the whole batch.
        nbytes: traffic.
        wave: logarithm of the tile and wave quantisation.
        unaligned: how much longer compute takes because rows are no multiple of 16 bytes.
    """

    m: FloatArray
    n: FloatArray
    k: FloatArray
    results: FloatArray
    operands: FloatArray
    nbytes: FloatArray
    wave: FloatArray
    unaligned: FloatArray

    @classmethod
    def of(cls, kernels: Sequence[Gemm], device: Device) -> "GemmTable":
        """Columns of the products, which all have one dtype and no empty dimension."""
        m, n, k, batch, out = np.array([(g.m, g.n, g.k, g.batch, g.out_bytes) for g in kernels], dtype=float).T
        results = batch * m * n
        nbytes = DTYPE_BYTES[kernels[0].dtype] * batch * k * (m + n) + out * results
        wave = np.log(wave_factors(batch * m, n, k, device.sms))
        unaligned = np.array([unaligned_factor(g, device) for g in kernels])
        return cls(m, n, k, results, batch * m * k, nbytes, wave, unaligned)


def wave_factors(m: FloatArray, n: FloatArray, k: FloatArray, sms: int) -> FloatArray:
    """Twin of :func:`simpar.cost.kernel.wave_factor` over columns."""
    best = np.full(m.shape, np.inf)
    for rows, columns in _TILES:
        tiles = np.ceil(m / rows) * np.ceil(n / columns)
        tile_cost = rows * columns / (rows * columns / 32768.0) ** 0.13
        for split in _SPLITS:
            steps = (k + 150.0 * split) / (k + 150.0)
            best = np.minimum(best, np.ceil(tiles * split / sms) * sms * tile_cost / split * steps)
    return best / (m * n)


def gemm_times(
    table: GemmTable, values: Mapping[str, float], peak: float, memory_bytes_per_s: float, slowdown: float = 1.0
) -> FloatArray:
    """Twin of :func:`simpar.cost.kernel.gemm_s` over columns, the kernel's own quantisation included.

    Args:
        table: the products.
        values: fields of a :class:`simpar.hardware.device.GemmFit`.
        peak: datasheet FLOP/s of the dtype.
        memory_bytes_per_s: datasheet bandwidth.
        slowdown: sustained over burst; 1 for what is fitted, since a table holds what it holds.
    """
    compute = 2.0 * table.results * (table.k + values["k0"]) / (peak * values["peak_efficiency"]) * slowdown
    compute = compute * table.unaligned
    if values["wave_exponent"]:
        compute = compute * np.exp(values["wave_exponent"] * table.wave)
    traffic = table.nbytes / (memory_bytes_per_s * values["bandwidth_efficiency"])
    overhead = values["overhead_s"] + values["quantize_bytes"] * table.operands / memory_bytes_per_s
    return overhead + np.cbrt(compute * compute * compute + traffic * traffic * traffic)


def regions(table: GemmTable, measured_s: FloatArray) -> dict[str, Mask]:
    """Training: m >= 1,024 and more than 20 µs. Decode: m <= 256, n and k at least 512. And all."""
    return {
        "training": (table.m >= 1024) & (measured_s > 20.0 * US),
        "decode": (table.m <= 256) & (table.n >= 512) & (table.k >= 512),
        "all": np.ones(measured_s.size, dtype=bool),
    }


def fit_gemm(samples: Sequence[KernelSample], dtype: DType, base: Device, *, quantized: bool) -> Fitted:
    """Fits the products of one dtype.

    Stacks that measured the same device are pooled, and each may differ from the others by one factor (prior: 1 within
    6 %); the fit is that of their middle. Wave quantisation is not fitted but follows the architecture (``base``):
    a dozen shapes mislead it, and only Ampere needs it.

    Args:
        samples: products of that dtype.
        dtype: theirs.
        base: device with the datasheet's rates and the architecture's wave exponent.
        quantized: whether the kernels quantise their activations themselves, as those of serving engines do in fp8.

    Raises:
        MeasurementError: too few products.
    """
    if len(samples) < _FEWEST:
        raise MeasurementError(
            f"{len(samples)} measured {dtype} products are too few for a fit; measure at least {_FEWEST} shapes"
        )
    table = GemmTable.of([s.kernel for s in samples if isinstance(s.kernel, Gemm)], base)
    measured_s = np.array([s.time_s for s in samples])
    stacks = [s.stack for s in samples]
    names = sorted(set(stacks))
    stack = np.searchsorted(names, stacks)
    fixed = {"wave_exponent": base.gemm_fit(dtype).wave_exponent, "quantize_bytes": 0.0}
    priors = PRIORS if base.gemm_fit(dtype).k0 else _CPU_PRIORS
    unknowns = [*priors, *([_QUANTIZE] if quantized else ())]
    parameters = [*unknowns, *(levels(names) if len(names) > 1 else ())]
    parts = regions(table, measured_s)
    weights = _weights(parts["training"])
    peak, bandwidth = base.peak(dtype), base.memory_bytes_per_s
    full: Solution | None = None

    def learn(mask: Mask) -> Solution:
        shapes = GemmTable(*(getattr(table, field)[mask] for field in GemmTable.__slots__))

        def predict(values: Mapping[str, float]) -> FloatArray:
            times = gemm_times(shapes, {**fixed, **values}, peak, bandwidth)
            return times * level_factors(values, names)[stack[mask]] if len(names) > 1 else times

        start = None if full is None else full.values
        return solve(parameters, predict, measured_s[mask], weights=weights[mask], start=start)

    full = learn(np.ones(measured_s.size, dtype=bool))
    solution = full

    def times(mask: Mask) -> FloatArray:
        found = solution if mask.all() else learn(thinned(mask, _PLENTY))
        return gemm_times(table, {**fixed, **found.values}, peak, bandwidth)

    shapes = np.stack((table.results, table.m, table.n, table.k), axis=1)
    splits = kernel_splits(table.results * table.k, stacks, shapes)
    rows = assess(f"gemm.{dtype}", times, measured_s, parts, splits)
    values = {**fixed, **{p.name: solution.values[p.name] for p in unknowns}}
    uncertainty = {p.name: solution.uncertainty[p.name] for p in unknowns}
    return Fitted(GemmFit(**rounded(values)), uncertainty, rows, len(unknowns))


def levels(names: Sequence[str]) -> list[Parameter]:
    """One factor for each stack, about 1."""
    return [Parameter(f"{_PREFIX}{name}", 1.0, LEVEL_SPREAD, 0.3, 3.0) for name in names]


def level_factors(values: Mapping[str, float], names: Sequence[str]) -> FloatArray:
    """Factors of the stacks in the order of their names."""
    return np.array([values[f"{_PREFIX}{name}"] for name in names])


def rounded(values: Mapping[str, float], digits: int = 5) -> dict[str, float]:
    """Values as people read them: five digits are more than any measurement has."""
    return {name: float(f"{value:.{digits}g}") for name, value in values.items()}


def thinned(mask: Mask, most: int) -> Mask:
    """The mask with at most ``most`` of its rows, drawn at random (seeded)."""
    chosen = np.flatnonzero(mask)
    if chosen.size > most:
        chosen = np.random.default_rng(SEED).choice(chosen, most, replace=False)
    few = np.zeros_like(mask)
    few[chosen] = True
    return few


def _weights(training: Mask) -> FloatArray:
    """At least half of the weight lies on the training region, if there is anything in it.

    Serving tables hold mostly small shapes, whose errors are several times larger and of another kind.
    """
    inside, outside = int(training.sum()), int((~training).sum())
    weights = np.ones(training.size)
    if 0 < inside < outside:
        weights[~training] = inside / outside
    return weights
