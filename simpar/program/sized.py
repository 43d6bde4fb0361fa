"""What microbatches run, by sequence length: where samples differ in length, so do kernels and messages."""

from dataclasses import dataclass, replace
from functools import cached_property

from simpar.plan.layout import Layout, Model
from simpar.program.operations import Operations
from simpar.program.place import place
from simpar.schedule.schedule import Schedule


@dataclass(frozen=True)
class Sized:
    """The units of a pipeline for microbatches of one sequence length.

    Attributes:
        operations: of the virtual stages.
        boundary_bytes: what leaves each virtual stage forward.
    """

    operations: Operations
    boundary_bytes: tuple[int, ...]

    @cached_property
    def activations(self) -> tuple[int, ...]:
        """Bytes kept from forward to backward, by virtual stage."""
        return tuple(sum(p.unit.activation_bytes for p in chunk) for chunk in self.operations.chunks)

    @cached_property
    def deferred(self) -> tuple[int, ...]:
        """Bytes kept for the weight half of a backward pass, by virtual stage."""
        return tuple(sum(p.unit.deferred_bytes for p in chunk) for chunk in self.operations.chunks)


def sized(model: Model, layout: Layout, schedule: Schedule) -> dict[int, Sized]:
    """All lengths of the step, that of the layout first; every length has the same layers on each stage.

    Raises:
        PlanError: the layers cannot be split over the stages.
    """
    chunks, boundary_bytes = place(model, layout, schedule)
    found = {layout.seq_len: Sized(Operations(chunks), boundary_bytes)}
    if layout.samples is not None:
        layers = tuple(sum(p.layer >= 0 for p in chunk) for chunk in chunks[: schedule.depth])
        for length in sorted({length for lengths in layout.samples.padded for length in lengths}):
            if length not in found:
                placed = place(model, replace(layout, seq_len=length, layer_split=layers), schedule)
                found[length] = Sized(Operations(placed[0]), placed[1])
    return found
