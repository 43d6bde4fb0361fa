"""What an operator or a kernel of a torch profile is: its shape where recorded, its kind by name."""

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from simpar.model.work import Attention, AttentionKernel, DType, Gemm, Kernel, MemoryBound, MemoryClass

_DTYPES: dict[str, DType] = {
    "float": "fp32",
    "c10::BFloat16": "bf16",
    "c10::Half": "fp16",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8",
    "c10::Float8_e5m2fnuz": "fp8",
}
_BYTES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "int": 4,
    "long int": 8,
    "bool": 1,
    "unsigned char": 1,
}
_BYTES |= {name: 1 for name, dtype in _DTYPES.items() if dtype == "fp8"}

_NCCL_BYTES = {"float": 4, "bfloat16": 2, "half": 2, "double": 8, "long": 8, "int": 4}

GEMM_OPERANDS = {
    "aten::mm": 0,
    "aten::addmm": 1,
    "aten::bmm": 0,
    "aten::baddbmm": 1,
    "aten::_scaled_mm": 0,
    "aten::_addmm_activation": 1,
}
"""Where the two factors stand among the arguments of each product."""


class AttentionForm(NamedTuple):
    """How an operator passes the fused attention core.

    Attributes:
        query: position of the query; key and value follow.
        causal: position of the mask: a bool, or 1 for causal among kinds of masks.
        heads_first: whether tensors are (batch, heads, sequence, dim) rather than (batch, sequence, heads, dim).
        backward: whether it is the backward pass.
        kernel: generation of the algorithm.
    """

    query: int
    causal: int
    heads_first: bool
    backward: bool
    kernel: AttentionKernel = "flash2"


ATTENTION_FORMS = {
    "aten::_scaled_dot_product_flash_attention": AttentionForm(0, 4, True, False),
    "aten::_scaled_dot_product_flash_attention_backward": AttentionForm(1, 11, True, True),
    "aten::_scaled_dot_product_flash_attention_for_cpu": AttentionForm(0, 4, True, False),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": AttentionForm(1, 7, True, True),
    "aten::_scaled_dot_product_cudnn_attention": AttentionForm(0, 6, True, False),
    "aten::_scaled_dot_product_cudnn_attention_backward": AttentionForm(1, 14, True, True),
    "aten::_cudnn_attention_forward": AttentionForm(0, 10, True, False),
    "aten::_cudnn_attention_backward": AttentionForm(1, 14, True, True),
    "aten::_flash_attention_forward": AttentionForm(0, 8, False, False),
    "aten::_flash_attention_backward": AttentionForm(1, 11, False, True),
    "aten::_efficient_attention_forward": AttentionForm(0, 9, False, False),
    "aten::_efficient_attention_backward": AttentionForm(1, 14, False, True),
}
"""From the operators' schemas (aten/src/ATen/native/native_functions.yaml)."""

# Operators whose traffic their arguments tell: every tensor is read, and one of the largest size is written.
_MEMORY_BOUND: dict[str, MemoryClass] = {
    **dict.fromkeys(
        ("aten::add", "aten::add_", "aten::mul", "aten::mul_", "aten::sub", "aten::div", "aten::div_"), "elementwise"
    ),
    **dict.fromkeys(("aten::gelu", "aten::silu", "aten::relu", "aten::gelu_backward"), "activation"),
    **dict.fromkeys(("aten::silu_backward", "aten::threshold_backward"), "activation"),
    **dict.fromkeys(("aten::native_layer_norm", "aten::_fused_rms_norm"), "norm"),
    **dict.fromkeys(("aten::native_layer_norm_backward", "aten::_fused_rms_norm_backward"), "norm"),
}
# The destination is among the arguments, and only written.
_COPIES = ("aten::copy_",)

_COLLECTIVES = (
    ("all_reduce", r"all_?reduce|cross_device_reduce"),
    ("all_gather", r"all_?gather"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_to_all", r"all_?to_?all"),
    ("p2p", r"send_?recv|^send\b|^recv\b|isend|irecv|[:_](?:send|recv)\b"),
    # traces know no kind of its own for a reduction to one rank: the mirror image of a broadcast
    ("broadcast", r"broadcast|reduce"),
)
_KINDS = (
    ("optimizer", r"multi_?tensor|fused_?adam|adam|sgd|lamb|_foreach_"),
    ("attention", r"attention|attn|fmha|flash_(?:fwd|bwd)|flash::|mha_"),
    ("norm", r"norm(?!al)|softmax"),
    ("activation", r"gelu|silu|swiglu|relu|sigmoid|tanh|threshold|glu"),
    (
        "gemm",
        r"gemm|gemv|cutlass|cublas|nvjet|wgmma|xmma|cijk|split_?k|matmul|conv(?!ert)|::\w*mm(?:_activation)?$|::(?:dot|mv|addmv)$",
    ),
)
_COMMUNICATION = re.compile(
    r"nccl|rccl|gloo|mpi:|c10d|cross_device_reduce|(?:one|two)_shot_all|multimem_|custom_all_?reduce", re.IGNORECASE
)


def is_one_kernel(name: str) -> bool:
    """Whether an operator does its work as a whole, whatever operators it calls on the way."""
    return name in GEMM_OPERANDS or name in ATTENTION_FORMS or name in _MEMORY_BOUND or name in _COPIES


def kind_by_name(name: str, args: Mapping[str, Any] | None = None) -> str:
    """Kind of a span (one of ``simpar.trace.trace.KINDS``); what no rule knows counts as elementwise.

    >>> kind_by_name("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")
    'all_reduce'
    >>> kind_by_name("nvjet_tst_128x256_64x4"), kind_by_name("distribution_elementwise_grid_stride_kernel")
    ('gemm', 'elementwise')
    """
    collective = str((args or {}).get("Collective name", ""))
    if collective or _COMMUNICATION.search(name):
        for kind, pattern in _COLLECTIVES:
            if re.search(pattern, collective or name, re.IGNORECASE):
                return kind
        return "broadcast"
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "elementwise")


def communication_bytes(args: Mapping[str, Any]) -> float:
    """Bytes of a collective, as far as Kineto records them; 0 if it does not.

    NCCL's kernels carry the elements in and out, whose larger number is what nccl-tests counts. Gloo's carry the shapes
    of what a rank puts in.
    """
    dims, types = args.get("Input Dims"), args.get("Input type")
    if isinstance(dims, list) and isinstance(types, list):
        return float(sum(_BYTES.get(t, 0) * prod(d) for d, t in zip(dims, types, strict=False) if _is_shape(d)))
    element = _NCCL_BYTES.get(str(args.get("dtype")).lower(), 1)
    sizes = [args.get(key) for key in ("In msg nelems", "Out msg nelems")]
    return float(max((size for size in sizes if isinstance(size, int)), default=0) * element)


def kernel_of(name: str, args: Mapping[str, Any]) -> Kernel | None:
    """The kernel that an operator's recorded shapes describe, or None if they do not."""
    dims, types = args.get("Input Dims"), args.get("Input type", args.get("Input Types"))
    if not isinstance(dims, list) or not isinstance(types, list) or len(types) != len(dims):
        return None
    if name in GEMM_OPERANDS:
        return _gemm(dims, types, GEMM_OPERANDS[name])
    if name in ATTENTION_FORMS:
        concrete = args.get("Concrete Inputs")
        return _attention(dims, types, concrete if isinstance(concrete, list) else [], ATTENTION_FORMS[name])
    if name in _MEMORY_BOUND or name in _COPIES:
        return _memory_bound(dims, types, args.get("Input Strides"), name)
    return None


def _memory_bound(dims: Sequence[Any], types: Sequence[Any], strides: Any, name: str) -> MemoryBound | None:
    tensors = [i for i, t in enumerate(types) if t in _BYTES and _is_shape(dims[i])]
    strides = strides if isinstance(strides, list) and len(strides) == len(dims) else dims
    # a dimension with stride 0 is one element, broadcast: read once, but written as often as the result has it
    read = sum(_BYTES[types[i]] * prod(d for d, s in zip(dims[i], strides[i], strict=False) if s) for i in tensors)
    largest = max((_BYTES[types[i]] * prod(dims[i]) for i in tensors), default=0)
    if not largest:
        return None
    return MemoryBound(read + (0 if name in _COPIES else largest), _MEMORY_BOUND.get(name, "elementwise"))


def _gemm(dims: Sequence[Any], types: Sequence[Any], first: int) -> Gemm | None:
    if len(dims) < first + 2:
        return None
    left, right, dtype = dims[first], dims[first + 1], _DTYPES.get(str(types[first]))
    if dtype is None or not _is_shape(left) or not _is_shape(right):
        return None
    if len(left) != len(right) or len(left) not in (2, 3):
        return None
    batch, (m, k), n = (left[0] if len(left) == 3 else 1), left[-2:], right[-1]
    if k != right[-2] or not batch * m * n * k:
        return None
    return Gemm(m, n, k, dtype, batch, out_bytes={"fp32": 4, "tf32": 4}.get(dtype, 2))


def _attention(
    dims: Sequence[Any], types: Sequence[Any], concrete: Sequence[Any], form: AttentionForm
) -> Attention | None:
    if len(dims) <= form.query + 1 or len(concrete) <= form.causal:
        return None
    query, key, dtype = dims[form.query], dims[form.query + 1], _DTYPES.get(str(types[form.query]))
    # packed sequences of different lengths come as three dimensions, and hide their lengths
    if dtype is None or not _is_shape(query) or not _is_shape(key) or len(query) != 4 or len(key) != 4:
        return None
    heads, sequence = (1, 2) if form.heads_first else (2, 1)
    if not prod(query) * prod(key):
        return None
    return Attention(
        query[0],
        query[sequence],
        key[sequence],
        query[heads],
        key[heads],
        query[3],
        causal=str(concrete[form.causal]) in ("True", "true", "1"),
        backward=form.backward,
        kernel=form.kernel,
        dtype=dtype,
    )


def _is_shape(dims: Any) -> bool:
    return isinstance(dims, list) and all(isinstance(d, int) for d in dims)
