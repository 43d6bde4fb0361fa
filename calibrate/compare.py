"""A job's prediction beside a measured step: ``simpar calibrate compare job.yaml trace.json``."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calibrate.check.command import check_place
from calibrate.console import console
from calibrate.importers import read_kineto_trace
from simpar.result import Result
from simpar.trace.trace import KINDS, Trace
from simpar.units import format_time

LEVEL = 0.9
"""Probability with which a step should lie in the interval beside it, as in ``calibrate check``."""

# profiles tell memory-bound kernels apart by names, which differ
_NAMES = {"gemm": "products", **dict.fromkeys(("elementwise", "activation", "norm"), "memory-bound")}
_PIPED_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One step, predicted and measured.

    Attributes:
        result: the prediction.
        measured: one rank's step.
        low_s, high_s: interval of the predicted step.
        kinds: predicted and measured seconds of one rank by kind of work, the longest predicted first.
    """

    result: Result
    measured: Trace
    low_s: float
    high_s: float
    kinds: dict[str, tuple[float, float]]

    @property
    def error(self) -> float:
        """Predicted over measured step, less one."""
        return self.result.step_time_s / self.measured.step_s - 1

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, times in seconds."""
        return {
            "predicted_s": self.result.step_time_s,
            "measured_s": self.measured.step_s,
            "error": self.error,
            "low_s": self.low_s,
            "high_s": self.high_s,
            "inside": self.low_s <= self.measured.step_s <= self.high_s,
            "kinds": {name: {"predicted_s": ours, "measured_s": theirs} for name, (ours, theirs) in self.kinds.items()},
        }


def compare(result: Result, measured: Trace) -> Comparison:
    """Lays a prediction beside a measured step of one rank.

    Args:
        result: what was predicted.
        measured: the step of one rank, as :func:`calibrate.importers.read_kineto_trace` reads it. It is compared with
            the predicted rank of the same number, or where that was folded away, with the first one.
    """
    rank = measured.lanes[0].rank
    if all(lane.rank != rank for lane in result.trace.lanes):
        rank = result.trace.lanes[0].rank
    ours, theirs = kind_seconds(result.trace, rank), kind_seconds(measured, measured.lanes[0].rank)
    names = sorted({**ours, **theirs}, key=lambda name: (-ours.get(name, 0.0), -theirs.get(name, 0.0)))
    low_s, high_s = result.step_time_interval(LEVEL)
    return Comparison(
        result=result,
        measured=measured,
        low_s=low_s,
        high_s=high_s,
        kinds={name: (ours.get(name, 0.0), theirs.get(name, 0.0)) for name in names},
    )


def kind_seconds(trace: Trace, rank: int) -> dict[str, float]:
    """Seconds of a rank's kernels and communication by kind; what overlaps counts on both sides."""
    found: defaultdict[str, float] = defaultdict(float)
    operations, kernels = trace.spans, trace.kernels()
    inside = set(kernels.parent.tolist())
    for lane, kind, length, parent in zip(
        kernels.lane.tolist(), kernels.kind.tolist(), kernels.duration_ns.tolist(), kernels.parent.tolist(), strict=True
    ):
        if trace.lanes[lane].rank == rank:
            updates = parent >= 0 and KINDS[operations.kind[parent]] == "optimizer"
            found["optimizer" if updates else _name(KINDS[kind])] += length * 1e-9
    for row, (lane, kind, length) in enumerate(
        zip(operations.lane.tolist(), operations.kind.tolist(), operations.duration_ns.tolist(), strict=True)
    ):
        if trace.lanes[lane].rank == rank and row not in inside:
            found[_name(KINDS[kind])] += length * 1e-9
    return dict(found)


def compare_command(
    *, job: Path, trace: Path, step: int | None, as_json: bool, html: Path | None, allow_oom: bool
) -> Comparison:
    """Simulates, reads, and prints the comparison.

    Raises:
        SimparError: the job or the trace is not understood, or the page cannot be written.
    """
    import json  # noqa: PLC0415

    from simpar.cli.jobfile import load_job  # noqa: PLC0415
    from simpar.simulation import simulate  # noqa: PLC0415

    if html is not None:
        check_place(html)
    measured = read_kineto_trace(trace, step=step)
    found = compare(simulate(load_job(job), allow_oom=allow_oom), measured)
    if html is not None:
        from simpar.view.compare import write_comparison  # noqa: PLC0415 - plotly only where it draws

        write_comparison(found.result.compare(measured), str(html), title=f"simpar: {found.result.title}, as measured")
    out = console(piped_width=_PIPED_WIDTH)
    if as_json:
        out.file.write(json.dumps(found.to_dict(), indent=1, ensure_ascii=False) + "\n")
        return found
    _print(found)
    if html is not None:
        out.print(f"wrote {html}", markup=False, soft_wrap=True)
    return found


def _print(found: Comparison) -> None:
    from rich.table import Table  # noqa: PLC0415

    out = console(piped_width=_PIPED_WIDTH)
    table = Table(title="one rank, all kernels of a kind", box=None, title_justify="left", title_style="bold")
    table.add_column("kind", no_wrap=True)
    for column in ("predicted", "measured", "error"):
        table.add_column(column, no_wrap=True, justify="right")
    for name, (ours, theirs) in found.kinds.items():
        error = f"{ours / theirs - 1:+.0%}" if ours and theirs else "only predicted" if ours else "only measured"
        table.add_row(name, format_time(ours), format_time(theirs), error)
    out.print(table)
    inside = found.low_s <= found.measured.step_s <= found.high_s
    out.print(
        f"step: predicted {format_time(found.result.step_time_s)} ({LEVEL:.0%} in {format_time(found.low_s)} to "
        f"{format_time(found.high_s)}), measured {format_time(found.measured.step_s)}, which lies "
        f"{'inside' if inside else 'outside'}; error {found.error:+.0%}",
        markup=False,
        soft_wrap=True,
    )


def _name(kind: str) -> str:
    return _NAMES.get(kind, kind)
