"""Tensor parallelism: torch's ``parallelize_module``, as Megatron-LM shards a transformer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.training import models
from calibrate.training.recipe import Recipe


def build(recipe: Recipe, rank: int, device: torch.device) -> Callable[[], Tensor]:  # noqa: ARG001 - all ranks see all
    """A step of ``tp``; returns the loss of the whole batch.

    Columns of QKV and up projection, rows of output and down projection, rows of the embedding and columns of the
    logits are sharded, and the loss is taken over sharded logits.
    """
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow to import
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415
    from torch.distributed.tensor.parallel import (  # noqa: PLC0415
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    module = nn.Sequential(*models.layers(recipe, device))
    last = len(module) - 1
    plan: dict[str, Any] = {
        "0.tokens": RowwiseParallel(input_layouts=Replicate()),
        f"{last}.logits": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(1, last):
        plan |= {
            f"{index}.attention.qkv": ColwiseParallel(),
            f"{index}.attention.out": RowwiseParallel(),
            f"{index}.up": ColwiseParallel(),
            f"{index}.down": RowwiseParallel(),
        }
    parallelize_module(module, mesh, plan)
    inputs, targets = models.samples(recipe, 0, device)
    step = models.plain_step(module, models.loss_of(recipe), inputs, targets, models.optimizers(recipe, module))

    def sharded() -> Tensor:
        with loss_parallel():
            value: Any = step()
        whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        return whole

    return sharded
