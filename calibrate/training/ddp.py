"""One device, DistributedDataParallel, and DistributedDataParallel with a sharded optimizer (ZeRO-1)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from calibrate.training import models
from calibrate.training.recipe import DDP_BUCKET_BYTES, Recipe


def build(recipe: Recipe, rank: int, device: torch.device) -> Callable[[], Tensor]:
    """A step of ``one``, ``dp`` or ``zero1``; returns this replica's loss."""
    module: nn.Module = nn.Sequential(*models.layers(recipe, device))
    inputs, targets = models.samples(recipe, rank, device)
    if recipe.strategy == "one":
        return models.plain_step(module, models.loss_of(recipe), inputs, targets, models.optimizers(recipe, module))
    module = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=DDP_BUCKET_BYTES / 2**20)
    if recipe.strategy == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - slow to import

        kind, options = models.optimizer_class(recipe)
        updates: list[torch.optim.Optimizer] = [ZeroRedundancyOptimizer(module.parameters(), kind, **options)]
    else:
        updates = models.optimizers(recipe, module)
    return models.plain_step(module, models.loss_of(recipe), inputs, targets, updates)
