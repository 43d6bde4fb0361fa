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
from typing import Literal, NamedTuple

from simpar.model.work import Kernel, Work

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
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
    reduce-scatter, what one rank sends in an all-to-all.
    """

    op: CollectiveOp
    nbytes: float
    group: Group
    name: str = ""
    microbatch: int = -1
    chunk: int = -1
    layer: int = -1


class Send(NamedTuple):
    """A message to another rank, on ``stream``; ``tag`` pairs it with its :class:`Recv`.

    ``copies`` are the messages that it stands for when replicas are folded: the same ranks, shifted.
    """

    stream: str
    peer: int
    nbytes: float
    tag: Hashable
    microbatch: int = -1
    copies: "range | tuple[int, ...]" = (0,)


class Recv(NamedTuple):
    """The compute stream waits here until the message ``tag`` from ``peer`` is there."""

    peer: int
    tag: Hashable


class Record(NamedTuple):
    """Marks ``event`` when ``stream`` gets here."""

    stream: str
    event: Hashable


class Wait(NamedTuple):
    """``stream`` goes on only after ``event`` was recorded."""

    stream: str
    event: Hashable


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


Instruction = Run | Collective | Send | Recv | Record | Wait | Alloc | Launch


@dataclass(frozen=True, slots=True)
class RankProgram:
    """The instructions of one rank, which stands for ``replicas`` equal ones.

    Attributes:
        rank: global rank.
        stage: pipeline rank.
        replicas: ranks of the job that run exactly this.
        resident: memory held during the whole step, by category.
        instructions: in host order.
    """

    rank: int
    stage: int
    replicas: int
    resident: "tuple[tuple[str, int], ...]"
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A step: rank programs that together hold every sender, receiver and group member that is simulated.

    ``stage_sync`` and ``stage_buffer`` say how messages are handed over (see :class:`simpar.plan.plan.Plan`).
    """

    ranks: tuple[RankProgram, ...]
    launch_s: float
    algorithm: str = "auto"
    stage_sync: str = "message_passing"
    stage_buffer: int | None = None


def host_launches(body: Iterable[Instruction]) -> int:
    """How many calls the host issues for these instructions (events are free)."""
    return sum(i.launches if isinstance(i, Launch) else isinstance(i, (Collective, Send, Recv)) for i in body)


def open_run(run: Run, rank: int, number: int) -> Iterator[Instruction]:
    """The instructions behind an opened run.

    A block's groups count from the first rank of the tensor-parallel group, so that all stages share one block; here
    they become those of ``rank``. Events get names of their own, from the run's ``number``.
    """
    for index, block in enumerate(run.operation.blocks):
        for inner in block.body:
            if isinstance(inner, (Record, Wait)):
                yield inner._replace(event=(number, index, inner.event))
            elif isinstance(inner, Collective):
                size = len(inner.group.ranks)
                first = rank - rank % size
                group = Group(inner.group.stream, range(first, first + size))
                yield inner._replace(group=group, layer=run.operation.layers[index])
            elif isinstance(inner, Launch):
                yield inner._replace(layer=run.operation.layers[index])
            else:
                yield inner
