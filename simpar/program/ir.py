"""The program: what every GPU gets from its host, in CUDA's own terms.

A rank's program is one list in *host order*; each instruction names the stream that executes it. Streams are in-order;
events order them among each other. Nothing here knows a time: the engine takes times from the cost functions, the
replay measures them.

An :class:`Operation` is a run of kernels (and of collectives on links that nobody else uses meanwhile) that is executed
as one event. It is a sequence of :class:`Block` values, most of them the same block repeated once per layer.

Instructions are named tuples because a step has tens of thousands of them.
"""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

from simpar.model.work import Kernel, Work

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "shift"]
HostOp = Literal["copy_out", "copy_in", "update"]
HOST_OPS: tuple[HostOp, ...] = get_args(HostOp)
Phase = Literal["forward", "backward", "recompute", "weight_grad", "optimizer"]
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one communicator, and the stream that serves it.

    ``copies`` are the communicators that it stands for when replicas are folded: the same ranks, shifted.
    """

    stream: str
    ranks: "range | tuple[int, ...]"
    copies: "range | tuple[int, ...]" = (0,)


class Launch(NamedTuple):
    """One kernel on the compute stream; ``launches`` counts what the host issues for it."""

    kernel: Kernel
    name: str
    phase: Phase = "forward"
    launches: int = 1
    layer: int = -1


class Collective(NamedTuple):
    """One collective on the stream of its group; it starts when the last member arrives.

    ``nbytes`` follows nccl-tests: the buffer of an all-reduce, the output of an all-gather, the input of a
    reduce-scatter, what one rank sends in an all-to-all or, to its neighbour in a ring, in a shift. ``extra_s`` is
    latency beyond that of the network.
    """

    op: CollectiveOp
    nbytes: float
    group: Group
    name: str = ""
    microbatch: int = -1
    chunk: int = -1
    layer: int = -1
    extra_s: float = 0.0


class Send(NamedTuple):
    """A message to another rank, on ``stream``; ``tag`` pairs it with its :class:`Recv`.

    ``copies`` are the messages that it stands for when replicas are folded: the same ranks, shifted. ``launches`` is 0
    where another call of the host sends it. ``also`` are further receivers with the bytes for each: such parts of one
    message go side by side and arrive together.
    """

    stream: str
    peer: int
    nbytes: float
    tag: Hashable
    microbatch: int = -1
    copies: "range | tuple[int, ...]" = (0,)
    launches: int = 1
    also: tuple[tuple[int, float], ...] = ()

    @property
    def parts(self) -> tuple[tuple[int, float], ...]:
        """All receivers, with the bytes for each."""
        return ((self.peer, self.nbytes), *self.also)


class Recv(NamedTuple):
    """The compute stream waits here until the message ``tag`` from ``peer`` is there."""

    peer: int
    tag: Hashable
    launches: int = 1


class HostWork(NamedTuple):
    """What a rank asks of the memory of its host, on ``stream``: a copy, or a pass of the processor over states there.

    ``nbytes`` are those copied, or those that the pass reads and writes. ``copies`` are the ranks that it stands for
    when replicas are folded, as shifts of this one; those of the same host share its memory and links.
    """

    stream: str
    op: HostOp
    nbytes: float
    name: str
    microbatch: int = -1
    layer: int = -1
    copies: "range | tuple[int, ...]" = (0,)

    @property
    def launches(self) -> int:
        """Calls of the host that it takes: one for a copy; a pass is the host's own."""
        return int(self.op != "update")


class Record(NamedTuple):
    """Marks ``event`` when ``stream`` gets here."""

    stream: str
    event: Hashable


class Wait(NamedTuple):
    """``stream`` goes on only after ``event`` was recorded."""

    stream: str
    event: Hashable


class Sync(NamedTuple):
    """The host goes on only when the compute stream gets here (``cudaStreamSynchronize``)."""


class Delay(NamedTuple):
    """The host does something else for so long, such as waiting for its data loader, before it issues what follows."""

    delay_s: float


class Alloc(NamedTuple):
    """Memory taken (or, with negative ``nbytes``, given back) when the compute stream gets here."""

    category: str
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A short list of launches, collectives, records and waits in host order; all its streams join at its end.

    Compared by identity: lowering makes each distinct block once and repeats it.
    """

    name: str
    body: "tuple[Instruction, ...]"

    @property
    def work(self) -> Work:
        """FLOP and bytes of the block's kernels."""
        total = Work()
        for instruction in self.body:
            if isinstance(instruction, Launch):
                total = total + instruction.kernel.work
        return total


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """Blocks that run back to back on a rank, as one event: for example all layers of a stage, forward.

    ``layers[i]`` is the model layer of ``blocks[i]`` (-1 for embedding, head and optimizer).
    """

    name: str
    phase: Phase
    blocks: tuple[Block, ...]
    layers: tuple[int, ...]


class Run(NamedTuple):
    """Executes an operation for one microbatch.

    ``transient_bytes`` are held only meanwhile. An ``opened`` run is simulated kernel by kernel, because the links of
    its collectives carry other streams' traffic at the same time.
    """

    operation: Operation
    microbatch: int = -1
    chunk: int = -1
    transient_bytes: int = 0
    opened: bool = False


Instruction = Run | Collective | Send | Recv | HostWork | Record | Wait | Sync | Delay | Alloc | Launch


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The instructions of one rank, which stands for ``replicas`` equal ones.

    Attributes:
        rank: global rank.
        stage: pipeline rank.
        replicas: ranks of the job that run exactly this.
        resident: memory held during the whole step, by category.
        instructions: in host order.
        host_bytes: memory of its host that is held for the rank, at most.
    """

    rank: int
    stage: int
    replicas: int
    resident: "tuple[tuple[str, int], ...]"
    instructions: tuple[Instruction, ...]
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """A step: rank programs that together hold every sender, receiver and group member that is simulated.

    ``placement`` is the GPU of every rank; None leaves it to the cluster. ``stage_sync`` and ``stage_buffer`` say how
    messages are handed over (see :class:`simpar.plan.plan.Plan`). ``guests`` are ranks beyond those of the job
    (servers) with the place of each: a GPU, or from the number of GPUs on the host of a node.
    """

    ranks: tuple[RankProgram, ...]
    launch_s: float
    algorithm: str = "auto"
    placement: tuple[int, ...] | None = None
    stage_sync: str = "message_passing"
    stage_buffer: int | None = None
    guests: tuple[tuple[int, int], ...] = ()


def host_launches(body: Iterable[Instruction]) -> int:
    """How many calls the host issues for these instructions (events are free)."""
    return sum(i.launches if isinstance(i, (Launch, Send, Recv)) else isinstance(i, Collective) for i in body)


def open_run(run: Run, rank: int, number: int, stands_for: int = 1) -> Iterator[Instruction]:
    """The instructions behind an opened run.

    A block's groups are those of rank 0, so that all stages share one block; here they become those of ``rank``: equal
    groups of ``size`` ranks, ``step`` apart, tile the ranks. Where the rank stands for the next ``stands_for`` ones,
    its groups stand for all that tile these. Events get names of their own, from the run's ``number``.
    """
    for index, block in enumerate(run.operation.blocks):
        for inner in block.body:
            if isinstance(inner, (Record, Wait)):
                yield inner._replace(event=(number, index, inner.event))
            elif isinstance(inner, Collective):
                ranks = inner.group.ranks
                assert isinstance(ranks, range), "the groups of blocks are ranges"
                size, step = len(ranks), ranks.step
                first = rank - rank // step % size * step
                group = Group(
                    inner.group.stream, range(first, first + size * step, step), _tiles(size, step, stands_for)
                )
                yield inner._replace(group=group, layer=run.operation.layers[index])
            elif isinstance(inner, Launch):
                yield inner._replace(layer=run.operation.layers[index])
            else:
                yield inner


@cache
def _tiles(size: int, step: int, ranks: int) -> "range | tuple[int, ...]":
    """Shifts that lay groups of ``size`` ranks, ``step`` apart, over so many ranks."""
    if step == 1:
        return range(0, max(ranks, 1), size)
    return tuple(start + offset for start in range(0, max(ranks, 1), size * step) for offset in range(min(step, ranks)))
