"""Writes the body of a block: kernels on the compute stream, collectives beside it, the events between them."""

from collections.abc import Mapping

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
    """A block in the making, in host order; ``phase`` marks the kernels that are added while it holds.

    ``group`` is the tensor-parallel one, ``others`` are groups by their stream; ``extra_s`` is latency of each pass of
    tensor-parallel collectives beyond that of the network.
    """

    def __init__(
        self,
        group: Group | None = None,
        *,
        phase: Phase = "forward",
        extra_s: float = 0.0,
        others: "Mapping[str, Group] | None" = None,
    ) -> None:
        self.phase: Phase = phase
        self._extra_s = extra_s
        self._others = others or {}
        self._group = group
        self._instructions: list[Instruction] = []
        self._events = 0

    def run(self, kernel: Kernel, name: str, launches: int = 1) -> None:
        """One kernel on the compute stream, or what the host launches as ``launches`` of them."""
        self._instructions.append(Launch(kernel, name, self.phase, launches))

    def begin(self, op: CollectiveOp, nbytes: float, name: str, stream: str | None = None) -> int:
        """A collective that may start now, beside what follows; returns the event to :meth:`join`.

        It runs on the tensor-parallel group, or on the one of ``stream``.
        """
        group = self._group if stream is None else self._others[stream]
        assert group is not None, "a collective needs a group"
        extra_s = self._extra_s * (2 if op == "all_reduce" else 1) if stream is None else 0.0
        ready, done = self._event(), self._event()
        self._instructions += (
            Record(COMPUTE, ready),
            Wait(group.stream, ready),
            Collective(op, nbytes, group, name, extra_s=extra_s),
            Record(group.stream, done),
        )
        return done

    def join(self, event: int) -> None:
        """The compute stream waits for a collective."""
        self._instructions.append(Wait(COMPUTE, event))

    def exchange(self, op: CollectiveOp, nbytes: float, name: str, stream: str | None = None) -> None:
        """A collective that the compute stream waits for."""
        self.join(self.begin(op, nbytes, name, stream))

    def block(self, name: str) -> Block:
        """The finished block."""
        return Block(name, tuple(self._instructions))

    def _event(self) -> int:
        self._events += 1
        return self._events - 1
