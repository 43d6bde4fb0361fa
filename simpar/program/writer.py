"""Writes a rank's instructions in host order and names its events."""

from simpar.program.ir import COMPUTE, Collective, Instruction, Record, Wait


class Writer:
    """A rank's program in the making."""

    def __init__(self) -> None:
        self.instructions: list[Instruction] = []
        self._events = 0

    def add(self, *instructions: Instruction) -> None:
        """Appends instructions."""
        self.instructions.extend(instructions)

    def record(self, stream: str = COMPUTE) -> int:
        """An event that marks the present end of a stream."""
        event = self._events
        self._events += 1
        self.instructions.append(Record(stream, event))
        return event

    def wait(self, event: int, stream: str = COMPUTE) -> None:
        """A stream goes on only after the event."""
        self.instructions.append(Wait(stream, event))

    def after(self, collectives: list[Collective], event: int | None = None) -> int | None:
        """Collectives, one after the other, once ``event`` (or compute so far) is done; the event of their end."""
        if not collectives:
            return None
        done = self.record() if event is None else event
        for collective in collectives:
            stream = collective.group.stream
            self.wait(done, stream)
            self.add(collective)
            done = self.record(stream)
        return done
