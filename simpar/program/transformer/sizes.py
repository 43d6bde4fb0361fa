"""Sizes of a transformer on one rank: what tensor, sequence and context parallelism leave of each width."""

from dataclasses import dataclass
from functools import cached_property

from simpar.model.experts import MoE
from simpar.model.transformer import Transformer
from simpar.model.work import DTYPE_BYTES
from simpar.plan.layout import Layout
from simpar.program.body import Body
from simpar.program.ir import Group, Phase


@dataclass(frozen=True)
class Sizes:
    """The widths, tokens and groups of one rank.

    Attributes:
        model: the model.
        layout: the plan laid over it.
    """

    model: Transformer
    layout: Layout

    @cached_property
    def element_bytes(self) -> int:
        """Bytes per element of an activation; fp8 training keeps activations in bf16."""
        return max(DTYPE_BYTES[self.layout.precision], 2)

    @cached_property
    def tokens(self) -> int:
        """Tokens of a microbatch on this rank."""
        return self.layout.tokens

    @cached_property
    def local_tokens(self) -> int:
        """Tokens whose residual stream this rank holds."""
        plan = self.layout.plan
        return self.tokens // plan.tp if plan.sequence_parallel else self.tokens

    @cached_property
    def heads(self) -> tuple[int, int]:
        """Query and key/value heads of this rank; few key/value heads are replicated."""
        tp = self.layout.plan.tp
        return self.model.heads // tp, max(1, self.model.kv_heads // tp)

    @cached_property
    def qkv_width(self) -> int:
        """Width of queries, keys and values together."""
        heads, kv_heads = self.heads
        return heads * self.model.head_dim + kv_heads * (self.model.head_dim + self.model.value_dim)

    @cached_property
    def gate_width(self) -> int:
        """Width of the gate on the attention core's output, which the query projection also puts out; 0 without."""
        return self.model.attention_gate * self.heads[0] * self.model.head_dim

    @cached_property
    def qk_width(self) -> int:
        """Width of queries and keys together."""
        heads, kv_heads = self.heads
        return (heads + kv_heads) * self.model.head_dim

    @cached_property
    def out_width(self) -> int:
        """Width of the attention core's output."""
        return self.heads[0] * self.model.value_dim

    @cached_property
    def moe(self) -> MoE:
        """The experts of layers that have some, with the plan's capacity."""
        assert self.model.moe is not None, "asked for by layers with experts only"
        capacity = self.layout.plan.expert_capacity
        return self.model.moe if capacity is None else self.model.moe.replace(capacity_factor=capacity)

    @cached_property
    def vocab(self) -> int:
        """Rows of the embedding on this rank, padded as the framework does."""
        tp, software = self.layout.plan.tp, self.layout.framework
        multiple = software.vocab_multiple * (tp if software.vocab_multiple_times_tp else 1)
        return -(-self.model.padded_vocab(multiple) // tp)

    @cached_property
    def residual(self) -> int:
        """Elements of the residual stream on this rank."""
        return self.local_tokens * self.model.hidden

    @cached_property
    def boundary_bytes(self) -> int:
        """What a rank sends to the next stage per microbatch."""
        return self.residual * self.element_bytes

    @cached_property
    def full_bytes(self) -> int:
        """The residual stream of all tokens: what tensor-parallel collectives carry."""
        return self.tokens * self.model.hidden * self.element_bytes

    @cached_property
    def tp_group(self) -> Group | None:
        """The tensor-parallel group, counted from its first rank."""
        tp = self.layout.plan.tp
        return Group("tp", range(tp)) if tp > 1 else None

    def body(self, *, phase: Phase = "forward") -> Body:
        """An empty body with this rank's groups."""
        return Body(self.tp_group, phase=phase, extra_s=self.layout.ring_extra_s, others=self._other_groups)

    @cached_property
    def _other_groups(self) -> dict[str, Group]:
        """Context-parallel ranks are a tensor-parallel group's width apart, expert-parallel ones one of experts' own.

        The ranks of a stage count for experts anew, expert-tensor-parallel first (Megatron-Core's ``parallel_state``).
        """
        tp, cp, etp, ep = self.layout.plan.tp, self.layout.plan.cp, self.layout.etp, self.layout.plan.ep
        every = {"cp": range(0, tp * cp, tp), "etp": range(etp), "ep": range(0, etp * ep, etp)}
        return {stream: Group(stream, ranks) for stream, ranks in every.items() if len(ranks) > 1}
