"""The rounds, as every process runs them: all ranks measure the same item at the same time, the first one tells."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from calibrate.measure.collectives import CollectiveBench
from calibrate.measure.interference import Rates, measure_rates
from calibrate.measure.kernels import KernelBench
from calibrate.measure.launch import measure_launch_s
from calibrate.measure.plan import CollectiveItem, Item, KernelItem, LaunchItem, MeasurementPlan
from calibrate.measure.timer import Timer, local_timer
from calibrate.replay.kernels import prepare
from simpar.errors import SimparError
from simpar.model.work import Gemm
from simpar.units import MIB

if TYPE_CHECKING:
    import torch.distributed as dist

_BESIDE_BYTES = 4 * MIB  # of the all-reduce beside compute: streaming, not latency, as a bucket of gradients
_BESIDE_REPEATS = 25


class Measured(NamedTuple):
    """One round of an item: its seconds."""

    item: Item
    time_s: float


class Update(NamedTuple):
    """One step of an optimizer over so many parameters: its seconds."""

    parameters: int
    time_s: float


Event: TypeAlias = Measured | Rates | Update
Tell: TypeAlias = Callable[[Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What every process needs to know.

    Attributes:
        plan: what to measure.
        done: rounds of each item that an earlier run measured.
        cuda: whether GPUs are measured.
        until: when the last round should be over, as :func:`time.time` of rank 0's machine counts.
        one_machine: whether all processes are on one machine.
        timeout_s: seconds that a collective may take.
    """

    plan: MeasurementPlan
    done: Mapping[Item, int]
    cuda: bool
    until: float = float("inf")
    one_machine: bool = True
    timeout_s: float = 120.0


def take_part(assignment: Assignment, rank: int, *, index: int, count: int, tell: Tell) -> None:
    """Measures as rank ``rank``; every process of the process group must call this.

    Args:
        assignment: equal on all ranks.
        rank: in the process group.
        index: of this process on its machine.
        count: processes on its machine.
        tell: hears of each measurement; called on rank 0 only.

    Raises:
        MeasurementError: there are too few devices or too little memory.
    """
    import torch.distributed as dist  # noqa: PLC0415

    sys.setswitchinterval(2e-4)  # a thread that communicates must not wait 5 ms for another's Python code
    plan = assignment.plan
    timer = local_timer(index, count, cuda=assignment.cuda)
    timeout = timedelta(seconds=assignment.timeout_s)
    control = dist.new_group(backend="gloo", timeout=timeout)
    kernels = KernelBench(timer)
    collectives = CollectiveBench(
        timer,
        [item for item in plan.items if isinstance(item, CollectiveItem)],
        control,
        rank=rank,
        one_machine=assignment.one_machine,
        timeout_s=assignment.timeout_s,
    )
    speak = tell if rank == 0 else nobody
    before = time()
    for number in range(plan.rounds):
        now = time()
        fits = now + (now - before) <= assignment.until  # if the next round takes as long as the last one
        before = now
        if not _agree(rank != 0 or number < plan.least or fits, control):
            break
        for item in plan.items:
            if assignment.done.get(item, 0) > number:
                continue
            time_s = _measure(item, timer, kernels, collectives, control)
            speak(Measured(item, time_s))
    _interference(plan, timer, kernels, collectives, control, speak)
    with timer.pinned():
        speak(Update(plan.optimizer_parameters, _mean(kernels.optimizer_s(plan.optimizer_parameters), control)))


def _measure(
    item: Item, timer: Timer, kernels: KernelBench, collectives: CollectiveBench, control: "dist.ProcessGroup"
) -> float:
    match item:
        case KernelItem():
            with timer.pinned():
                time_s = kernels.measure_s(item)
            return _mean(time_s, control)
        case LaunchItem():
            with timer.pinned():
                time_s = measure_launch_s(timer)
            return _mean(time_s, control)
        case CollectiveItem():
            # ranks that are no members wait here for the others
            return _largest(collectives.measure_s(item) or 0.0, control)


def _interference(  # noqa: PLR0917
    plan: MeasurementPlan,
    timer: Timer,
    kernels: KernelBench,
    collectives: CollectiveBench,
    control: "dist.ProcessGroup",
    speak: Tell,
) -> None:
    """A product of middling size beside all-reduces over the largest group."""
    items = [item for item in plan.items if isinstance(item, CollectiveItem) and item.op == "all_reduce"]
    products = [i for i in plan.items if isinstance(i, KernelItem) and isinstance(i.kernel, Gemm) and not i.job]
    if not items or not products or not plan.interference:
        return
    widest = max(items, key=lambda item: len(item.ranks))
    item = CollectiveItem("all_reduce", _BESIDE_BYTES * (16 if timer.backend == "nccl" else 1), widest.ranks, 1)
    chosen = sorted(products, key=lambda product: product.kernel.work.flop)[len(products) // 2]
    product = prepare(chosen.kernel, kernels.buffers.allocate, transposed=True)
    for _ in range(plan.interference):
        _agree(True, control)
        rates = measure_rates(timer, product, collectives.call(item), collectives=_BESIDE_REPEATS)
        speak(Rates(*(_mean(rate, control) for rate in rates)))


def nobody(event: Event) -> None:
    """Only the first rank tells."""


def _mean(value: float, control: "dist.ProcessGroup") -> float:
    import torch.distributed as dist  # noqa: PLC0415

    return _shared(value, control, dist.ReduceOp.SUM) / dist.get_world_size(control)


def _largest(value: float, control: "dist.ProcessGroup") -> float:
    import torch.distributed as dist  # noqa: PLC0415

    return _shared(value, control, dist.ReduceOp.MAX)


def _agree(wish: bool, control: "dist.ProcessGroup") -> bool:
    """Whether all ranks want to go on; also the moment at which all of them do."""
    import torch.distributed as dist  # noqa: PLC0415

    return _shared(float(wish), control, dist.ReduceOp.MIN) > 0


def _shared(value: float, control: "dist.ProcessGroup", op: "dist.ReduceOp.RedOpType") -> float:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    shared = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(shared, op=op, group=control)
    return float(shared)


def serve(connection: Connection, assignment: Assignment, rank: int, size: int, store: str) -> None:
    """A spawned process: sends its events, then ("done",) or ("error", text, whether it is a sentence for users)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its processes itself
    threading.Thread(target=_die_with_parent, daemon=True).start()
    answer: tuple[object, ...] = ("done",)
    try:
        _join(store, rank, size, assignment.timeout_s)
        import torch.distributed as dist  # noqa: PLC0415

        take_part(assignment, rank, index=rank, count=size, tell=lambda event: connection.send(("event", event)))
        dist.destroy_process_group()
    except SimparError as error:
        answer = ("error", str(error), True)
    except BaseException as error:  # whatever it is, the parent must hear of it
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().split("\n")[0]
        answer = ("error", f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})", False)
    connection.send(answer)


def _join(store: str, rank: int, size: int, timeout_s: float) -> None:
    """Joins the processes of this machine over its loopback interface."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
    )


def _die_with_parent() -> None:
    """Ends the process when its parent is gone, whatever it hangs in."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
