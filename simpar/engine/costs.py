"""Cost functions bound to a cluster, in whole nanoseconds; each distinct question is asked once per run."""

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from simpar.cost.algorithms import CollectiveCost
from simpar.cost.collective import collective_cost, p2p_cost
from simpar.cost.kernel import kernel_s, runnable
from simpar.engine.slow import Slow
from simpar.errors import PlanError
from simpar.faults.description import Faults
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import Device
from simpar.hardware.fabric import Link, Network, span
from simpar.hardware.host_ways import host_link, host_memory, host_of, host_way
from simpar.model.work import Kernel, MemoryBound
from simpar.program.ir import Group, HostOp
from simpar.units import ns

_NAME = re.compile(r"([a-z]+)(\d+)(.*)")


class Load(NamedTuple):
    """Bytes that a transfer puts on a link, as so many flows that are alike."""

    link: Link
    nbytes: float
    flows: int = 1


class Transfer(NamedTuple):
    """A transfer as the network sees it: latency, streaming time alone, and loads.

    ``intensity`` is how hard it works a member's device: bytes that pass it per second, over what its node link can
    carry (0 to 1).
    """

    latency_ns: int
    stream_ns: int
    loads: tuple[Load, ...]
    intensity: float = 0.0


class _Near(NamedTuple):
    """Ranks that share a host, and those of them that share a link to it."""

    on_host: int
    on_link: int


class Costs:
    """Asks the cost functions, remembers the answers.

    Groups and messages come as ranks; what is asked of the hardware are the GPUs that the cluster places them on.

    Args:
        cluster: where the program runs.
        algorithm: of collectives.
        ranks: those that are simulated; in a torus, of all links that a group uses only theirs are loaded (in a folded
            program any other is like one of them).
        faults: devices and links that are slow.
        guests: places of ranks beyond those of the job; see :class:`simpar.program.ir.Program`.

    Attributes:
        slow: what is slower than the cluster says.
    """

    def __init__(
        self,
        cluster: Cluster,
        algorithm: str,
        ranks: Iterable[int] = (),
        faults: Faults | None = None,
        *,
        guests: Iterable[tuple[int, int]] = (),
    ) -> None:
        self._cluster = cluster
        self.slow = Slow(faults)
        self._kinds = len(cluster.devices) + 1  # that of the hosts is the last; then the same again, slower
        self._guests: Mapping[int, int] = dict(guests)
        self._algorithm = algorithm
        self._network = Network(cluster)
        self._places = cluster.placement
        self._is_torus = cluster.graph is None and cluster.node_link.axes is not None
        self._asks_ranks = self._is_torus or cluster.graph is not None
        self._places_of_owners = frozenset(map(self.place, ranks)) if self._is_torus else frozenset()
        self._owners = tuple(f"ici{place}." for place in self._places_of_owners)
        # without such links the cost of a question does not grow with the group
        self._shares_links = (
            cluster.graph is not None
            or self._is_torus
            or (cluster.fabric is not None and cluster.fabric.pod_nodes is not None)
        )
        self._kernels: dict[tuple[Kernel, int], int] = {}
        self._collectives: dict[tuple[Hashable, ...], CollectiveCost] = {}
        self._nodes: dict[Group, int] = {}
        self._views: dict[frozenset[int], Cluster] = {}
        self._seen: dict[Group, Cluster] = {}
        self._shared: dict[tuple[str, float, Group], tuple[Load, ...]] = {}
        self._units: dict[tuple[Group, bool, float], tuple[Load, ...]] = {}
        self._neighbours: dict[tuple[int, range | tuple[int, ...]], _Near] = {}

    def place(self, rank: int) -> int:
        """The GPU that a rank runs on."""
        if rank in self._guests:
            return self._guests[rank]
        return rank if self._places is None else self._places[rank]

    def device(self, kind: int) -> Device:
        """The devices of one kind, 0 the first; the kind after the last is that of the hosts."""
        devices, kind = self._cluster.devices, kind % self._kinds
        return devices[kind] if kind < len(devices) else self._cluster.host.device

    def kind_of(self, rank: int) -> int:
        """Which kind of device a rank runs on."""
        return self._kind_at(self.place(rank)) + self._kinds * self.slow.level(rank)

    def _kind_at(self, place: int) -> int:
        return len(self._cluster.devices) if place >= self._cluster.gpus else self._cluster.kind_of(place)

    def kernel_ns(self, kernel: Kernel, kind: int = 0) -> int:
        """Time of a kernel that runs alone on a device of that kind."""
        found = self._kernels.get((kernel, kind))
        if found is None:
            device = self.device(kind)
            fitting = runnable(kernel, device) if kind or len(self._cluster.devices) > 1 else kernel
            found = self._kernels[kernel, kind] = ns(kernel_s(fitting, device) / self.slow.speed(kind // self._kinds))
        return found

    def collective(self, op: str, nbytes: float, group: Group, rank: int) -> Transfer:
        """A collective of ``group``, with the load that it puts on the links of one member."""
        cost = self._collective(op, nbytes, group)
        loads = []
        if self._cluster.graph is None:
            place = self.place(rank)
            own = [(cost.nic_bytes, self._network.nic_links(place))]
            if not self._is_torus:
                own.append((cost.node_link_bytes, self._network.node_links(place)))
            for carried, links in reversed(own):
                loads += [Load(link, carried) for link in links if carried > 0]
        latency_ns, stream_ns = _split(cost)
        return Transfer(latency_ns, stream_ns, tuple(loads), self._intensity(cost, stream_ns))

    def _intensity(self, cost: CollectiveCost, stream_ns: int) -> float:
        link = self._cluster.node_link
        if link.kind == "host":
            return 1.0  # gloo takes cores from compute, however little it moves
        could = link.bandwidth_bytes_per_s * stream_ns * 1e-9
        return min(max(cost.node_link_bytes, cost.nic_bytes) / could, 1.0) if could else 0.0

    def home(self, rank: int) -> int:
        """The rank that a block is priced as: any of one kind will do, so the first where there is but one kind."""
        return rank if self._cluster.groups or self.slow.anything else 0

    def own_part(self, name: str, rank: int) -> tuple[str, str] | None:
        """Kind and end (``gpu`` and ``>``) of a rank's own link; None for links of others or of nobody."""
        if self._cluster.graph is not None:
            return None  # ``gpu0>gpu1`` is an edge, whoever it begins at
        parts = _NAME.fullmatch(name)
        if parts is None or parts[1] not in ("gpu", "nic", "ici") or int(parts[2]) != self.place(rank):
            return None
        return parts[1], parts[3]

    def own_link(self, kind: str, end: str, rank: int) -> Link:
        """The link of a rank of that kind and end."""
        return self._network.named(f"{kind}{self.place(rank)}{end}")

    def shared_loads(self, op: str, nbytes: float, group: Group) -> tuple[Load, ...]:
        """What a collective, and its folded copies, put on links that belong to no single member.

        These are the uplinks of leaf switches, the bundles of a dragonfly, the links of a torus or the edges of a
        custom graph. Without any there are none, and the cost of asking does not grow with the group.
        """
        if not self._shares_links:
            return ()
        found = self._shared.get((op, nbytes, group))
        if found is None:
            cost, every_pair = self._collective(op, nbytes, group), op == "all_to_all"
            # loads grow with the bytes, so each mix of tiers is counted once
            whole = cost.node_link_bytes + cost.nic_bytes
            inside = cost.node_link_bytes / whole if whole else 0.0
            unit = self._unit_loads(group, every_pair, round(inside, 12))
            found = tuple(Load(link, carried * whole, flows) for link, carried, flows in unit)
            self._shared[op, nbytes, group] = found
        return found

    def _unit_loads(self, group: Group, every_pair: bool, inside: float) -> tuple[Load, ...]:
        """Loads of one byte, of which ``inside`` stays in the node."""
        key = (group, every_pair, inside)
        found = self._units.get(key)
        if found is None:
            total: dict[Link, tuple[float, int]] = {}
            for shift in group.copies:
                ranks: Sequence[int] = _shifted(group.ranks, shift)
                if self._places is not None:
                    ranks = [self._places[rank] for rank in ranks]
                loads = self._network.shared_loads(
                    ranks, inside, 1.0 - inside, every_pair=every_pair, owners=self._places_of_owners
                )
                self._add_shared(total, loads.items())
            found = self._units[key] = tuple(Load(link, carried, flows) for link, (carried, flows) in total.items())
        return found

    def message(self, nbytes: float, src: int, dst: int, copies: "range | tuple[int, ...]") -> Transfer:
        """A message between two ranks; its folded copies share whatever links are not their own."""
        ends = self.place(src), self.place(dst)
        if max(ends) >= self._cluster.gpus:
            return self._host_message(nbytes, *ends)
        cluster = self.slow.seen(self._view(frozenset(map(self._cluster.kind_of, ends))), ends)
        cost = p2p_cost(nbytes, *ends, cluster, network=self._network)
        ways = self._network.spread(*ends)
        own = tuple(Load(link, nbytes * share) for link, share in ways if not self._is_shared(link))
        if not self._shares_links:
            return Transfer(*_split(cost), own)
        total: dict[Link, tuple[float, int]] = {}
        pairs = ((self.place(src + shift), self.place(dst + shift)) for shift in copies)
        for link, share, count in self._network.shared_ways(pairs):
            self._add_shared(total, [(link, nbytes * share * count)], count)
        return Transfer(*_split(cost), (*own, *(Load(link, b, flows) for link, (b, flows) in total.items())))

    def messages(self, parts: Sequence[tuple[int, float]], src: int, copies: "range | tuple[int, ...]") -> Transfer:
        """One message in parts to several receivers, which go side by side: alone, its busiest link decides."""
        found = [self.message(nbytes, src, dst, copies) for dst, nbytes in parts]
        if len(found) == 1:
            return found[0]
        total: dict[Link, float] = {}
        for link, nbytes, _ in (load for part in found for load in part.loads):
            total[link] = total.get(link, 0.0) + nbytes
        longest = max((nbytes / link.capacity_bytes_per_s for link, nbytes in total.items()), default=0.0)
        stream_ns = max(ceil(longest * 1e9 - 1e-6), *(part.stream_ns for part in found))
        loads = tuple(Load(link, nbytes) for link, nbytes in total.items())
        return Transfer(max(part.latency_ns for part in found), stream_ns, loads)

    def _host_message(self, nbytes: float, src: int, dst: int) -> Transfer:
        latency_s, bytes_per_s, ways = host_way(self._network, src, dst)
        cost = CollectiveCost("p2p", latency_s, latency_s + nbytes / bytes_per_s, 0.0, 0.0)
        return Transfer(*_split(cost), tuple(Load(link, nbytes * share) for link, share in ways))

    def host_work(self, op: HostOp, nbytes: float, rank: int, copies: "range | tuple[int, ...]") -> Transfer:
        """A copy between a rank's device and its host, or a pass of the processor over the memory there.

        A copy takes the link to the host and that memory, a pass the memory alone: it is bound by traffic (an update
        with Adam does less than 1 FLOP a byte). Folded copies on the same host load the same memory, those below the
        same switch the same link; on other hosts they load links like these.
        """
        host, place = self._cluster.host, self.place(rank)
        memory = host_memory(self._cluster, place)
        near = self._near(rank, copies)
        loads = [Load(memory, nbytes * near.on_host, near.on_host)]
        if op == "update":
            latency_s = host.device.memory_bound["elementwise"].overhead_s
            alone_s = kernel_s(MemoryBound(int(nbytes)), host.device) - latency_s
        else:
            link = host_link(self._cluster, place, ">" if op == "copy_out" else "<")
            loads.append(Load(link, nbytes * near.on_link, near.on_link))
            if self._cluster.node_link.kind == "pcie":  # the GPU has one plug for all
                out, into = self._network.node_links(place)
                loads.append(Load(out if op == "copy_out" else into, nbytes))
            rate = min(load.link.capacity_bytes_per_s for load in loads)
            latency_s, alone_s = host.latency_s, nbytes / rate
        return Transfer(ns(latency_s), ceil(alone_s * 1e9 - 1e-6), tuple(loads))

    def _near(self, rank: int, copies: "range | tuple[int, ...]") -> "_Near":
        """How many of the ranks that one stands for share its host, and its link there."""
        found = self._neighbours.get((rank, copies))
        if found is None:
            cluster, place = self._cluster, self.place(rank)
            host, link = host_of(cluster, place), host_link(cluster, place, ">")
            places = [self.place(rank + shift) for shift in copies]
            on_host = sum(host_of(cluster, other) == host for other in places)
            found = _Near(on_host, sum(host_link(cluster, other, ">") == link for other in places))
            self._neighbours[rank, copies] = found
        return found

    def _collective(self, op: str, nbytes: float, group: Group) -> CollectiveCost:
        nodes = self._nodes.get(group)
        if nodes is None:
            places = group.ranks if self._places is None else [self._places[rank] for rank in group.ranks]
            nodes = self._nodes[group] = span(places, self._cluster.gpus_per_node)[0]
            kinds = map(self._cluster.kind_of, places) if self._cluster.groups else ()
            self._seen[group] = self.slow.seen(self._view(frozenset(kinds)), places)
        question = (op, nbytes, len(group.ranks), nodes)
        cluster = self._seen[group]
        ranks = [self.place(rank) for rank in group.ranks] if self._asks_ranks else None
        key = (*question, group if self._asks_ranks else id(cluster))
        cost = self._collectives.get(key)
        if cost is None:
            try:
                cost = collective_cost(
                    *question, cluster, algorithm=self._algorithm, ranks=ranks, network=self._network
                )
            except PlanError:
                if self._algorithm == "auto":
                    raise
                # as NCCL does where the algorithm that it was told has no form for this collective or group
                cost = collective_cost(*question, cluster, ranks=ranks, network=self._network)
            self._collectives[key] = cost
        return cost

    def _view(self, kinds: frozenset[int]) -> Cluster:
        """The cluster as the links of these kinds of nodes are; kept, so that one is the same object each time."""
        found = self._views.get(kinds)
        if found is None:
            found = self._views[kinds] = self._cluster.seen_by(kinds)
        return found

    def _is_shared(self, link: Link) -> bool:
        """Whether copies of a transfer may meet on a link."""
        return self._cluster.graph is not None or link.name.startswith(("leaf", "group", "ici"))

    def _add_shared(
        self, total: dict[Link, tuple[float, int]], loads: Iterable[tuple[Link, float]], count: int = 1
    ) -> None:
        for link, carried in loads:
            if self._is_shared(link) and (not self._is_torus or link.name.startswith(self._owners)):
                nbytes, flows = total.get(link, (0.0, 0))
                total[link] = (nbytes + carried, flows + count)


def _shifted(ranks: "range | tuple[int, ...]", shift: int) -> "range | tuple[int, ...]":
    if isinstance(ranks, range):
        return range(ranks.start + shift, ranks.stop + shift, ranks.step)
    return tuple(rank + shift for rank in ranks)


def _split(cost: CollectiveCost) -> tuple[int, int]:
    """Latency and streaming time whose sum is the cost, in whole nanoseconds."""
    latency = ns(cost.latency_s)
    return latency, max(ceil(cost.total_s * 1e9 - latency - 1e-6), 0)
