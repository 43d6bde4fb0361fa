"""How fast is the search? Llama-3-70B on 512 H100, every valid plan; and how many bounds a core gives a second.

    python benchmarks/search.py [--workers N] [--quick] [--json]

Wall time tells little on a busy machine; process time says what the work itself took.
"""

import argparse
import json
import os
import resource
import time
from dataclasses import asdict, dataclass
from typing import Any

from simpar import Cluster, Plan, search
from simpar.job import read_model
from simpar.search.bound import Bounds
from simpar.search.families import Families
from simpar.search.space import Space

JOB: dict[str, Any] = {"model": "llama3-70b", "cluster": "h100-sxm:64x8", "global_batch": 1024, "seq_len": 8192}
QUICK: dict[str, Any] = {"model": "gpt2", "cluster": "h100-sxm:4", "global_batch": 16, "seq_len": 512}


@dataclass(frozen=True)
class Figure:
    """One measured figure; ``aim`` is what it should be at most (or at least, for rates)."""

    what: str
    value: float
    unit: str
    aim: str = ""


def bounds(job: dict[str, Any], sample: int) -> list[Figure]:
    """Bounds of plans one by one in this process, with all that is priced on the way; of every n-th family."""
    model, cluster = read_model(job["model"]), Cluster.parse(job["cluster"])
    base = Plan(global_batch=job["global_batch"], seq_len=job["seq_len"])
    space = Space(model, cluster, base, {})
    found = Bounds(model, cluster, space.axes)
    families = list(space.families())[::sample]
    every = [fields for family in families for pipeline in space.pipelines(family) for fields in pipeline.plans()]
    began = time.process_time()
    for fields in every:
        found.of(base.model_copy(update=fields))
    took = time.process_time() - began
    known = Families(space, Bounds(model, cluster, space.axes), base)
    again = time.process_time()
    for family in families:
        known.outlook(family)
    together = time.process_time() - again
    return [
        Figure(f"bounds of {len(every):,} plans one by one: a second of a core", len(every) / took, "plans", "2,000"),
        Figure(f"the same by their {len(families)} families", len(every) / together, "plans"),
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
    parser.add_argument("--sample", type=int, default=10, help="bounds one by one: of every n-th family")
    parser.add_argument("--quick", action="store_true", help="a tiny job: does it run at all?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    job = QUICK if args.quick else JOB
    figures = [*bounds(job, 1 if args.quick else args.sample), *whole(job, args.workers)]
    if args.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=2))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    for figure in figures:
        aim = f"  aim {figure.aim}" if figure.aim else ""
        print(f"{figure.value:10.2f} {figure.unit:7} {figure.what}{aim}")


if __name__ == "__main__":
    main()
