"""From the rounds on disk to the profile: one sample for each item, the fits, and what else was learned."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np

from calibrate.detect import Machine
from calibrate.fit import fit_profile
from calibrate.fit.accuracy import accuracy
from calibrate.measure.interference import Rates
from calibrate.measure.journal import OUTLIER, Outliers, Statistic, outliers, settle
from calibrate.measure.plan import KernelItem, MeasurementPlan
from calibrate.measure.session import Update
from calibrate.samples import Measurements
from calibrate.tables import read_measurements
from simpar.cost.kernel import kernel_s
from simpar.hardware.device import Device
from simpar.hardware.profile import Accuracy, Profile
from simpar.model.work import MemoryBound
from simpar.units import format_time

_ADAM_BYTES = 28  # a parameter's fp32 weight and two moments, read and written, and its gradient, read


def fit_measured(
    raw: Path,
    base: Device,
    machine: Machine,
    plan: MeasurementPlan,
    *,
    statistic: Statistic,
    rates: Sequence[Rates] = (),
    updates: Sequence[Update] = (),
    command: str = "",
) -> tuple[Profile, Measurements, Outliers]:
    """The profile of what is on disk, the samples that it was fitted to, and the outliers among the rounds.

    Args:
        raw: the journal.
        base: device with the datasheet rates.
        machine: what was detected.
        plan: what was measured; its notes and the job's products are reported.
        statistic: which round of an item counts.
        rates: of compute and collectives beside each other, one a round.
        updates: steps of an optimizer.
        command: what to record as having made the profile.

    Raises:
        MeasurementError: too little was measured for a fit.
    """
    rounds = read_measurements(raw)
    settled, found = settle(rounds, statistic), outliers(rounds)
    profile = _with_interference(fit_profile(settled, base, command=command), rates)
    notes = [*profile.notes, *plan.notes, *machine.warnings, *_update_notes(profile.device, updates)]
    if found.slow:
        notes.append(
            f"{found.slow} of {found.rounds} rounds took over {OUTLIER} times their median, at worst "
            f"{found.worst:.1f} times: {found.what}"
        )
    came = profile.provenance
    profile = profile.replace(
        accuracy=(*profile.accuracy, *_job_accuracy(profile.device, plan, settled)),
        notes=tuple(dict.fromkeys(notes)),
        provenance=came.replace(
            facts={**came.facts, "statistic": f"{statistic} round", "base": base.name},
            versions={**came.versions, **machine.versions},
        ),
    )
    return profile, settled, found


def _with_interference(profile: Profile, rates: Sequence[Rates]) -> Profile:
    """The profile with the median of the measured rates in its device."""
    if not rates:
        return profile
    fields = ("compute_rate_during_collectives", "collective_rate_during_compute")
    columns = dict(zip(fields, zip(*rates, strict=True), strict=True))
    sources, uncertainty = dict(profile.device.sources), dict(profile.uncertainty)
    facts = dict(profile.provenance.facts)
    for name, values in columns.items():
        sources[name] = f"median of {len(values)} rounds of products beside all-reduces, each alone and both at once"
        uncertainty[f"device.{name}"] = float(f"{np.std(values) / median(values) / len(values) ** 0.5:.3g}")
        facts[name] = " ".join(f"{value:.3f}" for value in values)
    changed = {name: float(f"{median(values):.4g}") for name, values in columns.items()}
    device = profile.device.replace(**changed, sources=sources)
    return profile.replace(device=device, uncertainty=uncertainty, provenance=profile.provenance.replace(facts=facts))


def _update_notes(device: Device, updates: Sequence[Update]) -> list[str]:
    """How an optimizer's real step compares with what its traffic costs in the profile."""
    notes = []
    for parameters, time_s in updates:
        predicted_s = kernel_s(MemoryBound(_ADAM_BYTES * parameters), device)
        notes.append(
            f"a fused AdamW step over {parameters:,} parameters took {format_time(time_s)}, "
            f"{time_s / predicted_s:.2f} times what its traffic costs as an elementwise kernel"
        )
    return notes


def _job_accuracy(device: Device, plan: MeasurementPlan, settled: Measurements) -> list[Accuracy]:
    """The fit's errors on the job's own products."""
    wanted = {item.kernel for item in plan.items if isinstance(item, KernelItem) and item.job}
    samples = [sample for sample in settled.kernels if sample.kernel in wanted]
    if not samples:
        return []
    predicted = np.array([kernel_s(sample.kernel, device) for sample in samples])
    measured = np.array([sample.time_s for sample in samples])
    everything = np.ones(len(samples), dtype=bool)
    rows = accuracy("gemm.job", "fitted", predicted, measured, regions={"all": everything}, among=everything)
    return [
        row.replace(**{n: float(f"{getattr(row, n):.4g}") for n in ("mean", "median", "p90", "bias")}) for row in rows
    ]
