"""The parts of a transformer for one rank."""

from dataclasses import dataclass
from functools import cached_property

from simpar.model.layer import LayerKind
from simpar.model.transformer import Transformer
from simpar.plan.layout import Layout
from simpar.program.transformer.bricks import Bricks
from simpar.program.transformer.ends import EndBuilder
from simpar.program.transformer.layer import LayerBuilder
from simpar.program.transformer.sizes import Sizes
from simpar.program.unit import Unit


@dataclass(frozen=True)
class TransformerParts:
    """Builds the units (embedding, layer, head) of a transformer for one rank.

    Attributes:
        model: the model.
        layout: the plan laid over it.
    """

    model: Transformer
    layout: Layout

    @cached_property
    def _bricks(self) -> Bricks:
        return Bricks(Sizes(self.model, self.layout))

    @property
    def boundary_bytes(self) -> int:
        """What a rank sends to the next stage per microbatch."""
        return self._bricks.sizes.boundary_bytes

    def layer(self, kind: LayerKind, recompute: str) -> Unit:
        """A layer of this kind; ``recompute`` is what its backward pass computes again."""
        return LayerBuilder.of(self._bricks, kind).layer(recompute)

    def embedding(self) -> Unit:
        """Token (and position) lookup before the first layer."""
        return EndBuilder(self._bricks).embedding()

    def head(self, *, shares_embedding: bool) -> Unit:
        """Final norm, logits and cross entropy after the last layer."""
        return EndBuilder(self._bricks).head(shares_embedding=shares_embedding)
