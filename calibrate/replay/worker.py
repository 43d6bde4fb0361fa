"""What one process does for a replay, whether it was spawned for it or belongs to a torchrun job."""

import pickle
import sys
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from calibrate import child
from calibrate.replay.adapter import AdapterFactory
from calibrate.replay.clock import Clock
from calibrate.replay.executor import Communicators, Executor
from calibrate.replay.steps import Listing
from simpar.model.work import Gemm
from simpar.program.ir import Launch, Program
from simpar.trace.trace import IntColumn


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to replay, how often, on which device."""

    program: Program
    adapter: AdapterFactory
    warmup: int
    repeats: int


def execute(job: Job, rank: int, *, index: int, count: int, timeout_s: float) -> IntColumn:
    """Replays one rank; every process of the process group must call it or :func:`stand_by`.

    Args:
        job: the whole program.
        rank: this process's rank in the process group.
        index: of this process on its machine.
        count: processes of the program on its machine.
        timeout_s: seconds that a collective may take.

    Returns:
        Start and end of every step in nanoseconds since the step's common start, shape (repeats, 2, steps).
    """
    import torch  # noqa: PLC0415

    listing = Listing(job.program)
    size = len(listing.ranks)
    adapter = job.adapter(index, count)
    torch.manual_seed(rank)
    products = {i.kernel.dtype for i in listing.steps[rank] if isinstance(i, Launch) and isinstance(i.kernel, Gemm)}
    torch.set_float32_matmul_precision("high" if "tf32" in products else "highest")
    with Communicators(listing.communicators, adapter.backend, size, timeout_s) as groups:
        clock = Clock(groups.control, rank, size)
        executor = Executor(listing, rank, adapter, groups)
        measured = [_measured(executor, clock) for _ in range(job.warmup + job.repeats)]
    return np.stack(measured[job.warmup :])


def _measured(executor: Executor, clock: Clock) -> IntColumn:
    """One step, on the common clock from the common start on."""
    starts: list[int] = []
    times = executor.step(lambda: starts.append(clock.common_start_ns()))
    # nothing ran before the common start; a device's clock is read with an error, which may say so
    return np.where(times < 0, times, np.maximum(times + (clock.offset_ns - starts[0]), 0))


def stand_by(job: Job, timeout_s: float) -> None:
    """What a process does that no rank of the program needs: new process groups are known to all processes."""
    listing = Listing(job.program)
    with Communicators(listing.communicators, "gloo", len(listing.ranks), timeout_s):
        pass


def serve(connection: Connection, rank: int, size: int, store: str, timeout_s: float) -> None:
    """A spawned process: replays the jobs that come in until the connection is closed.

    It answers each with ("times", array) or an error.
    """
    folder = Path(store).parent
    child.begin(folder)
    sys.setswitchinterval(2e-4)  # a stream's thread must not wait 5 ms for another's Python code
    joined = False

    def replayed(message: bytes) -> child.Answer:
        nonlocal joined
        job: Job = pickle.loads(message)
        if not joined:
            child.join(store, rank, size, timeout_s)
            joined = True
        count = len(job.program.ranks)
        if rank < count:
            return ("times", execute(job, rank, index=rank, count=count, timeout_s=timeout_s))
        stand_by(job, timeout_s)
        return ("times", None)

    for message in child.orders(connection, folder):
        connection.send_bytes(pickle.dumps(child.answer_of(partial(replayed, message))))
    if joined:
        import torch.distributed as dist  # noqa: PLC0415

        dist.destroy_process_group()
