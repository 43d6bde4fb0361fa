"""An outcome for people and programs: a table, plain values for JSON, a page with both timelines."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calibrate.check.pulse import Level
from calibrate.check.run import COVERAGE, Kind, Outcome, Pair, Row
from calibrate.match import match
from simpar.trace.trace import COMMUNICATION_KINDS
from simpar.units import format_time

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from rich.console import RenderableType

    from simpar.view.compare import Difference

_KINDS: tuple[Kind, ...] = ("replay", "training")
HOW = (
    f"{COVERAGE:.0%} intervals from the profile's errors: kernels of a class and links each by theirs, all kernels by "
    "how much the machine's level moved while it was calibrated; training steps with the framework's residual on top, "
    "where one was measured"
)
_TITLES = {"replay": "replayed programs", "training": "real training steps"}


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """Everything that was found, as plain values; times in seconds, errors as predicted/measured - 1."""
    found: dict[str, Any] = {
        kind: {
            "median_error": outcome.median_error(kind),
            "median_error_at_level": outcome.median_error(kind, at_level=True),
            "coverage": outcome.coverage(kind),
            "rows": [_row(row) for row in outcome.of(kind)],
        }
        for kind in _KINDS
    }
    return {
        **found,
        "coverage": outcome.coverage(),
        "nominal_coverage": COVERAGE,
        "interval": HOW,
        "profile": outcome.profile.name,
        "machine": outcome.machine.facts,
        "load": {"before": outcome.load[0], "after": outcome.load[1]},
        "level": _level(outcome.level()),
        "expected_level": _level(outcome.expected),
        "levels": {name: _level(one) for name, one in outcome.levels.items()},
        "notes": list(outcome.notes),
    }


def tables(outcome: Outcome) -> "list[RenderableType]":
    """What people read: one table of all rows, then the figures and notes, one a line."""
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    found: list[RenderableType] = []
    for kind in _KINDS:
        table = Table(title=_TITLES[kind], box=None, title_justify="left", title_style="bold")
        for column in ("plan", "network"):
            table.add_column(column, no_wrap=True)
        for column in ("predicted", "interval", "measured", "lowest", "error", "inside", "error at level"):
            table.add_column(column, no_wrap=True, justify="right")
        for row in outcome.of(kind):
            table.add_row(
                row.plan,
                row.network,
                format_time(row.predicted_s),
                f"{format_time(row.low_s)} – {format_time(row.high_s)}",
                format_time(row.measured_s),
                format_time(row.lowest_s),
                f"{row.error:+.0%}",
                "yes" if row.inside else "no",
                f"{row.error_at_level:+.0%}",
            )
        found.append(table)
    return [*found, *(Text(line) for line in summary(outcome))]


def summary(outcome: Outcome) -> list[str]:
    """The figures in sentences."""
    lines = []
    for kind in _KINDS:
        plain, levelled = outcome.median_error(kind), outcome.median_error(kind, at_level=True)
        if plain is not None and levelled is not None:
            lines.append(
                f"{_TITLES[kind]}: median error {plain:.0%}; {levelled:.0%} if predicted at the level of the minute"
            )
    coverage = outcome.coverage()
    if coverage is not None:
        lines.append(f"{coverage:.0%} of the measurements lie inside their interval ({HOW})")
    now, expected = outcome.level(), outcome.expected
    lines.append(
        f"level: kernels took {now.compute:.2f} and communication {now.communication:.2f} times what the profile says"
    )
    if now.compute_beside is not None and now.communication_beside is not None:
        lines.append(
            f"interference: beside an all-reduce, compute ran at {now.compute_beside:.2f} of its speed"
            f"{_than(expected.compute_beside)} and the all-reduce at {now.communication_beside:.2f}"
            f"{_than(expected.communication_beside)}"
        )
    lines.append(f"load of the machine: {outcome.load[0]:.1f} before, {outcome.load[1]:.1f} after")
    return [*lines, *(f"note: {note}" for note in outcome.notes)]


def _than(expected: float | None) -> str:
    return "" if expected is None else f" (predicted {expected:.2f})"


def figure(outcome: Outcome, *, dark: bool = False) -> "go.Figure":
    """Predicted and measured timeline of every case, one shown at a time."""
    from simpar.view.compare import combine, compare  # noqa: PLC0415 - plotly only where it draws

    return combine(
        {
            pair.name: compare(
                pair.predicted,
                pair.measured,
                differences(pair),
                title=f"{pair.name}, predicted and measured",
                subtitle=f"profile {outcome.profile.name}",
                dark=dark,
            )
            for pair in outcome.pairs
        }
    )


def write_page(outcome: Outcome, path: str | Path) -> None:
    """Writes :func:`figure` as one HTML file, whole or not at all.

    Raises:
        OutputError: the file cannot be written there.
    """
    from simpar.view.compare import write_comparison  # noqa: PLC0415

    write_comparison(figure(outcome), str(path), title=f"simpar: check of {outcome.profile.name}")


def differences(pair: Pair) -> "list[Difference]":
    """By name, kernels of the operations, and communication wherever it runs: predicted and measured, paired."""
    from simpar.view.compare import Difference  # noqa: PLC0415

    total: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for kernels in (True, False):
        paired = match(pair.predicted, pair.measured, kernels=kernels)
        for key, predicted, measured in zip(
            paired.keys, paired.predicted_ns.tolist(), paired.measured_ns.tolist(), strict=True
        ):
            if kernels or key.kind in COMMUNICATION_KINDS:
                name = f"{key.name} ({key.kind})" if key.kind in COMMUNICATION_KINDS else _words(key.name)
                entry = total[name]
                entry[0] += 1
                entry[1] += predicted
                entry[2] += max(1, measured)
    return [Difference(name, *counts) for name, counts in total.items()]


def _words(name: str) -> str:
    """A kernel's name; layers of a ``torch.nn.Sequential`` are called by their number alone.

    >>> _words("6 gemm grad"), _words("qkv")
    ('layer 6 gemm gradient', 'qkv')
    """
    layer = f"layer {name}" if name[:1].isdigit() else name
    return f"{layer}ient" if layer.endswith(" grad") else layer


def _row(row: Row) -> dict[str, Any]:
    return {
        "plan": row.plan,
        "network": row.network,
        "ranks": row.ranks,
        "predicted_s": row.predicted_s,
        "low_s": row.low_s,
        "high_s": row.high_s,
        "inside": row.inside,
        "measured_s": row.measured_s,
        "lowest_s": row.lowest_s,
        "rounds_s": list(row.rounds_s),
        "error": row.error,
        "at_level_s": list(row.at_level_s),
        "error_at_level": row.error_at_level,
    }


def _level(level: Level) -> dict[str, float | None]:
    return {
        "compute": level.compute,
        "communication": level.communication,
        "compute_beside": level.compute_beside,
        "communication_beside": level.communication_beside,
    }
