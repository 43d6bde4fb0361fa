"""Fits what a machine has beside its kernels: launches, links, and what compute and collectives cost each other."""

from collections.abc import Sequence

import numpy as np

from calibrate.fit.collectives import fit_fabric, fit_node_link
from calibrate.fit.draft import Draft, source_of
from calibrate.fit.gemm import rounded
from calibrate.samples import InterferenceSample, Measurements, UpdateSample
from simpar.cost.error import MEDIAN, P90, widened
from simpar.cost.kernel import kernel_s
from simpar.hardware.cluster import Cluster, Fabric, FitError, NodeLink
from simpar.hardware.device import Device
from simpar.model.work import MemoryBound
from simpar.units import format_time

_ADAM_BYTES = 28  # a parameter's fp32 weight and two moments, read and written, and its gradient, read
_PRIOR_SPREAD = 0.3  # of a bandwidth that nobody measured: datasheet ratios of seven systems span 0.7 to 0.82


def fit_launch(draft: Draft, launch_s: Sequence[float]) -> None:
    """The host's time for a launch."""
    if not launch_s:
        draft.notes.append("launch time was not measured; kept as the base has it")
        return
    values = np.array(launch_s)
    middle = float(np.median(values))
    draft.device["launch_s"] = float(f"{middle:.4g}")
    draft.device["sources"]["launch_s"] = f"median of {len(launch_s)} measured launches"
    # Standard error of a median, from the quartiles, which a few slow launches do not move.
    spread = float(np.quantile(values, 0.75) - np.quantile(values, 0.25)) / 1.349
    draft.uncertainty["device.launch_s"] = float(f"{1.2533 * spread / middle / len(launch_s) ** 0.5:.3g}")


def fit_interference(draft: Draft, samples: Sequence[InterferenceSample]) -> None:
    """The rates at which compute and collectives go on beside each other: medians of the rounds."""
    if not samples:
        return
    measured = {
        "compute_rate_during_collectives": [sample.compute_rate for sample in samples],
        "collective_rate_during_compute": [sample.collective_rate for sample in samples],
    }
    for name, rates in measured.items():
        middle = float(np.median(rates))
        draft.device[name] = float(f"{middle:.4g}")
        draft.device["sources"][name] = (
            f"median of {len(rates)} rounds of products beside all-reduces, each alone and both at once"
        )
        draft.uncertainty[f"device.{name}"] = float(f"{np.std(rates) / middle / len(rates) ** 0.5:.3g}")


def compare_updates(draft: Draft, updates: Sequence[UpdateSample]) -> None:
    """How an optimizer's real step compares with what its traffic costs in the profile."""
    device = Device.model_validate(draft.device)
    for parameters in sorted({update.parameters for update in updates}):
        measured_s = float(np.median([update.time_s for update in updates if update.parameters == parameters]))
        predicted_s = kernel_s(MemoryBound(_ADAM_BYTES * parameters), device)
        draft.notes.append(
            f"a fused AdamW step over {parameters:,} parameters took {format_time(measured_s)}, "
            f"{measured_s / predicted_s:.2f} times what its traffic costs as an elementwise kernel"
        )


def fit_links(
    draft: Draft, measurements: Measurements, base: Device, fabric: Fabric | None, source: str
) -> tuple[NodeLink, Fabric | None]:
    """The links inside a node and between nodes; what was not measured stays as the base usually has it."""
    samples = measurements.collectives
    usual = Cluster.model_validate({"device": base})
    node_link, network = usual.node_link, fabric or usual.fabric
    inside = [s for s in samples if s.nodes == 1]
    outside = [s for s in samples if s.nodes > 1]
    if inside:
        found = fit_node_link(inside, node_link)
        errors = _widened(found.link.errors, measurements.collective_spread)
        node_link = found.link.replace(errors=errors, sources=(source_of(inside, source),))
        draft.report("node_link", found.uncertainty, found.accuracy)
        draft.notes += found.notes
    else:
        draft.notes.append("collectives inside a node were not measured; the node link is the base's usual one")
        draft.uncertainty["node_link.bandwidth_bytes_per_s"] = _PRIOR_SPREAD
    if outside and network is not None:
        per_node = max(s.ranks // s.nodes for s in outside)
        fitted = fit_fabric(outside, network, node_link, max(per_node, usual.gpus_per_node))
        network = fitted.fabric.replace(sources=(source_of(outside, source),))
        draft.report("fabric", fitted.uncertainty, fitted.accuracy)
        draft.notes += fitted.notes
    elif network is not None:
        draft.notes.append("collectives between nodes were not measured; the fabric is the base's usual one")
    return node_link, network


def _widened(errors: FitError, spread: float) -> FitError:
    """Errors of a fit to the medians of rounds as errors of any one round: independent, so their squares add up."""
    if not spread:
        return errors
    share = {"median": MEDIAN, "p90": P90}
    wider = {name: widened(getattr(errors, name), share[name.partition("_")[0]], spread) for name in dict(errors)}
    return errors.replace(**rounded(wider, 3))
