"""Attention layers beyond grouped queries: latent attention (MLA), and linear attention with a state instead of keys.

Each is a description of its widths with its weights as closed forms; what a layer sees (windows) and which layers have
which kind is said by :class:`~simpar.model.transformer.Transformer`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from simpar.description import Description
from simpar.errors import ModelError, SimparError

Width = Annotated[int, Field(gt=0, strict=True)]


class LatentAttention(Description):
    """Multi-head latent attention: keys and values of each head come from one narrow vector (DeepSeek-V2, section 2.1).

    Attributes:
        q_rank: width of the compressed queries; None where queries are projected directly.
        kv_rank: width of the compressed keys and values, which is what a cache holds.
        nope_dim: part of a query's and key's head without positions.
        rope_dim: part with rotary positions; its key is one for all heads.
        value_dim: width of a value head.
    """

    error_type: ClassVar[type[SimparError]] = ModelError

    q_rank: Width | None = None
    kv_rank: Width
    nope_dim: Width
    rope_dim: Width
    value_dim: Width

    @property
    def head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.nope_dim + self.rope_dim

    @property
    def down_width(self) -> int:
        """Output width of the projections into the latent space, queries (if compressed), keys and values together."""
        return (self.q_rank or 0) + self.kv_rank + self.rope_dim

    @property
    def norm_parameters(self) -> int:
        """Weights of the norms over the compressed vectors."""
        return (self.q_rank or 0) + self.kv_rank

    def query_weights(self, hidden: int, heads: int) -> int:
        """Weights between the residual stream and the queries."""
        if self.q_rank is None:
            return hidden * heads * self.head_dim
        return self.q_rank * (hidden + heads * self.head_dim)

    def key_value_weights(self, hidden: int, heads: int) -> int:
        """Weights between the residual stream and keys and values, expanded per head."""
        return hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (self.nope_dim + self.value_dim)

    def weights(self, hidden: int, heads: int) -> int:
        """Weights of all projections of a layer; a token meets each of them once."""
        out = heads * self.value_dim * hidden
        return self.query_weights(hidden, heads) + self.key_value_weights(hidden, heads) + out


class LinearAttention(Description):
    """Attention whose cost per token does not grow with the sequence: a state of key_dim × value_dim a value head.

    Attributes:
        rule: how the state is updated. ``gated_delta``: Gated DeltaNet (Yang et al. 2024; Qwen3-Next), with a short
            convolution over queries, keys and values, and a gated norm per head. ``lightning``: a sum with fixed decay
            (Lightning Attention-2, Qin et al. 2024; MiniMax-01), with one norm over all heads and a gate.
        pattern: which layers are linear, as letters that repeat over the layers: ``L`` linear, ``F`` what the
            transformer describes otherwise. ``LLLF`` is Qwen3-Next.
        key_heads: heads of queries and keys.
        value_heads: heads of values, a multiple of ``key_heads``.
        key_dim: width of a query's and key's head.
        value_dim: width of a value's head.
        conv_width: taps of the convolution before a ``gated_delta`` rule; 0 without one.
        chunk: tokens that are computed as products at a time; between chunks runs the recurrence.
    """

    error_type: ClassVar[type[SimparError]] = ModelError

    rule: Literal["gated_delta", "lightning"]
    pattern: str = Field(pattern=r"^[LF]*L[LF]*$")
    key_heads: Width
    value_heads: Width
    key_dim: Width
    value_dim: Width
    conv_width: Annotated[int, Field(ge=0, strict=True)] = 0
    chunk: Width = 64

    def is_linear(self, layer: int) -> bool:
        """Whether this layer is a linear one."""
        return self.pattern[layer % len(self.pattern)] == "L"

    @property
    def key_width(self) -> int:
        """Width of all queries, and of all keys."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all values, of the gate, and of what enters the output projection."""
        return self.value_heads * self.value_dim

    @property
    def in_width(self) -> int:
        """Output width of the input projections: queries, keys, values, gate and, for the delta rule, β and decay."""
        return 2 * (self.key_width + self.value_width) + (2 * self.value_heads if self.rule == "gated_delta" else 0)

    @property
    def conv_channels(self) -> int:
        """Channels that the convolution runs over: queries, keys and values."""
        return 2 * self.key_width + self.value_width

    @property
    def state_elements(self) -> int:
        """Numbers that a layer keeps per sequence: the states, without the convolution's last inputs."""
        return self.value_heads * self.key_dim * self.value_dim

    def weights(self, hidden: int) -> int:
        """Weights that each token meets once: projections, and the convolution's taps."""
        return hidden * (self.in_width + self.value_width) + self.conv_channels * self.conv_width

    def parameters(self, hidden: int) -> int:
        """Weights and the small vectors: the norm's, and for the delta rule decay and time step per head."""
        if self.rule == "gated_delta":
            return self.weights(hidden) + self.value_dim + 2 * self.value_heads
        return self.weights(hidden) + self.value_width

    @property
    def core_flop_per_token(self) -> float:
        """FLOP of the chunked rule per token, with C the chunk, all of its square counted as kernels compute it.

        Lightning: QKᵀ and its product with V in the chunk, Q times the state, and KᵀV into it:
        2C(d_k + d_v) + 4·d_k·d_v. Delta rule: three chunk products of width d_k (KKᵀ, QKᵀ, and T·K for the state's
        share), two of width d_v (T·V, and the scores times V), three with the state: 2C(3d_k + 2d_v) + 6·d_k·d_v
        (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", section 3; the inverse T itself
        is a triangular solve of C² d-independent steps and is left out, as torch's counter does).
        """
        d_k, d_v = self.key_dim, self.value_dim
        wide, high, state = (3, 2, 3) if self.rule == "gated_delta" else (1, 1, 2)
        return 2.0 * self.value_heads * (self.chunk * (wide * d_k + high * d_v) + state * d_k * d_v)
