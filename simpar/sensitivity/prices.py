"""What the parts of a path cost on a machine: asked of the cost functions that the engine asks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from simpar.engine.costs import Costs, Load
from simpar.engine.costs import Transfer as TransferCost
from simpar.model.work import Kernel
from simpar.program.ir import HOST_OPS, Collective, Group, HostWork, Program, Send
from simpar.sensitivity.parameters import Machine
from simpar.units import ns


class Transfer(NamedTuple):
    """A collective, a message or work of a host, apart from where in the program it stands.

    Attributes:
        op: the collective's, ``p2p``, or that of the host.
        nbytes: its size.
        stream: of the communicator.
        ranks: members of the group, source and target, or the rank that the host works for.
        copies: shifts of the ranks for which it stands.
        extra_s: latency beyond that of the network.
        also: further receivers of a message with the bytes for each.
    """

    op: str
    nbytes: float
    stream: str
    ranks: "range | tuple[int, ...]"
    copies: "range | tuple[int, ...]"
    extra_s: float = 0.0
    also: tuple[tuple[int, float], ...] = ()


class Flow(NamedTuple):
    """A transfer as it loads links: of a collective, by those of its members that are simulated."""

    transfer: Transfer
    members: tuple[int, ...] = ()


class Way(NamedTuple):
    """A link, by its name, with a flow that uses it."""

    link: str
    user: Flow


def transfer_of(instruction: "Collective | Send | HostWork", rank: int) -> Transfer:
    """What an instruction of a rank transfers."""
    if isinstance(instruction, HostWork):
        return Transfer(instruction.op, instruction.nbytes, instruction.stream, (rank,), instruction.copies)
    if isinstance(instruction, Send):
        stream, peer, nbytes, *_ = instruction
        return Transfer("p2p", nbytes, stream, (rank, peer), instruction.copies, also=instruction.also)
    group = instruction.group
    return Transfer(instruction.op, instruction.nbytes, group.stream, group.ranks, group.copies, instruction.extra_s)


@dataclass
class Weights:
    """How the step time depends on the costs of its parts: seconds of step per second of cost.

    Attributes:
        kernels: single kernels, with the kind of their device.
        launches: calls of the host.
        latencies: time of a transfer during which no link is held.
        streams: streaming time of a transfer when alone.
        links: bytes: seconds per second that a link takes for a byte.
        intensities: seconds per unit of how hard a collective works its device.
        rates: by kind of device, seconds per unit of the rate at which compute goes on beside a collective of full
            intensity.
    """

    kernels: dict[tuple[Kernel, int], float] = field(default_factory=dict)
    launches: float = 0.0
    latencies: dict[Transfer, float] = field(default_factory=dict)
    streams: dict[Transfer, float] = field(default_factory=dict)
    links: dict[Way, float] = field(default_factory=dict)
    intensities: dict[Transfer, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)

    def add(self, other: "Weights", factor: float) -> None:
        """Adds the weights of a part on which the step depends by this factor."""
        self.launches += factor * other.launches
        for name in ("kernels", "latencies", "streams", "links", "intensities", "rates"):
            totals = getattr(self, name)
            for key, weight in getattr(other, name).items():
                totals[key] = totals.get(key, 0.0) + factor * weight


class Prices:
    """Costs of single parts on a machine, in nanoseconds.

    Args:
        machine: where the parts run.
        program: that they are parts of.
        ranks: those that are simulated.
        known: prices on a machine that differs in some parts only; what these cannot change is not asked again.
    """

    def __init__(
        self, machine: Machine, program: Program, ranks: "frozenset[int]", known: "Prices | None" = None
    ) -> None:
        self.machine = machine
        self.program = program
        self._ranks = ranks
        self._costs = Costs(machine.cluster, program.algorithm, sorted(ranks), guests=program.guests)
        self._first = {self._costs.kind_of(rank): rank for rank in sorted(ranks, reverse=True)}
        self._transfers: dict[Flow, TransferCost] = {}
        self._byte_ns: dict[str, float] = {}
        if known is not None:
            cluster, before = machine.cluster, known.machine.cluster
            parts = ("node_link", "fabric", "graph", "host", "groups")
            if all(getattr(cluster, part) == getattr(before, part) for part in parts):
                self._transfers, self._byte_ns = known._transfers, known._byte_ns

    @property
    def launch_ns(self) -> int:
        """One call of the host."""
        return ns(self.machine.launch_s)

    def compute_rate(self, kind: int) -> float:
        """Speed of compute beside a collective of full intensity, on a device of this kind."""
        return self._costs.device(kind).compute_rate_during_collectives

    def kind_of(self, rank: int) -> int:
        """The kind of device that a rank runs on."""
        return self._costs.kind_of(rank)

    def home(self, kind: int) -> int:
        """The rank that stands for all on this kind of device."""
        return self._costs.home(self._first[kind])

    def kernel_ns(self, kernel: Kernel, kind: int) -> int:
        """Length of a kernel on a device of this kind."""
        return self._costs.kernel_ns(kernel, kind)

    def cost(self, flow: Flow) -> TransferCost:
        """Latency, streaming time alone, and all loads of a flow."""
        found = self._transfers.get(flow)
        if found is None:
            found = self._transfers[flow] = self._ask(flow)
        return found

    def latency_ns(self, transfer: Transfer) -> int:
        """The part of a transfer during which no link is held."""
        return self.cost(Flow(transfer)).latency_ns

    def stream_ns(self, transfer: Transfer) -> int:
        """The part of it in which it streams, when nothing else uses its links."""
        return self.cost(Flow(transfer)).stream_ns

    def alone_ns(self, transfer: Transfer) -> int:
        """Both."""
        return self.latency_ns(transfer) + self.stream_ns(transfer)

    def intensity(self, transfer: Transfer) -> float:
        """How hard a collective works its device (0 to 1)."""
        return self.cost(Flow(transfer)).intensity

    def byte_ns(self, way: Way) -> float:
        """What a link takes for a byte."""
        found = self._byte_ns.get(way.link)
        if found is None:
            link = next(load.link for load in self.cost(way.user).loads if load.link.name == way.link)
            found = self._byte_ns[way.link] = 1e9 / link.capacity_bytes_per_s
        return found

    def total_ns(self, weights: Weights) -> float:
        """The weighted sum; of its change with the machine follows that of the step."""
        return (
            self.spent_ns(weights)
            + sum(weight * self.intensity(transfer) for transfer, weight in weights.intensities.items())
            + sum(weight * self.compute_rate(kind) for kind, weight in weights.rates.items())
        )

    def spent_ns(self, weights: Weights) -> float:
        """The same of all times: what the weights explain of a step, which is homogeneous of degree 1 in them."""
        return sum(self._times(weights))

    def gross_ns(self, weights: Weights) -> float:
        """The same of all times, whatever the sign of their weights."""
        return sum(map(abs, self._times(weights)))

    def _times(self, weights: Weights) -> Iterator[float]:
        yield weights.launches * self.launch_ns
        yield from (weight * self.kernel_ns(*kernel) for kernel, weight in weights.kernels.items())
        yield from (weight * self.latency_ns(transfer) for transfer, weight in weights.latencies.items())
        yield from (weight * self.stream_ns(transfer) for transfer, weight in weights.streams.items())
        yield from (weight * self.byte_ns(way) for way, weight in weights.links.items())

    def _ask(self, flow: Flow) -> TransferCost:
        op, nbytes, stream, ranks, copies, extra_s, also = flow.transfer
        if op == "p2p":
            source, target = ranks
            return self._costs.messages(((target, nbytes), *also), source, copies)
        if op in HOST_OPS:
            return self._costs.host_work(op, nbytes, ranks[0], copies)
        group = Group(stream, ranks, copies)
        cost = self._costs.collective(op, nbytes, group, ranks[0])
        loads: list[Load] = []
        if flow.members:
            loads += self._costs.shared_loads(op, nbytes, group)
            for member in flow.members:
                loads += self._costs.collective(op, nbytes, group, member).loads
        return cost._replace(latency_ns=cost.latency_ns + ns(extra_s), loads=tuple(loads))
