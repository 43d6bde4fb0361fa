"""Latent attention (MLA) on one rank: narrow projections that all tensor-parallel ranks hold, wide ones by heads."""

from dataclasses import dataclass
from functools import cached_property

from simpar.model.attention import LatentAttention
from simpar.program.body import Body
from simpar.program.transformer.attention import AttentionCore
from simpar.program.transformer.bricks import Bricks, Later
from simpar.program.unit import Held


@dataclass(frozen=True)
class LatentMixer:
    """Down to the latent vectors, their norms, up to heads, rotary embedding of its part, core, output.

    As Megatron-Core's ``MLASelfAttention`` runs it for training, without absorbing matrices: the projections down are
    replicated and work on the tokens whose residual stream the rank holds, those up are column-parallel and gather
    their narrow input.

    Attributes:
        bricks: of the rank.
        attention: its core.
    """

    bricks: Bricks
    attention: AttentionCore

    @property
    def _mla(self) -> LatentAttention:
        mla = self.bricks.sizes.model.mla
        assert mla is not None, "made for layers with latent attention only"
        return mla

    @property
    def _q_width(self) -> int:
        return self.bricks.sizes.heads[0] * self._mla.head_dim

    @property
    def _kv_width(self) -> int:
        """Keys without positions, and values, of all heads of the rank."""
        return self.bricks.sizes.heads[0] * (self._mla.nope_dim + self._mla.value_dim)

    @property
    def _kv_down(self) -> int:
        return self._mla.kv_rank + self._mla.rope_dim

    @cached_property
    def parameters(self) -> Held:
        """Projections up and out are sharded by heads, those down and their norms are not."""
        model, sizes, mla = self.bricks.sizes.model, self.bricks.sizes, self._mla
        q_rank = mla.q_rank or 0
        down = (q_rank + self._kv_down) * (model.hidden + model.qkv_bias) + mla.norm_parameters
        up = self._q_width * (mla.q_rank or model.hidden) + self._kv_width * mla.kv_rank
        out = sizes.out_width * model.hidden + model.out_bias * model.hidden
        return Held(down + up + out + model.attention_sinks * sizes.heads[0])

    @property
    def score_bytes(self) -> int:
        """What selective recomputation makes again."""
        return self.attention.score_bytes

    @cached_property
    def kept_bytes(self) -> int:
        """The core's tensors, and the latent vectors before and behind their norms."""
        sizes, mla = self.bricks.sizes, self._mla
        latent = 2 * ((mla.q_rank or 0) + mla.kv_rank) + mla.rope_dim
        return self.attention.kept_bytes + sizes.local_tokens * latent * sizes.element_bytes

    def forward(self, body: Body) -> None:
        """Down, up, core, out."""
        bricks, sizes, mla = self.bricks, self.bricks.sizes, self._mla
        if mla.q_rank is None:
            bricks.column_forward(body, "q", self._q_width)
        else:
            bricks.local_forward(body, "q down", mla.q_rank)
            self._norm(body, mla.q_rank, "q norm", backward=False)
            bricks.column_forward(body, "q up", self._q_width, mla.q_rank)
        bricks.local_forward(body, "kv down", self._kv_down)
        if sizes.layout.plan.sequence_parallel:
            body.exchange("all_gather", self._rope_bytes, "rotary key")
        self._norm(body, mla.kv_rank, "kv norm", backward=False)
        bricks.column_forward(body, "kv up", self._kv_width, mla.kv_rank)
        self._rope(body, backward=False)
        self.core(body, backward=False)
        bricks.row_forward(body, "attention out", sizes.out_width)

    def backward(self, body: Body, later: Later | None) -> None:
        """The same in reverse."""
        bricks, sizes, mla = self.bricks, self.bricks.sizes, self._mla
        bricks.row_backward(body, "attention out", sizes.out_width, later)
        self.core(body, backward=True)
        self._rope(body, backward=True)
        bricks.column_backward(body, "kv up", self._kv_width, later, mla.kv_rank)
        self._norm(body, mla.kv_rank, "kv norm grad", backward=True)
        if sizes.layout.plan.sequence_parallel:
            body.exchange("reduce_scatter", self._rope_bytes, "rotary key grad")
        bricks.local_backward(body, "kv down", self._kv_down, later)
        if mla.q_rank is None:
            bricks.column_backward(body, "q", self._q_width, later)
        else:
            bricks.column_backward(body, "q up", self._q_width, later, mla.q_rank)
            self._norm(body, mla.q_rank, "q norm grad", backward=True)
            bricks.local_backward(body, "q down", mla.q_rank, later)

    def core(self, body: Body, *, backward: bool) -> None:
        """The core alone."""
        self.attention.run(body, backward=backward)

    @property
    def _rope_bytes(self) -> int:
        sizes = self.bricks.sizes
        return sizes.tokens * self._mla.rope_dim * sizes.element_bytes

    def _norm(self, body: Body, width: int, label: str, *, backward: bool) -> None:
        self.bricks.operation(body, "norm", self.bricks.sizes.local_tokens * width, label, backward=backward)

    def _rope(self, body: Body, *, backward: bool) -> None:
        """Rotates the rotary part of each query, and the one rotary key."""
        sizes = self.bricks.sizes
        elements = sizes.tokens * self._mla.rope_dim * (sizes.heads[0] + 1)
        self.bricks.operation(body, "rope", elements, "rope", backward=backward)
