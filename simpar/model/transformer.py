"""A decoder-only transformer as a description, with its parameters and its FLOP as closed forms.

What the model is lives here; experts, latent and linear attention have descriptions of their own beside it. How
its work is split over ranks (tensor, expert, sequence, pipeline) belongs to the plan, and how long a kernel takes
to the cost functions.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simpar.description import Description
from simpar.errors import ModelError, SimparError
from simpar.model.attention import LatentAttention, LinearAttention
from simpar.model.experts import MoE
from simpar.model.flop import AttentionCount, ModelFlop, keys_per_query
from simpar.model.layer import LayerKind, MlpKind

Count = Annotated[int, Field(gt=0, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class Transformer(Description):
    """A decoder-only transformer; its layers may differ in what they attend to and in having experts.

    Attributes:
        name: what reports call it.
        layers: number of transformer layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads (grouped-query attention); as many as query heads if not given.
        head_dim: width of a head; ``hidden / heads`` if not given.
        ffn_hidden: inner width of the dense MLP; ``4 · hidden`` if not given (only without gate, where that is the
            custom), or with experts the width of one.
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
        qk_norm_weights: what those norms run over and weigh: ``head`` as above, ``width`` all heads together with a
            weight each (OLMoE), or ``none`` each head without weights (Llama 4).
        qkv_bias: bias on the query, key and value projections (Qwen2, GPT).
        out_bias: bias on the attention's output projection.
        mlp_bias: bias on the MLP's projections, also on those of routed experts.
        head_bias: bias on the output head.
        attention_gate: the query projection is twice as wide, and half of it gates the output (Qwen3-Next).
        attention_sinks: one trained score a head that takes part in the softmax (gpt-oss).
        dropout: whether training drops activations (GPT-3-era models), which keeps masks and costs traffic.
        window: keys that a query sees in a windowed layer (sliding-window attention), itself included.
        window_pattern: which layers are windowed, as letters that repeat over the layers: ``W`` windowed,
            ``F`` full attention. ``W`` is Mistral, ``WF`` Gemma 2, ``WWWWWF`` Gemma 3.
        window_kind: ``sliding`` along, or ``chunked``: a query sees its chunk of the sequence from the start (Llama 4).
        mla: latent attention instead of grouped queries; ``kv_heads`` and ``head_dim`` follow from it.
        linear: which layers have linear attention instead, and which.
        moe: which layers have experts instead of the MLP, and which.
        note: what a reader should know about an import (a tower left out, an approximation).
        source: where the numbers come from.
    """

    error_type: ClassVar[type[SimparError]] = ModelError

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
    qk_norm_weights: Literal["head", "width", "none"] = "head"
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    head_bias: Flag = False
    attention_gate: Flag = False
    attention_sinks: Flag = False
    dropout: Flag = False
    window: Count | None = None
    window_pattern: str = Field(default="W", pattern=r"^[WF]+$")
    window_kind: Literal["sliding", "chunked"] = "sliding"
    mla: LatentAttention | None = None
    linear: LinearAttention | None = None
    moe: MoE | None = None
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
        if (latent := _width(filled.get("mla"), "nope_dim", "rope_dim")) is not None:
            filled.setdefault("head_dim", latent)
        if (expert := _width(filled.get("moe"), "ffn_hidden")) is not None:
            filled.setdefault("ffn_hidden", expert)
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
        if self.mla is not None and (self.kv_heads, self.head_dim) != (self.heads, self.mla.head_dim):
            raise ValueError(
                f"latent attention has a key of {self.mla.head_dim} (nope_dim + rope_dim) for each of {self.heads}"
                f" heads, not {self.kv_heads} kv_heads of head_dim {self.head_dim}; drop kv_heads and head_dim"
            )
        if self.mla is not None and (self.qk_norm or self.attention_gate):
            raise ValueError("latent attention has norms of its own and no gate; drop qk_norm and attention_gate")
        if self.moe is not None and not any(map(self.moe.has_experts, range(self.layers))):
            raise ValueError(
                f"moe gives none of the {self.layers} layers experts (first_dense {self.moe.first_dense}, pattern"
                f" {self.moe.pattern}); change them or drop moe"
            )
        return self

    def layer_kind(self, layer: int) -> LayerKind:
        """What this layer is, as a hashable value: lowering makes one unit for each."""
        mlp: MlpKind = "experts" if self.moe is not None and self.moe.has_experts(layer) else "dense"
        if self.linear is not None and self.linear.is_linear(layer):
            return LayerKind("linear", mlp)
        window = self.layer_window(layer)
        chunked = window is not None and self.window_kind == "chunked"
        return LayerKind("full" if self.mla is None else "latent", mlp, window, chunked)

    @property
    def layer_kinds(self) -> Mapping[LayerKind, int]:
        """The distinct kinds of layers, in the order in which they first appear, with the number of layers of each."""
        patterns = [self.window_pattern]
        if self.linear is not None:
            patterns.append(self.linear.pattern)
        if self.moe is not None:
            patterns.append(self.moe.pattern)
        period = math.lcm(*map(len, patterns))
        dense = min(self.moe.first_dense if self.moe is not None else 0, self.layers)
        cycles, rest = divmod(self.layers - dense, period)
        if cycles < 2:
            return Counter(map(self.layer_kind, range(self.layers)))
        # behind the dense ones, kinds repeat: a count must not take as long as a model is deep
        found = Counter(map(self.layer_kind, range(dense + period + rest)))
        for kind, count in Counter(map(self.layer_kind, range(dense + rest, dense + rest + period))).items():
            found[kind] += (cycles - 1) * count
        return found

    @property
    def query_width(self) -> int:
        """Width of all queries (with a gate, the projection to them is twice as wide)."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Output width of the key projection, which the value projection has as well; expanded in latent attention."""
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.head_dim if self.mla is None else self.mla.value_dim

    @property
    def attention_width(self) -> int:
        """Width of what all heads put out: the input of the output projection."""
        return self.heads * self.value_dim

    @property
    def mlp_matrices(self) -> int:
        """Matrices of the MLP: up and down, and the gate if there is one."""
        return 3 if self.gated_mlp else 2

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the residual stream."""
        return self.hidden * (2 if self.norm == "layernorm" and self.norm_bias else 1)

    @property
    def qk_norm_parameters(self) -> int:
        """Parameters of the norms of queries and keys in one layer."""
        widths = {"head": 2 * self.head_dim, "width": self.query_width + self.kv_width, "none": 0}
        return widths[self.qk_norm_weights] if self.qk_norm else 0

    @property
    def attention_weights(self) -> int:
        """Weights of the projections of a softmax attention layer, biases left out; a token meets each of them once."""
        if self.mla is not None:
            return self.mla.weights(self.hidden, self.heads)
        return self.hidden * ((2 + self.attention_gate) * self.query_width + 2 * self.kv_width)

    @property
    def mlp_weights(self) -> int:
        """Weights of a dense MLP, biases left out."""
        return self.mlp_matrices * self.hidden * self.ffn_hidden

    @property
    def attention_parameters(self) -> int:
        """Parameters of a softmax attention layer: projections, their biases, inner norms and sinks."""
        if self.mla is None:
            widths = (1 + self.attention_gate) * self.query_width + 2 * self.kv_width
        else:  # the library puts biases on the projections down only
            widths = self.mla.down_width if self.mla.q_rank else self.mla.kv_rank + self.mla.rope_dim
        biases = self.qkv_bias * widths + self.out_bias * self.hidden
        norms = self.qk_norm_parameters if self.mla is None else self.mla.norm_parameters
        return self.attention_weights + biases + norms + self.attention_sinks * self.heads

    @property
    def mlp_parameters(self) -> int:
        """Parameters of a dense MLP with its biases."""
        return self._mlp_parameters(self.ffn_hidden)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one routed expert, with its biases; 0 without experts."""
        return self._mlp_parameters(self.moe.ffn_hidden) if self.moe is not None else 0

    def _mlp_parameters(self, width: int) -> int:
        weights = self.mlp_matrices * self.hidden * width
        return weights + self.mlp_bias * ((self.mlp_matrices - 1) * width + self.hidden)

    def _shared_weights(self) -> int:
        """Router and shared experts of a layer: what every token meets beside its own experts."""
        assert self.moe is not None
        return self.moe.router_parameters(self.hidden) + self.mlp_matrices * self.hidden * self.moe.shared_ffn_hidden

    def layer_parameters(self, kind: LayerKind, *, active: bool = False) -> int:
        """Parameters of one layer of this kind: attention, MLP or experts with their router, and norms.

        Args:
            kind: as :meth:`layer_kind` gives it.
            active: count only as many routed experts as a token meets.
        """
        attention = self.attention_parameters
        if kind.attention == "linear":
            assert self.linear is not None
            attention = self.linear.parameters(self.hidden)
        mlp = self.mlp_parameters
        if kind.mlp == "experts":
            assert self.moe is not None
            met = self.moe.top_k if active else self.moe.experts
            mlp = self._shared_weights() + met * self.expert_parameters
        elif kind.mlp == "none":
            mlp = 0
        return attention + mlp + self.norms_per_layer * self.norm_parameters

    def layer_weights(self, kind: LayerKind) -> int:
        """Weights that one token meets in a layer of this kind, each once: biases and norms left out."""
        attention = self.attention_weights
        if kind.attention == "linear":
            assert self.linear is not None
            attention = self.linear.weights(self.hidden)
        if kind.mlp == "dense":
            return attention + self.mlp_weights
        if kind.mlp == "none":
            return attention
        assert self.moe is not None
        routed = self.moe.top_k * self.mlp_matrices * self.hidden * self.moe.ffn_hidden
        return attention + self._shared_weights() - self.moe.router_bias * self.moe.experts + routed

    def attention_flop_per_token(self, kind: LayerKind, seq_len: int, attention: AttentionCount = "causal") -> float:
        """Forward FLOP of the attention core of one layer per token; see :meth:`flop_per_token`."""
        if kind.attention == "linear":
            assert self.linear is not None
            return self.linear.core_flop_per_token
        keys = keys_per_query(seq_len, kind, attention)
        return 2.0 * self.heads * (self.head_dim + self.value_dim) * keys

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
        return (0 if self.tied_embeddings else self.vocab * self.hidden) + self.head_bias * self.vocab

    @property
    def parameters(self) -> int:
        """All parameters, tied ones counted once."""
        return self._parameters(active=False)

    @property
    def active_parameters(self) -> int:
        """Parameters that take part in the work on one token: all but the experts it is not sent to.

        Embedding and head are in it; where a report leaves the table out, subtract :attr:`embedding_parameters`.
        """
        return self._parameters(active=True)

    def _parameters(self, *, active: bool) -> int:
        layers = sum(count * self.layer_parameters(kind, active=active) for kind, count in self.layer_kinds.items())
        return self.embedding_parameters + layers + self.final_norm_parameters + self.head_parameters

    def cache_elements_per_token(self, kind: LayerKind) -> int:
        """Numbers that inference keeps per token in a layer of this kind: keys and values, or their latent vector.

        A linear layer keeps ``linear.state_elements`` per sequence instead, however long it is.
        """
        if kind.attention == "linear":
            return 0
        return 2 * self.kv_width if self.mla is None else self.mla.kv_rank + self.mla.rope_dim

    def padded_vocab(self, multiple: int) -> int:
        """The vocabulary rounded up to a multiple, as Megatron-LM pads it for tensor parallelism."""
        return math.ceil(self.vocab / multiple) * multiple

    def layer_window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, or None for all of them."""
        windowed = self.window_pattern[layer % len(self.window_pattern)] == "W"
        return self.window if windowed else None

    def flop_per_token(self, seq_len: int, attention: AttentionCount = "causal") -> ModelFlop:
        """Forward FLOP per token in sequences of ``seq_len`` tokens, one multiply-add counted as two.

        Every weight of a projection, of the head and of the experts that a token is sent to costs two FLOP (the 2N
        of Kaplan et al. 2020, without embedding lookups, biases and norms); attention costs
        ``2 · heads · (head_dim + value_dim)`` per key that a query sees (Narayanan et al. 2021, appendix; Korthikanti
        et al. 2022, appendix A), and linear attention :attr:`LinearAttention.core_flop_per_token`.

        Args:
            seq_len: tokens in a sequence.
            attention: keys counted per query, on the mean over the sequence, with w = min(window, seq_len):
                ``causal`` counts those the mask leaves, ``w (1 − w / 2 seq_len)``, which is ``seq_len / 2``
                without a window (``w / 2`` in whole chunks); ``halved`` counts ``w / 2`` also inside a window, as
                training frameworks that halve everything print it; ``full`` counts w, the convention of the
                Megatron-LM papers.
        """
        weights, core = self.hidden * self.vocab, 0.0
        for kind, count in self.layer_kinds.items():
            weights += count * self.layer_weights(kind)
            core += count * self.attention_flop_per_token(kind, seq_len, attention)
        return ModelFlop(matmul=2.0 * weights, attention=core)

    def step_flop(
        self, tokens: int, seq_len: int, attention: AttentionCount = "causal", *, frozen_layers: int = 0
    ) -> ModelFlop:
        """FLOP of forward and backward over ``tokens`` tokens: three times the forward ones, once for frozen layers.

        This is the numerator of MFU, so recomputation is left out; the backward pass multiplies twice per
        weight (for inputs and for weights) and is counted so for attention too, although FlashAttention's
        backward does 2.5 times its forward's work.
        """
        forward = self.flop_per_token(seq_len, attention)
        kinds = [self.layer_kind(layer) for layer in range(frozen_layers)]
        weights = sum(self.layer_weights(kind) for kind in kinds)
        core = sum(self.attention_flop_per_token(kind, seq_len, attention) for kind in kinds)
        backward = ModelFlop(matmul=forward.matmul - 2.0 * weights, attention=forward.attention - core)
        return ModelFlop(
            matmul=tokens * (forward.matmul + 2.0 * backward.matmul),
            attention=tokens * (forward.attention + 2.0 * backward.attention),
        )


_DERIVED = frozenset({"kv_heads", "head_dim", "ffn_hidden"})


def _width(part: Any, *fields: str) -> int | None:
    """The sum of fields of a nested description, which may still be a mapping; None where the description is wrong."""
    values = [part.get(field) if isinstance(part, Mapping) else getattr(part, field, None) for field in fields]
    widths = [value for value in values if isinstance(value, int)]
    return sum(widths) if len(widths) == len(fields) else None
