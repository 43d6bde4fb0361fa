"""What tells one layer of a transformer from another: lowering makes one unit for each distinct kind."""

from dataclasses import dataclass
from typing import Literal

AttentionKind = Literal["full", "latent", "linear"]
MlpKind = Literal["dense", "experts", "none"]

MOST_LAYERS = 10_000  # that can be simulated


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Kind of a layer; layers of one kind are alike in everything.

    Attributes:
        attention: ``full`` with keys and values per (grouped) head, ``latent`` (MLA), or ``linear``.
        mlp: one MLP for all tokens, or experts; ``none`` stands for what a layer is without either.
        window: keys that a query sees; None for all of them, and in linear layers.
        chunked: whether the window is a chunk of the sequence that starts anew instead of sliding along (Llama 4).
    """

    attention: AttentionKind = "full"
    mlp: MlpKind = "dense"
    window: int | None = None
    chunked: bool = False
