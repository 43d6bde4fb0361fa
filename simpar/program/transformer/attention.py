"""The softmax attention core of one rank: fused kernels, or the products and passes of the unfused one.

Between the two projections of :mod:`~simpar.program.transformer.softmax` and
:mod:`~simpar.program.transformer.latent`; with context parallelism it brings its own communication.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from simpar.cost.kernel import unfused_attention
from simpar.framework.framework import SoftmaxKernel
from simpar.model.layer import LayerKind
from simpar.model.work import Attention, MemoryBound
from simpar.program.body import Body
from simpar.program.transformer.bricks import Bricks

_UNFUSED = {
    False: ("QKᵀ", "softmax", "dropout", "PV"),
    True: ("PᵀdO", "dO Vᵀ", "dropout grad", "softmax grad", "dQ", "dK"),
}


@dataclass(frozen=True)
class AttentionCore:
    """Writes softmax(QKᵀ)V.

    Attributes:
        bricks: of the rank.
        kind: of the layer, which decides what a query sees.
    """

    bricks: Bricks
    kind: LayerKind

    def run(self, body: Body, *, backward: bool) -> None:
        """The core, with the copies that bring its operands into shape."""
        sizes = self.bricks.sizes
        self.bricks.operation(body, "transpose", sizes.tokens * sizes.qkv_width, "transpose", backward=backward)
        if sizes.layout.plan.cp == 1:
            for kernel in self._sequences(self._kernel(backward=backward)):
                self._run(body, kernel)
        elif sizes.layout.plan.cp_method == "ring":
            self._ring(body, backward=backward)
        elif sizes.layout.plan.cp_method == "all_gather":
            self._gathered(body, backward=backward)
        else:
            self._traded(body, backward=backward)

    @cached_property
    def score_bytes(self) -> int:
        """What the unfused core keeps per score: softmax output, and with dropout its mask and output.

        Separate kernels keep theirs in fp32, and what they cast it to for the product, unless dropout is between.
        """
        sizes = self.bricks.sizes
        if sizes.layout.attention != "unfused":
            return 0
        scores = sizes.tokens * sizes.layout.seq_len * sizes.heads[0]
        apart = self._separate_softmax(self._kernel(backward=False))
        softmax = sizes.element_bytes if apart is None else apart.kept
        entering = 1 + sizes.element_bytes if sizes.model.dropout else 0 if apart is None else sizes.element_bytes
        return round(scores * (softmax + entering))

    @cached_property
    def kept_bytes(self) -> int:
        """Queries, keys, values and the output; per query the logarithm of its sum in fp32, or the unfused scores."""
        sizes = self.bricks.sizes
        tensors = sizes.tokens * sizes.element_bytes * (sizes.qkv_width + sizes.out_width)
        sums = sizes.tokens * sizes.heads[0] * 4 if sizes.layout.attention != "unfused" else 0
        return tensors + sums + self.score_bytes

    def _kernel(self, *, backward: bool) -> Attention:
        """All heads of the rank over whole sequences, without a window."""
        sizes, layout = self.bricks.sizes, self.bricks.sizes.layout
        heads, kv_heads = sizes.heads
        model = sizes.model
        return Attention(
            layout.plan.micro_batch,
            layout.seq_len,
            layout.seq_len,
            heads,
            kv_heads,
            model.head_dim,
            backward=backward,
            kernel=layout.attention,
            dtype="bf16" if layout.precision == "fp8" else layout.precision,
            value_dim=None if model.value_dim == model.head_dim else model.value_dim,
        )

    @cached_property
    def _window(self) -> int | None:
        """Keys that a query sees, where these are fewer than a sequence has."""
        window = self.kind.window
        return window if window is not None and window < self.bricks.sizes.layout.seq_len else None

    def _sequences(self, whole: Attention) -> tuple[Attention, ...]:
        """Whole sequences under the layer's window: a chunked one cuts them into shorter sequences."""
        window = self._window
        if window is None or not self.kind.chunked:
            return (replace(whole, window=window),)
        count, rest = divmod(whole.seq_q, window)
        chunks = replace(whole, batch=whole.batch * count, seq_q=window, seq_kv=window)
        return (chunks, replace(whole, seq_q=rest, seq_kv=rest)) if rest else (chunks,)

    def _run(self, body: Body, core: Attention) -> None:
        layout = self.bricks.sizes.layout
        if layout.attention != "unfused":
            body.run(core, "attention", layout.framework.attention_launches[core.backward])
            return
        apart = self._separate_softmax(core)
        for kernel, name in zip(unfused_attention(core), _UNFUSED[core.backward], strict=True):
            if name.startswith("dropout") and not self.bricks.sizes.model.dropout:
                continue
            if name.startswith("softmax") and apart is not None:
                each = apart.otherwise.backward if core.backward else apart.otherwise.forward
                scores = core.batch * core.heads * core.seq_q * core.seq_kv
                body.run(self.bricks.traffic(round(each.nbytes * scores)), name, each.launches)
                continue
            body.run(self.bricks.traffic(kernel.nbytes) if isinstance(kernel, MemoryBound) else kernel, name)

    def _separate_softmax(self, core: Attention) -> SoftmaxKernel | None:
        """The fused softmax that does not take these scores; None if there is one that does."""
        fused = self.bricks.sizes.layout.framework.softmax_kernel
        return None if fused is None or fused.takes(core.batch * core.heads, core.seq_kv) else fused

    # ---- context parallelism ----------------------------------------------------------------------------------------

    def _pieces(self, *, backward: bool) -> tuple[Attention, ...]:
        """What a rank computes of a zigzag-dealt sequence: its own causal part, and its part with each other rank.

        With 2·cp pieces, rank r holds r and 2·cp - 1 - r. Against any other rank half of the pairs lie below the
        diagonal, whole pieces of them: as many queries against half the keys, or half against all (Brandon et al.
        2023). Of a layer with a window a rank computes what its queries see (the mean of a chunk, in chunked layers),
        spread evenly over the steps; the corner that the sequence's beginning lacks belongs to one rank only.
        """
        layout, cp = self.bricks.sizes.layout, self.bricks.sizes.layout.plan.cp
        whole = self._kernel(backward=backward)
        seq = layout.seq_len // cp
        if self._window is None:
            other = replace(whole, seq_q=seq, seq_kv=seq // 2, causal=False)
            return replace(whole, seq_q=seq, seq_kv=seq), *((other,) * (cp - 1))
        lengths = [seq * (step + 1) // cp - seq * step // cp for step in range(cp)]
        if self.kind.chunked:
            mean = max(self._window // 2, 1)
            return tuple(replace(whole, seq_q=n, seq_kv=mean, causal=False) for n in lengths)
        return tuple(replace(whole, seq_q=n, window=self._window) for n in lengths)

    @cached_property
    def _kv_bytes(self) -> int:
        """Keys and values of the tokens of a rank."""
        sizes = self.bricks.sizes
        width = sizes.model.head_dim + sizes.model.value_dim
        return sizes.tokens * sizes.heads[1] * width * sizes.element_bytes

    def _ring(self, body: Body, *, backward: bool) -> None:
        """Keys and values go around beside attention with those of the rank before; backward with their gradient."""
        cp = self.bricks.sizes.layout.plan.cp
        own, *others = self._pieces(backward=backward)
        nbytes = self._kv_bytes * (2 if backward else 1)
        arriving = body.begin("shift", nbytes, "keys and values", "cp")
        self._run(body, own)
        for step, other in enumerate(others, 1):
            body.join(arriving)
            if step < cp - 1:
                arriving = body.begin("shift", nbytes, "keys and values", "cp")
            self._run(body, other)
        if backward:  # the gradient's last step home
            body.exchange("shift", self._kv_bytes, "key and value grad", "cp")

    def _gathered(self, body: Body, *, backward: bool) -> None:
        """Keys and values of all ranks are gathered first; backward reduces their gradient."""
        cp = self.bricks.sizes.layout.plan.cp
        own, *others = self._pieces(backward=backward)
        body.exchange("all_gather", self._kv_bytes * cp, "keys and values", "cp")
        if self._window is None:
            self._run(body, own)
            self._run(body, replace(others[0], seq_kv=others[0].seq_kv * len(others)))
        else:
            self._run(body, replace(own, seq_q=own.seq_q + sum(other.seq_q for other in others)))
        if backward:
            body.exchange("reduce_scatter", self._kv_bytes * cp, "key and value grad", "cp")

    def _traded(self, body: Body, *, backward: bool) -> None:
        """Ulysses: each rank trades its part of the sequence for whole sequences of its part of the heads."""
        sizes, cp = self.bricks.sizes, self.bricks.sizes.layout.plan.cp
        whole = self._kernel(backward=backward)
        qkv = sizes.tokens * sizes.qkv_width * sizes.element_bytes
        out = sizes.tokens * sizes.out_width * sizes.element_bytes
        before, after = (out, qkv) if backward else (qkv, out)
        body.exchange("all_to_all", before, "sequence for heads", "cp")
        share = replace(whole, heads=whole.heads // cp, kv_heads=max(1, whole.kv_heads // cp))
        for kernel in self._sequences(share):
            self._run(body, kernel)
        body.exchange("all_to_all", after, "heads for sequence", "cp")
