"""How far off a predicted step may be, by what the descriptions say of their own errors.

The one place where the model's uncertainty lives. The step is a sum of seconds by class of cost
(:func:`simpar.sensitivity.parameters.cost_classes`), read off its critical path; each class is off by a log-normal
factor:

    T = T0 + Σ S_c (exp(σ_c z_c) - 1),  z_c standard normal,

with σ from the errors that the device's and the links' fits state (:mod:`simpar.cost.error`). Kernels of one class err
the same way, so their errors add up; classes are independent; what all kernels of a machine share is its ``level``, a
factor of its own on top: from one machine of its kind to another, or on a machine that was calibrated itself, from one
moment to another. Since z belongs to a class on a device or link, and not to a job, two jobs on the same machine err
together.

Not in it: another path that becomes critical when costs shift (hidden communication that would show), what the model
leaves out, and whatever the fits' errors do not cover. So intervals are what the parameters' errors imply, at the
least.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist
from zlib import crc32

import numpy as np
import numpy.typing as npt

from simpar.cost.collective import CollectiveError, collective_error
from simpar.cost.error import log_sd
from simpar.cost.kernel import kernel_error, kernel_s, runnable, unfused_attention
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import Device
from simpar.model.work import Attention, Gemm, GroupedGemm, Kernel, MemoryBound
from simpar.result import Result
from simpar.sensitivity.parameters import ATTENTION_BACKWARD, INTERFERENCE, cost_classes
from simpar.sensitivity.step import Dependence, class_seconds
from simpar.units import KIB, MIB

_ASSUMED = 0.25  # standard deviation of the logarithm where nothing states one, as for kernels without statistics
_SAMPLES = 20_000
_KERNELS = ("gemm", "attention", "memory_bound")
LEVEL = "level"
USUAL_LEVEL = 0.8
"""Probability that a step time lies in its interval, where nobody asks for another."""

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of uncertainty.

    Attributes:
        name: class of cost, such as ``gemm.bf16`` or ``network.bandwidth``.
        key: of what it is a property; sources of equal key err together.
        seconds: of the step that scale with it.
        error: standard deviation of the logarithm of what it takes over what was predicted.
        of_level: whether the machine's level scales it as well.
    """

    name: str
    key: str
    seconds: float
    error: float
    of_level: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """The uncertainty of one step.

    Attributes:
        step_s: the prediction.
        sources: what it is uncertain by.
        level: what all kernels of the machine share; its ``seconds`` are theirs.
    """

    step_s: float
    sources: tuple[Source, ...]
    level: Source

    def samples(self, n: int, seed: int = 0) -> Seconds:
        """``n`` possible step times in seconds; equal seeds give the same machines to every spread."""
        level = self.level.error * _normal(self.level.key, n, seed)
        total = np.full(n, self.step_s)
        for source in self.sources:
            shift = source.error * _normal(source.key, n, seed)
            total += source.seconds * np.expm1(shift + level if source.of_level else shift)
        return total

    def interval(self, level: float = 0.8) -> tuple[float, float]:
        """Bounds in seconds between which ``level`` of the possible step times lie, as many below as above.

        Raises:
            ValueError: ``level`` is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"level={level:g} must lie between 0 and 1; give a share such as 0.8")
        low, high = np.quantile(self.samples(_SAMPLES), ((1 - level) / 2, (1 + level) / 2))
        return float(low), float(high)

    @property
    def relative(self) -> float:
        """Relative standard deviation of the step, to first order."""
        own = sum((source.seconds * source.error) ** 2 for source in self.sources)
        return math.sqrt(own + (self.level.seconds * self.level.error) ** 2) / self.step_s if self.step_s else 0.0


def samples(result: Result, n: int, seed: int = 0) -> Seconds:
    """``n`` possible step times of a result in seconds; two results with one seed are drawn on the same machines."""
    return result.uncertainty.samples(n, seed)


def interval(result: Result, level: float = USUAL_LEVEL) -> tuple[float, float]:
    """Bounds of the step time in seconds that hold with probability ``level``.

    Two things are known of how far a prediction lies off: the errors of the fits (:class:`Spread`), and for a framework
    whose whole steps were measured, how far these lay off (its residual). What counts depends on the device:

    * On one of the catalog's, the residual alone. It was seen on such devices, so what their kernels, links and
      machines miss by is part of it already, and adding that again would count it twice. A device that nobody measured
      brings its level, which no row has seen, and being independent it adds up in squares.
    * On a machine that was calibrated, the fits' errors and the machine's own level, which no row knows either; a
      framework that is off there too is so for reasons of its own, so its residual comes on top as one more independent
      source. That is wide rather than narrow, since a residual has other devices' kernels in it.
    * Without a residual, the errors of the fits.

    Raises:
        ValueError: ``level`` is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level:g} must lie between 0 and 1; give a share such as 0.8")
    device, sd = result.job.cluster.device, _residual_sd(result)
    if sd is None:
        return result.uncertainty.interval(level)
    if device.machine is not None:
        own = result.uncertainty
        name = result.layout.framework.name
        steps = Source(name="framework", key=f"framework {name}", seconds=result.step_time_s, error=sd)
        return replace(own, sources=(*own.sources, steps)).interval(level)
    assumed = [kind for kind in result.job.cluster.devices if kind.fit_from is not None]
    sd = math.hypot(sd, max(map(_level_sd, assumed), default=0.0))
    factor = math.exp(sd * NormalDist().inv_cdf((1 + level) / 2))
    return result.step_time_s / factor, result.step_time_s * factor


def spread(result: Result) -> Spread:
    """The uncertainty of a result, from its critical path and the errors of the fits behind it.

    Args:
        result: of :func:`simpar.simulation.simulate`. ``result.uncertainty`` keeps the answer.
    """
    dependence = Dependence(result)
    cluster, device = result.job.cluster, result.job.cluster.device
    errors = _kernel_errors(dependence, device)
    dtypes = {name.removeprefix("gemm.") for name in errors if name.startswith("gemm.")}
    seconds = class_seconds(dependence, cost_classes(device, dtypes))
    seconds["attention"] -= seconds[ATTENTION_BACKWARD]  # a source of its own
    errors.update(_link_errors(cluster))
    errors.update(dict.fromkeys(("launch", "interference", "host.bandwidth", "host.latency"), _ASSUMED))
    seconds["interference"] = dependence.seconds(INTERFERENCE)
    owner = f"{device.name} of {device.machine}" if device.machine is not None else device.name
    keys = _keys(cluster)
    sources = tuple(
        Source(
            name=name,
            key=f"{keys.get(name.partition('.')[0], owner)}/{name}",
            seconds=spent,
            error=errors.get(name, 0.0),
            of_level=name.startswith(_KERNELS),
        )
        for name, spent in seconds.items()
        if spent
    )
    of_level = sum(source.seconds for source in sources if source.of_level)
    level = Source(name=LEVEL, key=f"{owner}/{LEVEL}", seconds=of_level, error=_level_sd(device))
    return Spread(result.step_time_s, sources, level)


def _normal(key: str, n: int, seed: int) -> Seconds:
    return np.random.default_rng([seed, crc32(key.encode())]).standard_normal(n)


def _residual_sd(result: Result) -> float | None:
    """By how much measured steps of the framework lay off, as a log-normal factor; None if none were measured."""
    framework = result.layout.framework
    residual = framework.residual_80
    if result.layout.has_experts and framework.residual_80_experts is not None:
        residual = framework.residual_80_experts
    return None if residual is None else residual / NormalDist().inv_cdf(0.9)


def _level_sd(device: Device) -> float:
    """A machine that was calibrated in too few rounds to see its level move does not stand still for that."""
    if LEVEL not in device.errors and device.machine is not None:
        return _ASSUMED
    return log_sd(device.errors.get(LEVEL, 0.0), device.errors.get(f"{LEVEL}.p90", 0.0))


def _keys(cluster: Cluster) -> dict[str, str]:
    link, fabric = cluster.node_link, cluster.fabric
    return {
        "node_link": f"node link {link.about or link.kind}",
        "network": f"network {fabric.about or 'without a name'}" if fabric is not None else "no network",
    }


def _link_errors(cluster: Cluster) -> dict[str, float]:
    """Bandwidths by the errors of large collectives, latencies by those of all sizes."""

    def both(name: str, size: int, nodes: int) -> Iterator[tuple[str, float]]:
        for term, nbytes in (("bandwidth", MIB), ("latency", KIB)):
            error: CollectiveError = collective_error(nbytes, size, nodes, cluster)
            yield f"{name}.{term}", log_sd(error.median, error.p90)

    inside = dict(both("node_link", cluster.gpus_per_node, 1))
    return {**inside, **dict(both("network", cluster.gpus, cluster.nodes))} if cluster.nodes > 1 else inside


def _kernel_errors(dependence: Dependence, device: Device) -> dict[str, float]:
    """Error of each class of kernels, as the mean over the time of those that the step depends on."""
    spent: defaultdict[str, float] = defaultdict(float)
    wrong: defaultdict[str, float] = defaultdict(float)
    for (whole, _), weight in dependence.weights.kernels.items():
        for kernel in _parts(runnable(whole, device)):
            time = kernel_s(kernel, device) * abs(weight)
            spent[_class(kernel)] += time
            wrong[_class(kernel)] += time * kernel_error(kernel, device)
    return {name: wrong[name] / time if time else 0.0 for name, time in spent.items()}


def _parts(kernel: Kernel) -> tuple[Kernel, ...]:
    if isinstance(kernel, Attention) and kernel.kernel == "unfused":
        return unfused_attention(kernel)
    return (kernel,)


def _class(kernel: Kernel) -> str:
    if isinstance(kernel, (Gemm, GroupedGemm)):
        return f"gemm.{kernel.dtype}"
    if isinstance(kernel, MemoryBound):
        return f"memory_bound.{kernel.memory_class}"
    return ATTENTION_BACKWARD if kernel.backward else "attention"
