"""What one training process does: joins the others, and runs the steps that it is told until its connection closes."""

import gc
import os
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from calibrate import child
from calibrate.training.recipe import Recipe, TrainingError

_BUILDERS = {
    "one": "ddp",
    "dp": "ddp",
    "zero1": "ddp",
    "fsdp": "fsdp",
    "tp": "tensor_parallel",
    "gpipe": "pipeline",
    "1f1b": "pipeline",
    "dp-pp": "pipeline",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Steps to run: ``warmup`` untimed ones whenever the recipe differs from the last order's, then ``steps``."""

    recipe: Recipe
    steps: int
    warmup: int


class Trainer:
    """One process's part in training: it keeps the network of the last order, so that rounds need not build it again.

    Args:
        rank: of this process.
        size: processes.
        store: file through which they find each other.
        timeout_s: seconds that communication may take.
    """

    def __init__(self, rank: int, size: int, store: str, timeout_s: float) -> None:
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        from calibrate.replay.clock import Clock  # noqa: PLC0415
        from calibrate.replay.cpu import usable_cores  # noqa: PLC0415

        self._rank = rank
        self._cuda = torch.cuda.is_available()
        if self._cuda and torch.cuda.device_count() < size:
            raise TrainingError(
                f"{size} ranks need as many GPUs, but torch sees {torch.cuda.device_count()}; use fewer ranks"
            )
        backend = "nccl" if self._cuda else "gloo"
        if not dist.is_backend_available(backend):
            raise TrainingError(
                f"this torch was built without the communication back end '{backend}'; install a build that has it"
            )
        torch.set_num_threads(max(1, usable_cores() // size))
        torch.set_float32_matmul_precision("highest")
        if self._cuda:
            torch.cuda.set_device(rank)
        self._device = torch.device("cuda", rank) if self._cuda else torch.device("cpu")
        child.join(store, rank, size, timeout_s, backend=backend)
        self._clock = Clock(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)), rank, size)
        self._recipe: Recipe | None = None
        self._step: Callable[[], Any] | None = None

    def run(self, order: Order) -> tuple[list[int], list[float | None]]:
        """Nanoseconds of each step since its common start, and this rank's losses."""
        if order.recipe.ranks <= self._rank:
            # the clock's agreement needs every process, also one that has nothing to train
            if order.recipe != self._recipe:
                self._recipe, self._step = order.recipe, None
            for _ in range(order.steps):
                self._clock.common_start_ns()
            return [0] * order.steps, [None] * order.steps
        losses: list[float | None] = []
        if order.recipe != self._recipe or self._step is None:
            self._recipe, self._step = order.recipe, None
            gc.collect()  # the last network, before the next one is built
            builder = import_module(f"calibrate.training.{_BUILDERS[order.recipe.strategy]}")
            self._step = builder.build(order.recipe, self._rank, self._device)
            losses += [self._timed()[1] for _ in range(order.warmup)]
        times = []
        for _ in range(order.steps):
            start = self._clock.common_start_ns()
            end, loss = self._timed()
            times.append(end + self._clock.offset_ns - start)
            losses.append(loss)
        return times, losses

    def _timed(self) -> tuple[int, float | None]:
        """Runs a step; when it ended, and its loss, which is fetched only afterwards."""
        assert self._step is not None, "run builds the step first"
        value = self._step()
        if self._cuda:
            import torch  # noqa: PLC0415

            torch.cuda.synchronize()
        return perf_counter_ns(), None if value is None else float(value)


def serve(connection: Connection, rank: int, size: int, store: str, timeout_s: float) -> None:
    """A spawned process: trains as it is told. It answers each order with ("done", times, losses) or an error."""
    folder = Path(store).parent
    child.begin(folder)
    warnings.simplefilter("ignore")  # torch's, of its own parts
    trainer: Trainer | None = None

    def trained(message: bytes) -> child.Answer:
        nonlocal trainer
        order: Order = pickle.loads(message)
        if trainer is None:
            trainer = Trainer(rank, size, store, timeout_s)
        return ("done", *trainer.run(order))

    for message in child.orders(connection, folder):
        connection.send_bytes(pickle.dumps(child.answer_of(partial(trained, message))))
    os._exit(0)  # groups that a network still holds would wait for each other at the interpreter's end
