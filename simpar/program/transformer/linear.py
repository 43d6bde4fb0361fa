"""Linear attention on one rank, its heads sharded over tensor-parallel ranks."""

from dataclasses import dataclass
from functools import cached_property

from simpar.model.attention import LinearAttention
from simpar.model.work import Gemm
from simpar.program.body import Body
from simpar.program.transformer.bricks import Bricks, Later
from simpar.program.unit import Held


@dataclass(frozen=True)
class LinearMixer:
    """Input projections, a short convolution where the rule has one, the chunked rule, norm and gate, output.

    The rule is priced as the batched products that its chunked form consists of (a product per chunk and value head,
    their FLOP those of :attr:`~simpar.model.attention.LinearAttention.core_flop_per_token`); real kernels fuse several.
    The recurrence between chunks needs all of a sequence, so context-parallel ranks trade it for heads.
    """

    bricks: Bricks

    @property
    def _linear(self) -> LinearAttention:
        linear = self.bricks.sizes.model.linear
        assert linear is not None, "made for layers with linear attention only"
        return linear

    def _on_rank(self, width: int) -> int:
        return width // self.bricks.sizes.layout.plan.tp

    @property
    def _in_width(self) -> int:
        return self._on_rank(self._linear.in_width)

    @property
    def _value_width(self) -> int:
        return self._on_rank(self._linear.value_width)

    @property
    def _channels(self) -> int:
        """Of the convolution, or of queries, keys and values without one."""
        return self._on_rank(self._linear.conv_channels)

    @cached_property
    def parameters(self) -> Held:
        """Matrices, taps and per-head vectors are sharded by heads; the delta rule's norm of one head is not."""
        linear, hidden = self._linear, self.bricks.sizes.model.hidden
        weights = hidden * (self._in_width + self._value_width) + self._channels * linear.conv_width
        if linear.rule == "gated_delta":
            return Held(weights + linear.value_dim + 2 * self._on_rank(linear.value_heads))
        return Held(weights + self._value_width)

    @property
    def score_bytes(self) -> int:
        """Nothing: chunks' scores never leave the kernels."""
        return 0

    @cached_property
    def kept_bytes(self) -> int:
        """Outputs of the projections and of the convolution, of the rule, and of norm and gate."""
        width = self._in_width + 2 * self._value_width + (self._channels if self._linear.conv_width else 0)
        return self.bricks.sizes.tokens * width * self.bricks.sizes.element_bytes

    def forward(self, body: Body) -> None:
        """In, core, out."""
        bricks = self.bricks
        bricks.column_forward(body, "linear in", self._in_width)
        self.core(body, backward=False)
        self._gate(body, backward=False)
        bricks.row_forward(body, "linear out", self._value_width)

    def backward(self, body: Body, later: Later | None) -> None:
        """The same in reverse."""
        bricks = self.bricks
        bricks.row_backward(body, "linear out", self._value_width, later)
        self._gate(body, backward=True)
        self.core(body, backward=True)
        bricks.column_backward(body, "linear in", self._in_width, later)

    def core(self, body: Body, *, backward: bool) -> None:
        """Convolution and rule."""
        sizes = self.bricks.sizes
        cp, size = sizes.layout.plan.cp, sizes.element_bytes
        inner, out = sizes.tokens * self._channels * size, sizes.tokens * self._value_width * size
        before, after = (out, inner) if backward else (inner, out)
        if cp > 1:
            body.exchange("all_to_all", before, "sequence for heads", "cp")
        if backward:
            self._rule(body, backward=True)
            self._convolution(body, backward=True)
        else:
            self._convolution(body, backward=False)
            self._rule(body, backward=False)
        if cp > 1:
            body.exchange("all_to_all", after, "heads for sequence", "cp")

    def _convolution(self, body: Body, *, backward: bool) -> None:
        """A few taps and their activation move each channel once, as an activation does."""
        if self._linear.conv_width:
            elements = self.bricks.sizes.tokens * self._channels
            self.bricks.operation(body, "activation", elements, "convolution", backward=backward)

    def _rule(self, body: Body, *, backward: bool) -> None:
        """Products inside a chunk that sum over keys' or over values' width, and those with the state."""
        linear, layout = self._linear, self.bricks.sizes.layout
        precision = layout.precision if layout.precision != "fp8" else "bf16"
        # heads of the rank over its tokens, also where these are fewer heads of more tokens
        heads = self._on_rank(linear.value_heads) * (2 if backward else 1)
        chunks = max(self.bricks.sizes.tokens // linear.chunk, 1)
        rows = min(linear.chunk, self.bricks.sizes.tokens)
        scores, outputs, states = (3, 2, 3) if linear.rule == "gated_delta" else (1, 1, 2)
        suffix = " grad" if backward else ""
        for name, count, n, k in (
            ("chunk scores", scores, rows, linear.key_dim),
            ("chunk outputs", outputs, linear.value_dim, rows),
            ("chunk states", states, linear.value_dim, linear.key_dim),
        ):
            body.run(Gemm(rows, n, k, precision, count * heads * chunks), name + suffix)

    def _gate(self, body: Body, *, backward: bool) -> None:
        elements, suffix = self.bricks.sizes.tokens * self._value_width, " grad" if backward else ""
        self.bricks.operation(body, "norm", elements, f"linear norm{suffix}", backward=backward)
        self.bricks.operation(body, "gated_activation", elements, f"linear gate{suffix}", backward=backward)
