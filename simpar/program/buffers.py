"""What ZeRO holds in full for a while, beside the states that it shards."""

from collections.abc import Sequence

from simpar.cost.memory import weight_bytes
from simpar.model.work import DTYPE_BYTES
from simpar.plan.layout import Layout
from simpar.plan.offload import offloads_optimizer
from simpar.program.unit import Unit


def buffer_bytes(units: Sequence[Unit], layout: Layout) -> int:
    """Bytes of buffers on a rank that holds these units.

    ZeRO-2: the gradients of a bucket, or of all where buckets do not overlap. ZeRO-3: the weights of two units (all of
    them where forward keeps them) and the gradients of two. Where hosts update, gradients leave even if no other rank
    shares them, and those of two buckets are there: one leaves while the next one comes.
    """
    plan, on_host = layout.plan, offloads_optimizer(layout.plan)
    is_alone = max(layout.shard, layout.expert_shard) == 1
    if plan.zero < 2 or (is_alone and not on_host):
        return 0
    width = DTYPE_BYTES[layout.grad_dtype]
    if plan.zero == 2:
        bucketed = layout.overlap.grad_reduce and not layout.buckets_first_chunk_only
        every = sum(unit.parameters for unit in units)
        return width * (min(layout.bucket_parameters * (1 + on_host), every) if bucketed else every)
    held = sorted((unit.parameters + unit.borrowed_parameters for unit in units), reverse=True)
    gathered = 0 if is_alone else sum(held[:2]) if plan.reshard_after_forward else sum(held)
    return gathered * weight_bytes(layout.precision) + sum(held[:2]) * width
