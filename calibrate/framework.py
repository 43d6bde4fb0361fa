"""Fits the few constants of a training framework to measured steps: ``simpar calibrate framework``.

Every evaluation predicts the rows with the ordinary engine. Constants that the rows cannot tell stay where they were.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import typer
import yaml

from calibrate.console import Show, console, progress, say
from simpar.description import Description
from simpar.errors import RunsError, SimparError
from simpar.framework.framework import Fitted, Framework, read_framework
from simpar.simulation import simulate
from simpar.trace.export import write_whole
from simpar.validation.jobs import describe
from simpar.validation.runs import Run, read_runs

Floats = npt.NDArray[np.float64]
_SOFT = 0.1  # relative errors beyond this count less than quadratically (soft L1)
_STEP = 0.06  # of a constant's logarithm, for derivatives: below it, rounding to whole launches shows
_HOME = 1.0  # where the search starts, so that its relative steps are steps of the logarithm
_MOST_CALLS = 12
_FEWEST_ROWS = 6


class Constant(NamedTuple):
    """A constant of a framework that steps can tell.

    Attributes:
        field: of :class:`~simpar.framework.framework.Framework`; a dot leads into ``optimizer``.
        start: where the search begins if the framework has none.
        prior_sd: how far its logarithm may lie from the start, before the rows speak.
        told_by: rows that depend on it.
    """

    field: str
    start: float
    prior_sd: float
    told_by: Callable[[Run], bool]


def _always(run: Run) -> bool:  # noqa: ARG001 - the others ask
    return True


def _crosses(run: Run) -> bool:
    return run.pp > 1 and run.tp > 1 and run.num_gpus > run.gpus_per_node


CONSTANTS = (
    Constant("launch_s", 20e-6, 1.0, _always),
    Constant("traffic_factor", 1.2, 0.25, _always),
    Constant("lockstep_spread", 0.2, 0.7, lambda run: run.tp > 1),
    Constant("cross_node_launch_s", 0.0, 0.7, _crosses),
    Constant("cross_node_step_s", 0.0, 0.7, lambda run: run.tp > run.gpus_per_node),
    Constant("optimizer.shard_copy_s", 0.0, 0.7, lambda run: run.zero in (1, 2)),
)


@dataclass(frozen=True)
class FrameworkFit:
    """A framework with fitted constants.

    Attributes:
        framework: the result.
        values: the fitted constants.
        relative_sd: standard deviation of each one's logarithm.
        before, after: absolute relative errors of the rows.
        rows: ids of the rows.
        left_out: rows that could not be simulated, and why.
    """

    framework: Framework
    values: Mapping[str, float]
    relative_sd: Mapping[str, float]
    before: Floats
    after: Floats
    rows: tuple[str, ...]
    left_out: Mapping[str, str]


def fit_framework(
    runs: Sequence[Run],
    base: Framework,
    *,
    rows: str,
    workers: int | None = None,
    progress: Show = lambda *_: None,
) -> FrameworkFit:
    """Fits the constants of ``base`` to runs.

    Robust least squares (soft L1) on the logarithm of predicted over measured step time, with log-normal priors at the
    values that ``base`` has. Uncertainty is that of the linearised problem, with the rows' own scatter as noise.

    Args:
        runs: measured steps, all of this framework.
        base: the framework as described so far.
        rows: says in words what the runs are, for the record.
        workers: processes; None takes one per core.
        progress: told how many predictions of all rows are done, how many there will be at most, and how the fit goes.

    Raises:
        RunsError: too few rows can be simulated.
    """
    from scipy.optimize import least_squares  # noqa: PLC0415 - an extra

    progress(0, 0, f"predicting {len(runs)} rows")
    with _pool(workers) as pool:
        start = list(_ratios(pool, runs, base))
        left_out = {run.id: reason for run, (_, reason) in zip(runs, start, strict=True) if reason}
        used = [run for run in runs if run.id not in left_out]
        if len(used) < _FEWEST_ROWS:
            why = next(iter(left_out.values()), "the table has no more")
            raise RunsError(
                f"only {len(used)} rows can be simulated, but a fit needs {_FEWEST_ROWS} ({why}); give more"
            )
        constants = _identifiable(used, base)
        at = np.log([_value(base, c.field) or c.start for c in constants])
        sd = np.array([c.prior_sd for c in constants])

        done = count(1)
        most = _MOST_CALLS * (1 + len(at))  # each call of the solver, and its derivatives

        def residuals(moved: Floats) -> Floats:
            theta = at + moved - _HOME
            found = _ratios(pool, used, _with(base, constants, theta))
            rows = np.array([ratio for ratio, _ in found])
            number = next(done)
            error = np.median(np.abs(np.expm1(rows)))
            progress(number, most, f"try {number} of at most {most}: median error {error:.1%}")
            return np.concatenate([rows, _SOFT * (theta - at) / sd])

        solved = least_squares(
            residuals,
            np.full(len(at), _HOME),
            loss="soft_l1",
            f_scale=_SOFT,
            diff_step=np.full(len(at), _STEP),
            max_nfev=_MOST_CALLS,
            x_scale=sd,
            xtol=1e-3,
        )
        after, theta = np.array(solved.fun[: len(used)]), at + solved.x - _HOME
    noise = 1.4826 * float(np.median(np.abs(after)))
    # J carries the weights of the robust loss; a prior's row is one observation with noise _SOFT
    jacobian = np.asarray(solved.jac, np.float64)
    information = jacobian.T @ jacobian / max(noise, 1e-3) ** 2
    deviation = np.sqrt(np.diag(np.linalg.pinv(information)))
    values = {c.field: float(np.exp(x)) for c, x in zip(constants, theta, strict=True)}
    relative_sd = {c.field: float(min(d, c.prior_sd)) for c, d in zip(constants, deviation, strict=True)}
    fitted = {
        name.split(".", maxsplit=1)[0]: Fitted(relative_sd=round(d, 3), rows=rows) for name, d in relative_sd.items()
    }
    residual = float(np.quantile(np.abs(after), 0.8))
    framework = _with(base, constants, theta).replace(
        fitted={**base.fitted, **fitted}, residual_80=round(residual, 3), residual_80_experts=None
    )
    before = np.abs(np.expm1([ratio for (ratio, reason) in start if not reason]))
    return FrameworkFit(
        framework, values, relative_sd, before, np.abs(np.expm1(after)), tuple(run.id for run in used), left_out
    )


def _identifiable(runs: Sequence[Run], base: Framework) -> list[Constant]:
    return [
        c for c in CONSTANTS if (_value(base, c.field) or c.start) and sum(map(c.told_by, runs)) >= _FEWEST_ROWS // 2
    ]


def _value(base: Framework, field: str) -> float:
    found: Any = base
    for name in field.split("."):
        found = getattr(found, name)
    return float(found or 0.0)


def _with(base: Framework, constants: Sequence[Constant], theta: Floats) -> Framework:
    changes: dict[str, Any] = {}
    for constant, value in zip(constants, np.exp(theta).tolist(), strict=True):
        outer, _, inner = constant.field.partition(".")
        rounded = float(f"{value:.4g}")
        changes[outer] = getattr(base, outer).replace(**{inner: rounded}) if inner else rounded
    return base.replace(**changes)


def _pool(workers: int | None) -> "AbstractContextManager[Executor | None]":
    count = workers or os.cpu_count() or 1
    return ProcessPoolExecutor(count, mp_context=get_context("spawn")) if count > 1 else nullcontext()


def _ratios(pool: Executor | None, runs: Sequence[Run], software: Framework) -> Iterable[tuple[float, str]]:
    work = partial(_log_ratio, software)
    return list(map(work, runs) if pool is None else pool.map(work, runs, chunksize=4))


def _log_ratio(software: Framework, run: Run) -> tuple[float, str]:
    """Logarithm of predicted over measured step time, or why there is none."""
    try:
        result = simulate(describe(run, software).job, allow_oom=True)
    except SimparError as error:
        return 0.0, " ".join(str(error).split())
    return float(np.log(result.step_time_s / run.step_time_s)), ""


# ---- the command ----------------------------------------------------------------------------------------------------


def framework_command(
    *, runs: Path, out: Path, base: str | None, name: str | None, workers: int | None, as_json: bool
) -> None:
    """Reads a table, fits, writes the framework, says how far off it was before and is now."""
    table = [run for run in read_runs(runs) if not run.flag]
    named = sorted({run.framework for run in table})
    if base is None and len(named) != 1:
        raise RunsError(
            f"{runs}: its rows name {len(named)} frameworks ({', '.join(named)}), and a fit is for one; "
            "leave the rows of one, or name a --base for all"
        )
    start = read_framework(base or named[0])
    if not out.parent.is_dir():
        raise RunsError(f"--out: cannot write '{out}': there is no folder '{out.parent}'; create it first")
    with progress(lambda: "nothing was written") as show:
        rows = f"{len(table)} rows of {runs.name}"
        found = fit_framework(table, start, rows=rows, workers=workers, progress=show)
    write_framework(found, start, name or start.name, out)
    if as_json:
        typer.echo(json.dumps(_outcome(found, out)))
        return
    _report(found, out)


def write_framework(found: FrameworkFit, base: Framework, name: str, path: Path) -> None:
    """Writes what a fit changed as a YAML file over its base; to a temporary file first, which is then renamed."""
    fitted = found.framework
    data: dict[str, Any] = {"base": base.name, "name": name, "title": fitted.title}
    for field in dict.fromkeys(c.field.partition(".")[0] for c in CONSTANTS):
        if field in fitted.fitted:
            value = getattr(fitted, field)
            data[field] = value.model_dump() if isinstance(value, Description) else value
    data |= {"residual_80": fitted.residual_80, "residual_80_experts": fitted.residual_80_experts}
    data["fitted"] = {field: entry.model_dump() for field, entry in fitted.fitted.items()}
    write_whole(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True).encode())


def _outcome(found: FrameworkFit, out: Path) -> dict[str, Any]:
    return {
        "framework": str(out),
        "values": dict(found.values),
        "relative_sd": dict(found.relative_sd),
        "rows": len(found.rows),
        "left_out": dict(found.left_out),
        "median_error_before": float(np.median(found.before)),
        "median_error": float(np.median(found.after)),
        "p90_error": float(np.quantile(found.after, 0.9)),
        "residual_80": found.framework.residual_80,
    }


def _report(found: FrameworkFit, out: Path) -> None:
    from rich.table import Table  # noqa: PLC0415

    shown = Table(title=f"Constants fitted to {len(found.rows)} rows", title_justify="left")
    for heading in ("constant", "value", "± (one sd)"):
        shown.add_column(heading, justify="left" if heading == "constant" else "right")
    for field, value in found.values.items():
        shown.add_row(field, f"{value:.4g}", f"{found.relative_sd[field]:.0%}")
    console(piped_width=120).print(shown)
    say(
        f"median error {np.median(found.before):.1%} before, {np.median(found.after):.1%} after "
        f"(90th percentile {np.quantile(found.after, 0.9):.1%}); wrote {out}"
    )
    for run, reason in found.left_out.items():
        say(f"left out {run}: {reason}")
