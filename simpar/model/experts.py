"""Mixture-of-experts layers as a description: how many experts, which layers have them, and how load falls on them."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from simpar.description import Description
from simpar.errors import ModelError, SimparError

Count = Annotated[int, Field(gt=0, strict=True)]
Whole = Annotated[int, Field(ge=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class MoE(Description):
    """Experts in place of the MLP: a router sends each token to ``top_k`` of them, and all tokens to the shared ones.

    Experts have the gate and the biases that the transformer's MLP has (``gated_mlp``, ``mlp_bias``).

    Attributes:
        experts: routed experts of a layer.
        top_k: experts that a token is sent to.
        ffn_hidden: inner width of a routed expert.
        shared_ffn_hidden: inner width of all shared experts together; 0 without any.
        shared_gate: a sigmoid gate with one output on the shared experts (Qwen2-MoE, Qwen3-Next).
        router_bias: a trained bias on the router (gpt-oss); biases that only balance load are not trained and not
            counted.
        first_dense: layers from below that have a dense MLP instead (DeepSeek-V3: 3).
        pattern: which of the layers behind those have experts, as letters that repeat: ``E`` experts, ``D`` dense.
            ``DE`` is Llama 4 Maverick.
        capacity_factor: tokens that an expert takes at most, relative to its even share; None drops no token.
    """

    error_type: ClassVar[type[SimparError]] = ModelError

    experts: Count
    top_k: Count
    ffn_hidden: Count
    shared_ffn_hidden: Whole = 0
    shared_gate: Flag = False
    router_bias: Flag = False
    first_dense: Whole = 0
    pattern: str = Field(default="E", pattern=r"^[ED]*E[ED]*$")
    capacity_factor: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k {self.top_k} is more than the {self.experts} experts, and a token goes to each at most once;"
                f" choose at most {self.experts}"
            )
        if self.shared_gate and not self.shared_ffn_hidden:
            raise ValueError("shared_gate needs shared experts to gate; give shared_ffn_hidden")
        return self

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts instead of a dense MLP."""
        behind = layer - self.first_dense
        return behind >= 0 and self.pattern[behind % len(self.pattern)] == "E"

    def router_parameters(self, hidden: int) -> int:
        """Parameters of a layer's router, and of the gate of its shared experts."""
        return self.experts * (hidden + self.router_bias) + self.shared_gate * hidden

    def expert_shares(self, skew: float = 0.0) -> tuple[float, ...]:
        """Share of all (token, expert) pairs that falls on each expert, the most loaded first.

        Loads follow a power law, share ∝ rank^−skew (0 is balanced), which fits routing without balancing loss. No
        expert gets more than one pair of each token, 1 / top_k of all, nor more than ``capacity_factor`` times the even
        share. What the first limit cuts off goes to the others; what the second cuts off is dropped, so that the sum
        falls below 1.

        >>> MoE(experts=4, top_k=2, ffn_hidden=8).expert_shares()
        (0.25, 0.25, 0.25, 0.25)
        >>> [round(s, 3) for s in MoE(experts=4, top_k=2, ffn_hidden=8).expert_shares(1.0)]
        [0.48, 0.24, 0.16, 0.12]
        """
        shares = [(expert + 1.0) ** -skew for expert in range(self.experts)]
        limit, full = 1.0 / self.top_k, 0
        while True:  # each round fills one more expert, so it ends after top_k rounds
            left = max(0.0, 1.0 - full * limit)
            scale = left / sum(shares[full:]) if full < self.experts else 0.0
            if full == self.experts or shares[full] * scale <= limit:
                break
            full += 1
        found = (limit,) * full + tuple(share * scale for share in shares[full:])
        most = 1.0 if self.capacity_factor is None else self.capacity_factor / self.experts
        return tuple(min(share, most) for share in found)

    def rank_shares(self, ranks: int, skew: float = 0.0) -> tuple[float, ...]:
        """Share of all pairs that falls on each rank of an expert-parallel group, experts dealt out in turn.

        Args:
            ranks: size of the group, a divisor of ``experts``.
            skew: exponent of :meth:`expert_shares`.

        Raises:
            ModelError: the experts cannot be dealt out evenly.

        >>> [round(s, 3) for s in MoE(experts=4, top_k=2, ffn_hidden=8).rank_shares(2, skew=1.0)]
        [0.64, 0.36]
        """
        if ranks < 1 or self.experts % ranks:
            raise ModelError(
                f"{self.experts} experts cannot be dealt out evenly to {ranks} ranks;"
                f" choose a divisor of {self.experts}"
            )
        shares = self.expert_shares(skew)
        return tuple(sum(shares[rank::ranks]) for rank in range(ranks))
