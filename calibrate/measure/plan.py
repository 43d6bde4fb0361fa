"""What to measure, as data: kernels on a designed grid, the job's own products, collectives over distinct groups."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from simpar.hardware.device import Device
from simpar.model.work import (
    DTYPE_BYTES,
    Attention,
    AttentionKernel,
    DType,
    Gemm,
    GroupedGemm,
    Kernel,
    MemoryBound,
    MemoryClass,
)
from simpar.program.ir import Instruction, Launch, Program, Run
from simpar.units import KIB, MIB, format_count

Mode = Literal["quick", "full"]

# Rows, columns and inner dimension of twelve products; scored on every measured shape of four GPUs, a fit to these
# alone comes within a point of one to thousands.
GRID = (
    (1, 512, 512), (16, 4096, 4096), (64, 8192, 8192), (1024, 4096, 4096), (2048, 4096, 1024), (4096, 4096, 512),
    (4096, 4096, 4096), (4096, 8192, 8192), (8192, 4096, 256), (8192, 4096, 4096), (8192, 1024, 8192),
    (2048, 12288, 4096),
)  # fmt: skip
_LARGEST_FLOP = max(2.0 * m * n * k for m, n, k in GRID)
_GRAIN = 32  # scaled dimensions are multiples of it: what is unaligned is another question
_SUSTAINED = 3  # so many of the largest products run long enough for the clocks to settle

# Batch, heads and sequence of attention kernels; what a GPU runs, and what a CPU gets done in 50 ms.
_ATTENTION_GPU = (
    (1, 16, 512), (4, 16, 512), (16, 16, 512), (1, 16, 1024), (4, 16, 1024), (1, 32, 2048), (4, 16, 2048),
    (1, 8, 4096), (2, 32, 4096), (1, 16, 8192), (1, 32, 8192), (1, 16, 16384),
)  # fmt: skip
_ATTENTION_CPU = ((1, 2, 64), (4, 4, 64), (1, 4, 128), (4, 4, 128), (1, 4, 256), (2, 8, 256), (1, 4, 512), (2, 4, 512))
# Rows, columns, inner dimension and experts of grouped products, and what the experts divide.
_GROUPED: Sequence[tuple[tuple[int, int, int], int, Literal["m", "k"]]] = (
    ((4096, 2048, 4096), 8, "m"), ((8192, 4096, 1536), 16, "m"), ((4096, 1536, 4096), 32, "m"),
    ((2048, 4096, 8192), 8, "k"),
)  # fmt: skip
_CLASSES: tuple[MemoryClass, ...] = ("elementwise", "activation", "norm")
_TRAFFIC_GPU = tuple(size * MIB for size in (1, 4, 32, 128, 512))
_TRAFFIC_CPU = (64 * KIB, 512 * KIB, 4 * MIB, 16 * MIB, 32 * MIB)

_OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
_IN_NODE = (4 * KIB, 256 * KIB, 4 * MIB, 32 * MIB, 512 * MIB)
_ACROSS = (4 * KIB, 128 * KIB, MIB, 16 * MIB, 128 * MIB, 1024 * MIB)
_GLOO = (KIB, 64 * KIB, MIB, 16 * MIB)
_BESIDE_GPU, _BESIDE_CPU = 64 * MIB, 4 * MIB  # streaming, not latency, as a bucket of gradients
_UPDATED_GPU, _UPDATED_CPU = 50_000_000, 1_000_000  # parameters
_ADAM_BYTES = 28  # a parameter's fp32 weight and two moments, read and written, and its gradient, read
_BETWEEN_GLOO = (4 * KIB, 256 * KIB, 4 * MIB)


@dataclass(frozen=True, slots=True)
class KernelItem:
    """A kernel that all ranks run at the same time.

    Attributes:
        kernel: shape and dtype.
        transposed: whether a product reads B as a transposed weight, as a forward pass does; None takes turns.
        burst_s: seconds that a round repeats it for.
        job: whether it is one of the job's own.
    """

    kernel: Kernel
    transposed: bool | None = False
    burst_s: float = 0.03
    job: bool = False


@dataclass(frozen=True, slots=True)
class CollectiveItem:
    """A collective, or (``sendrecv``) a message between the first two of ``ranks``.

    Attributes:
        op: operation.
        nbytes: as nccl-tests counts them.
        ranks: members.
        nodes: nodes over which they are spread evenly.
    """

    op: str
    nbytes: int
    ranks: tuple[int, ...]
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class LaunchItem:
    """The host's time for one launch."""


@dataclass(frozen=True, slots=True)
class InterferenceItem:
    """A product beside a collective, each alone and then both at once.

    Attributes:
        product: repeated by every rank.
        collective: over the largest group.
    """

    product: KernelItem
    collective: CollectiveItem


@dataclass(frozen=True, slots=True)
class UpdateItem:
    """A fused AdamW step over so many fp32 parameters."""

    parameters: int


Item: TypeAlias = KernelItem | CollectiveItem | LaunchItem | InterferenceItem | UpdateItem


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest kernels of a grid: one execution of each stays below some 25 ms.

    Attributes:
        flop: of a product or an attention kernel.
        nbytes: traffic of a memory-bound kernel, and size of a collective.
    """

    flop: float
    nbytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementPlan:
    """Items, and how often.

    Attributes:
        items: in the order of a round; each round measures each once, so that a noisy minute hits all of them.
        rounds: at most.
        least: rounds that are measured even when time runs out.
        budget_s: seconds from the command to the last round's end; a round that would not end in time does not begin.
        again_s: seconds beyond it in which classes are measured again whose rounds do not agree.
        notes: what cannot be measured here, one sentence each.
    """

    items: tuple[Item, ...]
    rounds: int
    least: int = 3
    budget_s: float = 60.0
    again_s: float = 0.0
    notes: tuple[str, ...] = ()


def make_plan(
    base: Device,
    limits: Limits,
    *,
    mode: Mode,
    cuda: bool,
    ranks: int,
    nodes: int = 1,
    job: Sequence[KernelItem] = (),
) -> MeasurementPlan:
    """What to measure on a machine.

    Args:
        base: the device; its dtypes decide which products are measured.
        limits: see :class:`Limits`.
        mode: ``quick`` or ``full``: more dtypes, head sizes, collective sizes and rounds.
        cuda: whether GPUs are measured.
        ranks: processes, over all nodes.
        nodes: nodes over which they are spread evenly.
        job: products of a job of the user's (:func:`job_products`).
    """
    full = mode == "full"
    notes = []
    dtypes = _dtypes(base, full=full, cuda=cuda)
    if "fp8" in base.gemm:
        notes.append("fp8 products were not measured: torch has no plain product of that dtype")
    kernels = [item for dtype in dtypes for item in _grid(dtype, limits, cuda=cuda, full=full)]
    kernels += _grouped(dtypes[0], limits)
    kernels += _attention(base, dtypes[0], limits, cuda=cuda, full=full)
    kernels += [
        KernelItem(MemoryBound(nbytes, memory_class))
        for memory_class in _CLASSES
        for nbytes in (_TRAFFIC_GPU if cuda else _TRAFFIC_CPU)
        if nbytes <= limits.nbytes
    ]
    known = {item.kernel for item in kernels}
    for item in job:
        reason = _cannot_run(item.kernel, base, limits)
        if reason:
            notes.append(f"the job's product {_shape(item.kernel)} was left out: {reason}")
        elif item.kernel not in known:
            known.add(item.kernel)
            kernels.append(item)
    if ranks == 1:
        notes.append("one rank has nobody to communicate with: collectives and their interference were not measured")
    collectives = _collectives(ranks, nodes, limits, cuda=cuda, full=full)
    return MeasurementPlan(
        items=(
            *kernels,
            LaunchItem(),
            UpdateItem(int(min(_UPDATED_GPU if cuda else _UPDATED_CPU, limits.nbytes / _ADAM_BYTES))),
            *collectives,
            *_interference(kernels, collectives, cuda=cuda),
        ),
        rounds=25 if full else 10,
        budget_s=300.0 if full else 60.0,
        again_s=90.0 if full else 15.0,
        notes=tuple(notes),
    )


def job_products(program: Program) -> list[KernelItem]:
    """The distinct matrix products of a program: forward, input gradients and weight gradients."""
    found: dict[Kernel, KernelItem] = {}
    for launch in _launches(instruction for rank in program.ranks for instruction in rank.instructions):
        kernel = launch.kernel
        if isinstance(kernel, Gemm) and kernel.m * kernel.n * kernel.k * kernel.batch:
            forward = launch.phase in ("forward", "recompute")
            found.setdefault(kernel, KernelItem(kernel, transposed=forward, job=True))
    return list(found.values())


def group_shapes(ranks: int, nodes: int) -> list[tuple[tuple[int, ...], int]]:
    """The distinct groups of a machine, with the number of their nodes.

    Inside a node two GPUs and all of them; across nodes all of two nodes, all of all, and one GPU of each (a rail).

    >>> group_shapes(2, 1), group_shapes(4, 1)
    ([((0, 1), 1)], [((0, 1), 1), ((0, 1, 2, 3), 1)])
    >>> group_shapes(4, 2)
    [((0, 1), 1), ((0, 2), 2), ((0, 1, 2, 3), 2)]
    """
    each = ranks // nodes
    shapes = [(tuple(range(size)), 1) for size in (2, each) if 2 <= size <= each]
    if nodes > 1:
        shapes.append((tuple(range(0, ranks, each)), nodes))
        shapes += [(tuple(range(count * each)), count) for count in (2, nodes)]
    return list(dict.fromkeys(shapes))


def _launches(instructions: Iterable[Instruction]) -> Iterator[Launch]:
    for instruction in instructions:
        if isinstance(instruction, Launch):
            yield instruction
        elif isinstance(instruction, Run):
            for block in dict.fromkeys(instruction.operation.blocks):
                yield from _launches(block.body)


def _dtypes(base: Device, *, full: bool, cuda: bool) -> list[DType]:
    order: tuple[DType, ...] = ("bf16", "fp16", "tf32") if cuda else ("fp32", "bf16")
    there = [dtype for dtype in order if dtype in base.gemm]
    return there if full else there[:1]


def _grid(dtype: DType, limits: Limits, *, cuda: bool, full: bool) -> list[KernelItem]:
    factor = min(1.0, (limits.flop / _LARGEST_FLOP) ** (1 / 3))
    shapes = [[_scaled(size, factor) for size in shape] for shape in GRID]
    products = [Gemm(m, n, k, dtype, 1, DTYPE_BYTES[dtype]) for m, n, k in shapes]
    products = list(dict.fromkeys(products))
    largest = sorted(products, key=lambda product: -product.work.flop)[:_SUSTAINED]
    sustained_s = 1.5 if full else 0.5
    # a CPU's library packs B, which takes longer one way than the other; a step has both
    items = [KernelItem(product, transposed=True if cuda else None) for product in products]
    return [replace(item, burst_s=sustained_s) if cuda and item.kernel in largest else item for item in items]


def _scaled(size: int, factor: float) -> int:
    """Small dimensions stay: they are what makes a product small, not slow."""
    return size if size <= 64 or factor == 1.0 else max(2 * _GRAIN, round(size * factor / _GRAIN) * _GRAIN)


def _grouped(dtype: DType, limits: Limits) -> list[KernelItem]:
    factor = min(1.0, (limits.flop / _LARGEST_FLOP) ** (1 / 3))
    size = DTYPE_BYTES[dtype]
    found = []
    for lengths, groups, over in _GROUPED:
        m, n, k = (_scaled(length, factor) for length in lengths)
        found.append(KernelItem(GroupedGemm(m, n, k, groups, dtype, size, over)))
    return found


def _attention(base: Device, dtype: DType, limits: Limits, *, cuda: bool, full: bool) -> list[KernelItem]:
    # torch's fused attention is FlashAttention-2 where that runs
    known = base.attention_kernel_speed
    generation: AttentionKernel = "flash2" if "flash2" in known else next(iter(known))
    sizes = (64, 128) if full else (128,) if cuda else (64,)
    kernels = [
        Attention(b, s, s, h, h, size, backward=backward, kernel=generation, dtype=dtype)
        for size in sizes
        for backward in (False, True)
        for b, h, s in (_ATTENTION_GPU if cuda else _ATTENTION_CPU)
    ]
    return [KernelItem(kernel) for kernel in kernels if kernel.work.flop <= limits.flop]


def _collectives(ranks: int, nodes: int, limits: Limits, *, cuda: bool, full: bool) -> list[CollectiveItem]:
    found = []
    for members, count in group_shapes(ranks, nodes) if ranks > 1 else ():
        sizes: Sequence[int] = _IN_NODE if count == 1 else _ACROSS
        if not cuda:
            sizes = sorted((*_GLOO, *_BETWEEN_GLOO)) if full else _GLOO
        sizes = [size for size in sizes if size <= limits.nbytes]
        found += [CollectiveItem(op, size, members, count) for op in _OPS for size in sizes]
        if len(members) == 2:
            found += [CollectiveItem("sendrecv", size, members, count) for size in sizes]
    return found


def _interference(
    kernels: Sequence[KernelItem], collectives: Sequence[CollectiveItem], *, cuda: bool
) -> list[InterferenceItem]:
    """A product of middling size beside an all-reduce over the largest group."""
    products = [item for item in kernels if isinstance(item.kernel, Gemm) and not item.job]
    reduced = [item for item in collectives if item.op == "all_reduce"]
    if not products or not reduced:
        return []
    product = sorted(products, key=lambda item: item.kernel.work.flop)[len(products) // 2]
    widest = max(reduced, key=lambda item: len(item.ranks))
    return [InterferenceItem(product, replace(widest, nbytes=_BESIDE_GPU if cuda else _BESIDE_CPU))]


def _cannot_run(kernel: Kernel, base: Device, limits: Limits) -> str:
    if isinstance(kernel, Gemm) and (kernel.dtype == "fp8" or kernel.dtype not in base.gemm):
        return f"{kernel.dtype} cannot be measured on {base.name}"
    if kernel.work.flop > 10 * limits.flop:
        return f"its {format_count(kernel.work.flop)}FLOP take too long here"
    return "" if kernel.work.nbytes <= base.memory_bytes / 8 else "it is too large for the memory"


def _shape(kernel: Kernel) -> str:
    return f"{kernel.m}×{kernel.n}×{kernel.k}" if isinstance(kernel, Gemm) else str(kernel)
