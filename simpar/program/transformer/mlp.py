"""The dense MLP of one rank."""

from dataclasses import dataclass
from functools import cached_property

from simpar.framework.framework import OperationName
from simpar.program.body import Body
from simpar.program.transformer.bricks import Bricks, Later
from simpar.program.unit import Held


@dataclass(frozen=True)
class Mlp:
    """Column-parallel up projection (with gate), activation, row-parallel down projection.

    Attributes:
        bricks: of the rank.
        width: inner width of all ranks together.
        name: what its kernels are called by.
        biased: whether it has the model's biases.
    """

    bricks: Bricks
    width: int
    name: str = "mlp"
    biased: bool = True

    @property
    def _inner(self) -> int:
        return self.width // self.bricks.sizes.layout.plan.tp

    @property
    def _up(self) -> int:
        """Columns of the up projection, gate included."""
        return self._inner * (self.bricks.sizes.model.mlp_matrices - 1)

    @cached_property
    def parameters(self) -> Held:
        """Matrices are sharded, and the up projection's bias; the other one is not."""
        model = self.bricks.sizes.model
        bias = model.mlp_bias and self.biased
        return Held(self._up * (model.hidden + bias) + self._inner * model.hidden + bias * model.hidden)

    @cached_property
    def kept_bytes(self) -> int:
        """Outputs of the up projection and of the activation, and what eager kernels keep."""
        sizes = self.bricks.sizes
        extra = int(sizes.tokens * self._inner * sizes.layout.framework.extra_activations.ffn)
        return sizes.tokens * sizes.element_bytes * (self._up + self._inner) + extra

    def forward(self, body: Body) -> None:
        """Up, activation, down."""
        self.up_forward(body)
        self.down_forward(body)

    def backward(self, body: Body, later: Later | None) -> None:
        """The same in reverse."""
        self.down_backward(body, later)
        self.up_backward(body, later)

    def up_forward(self, body: Body) -> None:
        """Up and activation."""
        self.bricks.column_forward(body, f"{self.name} up", self._up)
        self._activation(body, backward=False)

    def down_forward(self, body: Body) -> None:
        """Down."""
        self.bricks.row_forward(body, f"{self.name} down", self._inner)

    def down_backward(self, body: Body, later: Later | None) -> None:
        """Down and activation in reverse."""
        self.bricks.row_backward(body, f"{self.name} down", self._inner, later)
        self._activation(body, backward=True)

    def up_backward(self, body: Body, later: Later | None) -> None:
        """Up in reverse."""
        self.bricks.column_backward(body, f"{self.name} up", self._up, later)

    def _activation(self, body: Body, *, backward: bool) -> None:
        sizes = self.bricks.sizes
        kind: OperationName = "gated_activation" if sizes.model.gated_mlp else "activation"
        label = "activation grad" if backward else "activation"
        self.bricks.operation(body, kind, sizes.tokens * self._inner, label, backward=backward)
