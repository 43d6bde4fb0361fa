"""Memory that collectives hold until the GPU gets to them, while the host runs ahead.

PyTorch gives the memory of a tensor that an asynchronous collective works on (``async_op=True``) to no one else before
it has seen the collective done (``Tensor.record_stream``), however early the program lets go of it. A host that waits
for nothing is as far ahead of the GPU as the driver's queue reaches, and what the collectives of so many launches read
and write is held at a time (torchtitan pull request 737; pytorch pull request 76861).
"""

from collections.abc import Iterable, Sequence

from simpar.program.ir import Block, Collective, CollectiveOp, host_launches
from simpar.program.unit import Unit

QUEUE_LAUNCHES = 1024
"""Launches that a stream takes before the host has to wait (measured: forums.developer.nvidia.com, topic 68937)."""

_ASYNCHRONOUS: dict[str, tuple[CollectiveOp, ...]] = {
    "forward": ("all_gather",),  # a reduce-scatter is waited for at once, and those hold nothing longer
    "backward": ("all_gather", "reduce_scatter"),
}


def forward_bytes(units: Sequence[Unit], passes: int) -> int:
    """What is held at the end of so many forward passes in a row."""
    return _held([_calls(unit.forward, "forward") for unit in units] * passes)


def backward_bytes(units: Sequence[Unit]) -> int:
    """What is held at most in a forward pass and the backward pass right behind it, beyond all activations.

    Backward gives back the activations of a unit as it has run, but what its collectives hold may be more than that.
    """
    calls = [_calls(unit.forward, "forward") for unit in units]
    freed, most = 0, 0
    for unit in reversed(units):
        most = max(most, _held(calls) - freed + unit.transient_bytes)
        calls.append(_calls(unit.backward, "backward"))
        freed += unit.activation_bytes
    return max(most, _held(calls) - freed)


def _calls(block: Block, phase: str) -> tuple[float, int]:
    """Bytes that its tensor-parallel collectives hold, and launches."""
    nbytes = sum(
        each.nbytes
        for each in block.body
        if isinstance(each, Collective) and each.group.stream == "tp" and each.op in _ASYNCHRONOUS[phase]
    )
    return nbytes, host_launches(block.body)


def _held(calls: Iterable[tuple[float, int]]) -> int:
    """What the last launches hold, as many as the queue takes; of a block that is partly in it, a part."""
    left, held = QUEUE_LAUNCHES, 0.0
    for nbytes, launches in reversed(list(calls)):
        if left <= 0:
            break
        held += nbytes * min(1.0, left / max(launches, 1))
        left -= launches
    return round(held)
