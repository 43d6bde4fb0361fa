"""What a GPU is asked to do, apart from how long it takes: kernels as values, their FLOP and bytes as additive work.

A kernel here is a shape, not a time; :mod:`simpar.cost.kernel` prices it once a device is chosen.
FLOP counts one multiply-add as two, as ``torch.utils.flop_counter`` does.
"""

from dataclasses import dataclass
from typing import Literal

DType = Literal["fp8", "bf16", "fp16", "tf32", "fp32"]
DTYPE_BYTES: dict[str, int] = {"fp8": 1, "bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}

AttentionKernel = Literal["unfused", "flash1", "flash2", "flash3"]
MemoryClass = Literal["elementwise", "activation", "norm"]


@dataclass(frozen=True, slots=True)
class Work:
    """FLOP done and bytes moved through device memory; adds up."""

    flop: float = 0.0
    nbytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flop + other.flop, self.nbytes + other.nbytes)

    def __mul__(self, times: float) -> "Work":
        return Work(self.flop * times, self.nbytes * times)

    __rmul__ = __mul__


@dataclass(frozen=True, slots=True)
class Gemm:
    """``batch`` products C[m, n] = A[m, k] B[k, n].

    ``out_bytes`` is the traffic per element of C: 2 for a bf16 store, 8 for a read-add-write into an fp32 accumulator.
    """

    m: int
    n: int
    k: int
    dtype: DType = "bf16"
    batch: int = 1
    out_bytes: int = 2

    @property
    def work(self) -> Work:
        """2mnk FLOP per product; operands are read once and the result is written once."""
        operands = DTYPE_BYTES[self.dtype] * (self.m * self.k + self.n * self.k)
        return Work(
            2.0 * self.batch * self.m * self.n * self.k,
            self.batch * (operands + self.out_bytes * self.m * self.n),
        )


@dataclass(frozen=True, slots=True)
class Attention:
    """The fused attention core softmax(QKᵀ)V of ``batch`` sequences, or its backward pass.

    ``window`` limits the keys a query sees (sliding-window attention); None means all of ``seq_kv``.
    """

    batch: int
    seq_q: int
    seq_kv: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    backward: bool = False
    kernel: AttentionKernel = "flash2"
    dtype: DType = "bf16"
    window: int | None = None

    @property
    def work(self) -> Work:
        """4·b·h·s_q·s_kv·d FLOP (half when causal); 2.5 times as much backward (FlashAttention-2, section 4.1)."""
        if self.window is not None and self.window < self.seq_kv:
            # the first queries of a sequence see fewer keys than the window holds
            missing = self.window**2 / 2 if self.causal and self.seq_q == self.seq_kv else 0.0
            pairs = float(self.seq_q) * self.window - missing
        else:
            pairs = self.seq_q * self.seq_kv * (0.5 if self.causal else 1.0)
        flop = 4.0 * self.batch * self.heads * pairs * self.head_dim * (2.5 if self.backward else 1.0)
        queries = 2.0 * self.batch * self.seq_q * self.heads * self.head_dim
        keys = 2.0 * self.batch * self.seq_kv * self.kv_heads * self.head_dim
        return Work(flop, DTYPE_BYTES[self.dtype] * (queries + keys) * (2.0 if self.backward else 1.0))


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """A kernel whose time is its traffic: ``nbytes`` read plus written, by class of access pattern."""

    nbytes: int
    memory_class: MemoryClass = "elementwise"

    @property
    def work(self) -> Work:
        """Traffic only; the few FLOP of an elementwise kernel never decide its time."""
        return Work(0.0, float(self.nbytes))


Kernel = Gemm | Attention | MemoryBound


def kernel_kind(kernel: Kernel) -> str:
    """The kind of a kernel, as traces name it."""
    match kernel:
        case Gemm():
            return "gemm"
        case Attention():
            return "attention"
        case MemoryBound():
            return kernel.memory_class
