"""Bytes of model states per rank: weights, gradients, optimizer states, and what ZeRO-3 gathers.

Mixed-precision training with Adam keeps, per parameter, 2 bytes of weights, the gradient, an fp32 master copy (4) and
two fp32 moments (8); ZeRO stage 1 shards the optimizer's part, stage 2 gradients too, stage 3 weights too
(Rajbhandari et al. 2020, section 5).
"""

from simpar.model.work import DTYPE_BYTES

_MOMENTS = {"adam": 2, "momentum": 1, "sgd": 0}


def weight_bytes(precision: str) -> int:
    """Bytes per weight as compute reads it; fp8 casts from bf16 weights."""
    return max(DTYPE_BYTES[precision], 2)


def has_master(precision: str, optimizer_dtype: str) -> bool:
    """Whether the optimizer keeps a copy of the weights that is finer than what compute reads."""
    return DTYPE_BYTES[optimizer_dtype] > weight_bytes(precision)


def state_bytes(
    parameters: int,
    *,
    precision: str,
    grad_dtype: str,
    optimizer: str,
    optimizer_dtype: str,
    zero: int,
    shard: int,
    compute_gradients: bool = False,
    compute_shard: bool = False,
    offloaded: bool = False,
) -> dict[str, int]:
    """Bytes of states on one rank, by memory category.

    Args:
        parameters: parameters on the rank before ZeRO shards them.
        precision: dtype of compute.
        grad_dtype: dtype in which gradients are kept.
        optimizer: ``adam``, ``momentum`` or ``sgd``.
        optimizer_dtype: dtype of moments and master weights.
        zero: ZeRO stage.
        shard: ranks that shard.
        compute_gradients: gradients in compute precision are held beside those in ``grad_dtype``.
        compute_shard: with ZeRO-3, a shard in compute precision is held beside the master weights' (DeepSpeed).
        offloaded: master weights and moments lie on the host (:func:`host_state_bytes`), and sharded gradients go there
            as they come.

    Returns:
        Bytes of ``weights``, ``gradients`` and ``optimizer``.

    >>> state_bytes(100, precision="bf16", grad_dtype="fp32", optimizer="adam", optimizer_dtype="fp32", zero=1, shard=4)
    {'weights': 200, 'gradients': 400, 'optimizer': 300}
    """
    width = DTYPE_BYTES[optimizer_dtype]
    master = width if has_master(precision, optimizer_dtype) else 0
    moments = _MOMENTS[optimizer] * width
    weights = weight_bytes(precision)
    gradients = DTYPE_BYTES[grad_dtype] + (weight_bytes(precision) if compute_gradients else 0)
    if offloaded:
        master = moments = 0
        gradients = 0 if zero >= 2 else gradients
    elif zero == 3 and master:
        # the fp32 shard is the master copy; compute precision exists only gathered, or beside it
        weights, master = master + (weights if compute_shard else 0), 0

    def share(width: int, stage: int) -> int:
        return -(-parameters * width // (shard if zero >= stage else 1))

    return {
        "weights": share(weights, 3),
        "gradients": share(gradients, 2),
        "optimizer": share(master + moments, 1),
    }


def host_state_bytes(parameters: int, *, grad_dtype: str, optimizer: str, optimizer_dtype: str) -> int:
    """Bytes on the host for ``parameters`` parameters that it updates for a rank.

    Its own copy of the weights, whatever devices read, the moments, and the gradients that arrive. With Adam in fp32
    that is 12 bytes of states and the gradient: 14 bytes where gradients stay in fp16, as in ZeRO-Offload (Ren et al.
    2021, arXiv:2101.06840, section 3, which leaves 2 of 16 bytes on devices, the fp16 weights), 16 where they are fp32.
    """
    width = DTYPE_BYTES[optimizer_dtype]
    return parameters * (width * (1 + _MOMENTS[optimizer]) + DTYPE_BYTES[grad_dtype])


def optimizer_traffic(
    parameters: int, *, precision: str, grad_dtype: str, optimizer: str, optimizer_dtype: str, clips: bool = True
) -> dict[str, int]:
    """Bytes that the optimizer's kernels move for ``parameters`` parameters of the rank's shard, by kernel.

    An optimizer with finer master weights works on gradients of their dtype: coarser ones are cast first (Megatron-LM's
    ``_copy_model_grads_to_main_grads``). Where gradients are clipped, their norm reads them and clipping scales them in
    place; fp16 training also unscales them. The update reads them, and reads and writes moments and (master) weights; a
    master copy is cast to the weights that compute reads.
    """
    width, grad, weight = DTYPE_BYTES[optimizer_dtype], DTYPE_BYTES[grad_dtype], weight_bytes(precision)
    master = has_master(precision, optimizer_dtype)
    states = 2 * width * _MOMENTS[optimizer] + 2 * (width if master else weight)
    traffic = {}
    if master and grad < width:
        traffic["cast gradients"] = grad + width
        grad = width
    if precision == "fp16":
        traffic["unscale gradients"] = 2 * grad
    if clips:
        traffic |= {"grad norm": grad, "clip gradients": 2 * grad}
    traffic[optimizer] = grad + states
    if master:
        traffic["cast weights"] = width + weight
    return {name: nbytes * parameters for name, nbytes in traffic.items()}
