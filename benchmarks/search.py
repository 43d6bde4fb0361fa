"""How fast is the search? Llama-3-70B on 512 H100, every valid plan; and how many bounds a core gives a second.

    python benchmarks/search.py [--workers N] [--quick] [--json]

Wall time tells little on a busy machine; process time says what the work itself took.
"""

import argparse
import json
import os
import pickle
import resource
import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from simpar import Cluster, Job, Plan, search
from simpar.job import read_model
from simpar.search.run import bound_plans
from simpar.search.space import axes_of, plans

JOB: dict[str, Any] = {"model": "llama3-70b", "cluster": "h100-sxm:64x8", "global_batch": 1024, "seq_len": 8192}
QUICK: dict[str, Any] = {"model": "gpt2", "cluster": "h100-sxm:4", "global_batch": 16, "seq_len": 512}


@dataclass(frozen=True)
class Figure:
    """One measured figure; ``aim`` is what it should be at most (or at least, for rates)."""

    what: str
    value: float
    unit: str
    aim: str = ""


def bounds(job: dict[str, Any], sample: int | None) -> list[Figure]:
    """Bounds of plans in this process, with all that is priced on the way."""
    model, cluster = read_model(job["model"]), Cluster.parse(job["cluster"])
    base = Plan(global_batch=job["global_batch"], seq_len=job["seq_len"])
    every = list(islice(plans(model, cluster, base, {}), sample))
    token = pickle.dumps((Job(model=model, cluster=cluster, plan=base), axes_of({})))
    began = time.process_time()
    found = bound_plans((token, 0, every))
    took = time.process_time() - began
    again = time.process_time()
    bound_plans((token, 0, every))
    warm = time.process_time() - again
    valid = sum(bound is not None for bound in found)
    return [
        Figure(
            f"bounds of {valid:,} valid plans: a second of a core, all priced anew", len(every) / took, "plans", "2,000"
        ),
        Figure("the same once blocks and schedules are known", len(every) / warm, "plans"),
    ]


def whole(job: dict[str, Any], workers: int) -> list[Figure]:
    """The whole search."""
    fields = dict(job)
    model, cluster = fields.pop("model"), fields.pop("cluster")
    before = cpu_s()
    began = time.perf_counter()
    found = search(model, cluster, **fields, workers=workers, top=1)
    wall = time.perf_counter() - began
    spent = cpu_s() - before
    best = found.best
    return [
        Figure(f"{found.counts}", 1, "search"),
        Figure(f"search on {workers} workers: wall", wall, "s", "60"),
        Figure("process time of all workers", spent, "s"),
        Figure(f"process time over {workers} workers", spent / workers, "s", "60"),
        Figure(f"best step: {best.plan}", best.step_time_s, "s"),
    ]


def cpu_s() -> float:
    """Process time of this process and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--quick", action="store_true", help="a tiny job: does it run at all?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    job = QUICK if args.quick else JOB
    figures = [*bounds(job, 500 if args.quick else None), *whole(job, args.workers)]
    if args.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=2))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    for figure in figures:
        aim = f"  aim {figure.aim}" if figure.aim else ""
        print(f"{figure.value:10.2f} {figure.unit:7} {figure.what}{aim}")


if __name__ == "__main__":
    main()
