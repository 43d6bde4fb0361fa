"""What to train, as a value: network, batch, optimizer, strategy."""

from dataclasses import dataclass
from typing import Literal

from simpar.errors import SimparError

Strategy = Literal["one", "dp", "zero1", "fsdp", "tp", "gpipe", "1f1b", "dp-pp"]
STRATEGIES: tuple[Strategy, ...] = ("one", "dp", "zero1", "fsdp", "tp", "gpipe", "1f1b", "dp-pp")

TrainingDType = Literal["fp32", "bf16"]
OptimizerName = Literal["sgd", "adam"]

DDP_BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's ``bucket_cap_mb`` of 25 MiB."""


class TrainingError(SimparError):
    """A training step that cannot run here, or failed; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Perceptron:
    """Linear layers with bias and ReLU between them; mean squared error.

    Attributes:
        widths: from input to output.
    """

    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt:
    """A GPT without biases in its products: learned positions, LayerNorm before each part, GELU, cross entropy."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training step.

    Attributes:
        network: what is trained.
        strategy: how it is spread; ``one`` is one process, ``dp-pp`` replicates a pipeline of two stages.
        ranks: processes.
        micro_batch: samples per microbatch and replica.
        microbatches: of a replica's step; only pipelines take more than one.
        optimizer: update rule.
        learning_rate: of the update.
        dtype: of parameters and activations.
    """

    network: Perceptron | Gpt
    strategy: Strategy
    ranks: int
    micro_batch: int
    microbatches: int = 1
    optimizer: OptimizerName = "sgd"
    learning_rate: float = 0.01
    dtype: TrainingDType = "fp32"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise TrainingError(f"unknown strategy '{self.strategy}'; choose one of {', '.join(STRATEGIES)}")
        if (self.ranks == 1) != (self.strategy == "one"):
            raise TrainingError(
                f"strategy '{self.strategy}' does not run on {self.ranks} rank(s); 'one' takes one, all others several"
            )
        if self.microbatches > 1 and not self.pipelined:
            raise TrainingError(
                f"{self.microbatches} microbatches need a pipeline, which '{self.strategy}' is not; set microbatches=1"
            )
        if self.strategy == "tp" and isinstance(self.network, Perceptron):
            raise TrainingError("strategy 'tp' splits a transformer's heads, which a perceptron has none of; use a Gpt")
        if self.strategy == "dp-pp" and self.ranks % 2:
            raise TrainingError(f"'dp-pp' has two stages, but {self.ranks} ranks are odd; use an even number")
        if 0 in self.split:
            raise TrainingError(f"{sum(self.split)} layers do not fill {self.stages} stages; use fewer ranks")

    @property
    def pipelined(self) -> bool:
        """Whether the layers are split over stages."""
        return self.strategy in ("gpipe", "1f1b", "dp-pp")

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return {"gpipe": self.ranks, "1f1b": self.ranks, "dp-pp": 2}.get(self.strategy, 1)

    @property
    def replicas(self) -> int:
        """Data-parallel degree."""
        if self.strategy == "tp":
            return 1
        return self.ranks // self.stages

    @property
    def split(self) -> tuple[int, ...]:
        """How many of a perceptron's layers, or of a GPT's blocks, each stage holds; the first ones have the rest."""
        network = self.network
        count = network.layers if isinstance(network, Gpt) else len(network.widths) - 1
        return tuple(count // self.stages + (stage < count % self.stages) for stage in range(self.stages))

    @property
    def batch(self) -> int:
        """Samples of one replica's step."""
        return self.micro_batch * self.microbatches
