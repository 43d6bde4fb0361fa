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
    ``over`` is the side that counts tokens: ``m``, or for a weight gradient ``k``.
    """

    m: int
    n: int
    k: int
    dtype: DType = "bf16"
    batch: int = 1
    out_bytes: int = 2
    over: Literal["m", "k"] = "m"

    @property
    def row_lengths(self) -> tuple[int, int]:
        """Elements of the rows in memory: of weights and activations, or of the two operands of a weight gradient."""
        return (self.n, self.k) if self.over == "m" else (self.m, self.n)

    @property
    def work(self) -> Work:
        """2mnk FLOP per product; operands are read once and the result is written once."""
        operands = DTYPE_BYTES[self.dtype] * (self.m * self.k + self.n * self.k)
        return Work(
            2.0 * self.batch * self.m * self.n * self.k,
            self.batch * (operands + self.out_bytes * self.m * self.n),
        )


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """One launch of the products of ``groups`` experts, each with its own matrix and its share of the rows.

    Forward and input gradients divide the rows ``m`` of A among the groups: C[m, n] = A[m, k] B[group, k, n].
    Weight gradients (``over="k"``) divide the inner dimension, which has all rows: C[group, m, n] = A[m, k] B[k, n].
    Groups may differ in rows; work and time follow their sum. ``out_bytes`` is as in :class:`Gemm`.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: DType = "bf16"
    out_bytes: int = 2
    over: Literal["m", "k"] = "m"

    @property
    def rows(self) -> int:
        """Rows of all groups together: pairs of a token and an expert."""
        return self.m if self.over == "m" else self.k

    @property
    def active_groups(self) -> float:
        """Groups that get a row, on the mean over independent choices: G·(1 − (1 − 1/G)^rows)."""
        return self.groups * (1.0 - (1.0 - 1.0 / self.groups) ** self.rows) if self.groups else 0.0

    @property
    def matrix_bytes(self) -> float:
        """Traffic of the groups' own matrices: weights that have a row are read, gradients of all are written."""
        if self.over == "m":
            return DTYPE_BYTES[self.dtype] * self.active_groups * self.k * self.n
        return float(self.out_bytes * self.groups * self.m * self.n)

    @property
    def row_bytes(self) -> float:
        """Traffic of the rows: read and written, or read from both sides for a weight gradient."""
        size = DTYPE_BYTES[self.dtype]
        if self.over == "m":
            return float(self.m * (size * self.k + self.out_bytes * self.n))
        return float(size * self.k * (self.m + self.n))

    @property
    def work(self) -> Work:
        """2mnk FLOP, however the rows are divided; matrices and rows move once."""
        return Work(2.0 * self.m * self.n * self.k, self.matrix_bytes + self.row_bytes)


@dataclass(frozen=True, slots=True)
class Attention:
    """The fused attention core softmax(QKᵀ)V of ``batch`` sequences, or its backward pass.

    ``window`` limits the keys a query sees (sliding-window attention); None means all of ``seq_kv``.
    ``value_dim`` is the width of a value head where it differs from that of queries and keys, as in latent
    attention (MLA); None means ``head_dim``.
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
    value_dim: int | None = None

    @property
    def work(self) -> Work:
        """2·b·h·s_q·s_kv·(d + d_v) FLOP, half when causal.

        Backward does five products instead of two: QKᵀ again, dQ and dK of width d, dV and dP of width d_v, which is
        2.5 times forward where the widths are equal (FlashAttention-2, section 4.1).
        """
        if self.window is not None and self.window < self.seq_kv:
            # the first queries of a sequence see fewer keys than the window holds
            missing = self.window**2 / 2 if self.causal and self.seq_q == self.seq_kv else 0.0
            pairs = float(self.seq_q) * self.window - missing
        else:
            pairs = self.seq_q * self.seq_kv * (0.5 if self.causal else 1.0)
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        width = 3 * self.head_dim + 2 * value_dim if self.backward else self.head_dim + value_dim
        flop = 2.0 * self.batch * self.heads * pairs * width
        rows = self.batch * (self.seq_q * self.heads + self.seq_kv * self.kv_heads)
        nbytes = DTYPE_BYTES[self.dtype] * float(rows * (self.head_dim + value_dim))
        return Work(flop, nbytes * (2.0 if self.backward else 1.0))


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """A kernel whose time is its traffic: ``nbytes`` read plus written, by class of access pattern."""

    nbytes: int
    memory_class: MemoryClass = "elementwise"

    @property
    def work(self) -> Work:
        """Traffic only; the few FLOP of an elementwise kernel never decide its time."""
        return Work(0.0, float(self.nbytes))


Kernel = Gemm | GroupedGemm | Attention | MemoryBound


def kernel_kind(kernel: Kernel) -> str:
    """The kind of a kernel, as traces name it."""
    match kernel:
        case Gemm() | GroupedGemm():
            return "gemm"
        case Attention():
            return "attention"
        case MemoryBound():
            return kernel.memory_class
