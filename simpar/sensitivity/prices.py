"""What the parts of a path cost on a machine: asked of the engine and its cost functions, each part run alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from simpar.engine.costs import Costs
from simpar.engine.costs import Transfer as TransferCost
from simpar.engine.simulate import execute
from simpar.model.work import Kernel
from simpar.program.ir import COMPUTE, Collective, Group, Operation, Program, RankProgram, Recv, Run, Send
from simpar.sensitivity.parameters import Machine
from simpar.trace.trace import Trace
from simpar.units import ns


class Transfer(NamedTuple):
    """A collective or a message, apart from where in the program it stands.

    Attributes:
        op: the collective's, or ``p2p``.
        nbytes: its size.
        stream: of the communicator.
        ranks: members of the group, or source and target.
        copies: shifts of the ranks for which it stands.
        extra_s: latency beyond that of the network.
    """

    op: str
    nbytes: float
    stream: str
    ranks: "range | tuple[int, ...]"
    copies: "range | tuple[int, ...]"
    extra_s: float = 0.0


class Placed(NamedTuple):
    """An operation on a rank, or on one that stands for all of its kind of device."""

    operation: Operation
    rank: int


def transfer_of(instruction: "Collective | Send", rank: int) -> Transfer:
    """What an instruction of a rank transfers."""
    if isinstance(instruction, Send):
        return Transfer("p2p", instruction.nbytes, instruction.stream, (rank, instruction.peer), instruction.copies)
    group = instruction.group
    return Transfer(instruction.op, instruction.nbytes, group.stream, group.ranks, group.copies, instruction.extra_s)


@dataclass
class Weights:
    """How the step time depends on the costs of its parts: seconds of step per second of cost.

    Attributes:
        device: per operation, its length when issued long ago.
        hosted: per operation, its length from its first launch when bound by launches.
        kernels: single kernels, with the kind of their device.
        launches: calls of the host.
        transfers: length of a transfer when alone.
        latencies: its latency only.
        intensities: seconds per unit of how hard a collective works its device.
        rates: by kind of device, seconds per unit of the rate at which compute goes on beside a collective of full
            intensity.
    """

    device: dict[Placed, float] = field(default_factory=dict)
    hosted: dict[Placed, float] = field(default_factory=dict)
    kernels: dict[tuple[Kernel, int], float] = field(default_factory=dict)
    launches: float = 0.0
    transfers: dict[Transfer, float] = field(default_factory=dict)
    latencies: dict[Transfer, float] = field(default_factory=dict)
    intensities: dict[Transfer, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)


def _communicates(operation: Operation) -> bool:
    return any(isinstance(inner, Collective) for block in operation.blocks for inner in block.body)


class Prices:
    """Costs of single parts on a machine, in nanoseconds.

    Args:
        machine: where the parts run.
        program: that they are parts of.
        ranks: those that are simulated.
        known: prices on a machine that differs in some parts only; what these cannot change is not asked again.
    """

    def __init__(self, machine: Machine, program: Program, ranks: Iterable[int], known: "Prices | None" = None) -> None:
        self._machine = machine
        self._program = program
        self._ranks = sorted(ranks)
        self._costs = Costs(machine.cluster, program.algorithm, self._ranks, guests=program.guests)
        self._first = {self._costs.kind_of(rank): rank for rank in reversed(self._ranks)}
        self._device: dict[Placed, int] = {}
        self._hosted: dict[Placed, int] = {}
        self._transfers: dict[Transfer, int] = {}
        if known is not None and not machine.cluster.groups:
            cluster, before = machine.cluster, known._machine.cluster
            if (cluster.node_link, cluster.fabric, cluster.graph) == (before.node_link, before.fabric, before.graph):
                self._transfers = known._transfers
            elif cluster.device == before.device:
                alone = {placed: time for placed, time in known._device.items() if not _communicates(placed.operation)}
                self._device.update(alone)

    @property
    def launch_ns(self) -> int:
        """One call of the host."""
        return ns(self._machine.launch_s)

    def compute_rate(self, kind: int) -> float:
        """Speed of compute beside a collective of full intensity, on a device of this kind."""
        return self._costs.device(kind).compute_rate_during_collectives

    def place(self, operation: Operation, rank: int) -> Placed:
        """The operation on the rank that stands for its kind of device: the first rank of a cluster of one kind."""
        return Placed(operation, self._first[self.kind_of(rank)] if self._machine.cluster.groups else 0)

    def kind_of(self, rank: int) -> int:
        """The kind of device that a rank runs on."""
        return self._costs.kind_of(rank)

    def device_ns(self, placed: Placed) -> int:
        """Length of an operation when everything was issued long ago."""
        if placed not in self._device:
            self.ask([placed])
        return self._device[placed]

    def ask(self, operations: Iterable[Placed]) -> None:
        """Prices several operations in one run of the engine for each kind of device, one after the other."""
        new: dict[int, list[Placed]] = {}
        for placed in dict.fromkeys(operations):
            if placed not in self._device:
                new.setdefault(placed.rank, []).append(placed)
        for rank, asked in new.items():
            runs = tuple(Run(placed.operation) for placed in asked)
            trace = self._run([RankProgram(rank, 0, 1, (), runs)], launch_s=0.0)
            lane = next(i for i, lane in enumerate(trace.lanes) if lane.stream == COMPUTE)
            lengths = trace.spans.duration_ns[np.flatnonzero(trace.spans.lane == lane)].tolist()
            self._device.update(zip(asked, lengths, strict=True))

    def hosted_ns(self, placed: Placed) -> int:
        """Length of an operation from its first launch, on a stream that is free."""
        found = self._hosted.get(placed)
        if found is None:
            alone = RankProgram(placed.rank, 0, 1, (), (Run(placed.operation),))
            found = self._hosted[placed] = self._run([alone], launch_s=self._machine.launch_s).step_ns
        return found

    def kernel_ns(self, kernel: Kernel, kind: int) -> int:
        """Length of a kernel on a device of this kind."""
        return self._costs.kernel_ns(kernel, kind)

    def transfer_ns(self, transfer: Transfer) -> int:
        """Length of a transfer that nothing else disturbs, its folded copies included."""
        found = self._transfers.get(transfer)
        if found is None:
            found = self._transfers[transfer] = self._run(self._alone(transfer), launch_s=0.0).step_ns
        return found

    def latency_ns(self, transfer: Transfer) -> int:
        """The part of it during which no link is held."""
        if transfer.op == "p2p":
            source, target = transfer.ranks
            return self._costs.message(transfer.nbytes, source, target, transfer.copies).latency_ns
        return self._collective(transfer).latency_ns + ns(transfer.extra_s)

    def intensity(self, transfer: Transfer) -> float:
        """How hard a collective works its device (0 to 1)."""
        return self._collective(transfer).intensity

    def total_ns(self, weights: Weights) -> float:
        """The weighted sum; of its change with the machine follows that of the step."""
        self.ask(weights.device)
        return (
            sum(weight * self.device_ns(operation) for operation, weight in weights.device.items())
            + sum(weight * self.hosted_ns(operation) for operation, weight in weights.hosted.items())
            + sum(weight * self.kernel_ns(kernel, kind) for (kernel, kind), weight in weights.kernels.items())
            + weights.launches * self.launch_ns
            + sum(weight * self.transfer_ns(transfer) for transfer, weight in weights.transfers.items())
            + sum(weight * self.latency_ns(transfer) for transfer, weight in weights.latencies.items() if weight)
            + sum(weight * self.intensity(transfer) for transfer, weight in weights.intensities.items())
            + sum(weight * self.compute_rate(kind) for kind, weight in weights.rates.items())
        )

    def _collective(self, transfer: Transfer) -> TransferCost:
        group = Group(transfer.stream, transfer.ranks, transfer.copies)
        return self._costs.collective(transfer.op, transfer.nbytes, group, transfer.ranks[0])

    def _alone(self, transfer: Transfer) -> list[RankProgram]:
        if transfer.op == "p2p":
            source, target = transfer.ranks
            send = Send(transfer.stream, target, transfer.nbytes, "alone", -1, transfer.copies)
            return [
                RankProgram(source, 0, 1, (), (send,)),
                RankProgram(target, 0, 1, (), (Recv(source, "alone"),)),
            ]
        group = Group(transfer.stream, transfer.ranks, transfer.copies)
        collective = Collective(transfer.op, transfer.nbytes, group, extra_s=transfer.extra_s)  # type: ignore[arg-type]
        members = [rank for rank in self._ranks if rank in transfer.ranks] or [transfer.ranks[0]]
        return [RankProgram(rank, 0, 1, (), (collective,)) for rank in members]

    def _run(self, ranks: list[RankProgram], *, launch_s: float) -> Trace:
        whole = self._program
        program = Program(ranks=tuple(ranks), launch_s=launch_s, algorithm=whole.algorithm, guests=whole.guests)
        return execute(program, self._machine.cluster)
