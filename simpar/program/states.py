"""What a rank holds all the time: weights, gradients, optimizer states, and what stays beside them."""

from collections import Counter
from functools import partial

from simpar.cost.memory import host_state_bytes, state_bytes, weight_bytes
from simpar.plan.layout import Layout
from simpar.plan.offload import offloads_optimizer
from simpar.program.buffers import buffer_bytes
from simpar.program.compression import Compression
from simpar.program.operations import shard_of
from simpar.program.parameter_server import Keys
from simpar.program.periodic import outer_state_bytes
from simpar.program.position import Position
from simpar.program.unit import Held

_NOTHING = Held()


def rank_states(
    trained: Held, layout: Layout, *, frozen: Held = _NOTHING, gradients_stay: bool = False
) -> dict[str, int]:
    """Bytes of a rank's ``weights``, ``gradients`` and ``optimizer`` states, of dense and expert parameters together.

    Each kind is sharded by the plan's ZeRO stage over the ranks that share it. Where servers update, they hold the
    optimizer's states, and none are counted here.

    Args:
        trained: parameters that get a gradient, before ZeRO shards them.
        layout: the plan laid over model and cluster.
        frozen: parameters that get none, and are weights only.
        gradients_stay: even where hosts update, all gradients are on the device until the step ends.
    """
    plan, found = layout.plan, Counter[str]()
    for updated, idle, shard in (
        (trained.dense, frozen.dense, layout.shard),
        (trained.experts, frozen.experts, layout.expert_shard),
    ):
        of = partial(
            state_bytes,
            updated,
            precision=layout.precision,
            grad_dtype=layout.grad_dtype,
            optimizer=plan.optimizer,
            optimizer_dtype=plan.optimizer_dtype,
            zero=plan.zero,
            shard=shard,
            compute_gradients=layout.framework.keeps_compute_gradients,
            compute_shard=layout.framework.keeps_compute_shard,
        )
        states = of(offloaded=offloads_optimizer(plan))
        if gradients_stay:
            states["gradients"] = of()["gradients"]
        found.update(states)
        found["weights"] += -(-idle * weight_bytes(layout.precision) // (shard if plan.zero == 3 else 1))
    if layout.server is not None:
        found["optimizer"] = 0
    return dict(found)


def resident(position: Position, keys: Keys | None, context_bytes: int) -> tuple[tuple[str, int], ...]:
    """Bytes that a rank holds during the whole step, by memory category.

    Args:
        position: the rank.
        keys: what servers keep, some of them on this rank's GPU; None without servers.
        context_bytes: of the device's runtime.
    """
    layout, every, trained = position.layout, position.parameters, position.trained
    frozen = Held(every.dense - trained.dense, every.experts - trained.experts)
    found = rank_states(trained, layout, frozen=frozen, gradients_stay=position.meets_other_gradients)
    if keys is not None:
        found["optimizer"] += keys.states_beside(position.replica)
    found["optimizer"] += outer_state_bytes(layout, trained.total)
    found["gradients"] += Compression.of(layout).state_bytes(trained.total)
    found["buffers"] = buffer_bytes(position.units, layout)
    found["context"] = context_bytes
    return tuple(found.items())


def host_states(position: Position) -> int:
    """Bytes of states that the host holds for a rank; 0 where devices update."""
    layout, plan = position.layout, position.layout.plan
    if not offloads_optimizer(plan):
        return 0
    return host_state_bytes(
        shard_of(position.trained, layout),
        grad_dtype=layout.grad_dtype,
        optimizer=plan.optimizer,
        optimizer_dtype=plan.optimizer_dtype,
    )
