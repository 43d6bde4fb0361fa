"""What does each mechanism buy? Predicts measured runs with one of them switched off at a time.

    python benchmarks/ablation.py runs.csv [--rows 200] [--workers 2] [--json]

The table is one that `simpar validate` reads. Rows are taken evenly over the table; those with a flag are left out.
What is switched off is a field of the framework's description, so every variant goes through the same engine. Nothing
is fitted again: a mechanism that another one could stand in for shows its whole worth here.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import geometric_mean

import numpy as np

from simpar.errors import SimparError
from simpar.framework.framework import Framework, framework
from simpar.simulation import simulate
from simpar.validation.jobs import describe
from simpar.validation.runs import Run, read_runs

Change = Callable[[Framework], Framework]


def _without_small_operations(software: Framework) -> Framework:
    """Operations keep their launches and lose their traffic."""
    empty = {
        name: {way: {"nbytes": 0.0, "launches": getattr(operation, way).launches} for way in ("forward", "backward")}
        for name, operation in software.operations.items()
    }
    return software.replace(operations=empty)


VARIANTS: Mapping[str, Change] = {
    "everything": lambda software: software,
    "no host time per launch": lambda software: software.replace(launch_s=0.0, cross_node_launch_s=0.0),
    "hosts never wait for messages": lambda software: software.replace(host_waits_for_messages=False),
    "tensor-parallel hosts in step": lambda software: software.replace(lockstep_spread=0.0),
    "no traffic of small operations": _without_small_operations,
    "their traffic as of fused kernels": lambda software: software.replace(traffic_factor=1.0),
    "gradients added by the product": lambda software: software.replace(grad_accumulation="fused"),
    "softmax always fused": lambda software: software.replace(softmax_kernel=None),
    "gradients travel as they are kept": lambda software: software.replace(reduce_dtype={}),
    "newest attention kernel": lambda software: software.replace(attention=None),
    "uniform layers per stage": lambda software: software.replace(layer_split="uniform"),
    "one gradient bucket": lambda software: software.replace(bucket="whole", bucket_parameters=None),
    "flat shards": lambda software: software.replace(optimizer=software.optimizer.replace(shard_copy_s=0.0)),
    "reduce-scatters never waited for": lambda software: software.replace(
        optimizer=software.optimizer.replace(waits_for_shards=False)
    ),
    "casts to fp8 for nothing": lambda software: software.replace(fp8_cast_bytes=0.0),
    "no cost of rings across nodes": lambda software: software.replace(cross_node_step_s=0.0),
}


def _error(change: str, run: Run) -> float | None:
    try:
        software = VARIANTS[change](framework(run.framework))
        return simulate(describe(run, software).job, allow_oom=True).step_time_s / run.step_time_s - 1.0
    except SimparError:
        return None


def ablate(runs: list[Run], workers: int) -> list[dict[str, object]]:
    """Median absolute error of every variant, by source and as their geometric mean."""
    sources = list(dict.fromkeys(run.source for run in runs))
    found = []
    with ProcessPoolExecutor(workers) as pool:
        for name in VARIANTS:
            errors = list(pool.map(partial(_error, name), runs, chunksize=4))
            medians = {}
            for source in sources:
                mine = [abs(e) for e, run in zip(errors, runs, strict=True) if run.source == source and e is not None]
                if mine:
                    medians[source] = float(np.median(mine))
            mean = geometric_mean(max(m, 1e-4) for m in medians.values())
            found.append({"variant": name, "medians": medians, "geometric_mean": mean})
    return found


def main() -> None:
    """Predicts and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", type=Path, help="CSV table of measured runs")
    parser.add_argument("--rows", type=int, default=200, help="rows to predict (default: 200)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    try:
        runs = [run for run in read_runs(args.runs) if not run.flag]
    except SimparError as error:
        raise SystemExit(f"ablation.py: {error}") from None
    runs = runs[:: max(1, len(runs) // args.rows)]
    found = ablate(runs, args.workers)
    if args.json:
        print(json.dumps({"rows": len(runs), "variants": found}, indent=2))
        return
    sources = list(found[0]["medians"])  # type: ignore[call-overload]
    print(
        f"{len(runs)} rows; median |error|\n{'without':36}" + "".join(f"{s[:14]:>16}" for s in sources) + f"{'mean':>9}"
    )
    for row in found:
        cells = "".join(f"{row['medians'].get(s, float('nan')):16.1%}" for s in sources)
        print(f"{row['variant']:36}{cells}{row['geometric_mean']:9.1%}")


if __name__ == "__main__":
    main()
