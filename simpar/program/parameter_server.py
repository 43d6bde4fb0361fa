"""Parameter servers: workers pull parameters before they need them and push gradients as they come; servers update.

Servers are ranks of the program like any other, on places of their own: a worker's GPU, or the host of a node. Pulls
and pushes are messages, so what many workers want of one server shares that server's links. A *key* is a bucket of
parameters; :class:`Keys` says which server keeps how much of each.

Where workers do not wait for each other, a server serves each of them by a rank of its own, as it would by a thread:
these share its links, and each gets its share of the server's memory bandwidth.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from simpar.cost.memory import optimizer_traffic, state_bytes, weight_bytes
from simpar.hardware.cluster import Cluster
from simpar.hardware.host_ways import require_plain
from simpar.model.work import MemoryBound
from simpar.plan.layout import Layout
from simpar.plan.sync import ParameterServer
from simpar.program.compression import Compression
from simpar.program.data_parallel import Runner
from simpar.program.ir import Launch, RankProgram, Recv, Send
from simpar.program.unit import Chunk, Placed
from simpar.program.writer import Writer

STREAM = "ps"
_CLOCK_BYTES = 8  # a step number


class Key(NamedTuple):
    """Units ``first`` to ``last`` (exclusive) of a chunk, with their trained parameters on one rank."""

    chunk: int
    first: int
    last: int
    parameters: int


@dataclass(frozen=True)
class Keys:
    """All keys in forward order, and the servers' parts of them.

    Attributes:
        layout: the plan laid over model and cluster.
        chunks: the units of a rank.
        cluster: where everything runs.
    """

    layout: Layout
    chunks: Sequence[Chunk]
    cluster: Cluster

    @cached_property
    def server(self) -> ParameterServer:
        """The plan's servers."""
        assert self.layout.server is not None, "there are servers"
        return self.layout.server

    @cached_property
    def workers(self) -> int:
        """Data-parallel replicas."""
        return self.layout.replicas

    @cached_property
    def servers(self) -> int:
        """Number of servers."""
        return self.server.count(self.workers, self.cluster.nodes)

    @cached_property
    def all(self) -> tuple[Key, ...]:
        """The keys in forward order."""
        return tuple(
            Key(chunk, first, last, total)
            for chunk, placed in enumerate(self.chunks)
            for first, last in bucketed(placed, self.layout.bucket_parameters)
            if (total := sum(p.unit.trained_parameters for p in placed[first:last]))
        )

    @cached_property
    def parts(self) -> dict[Key, tuple[tuple[int, int], ...]]:
        """Per key the servers that keep it, each with its parameters."""
        if self.server.sharding == "sliced":
            cuts = {key: [key.parameters * s // self.servers for s in range(self.servers + 1)] for key in self.all}
            return {
                key: tuple((s, cut[s + 1] - cut[s]) for s in range(self.servers) if cut[s + 1] > cut[s])
                for key, cut in cuts.items()
            }
        load = [0] * self.servers
        found: dict[Key, tuple[tuple[int, int], ...]] = {}
        for key in self.all:
            least = min(range(self.servers), key=lambda s: (load[s], s))
            load[least] += key.parameters
            found[key] = ((least, key.parameters),)
        return found

    def held(self, server: int) -> int:
        """Parameters that a server keeps, of one tensor-parallel index."""
        return sum(count for parts in self.parts.values() for number, count in parts if number == server)

    def states_beside(self, replica: int) -> int:
        """Bytes of the servers that run on a worker's GPU: parameters, gradients that add up, optimizer states."""
        if self.server.on != "workers":
            return 0
        layout = self.layout
        held = [self.held(server) for server in range(self.servers) if self.host_worker(server) == replica]
        states = state_bytes(
            sum(held),
            precision=layout.precision,
            grad_dtype=layout.grad_dtype,
            optimizer=layout.plan.optimizer,
            optimizer_dtype=layout.plan.optimizer_dtype,
            zero=0,
            shard=1,
        )
        return sum(states.values())

    # ---- ranks and places -------------------------------------------------------------------------------------------

    def rank(self, server: int, worker: int) -> int:
        """The rank that serves a worker: one for all workers where these wait for each other."""
        first = self.cluster.gpus
        return first + server if self.server.is_synchronous else first + server * self.workers + worker

    @property
    def clock(self) -> int:
        """The rank that tells workers how far the others are."""
        return self.cluster.gpus + self.servers * (1 if self.server.is_synchronous else self.workers)

    def host_worker(self, server: int) -> int:
        """The replica on whose GPU a server runs."""
        return server * self.workers // self.servers % self.workers

    def place(self, server: int) -> int:
        """Where a server runs: a GPU, or beyond these the host of a node."""
        gpus, nodes = self.cluster.gpus, self.cluster.nodes
        if self.server.on == "workers":
            rank = self.layout.rank(0, self.host_worker(server))
            return rank if self.cluster.placement is None else self.cluster.placement[rank]
        require_plain(self.cluster)
        return gpus + (
            nodes - self.servers + server if self.server.on == "nodes" else server * nodes // self.servers % nodes
        )

    @property
    def guests(self) -> tuple[tuple[int, int], ...]:
        """All ranks of servers with their places."""
        found = {self.rank(s, w): self.place(s) for s in range(self.servers) for w in range(self.workers)}
        if self.server.mode == "stale_synchronous":
            found[self.clock] = self.place(0)
        return tuple(found.items())


class Served:
    """The worker's side, with the hooks of :mod:`simpar.program.data_parallel`."""

    def __init__(
        self, keys: Keys, writer: Writer, chunks: Sequence[Sequence[Placed]], *, replica: int, tp_rank: int
    ) -> None:
        self._keys = keys
        self._layout = keys.layout
        self._writer = writer
        self._chunks = chunks
        self._replica, self._tp_rank = replica, tp_rank
        self._step = -1
        self._compression = Compression.of(keys.layout)
        self._of_chunk = {chunk: [key for key in keys.all if key.chunk == chunk] for chunk in range(len(chunks))}

    def begin_step(self) -> None:
        """Waits for workers that are too far behind, and without overlap for all parameters."""
        self._step += 1
        server = self._keys.server
        if server.bound is not None and self._step > server.bound:
            awaited = self._step - server.bound - 1
            self._writer.add(Recv(self._keys.clock, ("go", awaited, self._replica, self._tp_rank)))
        if not self._layout.overlap.param_gather:
            for key in self._keys.all:
                self._pull(key)

    def forward(self, run: Runner, chunk: int, *, first: bool) -> None:
        """One forward pass; the first one of a chunk waits for its parameters key by key."""
        count, keys = len(self._chunks[chunk]), self._of_chunk[chunk]
        if not (first and self._layout.overlap.param_gather and keys):
            run(0, count, beside=False)
            return
        for key, begin, end in _covering(keys, count):
            self._pull(key)
            run(begin, end, beside=True)

    def backward(self, run: Runner, chunk: int, microbatch: int, *, last: bool) -> None:
        """One backward pass; the last one of a chunk pushes gradients."""
        count, keys = len(self._chunks[chunk]), self._of_chunk[chunk]
        if not last or not keys:
            run(0, count, beside=False)
        elif self._layout.overlap.grad_reduce:
            for key, begin, end in reversed(list(_covering(keys, count))):
                run(begin, end, beside=True)
                self._push(key, microbatch)
        else:
            run(0, count, beside=False)
            for key in reversed(keys):
                self._push(key, microbatch)

    def backward_input(self, run: Runner, chunk: int) -> None:
        """The first half of a split backward pass."""
        run(0, len(self._chunks[chunk]), beside=False)

    def backward_weight(self, run: Runner, chunk: int, microbatch: int, *, last: bool) -> None:
        """The second half, which brings the gradients."""
        self.backward(run, chunk, microbatch, last=last)

    def is_quiet(self, *, first: bool, last: bool) -> bool:
        """Whether a forward and a backward pass bring no messages."""
        return not first and not last

    def before_update(self) -> None:
        """Servers update."""

    def end_step(self) -> None:
        """Tells the clock that this step is done, where others wait for it."""
        keys = self._keys
        if keys.server.bound is None:
            return
        done, stream = self._writer.record(), STREAM
        self._writer.wait(done, stream)
        tag = ("done", self._step, self._replica, self._tp_rank)
        self._writer.add(Send(stream, keys.clock, _CLOCK_BYTES, tag))

    def _tag(self, what: str, key: Key) -> tuple[object, ...]:
        return (what, self._step, key, self._replica, self._tp_rank)

    def _pull(self, key: Key) -> None:
        for number, (server, _) in enumerate(self._keys.parts[key]):
            source = self._keys.rank(server, self._replica)
            tag = ("pull", self._step, key, server, self._tp_rank)
            self._writer.add(Recv(source, tag, launches=int(number == 0)))

    def _push(self, key: Key, microbatch: int) -> None:
        self._writer.add(*self._compression.pack(key.parameters))
        ready = self._writer.record()
        parts = [(self._keys.rank(server, self._replica), count) for server, count in self._keys.parts[key]]
        # whole keys go to one server each, and none waits for another server; slices go to all side by side
        stream = STREAM if self._keys.server.sharding == "sliced" else f"{STREAM}_{self._keys.parts[key][0][0]}"
        self._writer.wait(ready, stream)
        sizes = [(peer, float(self._compression.wire_bytes(count))) for peer, count in parts]
        (peer, nbytes), *also = sizes
        self._writer.add(Send(stream, peer, nbytes, self._tag("push", key), microbatch, also=tuple(also)))


def bucketed(placed: Sequence[Placed], limit: int) -> list[tuple[int, int]]:
    """Runs of units that hold ``limit`` parameters or more, filled from the end, in forward order."""
    cuts, filled = [len(placed)], 0
    for index in range(len(placed) - 1, 0, -1):
        filled += placed[index].unit.trained_parameters
        if filled >= limit:
            cuts.append(index)
            filled = 0
    return list(pairwise([0, *reversed(cuts)]))


def _covering(keys: Sequence[Key], units: int) -> Iterator[tuple[Key, int, int]]:
    """Keys with runs of units that together hold every unit: those without parameters go with the key before."""
    begins = [0, *(key.first for key in keys[1:]), units]
    for number, key in enumerate(keys):
        yield key, begins[number], begins[number + 1]


def servers(keys: Keys) -> tuple[RankProgram, ...]:
    """The programs of all servers, and of the clock if there is one."""
    server = keys.server
    everyone = range(keys.workers)
    if server.is_synchronous:
        made = [_server(keys, number, everyone) for number in range(keys.servers)]
    else:
        made = [_server(keys, number, [worker]) for number in range(keys.servers) for worker in everyone]
    if server.bound is not None:
        made.append(_clock(keys, server.bound))
    return tuple(made)


def _server(keys: Keys, server: int, workers: Sequence[int]) -> RankProgram:
    """Sends parameters in forward order, then takes gradients as backward passes bring them, and updates."""
    layout = keys.layout
    writer = Writer()
    kept = {key: count for key, parts in keys.parts.items() for number, count in parts if number == server}
    width = weight_bytes(layout.precision)
    for step in range(layout.steps):
        writer.wait(writer.record(), STREAM)
        for key, count in kept.items():
            for t in range(layout.plan.tp):
                peers = [layout.rank(0, worker, t) for worker in workers]
                also = tuple((peer, float(count * width)) for peer in peers[1:])
                tag = ("pull", step, key, server, t)
                writer.add(Send(STREAM, peers[0], count * width, tag, launches=0, also=also))
        for key in reversed(kept):
            for t in range(layout.plan.tp):
                for number, worker in enumerate(workers):
                    tag = ("push", step, key, worker, t)
                    writer.add(Recv(layout.rank(0, worker, t), tag, launches=0))
                    writer.add(*_add_up(keys, kept[key], is_first=number == 0))
                writer.add(*_update(keys, kept[key]))
    return RankProgram(
        rank=keys.rank(server, workers[0]),
        stage=0,
        replicas=0,
        resident=(),
        instructions=tuple(writer.instructions),
    )


def _add_up(keys: Keys, parameters: int, *, is_first: bool) -> list[Launch]:
    """Unpacks what a worker pushed, and adds it to what others did."""
    compression = Compression.of(keys.layout)
    made = [_kernel(keys, launch.kernel.work.nbytes, launch.name) for launch in compression.unpack(parameters, 1)]
    if not is_first:
        made.append(_kernel(keys, 3 * compression.width * parameters, "add gradients"))
    return made


def _update(keys: Keys, parameters: int) -> list[Launch]:
    plan, layout = keys.layout.plan, keys.layout
    traffic = optimizer_traffic(
        parameters,
        precision=layout.precision,
        grad_dtype=layout.grad_dtype,
        optimizer=plan.optimizer,
        optimizer_dtype=plan.optimizer_dtype,
        clips=False,
    )
    return [_kernel(keys, nbytes, name) for name, nbytes in traffic.items()]


def _kernel(keys: Keys, nbytes: float, name: str) -> Launch:
    """A kernel of a server, which no other host launches; one of several at a time has its share of the bandwidth."""
    times = 1 if keys.server.is_synchronous else keys.workers
    return Launch(MemoryBound(int(nbytes) * times), name, "optimizer", 0)


def _clock(keys: Keys, bound: int) -> RankProgram:
    """Lets everybody go on once all have ended a step."""
    layout = keys.layout
    peers = [(worker, t) for worker in range(keys.workers) for t in range(layout.plan.tp)]
    writer = Writer()
    for step in range(layout.steps):
        writer.add(*(Recv(layout.rank(0, worker, t), ("done", step, worker, t), launches=0) for worker, t in peers))
        if step < layout.steps - bound - 1:
            writer.wait(writer.record(), STREAM)
            for worker, t in peers:
                peer, tag = layout.rank(0, worker, t), ("go", step, worker, t)
                writer.add(Send(STREAM, peer, _CLOCK_BYTES, tag, launches=0))
    return RankProgram(keys.clock, 0, 0, (), tuple(writer.instructions))
