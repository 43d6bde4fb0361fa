"""A unit: the smallest piece of a model that lowering places, gathers and recomputes as a whole."""

from dataclasses import dataclass

from simpar.program.ir import Block


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """An embedding, a layer or a head, as one rank runs it for one microbatch.

    Attributes:
        name: for spans.
        parameters: on this rank, before ZeRO shards them.
        forward, backward: its blocks; recomputation is part of backward.
        activation_bytes: kept from forward to backward.
        transient_bytes: held in addition while backward runs.
        borrowed_parameters: of another unit, read by this one: a tied head reads the embedding's table.
        tied_parameters: parameters of a copy that another stage holds as well (tied embedding).
    """

    name: str
    parameters: int
    forward: Block
    backward: Block
    activation_bytes: int
    transient_bytes: int = 0
    borrowed_parameters: int = 0
    tied_parameters: int = 0


@dataclass(frozen=True, slots=True)
class Placed:
    """A unit at its place in the model: ``layer`` is the model's layer, or -1 for embedding and head."""

    unit: Unit
    layer: int
