"""Kernel times against formulas typed anew, asymptotes, invariants and published figures.

Where the measured tables lie beside the repository, the shipped fits are held against them as well.
"""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.cost.error import log_sd
from simpar.cost.kernel import (
    attention_s,
    extrapolated,
    gemm_s,
    kernel_error,
    kernel_s,
    memory_bound_s,
    unfused_attention,
    wave_factor,
)
from simpar.errors import ClusterError
from simpar.hardware.device import AttentionFit, Device, GemmFit, device, device_names
from simpar.model.work import Attention, DType, Gemm, Kernel, MemoryBound

TABLES = Path(__file__).resolve().parents[3] / "shared" / "data" / "kernels"
BURST = {name: device(name).replace(sustained_slowdown=1.0) for name in device_names()}
BIG = Attention(4, 4096, 4096, 32, 32, 128, kernel="flash3")


def typed(name: str, dtype: DType, fitted: tuple[float, ...], **more: float) -> Device:
    """A burst device whose products have the numbers typed into a form below, whatever the catalog's fit says."""
    one, (e, b, t0, k0) = BURST[device(name).name], fitted
    fit = GemmFit(peak_efficiency=e, bandwidth_efficiency=b, overhead_s=t0, k0=k0, **more)
    return one.replace(gemm={**one.gemm, dtype: fit})


sizes = st.integers(1, 20_000)
devices = st.sampled_from([device(name) for name in ("a100", "h100", "b200", "l40s", "gb200")])
bf16_kernels = st.one_of(
    st.builds(Gemm, sizes, sizes, sizes, batch=st.integers(1, 64)),
    st.builds(MemoryBound, st.integers(0, 10**10), st.sampled_from(["elementwise", "activation", "norm"])),
    st.builds(
        Attention,
        batch=st.integers(1, 16),
        seq_q=sizes,
        seq_kv=sizes,
        heads=st.sampled_from([8, 16, 32]),
        kv_heads=st.sampled_from([1, 8]),
        head_dim=st.sampled_from([40, 64, 80, 128, 256]),
        causal=st.booleans(),
        backward=st.booleans(),
        kernel=st.sampled_from(["flash1", "flash2", "unfused"]),
    ),
)


# Second derivation: the forms in their textbook shape, with datasheet and fitted numbers typed in.


def roofline_norm(shape: tuple[int, int, int], batch: int, card: tuple[float, ...]) -> float:
    (m, n, k), (peak, bandwidth, e, b, t0, k0, *wave) = shape, card
    c = 2 * m * n * k / (peak * e) * (1 + k0 / k) * batch * float(np.prod(wave))
    traffic = 2 * (m * k + n * k + m * n) / (bandwidth * b) * batch
    return t0 + float(np.linalg.norm([c, traffic], ord=3))


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (8192, 1024, 256), (1, 4096, 4096), (2048, 50304, 12288)])
@pytest.mark.parametrize("batch", [1, 12])
@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("h100", (989e12, 3.35e12, 0.803, 0.841, 3.69e-6, 111)),
        ("h200", (989e12, 4.8e12, 0.800, 0.826, 3.94e-6, 119)),
        ("b200", (2250e12, 7.7e12, 0.683, 0.779, 3.43e-6, 25.9)),
        ("l40s", (362e12, 0.864e12, 0.572, 0.808, 1.17e-6, 0)),
    ],
)
def test_products_follow_the_norm_of_compute_and_traffic(
    shape: tuple[int, int, int], batch: int, name: str, card: tuple[float, ...]
) -> None:
    expected = roofline_norm(shape, batch, card)
    one = typed(name, "bf16", card[2:])
    assert (one.peak("bf16"), one.memory_bytes_per_s) == card[:2]
    assert gemm_s(Gemm(*shape, batch=batch), one) == pytest.approx(expected, rel=1e-9)


def waves_by_hand(m: int, n: int, k: int, sms: int) -> float:
    tiles = np.array([(256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)], float)
    splits = np.array([1.0, 2.0, 4.0])[:, None]
    area = tiles.prod(axis=1)
    grid = np.ceil(m / tiles[:, 0]) * np.ceil(n / tiles[:, 1])
    occupied = np.ceil(grid * splits / sms) * sms * area
    useful = (area / 32768) ** 0.13 * splits * m * n
    return float((occupied / useful * (k + 150 * splits) / (k + 150)).min())


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1000, 3000, 504), (8192, 1024, 8192), (64, 12288, 128)])
@pytest.mark.parametrize("batch", [1, 7])
def test_wave_quantisation_of_a_batch_as_one_grid(shape: tuple[int, int, int], batch: int) -> None:
    m, n, k = shape
    wave = waves_by_hand(batch * m, n, k, 108)
    assert wave_factor(batch * m, n, k, 108) == pytest.approx(wave, rel=1e-12)
    time = roofline_norm(shape, batch, (312e12, 2.039e12, 0.877, 0.771, 5.39e-6, 141, wave**0.874))
    a100 = typed("a100", "bf16", (0.877, 0.771, 5.39e-6, 141), wave_exponent=0.874)
    assert gemm_s(Gemm(m, n, k, batch=batch), a100) == pytest.approx(time, rel=1e-9)


@pytest.mark.parametrize(
    ("kernel", "is_slow"),
    [
        (Gemm(8192, 50304, 4096), False),
        (Gemm(8192, 50257, 4096), True),  # a head over an odd vocabulary: forward,
        (Gemm(8192, 4096, 50257), True),  # its input gradient
        (Gemm(50257, 4096, 8192, over="k"), True),  # and its weight gradient
        (Gemm(4096, 50257, 8192, over="k"), True),
        (Gemm(4096, 4096, 50257, over="k"), False),  # an odd number of tokens leaves rows whole
        (Gemm(50257, 4096, 4096), False),
        (Gemm(8192, 50257, 4096, "fp32"), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("batch", [1, 32])
def test_rows_that_are_no_multiple_of_16_bytes_slow_compute_down(kernel: Gemm, is_slow: bool, batch: int) -> None:
    slow = device("a100")
    assert slow.unaligned_gemm_speed is not None
    speed = slow.unaligned_gemm_speed.plain if batch == 1 else slow.unaligned_gemm_speed.batched
    ratio = gemm_s(replace(kernel, batch=batch), slow) / gemm_s(
        replace(kernel, batch=batch), slow.replace(unaligned_gemm_speed=None)
    )
    assert ratio == pytest.approx(1 / speed if is_slow else 1.0, rel=0.02)  # compute is nearly all of it


def test_one_tile_too_many_costs_a_wave_on_ampere_but_not_on_hopper() -> None:
    full, spilled = Gemm(256 * 12, 128 * 9, 8192), Gemm(256 * 12, 128 * 9 + 1, 8192)  # 108 tiles of 256 x 128
    assert gemm_s(spilled, device("a100")) / gemm_s(full, device("a100")) > 1.1
    assert gemm_s(spilled, device("h100")) / gemm_s(full, device("h100")) < 1.01


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("b", "s", "h", "kv"), [(1, 16384, 16, 16), (8, 1024, 32, 8)])
def test_attention_forward_and_backward(b: int, s: int, h: int, kv: int, backward: bool) -> None:
    compute = 2 * b * h * s**2 * 128 / (989e12 * 0.697) * (1 + 0.422 * 132 * 128 / (b * h * s))
    linear = 2 * (2 * b * s * h * 128 + 2 * b * s * kv * 128) / (3.35e12 * 1.2)
    expected = 15.2e-6 + (2.5 / 0.87 * compute + 6 * linear if backward else compute + linear)
    kernel = Attention(b, s, s, h, kv, 128, backward=backward, kernel="flash3")
    fit = AttentionFit(efficiency=0.697, overhead_s=15.2e-6, bandwidth_efficiency=1.2, parallelism=0.422)
    assert attention_s(kernel, BURST["h100-sxm"].replace(attention={128: fit})) == pytest.approx(expected, rel=1e-9)


def test_memory_bound() -> None:
    assert memory_bound_s(MemoryBound(335 * 10**7, "norm"), device("h100")) == pytest.approx(2.7e-6 + 1e-3 / 0.9)


# Asymptotes and relations.


@pytest.mark.parametrize("name", ["a100", "h100", "h200", "b200", "l40s"])
def test_a_huge_product_runs_at_the_fitted_share_of_the_peak(name: str) -> None:
    one = device(name).replace(sustained_slowdown=1.0)
    kernel = Gemm(2**17, 2**17, 2**17)
    rate = kernel.work.flop / gemm_s(kernel, one)
    assert rate == pytest.approx(one.peak("bf16") * one.gemm_fit("bf16").peak_efficiency, rel=0.01)


@pytest.mark.parametrize("name", device_names())
def test_a_tiny_kernel_costs_its_overhead(name: str) -> None:
    one = device(name)
    dtype: DType = "bf16" if "bf16" in one.gemm else "fp16"
    fused = next(iter(one.attention_kernel_speed))
    attention = Attention(1, 1, 1, 1, 1, 128, kernel=fused, dtype=dtype)
    small: list[tuple[Kernel, float]] = [
        (Gemm(1, 8, 8, dtype), one.gemm_fit(dtype).overhead_s),
        (attention, one.attention[128].overhead_s),
    ]
    for kernel, overhead in small:
        assert overhead < kernel_s(kernel, one) < 1.1 * overhead
    assert kernel_s(MemoryBound(0), one) == one.memory_bound["elementwise"].overhead_s


@pytest.mark.parametrize("kernel", [Gemm(0, 8, 8), Gemm(8, 8, 8, batch=0), Attention(1, 0, 8, 1, 1, 128)])
def test_an_empty_kernel_costs_its_overhead(kernel: Kernel) -> None:
    a100 = device("a100")
    fit = a100.gemm["bf16"] if isinstance(kernel, Gemm) else a100.attention[128]
    assert kernel_s(kernel, a100) == fit.overhead_s


def test_sustained_clocks_slow_compute_and_not_traffic() -> None:
    h100 = device("h100")
    assert h100.sustained_slowdown == 1.082

    def slowdown(kernel: Kernel) -> float:
        return kernel_s(kernel, h100) / kernel_s(kernel, BURST["h100-sxm"])

    assert slowdown(Gemm(16384, 16384, 16384)) == pytest.approx(1.082, abs=1e-3)
    assert slowdown(replace(BIG, seq_q=65536, seq_kv=65536)) == pytest.approx(1.082, abs=2e-3)
    assert slowdown(Gemm(16, 16384, 16384)) == pytest.approx(1.0, abs=1e-3)
    assert slowdown(MemoryBound(10**9)) == 1.0


def test_training_fp8_has_its_cast_fused_and_serving_fp8_not() -> None:
    kernel = Gemm(4096, 4096, 8192, "fp8")
    one = typed("h100", "fp8", (0.761, 0.807, 12.6e-6, 212), quantize_bytes=7.86)
    one = one.replace(gemm={**one.gemm, "bf16": one.gemm["bf16"].replace(overhead_s=3.69e-6)})
    c = 2 * 4096 * 4096 * (8192 + 212) / (1978e12 * 0.761)
    traffic = (2 * 4096 * 8192 + 2 * 4096 * 4096) / (3.35e12 * 0.807)
    body = (c**3 + traffic**3) ** (1 / 3)
    assert gemm_s(kernel, one) == pytest.approx(body + 3.69e-6, rel=1e-9)
    quantize = 7.86 * 4096 * 8192 / 3.35e12
    assert gemm_s(kernel, one, quantize=True) == pytest.approx(body + 12.6e-6 + quantize, rel=1e-9)


def test_accumulating_into_fp32_moves_more() -> None:
    wgrad = Gemm(4096, 4096, 512)
    assert gemm_s(replace(wgrad, out_bytes=8), device("h100")) > 1.2 * gemm_s(wgrad, device("h100"))


def test_wider_types_take_longer() -> None:
    order: tuple[DType, ...] = ("fp8", "bf16", "tf32", "fp32")
    times = [gemm_s(Gemm(8192, 8192, 8192, dtype), device("h100")) for dtype in order]
    assert times == sorted(times)
    assert times[2] / times[1] == pytest.approx(2, rel=0.01)
    single = replace(BIG, dtype="fp32")
    assert attention_s(single, device("h100")) > 10 * attention_s(BIG, device("h100"))


def test_masks_and_windows_save_their_share() -> None:
    h100, long = device("h100"), replace(BIG, seq_q=2**18, seq_kv=2**18)
    causal = attention_s(long, h100)
    assert attention_s(replace(long, causal=False), h100) / causal == pytest.approx(2, rel=0.01)
    assert causal / attention_s(replace(long, window=2**14), h100) == pytest.approx(8, rel=0.05)


def test_attention_generations_scale_by_their_published_speeds() -> None:
    h100, long = device("h100"), replace(BIG, seq_q=65536, seq_kv=65536)
    flash3 = attention_s(long, h100)
    assert flash3 / attention_s(replace(long, kernel="flash2"), h100) == pytest.approx(0.58, rel=1e-3)
    assert flash3 / attention_s(replace(long, kernel="flash1"), h100) == pytest.approx(0.29, rel=1e-3)
    a100, older = device("a100"), replace(long, kernel="flash1")
    assert attention_s(older, a100) / attention_s(replace(older, kernel="flash2"), a100) == pytest.approx(2, rel=1e-3)


def test_a_head_size_without_fit_takes_the_nearest_scaled_by_its_size() -> None:
    h100, overhead = device("h100"), device("h100").attention[64].overhead_s
    fitted, other = (attention_s(replace(BIG, head_dim=d), h100) - overhead for d in (64, 80))
    assert other / fitted == pytest.approx(80 / 64, rel=1e-9)
    halfway = attention_s(replace(BIG, head_dim=96), h100)  # a tie goes to the smaller, less efficient size
    assert (halfway - overhead) / fitted == pytest.approx(96 / 64, rel=1e-9)


def test_unfused_attention_moves_nine_and_eleven_bytes_a_score() -> None:
    forward = unfused_attention(replace(BIG, kernel="unfused"))
    backward = unfused_attention(replace(BIG, kernel="unfused", backward=True))
    scores = 4 * 32 * 4096**2
    assert sum(k.nbytes for k in forward if isinstance(k, MemoryBound)) == 9 * scores
    assert sum(k.nbytes for k in backward if isinstance(k, MemoryBound)) == 11 * scores
    # Causal masks halve nothing here: FLOP are those of full fused attention, and twice as many backward.
    full = replace(BIG, causal=False).work.flop
    assert sum(k.work.flop for k in forward if isinstance(k, Gemm)) == full
    assert sum(k.work.flop for k in backward if isinstance(k, Gemm)) == 2 * full
    assert [k.batch for k in (*forward, *backward) if isinstance(k, Gemm)] == [128] * 6


def test_unfused_attention_costs_the_sum_of_its_kernels() -> None:
    kernel = replace(BIG, kernel="unfused")
    h100 = device("h100")
    assert kernel_s(kernel, h100) == pytest.approx(sum(kernel_s(k, h100) for k in unfused_attention(kernel)))
    assert kernel_s(kernel, h100) > 5 * kernel_s(BIG, h100)


# Invariants.


@settings(max_examples=200, deadline=None)
@given(
    one=devices,
    kernel=bf16_kernels,
    grow=st.sampled_from(["m", "n", "k", "batch", "seq_q", "seq_kv", "nbytes"]),
)
def test_more_work_never_takes_less_time(one: Device, kernel: Kernel, grow: str) -> None:
    if not hasattr(kernel, grow):
        return
    larger = replace(kernel, **{grow: getattr(kernel, grow) + 1})
    one = one.replace(unaligned_gemm_speed=None)  # padding to whole vectors is more work that takes less time
    assert kernel_s(larger, one) >= kernel_s(kernel, one) * (1 - 1e-12)


@settings(max_examples=200, deadline=None)
@given(one=devices, kernel=bf16_kernels, peak=st.floats(1, 4), bandwidth=st.floats(1, 4))
def test_faster_hardware_never_hurts(one: Device, kernel: Kernel, peak: float, bandwidth: float) -> None:
    faster = one.replace(
        peak_flop_per_s={dtype: rate * peak for dtype, rate in one.peak_flop_per_s.items()},
        memory_bytes_per_s=one.memory_bytes_per_s * bandwidth,
    )
    before, after = kernel_s(kernel, one), kernel_s(kernel, faster)
    assert after <= before * (1 + 1e-12)
    assert after >= before / max(peak, bandwidth) * (1 - 1e-12)


@settings(max_examples=100, deadline=None)
@given(kernel=bf16_kernels)
def test_nothing_beats_the_datasheet_by_more_than_a_cache_explains(kernel: Kernel) -> None:
    if isinstance(kernel, Attention) and kernel.kernel == "unfused":
        kernel = replace(kernel, kernel="flash3")  # work counts the fused core's FLOP
    floor = max(kernel.work.flop / 989e12, 0.5 * kernel.work.nbytes / 3.35e12)
    assert kernel_s(kernel, device("h100")) > floor


# Published figures.


@pytest.mark.parametrize(("seq", "published"), [(2048, 521), (4096, 579), (8192, 602), (16384, 616)])
def test_flash_attention_3_reaches_its_papers_rates(seq: int, published: float) -> None:
    # FlashAttention-3 paper, H100, forward, causal, head size 128, 16k tokens, hidden size 2048, in TFLOP/s.
    kernel = Attention(16384 // seq, seq, seq, 16, 16, 128, kernel="flash3")
    assert kernel.work.flop / attention_s(kernel, BURST["h100-sxm"]) / 1e12 == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(("seq", "ratio"), [(4096, 2.9), (8192, 2.9), (16384, 2.9)])
def test_attention_backward_takes_some_three_times_the_forward(seq: int, ratio: float) -> None:
    # FlashAttention-3 paper, H100, head size 128.
    kernel = Attention(16384 // seq, seq, seq, 16, 16, 128, kernel="flash3")
    forward, backward = (attention_s(replace(kernel, backward=b), BURST["h100-sxm"]) for b in (False, True))
    assert backward / forward == pytest.approx(ratio, rel=0.15)


def test_a_layer_of_the_22b_model_takes_what_was_measured() -> None:
    # Korthikanti et al. 2022, table 4: a 22B layer (h 6144, 64 heads, s 2048, batch 4, TP 8) on A100 takes
    # 7.7 ms forward and 11.9 ms backward. Beside its products and unfused attention it moves some 25.5 bytes
    # a token and hidden unit forward and 41 backward between them (times 1.43, fitted on other runs), and has
    # two all-reduces each way at some 230 GB/s of bus bandwidth, which hide behind weight gradients backward
    # but still cost 0.62 of their time.
    a100, tokens, hidden = device("a100"), 4 * 2048, 6144
    part = hidden // 8
    widths = [(3 * part, hidden), (hidden, part), (4 * part, hidden), (hidden, 4 * part)]
    core = Attention(4, 2048, 2048, 8, 8, 96, kernel="unfused")
    forward = sum(kernel_s(Gemm(tokens, n, k), a100) for n, k in widths) + kernel_s(core, a100)
    backward = sum(kernel_s(Gemm(tokens, k, n), a100) + kernel_s(Gemm(n, k, tokens), a100) for n, k in widths)
    backward += kernel_s(replace(core, backward=True), a100)
    moved = kernel_s(MemoryBound(round(tokens * hidden * 1.43)), a100)
    reduce = 2 * (2 * tokens * hidden * 2 * 7 / 8) / 230e9
    assert forward + 25.5 * moved + reduce == pytest.approx(7.7e-3, rel=0.1)
    assert backward + 41 * moved + 0.62 * reduce == pytest.approx(11.9e-3, rel=0.1)


# Errors and honesty.


def test_unknown_dtypes_and_kernels_say_what_to_use() -> None:
    with pytest.raises(ClusterError) as error:
        kernel_s(Gemm(8, 8, 8, "bf16"), device("v100"))
    assert str(error.value) == ("device 'v100-sxm-32gb' does not compute in bf16 (it has fp16, fp32); use fp16 instead")
    with pytest.raises(ClusterError) as error:
        kernel_s(replace(BIG, kernel="flash3"), device("a100"))
    assert str(error.value) == (
        "attention kernel 'flash3' does not run on device 'a100-sxm-80gb' (it has flash1, flash2); "
        "use flash2 or unfused instead"
    )
    with pytest.raises(ClusterError, match="does not compute in fp8"):
        kernel_s(replace(BIG, kernel="flash2", dtype="fp8"), device("a100"))


@pytest.mark.parametrize(
    ("kernel", "name", "reason"),
    [
        (Gemm(4096, 4096, 4096), "h100", None),
        (Gemm(4096, 4096, 4096, "fp8"), "h100", None),
        (Gemm(4096, 32, 4096), "h100", "n or k below 64"),
        (Gemm(4096, 50257, 4096), "h100", "rows are no multiple of 8 elements"),
        (Gemm(4096, 4096, 4096, "tf32"), "h100", "no measured tf32 products on h100-sxm"),
        (
            Gemm(4096, 4096, 4096),
            "v100",
            "no measurements of v100-sxm-32gb: parameters assumed from a100-sxm-80gb",
        ),
        (BIG, "h100", None),
        (replace(BIG, kernel="flash2"), "h100", "flash2 scaled from flash3"),
        (replace(BIG, head_dim=80), "h100", "head size 80 is not among the measured (64, 128, 192, 256)"),
        (replace(BIG, dtype="fp32"), "h100", "no measured fp32 attention on h100-sxm"),
        (replace(BIG, window=128), "h100", "no measured sliding windows"),
        (replace(BIG, seq_q=256), "h100", "fewer than 512 queries a sequence or 1,024 in all"),
        (replace(BIG, kernel="unfused"), "h100", None),
        (replace(BIG, kernel="unfused", head_dim=108), "h100", "rows are no multiple of 8 elements"),
        (MemoryBound(10**9), "h100", None),
        (MemoryBound(10**6), "h100", "traffic small enough for the L2 cache"),
    ],
)
def test_extrapolation_is_named(kernel: Kernel, name: str, reason: str | None) -> None:
    assert extrapolated(kernel, device(name)) == reason


def test_errors_come_from_the_fit_and_widen_outside_it() -> None:
    h100 = device("h100")
    inside = kernel_error(Gemm(4096, 4096, 4096), h100)
    errors = h100.errors
    assert inside == log_sd(errors["gemm.bf16"], errors["gemm.bf16.p90"])
    assert kernel_error(Gemm(4096, 4097, 4096), h100) == 2 * inside
    assert kernel_error(Gemm(128, 4096, 4096), h100) > inside
    assert kernel_error(replace(BIG, backward=True), h100) > kernel_error(BIG, h100)
    assert kernel_error(replace(BIG, kernel="unfused"), h100) >= inside
    assert kernel_error(MemoryBound(10**9), h100) == pytest.approx(0.1 / 0.6745, rel=5e-3)  # median of |z|, nearly
    assert kernel_error(Gemm(4096, 4096, 4096), device("h100-pcie")) == 2 * inside
    assert kernel_error(Gemm(4096, 4096, 4096), device("cpu")) == 0.25


# Measurements.


@pytest.mark.skipif(not TABLES.is_dir(), reason="the measured kernel tables are not beside the repository")
@pytest.mark.parametrize(
    ("name", "column", "least"),
    [
        ("a100", "bf16_sglang_us", 500),
        ("a100", "bf16_trtllm_us", 100),
        ("a100", "bf16_vllm_us", 100),
        ("h100", "bf16_vllm_us", 500),
        ("h100", "bf16_sglang_us", 500),
        ("h100", "bf16_trtllm_us", 500),
        ("h100", "fp8_trtllm_us", 500),
        ("b200", "bf16_vllm_us", 500),
        ("b200", "bf16_sglang_us", 500),
        ("b200", "bf16_trtllm_us", 500),
        ("b200", "fp8_trtllm_us", 500),
    ],
)
def test_shipped_fits_meet_the_tables(name: str, column: str, least: int) -> None:
    one = device(name).replace(sustained_slowdown=1.0)  # the tables hold short bursts
    dtype: DType = "fp8" if column.startswith("fp8") else "bf16"
    errors = []
    with (TABLES / f"gemm_{name}.csv").open(encoding="utf-8") as table:
        for number, row in enumerate(csv.DictReader(table)):
            if number % 10 or not row[column]:
                continue
            measured = float(row[column]) * 1e-6
            kernel = Gemm(int(row["m"]), int(row["n"]), int(row["k"]), dtype)
            if kernel.m >= 1024 and measured > 20e-6:
                errors.append(abs(gemm_s(kernel, one, quantize=dtype == "fp8") / measured - 1))
    assert len(errors) > least
    assert fmean(errors) < 0.08


@pytest.mark.skipif(not TABLES.is_dir(), reason="the measured kernel tables are not beside the repository")
@pytest.mark.parametrize(
    # The tables read a paged cache, which their fits charge as a lower bandwidth than training kernels reach.
    ("name", "column", "paged"),
    [("a100", "sglang_us", 0.625), ("h100", "vllm_us", 0.43), ("b200", "vllm_us", 0.322)],
)
def test_shipped_attention_fits_meet_the_tables(name: str, column: str, paged: float) -> None:
    one = device(name)
    fit = one.attention[128].replace(bandwidth_efficiency=paged)
    one = one.replace(sustained_slowdown=1.0, attention={128: fit})
    errors = []
    with (TABLES / f"attention_prefill_{name}.csv").open(encoding="utf-8") as table:
        for row in csv.DictReader(table):
            b, s, h, kv, d = (int(row[key]) for key in ("b", "s", "h", "kv", "d"))
            if not row[column] or d != 128 or s < 512 or b * s < 1024 or float(row[column]) < 20:
                continue
            kernel = Attention(b, s, s, h, kv, d, kernel=one.attention_kernel)
            errors.append(abs(attention_s(kernel, one) / (float(row[column]) * 1e-6) - 1))
    assert len(errors) > 100
    assert fmean(errors) < 0.08
