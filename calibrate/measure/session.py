"""The rounds, as every process runs them: all ranks measure the same item at the same time, the first one tells."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from time import time
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from calibrate import child
from calibrate.measure.collectives import CollectiveBench
from calibrate.measure.interference import Rates, measure_rates
from calibrate.measure.kernels import KernelBench
from calibrate.measure.launch import measure_launch_s
from calibrate.measure.plan import (
    CollectiveItem,
    InterferenceItem,
    Item,
    KernelItem,
    LaunchItem,
    MeasurementPlan,
    UpdateItem,
)
from calibrate.measure.timer import Timer, local_timer
from calibrate.replay.kernels import prepare
from calibrate.rounds import DOUBTFUL, class_name, doubt

if TYPE_CHECKING:
    import torch.distributed as dist

_BESIDE_REPEATS = 25


class Measured(NamedTuple):
    """One round of an item: its seconds, or for compute beside collectives its rates."""

    item: Item
    value: float | Rates


Tell: TypeAlias = Callable[[Measured], None]
_Seen: TypeAlias = dict[str, dict[Item, list[float]]]


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
    kernels = KernelBench(timer, lambda value: _mean(value, control))
    collectives = CollectiveBench(
        timer,
        [item for item in plan.items if isinstance(item, CollectiveItem)],
        control,
        rank=rank,
        one_machine=assignment.one_machine,
        timeout_s=assignment.timeout_s,
    )
    speak = tell if rank == 0 else nobody
    seen: _Seen = {}

    def measure(items: Iterable[Item]) -> None:
        for item in items:
            value = _measure(item, timer, kernels, collectives, control)
            _note(seen, item, value)
            speak(Measured(item, value))

    before = time()
    for number in range(plan.rounds):
        now = time()
        fits = now + (now - before) <= assignment.until  # if the next round takes as long as the last one
        before = now
        if not _agree(rank != 0 or number < plan.least or fits, control):
            break
        measure(item for item in plan.items if assignment.done.get(item, 0) <= number)
    for _ in range(plan.rounds):
        wanted = [name for name, items in seen.items() if _agree(rank != 0 or _disagree(items), control)]
        again = [item for item in plan.items if _class(item) in wanted]
        if not again or not _agree(rank != 0 or time() <= assignment.until + plan.again_s, control):
            break
        measure(again)


def _class(item: Item) -> str | None:
    """What rounds of an item are judged together with; None if they are not judged."""
    match item:
        case KernelItem(kernel):
            return class_name(kernel)
        case CollectiveItem(op):
            return class_name(op)
    return None


def _note(seen: _Seen, item: Item, value: float | Rates) -> None:
    name = _class(item)
    if name is not None and isinstance(value, float):
        seen.setdefault(name, {}).setdefault(item, []).append(value)


def _disagree(items: Mapping[Item, Sequence[float]]) -> bool:
    """Whether more rounds are needed; what a run that went on has not measured enough itself was judged before."""
    rounds = [times for times in items.values() if len(times) > 1]
    return bool(rounds) and doubt(rounds) > DOUBTFUL


def _measure(
    item: Item, timer: Timer, kernels: KernelBench, collectives: CollectiveBench, control: "dist.ProcessGroup"
) -> float | Rates:
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
        case UpdateItem(parameters):
            with timer.pinned():
                time_s = kernels.optimizer_s(parameters)
            return _mean(time_s, control)
        case InterferenceItem(product, collective):
            kernels.buffers.reset()
            compute = prepare(product.kernel, kernels.buffers.allocate, transposed=bool(product.transposed))
            _agree(True, control)
            rates = measure_rates(timer, compute, collectives.call(collective), collectives=_BESIDE_REPEATS)
            return Rates(*(_mean(rate, control) for rate in rates))


def nobody(event: Measured) -> None:
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
    """A spawned process: sends its events, then ("done",) or an error."""
    child.begin()

    def measured() -> child.Answer:
        child.join(store, rank, size, assignment.timeout_s)
        import torch.distributed as dist  # noqa: PLC0415

        take_part(assignment, rank, index=rank, count=size, tell=lambda event: connection.send(("event", event)))
        dist.destroy_process_group()
        return ("done",)

    connection.send(child.answer_of(measured))
