"""How fast is simpar itself? Wall times and memory of large jobs, and the engine's cost against a bare SimPy event.

    python benchmarks/speed.py [--only a c] [--json] [--quick]

Machines differ and are shared, so ratios and medians say more than times. Cold figures come from fresh processes.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# simpar is imported only inside functions: a fresh process measures that import, and this one stays small

ROOT = Path(__file__).parents[1]
MIB = 2**20
Fields = dict[str, Any]

LLAMA_PLAN: Fields = {"tp": 8, "pp": 16, "zero": 1, "sequence_parallel": True, "grad_accum": 16, "seq_len": 8192}
GPT_PLAN: Fields = {"tp": 8, "micro_batch": 1, "recompute": "full", "attention": "unfused"}
JOBS: dict[str, Fields] = {
    "llama-16384": {"model": "llama3.1-405b", "cluster": "h100-sxm:2048x8", "plan": LLAMA_PLAN},
    "llama-1024": {"model": "llama3.1-405b", "cluster": "h100-sxm:128x8", "plan": LLAMA_PLAN},
    "gpt-1024": {
        "model": "gpt3-175b",
        "cluster": "a100-sxm-80gb:128x8",
        "plan": {**GPT_PLAN, "pp": 8, "dp": 16, "global_batch": 1536},
    },
    "gpt-1024-interleaved": {
        "model": "gpt3-175b",
        "cluster": "a100-sxm-80gb:128x8",
        "plan": {**GPT_PLAN, "pp": 8, "dp": 16, "global_batch": 1536, "schedule": "interleaved", "vpp": 3},
    },
    "gpt-530b": {
        "model": "gpt3-530b",
        "cluster": "a100-sxm-80gb:35x8",
        "plan": {**GPT_PLAN, "pp": 35, "global_batch": 280, "schedule": "interleaved", "vpp": 3},
    },
    "tiny": {"model": "llama3.2-1b", "cluster": "h100-sxm:2", "plan": {"pp": 2, "grad_accum": 4}},
}
"""What is simulated; ``--quick`` puts the tiny job in place of all others."""


@dataclass(frozen=True)
class Figure:
    """One measured figure; ``target`` is what it should at most be, if anything."""

    part: str
    what: str
    value: float
    unit: str
    target: float | None = None


# ---- in a fresh process -------------------------------------------------------------------------------------------


def fresh(function: str, *arguments: str) -> Fields:
    """Calls a function of this file in a fresh process; returns what it returned."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, __file__, "--child", function, *arguments]
    ran = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, encoding="utf-8", check=True
    )
    found: Fields = json.loads(ran.stdout)
    return found


def child_import() -> Fields:
    """Time of the import, of what a first simulation needs beyond it, and which heavy packages all that brought."""

    def imported() -> None:
        import simpar  # noqa: F401, PLC0415

    def ready() -> None:
        from simpar import simulate  # noqa: F401, PLC0415

    times = {"import_s": timed(imported), "ready_s": timed(ready)}
    return {**times, "loaded": [name for name in ("torch", "plotly", "pandas") if name in sys.modules]}


def child_job(name: str, repeats: str) -> Fields:
    """A job with all its kernel spans: cold with imports, peak memory of that, then warm."""

    def step() -> None:
        from simpar import simulate  # noqa: PLC0415

        simulate(JOBS[name], allow_oom=True).trace.kernels()

    cold = timed(step)
    peak = peak_bytes()
    return {"cold_s": cold, "peak_bytes": peak, "warm_s": [timed(step) for _ in range(int(repeats))]}


def peak_bytes() -> int:
    """Most memory that this process ever had resident."""
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage says may be the parent's: Linux keeps it over fork and exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    import resource  # noqa: PLC0415 - not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def timed(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    began = clock()
    function()
    return clock() - began


# ---- the parts ----------------------------------------------------------------------------------------------------


def large(quick: bool) -> Iterator[Figure]:
    """Llama 3.1 405B on 16,384 and on 1,024 GPUs, in alternation."""
    many, few = ("tiny", "tiny") if quick else ("llama-16384", "llama-1024")
    rounds, repeats = (1, "1") if quick else (3, "5")
    runs = [(fresh("child_job", many, repeats), fresh("child_job", few, repeats)) for _ in range(rounds)]
    big = [run[0] for run in runs]
    title = "Llama 3.1 405B on 16,384 H100, with all kernel spans"
    yield Figure("a", f"{title}: cold, with imports", median(r["cold_s"] for r in big), "s", 1.0)
    yield Figure("a", f"{title}: warm", median(median(r["warm_s"]) for r in big), "s", 1.0)
    yield Figure("a", f"{title}: peak memory", median(r["peak_bytes"] for r in big) / MIB, "MiB", 500)
    cold = median(r["cold_s"] / small["cold_s"] for r, small in runs)
    warm = median(median(r["warm_s"]) / median(small["warm_s"]) for r, small in runs)
    yield Figure("b", "16,384 over 1,024 GPUs: cold", cold, "×", 1.1)
    yield Figure("b", "16,384 over 1,024 GPUs: warm", warm, "×", 1.1)


def imports(quick: bool) -> Iterator[Figure]:
    """``import simpar`` in fresh processes."""
    runs = [fresh("child_import") for _ in range(1 if quick else 7)]
    loaded = sorted({name for run in runs for name in run["loaded"]})
    yield Figure("c", "import simpar", median(run["import_s"] for run in runs), "s", 0.3)
    yield Figure("c", "from simpar import simulate, after it", median(run["ready_s"] for run in runs), "s")
    yield Figure("c", f"heavy packages loaded by both ({', '.join(loaded) or 'none'})", len(loaded), "packages", 0)


def per_instruction(quick: bool) -> Iterator[Figure]:
    """The engine's time per instruction over the time of a bare SimPy timeout, in alternation.

    It is CPU time, so that what else runs on the machine counts for neither.
    """
    from simpar import Job, simulate  # noqa: PLC0415
    from simpar.engine.simulate import execute  # noqa: PLC0415
    from simpar.plan.layout import lay_out  # noqa: PLC0415
    from simpar.program.lower import lower  # noqa: PLC0415

    job = Job.model_validate(JOBS["tiny" if quick else "gpt-1024"])
    program = lower(job.model, job.cluster, lay_out(job.plan, job.model, job.cluster))
    count = instructions(program)
    ratios: dict[str, list[float]] = {}
    for _ in range(2 if quick else 25):
        with quiet():
            event = timed(lambda: timeouts(20_000), time.process_time) / 20_000
            with clock_runs() as clock:
                engine = timed(lambda: execute(program, job.cluster), time.process_time)
            whole = timed(lambda: simulate(job, allow_oom=True), time.process_time)
        for what, took in (("clock alone", clock[-1]), ("engine", engine), ("whole simulate()", whole)):
            ratios.setdefault(what, []).append(took / count / event)
    for what, found in ratios.items():
        yield Figure("d", f"{what}, per instruction of {count:,}, over a SimPy timeout", median(found), "×", 2.5)
    kernels = len(execute(program, job.cluster).kernels().start_ns)
    per_kernel = median(ratios["engine"]) * count / kernels
    yield Figure("d", f"engine, per kernel span of {kernels:,}, over a SimPy timeout", per_kernel, "×")


def instructions(program: Any) -> int:
    """Instructions as the engine loads them: a run that is simulated kernel by kernel counts its kernels."""
    from simpar.program.ir import Run, open_run  # noqa: PLC0415

    return sum(
        sum(1 for _ in open_run(each, rank.rank, 0)) if isinstance(each, Run) and each.opened else 1
        for rank in program.ranks
        for each in rank.instructions
    )


def timeouts(count: int) -> None:
    """As little as SimPy can do: one process that waits so many times."""
    import simpy  # noqa: PLC0415

    def process() -> Generator[simpy.Event, Any, None]:
        for _ in range(count):
            yield environment.timeout(1)

    environment = simpy.Environment()
    environment.process(process())
    environment.run()


@contextmanager
def clock_runs() -> Iterator[list[float]]:
    """CPU seconds of every run of a clock; a step's own is the last, those before it price its blocks."""
    from simpar.engine.clock import Clock  # noqa: PLC0415

    found: list[float] = []
    original = Clock.run

    def run(self: Any, *arguments: Any) -> object:
        began = time.process_time()
        try:
            return original(self, *arguments)
        finally:
            found.append(time.process_time() - began)

    Clock.run = run  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        Clock.run = original  # type: ignore[method-assign]


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection meanwhile, as ``simulate`` does for itself."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def repeated(quick: bool) -> Iterator[Figure]:
    """Jobs that a search over plans repeats."""
    from simpar import simulate  # noqa: PLC0415

    for part, name, title, target, repeats in (
        ("e", "gpt-1024", "GPT-3 175B on 1,024 A100, TP8 PP8, 96 microbatches", 0.1, 20),
        ("e", "gpt-1024-interleaved", "the same, interleaved ×3", None, 20),
        ("f", "gpt-530b", "GPT-3 530B on 280 A100, PP35 interleaved ×3, 280 microbatches", None, 3),
    ):
        job = JOBS["tiny" if quick else name]
        simulate(job, allow_oom=True)  # imports and catalogs
        times, cpu = [], []
        for _ in range(2 if quick else repeats):
            began = time.process_time()
            times.append(timed(partial(simulate, job, allow_oom=True)))
            cpu.append(time.process_time() - began)
        yield Figure(part, f"{title}: median of {len(times)}", median(times), "s", target)
        yield Figure(part, f"{title}: fastest", min(times), "s", target)
        yield Figure(part, f"{title}: median of CPU time", median(cpu), "s", target)


PARTS: dict[str, Callable[[bool], Iterator[Figure]]] = {
    "ab": large,
    "c": imports,
    "d": per_instruction,
    "ef": repeated,
}


CHILDREN: dict[str, Callable[..., Fields]] = {"child_import": child_import, "child_job": child_job}


def machine() -> str:
    """The machine in one line."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}{load}"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list("abcdef"), help="measure only these parts")
    parser.add_argument("--quick", action="store_true", help="tiny jobs, few repetitions: does it run at all?")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        function, *arguments = args.child
        print(json.dumps(CHILDREN[function](*arguments)))
        return
    wanted = set(args.only or "abcdef")
    figures = [
        figure
        for parts, measure in PARTS.items()
        if wanted & set(parts)
        for figure in measure(args.quick)
        if figure.part in wanted
    ]
    if args.json:
        shown = {"machine": machine(), "quick": args.quick, "figures": [asdict(figure) for figure in figures]}
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    print(f"{machine()}{'; a tiny job stands in for each that is named' if args.quick else ''}\n")
    for f in figures:
        goal = "" if f.target is None else f"{'ok' if f.value <= f.target else 'over'}, at most {f.target:g}"
        print(f"{f.part}  {f.what:82} {f.value:9.3f} {f.unit:8}  {goal}".rstrip())


if __name__ == "__main__":
    main()
