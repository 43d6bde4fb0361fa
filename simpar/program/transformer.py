"""The kernels and collectives of a transformer's parts on one rank, under tensor and sequence parallelism.

Shapes follow Megatron-LM (Shoeybi et al. 2019; Korthikanti et al. 2022 for sequence parallelism): column-parallel QKV
and up projections, row-parallel output and down projections. Traffic of memory-bound kernels is what a fused kernel
must read and write, in bytes per element of 2-byte activations: norm 2+2, dropout-add 2+2+1 → 2, SwiGLU 2+2 → 2, ...
"""

from dataclasses import dataclass
from functools import cached_property

from simpar.cost.kernel import unfused_attention
from simpar.model.transformer import Transformer
from simpar.model.work import DTYPE_BYTES, Attention, Gemm, MemoryBound, MemoryClass
from simpar.plan.layout import Layout
from simpar.program.body import Body
from simpar.program.ir import CollectiveOp, Group
from simpar.program.unit import Unit

_VOCAB_MULTIPLE = 128  # Megatron's --make-vocab-size-divisible-by, times tp
_PIPELINE_CHUNKS = 4  # pieces into which a pipelined GEMM and its collective are cut


@dataclass(frozen=True)
class TransformerParts:
    """Builds the units (embedding, layer, head) of a transformer for one rank.

    Attributes:
        model: the model.
        layout: the plan laid over it.
    """

    model: Transformer
    layout: Layout

    # ---- sizes ------------------------------------------------------------------------------------------------------

    @cached_property
    def _size(self) -> int:
        """Bytes per element of an activation; fp8 training keeps activations in bf16."""
        return max(DTYPE_BYTES[self.layout.precision], 2)

    @cached_property
    def _tokens(self) -> int:
        return self.layout.tokens

    @cached_property
    def _local_tokens(self) -> int:
        """Tokens whose residual stream this rank holds."""
        plan = self.layout.plan
        return self._tokens // plan.tp if plan.sequence_parallel else self._tokens

    @cached_property
    def _heads(self) -> tuple[int, int]:
        """Query and key/value heads of this rank; few key/value heads are replicated."""
        tp = self.layout.plan.tp
        return self.model.heads // tp, max(1, self.model.kv_heads // tp)

    @cached_property
    def _qkv_width(self) -> int:
        heads, kv_heads = self._heads
        return (heads + 2 * kv_heads) * self.model.head_dim

    @cached_property
    def _ffn(self) -> int:
        return self.model.ffn_hidden // self.layout.plan.tp

    @cached_property
    def _up_width(self) -> int:
        return self._ffn * (2 if self.model.gated_mlp else 1)

    @cached_property
    def vocab(self) -> int:
        """Rows of the embedding on this rank."""
        tp = self.layout.plan.tp
        return self.model.padded_vocab(_VOCAB_MULTIPLE * tp) // tp if tp > 1 else self.model.vocab

    @cached_property
    def boundary_bytes(self) -> int:
        """What a rank sends to the next stage per microbatch."""
        return self._local_tokens * self.model.hidden * self._size

    @cached_property
    def _group(self) -> Group | None:
        tp = self.layout.plan.tp
        return Group("tp", range(tp)) if tp > 1 else None

    @cached_property
    def _wgrad_bytes(self) -> int:
        """Traffic per element of a weight gradient: accumulated in place, or written once and reduced (ZeRO-3)."""
        if self.layout.plan.zero == 3:
            return self._size
        return 2 * DTYPE_BYTES[self.layout.grad_dtype]

    # ---- building bricks --------------------------------------------------------------------------------------------

    def _gemm(self, name: str, m: int, n: int, k: int, out_bytes: int | None = None) -> Gemm:
        # the head and its loss stay out of fp8
        fine = name == "head" and self.layout.precision == "fp8"
        precision = "bf16" if fine else self.layout.precision
        return Gemm(m, n, k, precision, out_bytes=self._size if out_bytes is None else out_bytes)

    def _split(self, pieces: int) -> list[int]:
        """The tokens of a microbatch in nearly equal pieces."""
        return [self._tokens * (i + 1) // pieces - self._tokens * i // pieces for i in range(pieces)]

    def _memory(self, elements: float, bytes_per_element: float, memory_class: MemoryClass) -> MemoryBound:
        """Traffic given in bytes per element of 2-byte activations, scaled to the dtype."""
        return MemoryBound(int(elements * bytes_per_element * self._size / 2), memory_class)

    @property
    def _residual(self) -> int:
        """Elements of the residual stream on this rank."""
        return self._local_tokens * self.model.hidden

    def _full_bytes(self) -> int:
        """The residual stream of all tokens: what tensor-parallel collectives carry."""
        return self._tokens * self.model.hidden * self._size

    def _column_forward(self, body: Body, name: str, width: int) -> None:
        """[all-gather] → GEMM with a column-sharded weight."""
        plan, hidden = self.layout.plan, self.model.hidden
        if not plan.sequence_parallel:
            body.run(self._gemm(name, self._tokens, width, hidden), name)
            return
        pieces = _PIPELINE_CHUNKS if plan.overlap.tp == "pipelined" else 1
        arrivals = [body.begin("all_gather", self._full_bytes() / pieces, f"{name} input") for _ in range(pieces)]
        for arrival, tokens in zip(arrivals, self._split(pieces), strict=True):
            body.join(arrival)
            body.run(self._gemm(name, tokens, width, hidden), name)

    def _row_forward(self, body: Body, name: str, width: int) -> None:
        """GEMM with a row-sharded weight → all-reduce, or reduce-scatter with sequence parallelism."""
        plan, hidden = self.layout.plan, self.model.hidden
        pieces = _PIPELINE_CHUNKS if plan.overlap.tp == "pipelined" and plan.tp > 1 else 1
        pending = []
        for tokens in self._split(pieces):
            body.run(self._gemm(name, tokens, hidden, width), name)
            if plan.tp > 1:
                op: CollectiveOp = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
                pending.append(body.begin(op, self._full_bytes() / pieces, f"{name} output"))
        for event in pending:
            body.join(event)

    def _column_backward(self, body: Body, name: str, width: int) -> None:
        """Input and weight gradient (dgrad, wgrad); gathers the input beside the one, reduces beside the other."""
        plan, hidden = self.layout.plan, self.model.hidden
        overlap = plan.overlap.tp != "none"
        gathered = None
        if plan.sequence_parallel:
            gathered = body.begin("all_gather", self._full_bytes(), f"{name} input")
            if not overlap:
                body.join(gathered)
        body.run(self._gemm(name, self._tokens, hidden, width), f"{name} dgrad")
        reduced = None
        if plan.tp > 1:
            op: CollectiveOp = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
            reduced = body.begin(op, self._full_bytes(), f"{name} input grad")
            if not overlap:
                body.join(reduced)
        if gathered is not None and overlap:
            body.join(gathered)
        body.run(self._gemm(name, width, hidden, self._tokens, self._wgrad_bytes), f"{name} wgrad")
        if reduced is not None and overlap:
            body.join(reduced)

    def _row_backward(self, body: Body, name: str, width: int) -> None:
        """[all-gather of the output's gradient] → dgrad, wgrad."""
        hidden = self.model.hidden
        if self.layout.plan.sequence_parallel:
            body.exchange("all_gather", self._full_bytes(), f"{name} output grad")
        body.run(self._gemm(name, self._tokens, width, hidden), f"{name} dgrad")
        body.run(self._gemm(name, hidden, width, self._tokens, self._wgrad_bytes), f"{name} wgrad")

    # ---- attention core ---------------------------------------------------------------------------------------------

    def _attention(self, body: Body, window: int | None, *, backward: bool) -> None:
        heads, kv_heads = self._heads
        plan, model, seq = self.layout.plan, self.model, self.layout.seq_len
        core = Attention(
            plan.micro_batch,
            seq,
            seq,
            heads,
            kv_heads,
            model.head_dim,
            backward=backward,
            kernel=self.layout.attention,
            dtype="bf16" if self.layout.precision == "fp8" else self.layout.precision,
            window=window if window is not None and window < seq else None,
        )
        if self.layout.attention != "unfused":
            body.run(core, "attention")
            return
        # the core works on (batch · heads, seq, head_dim), so queries, keys and values are transposed before and after
        body.run(self._memory(self._tokens * self._qkv_width, 4, "elementwise"), "transpose")
        names = (
            ("PᵀdO", "dO Vᵀ", "dropout grad", "softmax grad", "dQ", "dK")
            if backward
            else ("QKᵀ", "softmax", "dropout", "PV")
        )
        for kernel, name in zip(unfused_attention(core), names, strict=True):
            if name.startswith("dropout") and not model.dropout:
                continue
            body.run(kernel, name)

    def _rope(self, body: Body) -> None:
        heads, kv_heads = self._heads
        if self.model.position == "rope":
            width = (heads + kv_heads) * self.model.head_dim
            body.run(self._memory(self._tokens * width, 4, "elementwise"), "rope")

    # ---- layer ------------------------------------------------------------------------------------------------------

    def _forward(self, body: Body, window: int | None) -> None:
        model, (heads, kv_heads) = self.model, self._heads
        add = 7 if model.dropout else 6  # read both, write the sum; dropout also writes its mask
        body.run(self._memory(self._residual, 4, "norm"), "input norm")
        self._column_forward(body, "qkv", self._qkv_width)
        if model.qk_norm:
            width = (heads + kv_heads) * model.head_dim
            body.run(self._memory(self._tokens * width, 4, "norm"), "qk norm")
        self._rope(body)
        self._attention(body, window, backward=False)
        self._row_forward(body, "attention out", heads * model.head_dim)
        if model.norms_per_layer == 4:
            body.run(self._memory(self._residual, 4, "norm"), "attention norm")
        body.run(self._memory(self._residual, add, "elementwise"), "residual")
        if model.norms_per_layer > 1:
            body.run(self._memory(self._residual, 4, "norm"), "mlp norm")
        self._column_forward(body, "mlp up", self._up_width)
        body.run(self._memory(self._tokens * self._ffn, 6 if model.gated_mlp else 4, "activation"), "activation")
        self._row_forward(body, "mlp down", self._ffn)
        if model.norms_per_layer == 4:
            body.run(self._memory(self._residual, 4, "norm"), "mlp out norm")
        body.run(self._memory(self._residual, add, "elementwise"), "residual")

    def _backward(self, body: Body, window: int | None) -> None:
        model, (heads, kv_heads) = self.model, self._heads
        for part in ("mlp", "attention"):
            if model.dropout:
                body.run(self._memory(self._residual, 5, "elementwise"), "dropout grad")
            if model.norms_per_layer == 4:
                body.run(self._memory(self._residual, 6, "norm"), f"{part} out norm grad")
            if part == "mlp":
                self._row_backward(body, "mlp down", self._ffn)
                traffic = 10 if model.gated_mlp else 6
                body.run(self._memory(self._tokens * self._ffn, traffic, "activation"), "activation grad")
                self._column_backward(body, "mlp up", self._up_width)
            else:
                self._row_backward(body, "attention out", heads * model.head_dim)
                self._attention(body, window, backward=True)
                self._rope(body)
                if model.qk_norm:
                    width = (heads + kv_heads) * model.head_dim
                    body.run(self._memory(self._tokens * width, 6, "norm"), "qk norm grad")
                self._column_backward(body, "qkv", self._qkv_width)
            if part == "attention" or model.norms_per_layer > 1:
                body.run(self._memory(self._residual, 6, "norm"), f"{part} norm grad")
            body.run(self._memory(self._residual, 6, "elementwise"), "residual grad")

    def layer(self, window: int | None, recompute: str) -> Unit:
        """One transformer layer; ``recompute`` is what its backward pass computes again."""
        forward = Body(self._group)
        self._forward(forward, window)
        backward = Body(self._group, phase="backward")
        if recompute != "none":
            backward.phase = "recompute"
            if recompute == "full":
                self._forward(backward, window)
            else:
                self._attention(backward, window, backward=False)
            backward.phase = "backward"
        self._backward(backward, window)
        kept = self._layer_activation_bytes(recompute if recompute != "full" else "none")
        return Unit(
            name="layer",
            parameters=self._layer_parameters,
            forward=forward.block("layer"),
            backward=backward.block("layer"),
            activation_bytes=self.boundary_bytes if recompute == "full" else kept,
            transient_bytes=kept if recompute == "full" else self._score_bytes if recompute == "selective" else 0,
        )

    @cached_property
    def _layer_parameters(self) -> int:
        """On this rank: matrices are sharded, norms and row-parallel biases are not."""
        model, tp = self.model, self.layout.plan.tp
        qkv = self._qkv_width * (model.hidden + model.qkv_bias)
        out = self._heads[0] * model.head_dim * model.hidden + model.out_bias * model.hidden
        mlp = (
            self._up_width * (model.hidden + model.mlp_bias) + self._ffn * model.hidden + model.mlp_bias * model.hidden
        )
        if tp == 1:
            assert (
                qkv + out + mlp + model.qk_norm * 2 * model.head_dim
                == model.attention_parameters + model.mlp_parameters
            )
        norms = model.norms_per_layer * model.norm_parameters + model.qk_norm * 2 * model.head_dim
        return qkv + out + mlp + norms

    def _layer_activation_bytes(self, recompute: str) -> int:
        """Bytes kept per layer and microbatch (Korthikanti et al. 2022, section 4.1, per tensor).

        On the residual stream: inputs of norms and of the column-parallel GEMMs, and dropout masks; these are sharded
        by sequence parallelism. In the tensor-parallel part: Q, K, V, the core's output, the MLP's inner tensors.
        Unfused attention keeps softmax output, dropout mask and dropout output per score.
        """
        model, size, (heads, _) = self.model, self._size, self._heads
        # inputs of the norms and of the two column-parallel GEMMs, and two dropout masks
        residual = self._residual * ((model.norms_per_layer + 2) * size + (2 if model.dropout else 0))
        inner = self._tokens * size * (self._qkv_width + heads * model.head_dim + self._up_width + self._ffn)
        if model.qk_norm:
            inner += self._tokens * size * (self._qkv_width - self._heads[1] * model.head_dim)
        if recompute == "none":
            inner += self._score_bytes
        if self.layout.attention != "unfused":
            inner += self._tokens * heads * 4  # log-sum-exp per query, fp32
        return residual + inner

    @cached_property
    def _score_bytes(self) -> int:
        """What unfused attention keeps per score: softmax output, and with dropout its mask and output."""
        if self.layout.attention != "unfused":
            return 0
        scores = self._tokens * self.layout.seq_len * self._heads[0]
        return scores * (self._size + ((1 + self._size) if self.model.dropout else 0))

    # ---- embedding and head -----------------------------------------------------------------------------------------

    def embedding(self) -> Unit:
        """Token (and position) lookup before the first layer."""
        model = self.model
        forward = Body(self._group)
        forward.run(self._memory(self._tokens * model.hidden, 4, "elementwise"), "embedding")
        if self.layout.plan.tp > 1:
            op: CollectiveOp = "reduce_scatter" if self.layout.plan.sequence_parallel else "all_reduce"
            forward.exchange(op, self._full_bytes(), "embedding output")
        if model.dropout:
            forward.run(self._memory(self._residual, 5, "elementwise"), "embedding dropout")
        backward = Body(self._group, phase="backward")
        if self.layout.plan.sequence_parallel:
            backward.exchange("all_gather", self._full_bytes(), "embedding grad")
        # each gradient row is read, and added into an fp32 row of the table
        backward.run(self._memory(self._tokens * model.hidden, 10, "elementwise"), "embedding grad")
        positions = model.embedding_parameters - model.vocab * model.hidden
        return Unit(
            name="embedding",
            parameters=self.vocab * model.hidden + positions,
            forward=forward.block("embedding"),
            backward=backward.block("embedding"),
            activation_bytes=self._residual if model.dropout else 0,
        )

    def head(self, *, shares_embedding: bool) -> Unit:
        """Final norm, logits and cross entropy after the last layer.

        Bytes per logit of Megatron-LM's vocab-parallel cross entropy: forward 38 (to fp32 2 + 4, maximum 4, subtract it
        4 + 4, exponential 4 + 4, sum 4, divide 4 + 4) and backward 14 (subtract the target 4 + 4, cast 4 + 2); its
        fused form takes 20 and 10.
        """
        plan, model = self.layout.plan, self.model
        logits = self._tokens * self.vocab
        fused = plan.loss_kernel == "fused"
        forward = Body(self._group)
        forward.run(self._memory(self._residual, 4, "norm"), "final norm")
        self._column_forward(forward, "head", self.vocab)
        forward.run(self._memory(logits, 20 if fused else 38, "elementwise"), "cross entropy")
        if plan.tp > 1:
            for what in ("maximum", "target logit", "sum"):
                forward.exchange("all_reduce", self._tokens * 4, f"cross entropy {what}")
        backward = Body(self._group, phase="backward")
        backward.run(self._memory(logits, 10 if fused else 14, "elementwise"), "cross entropy grad")
        self._column_backward(backward, "head", self.vocab)
        backward.run(self._memory(self._residual, 6, "norm"), "final norm grad")
        return Unit(
            name="head",
            parameters=model.final_norm_parameters + (0 if shares_embedding else self.vocab * model.hidden),
            forward=forward.block("head"),
            backward=backward.block("head"),
            # input of the norm and of the head; logits in compute precision and in fp32 until backward is done
            activation_bytes=2 * self.boundary_bytes + logits * (self._size + 4),
            transient_bytes=logits * (0 if fused else 4 + self._size),
            borrowed_parameters=self.vocab * model.hidden if shares_embedding else 0,
            tied_parameters=self.vocab * model.hidden if model.tied_embeddings and not shares_embedding else 0,
        )
