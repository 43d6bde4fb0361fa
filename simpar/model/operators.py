"""What a torch operator costs as kernels: its products as GEMMs, everything else by the bytes that it moves.

Imports torch; only :mod:`simpar.model.tracing` uses it.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simpar.errors import ModelError
from simpar.model.work import DType, Gemm, Kernel, MemoryBound, MemoryClass

_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}

# operator -> position of its left operand; the right one follows
_PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "baddbmm": 1}

# they only describe memory, or leave it uninitialised
_FREE = frozenset(
    {
        "_unsafe_view",
        "detach",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "is_same_size",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "set_",
    }
)

# operator -> argument that is not read, or only at the places that the output shows
_UNREAD = {
    "bernoulli_": 0,
    "copy_": 0,
    "exponential_": 0,
    "fill_": 0,
    "normal_": 0,
    "uniform_": 0,
    "zero_": 0,
    "new_zeros": 0,
    "new_ones": 0,
    "new_full": 0,
    "zeros_like": 0,
    "ones_like": 0,
    "full_like": 0,
    "rand_like": 0,
    "randn_like": 0,
    "embedding": 0,
    "gather": 0,
    "index": 0,
    "index_select": 0,
    "nll_loss_forward": 0,
    "nll_loss2d_forward": 0,
    "nll_loss_backward": 1,
    "nll_loss2d_backward": 1,
}
_GATHERS = frozenset({"embedding", "gather", "index", "index_select"})
_LABELLED = frozenset({"nll_loss_forward", "nll_loss2d_forward"})

_NORM_WORDS = ("norm", "softmax")
# those that compute a transcendental function; relu and its kin are plain elementwise kernels
_ACTIVATIONS = frozenset(
    {
        "celu",
        "elu",
        "gelu",
        "glu",
        "hardsigmoid",
        "hardswish",
        "log_sigmoid",
        "log_sigmoid_forward",
        "mish",
        "selu",
        "sigmoid",
        "silu",
        "softplus",
        "tanh",
    }
)


def dtype_name(dtype: torch.dtype) -> DType:
    """Our name of a torch dtype.

    Raises:
        ModelError: no device profile knows its rate.
    """
    if dtype not in _DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in _DTYPES)
        raise ModelError(
            f"products in {str(dtype).removeprefix('torch.')} cannot be priced; convert the module and its"
            f" inputs to one of {known}"
        )
    return _DTYPES[dtype]


def kernels_of(func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[Kernel, ...]:
    """Kernels of one call of an aten operator; none for views and metadata."""
    name = func._schema.name.removeprefix("aten::")
    if name in _PRODUCTS:
        left = _PRODUCTS[name]
        return (_product(args[left], args[left + 1], outputs[0]),)
    if name == "convolution":
        return (_convolution(args, outputs[0]),)
    if name == "convolution_backward":
        return _convolution_backward(args)
    if name in _FREE or _is_view(func):
        return ()
    nbytes = _moved_bytes(name, args, outputs)
    return (MemoryBound(nbytes, _memory_class(name)),) if nbytes else ()


def _is_view(func: Any) -> bool:
    aliases = (returned.alias_info for returned in func._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of distinct elements: a broadcast dimension (stride 0) is read once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride != 0)
    return math.prod(sizes) * tensor.element_size() if tensor.numel() else 0


def _moved_bytes(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
    unread = _UNREAD.get(name)
    read = sum(_read_bytes(arg) for position, arg in enumerate(args) if position != unread)
    written = sum(_nbytes(tensor) for tensor in outputs)
    if name in _GATHERS:
        read += written
    if name in _LABELLED:  # one element of each row, at its label
        read += args[1].numel() * args[0].element_size()
    return read + written


def _read_bytes(arg: Any) -> int:
    if isinstance(arg, Tensor):
        return _nbytes(arg)
    return sum(_read_bytes(item) for item in arg) if isinstance(arg, tuple | list) else 0


def _memory_class(name: str) -> MemoryClass:
    if any(word in name for word in _NORM_WORDS):
        return "norm"
    return "activation" if name.removesuffix("_").removesuffix("_backward") in _ACTIVATIONS else "elementwise"


def _product(left: Tensor, right: Tensor, out: Tensor) -> Gemm:
    m, k = left.shape[-2:]
    batch = left.shape[0] if left.dim() == 3 else 1
    return Gemm(m, right.shape[-1], k, dtype_name(left.dtype), batch, out.element_size())


def _convolution(args: Sequence[Any], out: Tensor) -> Gemm:
    """The GEMM behind im2col: (places, channels in · kernel) times (channels in · kernel, channels out)."""
    image, weight, transposed, groups = args[0], args[1], args[6], args[8]
    patch = math.prod(weight.shape[1:])
    outer = weight.shape[0] // groups
    n, k = (patch, outer) if transposed else (outer, patch)
    places = image if transposed else out
    return Gemm(_places(places), n, k, dtype_name(image.dtype), groups, out.element_size())


def _convolution_backward(args: Sequence[Any]) -> tuple[Kernel, ...]:
    """Gradients of input, weight and bias, as far as they are asked for."""
    grad, image, weight, transposed, groups, (for_input, for_weight, for_bias) = (
        *args[:3],
        args[7],
        args[9],
        args[10],
    )
    patch = math.prod(weight.shape[1:])
    outer = weight.shape[0] // groups
    places = _places(image if transposed else grad)
    dtype, size = dtype_name(image.dtype), image.element_size()
    kernels: list[Kernel] = []
    if for_input:
        n, k = (outer, patch) if transposed else (patch, outer)
        kernels.append(Gemm(places, n, k, dtype, groups, size))
    if for_weight:
        kernels.append(Gemm(outer, patch, places, dtype, groups, size))
    if for_bias:
        kernels.append(MemoryBound(_nbytes(grad) + grad.shape[1] * size))
    return tuple(kernels)


def _places(image: Tensor) -> int:
    """Images times spatial positions."""
    return image.shape[0] * math.prod(image.shape[2:])
