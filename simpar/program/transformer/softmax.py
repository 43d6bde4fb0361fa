"""Attention with keys and values per (grouped) head, on one rank."""

from dataclasses import dataclass
from functools import cached_property

from simpar.program.body import Body
from simpar.program.transformer.attention import AttentionCore
from simpar.program.transformer.bricks import Bricks, Later
from simpar.program.unit import Held


@dataclass(frozen=True)
class SoftmaxAttention:
    """Column-parallel QKV projection (and gate), norms of queries and keys, rotary embedding, core, output projection.

    Attributes:
        bricks: of the rank.
        attention: its core.
    """

    bricks: Bricks
    attention: AttentionCore

    @cached_property
    def parameters(self) -> Held:
        """Matrices and their column-parallel biases are sharded; norms and the output's bias are not."""
        model, sizes = self.bricks.sizes.model, self.bricks.sizes
        qkv = self._columns * (model.hidden + model.qkv_bias)
        out = sizes.out_width * model.hidden + model.out_bias * model.hidden
        return Held(qkv + out + model.qk_norm_parameters + model.attention_sinks * sizes.heads[0])

    @property
    def score_bytes(self) -> int:
        """What selective recomputation makes again."""
        return self.attention.score_bytes

    @cached_property
    def kept_bytes(self) -> int:
        """The core's tensors, what the norms of queries and keys read, the gate, and what eager kernels keep."""
        sizes = self.bricks.sizes
        extra = sizes.layout.framework.extra_activations.qk
        width = sizes.qk_width * sizes.model.qk_norm + 2 * sizes.gate_width  # the gate, and the output behind it
        kept = sizes.tokens * (width * sizes.element_bytes + sizes.qk_width * extra)
        return self.attention.kept_bytes + int(kept)

    def forward(self, body: Body) -> None:
        """QKV to output projection."""
        bricks, sizes = self.bricks, self.bricks.sizes
        bricks.column_forward(body, "qkv", self._columns)
        if sizes.model.qk_norm:
            bricks.operation(body, "qk_norm", sizes.tokens * sizes.qk_width, "qk norm", backward=False)
        self._rope(body, backward=False)
        self.core(body, backward=False)
        self._gate(body, backward=False)
        bricks.row_forward(body, "attention out", sizes.out_width)

    def backward(self, body: Body, later: Later | None) -> None:
        """The same in reverse."""
        bricks, sizes = self.bricks, self.bricks.sizes
        bricks.row_backward(body, "attention out", sizes.out_width, later)
        self._gate(body, backward=True)
        self.core(body, backward=True)
        self._rope(body, backward=True)
        if sizes.model.qk_norm:
            bricks.operation(body, "qk_norm", sizes.tokens * sizes.qk_width, "qk norm grad", backward=True)
        bricks.column_backward(body, "qkv", self._columns, later)

    def core(self, body: Body, *, backward: bool) -> None:
        """The core alone."""
        self.attention.run(body, backward=backward)

    @property
    def _columns(self) -> int:
        """Of the projection: queries, keys, values and gate."""
        return self.bricks.sizes.qkv_width + self.bricks.sizes.gate_width

    def _rope(self, body: Body, *, backward: bool) -> None:
        sizes = self.bricks.sizes
        if sizes.model.position == "rope":
            self.bricks.operation(body, "rope", sizes.tokens * sizes.qk_width, "rope", backward=backward)

    def _gate(self, body: Body, *, backward: bool) -> None:
        sizes = self.bricks.sizes
        if sizes.gate_width:
            elements = sizes.tokens * sizes.gate_width
            self.bricks.operation(body, "gated_activation", elements, "attention gate", backward=backward)
