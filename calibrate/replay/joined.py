"""Replay inside a job that already runs: every process of a torchrun job executes its own rank."""

import os
import sys
from datetime import timedelta
from typing import Any

from calibrate.replay.steps import ReplayError
from calibrate.replay.worker import Job, execute
from simpar.trace.trace import IntColumn


def job_size() -> int | None:
    """Processes of the job that this one belongs to (a process group, or torchrun's environment), or None."""
    if "torch.distributed" in sys.modules:  # a process group without it there cannot be
        import torch.distributed as dist  # noqa: PLC0415

        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if {"WORLD_SIZE", "RANK", "MASTER_ADDR"} <= os.environ.keys() else None


def run_joined(job: Job, size: int, timeout_s: float) -> dict[int, IntColumn]:
    """Executes this process's rank and exchanges the times, so that every process gets all of them.

    Raises:
        ReplayError: the program has another number of ranks than the job has processes.
    """
    import torch.distributed as dist  # noqa: PLC0415

    ranks = len(job.program.ranks)
    if ranks != size:
        raise ReplayError(
            f"the program has {ranks} ranks, but this job has {size} processes; start it with --nproc-per-node so that "
            f"there are {ranks}, or replay outside of it"
        )
    if not dist.is_initialized():
        # it stays for the next replay: a second one over torchrun's store would find the addresses of the first
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    index = int(os.environ.get("LOCAL_RANK", rank))
    count = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    times = execute(job, rank, index=index, count=count, timeout_s=timeout_s)
    gathered: list[Any] = [None] * size
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    dist.all_gather_object(gathered, times, group=control)
    dist.destroy_process_group(control)
    return dict(enumerate(gathered))
