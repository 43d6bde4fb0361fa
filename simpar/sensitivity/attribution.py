"""What the critical path is spent on, by kind of work: whole nanoseconds that add up to the step."""

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from simpar.program.ir import Collective, Launch, Operation, Run
from simpar.sensitivity.prices import Prices, transfer_of
from simpar.sensitivity.step import Dependence
from simpar.sensitivity.steps import Steps
from simpar.sensitivity.waits import causes_of
from simpar.trace.breakdown import waits_inside
from simpar.trace.critical_path import PathPart, critical_path
from simpar.trace.trace import COMMUNICATION_KINDS, COMPUTE_KINDS, KERNEL_KINDS, KINDS, NONE, Spans

GEMM, ATTENTION, MEMORY, OPTIMIZER = "matrix products", "attention", "memory-bound kernels", "optimizer"
INTERFERENCE, HOST = "slowed by collectives", "host launches"
LATENCY, STREAMING = "latency", "streaming"

_OF_KERNEL = {"gemm": GEMM, "attention": ATTENTION}  # the other kinds are bound by memory


def path_time(dependence: Dependence) -> dict[str, int]:
    """Nanoseconds of the critical path by kind of work; they add up to the step exactly.

    Kinds are matrix products, attention, memory-bound kernels, optimizer, what compute lost to collectives beside it,
    the host's launches, and for each stream (``tp``, ``dp``, ``pp``, ...) the latency and the streaming of its
    collectives or messages, as far as the step waits for them. Waiting for a slower stage is no kind of its own: the
    path then runs through that stage.
    """
    attribution = _Attribution(dependence.steps, dependence.prices)
    causes = causes_of(dependence.steps, dependence.prices, dependence.blocks)
    for part in critical_path(dependence.steps.trace, causes):
        attribution.add(part)
    found = {kind: spent for kind, spent in attribution.total.items() if spent}
    assert sum(found.values()) == dependence.step_ns, "the path fills the step"
    return dict(sorted(found.items(), key=lambda item: (_place(item[0]), item[0])))


def _place(kind: str) -> int:
    """Kernels first, then what they wait for."""
    order = (GEMM, ATTENTION, MEMORY, OPTIMIZER, INTERFERENCE)
    return order.index(kind) if kind in order else len(order) + (kind == HOST)


class _Attribution:
    """Nanoseconds by kind, part by part."""

    def __init__(self, steps: Steps, prices: Prices) -> None:
        self.total: defaultdict[str, int] = defaultdict(int)
        self._steps = steps
        self._prices = prices
        self._kernels: Spans | None = None

    def add(self, part: PathPart) -> None:
        """Books one part of the path."""
        if part.bound == "communication":
            self._transfer(part)
        elif part.bound == "device":
            self._compute(part)
        elif self._is_compute(part.row) and part.end_ns == self._end(part.row):
            self._hosted(part)
        else:
            self.total[HOST] += part.duration_ns

    def _transfer(self, part: PathPart) -> None:
        step = self._steps.of[part.row]
        assert not isinstance(step.instruction, (Run, Launch)), "it communicates"
        transfer = transfer_of(step.instruction, step.rank)
        latency = min(self._prices.latency_ns(transfer), part.duration_ns)
        stream = transfer.stream.partition("_")[0]  # messages of a pipeline have a stream a direction
        self.total[f"{stream} {LATENCY}"] += latency
        self.total[f"{stream} {STREAMING}"] += part.duration_ns - latency

    def _compute(self, part: PathPart) -> None:
        trace, row = self._steps.trace, part.row
        assert trace.details is not None, "the engine records details"
        template = int(trace.details.template[row])
        if template == NONE:
            self.total[_kind(KINDS[int(trace.spans.kind[row])])] += part.duration_ns
            return
        made = trace.details.templates[template]
        is_optimizer = KINDS[int(trace.spans.kind[row])] == "optimizer"
        left = part.duration_ns
        for kind in KERNEL_KINDS:
            spent = made.busy_ns.get(kind, 0)
            self.total[OPTIMIZER if is_optimizer else _kind(kind)] += spent
            left -= spent
        for stream, (exposed, _) in waits_inside(made).items():
            self._exposed(self._operation(row), stream, exposed)
        self.total[INTERFERENCE] += left - made.exposed_ns

    def _exposed(self, operation: Operation | None, stream: str, exposed: int) -> None:
        """Time in which an operation waits for its own collectives of a stream, by their mean share of latency."""
        if exposed:
            share = 0.0 if operation is None else self._latency_share(operation, stream)
            latency = round(exposed * share)
            self.total[f"{stream} {LATENCY}"] += latency
            self.total[f"{stream} {STREAMING}"] += exposed - latency

    def _latency_share(self, operation: Operation, stream: str) -> float:
        collectives = (i for block in operation.blocks for i in block.body if isinstance(i, Collective))
        transfers = [transfer_of(inner, 0) for inner in collectives if inner.group.stream == stream]
        total = sum(self._prices.alone_ns(transfer) for transfer in transfers)
        return sum(self._prices.latency_ns(transfer) for transfer in transfers) / total if total else 0.0

    def _hosted(self, part: PathPart) -> None:
        """A span that waited for launches: the kernels that ran back to back at its end, and the host before them."""
        trace = self._steps.trace
        if self._kernels is None:
            self._kernels = trace.kernels()
        mine = np.flatnonzero(self._kernels.parent == part.row)
        ends = {int(self._kernels.end_ns[k]): int(k) for k in mine if self._kernels.duration_ns[k] > 0}
        is_optimizer = KINDS[int(trace.spans.kind[part.row])] == "optimizer"
        time = part.end_ns
        while time > part.start_ns and (kernel := ends.get(time)) is not None:
            kind, spent = KINDS[int(self._kernels.kind[kernel])], int(self._kernels.duration_ns[kernel])
            if kind in COMMUNICATION_KINDS:
                stream = trace.lanes[int(self._kernels.lane[kernel])].stream
                self._exposed(self._operation(part.row), stream, spent)
            else:
                self.total[OPTIMIZER if is_optimizer else _kind(kind)] += spent
            time -= spent
        self.total[HOST] += time - part.start_ns

    def _operation(self, row: int) -> Operation | None:
        instruction = self._steps.of[row].instruction
        return instruction.operation if isinstance(instruction, Run) else None

    def _is_compute(self, row: int) -> bool:
        return isinstance(self._steps.of[row].instruction, (Run, Launch))

    def _end(self, row: int) -> int:
        return int(self._steps.trace.spans.end_ns[row])


def _kind(kind: str) -> str:
    """A kind of span as a kind of work."""
    assert kind not in COMPUTE_KINDS or kind == "optimizer", f"{kind} is made of kernels"
    return OPTIMIZER if kind == "optimizer" else _OF_KERNEL.get(kind, MEMORY)


def seconds(path: Mapping[str, int]) -> dict[str, float]:
    """The same in seconds."""
    return {kind: spent * 1e-9 for kind, spent in path.items()}
