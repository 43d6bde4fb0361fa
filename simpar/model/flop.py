"""FLOP of a model as an additive value, and how many keys a query is counted with."""

from dataclasses import dataclass
from typing import Literal

from simpar.model.layer import LayerKind

AttentionCount = Literal["causal", "halved", "full"]
"""How attention FLOP are counted: see :meth:`~simpar.model.transformer.Transformer.flop_per_token`."""


@dataclass(frozen=True, slots=True)
class ModelFlop:
    """FLOP of the model itself (no recomputation): projections and head apart from the attention core.

    Attributes:
        matmul: FLOP of products with weights (two per weight and token).
        attention: FLOP of QKᵀ and of its product with V, or of the state's updates in linear attention.
    """

    matmul: float
    attention: float

    @property
    def total(self) -> float:
        """Both parts together."""
        return self.matmul + self.attention

    def __mul__(self, times: float) -> "ModelFlop":
        return ModelFlop(self.matmul * times, self.attention * times)

    __rmul__ = __mul__


def keys_per_query(seq_len: int, kind: LayerKind, attention: AttentionCount) -> float:
    """Keys that a query of this layer is counted with, on the mean over a sequence of ``seq_len`` tokens."""
    seen = min(kind.window or seq_len, seq_len)
    if attention == "full":
        return float(seen)
    if attention == "halved":
        return seen / 2
    if kind.chunked:
        whole, rest = divmod(seq_len, seen)
        return (whole * seen * seen + rest * rest) / (2 * seq_len)
    return seen * (1 - seen / (2 * seq_len))
