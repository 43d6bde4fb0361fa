"""Writes the body of a block: kernels on the compute stream, collectives beside it, the events between them."""

from simpar.model.work import Kernel
from simpar.program.ir import (
    COMPUTE,
    Block,
    Collective,
    CollectiveOp,
    Group,
    Instruction,
    Launch,
    Phase,
    Record,
    Wait,
)


class Body:
    """A block in the making, in host order; ``phase`` marks the kernels that are added while it holds."""

    def __init__(self, group: Group | None = None, *, phase: Phase = "forward") -> None:
        self.phase: Phase = phase
        self._group = group
        self._instructions: list[Instruction] = []
        self._events = 0

    def run(self, kernel: Kernel, name: str) -> None:
        """One kernel on the compute stream."""
        self._instructions.append(Launch(kernel, name, self.phase))

    def begin(self, op: CollectiveOp, nbytes: float, name: str) -> int:
        """A collective that may start now, beside what follows; returns the event to :meth:`join`."""
        assert self._group is not None, "a collective needs a group"
        ready, done = self._event(), self._event()
        self._instructions += (
            Record(COMPUTE, ready),
            Wait(self._group.stream, ready),
            Collective(op, nbytes, self._group, name),
            Record(self._group.stream, done),
        )
        return done

    def join(self, event: int) -> None:
        """The compute stream waits for a collective."""
        self._instructions.append(Wait(COMPUTE, event))

    def exchange(self, op: CollectiveOp, nbytes: float, name: str) -> None:
        """A collective that the compute stream waits for."""
        self.join(self.begin(op, nbytes, name))

    def block(self, name: str) -> Block:
        """The finished block."""
        return Block(name, tuple(self._instructions))

    def _event(self) -> int:
        self._events += 1
        return self._events - 1
