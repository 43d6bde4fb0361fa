"""Times of single kernels on a device: closed forms in the device's fitted parameters.

The times are the device's own; the host's launch (``Device.launch_s``) is not in them. The forms were chosen
on measured tables of five GPUs, where they meet the spread between two collections on the same model of GPU
(5-6 % for training-sized products, 6-7 % for attention forward).

No table has sizes that are no multiple of 8: what such products lose (``Device.unaligned_gemm_speed``) was derived
from whole steps, on A100 only. That, and what a device or dtype without measurements of its own does,
:func:`extrapolated` names. Nor does any term know matrices that fit the L2 cache.
"""

from dataclasses import replace
from functools import lru_cache
from math import ceil

from simpar.cost.error import log_sd
from simpar.errors import ClusterError
from simpar.hardware.device import AttentionFit, Device
from simpar.model.work import DTYPE_BYTES, Attention, Gemm, GroupedGemm, Kernel, MemoryBound

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
_SPLITS = (1, 2, 4)
_VECTOR_BYTES = 16  # what a thread loads at once, if a row is a multiple of it
_CACHED_BYTES = 30e6  # the memory-bound efficiencies were read off larger buffers; smaller ones may stay in L2
_DECODE_ROWS = 256  # up to so many rows a product belongs to the region whose errors are listed as ``decode``
_UNKNOWN_ERROR = 0.25  # assumed where a device brings no error statistics
_EXTRAPOLATION = 2.0  # assumed: how much wider the error is outside the fitted region


def kernel_s(kernel: Kernel, device: Device) -> float:
    """Seconds that ``kernel`` occupies the compute stream of ``device``, without the host's launch.

    ``Attention(kernel="unfused")`` costs the sum of the kernels of :func:`unfused_attention`; whoever counts
    launches should emit those kernels instead.

    Raises:
        ClusterError: the device lacks the kernel's dtype or attention generation.
    """
    if isinstance(kernel, Gemm):
        return gemm_s(kernel, device)
    if isinstance(kernel, GroupedGemm):
        return grouped_gemm_s(kernel, device)
    if isinstance(kernel, MemoryBound):
        return memory_bound_s(kernel, device)
    return attention_s(kernel, device)


def runnable(kernel: Kernel, device: Device) -> Kernel:
    """The kernel, or where ranks are of several kinds, the fastest generation of it that this device has."""
    if isinstance(kernel, Attention) and kernel.kernel not in ("unfused", *device.attention_kernel_speed):
        return replace(kernel, kernel=device.fastest_attention)
    return kernel


def gemm_s(kernel: Gemm, device: Device, *, quantize: bool = False) -> float:
    """Seconds of ``batch`` products C[m, n] = A[m, k] B[k, n]: compute and traffic in a 3-norm.

    compute = 2·m·n·(k + k0) / (P·e) · Q^q · sustained slowdown, traffic = bytes / (W·b),
    t = t0 + (compute³ + traffic³)^⅓, with datasheet peak P and bandwidth W, efficiencies e and b, and
    :func:`wave_factor` Q. The products of a batch form one grid of batch·m rows. Where rows are no multiple of
    16 bytes, compute is divided by ``Device.unaligned_gemm_speed``. Chosen among 13 forms and 9 learned
    models on bf16 points of five GPUs from NVIDIA aiconfigurator-core 0.12.0 (9-36 thousand a GPU).
    The sustained slowdown touches only the compute term, since power limits the core's clock.

    Args:
        kernel: shape and dtype.
        device: where it runs.
        quantize: for fp8, whether the kernel quantises A itself, as serving engines do (measured so). In
            training the cast is fused into the kernel before, so by default the quantise traffic is left out
            and the overhead is bf16's.

    Raises:
        ClusterError: the device does not compute in the kernel's dtype.
    """
    fit = device.gemm_fit(kernel.dtype)
    m, n, k, batch = kernel.m, kernel.n, kernel.k, kernel.batch
    if not m * n * k * batch:
        return fit.overhead_s  # an empty product, such as an expert without tokens
    results = batch * m * n
    compute = 2.0 * results * (k + fit.k0) / (device.peak(kernel.dtype) * fit.peak_efficiency)
    compute *= device.sustained_slowdown
    if fit.wave_exponent:
        compute *= wave_factor(batch * m, n, k, device.sms) ** fit.wave_exponent
    compute *= unaligned_factor(kernel, device)
    nbytes = DTYPE_BYTES[kernel.dtype] * batch * k * (m + n) + kernel.out_bytes * results
    traffic = nbytes / (device.memory_bytes_per_s * fit.bandwidth_efficiency)
    overhead = fit.overhead_s
    if kernel.dtype == "fp8":
        if quantize:
            overhead += fit.quantize_bytes * batch * m * k / device.memory_bytes_per_s
        elif "bf16" in device.gemm:
            overhead = device.gemm["bf16"].overhead_s
    return float(overhead + (compute * compute * compute + traffic * traffic * traffic) ** (1 / 3))


def grouped_gemm_s(kernel: GroupedGemm, device: Device) -> float:
    """Seconds of one launch over the matrices of several experts.

    t = t0 + (compute³ + matrices³)^⅓ + rows: compute as in :func:`gemm_s` over all rows together, the traffic of the
    experts' matrices (those without a row are not read) and that of the rows, both at a plain product's bandwidth. The
    form is the one that fits fused MoE kernels (NVIDIA aiconfigurator-core 0.12.0, TensorRT-LLM CUTLASS, four GPUs,
    median error 3-7 %): rows cost extra instead of hiding behind compute, without which errors are 20-47 %, and
    rounding every group up to whole tiles adds nothing.

    Those kernels include permutation and activation, which are launches of their own here, and no public table has the
    products alone; so efficiencies are the plain product's, times ``Device.grouped_gemm_speed``. The launches of a
    layer then take 0.95-1.4 times (median 1.1-1.2) the table's fused time on Hopper and Blackwell, where it computes
    at 1.05-1.15 of the dense peak in short bursts; training steps are slower than the table, not faster.

    Raises:
        ClusterError: the device does not compute in the kernel's dtype.
    """
    fit = device.gemm_fit(kernel.dtype)
    m, n, k, groups = kernel.m, kernel.n, kernel.k, kernel.groups
    if not m * n * k * groups:
        return fit.overhead_s  # no token chose an expert of this rank
    inner = k + fit.k0 * (groups if kernel.over == "k" else 1)
    compute = 2.0 * m * n * inner / (device.peak(kernel.dtype) * fit.peak_efficiency * device.grouped_gemm_speed)
    compute *= device.sustained_slowdown
    if fit.wave_exponent:
        grid = (m, n, k) if kernel.over == "m" else (groups * m, n, ceil(k / groups))
        compute *= wave_factor(*grid, device.sms) ** fit.wave_exponent
    bandwidth = device.memory_bytes_per_s * fit.bandwidth_efficiency
    matrices, rows = kernel.matrix_bytes / bandwidth, kernel.row_bytes / bandwidth
    overhead = fit.overhead_s
    if kernel.dtype == "fp8" and "bf16" in device.gemm:
        overhead = device.gemm["bf16"].overhead_s  # as in gemm_s: the fp8 fit's includes the quantisation
    return float(overhead + (compute * compute * compute + matrices * matrices * matrices) ** (1 / 3) + rows)


def unaligned_factor(kernel: Gemm, device: Device) -> float:
    """How much longer a product of 2-byte elements computes because its rows are no multiple of 16 bytes."""
    speed = device.unaligned_gemm_speed
    if speed is None or DTYPE_BYTES[kernel.dtype] != 2 or _is_aligned(kernel):
        return 1.0
    return 1.0 / (speed.batched if kernel.batch > 1 else speed.plain)


@lru_cache(maxsize=1 << 16)
def wave_factor(m: int, n: int, k: int, sms: int) -> float:
    """Time of a tiled product over that of a perfectly divisible one: about 1 or more.

    The best of six tile sizes and split-K of 1, 2 or 4, as cuBLAS chooses: rounded-up waves of tiles times
    what smaller tiles (exponent 0.13) and split accumulation (150 steps of k each) lose. Worth it on Ampere
    only; Hopper's kernels hide it. Values of this pure function of integers are kept; one costs some 10 µs.

    >>> round(wave_factor(108 * 256, 128, 4096, 108), 6)
    1.0
    """
    best = float("inf")
    for rows, columns in _TILES:
        tiles = ceil(m / rows) * ceil(n / columns)
        tile_cost = rows * columns / (rows * columns / 32768.0) ** 0.13
        for split in _SPLITS:
            waves = ceil(tiles * split / sms)
            cost = waves * sms * tile_cost / split * (k + 150.0 * split) / (k + 150.0)
            best = min(best, cost)
    return best / (m * n)


def attention_s(kernel: Attention, device: Device) -> float:
    """Seconds of the attention core: compute at the head size's efficiency plus traffic plus an overhead.

    forward = t0 + [F / (P·e) · (1 + c·128·SM / (b·h·s_q)) · sustained slowdown + bytes / (W·w)] / v, where c
    charges too few query blocks for the multiprocessors and v is the kernel generation's speed relative to
    the fitted one. F comes from ``kernel.work``, so causal masks and windows count only the scores that are
    computed. Backward = 2.5 F at r·e and 6 times the traffic (Dao 2023, section 4.1; r from published times).
    Fitted to causal bf16 prefill of NVIDIA aiconfigurator-core 0.12.0. A head size without a fit uses the
    nearest one with its own work, which scales all but t0 by the ratio of sizes; other dtypes use the same
    efficiency of their own peak.

    Raises:
        ClusterError: the device lacks the kernel's dtype or attention generation.
    """
    if kernel.kernel == "unfused":
        return sum((kernel_s(part, device) for part in unfused_attention(kernel)), 0.0)
    speed = device.attention_kernel_speed.get(kernel.kernel)
    if speed is None:
        known = ", ".join(device.attention_kernel_speed)
        raise ClusterError(
            f"attention kernel '{kernel.kernel}' does not run on device '{device.name}' (it has {known}); "
            f"use {list(device.attention_kernel_speed)[-1]} or unfused instead"
        )
    fit = _attention_fit(kernel.head_dim, device)
    queries = kernel.batch * kernel.heads * kernel.seq_q
    if not queries * kernel.seq_kv:
        return fit.overhead_s
    work = replace(kernel, backward=False).work
    compute = work.flop / (device.peak(kernel.dtype) * fit.efficiency) * device.sustained_slowdown
    compute *= 1.0 + fit.parallelism * 128.0 * device.sms / queries
    traffic = work.nbytes / (device.memory_bytes_per_s * fit.bandwidth_efficiency)
    if kernel.backward:
        ratios = device.attention_backward
        # the fitted factor is that of equal widths; latent attention has wider queries and keys than values
        flop_factor = ratios.flop_factor / 2.5 * (kernel.work.flop / work.flop)
        compute *= flop_factor / ratios.efficiency_ratio[_nearest(kernel.head_dim, ratios.efficiency_ratio)]
        traffic *= ratios.linear_ratio
    return fit.overhead_s + (compute + traffic) / speed


def memory_bound_s(kernel: MemoryBound, device: Device) -> float:
    """Seconds of a kernel bound by its traffic: t0 + bytes / (W·b), with b by access pattern."""
    fit = device.memory_bound[kernel.memory_class]
    return fit.overhead_s + kernel.nbytes / (device.memory_bytes_per_s * fit.bandwidth_efficiency)


def unfused_attention(kernel: Attention) -> tuple[Kernel, ...]:
    """The kernels that unfused attention launches, in order, whatever ``kernel.kernel`` says.

    Forward: QKᵀ, scale-mask-softmax (read and write each score), dropout (read, write and a byte of mask),
        PV.
    Backward: dV, dP, dropout, softmax (read two, write one), dQ, dK. For 2-byte scores that is 9 bytes a
        score forward and 11
    backward, as Megatron-LM of 2021-22 moves them (Narayanan et al. 2021, Korthikanti et al. 2022). Masks do
    not shorten
    anything: the full score matrix is computed. Grouped keys and values are repeated for each query head.
    """
    batch, s_q, s_kv, d = kernel.batch * kernel.heads, kernel.seq_q, kernel.seq_kv, kernel.head_dim
    value = d if kernel.value_dim is None else kernel.value_dim
    size = DTYPE_BYTES[kernel.dtype]
    scores = batch * s_q * s_kv

    def product(m: int, n: int, k: int) -> Gemm:
        return Gemm(m, n, k, kernel.dtype, batch, size)

    if kernel.backward:
        return (
            product(s_kv, value, s_q),
            product(s_q, s_kv, value),
            MemoryBound((2 * size + 1) * scores),
            MemoryBound(3 * size * scores),
            product(s_q, d, s_kv),
            product(s_kv, d, s_q),
        )
    return (
        product(s_q, s_kv, d),
        MemoryBound(2 * size * scores),
        MemoryBound((2 * size + 1) * scores),
        product(s_q, value, s_kv),
    )


def extrapolated(kernel: Kernel, device: Device) -> str | None:
    """Why the kernel lies outside what was measured on the device, in a few words; None if it lies inside."""
    if device.fit_from is not None:
        return f"no measurements of {device.name}: parameters assumed from {device.fit_from}"
    if isinstance(kernel, Gemm):
        return _extrapolated_gemm(kernel, device)
    if isinstance(kernel, GroupedGemm):
        return (
            None
            if f"grouped_gemm.{kernel.dtype}" in device.errors
            else f"no measured grouped products on {device.name}"
        )
    if isinstance(kernel, MemoryBound):
        cached = device.machine is None and kernel.nbytes < _CACHED_BYTES  # calibration measures small ones as well
        return "traffic small enough for the L2 cache" if cached else None
    if kernel.kernel == "unfused":
        return next((why for part in unfused_attention(kernel) if (why := extrapolated(part, device))), None)
    return _extrapolated_attention(kernel, device)


def kernel_error(kernel: Kernel, device: Device) -> float:
    """Error of :func:`kernel_s` as one standard deviation of log(predicted/measured).

    From the median and the 90th percentile of the fit's relative errors, whichever implies the wider
    distribution (:mod:`simpar.cost.error`); twice that outside the fitted region (assumed). It is the error of
    one kernel beside others on the same machine; what all kernels of a machine share (clocks, power, library
    versions) is ``device.errors["level"]``.
    """
    if isinstance(kernel, Attention) and kernel.kernel == "unfused":
        return max(kernel_error(part, device) for part in unfused_attention(kernel))
    key = next((key for key in _error_keys(kernel, device) if key in device.errors), None)
    if key is None:
        return _UNKNOWN_ERROR
    sigma = log_sd(device.errors[key], device.errors.get(f"{key}.p90", 0.0))
    return sigma * (_EXTRAPOLATION if extrapolated(kernel, device) else 1.0)


def _is_aligned(kernel: Gemm) -> bool:
    return not any(length * DTYPE_BYTES[kernel.dtype] % _VECTOR_BYTES for length in kernel.row_lengths)


def _extrapolated_gemm(kernel: Gemm, device: Device) -> str | None:
    if f"gemm.{kernel.dtype}" not in device.errors and kernel.dtype in device.gemm:
        return f"no measured {kernel.dtype} products on {device.name}"
    if kernel.n < 64 or kernel.k < 64:
        return "n or k below 64"
    if not _is_aligned(kernel):
        return f"rows are no multiple of {_VECTOR_BYTES // DTYPE_BYTES[kernel.dtype]} elements"
    return None


def _extrapolated_attention(kernel: Attention, device: Device) -> str | None:  # noqa: PLR0911 - one reason a line
    measured: tuple[str, ...] = ("bf16", "fp16")
    if device.machine is not None:  # calibration takes the dtype that the machine trains in, and short sequences too
        measured = tuple(dtype for dtype in device.gemm if f"gemm.{dtype}" in device.errors)
    if kernel.dtype not in measured:
        return f"no measured {kernel.dtype} attention on {device.name}"
    if kernel.head_dim not in device.attention:
        return f"head size {kernel.head_dim} is not among the measured ({', '.join(map(str, device.attention))})"
    if kernel.value_dim not in (None, kernel.head_dim):
        return "no measured attention whose values are narrower than its keys"
    if kernel.kernel != device.attention_kernel:
        return f"{kernel.kernel} scaled from {device.attention_kernel}"
    if kernel.window is not None and kernel.window < kernel.seq_kv:
        return "no measured sliding windows"
    if device.machine is None and (kernel.seq_q < 512 or kernel.batch * kernel.seq_q < 1024):
        return "fewer than 512 queries a sequence or 1,024 in all"
    return None


def _error_keys(kernel: Kernel, device: Device) -> tuple[str, ...]:
    if isinstance(kernel, Gemm):
        region = ".decode" if kernel.m <= _DECODE_ROWS else ""
        return (f"gemm.{kernel.dtype}{region}", f"gemm.{kernel.dtype}", f"gemm.bf16{region}", "gemm.bf16")
    if isinstance(kernel, GroupedGemm):
        return (f"grouped_gemm.{kernel.dtype}", f"gemm.{kernel.dtype}", "gemm.bf16")
    if isinstance(kernel, MemoryBound):
        return (f"memory_bound.{kernel.memory_class}", "memory_bound")
    forward = f"attention.{_nearest(kernel.head_dim, device.attention)}"
    return ("attention_backward", forward) if kernel.backward else (forward,)


def _attention_fit(head_dim: int, device: Device) -> AttentionFit:
    return device.attention[_nearest(head_dim, device.attention)]


def _nearest(head_dim: int, fits: "dict[int, AttentionFit] | dict[int, float]") -> int:
    return head_dim if head_dim in fits else min(fits, key=lambda fitted: (abs(fitted - head_dim), fitted))
