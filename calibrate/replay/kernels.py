"""Kernels of a program as torch calls on buffers that exist beforehand."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from calibrate.replay.adapter import Call
from simpar.model.work import DTYPE_BYTES, Attention, DType, Gemm, GroupedGemm, Kernel, MemoryBound
from simpar.program.ir import Launch
from simpar.units import MIB

if TYPE_CHECKING:
    import torch

_ROTATED = 3  # sets of buffers of one shape, used in turn, so that no kernel finds all its inputs in a cache
_SELF_EVICTING_BYTES = 64 * MIB  # a set that no cache holds needs no other to displace it
_NORM_WIDTH = 1024

Allocate = Callable[[tuple[int, ...], DType], "torch.Tensor"]


class Kernels:
    """Makes the calls of a device; launches of one shape take turns on a few sets of random buffers."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._calls: dict[tuple[Kernel, bool], Iterator[Call]] = {}

    def call(self, launch: Launch) -> Call:
        """The call of one launch."""
        kernel = launch.kernel
        # forward products read a weight (n, k) as its transpose, as nn.Linear does
        transposed = isinstance(kernel, Gemm) and launch.phase in ("forward", "recompute")
        key = (kernel, transposed)
        if key not in self._calls:
            sets = 1 if kernel.work.nbytes >= _SELF_EVICTING_BYTES else _ROTATED
            self._calls[key] = cycle([prepare(kernel, self.allocate, transposed=transposed) for _ in range(sets)])
        return next(self._calls[key])

    def allocate(self, shape: tuple[int, ...], dtype: DType = "fp32") -> "torch.Tensor":
        """Random numbers."""
        import torch  # noqa: PLC0415

        return torch.randn(shape, dtype=torch_dtype(dtype), device=self._device)


def torch_dtype(dtype: DType) -> "torch.dtype":
    """What tensors of a kernel's dtype are stored in."""
    import torch  # noqa: PLC0415

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}[dtype]


def prepare(kernel: Kernel, allocate: Allocate, *, transposed: bool = False) -> Call:
    """A call that runs the kernel on buffers of its own; ``transposed`` lets a GEMM read B as a transposed weight."""
    match kernel:
        case Gemm():
            return _gemm(kernel, allocate, transposed=transposed)
        case GroupedGemm():
            return _grouped(kernel, allocate)
        case Attention():
            return _attention(kernel, allocate)
        case MemoryBound():
            return _memory_bound(kernel, allocate)


def _gemm(kernel: Gemm, allocate: Allocate, *, transposed: bool) -> Call:
    """A product that is stored, added in place (read and write), or added into an accumulator of another dtype."""
    import torch  # noqa: PLC0415

    batch = (kernel.batch,) if kernel.batch > 1 else ()
    a = allocate((*batch, kernel.m, kernel.k), kernel.dtype)
    if transposed:
        b = allocate((*batch, kernel.n, kernel.k), kernel.dtype).transpose(-1, -2)
    else:
        b = allocate((*batch, kernel.k, kernel.n), kernel.dtype)
    c = allocate((*batch, kernel.m, kernel.n), kernel.dtype)
    size = DTYPE_BYTES[kernel.dtype]
    product = torch.bmm if batch else torch.mm
    if kernel.out_bytes < 2 * size:
        return lambda: _nothing(product(a, b, out=c))
    if kernel.out_bytes == 2 * size:
        # beta 0 would only store; alpha is small so that the sum stays finite over many steps
        add = c.baddbmm_ if batch else c.addmm_
        return lambda: _nothing(add(a, b, alpha=1e-3))
    total = allocate((*batch, kernel.m, kernel.n), "fp32")

    def accumulate() -> None:
        product(a, b, out=c)
        total.add_(c)

    return accumulate


def _grouped(kernel: GroupedGemm, allocate: Allocate) -> Call:
    """Products of equal groups in one launch, as torch's mixture-of-experts layers run them."""
    import torch  # noqa: PLC0415

    shared = kernel.rows // kernel.groups
    ends = torch.tensor([shared * (group + 1) for group in range(kernel.groups)], dtype=torch.int32)
    ends[-1] = kernel.rows  # the last group takes what does not divide
    if kernel.over == "m":
        a = allocate((kernel.m, kernel.k), kernel.dtype)
        b = allocate((kernel.groups, kernel.n, kernel.k), kernel.dtype).transpose(-1, -2)
    else:  # both sides have a row for each token
        a = allocate((kernel.k, kernel.m), kernel.dtype).transpose(-1, -2)
        b = allocate((kernel.k, kernel.n), kernel.dtype)
    ends = ends.to(a.device)
    product = partial(torch.nn.functional.grouped_mm, a, b, offs=ends)
    if kernel.out_bytes < 2 * DTYPE_BYTES[kernel.dtype]:
        return lambda: _nothing(product())
    total = torch.zeros_like(product())
    return lambda: _nothing(total.add_(product()))


def _attention(kernel: Attention, allocate: Allocate) -> Call:
    """Torch's fused attention, or the backward pass that autograd runs for it."""
    import torch  # noqa: PLC0415
    from torch.nn.functional import scaled_dot_product_attention  # noqa: PLC0415

    query = allocate((kernel.batch, kernel.heads, kernel.seq_q, kernel.head_dim), kernel.dtype)
    key, value = (
        allocate((kernel.batch, kernel.kv_heads, kernel.seq_kv, width), kernel.dtype)
        for width in (kernel.head_dim, kernel.value_dim or kernel.head_dim)
    )
    options: dict[str, Any] = {"is_causal": kernel.causal, "enable_gqa": kernel.kv_heads != kernel.heads}
    if kernel.window is not None and kernel.window < kernel.seq_kv:
        options["attn_mask"] = _window_mask(kernel, query.device)
        options["is_causal"] = False
    if not kernel.backward:
        return lambda: _nothing(scaled_dot_product_attention(query, key, value, **options))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        output = scaled_dot_product_attention(query, key, value, **options)
    gradient = torch.randn_like(output)
    return lambda: _nothing(torch.autograd.grad(output, inputs, gradient, retain_graph=True))


def _window_mask(kernel: Attention, device: "torch.device") -> "torch.Tensor":
    """True where a query sees a key: the last ``window`` keys up to its own (and as many after it if not causal)."""
    import torch  # noqa: PLC0415

    assert kernel.window is not None
    queries = torch.arange(kernel.seq_q, device=device)[:, None] + (kernel.seq_kv - kernel.seq_q)
    distance = queries - torch.arange(kernel.seq_kv, device=device)[None, :]
    return (distance < kernel.window) & (distance >= 0 if kernel.causal else distance > -kernel.window)


def _memory_bound(kernel: MemoryBound, allocate: Allocate) -> Call:
    """An operator that reads one half of the bytes and writes the other: a product, an activation, a norm."""
    import torch  # noqa: PLC0415

    source = allocate(halves(kernel), "fp32")
    if kernel.memory_class == "norm":
        return lambda: _nothing(torch.nn.functional.layer_norm(source, source.shape[-1:]))
    target = torch.empty_like(source)
    if kernel.memory_class == "activation":
        return lambda: _nothing(torch.ops.aten.silu.out(source, out=target))
    return lambda: _nothing(torch.mul(source, 0.5, out=target))


def halves(kernel: MemoryBound) -> tuple[int, ...]:
    """Shape of the fp32 tensor that is read, and of the one that is written.

    >>> halves(MemoryBound(8 * 2048)), halves(MemoryBound(8 * 2048, "norm")), halves(MemoryBound(0))
    ((2048,), (2, 1024), (1,))
    """
    elements = max(1, kernel.nbytes // (2 * DTYPE_BYTES["fp32"]))
    if kernel.memory_class != "norm":
        return (elements,)
    rows = max(1, elements // _NORM_WIDTH)
    return (rows, elements // rows)


def _nothing(result: Any) -> None:
    """Drops a kernel's result: only communication returns something that a stream must wait for."""
