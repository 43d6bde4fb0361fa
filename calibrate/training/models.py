"""The networks as torch modules, their samples and losses: the same on every rank, whatever the strategy."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from calibrate.training.recipe import Gpt, Perceptron, Recipe

Loss = Callable[[Any, Tensor], Tensor]
_SEED = 0
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Embedding(nn.Module):
    """Token and position embedding."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.tokens = nn.Embedding(gpt.vocab, gpt.hidden)
        self.positions = nn.Parameter(0.02 * torch.randn(gpt.seq_len, gpt.hidden))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens of shape (batch, sequence) to (batch, sequence, hidden)."""
        embedded: Tensor = self.tokens(tokens)
        return embedded + self.positions


class Attention(nn.Module):
    """Causal attention over however many heads the weights hold.

    The rows of ``qkv`` are ordered by head, so that a rank's share of them is the share of its heads.
    """

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.head_dim = gpt.hidden // gpt.heads
        self.qkv = nn.Linear(gpt.hidden, 3 * gpt.hidden, bias=False)
        self.out = nn.Linear(gpt.hidden, gpt.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, sequence, hidden), in and out."""
        batch, length, _ = x.shape
        query, key, value = self.qkv(x).view(batch, length, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return attended


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(gpt.hidden, bias=False)
        self.attention = Attention(gpt)
        self.mlp_norm = nn.LayerNorm(gpt.hidden, bias=False)
        self.up = nn.Linear(gpt.hidden, 4 * gpt.hidden, bias=False)
        self.down = nn.Linear(4 * gpt.hidden, gpt.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, sequence, hidden), in and out."""
        x = x + self.attention(self.attention_norm(x))
        added: Tensor = x + self.down(functional.gelu(self.up(self.mlp_norm(x))))
        return added


class Head(nn.Module):
    """Final norm and logits."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(gpt.hidden, bias=False)
        self.logits = nn.Linear(gpt.hidden, gpt.vocab, bias=False)

    def forward(self, x: Tensor) -> Any:
        """Shape (batch, sequence, hidden) to (batch, sequence, vocab); a DTensor where the logits are sharded."""
        return self.logits(self.norm(x))


def layers(recipe: Recipe, device: torch.device) -> list[nn.Module]:
    """The network's layers with equal weights on every rank; a stage takes some, the others all."""
    torch.manual_seed(_SEED)
    network, made = recipe.network, list[nn.Module]()
    if isinstance(network, Perceptron):
        for index, (inner, outer) in enumerate(zip(network.widths, network.widths[1:], strict=False)):
            linear = nn.Linear(inner, outer)
            last = index == len(network.widths) - 2
            made.append(linear if last else nn.Sequential(linear, nn.ReLU()))
    else:
        made = [Embedding(network), *(Block(network) for _ in range(network.layers)), Head(network)]
    return [layer.to(device=device, dtype=_DTYPES[recipe.dtype]) for layer in made]


def stage_layers(recipe: Recipe) -> list[range]:
    """Which layers each stage holds; a GPT's embedding is the first stage's, its head the last one's."""
    ends = 0 if isinstance(recipe.network, Perceptron) else 1
    ranges, first = [], ends
    for count in recipe.split:
        ranges.append(range(first, first + count))
        first += count
    if ends:
        ranges[0] = range(ranges[0].stop)
        ranges[-1] = range(ranges[-1].start, first + 1)
    return ranges


def samples(recipe: Recipe, replica: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one replica's step: its share of the global batch."""
    torch.manual_seed(_SEED + 1)
    count, network = recipe.batch * recipe.replicas, recipe.network
    if isinstance(network, Perceptron):
        dtype = _DTYPES[recipe.dtype]
        inputs = torch.randn(count, network.widths[0]).to(dtype)
        targets = torch.randn(count, network.widths[-1]).to(dtype)
    else:
        tokens = torch.randint(network.vocab, (count, network.seq_len + 1))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    mine = slice(replica * recipe.batch, (replica + 1) * recipe.batch)
    return inputs[mine].to(device), targets[mine].to(device)


def loss_of(recipe: Recipe) -> Loss:
    """Mean loss over the samples."""
    if isinstance(recipe.network, Perceptron):
        return functional.mse_loss
    return lambda logits, targets: functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizers(recipe: Recipe, module: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer per kind of parameter: torch's fused updates take plain tensors or DTensors, not both."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        kinds.setdefault(type(parameter.data), []).append(parameter)
    kind, options = optimizer_class(recipe)
    return [kind(parameters, **options) for parameters in kinds.values()]


def optimizer_class(recipe: Recipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Class and options of the update, so that it reads and writes each tensor once.

    Adam must be fused for that; SGD is one operator per tensor anyway, and DTensors have no fused SGD.
    """
    if recipe.optimizer == "adam":
        return torch.optim.Adam, {"lr": recipe.learning_rate, "fused": True}
    return torch.optim.SGD, {"lr": recipe.learning_rate}


def plain_step(
    module: nn.Module, loss: Loss, inputs: Tensor, targets: Tensor, updates: list[torch.optim.Optimizer]
) -> Callable[[], Tensor]:
    """Forward, backward, update: what every strategy without a pipeline does."""

    def step() -> Tensor:
        value = loss(module(inputs), targets)
        value.backward()  # type: ignore[no-untyped-call]
        for update in updates:
            update.step()
            update.zero_grad()
        return value.detach()

    return step
