"""From the command to the profile: check, detect, plan, measure, fit, write."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter, time
from typing import Any, Literal

from calibrate.detect import Machine, base_device, detect, import_torch
from calibrate.errors import MeasurementError
from calibrate.measure.checks import check_output, check_ranks
from calibrate.measure.fitted import fit_measured
from calibrate.measure.journal import Journal, check_same, rounds_done
from calibrate.measure.plan import GRID, KernelItem, Limits, Mode, job_products, make_plan
from calibrate.measure.session import Assignment, Measured, nobody, take_part
from calibrate.measure.spawn import measure_here
from calibrate.measure.timer import threads_of_rank
from calibrate.rounds import Outliers
from calibrate.samples import Measurements
from calibrate.tables import read_measurements
from simpar.hardware.device import Device
from simpar.hardware.profile import Profile
from simpar.units import MIB, MS

Progress = Callable[[int, int, str], None]
"""Hears of measurements done, measurements in all, and what is going on."""

Where = Literal["auto", "cpu", "cuda"]

_EACH_S = 25 * MS  # a CPU's largest kernels
_PROBE = 384  # size of the product by which a CPU's speed is guessed
_CPU_TRAFFIC = 64 * MIB
_USUAL_RANKS = 2  # on a CPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        out: profile to write; measurements go beside it.
        mode: ``quick`` or ``full``.
        resume: go on with the measurements of an interrupted run.
        job: job file whose own products are measured too.
        ranks: processes on this machine; every GPU, or two on a CPU, if None.
        on: ``auto`` (GPUs where torch sees any), ``cpu`` or ``cuda``.
        base: catalog device with the datasheet rates of a GPU that the catalog does not know.
        command: to be recorded.
    """

    out: Path = Path("profile.json")
    mode: Mode = "quick"
    resume: bool = False
    job: Path | None = None
    ranks: int | None = None
    on: Where = "auto"
    base: str | None = None
    command: str = "simpar calibrate run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came out.

    Attributes:
        profile: as written.
        raw: where the measurements are.
        samples: that were fitted, one for each kernel and collective.
        outliers: rounds that took much longer than usual.
        elapsed_s: of measuring and fitting.
    """

    profile: Profile
    raw: Path
    samples: Measurements
    outliers: Outliers
    elapsed_s: float


def raw_path(out: Path) -> Path:
    """Where the measurements behind a profile are.

    >>> str(raw_path(Path("a/profile.json")))
    'a/profile.measurements.jsonl'
    """
    return out.with_name(f"{out.stem}.measurements.jsonl")


def _unheard(done: int, total: int, text: str) -> None:
    """Nobody listens."""


def run(options: Options, progress: Progress = _unheard) -> Outcome | None:
    """Measures this machine and writes its profile.

    In a job of torchrun every process calls this; the first one writes and gets the outcome, the others None.
    An interruption leaves the measurements beside the profile, which is then not written. Processes are started, so a
    script keeps its call under ``if __name__ == "__main__":``.

    Args:
        options: what to do.
        progress: hears how far it is.

    Raises:
        MeasurementError: the machine cannot be measured so, or files cannot be written; one sentence.
        SimparError: the job or a name is not understood.
    """
    began = time()
    job = _torchrun()
    if job is None:
        return _measure(options, _prepare(options, None, began), None, progress, began)
    with _joined():
        return _run_joined(options, job, progress, began)


@contextmanager
def _joined() -> Iterator[None]:
    """This process in the process group of its torchrun job."""
    dist = import_torch().distributed
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    yield
    dist.destroy_process_group()  # not after a failure: peers would hide its reason


def _run_joined(options: Options, job: "_Torchrun", progress: Progress, began: float) -> Outcome | None:
    if job.rank == 0:
        try:
            setup = _prepare(options, job, began)
        except Exception as error:
            _hand_out(str(error))
            raise
        _hand_out(setup)
        return _measure(options, setup, job, progress, began)
    received: _Setup | str = _hand_out(None)
    if isinstance(received, str):
        raise MeasurementError(f"rank 0 gave up: {received}")
    take_part(received.assignment, job.rank, index=job.index, count=job.here, tell=nobody)
    return None


def what_is_kept(options: Options) -> str:
    """What an interrupted run left, as one sentence; empty if it left nothing."""
    raw = raw_path(options.out)
    try:
        kept = read_measurements(raw)
    except MeasurementError:
        return ""
    parts = (kept.kernels, kept.collectives, kept.launch_s, kept.interference, kept.updates)
    count = sum(map(len, parts))
    return f"{count:,} measurements are kept in {raw}; go on with --resume"


@dataclass(frozen=True, slots=True)
class _Torchrun:
    """This process's place in a job of torchrun."""

    rank: int
    size: int
    index: int
    here: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """What is decided before anything is measured."""

    machine: Machine
    base: Device
    facts: dict[str, str]
    assignment: Assignment
    here: int


def _torchrun() -> _Torchrun | None:
    if not {"WORLD_SIZE", "RANK", "MASTER_ADDR"} <= os.environ.keys():
        return None
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    index, here = (int(os.environ.get(key, other)) for key, other in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)))
    return _Torchrun(rank, size, index, here)


def _hand_out(value: Any) -> Any:
    """The first rank's value, on all ranks."""
    held = [value]
    import_torch().distributed.broadcast_object_list(held, 0)
    return held[0]


def _prepare(options: Options, job: _Torchrun | None, began: float) -> _Setup:
    raw = raw_path(options.out)
    check_output(options.out, raw, resume=options.resume)
    products = _products(options.job)
    torch = import_torch()
    machine = detect(torch=torch)
    cuda = bool(machine.gpus) if options.on == "auto" else options.on == "cuda"
    usual = len(machine.gpus) if cuda else min(_USUAL_RANKS, machine.cores)
    here = job.here if job is not None else options.ranks or max(1, usual)
    check_ranks(machine, here, cuda=cuda, nccl=torch.distributed.is_nccl_available())
    ranks, nodes = (job.size, job.size // job.here) if job is not None else (here, 1)
    base = base_device(machine, ranks=here, cuda=cuda, named=options.base)
    facts = {
        **machine.facts,
        "device": "cuda" if cuda else "cpu",
        "ranks": str(ranks),
        "nodes": str(nodes),
        "threads": str(threads_of_rank(here)),
        "back end": "nccl" if cuda else "gloo",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    earlier = read_measurements(raw) if options.resume else Measurements()
    if options.resume:
        check_same(raw, earlier.provenance, facts)
    limits = _limits(base, earlier.provenance, cuda=cuda, ranks=here)
    facts["largest product"] = f"{limits.flop:g} FLOP"
    plan = make_plan(base, limits, mode=options.mode, cuda=cuda, ranks=ranks, nodes=nodes, job=products)
    assignment = Assignment(
        plan=plan,
        done=rounds_done(earlier, plan.items),
        cuda=cuda,
        until=began + plan.budget_s,
        one_machine=nodes == 1,
    )
    return _Setup(machine=machine, base=base, facts=facts, assignment=assignment, here=here)


def _products(path: Path | None) -> list[KernelItem]:
    """The job's products, as its program runs them."""
    if path is None:
        return []
    from simpar.cli.jobfile import load_job  # noqa: PLC0415
    from simpar.plan.layout import lay_out  # noqa: PLC0415
    from simpar.program.lower import lower  # noqa: PLC0415

    job = load_job(path)
    return job_products(lower(job.model, job.cluster, lay_out(job.plan, job.model, job.cluster)))


def _limits(base: Device, earlier: dict[str, str], *, cuda: bool, ranks: int) -> Limits:
    """The whole grid on a GPU; on a CPU what it gets done in 25 ms, which a resumed run does not guess again."""
    if cuda:
        return Limits(max(2.0 * m * n * k for m, n, k in GRID), base.memory_bytes / 16)
    if "largest product" in earlier:
        return Limits(float(earlier["largest product"].split()[0]), _CPU_TRAFFIC)
    return Limits(float(f"{_flop_per_s(threads_of_rank(ranks)) * _EACH_S:.1g}"), _CPU_TRAFFIC)


def _flop_per_s(threads: int) -> float:
    """The speed of one rank's threads, roughly."""
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a = torch.ones(_PROBE, _PROBE)
        times = []
        for _ in range(5):
            start = perf_counter()
            torch.mm(a, a)
            times.append(perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2.0 * _PROBE**3 / min(times)


def _measure(options: Options, setup: _Setup, job: _Torchrun | None, progress: Progress, began: float) -> Outcome:
    raw = raw_path(options.out)
    plan, versions = setup.assignment.plan, setup.machine.versions
    total = plan.rounds * len(plan.items)
    done = sum(min(count, plan.rounds) for count in setup.assignment.done.values())
    stack = f"torch/{versions['torch']}"
    library = f"nccl/{versions.get('nccl')}" if setup.assignment.cuda else f"gloo/{stack}"
    with Journal(
        raw, setup.facts, stack=stack, communication=library, base=setup.base, resume=options.resume
    ) as journal:

        def tell(event: Measured) -> None:
            nonlocal done
            journal.add(event.item, event.value)
            done += 1
            progress(min(done, total), total, "measuring")

        progress(done, total, "starting")
        if job is None:
            measure_here(setup.assignment, setup.here, tell)
        else:
            take_part(setup.assignment, job.rank, index=job.index, count=job.here, tell=tell)
    progress(total, total, "fitting")
    profile, samples, found = fit_measured(raw, setup.base, setup.machine, plan, command=options.command)
    profile.write(options.out)
    return Outcome(profile=profile, raw=raw, samples=samples, outliers=found, elapsed_s=time() - began)
