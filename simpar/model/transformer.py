"""A dense decoder-only transformer as a description, with its parameters and its FLOP as closed forms.

What the model is lives here. How its work is split over ranks (tensor, sequence, pipeline) belongs to the
plan, and how long a kernel takes to the cost functions. Mixture-of-experts layers and latent attention (MLA)
are not described yet.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from simpar.description import Description

AttentionCount = Literal["causal", "halved", "full"]
"""How attention FLOP are counted: see :meth:`Transformer.flop_per_token`."""

Count = Annotated[int, Field(gt=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


@dataclass(frozen=True, slots=True)
class ModelFlop:
    """FLOP of the model itself (no recomputation): projections and head apart from the attention core.

    Attributes:
        matmul: FLOP of products with weights (two per weight and token).
        attention: FLOP of QKᵀ and of its product with V.
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


class Transformer(Description):
    """A dense decoder-only transformer whose layers are alike.

    Attributes:
        name: what reports call it.
        layers: number of transformer layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads (grouped-query attention); as many as query heads if not given.
        head_dim: width of a head; ``hidden / heads`` if not given.
        ffn_hidden: inner width of the MLP; ``4 · hidden`` if not given (only without gate, where that is the
            custom).
        gated_mlp: True for the three-matrix MLP (SwiGLU, GeGLU), False for the two-matrix one.
        vocab: rows of the embedding, as the checkpoint has them; :meth:`padded_vocab` rounds up for tensor
            parallelism.
        tied_embeddings: True if the output head is the embedding's matrix.
        position: ``rope``, ``learned`` (a table of ``max_positions`` rows), or ``none`` (ALiBi included: it
            has no weights).
        max_positions: longest sequence the positions are made for; needed when they are learned.
        norm: kind of normalisation.
        norm_bias: whether a LayerNorm has a bias (an RMSNorm never has).
        norms_per_layer: 2, or 4 where attention and MLP are normalised before and after (Gemma 2 and 3),
            or 1 where they share one.
        embedding_norm: a norm directly behind the embedding (BLOOM).
        qk_norm: RMSNorm over each head of queries and keys, one weight vector of ``head_dim`` each (Qwen3).
        qkv_bias: bias on the query, key and value projections (Qwen2, GPT).
        out_bias: bias on the attention's output projection.
        mlp_bias: bias on the MLP's projections.
        dropout: whether training drops activations (GPT-3-era models), which keeps masks and costs traffic.
        window: keys that a query sees in a windowed layer (sliding-window attention), itself included.
        window_pattern: which layers are windowed, as letters that repeat over the layers: ``W`` windowed,
            ``F`` full attention. ``W`` is Mistral, ``WF`` Gemma 2, ``WWWWWF`` Gemma 3.
        note: what a reader should know about an import (a tower left out, an approximation).
        source: where the numbers come from.
    """

    name: str = Field(min_length=1)
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count = 1  # these three defaults are never seen: _fill_widths puts the derived value in their place
    head_dim: Count = 1
    ffn_hidden: Count = 1
    gated_mlp: Flag
    vocab: Count
    tied_embeddings: Flag
    position: Literal["rope", "learned", "none"] = "rope"
    max_positions: Count | None = None
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    norm_bias: Flag = True
    norms_per_layer: Literal[1, 2, 4] = 2
    embedding_norm: Flag = False
    qk_norm: Flag = False
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    dropout: Flag = False
    window: Count | None = None
    window_pattern: str = Field(default="W", pattern=r"^[WF]+$")
    note: str = ""
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _fill_widths(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        filled = {key: value for key, value in data.items() if value is not None or key not in _DERIVED}
        heads, hidden = filled.get("heads"), filled.get("hidden")
        if not (isinstance(heads, int) and isinstance(hidden, int) and heads > 0 and hidden > 0):
            return filled  # the fields' own checks say what is wrong
        filled.setdefault("kv_heads", heads)
        if "head_dim" not in filled:
            if hidden % heads:
                raise ValueError(
                    f"hidden {hidden} is not divisible by heads {heads}, so there is no default head_dim; give head_dim"
                )
            filled["head_dim"] = hidden // heads
        if "ffn_hidden" not in filled:
            if filled.get("gated_mlp"):
                raise ValueError("a gated MLP has no customary width; give ffn_hidden")
            filled["ffn_hidden"] = 4 * hidden
        return filled

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads {self.kv_heads} does not divide heads {self.heads}: query heads share key/value"
                f" heads in equal groups; choose a divisor of {self.heads}"
            )
        if self.position == "learned" and self.max_positions is None:
            raise ValueError("learned positions need the length of their table; give max_positions")
        return self

    @property
    def query_width(self) -> int:
        """Output width of the query projection (and input width of the output projection)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Output width of the key projection, which the value projection has as well."""
        return self.kv_heads * self.head_dim

    @property
    def mlp_matrices(self) -> int:
        """Matrices of the MLP: up and down, and the gate if there is one."""
        return 3 if self.gated_mlp else 2

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the residual stream."""
        return self.hidden * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    @property
    def attention_weights(self) -> int:
        """Weights of the four projections of one layer, biases left out; a token meets each of them once."""
        return self.hidden * (2 * self.query_width + 2 * self.kv_width)

    @property
    def mlp_weights(self) -> int:
        """Weights of the MLP of one layer, biases left out."""
        return self.mlp_matrices * self.hidden * self.ffn_hidden

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's attention: projections, their biases and the query/key norms."""
        biases = self.qkv_bias * (self.query_width + 2 * self.kv_width) + self.out_bias * self.hidden
        return self.attention_weights + biases + self.qk_norm * 2 * self.head_dim

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one layer's MLP with its biases."""
        return self.mlp_weights + self.mlp_bias * ((self.mlp_matrices - 1) * self.ffn_hidden + self.hidden)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, MLP and norms."""
        return self.attention_parameters + self.mlp_parameters + self.norms_per_layer * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer: token table, learned positions, the norm behind them if any."""
        positions = self.max_positions or 0 if self.position == "learned" else 0
        return (self.vocab + positions) * self.hidden + self.embedding_norm * self.norm_parameters

    @property
    def final_norm_parameters(self) -> int:
        """Parameters of the norm before the head."""
        return self.norm_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head: none of its own if it is tied to the embedding."""
        return 0 if self.tied_embeddings else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, tied ones counted once."""
        layers = self.layers * self.layer_parameters
        return self.embedding_parameters + layers + self.final_norm_parameters + self.head_parameters

    def padded_vocab(self, multiple: int) -> int:
        """The vocabulary rounded up to a multiple, as Megatron-LM pads it for tensor parallelism."""
        return math.ceil(self.vocab / multiple) * multiple

    def layer_window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, or None for all of them."""
        windowed = self.window_pattern[layer % len(self.window_pattern)] == "W"
        return self.window if windowed else None

    def flop_per_token(self, seq_len: int, attention: AttentionCount = "causal") -> ModelFlop:
        """Forward FLOP per token in sequences of ``seq_len`` tokens, one multiply-add counted as two.

        Every weight of a projection and of the head costs two FLOP (the 2N of Kaplan et al. 2020, without
        embedding lookups, biases and norms); attention costs ``4 · heads · head_dim`` per key that a query
        sees (Narayanan et al. 2021, appendix; Korthikanti et al. 2022, appendix A).

        Args:
            seq_len: tokens in a sequence.
            attention: keys counted per query, on the mean over the sequence, with w = min(window, seq_len):
                ``causal`` counts those the mask leaves, ``w (1 − w / 2 seq_len)``, which is ``seq_len / 2``
                without a window; ``halved`` counts ``w / 2`` also inside a window, as training frameworks
                that halve everything print it; ``full`` counts w, the convention of the Megatron-LM papers.
        """
        weights = self.layers * (self.attention_weights + self.mlp_weights) + self.hidden * self.vocab
        keys = sum(_keys_per_query(seq_len, self.layer_window(layer), attention) for layer in range(self.layers))
        return ModelFlop(matmul=2.0 * weights, attention=4.0 * self.query_width * keys)

    def step_flop(self, tokens: int, seq_len: int, attention: AttentionCount = "causal") -> ModelFlop:
        """FLOP of forward and backward over ``tokens`` tokens: three times the forward ones.

        This is the numerator of MFU, so recomputation is left out; the backward pass multiplies twice per
        weight (for inputs and for weights) and is counted so for attention too, although FlashAttention's
        backward does 2.5 times its forward's work.
        """
        return 3.0 * tokens * self.flop_per_token(seq_len, attention)


_DERIVED = frozenset({"kv_heads", "head_dim", "ffn_hidden"})


def _keys_per_query(seq_len: int, window: int | None, attention: AttentionCount) -> float:
    seen = min(window or seq_len, seq_len)
    if attention == "full":
        return float(seen)
    return seen / 2 if attention == "halved" else seen * (1 - seen / (2 * seq_len))
