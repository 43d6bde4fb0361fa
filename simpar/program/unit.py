"""A unit: the smallest piece of a model that lowering places, gathers and recomputes as a whole."""

from dataclasses import dataclass, replace

from simpar.program.ir import Block


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters on a rank, by who else holds the same ones: experts are spread over more ranks than the rest.

    Attributes:
        dense: held alike by all data- and context-parallel ranks.
        experts: those of routed experts, held alike by every ``ep · etp``-th rank of a stage.
    """

    dense: int = 0
    experts: int = 0

    def __add__(self, other: "Held") -> "Held":
        return Held(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """An embedding, a layer or a head, as one rank runs it for one microbatch.

    Attributes:
        name: for spans.
        parameters: on this rank, before ZeRO shards them.
        expert_parameters: those of ``parameters`` that belong to routed experts.
        forward, backward: its blocks; recomputation is part of backward.
        backward_input, backward_weight: the two halves of backward where a schedule splits it: the gradient of the
            input (recomputation included), and that of the weights.
        tensors: weight tensors that these are: gradient buckets never split one.
        activation_bytes: kept from forward to backward.
        deferred_bytes: what the weight half still needs once the input half is done: the inputs of the products with
            weights, and the gradients of their outputs.
        transient_bytes: held in addition while backward runs.
        frozen_parameters: those of ``parameters`` that get no gradient.
        borrowed_parameters: of another unit, read by this one: a tied head reads the embedding's table.
        tied_parameters: parameters of a copy that another stage holds as well (tied embedding).
    """

    name: str
    parameters: int
    forward: Block
    backward: Block
    backward_input: Block
    backward_weight: Block
    activation_bytes: int
    tensors: int = 1
    expert_parameters: int = 0
    deferred_bytes: int = 0
    transient_bytes: int = 0
    frozen_parameters: int = 0
    borrowed_parameters: int = 0
    tied_parameters: int = 0

    @property
    def trained_parameters(self) -> int:
        """Parameters that get a gradient."""
        return self.parameters - self.frozen_parameters

    @property
    def trained(self) -> Held:
        """The same by who holds them; a unit with experts is frozen as a whole."""
        experts = 0 if self.frozen_parameters else self.expert_parameters
        return Held(self.trained_parameters - experts, experts)

    @property
    def held(self) -> Held:
        """All parameters by who holds them."""
        return Held(self.parameters - self.expert_parameters, self.expert_parameters)

    @property
    def has_backward(self) -> bool:
        """Whether anything runs backward: not in a frozen unit with nothing to train before it."""
        return bool(self.backward.body)

    def frozen(self) -> "Unit":
        """The unit without gradients, where no unit before it needs one either: it runs forward and keeps nothing."""
        nothing = Block(self.name, ())
        return replace(
            self,
            backward=nothing,
            backward_input=nothing,
            backward_weight=nothing,
            activation_bytes=0,
            deferred_bytes=0,
            transient_bytes=0,
            frozen_parameters=self.parameters,
        )


@dataclass(frozen=True, slots=True)
class Placed:
    """A unit at its place in the model: ``layer`` is the model's layer, or -1 for embedding and head."""

    unit: Unit
    layer: int


Chunk = tuple[Placed, ...]
"""The units of a virtual stage."""
