"""Weight gradients that a split backward pass puts off: what they are, what they keep, and the block that runs them."""

from collections.abc import Sequence
from typing import NamedTuple

from simpar.model.work import Gemm, GroupedGemm, MemoryBound
from simpar.program.body import Body
from simpar.program.ir import Block


class WeightGradient(NamedTuple):
    """The gradient of one weight matrix, after the gradient of its layer's input.

    Attributes:
        product: input times gradient of the output, summed over tokens.
        name: of the layer.
        kept_bytes: its two operands, held until it has run.
        gathered_bytes: the gathered input, where sequence parallelism keeps a shard of it; 0 for none.
        addition: the kernel that adds it to the accumulated gradient, where the product does not.
        launches: what the host launches for the product.
    """

    product: Gemm | GroupedGemm
    name: str
    kept_bytes: int
    gathered_bytes: int = 0
    addition: MemoryBound | None = None
    launches: int = 1

    def run(self, body: Body) -> None:
        """Adds its kernels to a body."""
        body.run(self.product, f"{self.name} wgrad", self.launches)
        if self.addition is not None:
            body.run(self.addition, f"{self.name} accumulate")


def kept_bytes(gradients: Sequence[WeightGradient]) -> int:
    """What they hold together (Qi et al. 2024, arXiv:2401.10241, table 1: 32 sbh for a GPT layer)."""
    return sum(gradient.kept_bytes for gradient in gradients)


def weight_block(name: str, gradients: Sequence[WeightGradient], body: Body, *, overlap: bool) -> Block:
    """Runs them in order in ``body``; with ``overlap`` the input of the next one is gathered while one runs."""

    def gather(index: int) -> int | None:
        if index == len(gradients) or not gradients[index].gathered_bytes:
            return None
        return body.begin("all_gather", gradients[index].gathered_bytes, f"{gradients[index].name} input")

    ahead = gather(0) if overlap else None
    for index, gradient in enumerate(gradients):
        arrived, ahead = (ahead, gather(index + 1)) if overlap else (gather(index), None)
        if arrived is not None:
            body.join(arrived)
        gradient.run(body)
    return body.block(name)
