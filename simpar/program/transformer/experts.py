"""Mixture of experts on one rank: router, dispatch to the experts' ranks, their products, combination.

As Megatron-Core's all-to-all dispatcher does it (``megatron/core/transformer/moe/token_dispatcher.py``): each rank
routes the tokens whose residual stream it holds, sorts a row for each of their experts, and trades rows over the
expert-parallel group; expert-tensor-parallel ranks gather each other's rows before the experts and reduce after them.
With skewed load every rank costs what the fullest one does, for which all others wait; links carry as much then, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil

from simpar.framework.framework import OperationName
from simpar.model.work import GroupedGemm
from simpar.program.body import Body
from simpar.program.transformer.bricks import Bricks, Later
from simpar.program.transformer.mlp import Mlp
from simpar.program.unit import Held

_COUNT_BYTES = 8  # tokens per expert, as 64-bit integers


@dataclass(frozen=True)
class Experts:
    """Routed and shared experts in place of the MLP."""

    bricks: Bricks

    # ---- sizes ------------------------------------------------------------------------------------------------------

    @cached_property
    def _shared(self) -> Mlp | None:
        width = self.bricks.sizes.moe.shared_ffn_hidden
        return Mlp(self.bricks, width, "shared expert", biased=False) if width else None

    @property
    def _groups(self) -> int:
        """Experts of the rank."""
        return self.bricks.sizes.moe.experts // self.bricks.sizes.layout.plan.ep

    @property
    def _inner(self) -> int:
        return self.bricks.sizes.moe.ffn_hidden // self.bricks.sizes.layout.etp

    @property
    def _up(self) -> int:
        return self._inner * (self.bricks.sizes.model.mlp_matrices - 1)

    @cached_property
    def _sent(self) -> int:
        """Rows that a rank sends out: a token for each expert that takes it."""
        sizes = self.bricks.sizes
        taken = sum(sizes.moe.expert_shares(sizes.layout.plan.expert_skew))
        return ceil(sizes.local_tokens * sizes.moe.top_k * taken - 1e-6)

    @cached_property
    def _arriving(self) -> int:
        """Rows that reach the fullest rank of an expert-parallel group."""
        sizes, plan = self.bricks.sizes, self.bricks.sizes.layout.plan
        fullest = sizes.moe.rank_shares(plan.ep, plan.expert_skew)[0]
        return ceil(sizes.local_tokens * sizes.moe.top_k * plan.ep * fullest - 1e-6)

    @property
    def _gathers(self) -> bool:
        """Whether expert-tensor-parallel ranks bring rows of their own; without, they hold the same tokens."""
        return self._is_split and not self._has_partial_sums

    @property
    def _is_split(self) -> bool:
        return self.bricks.sizes.layout.etp > 1

    @property
    def _has_partial_sums(self) -> bool:
        """Whether tensor-parallel ranks, which hold the same tokens, add up their outputs."""
        plan = self.bricks.sizes.layout.plan
        return self._is_split and plan.tp > 1 and not plan.sequence_parallel

    @cached_property
    def _rows(self) -> int:
        """Rows that the experts of a rank work on."""
        return self._arriving * (self.bricks.sizes.layout.etp if self._gathers else 1)

    def _nbytes(self, rows: int) -> int:
        return rows * self.bricks.sizes.model.hidden * self.bricks.sizes.element_bytes

    @cached_property
    def _traded_bytes(self) -> int:
        """What a rank sends, or the fullest receives, in an all-to-all."""
        return self._nbytes(max(self._sent, self._arriving))

    @cached_property
    def parameters(self) -> Held:
        """Router and gate are replicated, shared experts sharded like an MLP, routed ones over their own ranks."""
        model, moe = self.bricks.sizes.model, self.bricks.sizes.moe
        shared = self._shared.parameters.dense if self._shared is not None else 0
        one = self._up * (model.hidden + model.mlp_bias) + self._inner * model.hidden + model.mlp_bias * model.hidden
        return Held(moe.router_parameters(model.hidden) + shared, self._groups * one)

    @cached_property
    def kept_bytes(self) -> int:
        """Rows as the experts read them, outputs of the up projection and of the activation, and the scores in fp32."""
        sizes = self.bricks.sizes
        rows = self._rows * (sizes.model.hidden + self._up + self._inner) * sizes.element_bytes
        scores = sizes.local_tokens * sizes.moe.experts * 4
        return rows + scores + (self._shared.kept_bytes if self._shared is not None else 0)

    # ---- passes -----------------------------------------------------------------------------------------------------

    def forward(self, body: Body) -> None:
        """Router, dispatch, experts, combination, and shared experts before, or beside the traffic."""
        bricks, shared = self.bricks, self._shared
        beside = shared if self._overlaps else None
        if shared is not None and beside is None:
            shared.forward(body)
        bricks.local_forward(body, "router", self._router_width)
        self._route(body, backward=False)
        if self.bricks.sizes.layout.plan.ep > 1:
            counts = self.bricks.sizes.moe.experts * _COUNT_BYTES * self.bricks.sizes.layout.plan.ep
            body.exchange("all_gather", counts, "token counts", "ep")
        self._permute(body, "permute", backward=False)
        self._trade(body, "dispatch", beside.up_forward if beside is not None else None)
        self._bring(body, "expert input", gather=True)
        self._sort(body, "sort", backward=False)
        self._product(body, "expert up", self._up, bricks.sizes.model.hidden)
        self._activation(body, backward=False)
        self._product(body, "expert down", bricks.sizes.model.hidden, self._inner)
        self._sort(body, "unsort", backward=False)
        self._bring(body, "expert output", gather=False)
        self._trade(body, "combine", beside.down_forward if beside is not None else None)
        self._permute(body, "unpermute", backward=False)
        self._sum(body, "expert output")

    def backward(self, body: Body, later: Later | None) -> None:
        """The same in reverse."""
        bricks, shared, hidden = self.bricks, self._shared, self.bricks.sizes.model.hidden
        beside = shared if self._overlaps else None
        self._permute(body, "unpermute grad", backward=True)
        self._trade(body, "combine grad", (lambda b: beside.down_backward(b, later)) if beside is not None else None)
        self._bring(body, "expert output grad", gather=True)
        self._sort(body, "unsort grad", backward=True)
        self._product(body, "expert down dgrad", self._inner, hidden)
        self._weights(body, "expert down", hidden, self._inner, later)
        self._activation(body, backward=True)
        self._product(body, "expert up dgrad", hidden, self._up)
        self._weights(body, "expert up", self._up, hidden, later)
        self._sort(body, "sort grad", backward=True)
        self._bring(body, "expert input grad", gather=False)
        self._trade(body, "dispatch grad", (lambda b: beside.up_backward(b, later)) if beside is not None else None)
        self._permute(body, "permute grad", backward=True)
        self._sum(body, "expert input grad")
        self._route(body, backward=True)
        bricks.local_backward(body, "router", self._router_width, later)
        if shared is not None and beside is None:
            shared.backward(body, later)

    @property
    def _overlaps(self) -> bool:
        return bool(self.bricks.sizes.layout.overlap.ep)

    @property
    def _router_width(self) -> int:
        """A score for each expert, and the gate of the shared ones."""
        return self.bricks.sizes.moe.experts + self.bricks.sizes.moe.shared_gate

    def _route(self, body: Body, *, backward: bool) -> None:
        sizes = self.bricks.sizes
        label = "top-k grad" if backward else "top-k"
        self.bricks.operation(body, "router", sizes.local_tokens * sizes.moe.experts, label, backward=backward)

    def _permute(self, body: Body, label: str, *, backward: bool) -> None:
        """Between a token and its rows, either of which is read and the other written."""
        sizes = self.bricks.sizes
        elements = (sizes.local_tokens + self._sent) / 2 * sizes.model.hidden
        self.bricks.operation(body, "permute", elements, label, backward=backward)

    def _sort(self, body: Body, label: str, *, backward: bool) -> None:
        """Rows arrive by sender; several experts need them by expert."""
        arrive_mixed = self.bricks.sizes.layout.plan.ep > 1 or self._gathers
        if self._groups > 1 and arrive_mixed:
            self.bricks.operation(
                body, "permute", self._rows * self.bricks.sizes.model.hidden, label, backward=backward
            )

    def _trade(self, body: Body, name: str, beside: Callable[[Body], None] | None) -> None:
        """An all-to-all over the experts' ranks; ``beside`` runs meanwhile."""
        done = (
            body.begin("all_to_all", self._traded_bytes, name, "ep") if self.bricks.sizes.layout.plan.ep > 1 else None
        )
        if beside is not None:
            beside(body)
        if done is not None:
            body.join(done)

    def _bring(self, body: Body, name: str, *, gather: bool) -> None:
        """Rows between the ranks that share an expert."""
        if self._gathers:
            body.exchange("all_gather" if gather else "reduce_scatter", self._nbytes(self._rows), name, "etp")

    def _sum(self, body: Body, name: str) -> None:
        if self._has_partial_sums:
            body.exchange("all_reduce", self.bricks.sizes.full_bytes, name)

    def _quantize(self, body: Body, width: int, label: str) -> None:
        """In fp8, rows come from traffic or an activation in bf16: read, and written in fp8 as they are and transposed.

        Transformer Engine's ``GroupedLinear`` casts its input, and in backward its output's gradient, by kernels of
        their own; nothing before them could do it on the way.
        """
        if self.bricks.sizes.layout.precision == "fp8":
            body.run(self.bricks.traffic(self._rows * width * (2 + 1 + 1)), label)

    def _product(self, body: Body, name: str, width: int, inner: int) -> None:
        sizes = self.bricks.sizes
        self._quantize(body, inner, f"{name} cast")
        kernel = GroupedGemm(
            self._rows, width, inner, self._groups, sizes.layout.precision, out_bytes=sizes.element_bytes
        )
        body.run(kernel, name, self.bricks.expert_launches(self._groups))

    def _weights(self, body: Body, name: str, rows: int, columns: int, later: Later | None) -> None:
        kept = self._rows * (rows + columns) * self.bricks.sizes.element_bytes
        gradient = self.bricks.weight_gradient(name, rows, columns, self._rows, kept=kept, groups=self._groups)
        self.bricks.now_or_later(body, gradient, later)

    def _activation(self, body: Body, *, backward: bool) -> None:
        kind: OperationName = "gated_activation" if self.bricks.sizes.model.gated_mlp else "activation"
        label = "expert activation grad" if backward else "expert activation"
        self.bricks.operation(body, kind, self._rows * self._inner, label, backward=backward)
