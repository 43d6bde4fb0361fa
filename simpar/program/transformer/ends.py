"""Embedding and head as units."""

from dataclasses import dataclass

from simpar.framework.framework import OperationName
from simpar.program.body import Body
from simpar.program.ir import Block, CollectiveOp
from simpar.program.transformer.bricks import Bricks, Later
from simpar.program.unit import Unit
from simpar.program.weights import kept_bytes


@dataclass(frozen=True)
class EndBuilder:
    """Builds what stands before the first layer and after the last."""

    bricks: Bricks

    def embedding(self) -> Unit:
        """Token (and position) lookup before the first layer."""
        sizes, bricks = self.bricks.sizes, self.bricks
        model, plan = sizes.model, sizes.layout.plan
        elements = sizes.tokens * model.hidden
        forward = sizes.body()
        bricks.operation(forward, "embedding", elements, "embedding", backward=False)
        if plan.tp > 1:
            op: CollectiveOp = "reduce_scatter" if plan.sequence_parallel else "all_reduce"
            forward.exchange(op, sizes.full_bytes, "embedding output")
        if model.embedding_norm:
            bricks.operation(forward, "norm", sizes.residual, "embedding norm", backward=False)
        if model.dropout:
            forward.run(bricks.traffic(sizes.residual * 5 * sizes.element_bytes / 2), "embedding dropout")
        backward = sizes.body(phase="backward")
        if model.embedding_norm:
            bricks.operation(backward, "norm", sizes.residual, "embedding norm grad", backward=True)
        if plan.sequence_parallel:
            backward.exchange("all_gather", sizes.full_bytes, "embedding grad")
        # each gradient row is read, and added into an fp32 row of the table
        bricks.operation(backward, "embedding", elements, "embedding grad", backward=True)
        gradient = backward.block("embedding")
        positions = model.embedding_parameters - model.vocab * model.hidden
        return Unit(
            name="embedding",
            parameters=sizes.vocab * model.hidden + positions,
            forward=forward.block("embedding"),
            backward=gradient,
            backward_input=sizes.body().block("embedding"),  # tokens have no gradient: all of it is the table's
            backward_weight=gradient,
            deferred_bytes=sizes.boundary_bytes,
            activation_bytes=sizes.residual if model.dropout else 0,
        )

    def head(self, *, shares_embedding: bool) -> Unit:
        """Final norm, logits and cross entropy after the last layer.

        Bytes per logit of Megatron-LM's vocab-parallel cross entropy: forward 38 (to fp32 2 + 4, maximum 4, subtract it
        4 + 4, exponential 4 + 4, sum 4, divide 4 + 4) and backward 14 (subtract the target 4 + 4, cast 4 + 2); its
        fused form takes 20 and 10.

        Memory per logit: the logits and, while these are cast, exponentiated and normalized in place, two fp32 copies
        of them (``megatron/mpu/cross_entropy.py``, torch's ``log_softmax``); the probabilities are kept for backward.
        The fused form keeps the logits and one copy.
        """
        sizes, bricks = self.bricks.sizes, self.bricks
        plan, model, size = sizes.layout.plan, sizes.model, sizes.element_bytes
        logits = sizes.tokens * sizes.vocab
        kept, transient = (size + 4, 0) if sizes.layout.loss_kernel == "fused" else (4, size + 4)
        forward = sizes.body()
        bricks.operation(forward, "norm", sizes.residual, "final norm", backward=False)
        bricks.column_forward(forward, "head", sizes.vocab)
        self._loss(forward, backward=False)
        if plan.tp > 1:
            for what in ("maximum", "target logit", "sum"):
                forward.exchange("all_reduce", sizes.tokens * 4, f"cross entropy {what}")
        later: Later = []
        table = sizes.vocab * model.hidden
        return Unit(
            name="head",
            parameters=model.final_norm_parameters + model.head_bias * sizes.vocab + (0 if shares_embedding else table),
            forward=forward.block("head"),
            backward=self._backward_block(None),
            backward_input=self._backward_block(later),
            backward_weight=bricks.weights("head", later),
            deferred_bytes=kept_bytes(later),
            activation_bytes=2 * sizes.boundary_bytes + logits * kept,
            transient_bytes=logits * transient,
            borrowed_parameters=table if shares_embedding else 0,
            tied_parameters=table if model.tied_embeddings and not shares_embedding else 0,
        )

    def _backward_block(self, later: Later | None) -> Block:
        sizes, bricks = self.bricks.sizes, self.bricks
        body = sizes.body(phase="backward")
        self._loss(body, backward=True)
        bricks.column_backward(body, "head", sizes.vocab, later)
        bricks.operation(body, "norm", sizes.residual, "final norm grad", backward=True)
        return body.block("head")

    def _loss(self, body: Body, *, backward: bool) -> None:
        sizes = self.bricks.sizes
        label = "cross entropy grad" if backward else "cross entropy"
        kind: OperationName = "fused_loss" if sizes.layout.loss_kernel == "fused" else "loss"
        self.bricks.operation(body, kind, sizes.tokens * sizes.vocab, label, backward=backward)
