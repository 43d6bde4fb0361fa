"""A profile while it is being fitted: what the classes' fits change in the base device, and what they report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from calibrate.fit.accuracy import typical
from calibrate.fit.gemm import rounded
from calibrate.samples import CollectiveSample, KernelSample
from simpar.hardware.profile import Accuracy

_STATISTICS = ("mean", "median", "p90", "bias")


@dataclass(slots=True)
class Draft:
    """What the classes' fits change in the base device, and what they report."""

    device: dict[str, Any]
    uncertainty: dict[str, float] = field(default_factory=dict)
    accuracy: list[Accuracy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self, path: str, uncertainty: Mapping[str, float], rows: Iterable[Accuracy]) -> None:
        """Takes up the uncertainty of the parameters at a dotted path, and errors."""
        self.uncertainty |= {f"{path}.{name}": float(f"{value:.3g}") for name, value in uncertainty.items()}
        self.accuracy += [row.replace(**rounded({n: getattr(row, n) for n in _STATISTICS}, 4)) for row in rows]

    def errors(self, key: str, what: str, regions: Sequence[str], unknowns: int) -> None:
        """States the error of a class in the device, from what was reported of the first region with enough points."""
        found = typical(self.accuracy, what, regions, unknowns)
        if found is None and "all" in regions:
            found = typical(self.accuracy, what, ("all",), unknowns, fewest=1)
        if found is not None:
            self.device["errors"] |= rounded({key: found[0], f"{key}.p90": found[1]}, 3)


def source_of(samples: Sequence[KernelSample | CollectiveSample], given: str) -> str:
    """What to say of where a fit comes from: files, stacks and the number of points."""
    stacks = sorted({s.stack for s in samples if s.stack})
    files = sorted({s.source for s in samples if s.source})
    of = f"{given}, {', '.join(files)}" if given else ", ".join(files) or "measurements"
    more = f" and {len(stacks) - 4} more" if len(stacks) > 5 else ""
    by = f"{', '.join(stacks[:4] if more else stacks)}{more}; " if stacks else ""
    return f"fitted by simpar calibrate fit to {of}: {by}{len(samples):,} points"
