"""The bricks of layers: memory-bound operations as a framework runs them, and tensor-parallel linear layers."""

from dataclasses import dataclass, replace

from simpar.framework.framework import OperationName
from simpar.model.work import DTYPE_BYTES, DType, Gemm, GroupedGemm, MemoryBound, MemoryClass
from simpar.program.body import Body
from simpar.program.ir import Block, CollectiveOp
from simpar.program.transformer.sizes import Sizes
from simpar.program.weights import WeightGradient, weight_block

Later = list[WeightGradient]
_PIPELINE_CHUNKS = 4  # pieces into which a pipelined GEMM and its collective are cut
_CLASSES: dict[OperationName, MemoryClass] = {
    "norm": "norm",
    "qk_norm": "norm",
    "activation": "activation",
    "gated_activation": "activation",
}


@dataclass(frozen=True)
class Bricks:
    """Writes operations into bodies, at the sizes of one rank."""

    sizes: Sizes

    # ---- memory-bound operations ------------------------------------------------------------------------------------

    def operation(self, body: Body, name: OperationName, elements: float, label: str, *, backward: bool) -> None:
        """A memory-bound operation over so many elements; one without traffic only costs the host its launches."""
        one = self.sizes.layout.operation(name, backward=backward)
        if one.nbytes or one.launches:
            nbytes = int(elements * one.nbytes * self.sizes.element_bytes / 2)
            body.run(MemoryBound(nbytes, _CLASSES.get(name, "elementwise")), label, max(one.launches, 1))

    def small_kernels(self, body: Body, *, backward: bool) -> None:
        """Kernels of a layer that move next to nothing."""
        layout = self.sizes.layout
        launches = layout.launches(layout.framework.layer_launches[backward])
        if launches:
            body.run(MemoryBound(0), "small kernels", launches)

    def traffic(self, nbytes: float) -> MemoryBound:
        """A memory-bound kernel of one's own, with the framework's factor on its traffic."""
        return MemoryBound(int(nbytes * self.sizes.layout.traffic))

    def cast(self, body: Body, name: str, elements: int, what: str) -> None:
        """An input of a linear layer, or the gradient of its output, to fp8, where the framework has a kernel for that.

        Its weights are not counted (:attr:`~simpar.framework.framework.Framework.fp8_cast_bytes`).
        """
        nbytes = self.sizes.layout.framework.fp8_cast_bytes
        if nbytes and self._dtype(name) == "fp8":
            body.run(self.traffic(elements * nbytes), f"{name} {what} cast")

    # ---- products ---------------------------------------------------------------------------------------------------

    def gemm(self, name: str, m: int, n: int, k: int) -> Gemm:
        """A product of a linear layer."""
        return Gemm(m, n, k, self._dtype(name), out_bytes=self.sizes.element_bytes)

    def _dtype(self, name: str) -> DType:
        """The head and its loss stay out of fp8, and so does a router."""
        precision = self.sizes.layout.precision
        return "bf16" if precision == "fp8" and name in ("head", "router") else precision

    def weight_gradient(
        self, name: str, rows: int, columns: int, tokens: int, *, kept: int, gather: int = 0, groups: int = 0
    ) -> WeightGradient:
        """The gradient of a weight of ``rows × columns``, and its way into the accumulated gradient.

        ZeRO-3 writes it once and reduces it; otherwise it is accumulated: in place by the product (read, add, write in
        the gradient's dtype), or by a kernel of its own. With ``groups`` there is one such weight for each expert.
        """
        layout, size = self.sizes.layout, self.sizes.element_bytes
        width, add, out_bytes = DTYPE_BYTES[layout.grad_dtype], None, size
        if layout.plan.zero != 3 and layout.framework.grad_accumulation == "fused":
            out_bytes = 2 * width
        elif layout.plan.zero != 3:
            add = self.traffic(max(groups, 1) * rows * columns * (size + 2 * width))
        product = replace(self.gemm(name, rows, columns, tokens), out_bytes=out_bytes, over="k")
        if not groups:
            return WeightGradient(product, name, kept, gather, add)
        grouped = GroupedGemm(rows, columns, tokens, groups, product.dtype, out_bytes, over="k")
        return WeightGradient(grouped, name, kept, gather, add, self.expert_launches(groups))

    def expert_launches(self, groups: int) -> int:
        """Kernels that the host launches for a product over so many experts."""
        return groups if self.sizes.layout.framework.expert_launches == "each" else 1

    def _split(self, pieces: int) -> list[int]:
        """The tokens of a microbatch in nearly equal pieces."""
        tokens = self.sizes.tokens
        return [tokens * (i + 1) // pieces - tokens * i // pieces for i in range(pieces)]

    def column_forward(self, body: Body, name: str, width: int, inner: int | None = None) -> None:
        """[all-gather] → GEMM with a column-sharded weight; its input is ``inner`` wide, or the residual stream."""
        sizes = self.sizes
        plan, inner = sizes.layout.plan, inner or sizes.model.hidden
        self.cast(body, name, sizes.local_tokens * inner, "input")
        if not plan.sequence_parallel:
            body.run(self.gemm(name, sizes.tokens, width, inner), name)
            return
        pieces = _PIPELINE_CHUNKS if sizes.layout.overlap.tp == "pipelined" else 1
        nbytes = self._full_bytes(inner) / pieces
        arrivals = [body.begin("all_gather", nbytes, f"{name} input") for _ in range(pieces)]
        for arrival, tokens in zip(arrivals, self._split(pieces), strict=True):
            body.join(arrival)
            body.run(self.gemm(name, tokens, width, inner), name)

    def _full_bytes(self, width: int) -> int:
        """An activation of all tokens that is so wide."""
        return self.sizes.tokens * width * self.sizes.element_bytes

    def row_forward(self, body: Body, name: str, width: int) -> None:
        """GEMM with a row-sharded weight → all-reduce, or reduce-scatter with sequence parallelism."""
        sizes = self.sizes
        plan, hidden = sizes.layout.plan, sizes.model.hidden
        pieces = _PIPELINE_CHUNKS if sizes.layout.overlap.tp == "pipelined" and plan.tp > 1 else 1
        pending = []
        self.cast(body, name, sizes.tokens * width, "input")
        for tokens in self._split(pieces):
            body.run(self.gemm(name, tokens, hidden, width), name)
            if plan.tp > 1:
                op: CollectiveOp = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
                pending.append(body.begin(op, sizes.full_bytes / pieces, f"{name} output"))
        for event in pending:
            body.join(event)

    def column_backward(self, body: Body, name: str, width: int, later: Later | None, inner: int | None = None) -> None:
        """Input and weight gradient (dgrad, wgrad); gathers the input beside the one, reduces beside the other.

        With ``later`` the weight gradient and the gather of its input are put off to there.
        """
        sizes = self.sizes
        plan, inner = sizes.layout.plan, inner or sizes.model.hidden
        overlap = sizes.layout.overlap.tp != "none" and later is None
        gathered = None
        if plan.sequence_parallel and later is None:
            gathered = body.begin("all_gather", self._full_bytes(inner), f"{name} input")
            if not overlap:
                body.join(gathered)
        self.cast(body, name, sizes.tokens * width, "output grad")
        body.run(self.gemm(name, sizes.tokens, inner, width), f"{name} dgrad")
        reduced = None
        if plan.tp > 1:
            op: CollectiveOp = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
            reduced = body.begin(op, self._full_bytes(inner), f"{name} input grad")
            if not overlap:
                body.join(reduced)
        if gathered is not None and overlap:
            body.join(gathered)
        kept = (sizes.local_tokens * inner + sizes.tokens * width) * sizes.element_bytes
        gather = self._full_bytes(inner) if plan.sequence_parallel else 0
        gradient = self.weight_gradient(name, width, inner, sizes.tokens, kept=kept, gather=gather)
        self.now_or_later(body, gradient, later)
        if reduced is not None and overlap:
            body.join(reduced)

    def row_backward(self, body: Body, name: str, width: int, later: Later | None) -> None:
        """[all-gather of the output's gradient] → dgrad, wgrad; with ``later`` the wgrad is put off to there."""
        sizes = self.sizes
        hidden = sizes.model.hidden
        if sizes.layout.plan.sequence_parallel:
            body.exchange("all_gather", sizes.full_bytes, f"{name} output grad")
        self.cast(body, name, sizes.tokens * hidden, "output grad")
        body.run(self.gemm(name, sizes.tokens, width, hidden), f"{name} dgrad")
        # the output's gradient is kept as it was gathered
        kept = sizes.full_bytes + sizes.tokens * width * sizes.element_bytes
        self.now_or_later(body, self.weight_gradient(name, hidden, width, sizes.tokens, kept=kept), later)

    def local_forward(self, body: Body, name: str, width: int) -> None:
        """A projection of the rank's own tokens by a weight that all tensor-parallel ranks hold."""
        body.run(self.gemm(name, self.sizes.local_tokens, width, self.sizes.model.hidden), name)

    def local_backward(self, body: Body, name: str, width: int, later: Later | None) -> None:
        """Its input and weight gradient; what the ranks add up at the step's end is left out, being small."""
        sizes = self.sizes
        tokens, hidden = sizes.local_tokens, sizes.model.hidden
        body.run(self.gemm(name, tokens, hidden, width), f"{name} dgrad")
        kept = tokens * (hidden + width) * sizes.element_bytes
        self.now_or_later(body, self.weight_gradient(name, width, hidden, tokens, kept=kept), later)

    def now_or_later(self, body: Body, gradient: WeightGradient, later: Later | None) -> None:
        """Runs a weight gradient, or puts it off to ``later``."""
        if later is None:
            gradient.run(body)
        else:
            later.append(gradient)

    def weights(self, name: str, later: Later) -> Block:
        """The block of the weight gradients that were put off."""
        return weight_block(
            name, later, self.sizes.body(phase="weight_grad"), overlap=self.sizes.layout.overlap.tp != "none"
        )
