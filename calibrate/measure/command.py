"""``simpar calibrate run`` on a terminal: progress, what was measured, and what an interruption leaves."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from calibrate.console import progress, say
from calibrate.errors import MeasurementError
from calibrate.fit.profile import kernel_class
from calibrate.measure.plan import Mode
from calibrate.measure.runner import Options, Outcome, Where, run, what_is_kept
from calibrate.samples import Measurements
from simpar.errors import nearest
from simpar.hardware.profile import Profile
from simpar.units import format_time

if TYPE_CHECKING:
    from rich.table import Table

_ON: tuple[Where, ...] = get_args(Where)


def run_command(
    *, out: Path, full: bool, resume: bool, job: Path | None, ranks: int | None, on: str, base: str | None, command: str
) -> Outcome | None:
    """Runs with a progress bar on stderr and prints what was measured; see :func:`calibrate.measure.runner.run`.

    Raises:
        typer.Exit: interrupted; what is kept has been said.
        SimparError: see there.
    """
    chosen = next((choice for choice in _ON if choice == on), None)
    if chosen is None:
        raise MeasurementError(f"--on '{on}' is unknown{nearest(on, _ON)}; choose one of {', '.join(_ON)}")
    mode: Mode = "full" if full else "quick"
    options = Options(out=out, mode=mode, resume=resume, job=job, ranks=ranks, on=chosen, base=base, command=command)
    with progress(lambda: what_is_kept(options) or "nothing was measured") as show:
        outcome = run(options, show)
    if outcome is not None:
        say(measured(outcome))
    return outcome


def measured(outcome: Outcome) -> str:
    """What was measured, in a line."""
    classes = Counter(kernel_class(sample).split(".")[0] for sample in outcome.samples.kernels)
    classes |= Counter(sample.op for sample in outcome.samples.collectives)
    parts = ", ".join(f"{count} {name}" for name, count in classes.items())
    return (
        f"measured {parts} in {outcome.outliers.rounds:,} rounds and {format_time(outcome.elapsed_s)}; "
        f"measurements are in {outcome.raw}"
    )


def table(profile: Profile, samples: Measurements) -> "Table":
    """What was measured, what was fitted to it with its relative uncertainty, and the errors on what was fitted."""
    from rich.table import Table  # noqa: PLC0415

    found = Table(title=f"{profile.device.title}: |predicted/measured - 1|", box=None)
    for column, options in _COLUMNS.items():
        found.add_column(column, **options)
    fitted: dict[str, list[str]] = {}
    for path, spread in profile.uncertainty.items():
        owner, _, name = path.rpartition(".")
        if owner.endswith("_ratio"):  # a ratio for each head size
            owner, _, ratio = owner.rpartition(".")
            name = f"{ratio}.{name}"
        fitted.setdefault(owner, []).append(f"{name} {_value(profile, path):.3g} ±{spread:.0%}")
    points = Counter(kernel_class(sample) for sample in samples.kernels)
    points |= Counter({"collective": sum(s.nodes == 1 for s in samples.collectives)})
    points |= Counter({"network": sum(s.nodes > 1 for s in samples.collectives), "launch": len(samples.launch_s)})
    for owner, texts in fitted.items():
        what = _CLASSES.get(owner, owner.removeprefix("device."))
        row = next((r for r in profile.accuracy if (r.what, r.region, r.split) == (what, "all", "fitted")), None)
        errors = ("", "") if row is None else (f"{row.median:.1%}", f"{row.p90:.1%}")
        found.add_row(what, f"{points[what]}" if points[what] else "", ", ".join(texts), *errors)
    return found


_CLASSES = {"node_link": "collective", "fabric": "network", "device": "device as a whole"}
_COLUMNS: dict[str, dict[str, Any]] = {
    "measured": {"no_wrap": True},
    "points": {"justify": "right"},
    "fitted": {"ratio": 1},
    "median": {"justify": "right"},
    "p90": {"justify": "right"},
}


def _value(profile: Profile, path: str) -> float:
    """The parameter at a dotted path."""
    value: Any = profile.model_dump(mode="json")
    for key in path.split("."):
        value = value[key]
    return float(value)
