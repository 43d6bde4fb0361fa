"""Executes a program on the local devices and returns its trace: the measured twin of :mod:`simpar.engine`.

Every rank of the program is a process of its own with a device of its own. It runs kernels of the program's shapes,
collectives in its groups and messages between its stages, on streams that wait for each other's events just as the
program says; the data are random numbers. Kernels, collectives and messages come back as spans with the labels that the
engine gives them, so that :func:`calibrate.match.match` can pair each with its prediction.

What differs between devices is an :class:`Adapter`. A CPU's streams are threads and its collectives gloo's; a GPU's are
CUDA streams and NCCL's.

A program must simulate every rank: lower it with ``fold=False``. A script that replays keeps its calls under
``if __name__ == "__main__":``, because it starts processes.
"""

from typing import Literal

from calibrate.replay.adapter import Adapter, AdapterFactory, local_adapter
from calibrate.replay.assemble import assemble
from calibrate.replay.cpu import CpuAdapter
from calibrate.replay.cuda import CudaAdapter
from calibrate.replay.joined import job_size, run_joined
from calibrate.replay.spawn import Workers
from calibrate.replay.steps import Listing, ReplayError
from calibrate.replay.worker import Job
from simpar.program.ir import Program
from simpar.trace.trace import Trace

__all__ = ["Adapter", "AdapterFactory", "CpuAdapter", "CudaAdapter", "ReplayError", "Workers", "replay", "replay_all"]

_ADAPTERS: dict[str, AdapterFactory] = {"auto": local_adapter, "cpu": CpuAdapter, "cuda": CudaAdapter}


def replay(
    program: Program,
    *,
    adapter: Literal["auto", "cpu", "cuda"] | AdapterFactory = "auto",
    repeats: int = 5,
    warmup: int = 2,
    repeat: int | None = None,
    workers: Workers | None = None,
    timeout_s: float = 300.0,
) -> Trace:
    """Executes a program on the local devices.

    Args:
        program: every rank of it becomes a process with a device.
        adapter: ``cpu``, ``cuda``, ``auto`` (GPUs where torch sees any), or what makes an adapter of another device.
        repeats: timed steps; before each, all ranks meet.
        warmup: steps before them that are not timed.
        repeat: which repeat to return, counted from 0; the one of median length if None.
        workers: processes to use again; if None they are started for this call, unless this process belongs to a
            process group or a torchrun job of as many processes, which then execute one rank each (all of them call
            this, and all get the trace).
        timeout_s: seconds until the replay is given up, if no ``workers`` are given.

    Returns:
        The trace of one step in nanoseconds since its common start. Durations of collectives begin when the last
        member is there. On a CPU the host's part of an operator call counts as its kernel.

    Raises:
        ReplayError: the program cannot be replayed here, or a process failed.
    """
    if repeat is not None and not 0 <= repeat < repeats:
        raise ReplayError(
            f"repeat {repeat} is none of the {repeats} repeats, which count from 0; set it lower or drop it"
        )
    traces = replay_all(program, adapter=adapter, repeats=repeats, warmup=warmup, workers=workers, timeout_s=timeout_s)
    if repeat is not None:
        return traces[repeat]
    return sorted(traces, key=lambda trace: trace.step_ns)[(repeats - 1) // 2]


def replay_all(
    program: Program,
    *,
    adapter: Literal["auto", "cpu", "cuda"] | AdapterFactory = "auto",
    repeats: int = 5,
    warmup: int = 2,
    workers: Workers | None = None,
    timeout_s: float = 300.0,
) -> tuple[Trace, ...]:
    """Executes a program as :func:`replay` does and returns the trace of every repeat, in order."""
    if repeats < 1 or warmup < 0:
        raise ReplayError(
            f"a replay of {repeats} repeats and {warmup} warm-up steps measures nothing; repeat at least once"
        )
    factory = _factory(adapter)
    listing = Listing(program)
    listing.check()
    job = Job(program=program, adapter=factory, warmup=warmup, repeats=repeats)
    size = job_size()
    if workers is not None:
        times = workers.run(job)
    elif size is not None:
        times = run_joined(job, size, timeout_s)
    else:
        with Workers(len(program.ranks), timeout_s=timeout_s) as started:
            times = started.run(job)
    return tuple(assemble(listing, {rank: column[i] for rank, column in times.items()}) for i in range(repeats))


def _factory(adapter: str | AdapterFactory) -> AdapterFactory:
    if not isinstance(adapter, str):
        return adapter
    if adapter not in _ADAPTERS:
        raise ReplayError(f"unknown adapter '{adapter}'; choose one of {', '.join(sorted(_ADAPTERS))}")
    return _ADAPTERS[adapter]
