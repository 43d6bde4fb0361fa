"""Grouped products and attention of unequal widths: work against brute force, times against formulas typed anew."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from simpar.cost.kernel import extrapolated, gemm_s, kernel_error, kernel_s, memory_bound_s, unfused_attention
from simpar.errors import ClusterError
from simpar.hardware.device import device
from simpar.model.work import Attention, Gemm, GroupedGemm, MemoryBound, kernel_kind

H100 = device("h100").replace(sustained_slowdown=1.0)
sizes = st.integers(1, 5_000)
products = st.builds(
    GroupedGemm, m=sizes, n=sizes, k=sizes, groups=st.integers(1, 64), over=st.sampled_from(["m", "k"])
)


@pytest.mark.parametrize("over", ["m", "k"])
def test_work_is_that_of_the_groups_products(over):
    # the rows of four experts, all of which have some
    rows = (300, 700, 20, 5)
    if over == "m":
        parts = [Gemm(m, 64, 128).work for m in rows]
        whole = GroupedGemm(sum(rows), 64, 128, 4).work
    else:
        parts = [Gemm(128, 64, k, out_bytes=8).work for k in rows]
        whole = GroupedGemm(128, 64, sum(rows), 4, out_bytes=8, over="k").work
    assert whole.flop == sum(part.flop for part in parts)
    assert whole.nbytes == pytest.approx(sum(part.nbytes for part in parts))


def test_only_experts_with_a_row_are_read():
    few = GroupedGemm(2, 64, 128, 256)
    assert few.active_groups == pytest.approx(256 * (1 - (255 / 256) ** 2))
    assert few.matrix_bytes == pytest.approx(2 * few.active_groups * 64 * 128)
    assert GroupedGemm(0, 64, 128, 8).active_groups == 0
    assert GroupedGemm(100_000, 64, 128, 8).active_groups == pytest.approx(8)


def test_time_is_the_form_of_its_source():
    # fitted H100 numbers typed anew: 3-norm of compute and matrices, and the rows on top
    fit = H100.gemm["bf16"]
    m, n, k, groups = 65_536, 3072, 4096, 64
    compute = 2 * m * n * (k + fit.k0) / (989e12 * fit.peak_efficiency)
    bandwidth = 3.35e12 * fit.bandwidth_efficiency
    matrices, rows = 2 * groups * n * k / bandwidth, 2 * m * (n + k) / bandwidth
    form = fit.overhead_s + (compute**3 + matrices**3) ** (1 / 3) + rows
    assert kernel_s(GroupedGemm(m, n, k, groups), H100) == pytest.approx(form, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "efficiency", "bandwidth", "overhead_us", "rows"),
    [
        ("a100", 0.503, 0.498, 7.0, 0.465),
        ("h100", 1.10, 0.877, 15.8, 0.325),
        ("h200", 1.05, 0.881, 26.4, 0.276),
        ("b200", 1.15, 0.906, 30.6, 0.247),
    ],
)
def test_a_layers_launches_are_near_the_measured_fused_kernel(name, efficiency, bandwidth, overhead_us, rows):
    """The fused kernels' fit (TensorRT-LLM, aiconfigurator-core 0.12.0) holds permutation, activation, both products.

    It computes above the dense peak in bursts, so launches of a plain product's efficiency take up to 1.4 times that.
    """
    one = device(name).replace(sustained_slowdown=1.0)
    ratios = []
    for hidden, width, experts, top_k in (
        (4096, 14336, 8, 2),
        (4096, 1536, 128, 8),
        (7168, 2048, 256, 8),
        (2880, 2880, 32, 4),
    ):
        for tokens in (4096, 16_384):
            pairs = tokens * top_k
            flop, weights = 6.0 * pairs * hidden * width, 6.0 * experts * hidden * width
            moved = 2.0 * pairs * (2 * hidden + 3 * width) + 4.0 * tokens * hidden
            peak, memory = one.peak("bf16") * efficiency, one.memory_bytes_per_s
            fused = ((flop / peak) ** 3 + (weights / memory / bandwidth) ** 3) ** (1 / 3)
            fused += overhead_us * 1e-6 + moved / memory / rows
            launches = (
                kernel_s(GroupedGemm(pairs, 2 * width, hidden, experts), one)
                + kernel_s(GroupedGemm(pairs, hidden, width, experts), one)
                + memory_bound_s(MemoryBound(4 * pairs * hidden), one)
                + memory_bound_s(MemoryBound(6 * pairs * width, "activation"), one)
                + memory_bound_s(MemoryBound(2 * (pairs + tokens) * hidden), one)
            )
            ratios.append(launches / fused)
    assert min(ratios) > 0.85
    assert max(ratios) < 1.45


@given(products, st.sampled_from(["a100", "h100", "b200", "l40s"]))
def test_time_lies_between_its_bounds(kernel, name):
    one = device(name)
    fit = one.gemm["bf16"]
    seconds = kernel_s(kernel, one)
    work = kernel.work
    assert seconds >= work.flop / (one.peak("bf16") * fit.peak_efficiency) * 0.9
    assert seconds >= work.nbytes / (one.memory_bytes_per_s * fit.bandwidth_efficiency) * 0.79  # the 3-norm's share


@given(products, st.sampled_from(["h100", "b200"]))
def test_more_rows_or_groups_take_no_less_time(kernel, name):
    one = device(name)
    more = replace(kernel, m=kernel.m + 7) if kernel.over == "m" else replace(kernel, k=kernel.k + 7)
    assert kernel_s(more, one) >= kernel_s(kernel, one)
    assert kernel_s(replace(kernel, groups=kernel.groups + 1), one) >= kernel_s(kernel, one) * (1 - 1e-12)


def test_one_group_is_nearly_a_plain_product():
    for m in (256, 4096, 65_536):
        plain = gemm_s(Gemm(m, 4096, 4096), H100)
        assert plain <= kernel_s(GroupedGemm(m, 4096, 4096, 1), H100) < 1.35 * plain


def test_no_rows_cost_the_overhead():
    assert kernel_s(GroupedGemm(0, 64, 64, 8), H100) == H100.gemm["bf16"].overhead_s
    assert kernel_s(GroupedGemm(64, 64, 0, 8, over="k"), H100) == H100.gemm["bf16"].overhead_s


def test_fp8_is_faster_and_has_the_overhead_of_bf16():
    bf16 = GroupedGemm(65_536, 4096, 4096, 8)
    assert kernel_s(replace(bf16, dtype="fp8"), H100) < 0.7 * kernel_s(bf16, H100)
    assert kernel_s(GroupedGemm(1, 8, 8, 1, "fp8"), H100) < 1.1 * H100.gemm["bf16"].overhead_s
    with pytest.raises(ClusterError, match="does not compute in fp8"):
        kernel_s(replace(bf16, dtype="fp8"), device("a100"))


def test_a_slower_grouped_kernel_slows_compute_only():
    kernel = GroupedGemm(65_536, 4096, 4096, 8)
    half = kernel_s(kernel, H100.replace(grouped_gemm_speed=0.5))
    compute = 2 * 65_536 * 4096 * 4096 / (989e12 * H100.gemm["bf16"].peak_efficiency)
    assert half - kernel_s(kernel, H100) == pytest.approx(compute, rel=0.05)


def test_a_grouped_product_is_extrapolated_until_it_is_measured():
    kernel = GroupedGemm(65_536, 4096, 4096, 8)
    assert kernel_kind(kernel) == "gemm"
    assert extrapolated(kernel, H100) == "no measured grouped products on h100-sxm"
    measured = H100.replace(errors={**H100.errors, "grouped_gemm.bf16": 0.1})
    assert extrapolated(kernel, measured) is None
    assert kernel_error(kernel, measured) == pytest.approx(0.1 / 0.6745, rel=5e-3)  # median of |z|, nearly
    assert kernel_error(kernel, H100) == pytest.approx(2 * kernel_error(Gemm(65_536, 4096, 4096), H100))


LATENT = Attention(4, 4096, 4096, 128, 128, 192, kernel="flash3", value_dim=128)


def test_attention_of_unequal_widths_counts_as_torchs_formulas():
    q, k, v = (4, 128, 4096, 192), (4, 128, 4096, 192), (4, 128, 4096, 128)
    full = replace(LATENT, causal=False)
    assert full.work.flop == sdpa_flop_count(q, k, v)
    assert replace(full, backward=True).work.flop == sdpa_backward_flop_count(v, q, k, v)
    assert replace(LATENT, value_dim=192).work == replace(LATENT, value_dim=None).work


@pytest.mark.parametrize("backward", [False, True])
def test_narrower_values_save_their_share_of_the_time(backward):
    kernel = replace(LATENT, backward=backward)
    whole = replace(kernel, value_dim=None)
    ratio = kernel_s(kernel, H100) / kernel_s(whole, H100)
    assert ratio == pytest.approx(kernel.work.flop / whole.work.flop, rel=0.02)
    assert "narrower" in extrapolated(kernel, H100)


@pytest.mark.parametrize("backward", [False, True])
def test_unfused_attention_of_unequal_widths_does_the_same_products(backward):
    kernel = replace(LATENT, backward=backward, causal=False)
    fused = kernel.work.flop
    if backward:  # fused kernels compute the scores again
        fused -= 2.0 * 4 * 128 * 4096 * 4096 * 192
    assert sum(part.work.flop for part in unfused_attention(kernel)) == fused
