"""One transformer layer as a unit: its blocks, its parameters, what it keeps for backward."""

from dataclasses import dataclass

from simpar.model.layer import LayerKind
from simpar.program.body import Body
from simpar.program.ir import Block
from simpar.program.transformer.attention import AttentionCore
from simpar.program.transformer.bricks import Bricks, Later
from simpar.program.transformer.experts import Experts
from simpar.program.transformer.latent import LatentMixer
from simpar.program.transformer.linear import LinearMixer
from simpar.program.transformer.mlp import Mlp
from simpar.program.transformer.part import Mixer, Nothing, Part
from simpar.program.transformer.sizes import Sizes
from simpar.program.transformer.softmax import SoftmaxAttention
from simpar.program.unit import Held, Unit
from simpar.program.weights import kept_bytes


def mixer(bricks: Bricks, kind: LayerKind) -> Mixer:
    """What mixes tokens in layers of this kind."""
    if kind.attention == "linear":
        return LinearMixer(bricks)
    core = AttentionCore(bricks, kind)
    return LatentMixer(bricks, core) if kind.attention == "latent" else SoftmaxAttention(bricks, core)


def _mlp(bricks: Bricks, kind: LayerKind) -> Part:
    """What works on each token in layers of this kind."""
    if kind.mlp == "none":
        return Nothing()
    return Experts(bricks) if kind.mlp == "experts" else Mlp(bricks, bricks.sizes.model.ffn_hidden)


@dataclass(frozen=True)
class LayerBuilder:
    """Builds the layers of one kind.

    Attributes:
        bricks: of the rank.
        kind: of the layer.
        mixer: its first half.
        mlp: its second half.
    """

    bricks: Bricks
    kind: LayerKind
    mixer: Mixer
    mlp: Part

    @classmethod
    def of(cls, bricks: Bricks, kind: LayerKind) -> "LayerBuilder":
        """The builder of a kind."""
        return cls(bricks, kind, mixer(bricks, kind), _mlp(bricks, kind))

    @property
    def _sizes(self) -> Sizes:
        return self.bricks.sizes

    def layer(self, recompute: str) -> Unit:
        """One transformer layer; ``recompute`` is what its backward pass computes again."""
        sizes, held = self._sizes, self._parameters
        forward = sizes.body()
        self._forward(forward)
        later: Later = []
        kept = self._activation_bytes(recompute if recompute != "full" else "none")
        return Unit(
            name="layer",
            parameters=held.total,
            expert_parameters=held.experts,
            tensors=sizes.layout.framework.optimizer.tensors_per_layer,
            forward=forward.block("layer"),
            backward=self._backward_block(recompute, None),
            backward_input=self._backward_block(recompute, later),
            backward_weight=self.bricks.weights("layer", later),
            deferred_bytes=kept_bytes(later),
            activation_bytes=sizes.boundary_bytes if recompute == "full" else kept,
            transient_bytes=kept if recompute == "full" else self.mixer.score_bytes if recompute == "selective" else 0,
        )

    def _backward_block(self, recompute: str, later: Later | None) -> Block:
        body = self._sizes.body(phase="recompute")
        if recompute == "full":
            self._forward(body)
        elif recompute == "selective":
            self.mixer.core(body, backward=False)
        body.phase = "backward"
        self._backward(body, later)
        return body.block("layer")

    def _forward(self, body: Body) -> None:
        model, sizes, bricks = self._sizes.model, self._sizes, self.bricks
        bricks.small_kernels(body, backward=False)
        bricks.operation(body, "norm", sizes.residual, "input norm", backward=False)
        self.mixer.forward(body)
        if model.norms_per_layer == 4:
            bricks.operation(body, "norm", sizes.residual, "attention norm", backward=False)
        self._residual(body)
        if model.norms_per_layer > 1:
            bricks.operation(body, "norm", sizes.residual, "mlp norm", backward=False)
        self.mlp.forward(body)
        if model.norms_per_layer == 4:
            bricks.operation(body, "norm", sizes.residual, "mlp out norm", backward=False)
        self._residual(body)

    def _residual(self, body: Body) -> None:
        elements = self._sizes.residual
        if self._sizes.model.dropout:
            self.bricks.operation(body, "dropout", elements, "dropout", backward=False)
        self.bricks.operation(body, "residual", elements, "residual", backward=False)

    def _backward(self, body: Body, later: Later | None) -> None:
        model, sizes, bricks = self._sizes.model, self._sizes, self.bricks
        bricks.small_kernels(body, backward=True)
        halves: tuple[tuple[str, Part], ...] = (("mlp", self.mlp), ("attention", self.mixer))
        for name, part in halves:
            if model.dropout:
                bricks.operation(body, "dropout", sizes.residual, "dropout grad", backward=True)
            if model.norms_per_layer == 4:
                bricks.operation(body, "norm", sizes.residual, f"{name} out norm grad", backward=True)
            part.backward(body, later)
            if name == "attention" or model.norms_per_layer > 1:
                bricks.operation(body, "norm", sizes.residual, f"{name} norm grad", backward=True)
            bricks.operation(body, "residual", sizes.residual, "residual grad", backward=True)

    @property
    def _parameters(self) -> Held:
        """On this rank, norms included."""
        model, layout = self._sizes.model, self._sizes.layout
        norms = Held(model.norms_per_layer * model.norm_parameters)
        held = self.mixer.parameters + self.mlp.parameters + norms
        is_whole = layout.plan.tp * layout.plan.ep * layout.etp == 1
        assert not is_whole or held.total == model.layer_parameters(self.kind)
        return held

    def _activation_bytes(self, recompute: str) -> int:
        """Bytes kept per layer and microbatch (Korthikanti et al. 2022, section 4.1, per tensor).

        On the residual stream: inputs of norms and of both halves, and dropout masks; these are sharded by sequence
        parallelism. Beside it, what each half keeps.
        """
        model, sizes = self._sizes.model, self._sizes
        # inputs of the norms and of the two halves, and two dropout masks
        residual = sizes.residual * ((model.norms_per_layer + 2) * sizes.element_bytes + (2 if model.dropout else 0))
        residual += int(sizes.residual * sizes.layout.framework.extra_activations.residual)
        remade = self.mixer.score_bytes if recompute == "selective" else 0
        return residual + self.mixer.kept_bytes - remade + self.mlp.kept_bytes
