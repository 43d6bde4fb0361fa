"""Pipelines of torch.distributed.pipelining: GPipe and 1F1B, and replicas of a 1F1B pipeline."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from calibrate.training import models
from calibrate.training.recipe import DDP_BUCKET_BYTES, Recipe


def build(recipe: Recipe, rank: int, device: torch.device) -> Callable[[], Tensor | None]:
    """A step of ``gpipe``, ``1f1b`` or ``dp-pp``; returns this replica's loss on the last stage, None elsewhere.

    Ranks count replicas first, then stages, as :class:`simpar.plan.layout.Layout` does.
    """
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # noqa: PLC0415

    replicas, stages = recipe.replicas, recipe.stages
    stage_index, replica = divmod(rank, replicas)
    held = models.stage_layers(recipe)[stage_index]
    everything = models.layers(recipe, device)
    module: nn.Module = nn.Sequential(*(everything[i] for i in held))
    pipeline = None
    if replicas > 1:
        # every process must make all groups, in the same order
        pipelines = [dist.new_group([r + s * replicas for s in range(stages)]) for r in range(replicas)]
        rows = [dist.new_group([r + s * replicas for r in range(replicas)]) for s in range(stages)]
        pipeline = pipelines[replica]
        module = nn.parallel.DistributedDataParallel(
            module, process_group=rows[stage_index], bucket_cap_mb=DDP_BUCKET_BYTES / 2**20
        )
    stage = PipelineStage(module, stage_index, stages, device, group=pipeline)
    kind = ScheduleGPipe if recipe.strategy == "gpipe" else Schedule1F1B
    schedule = kind(stage, recipe.microbatches, loss_fn=models.loss_of(recipe))
    updates = models.optimizers(recipe, module)
    inputs, targets = models.samples(recipe, replica, device)
    first, last = stage_index == 0, stage_index == stages - 1

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        arguments = (inputs,) if first else ()
        if last:
            schedule.step(*arguments, target=targets, losses=losses)
        else:
            schedule.step(*arguments)
        for update in updates:
            update.step()
            update.zero_grad()
        return torch.stack(losses).mean() if last else None

    return step
