"""From the rounds on disk to the profile: one sample for each item, the fits, and what else was learned."""

from collections.abc import Iterable
from math import isfinite
from pathlib import Path

import numpy as np

from calibrate.detect import Machine
from calibrate.fit import fit_profile
from calibrate.fit.accuracy import accuracy
from calibrate.measure.plan import KernelItem, MeasurementPlan
from calibrate.rounds import OUTLIER, Outliers, doubtful, outliers, settle
from calibrate.samples import Measurements
from calibrate.tables import read_measurements
from simpar.cost.kernel import kernel_s
from simpar.hardware.device import Device
from simpar.hardware.profile import Accuracy, Profile

_MISFIT = 0.5  # median error from which on a fit is no description of what it was fitted to


def fit_measured(
    raw: Path, base: Device, machine: Machine, plan: MeasurementPlan, *, command: str = ""
) -> tuple[Profile, Measurements, Outliers]:
    """The profile of what is on disk, the samples that it was fitted to, and the outliers among the rounds.

    Args:
        raw: the journal.
        base: device with the datasheet rates.
        machine: what was detected.
        plan: what was measured; its notes and the job's products are reported.
        command: what to record as having made the profile.

    Raises:
        MeasurementError: too little was measured for a fit.
    """
    rounds = read_measurements(raw)
    settled, found = settle(rounds), outliers(rounds)
    profile = fit_profile(settled, base, command=command)
    notes = [*profile.notes, *plan.notes, *machine.warnings, *doubts(rounds), *misfits(profile.accuracy)]
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
            facts={**came.facts, "base": base.name}, versions={**came.versions, **machine.versions}
        ),
    )
    return profile, settled, found


def doubts(rounds: Measurements) -> list[str]:
    """A sentence on the classes whose rounds do not agree, with how well their times are known."""
    found = [
        f"{name} to ±{value:.0%}" if isfinite(value) else f"{name} by too few rounds to say how well"
        for name, value in doubtful(rounds).items()
    ]
    if not found:
        return []
    return [f"the machine was not quiet enough to measure well, and some times are known badly: {', '.join(found)}"]


def misfits(accuracy: Iterable[Accuracy]) -> list[str]:
    """A sentence for each class whose fit misses its own points by so much that predictions with it mean little."""
    return [
        f"{row.what} fits its own {row.count} points badly (off by {row.median:.0%} in the median, by {row.p90:.0%} at "
        "the 90th percentile), so predictions with it mean little; calibrate again when the machine is quieter"
        for row in accuracy
        if (row.region, row.split) == ("all", "fitted") and row.median > _MISFIT
    ]


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
