"""Halves of a layer: what stands between a norm and the residual addition, once for each kind."""

from typing import Protocol

from simpar.program.body import Body
from simpar.program.transformer.bricks import Later
from simpar.program.unit import Held


class Part(Protocol):
    """The mixing of tokens (attention) or the work on each of them (MLP, experts)."""

    @property
    def parameters(self) -> Held:
        """On this rank, before ZeRO shards them."""

    @property
    def kept_bytes(self) -> int:
        """What it keeps for backward beside its input."""

    def forward(self, body: Body) -> None:
        """From the normalised input to what is added to the residual stream."""

    def backward(self, body: Body, later: Later | None) -> None:
        """The same in reverse; with ``later`` weight gradients are put off to there."""


class Nothing:
    """A half that is not there."""

    parameters = Held()
    kept_bytes = 0

    def forward(self, body: Body) -> None:
        """Adds nothing."""

    def backward(self, body: Body, later: Later | None) -> None:
        """Adds nothing."""


class Mixer(Part, Protocol):
    """A part with a core that selective recomputation runs again."""

    @property
    def score_bytes(self) -> int:
        """Of what it keeps, the part that selective recomputation makes again."""

    def core(self, body: Body, *, backward: bool) -> None:
        """The core alone."""
