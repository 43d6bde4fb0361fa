"""A vectorised twin of :mod:`simpar.cost.collective` over measured points, and the fits of links and fabrics.

Points are spread evenly over their nodes. The library's choice among algorithms is part of the model: the least of the
admissible ones, so a fit decides by itself from which size on NVLink SHARP takes over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.errors import MeasurementError
from calibrate.fit.accuracy import accuracy, assess, collective_splits, typical
from calibrate.fit.gemm import rounded
from calibrate.fit.robust import FloatArray, Mask, Parameter, Solution, solve
from calibrate.samples import CollectiveSample
from simpar.hardware.cluster import Fabric, FitError, NodeLink
from simpar.hardware.profile import Accuracy
from simpar.units import MIB, US, gbps

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")
"""Operations that have a cost."""

SCALE = 0.1  # of outliers; collectives scatter about twice as much as kernels
ENVELOPE = 1.3  # a point so far above a larger one's time is reported
_TREE_ACROSS_NODES = 0.9
_FEWEST = 4
_LINK_FIELDS = (
    "bandwidth_bytes_per_s", "base_latency_s", "step_latency_s", "copy_fraction", "smoothness", "p2p_latency_s",
    "peer_latency_s", "nvls_ratio", "nvls_latency_s", "tree_ratio",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Points:
    """Measured collectives as columns, each of shape (points,).

    Attributes:
        op: operation.
        nbytes: size as nccl-tests counts it.
        ranks: members.
        nodes: nodes they are on.
        time_s: measured, or the monotone envelope of what was measured.
    """

    op: NDArray[np.str_]
    nbytes: FloatArray
    ranks: FloatArray
    nodes: FloatArray
    time_s: FloatArray

    @classmethod
    def of(cls, samples: Sequence[CollectiveSample]) -> "Points":
        """Columns of samples."""
        numbers = np.array([(s.nbytes, s.ranks, s.nodes, s.time_s) for s in samples], dtype=float).reshape(-1, 4)
        return cls(np.array([s.op for s in samples], dtype=str), *numbers.T)

    def where(self, mask: Mask) -> "Points":
        """The masked points."""
        return Points(*(getattr(self, field)[mask] for field in Points.__slots__))


class FittedLink(NamedTuple):
    """Outcome for the path inside a node: description, relative uncertainty, errors, and what was striking."""

    link: NodeLink
    uncertainty: dict[str, float]
    accuracy: list[Accuracy]
    notes: list[str]


class FittedFabric(NamedTuple):
    """Outcome for the network between nodes: description, relative uncertainty, errors, and what was striking."""

    fabric: Fabric
    uncertainty: dict[str, float]
    accuracy: list[Accuracy]
    notes: list[str]


def collective_times(points: Points, link: Mapping[str, float], fabric: Mapping[str, float] | None, *, kind: str,
                     nvls: bool) -> FloatArray:  # fmt: skip
    """Twin of :func:`simpar.cost.collective.collective_cost` and ``p2p_cost``: seconds of each point.

    Args:
        points: operations, sizes and groups.
        link: numeric fields of a :class:`NodeLink`.
        fabric: numeric fields of a :class:`Fabric` and ``nic_bytes_per_s``, a GPU's share of the node's NICs; None
            if all points are on one node.
        kind: of the node link.
        nvls: whether its switch can reduce.
    """
    times = np.empty(points.time_s.size)
    for op in np.unique(points.op):
        chosen = points.op == op
        part = _Group(points.where(chosen), link, fabric or {})
        if op == "all_reduce":
            best = part.ring(2)
            if kind != "host":
                best = np.minimum(best, part.tree())
                if nvls:
                    best = np.minimum(best, part.nvls())
            times[chosen] = best
        elif op in ("all_gather", "reduce_scatter"):
            times[chosen] = part.ring(2 if op == "reduce_scatter" and kind == "host" else 1)
        elif op == "all_to_all":
            times[chosen] = part.pairwise(copies=kind == "host")
        elif op == "sendrecv":
            times[chosen] = part.message()
        else:
            times[chosen] = part.chain()
    return times


class _Group:
    """Points of one operation with the values that price them; the formulas are those of the cost function."""

    def __init__(self, points: Points, link: Mapping[str, float], fabric: Mapping[str, float]) -> None:
        self.nbytes, self.n, self.k = points.nbytes, points.ranks, points.nodes
        self.g = self.n / self.k
        self.many = self.k > 1
        self.link, self.fabric = link, fabric
        self.bandwidth = link["bandwidth_bytes_per_s"]
        self.base_s, self.step_s = link["base_latency_s"], link["step_latency_s"]
        # Without a fabric nothing is on several nodes, so these stand for nothing.
        self.nic = fabric.get("nic_bytes_per_s", np.inf)
        self.level_s = 2 * np.log2(self.k) * fabric.get("tree_level_s", 0.0)

    def ring(self, passes: int) -> FloatArray:
        n, k = self.n, self.k
        wire = passes * (n - 1) / n * self.nbytes
        inside = (wire + self.link["copy_fraction"] * self.nbytes / n) / self.bandwidth * (self.g > 1)
        within_s = max(self.fabric.get("ring_intra_step_s", 0.0), self.step_s)
        between_s = max(self.fabric.get("ring_step_s", 0.0), self.step_s)
        steps_s = np.where(self.many, k * (self.g - 1) * within_s + (k - 1) * between_s, (n - 1) * self.step_s)
        streaming = np.where(self.many, np.maximum(inside, wire / self.g / self.nic), inside)
        return self._blend(self.base_s + passes * steps_s, streaming, "smoothness")

    def tree(self) -> FloatArray:
        wire = 2 * self.nbytes * (self.g > 1)
        ratio = np.where(self.many, _TREE_ACROSS_NODES, self.link["tree_ratio"])
        latency = self.base_s + 2 * (self.g - 1) * self.step_s + self.level_s
        streaming = np.maximum(wire / (ratio * self.bandwidth), self._tree_nic())
        return self._blend(latency, streaming, "tree_smoothness")

    def nvls(self) -> FloatArray:
        streaming = (self.g + 1) / self.g * self.nbytes / (self.link["nvls_ratio"] * self.bandwidth)
        latency = self.link["nvls_latency_s"] + self.level_s
        times = self._blend(latency, np.maximum(streaming, self._tree_nic()), "tree_smoothness")
        return np.where(self.g > 4, times, np.inf)

    def pairwise(self, *, copies: bool) -> FloatArray:
        wire = (self.g - 1) / self.n * self.nbytes
        copied = self.link["copy_fraction"] * self.nbytes / self.n if copies else 0.0
        outside = (self.n - self.g) / self.n * self.nbytes / self.nic
        latency = self._message_s() + self.link["peer_latency_s"] * (self.n - 1)
        return self._blend(latency, np.maximum((wire + copied) / self.bandwidth, outside), "smoothness")

    def message(self) -> FloatArray:
        slowest = min(self.nic, self.fabric.get("channels_bytes_per_s", np.inf))
        streaming = np.where(self.many, self.nbytes / slowest, self.nbytes / self.bandwidth)
        return self._blend(self._message_s(), streaming, "smoothness")

    def chain(self) -> FloatArray:
        between_s = max(self.fabric.get("ring_step_s", 0.0), self.step_s)
        latency = self.base_s + (self.n - self.k) * self.step_s + (self.k - 1) * between_s
        inside = self.nbytes * (self.g > 1) / self.bandwidth
        streaming = np.where(self.many, np.maximum(inside, self.nbytes / self.g / self.nic), inside)
        return self._blend(latency, streaming, "smoothness")

    def _message_s(self) -> FloatArray:
        return np.where(self.many, self.fabric.get("p2p_latency_s", 0.0), 0.0) + self.link["p2p_latency_s"]

    def _tree_nic(self) -> FloatArray:
        share = np.select([self.k < 2, self.k == 2, self.k == 3], [0.0, 1.0, 4 / 3], 2.0)
        wire: FloatArray = share * self.nbytes / self.g / self.nic
        return wire

    def _blend(self, latency: FloatArray, streaming: FloatArray, across: str) -> FloatArray:
        p = np.where(self.many, self.fabric.get(across, 1.0), self.link["smoothness"])
        start = np.maximum(latency, 1e-15)  # an empty latency adds nothing, whatever the power
        blended: FloatArray = np.where(latency > 0, start * (1.0 + (streaming / start) ** p) ** (1.0 / p), streaming)
        return blended


def envelope(samples: Sequence[CollectiveSample]) -> tuple[list[CollectiveSample], FloatArray, list[str]]:
    """Known operations, times brought down to the monotone envelope t*(S) = min over S' >= S of t(S') of the series.

    A mistuned library can take longer for less; what nobody would keep is not worth fitting. Only points more than 1.3
    times above the envelope are lowered to it: the others differ from it by noise, of which a minimum would be biased.

    Returns:
        The samples that count, their times to fit, and a note for each series with points that were lowered.
    """
    kept = [s for s in samples if s.op in OPS and s.ranks > 1]
    notes = []
    if unknown := sorted({s.op for s in samples} - set(OPS)):
        notes.append(f"not fitted, having no cost of their own: {', '.join(unknown)}")
    series: dict[tuple[str, int, int, str], list[int]] = {}
    for index, sample in enumerate(kept):
        series.setdefault((sample.op, sample.ranks, sample.nodes, sample.stack), []).append(index)
    times = np.array([s.time_s for s in kept])
    lowest = times.copy()
    for (op, ranks, nodes, stack), members in series.items():
        order = sorted(members, key=lambda index: -kept[index].nbytes)
        least = dict(zip(order, np.minimum.accumulate(times[order]).tolist(), strict=True))
        above = [index for index in order if times[index] > ENVELOPE * least[index]]
        if above:
            lowest[above] = [least[index] for index in above]
            worst = max(above, key=lambda index: times[index] / lowest[index])
            notes.append(
                f"{op} over {ranks} ranks on {nodes} node{'s' if nodes > 1 else ''} ({stack or 'unnamed stack'}): "
                f"{len(above)} of {len(order)} sizes take over {ENVELOPE} times as long as a larger one, at worst "
                f"{times[worst] / lowest[worst]:.1f} times at {kept[worst].nbytes:.0f} bytes"
            )
    return kept, lowest, notes


def fit_node_link(samples: Sequence[CollectiveSample], base: NodeLink) -> FittedLink:
    """Fits the path between the GPUs of a node.

    Where ``base`` has several levels (PCIe servers), each is fitted to the groups that reach it and no further.

    Args:
        samples: collectives on one node.
        base: link with datasheet rates; what the samples do not touch keeps its prior.

    Raises:
        MeasurementError: too few points for any level, or points over more than one node.
    """
    if base.reach is not None and base.beyond is not None:
        inner = [s for s in samples if s.ranks <= base.reach]
        outer = [s for s in samples if s.ranks > base.reach]
        if len(outer) >= _FEWEST:
            far = fit_node_link(outer, base.beyond)
            beyond = {f"beyond.{name}": spread for name, spread in far.uncertainty.items()}
            if len(inner) < _FEWEST:
                return FittedLink(base.replace(beyond=far.link), beyond, far.accuracy, far.notes)
            near = _fit_level(inner, base)
            link = near.link.replace(beyond=far.link)
            return FittedLink(
                link, {**near.uncertainty, **beyond}, near.accuracy + far.accuracy, near.notes + far.notes
            )
        return _fit_level(inner, base)
    return _fit_level(samples, base)


def _fit_level(samples: Sequence[CollectiveSample], base: NodeLink) -> FittedLink:
    kept, lowest, notes = envelope(samples)
    if len(kept) < _FEWEST or any(s.nodes > 1 for s in kept):
        raise MeasurementError(
            f"{len(kept)} collectives do not make a fit of a node's links; measure at least {_FEWEST} on one node"
        )
    raw = Points.of(kept)
    points = Points(raw.op, raw.nbytes, raw.ranks, raw.nodes, lowest)
    host = base.kind == "host"
    nvls = base.nvls and bool(((raw.ranks > 4) & (raw.op == "all_reduce")).any())
    parameters = _link_parameters(base, nvls)
    fixed = {field: float(getattr(base, field)) for field in _LINK_FIELDS}
    if host:
        fixed["smoothness"] = 1.0

    def priced(values: Mapping[str, float], part: Points) -> FloatArray:
        return collective_times(part, {**fixed, **values}, None, kind=base.kind, nvls=base.nvls)

    def learn(mask: Mask) -> Solution:
        part = points.where(mask)
        return solve(parameters, lambda values: priced(values, part), part.time_s, scale=SCALE)

    full = learn(np.ones(len(kept), dtype=bool))

    def times(mask: Mask) -> FloatArray:
        return priced((full if mask.all() else learn(mask)).values, points)

    name = "collective" if base.reach is None else f"collective to {base.reach} ranks"
    rows = assess(name, times, raw.time_s, _regions(raw), collective_splits(raw.nbytes, raw.ranks))
    rows += _by_op(times(np.ones(len(kept), dtype=bool)), raw)
    values = rounded({**fixed, **full.values})
    # A host has no datasheet rate, so the fitted one stands for it where it is higher.
    nominal = max(base.nominal_bytes_per_s, values["bandwidth_bytes_per_s"]) if host else base.nominal_bytes_per_s
    errors = _fit_error(rows, name, len(parameters))
    link = base.replace(**values, nominal_bytes_per_s=nominal, errors=errors)
    return FittedLink(link, full.uncertainty, rows, notes)


def _link_parameters(base: NodeLink, nvls: bool) -> list[Parameter]:
    """Priors: ratios to the datasheet and latencies of seven NVLink systems; a host's are its catalog values."""
    nominal = base.nominal_bytes_per_s
    if base.kind == "host":
        wide = {field: Parameter(field, float(getattr(base, field)), 1.0) for field in _LINK_FIELDS}
        names = ("base_latency_s", "step_latency_s", "copy_fraction", "p2p_latency_s", "peer_latency_s")
        return [Parameter("bandwidth_bytes_per_s", nominal, 1.0), *(wide[field] for field in names)]
    share, spread = (0.79, 0.15) if base.kind == "nvlink" else (0.7, 1.0)
    parameters = [
        Parameter("bandwidth_bytes_per_s", share * nominal, spread, high=nominal),
        Parameter("base_latency_s", 7.0 * US, 0.5),
        Parameter("step_latency_s", 1.0 * US, 0.5),
        Parameter("copy_fraction", 0.3, 1.0, 1e-3, 10.0),
        Parameter("smoothness", 0.6, 0.2, 0.3, 1.0),
        Parameter("p2p_latency_s", 9.0 * US, 0.5),
        Parameter("peer_latency_s", 0.2 * US, 1.0),
    ]
    if nvls:
        parameters.append(Parameter("nvls_ratio", 0.83, 0.1, 0.1, 1.0))
        parameters.append(Parameter("nvls_latency_s", 22.0 * US, 0.3))
    return parameters


_FABRIC_PRIORS = (
    Parameter("efficiency", 0.95, 0.04, 0.1, 1.0),  # narrow: else the trees' smoothness trades against it
    Parameter("ring_intra_step_s", 3.0 * US, 0.5),
    Parameter("ring_step_s", 8.0 * US, 0.7),
    Parameter("tree_level_s", 6.0 * US, 0.6),
    Parameter("smoothness", 0.8, 0.2, 0.3, 1.0),
    Parameter("tree_smoothness", 0.5, 0.25, 0.3, 1.0),
    Parameter("p2p_latency_s", 5.0 * US, 0.7),
)


def fit_fabric(samples: Sequence[CollectiveSample], base: Fabric, link: NodeLink, gpus_per_node: int) -> FittedFabric:
    """Fits the network between nodes; the path inside a node is taken as it is.

    Args:
        samples: collectives over more than one node.
        base: fabric with the line rate and number of NICs.
        link: the path inside a node.
        gpus_per_node: GPUs that share a node's NICs.

    Raises:
        MeasurementError: too few points over more than one node.
    """
    kept, lowest, notes = envelope([s for s in samples if s.nodes > 1])
    if len(kept) < _FEWEST:
        raise MeasurementError(
            f"{len(kept)} collectives over several nodes do not make a fit of the network; measure at least {_FEWEST}"
        )
    raw = Points.of(kept)
    points = Points(raw.op, raw.nbytes, raw.ranks, raw.nodes, lowest)
    inside = {field: float(getattr(link, field)) for field in _LINK_FIELDS}
    line = gbps(base.nic_gbps) * (base.nics_per_node or gpus_per_node) / gpus_per_node
    channels = base.p2p_channels * base.p2p_channel_bytes_per_s if base.p2p_channels else np.inf

    def priced(values: Mapping[str, float], part: Points) -> FloatArray:
        between = {**values, "nic_bytes_per_s": line * values["efficiency"], "channels_bytes_per_s": channels}
        return collective_times(part, inside, between, kind=link.kind, nvls=link.nvls)

    def learn(mask: Mask) -> Solution:
        part = points.where(mask)
        return solve(_FABRIC_PRIORS, lambda values: priced(values, part), part.time_s, scale=SCALE)

    full = learn(np.ones(len(kept), dtype=bool))

    def times(mask: Mask) -> FloatArray:
        return priced((full if mask.all() else learn(mask)).values, points)

    rows = assess("network", times, raw.time_s, _regions(raw), collective_splits(raw.nbytes, raw.nodes))
    fabric = base.replace(
        **rounded(full.values),
        errors=_fit_error(rows, "network", len(_FABRIC_PRIORS)),
        measured_nodes=int(raw.nodes.max()),
    )
    return FittedFabric(fabric, full.uncertainty, rows, notes)


def _regions(points: Points) -> dict[str, Mask]:
    return {"large": points.nbytes >= MIB, "all": np.ones(points.nbytes.size, dtype=bool)}


def _by_op(predicted_s: FloatArray, points: Points) -> list[Accuracy]:
    rows = []
    everything = np.ones(points.nbytes.size, dtype=bool)
    for op in np.unique(points.op):
        regions = {"all": points.op == op}
        rows += accuracy(f"collective.{op}", "fitted", predicted_s, points.time_s, regions=regions, among=everything)
    return rows


def _fit_error(rows: Sequence[Accuracy], what: str, unknowns: int) -> FitError:
    whole = typical(rows, what, ("all",), unknowns, fewest=1) or (0.0, 0.0)
    large = typical(rows, what, ("large", "all"), unknowns, fewest=1) or whole
    names = ("median", "p90", "median_large", "p90_large")
    return FitError(**rounded(dict(zip(names, (*whole, *large), strict=True)), 3))
