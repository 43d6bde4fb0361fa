"""Fused kernels that GPUs run but torch's meta device does not: attention, dropout, RMSNorm.

Left alone, the meta device takes these operators apart into matrix products, masks and reductions that no GPU
would run. Imports torch; only :mod:`simpar.model.tracing` uses it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simpar.model.operators import dtype_name
from simpar.model.work import Attention, Kernel, MemoryBound

Record = Callable[[Kernel], None]


class _Attention(torch.autograd.Function):
    """One kernel each way; keeps what FlashAttention keeps: inputs, output and a sum per query."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, record: Record, kernel: Attention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        record(kernel)
        out = query.new_empty(query.shape)
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        ctx.record, ctx.kernel = record, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        query, key, value, *_ = ctx.saved_tensors
        ctx.record(dataclasses.replace(ctx.kernel, backward=True))
        return None, None, torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class _RmsNorm(torch.autograd.Function):
    """One kernel each way; keeps its input and a scale per row."""

    @staticmethod
    def forward(ctx: Any, record: Record, rows: int, tensor: Tensor, weight: Tensor | None) -> Tensor:
        weight_bytes = 0 if weight is None else weight.nbytes
        record(MemoryBound(2 * tensor.nbytes + 4 * rows + weight_bytes, "norm"))
        ctx.save_for_backward(tensor, weight, tensor.new_empty(rows, dtype=torch.float32))
        ctx.record, ctx.nbytes = record, 3 * tensor.nbytes + 4 * rows + 2 * weight_bytes
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        tensor, weight, _ = ctx.saved_tensors
        ctx.record(MemoryBound(ctx.nbytes, "norm"))
        return None, None, torch.empty_like(tensor), None if weight is None else torch.empty_like(weight)


def fused_kernels(record: Record) -> Any:
    """Makes meta tensors take the fused kernels and report them to ``record`` while the library lives."""

    def attention(  # noqa: PLR0917 - torch's signature
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # fused kernels give no gradient to a mask and want values as wide as queries; others run as products
        trained_mask = attn_mask is not None and attn_mask.requires_grad
        if trained_mask or query.dim() < 3 or value.shape[-1] != query.shape[-1]:
            out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
            return out
        kernel = _attention_kernel(query, key, is_causal)
        fused: Tensor = _Attention.apply(record, kernel, query, key, value)  # type: ignore[no-untyped-call]
        return fused

    def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
        return torch.native_dropout(tensor, p, train)[0] if train and p > 0 else tensor

    def rms_norm(
        tensor: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        eps: float | None = None,  # noqa: ARG001 - torch's signature
    ) -> Tensor:
        rows = math.prod(tensor.shape[: tensor.dim() - len(normalized_shape)])
        out: Tensor = _RmsNorm.apply(record, rows, tensor, weight)  # type: ignore[no-untyped-call]
        return out

    library: Any = torch.library.Library("aten", "IMPL", "AutogradMeta")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", attention)
    library.impl("dropout", dropout)
    library.impl("rms_norm", rms_norm)
    return library


def _attention_kernel(query: Tensor, key: Tensor, causal: bool) -> Attention:
    """Sequences are all dimensions before the heads; three-dimensional tensors have one head."""
    headed = query.dim() > 3
    return Attention(
        batch=math.prod(query.shape[:-3]) if headed else query.shape[0],
        seq_q=query.shape[-2],
        seq_kv=key.shape[-2],
        heads=query.shape[-3] if headed else 1,
        kv_heads=key.shape[-3] if headed else 1,
        head_dim=query.shape[-1],
        causal=causal,
        dtype=dtype_name(query.dtype),
    )
