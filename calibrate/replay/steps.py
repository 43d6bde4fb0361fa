"""A rank's program as the flat list that its host works off, and what every rank must know of the others.

Both sides use it: a worker executes the steps and times them, and whoever assembles the trace walks the same list
beside those times. Nothing here touches a device.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from simpar.errors import SimparError
from simpar.model.work import Attention, Gemm, GroupedGemm
from simpar.program.ir import (
    COMPUTE,
    Collective,
    HostWork,
    Instruction,
    Launch,
    Program,
    RankProgram,
    Record,
    Recv,
    Run,
    Send,
    Wait,
    open_run,
)


class ReplayError(SimparError):
    """A program that cannot be replayed here, or a replay that failed; the message says what to change."""


class Begin(NamedTuple):
    """The compute stream reaches a run."""

    run: Run


class End(NamedTuple):
    """The compute stream is done with a run."""

    run: Run


Step = Instruction | Begin | End


def steps(rank: RankProgram) -> list[Step]:
    """The rank's instructions in host order, with every run replaced by its kernels and collectives.

    An opened run without kernels leaves nothing, as in the engine.
    """
    found: list[Step] = []
    for number, instruction in enumerate(rank.instructions):
        if not isinstance(instruction, Run):
            found.append(instruction)
            continue
        inner = list(open_run(instruction, rank.rank, number))
        if instruction.opened and not inner:
            continue
        found += [Begin(instruction), *inner]
        if not instruction.opened:
            found += _joined(inner, number)
        found.append(End(instruction))
    return found


def _joined(inner: list[Instruction], number: int) -> Iterator[Step]:
    """The compute stream waits for every stream of a run that is executed as one event."""
    for stream in dict.fromkeys(i.group.stream for i in inner if isinstance(i, Collective)):
        yield Record(stream, f"{number}.end.{stream}")
        yield Wait(COMPUTE, f"{number}.end.{stream}")


class Way(NamedTuple):
    """Direction of messages: they are in order along it."""

    source: int
    target: int
    stream: str


class Letter(NamedTuple):
    """A message: its direction, its number among those of the direction, its bytes."""

    way: Way
    number: int
    nbytes: float


class Communicator(NamedTuple):
    """The ranks that need a process group of their own for ``stream``."""

    stream: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Listing:
    """A program taken apart.

    Attributes:
        program: the program.
    """

    program: Program

    @cached_property
    def ranks(self) -> dict[int, RankProgram]:
        """Rank programs by global rank."""
        return {rank.rank: rank for rank in self.program.ranks}

    @cached_property
    def steps(self) -> dict[int, list[Step]]:
        """What each rank's host works off."""
        return {rank.rank: steps(rank) for rank in self.program.ranks}

    @cached_property
    def letters(self) -> dict[tuple[int, Hashable], Letter]:
        """Messages by receiver and tag."""
        found: dict[tuple[int, Hashable], Letter] = {}
        counts: Counter[Way] = Counter()
        for rank, listed in self.steps.items():
            for step in listed:
                if isinstance(step, Send):
                    way = Way(rank, step.peer, step.stream)
                    if (step.peer, step.tag) in found:
                        raise ReplayError(
                            f"rank {rank} sends a second message '{step.tag}' to rank {step.peer}; give each "
                            "its own tag"
                        )
                    found[step.peer, step.tag] = Letter(way, counts[way], step.nbytes)
                    counts[way] += 1
        return found

    @cached_property
    def communicators(self) -> tuple[Communicator, ...]:
        """Process groups in an order that all ranks agree on: of collectives, then one per direction of messages."""
        groups = {
            communicator(step) for listed in self.steps.values() for step in listed if isinstance(step, Collective)
        }
        ways = {pair(letter.way) for letter in self.letters.values()}
        return (*sorted(groups), *sorted(ways))

    def check(self) -> None:
        """Checks that every rank is there, and that sends, receives and collectives pair up.

        Raises:
            ReplayError: the first rule that is broken.
        """
        size = len(self.program.ranks)
        if not size:
            raise ReplayError("the program has no ranks; lower a job to one first")
        if sorted(self.ranks) != list(range(size)) or any(rank.replicas != 1 for rank in self.program.ranks):
            raise ReplayError(
                f"the program simulates {size} ranks that stand for {sum(r.replicas for r in self.program.ranks)}, but "
                "a replay runs every rank; lower the job with fold=False"
            )
        if any(isinstance(step, HostWork) for listed in self.steps.values() for step in listed):
            raise ReplayError("a replay copies nothing to hosts yet; lower the job with offload=none")
        self._check_messages()
        self._check_collectives()
        self._check_kernels()

    def _check_messages(self) -> None:
        received = set()
        for rank, listed in self.steps.items():
            for step in listed:
                if isinstance(step, Recv):
                    letter = self.letters.get((rank, step.tag))
                    if letter is None or letter.way.source != step.peer:
                        raise ReplayError(
                            f"rank {rank} waits for message '{step.tag}' of rank {step.peer}, which never sends it; "
                            "add the send or drop the receive"
                        )
                    received.add((rank, step.tag))
        for target, tag in self.letters.keys() - received:
            raise ReplayError(f"rank {target} never receives message '{tag}' that it is sent; add the receive")

    def _check_collectives(self) -> None:
        orders: dict[tuple[Communicator, int], list[tuple[str, float]]] = {}
        for rank, listed in self.steps.items():
            for step in listed:
                if isinstance(step, Collective):
                    orders.setdefault((communicator(step), rank), []).append((step.op, step.nbytes))
        for (group, rank), order in orders.items():
            for member in group.ranks:
                if orders.get((group, member)) != order:
                    raise ReplayError(
                        f"rank {rank} and rank {member} run different collectives in their {group.stream} group "
                        f"{list(group.ranks)}; give all members the same order of the same sizes"
                    )

    def _check_kernels(self) -> None:
        for rank, listed in self.steps.items():
            recorded = set()
            for step in listed:
                if (
                    isinstance(step, Launch)
                    and isinstance(step.kernel, (Gemm, GroupedGemm, Attention))
                    and step.kernel.dtype == "fp8"
                ):
                    raise ReplayError(
                        f"kernel '{step.name}' is fp8, which the replay has no kernel for; use precision bf16"
                    )
                if isinstance(step, Record):
                    recorded.add(step.event)
                elif isinstance(step, Wait) and step.event not in recorded:
                    raise ReplayError(
                        f"rank {rank} waits for event '{step.event}' before its host records it; record it first"
                    )


def communicator(step: Collective) -> Communicator:
    """The process group of a collective."""
    return Communicator(step.group.stream, tuple(step.group.ranks))


def pair(way: Way) -> Communicator:
    """The process group of a direction of messages: its own, so that no message waits for one the other way."""
    return Communicator(f"{way.stream} {way.source}>{way.target}", tuple(sorted((way.source, way.target))))
