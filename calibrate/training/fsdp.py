"""Fully sharded data parallelism: torch's ``fully_shard`` (FSDP2), one unit per layer."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.training import models
from calibrate.training.recipe import Recipe


def build(recipe: Recipe, rank: int, device: torch.device) -> Callable[[], Tensor]:
    """A step of ``fsdp``; returns this replica's loss."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow to import
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parts = models.layers(recipe, device)
    module = nn.Sequential(*parts)
    for part in parts:
        fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    inputs, targets = models.samples(recipe, rank, device)
    return models.plain_step(module, models.loss_of(recipe), inputs, targets, models.optimizers(recipe, module))
