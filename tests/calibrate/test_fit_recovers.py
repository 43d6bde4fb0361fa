"""Fits find the parameters that made synthetic measurements, within the uncertainty that they state."""

import numpy as np
import pytest

from calibrate.errors import MeasurementError
from calibrate.fit.attention import fit_backward, fit_forward
from calibrate.fit.collectives import envelope, fit_fabric, fit_node_link
from calibrate.fit.gemm import fit_gemm
from calibrate.fit.memory import fit_memory
from calibrate.fit.robust import Parameter, solve
from calibrate.samples import CollectiveSample, KernelSample
from simpar.cost.collective import collective_cost
from simpar.cost.kernel import kernel_s
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import AttentionBackwardFit, AttentionFit, Device, GemmFit, MemoryFit, device
from simpar.model.work import Attention, Gemm, Kernel, MemoryBound

NOISE = 0.03
GRID = [
    (1, 512, 512), (16, 4096, 4096), (64, 8192, 8192), (1024, 4096, 4096), (2048, 4096, 1024), (4096, 4096, 512),
    (4096, 4096, 4096), (4096, 8192, 8192), (8192, 4096, 256), (8192, 4096, 4096), (8192, 1024, 8192),
    (2048, 12288, 4096),
]  # fmt: skip


def truth() -> Device:
    """A device that no catalog has, without the slowdown that bursts do not show."""
    base = device("h100")
    fit = GemmFit(peak_efficiency=0.6, bandwidth_efficiency=0.7, overhead_s=7e-6, k0=60.0)
    memory = MemoryFit(bandwidth_efficiency=0.8, overhead_s=3e-6)
    forward = AttentionFit(efficiency=0.5, overhead_s=20e-6, bandwidth_efficiency=0.6, parallelism=1.1)
    ratios = AttentionBackwardFit(efficiency_ratio={64: 0.9, 128: 0.7}, linear_ratio=4.0)
    return base.replace(
        gemm=dict.fromkeys(base.gemm, fit),
        attention={128: forward},
        attention_backward=ratios,
        memory_bound=dict.fromkeys(base.memory_bound, memory),
        sustained_slowdown=1.0,
    )


def measured(kernels: list[Kernel], one: Device, *, stack: str = "torch", seed: int = 1) -> list[KernelSample]:
    noise = np.exp(np.random.default_rng(seed).normal(0.0, NOISE, len(kernels)))
    return [
        KernelSample(kernel, kernel_s(kernel, one) * float(factor), "made up", stack)
        for kernel, factor in zip(kernels, noise, strict=True)
    ]


def within(found: dict[str, float], sigma: dict[str, float], wanted: dict[str, float], names: list[str]) -> None:
    for name in names:
        assert sigma[name] < 0.5
        assert abs(np.log(found[name] / wanted[name])) < 3 * sigma[name] + 1e-4, name


def shapes(count: int) -> list[Kernel]:
    draw = np.random.default_rng(5)
    return [Gemm(*(int(2**v) for v in draw.uniform([0, 6, 6], [14, 14, 14]))) for _ in range(count)]


GEMM = ["peak_efficiency", "bandwidth_efficiency", "overhead_s", "k0"]


@pytest.mark.parametrize("kernels", [[Gemm(*shape) for shape in GRID] * 2, shapes(600)], ids=["grid", "many"])
def test_products(kernels: list[Kernel]) -> None:
    one = truth()
    found = fit_gemm(measured(kernels, one), "bf16", device("h100"), quantized=False)
    within(dict(found.fit), found.uncertainty, dict(one.gemm["bf16"]), GEMM)


def test_outliers_pull_little() -> None:
    one = truth()
    samples = measured(shapes(600), one)
    spoilt = [
        KernelSample(s.kernel, s.time_s * (5.0 if index % 12 == 0 else 1.0), s.source, s.stack)
        for index, s in enumerate(samples)
    ]
    found = fit_gemm(spoilt, "bf16", device("h100"), quantized=False)
    for name in ("peak_efficiency", "bandwidth_efficiency"):
        assert getattr(found.fit, name) == pytest.approx(getattr(one.gemm["bf16"], name), rel=0.03)
    fitted = next(row for row in found.accuracy if row.region == "all")
    assert fitted.median < 0.05 < fitted.mean  # the outliers stay visible


def test_stacks_of_other_clocks_meet_in_their_middle() -> None:
    one = truth()
    fast, slow = measured(shapes(600), one, stack="a"), measured(shapes(600), one, stack="b", seed=2)
    fast = [KernelSample(s.kernel, s.time_s * 0.95, s.source, s.stack) for s in fast[:100]]
    slow = [KernelSample(s.kernel, s.time_s / 0.95, s.source, s.stack) for s in slow]
    found = fit_gemm([*fast, *slow], "bf16", device("h100"), quantized=False)
    within(dict(found.fit), found.uncertainty, dict(one.gemm["bf16"]), GEMM)
    assert found.uncertainty["peak_efficiency"] > 0.02  # two machines tell little of a third
    bias = {row.split: row.bias for row in found.accuracy if row.region == "training"}
    assert bias["stack b"] == pytest.approx(2 * np.log(0.95), abs=0.03)  # the slow one, predicted from the fast one
    assert bias["stack b, level known"] == pytest.approx(0.0, abs=1e-6)


def test_quantising_products_have_a_term_of_their_own() -> None:
    h100 = device("h100")
    bf16 = GemmFit(peak_efficiency=0.6, bandwidth_efficiency=0.7, overhead_s=9e-6, k0=60.0)
    plain = truth().replace(gemm={**truth().gemm, "bf16": bf16})  # fp8 takes the overhead of bf16 by itself
    kernels = [Gemm(k.m, k.n, k.k, "fp8") for k in shapes(600) if isinstance(k, Gemm)]
    samples = [
        KernelSample(s.kernel, s.time_s + 6.0 * s.kernel.m * s.kernel.k / h100.memory_bytes_per_s, "", "trtllm")
        for s in measured(list(kernels), plain)
        if isinstance(s.kernel, Gemm)
    ]
    found = fit_gemm(samples, "fp8", h100, quantized=True)
    assert found.fit.quantize_bytes == pytest.approx(6.0, rel=0.05)
    assert found.fit.overhead_s == pytest.approx(9e-6, rel=0.05)


def attentions(*, backward: bool = False) -> list[Kernel]:
    return [
        Attention(b, s, s, h, h, 128, backward=backward, kernel="flash3")
        for b in (1, 2, 8)
        for s in (1024, 2048, 8192)
        for h in (4, 16, 32)
    ]


def test_attention_forward_and_backward() -> None:
    one = truth()
    found = fit_forward(measured(attentions(), one), 128, device("h100"), paged=False)
    assert found is not None
    names = ["efficiency", "overhead_s", "parallelism"]
    within(dict(found.fit), found.uncertainty, dict(one.attention[128]), names)
    back = fit_backward(measured(attentions(backward=True), one), one)
    assert back is not None
    assert back.fit.efficiency_ratio[128] == pytest.approx(0.7, rel=3 * back.uncertainty["efficiency_ratio.128"])
    assert back.fit.efficiency_ratio[64] == 0.9  # not measured
    assert back.fit.linear_ratio == pytest.approx(4.0, rel=3 * back.uncertainty["linear_ratio"])


def test_a_paged_cache_is_fitted_and_not_kept() -> None:
    paged = truth().replace(attention={128: truth().attention[128].replace(bandwidth_efficiency=0.2)})
    found = fit_forward(measured(attentions(), paged, stack="vllm"), 128, device("h100"), paged=True)
    assert found is not None
    assert found.fit.efficiency == pytest.approx(0.5, rel=0.05)
    assert found.fit.bandwidth_efficiency == device("h100").attention[128].bandwidth_efficiency
    assert "bandwidth_efficiency" not in found.uncertainty


def test_memory_bound() -> None:
    one = truth()
    kernels: list[Kernel] = [MemoryBound(2**p, "norm") for p in range(20, 30)] * 3
    found = fit_memory(measured(kernels, one), "norm", device("h100"))
    assert found is not None
    names = ["bandwidth_efficiency", "overhead_s"]
    within(dict(found.fit), found.uncertainty, dict(one.memory_bound["norm"]), names)


def collective_samples(cluster: Cluster, groups: list[tuple[int, int]]) -> list[CollectiveSample]:
    draw = np.random.default_rng(3)
    return [
        CollectiveSample(op, float(nbytes), n, k, cost * float(np.exp(draw.normal(0, NOISE))), "made up", "nccl")
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for nbytes in 2.0 ** np.arange(10, 30, 2)
        for n, k in groups
        for cost in [collective_cost(op, float(nbytes), n, k, cluster).total_s]
    ]


TYPED_LINK = {
    "bandwidth_bytes_per_s": 300e9,
    "base_latency_s": 6e-6,
    "step_latency_s": 1.3e-6,
    "copy_fraction": 0.2,
    "smoothness": 0.7,
    "p2p_latency_s": 12e-6,
    "nvls_ratio": 0.9,
    "nvls_latency_s": 18e-6,
}


def test_node_link() -> None:
    base = Cluster.parse("h100-sxm:4x8")
    made = base.replace(node_link=base.node_link.replace(**TYPED_LINK))
    found = fit_node_link(collective_samples(made, [(2, 1), (4, 1), (8, 1)]), base.node_link)
    wanted = dict(made.node_link)
    within(dict(found.link), found.uncertainty, wanted, [name for name in TYPED_LINK if name != "copy_fraction"])
    assert found.link.errors.median < 0.04
    assert {row.split for row in found.accuracy} == {"fitted", "every other size", "ranks between"}
    assert all(row.median < 0.05 for row in found.accuracy)


def test_a_host_adds_latency_and_streaming() -> None:
    base = Cluster.parse("cpu:4")
    typed = {"bandwidth_bytes_per_s": 9e9, "step_latency_s": 60e-6, "p2p_latency_s": 30e-6}
    made = base.replace(node_link=base.node_link.replace(**typed, nominal_bytes_per_s=9e9))
    found = fit_node_link(collective_samples(made, [(2, 1), (4, 1)]), base.node_link)
    within(dict(found.link), found.uncertainty, dict(made.node_link), list(typed))
    assert found.link.smoothness == 1.0
    assert found.link.nominal_bytes_per_s >= found.link.bandwidth_bytes_per_s


def test_each_level_of_a_pcie_server_is_fitted_to_its_groups() -> None:
    base = Cluster.parse("l40s:8")
    far = base.node_link.beyond
    assert far is not None
    near = base.node_link.replace(bandwidth_bytes_per_s=20e9, beyond=far.replace(bandwidth_bytes_per_s=7e9))
    made = base.replace(node_link=near)
    found = fit_node_link(collective_samples(made, [(2, 1), (4, 1)]), base.node_link)
    assert found.link.bandwidth_bytes_per_s == pytest.approx(20e9, rel=0.05)
    assert found.link.beyond is not None
    assert found.link.beyond.bandwidth_bytes_per_s == pytest.approx(7e9, rel=0.05)
    assert found.link.beyond.beyond == far.beyond  # no group of eight was measured


def test_fabric() -> None:
    base = Cluster.parse("h100-sxm:16x8")
    assert base.fabric is not None
    typed = {"efficiency": 0.9, "ring_step_s": 12e-6, "tree_level_s": 15e-6, "p2p_latency_s": 9e-6, "smoothness": 0.6}
    made = base.replace(fabric=base.fabric.replace(**typed))
    samples = collective_samples(made, [(16, 2), (32, 4), (64, 8)])
    found = fit_fabric(samples, base.fabric, made.node_link, 8)
    within(dict(found.fabric), found.uncertainty, dict(made.fabric or ()), list(typed))
    assert found.fabric.measured_nodes == 8


def test_points_far_above_a_larger_size_are_lowered_and_reported() -> None:
    times = {1e3: 10e-6, 1e4: 80e-6, 1e5: 20e-6, 1e6: 19e-6}
    samples = [CollectiveSample("all_reduce", nbytes, 8, 1, s, "", "nccl/2") for nbytes, s in times.items()]
    kept, fitted, notes = envelope([*samples, CollectiveSample("exchange", 8, 2, 1, 1.0, "")])
    assert kept == samples
    assert fitted.tolist() == [10e-6, 19e-6, 20e-6, 19e-6]  # 20 µs before 19 µs is noise
    assert notes == [
        "not fitted, having no cost of their own: exchange",
        "all_reduce over 8 ranks on 1 node (nccl/2): 1 of 4 sizes take over 1.3 times as long as a larger one, "
        "at worst 4.2 times at 10000 bytes",
    ]


def test_without_data_the_prior_and_its_spread_remain() -> None:
    one = Parameter("a", 2.0, 0.3)
    other = Parameter("b", 5.0, 0.7)
    found = solve([one, other], lambda values: np.array([values["a"]]), np.array([2.0]), scale=1e6)
    assert found.values == pytest.approx({"a": 2.0, "b": 5.0})
    assert found.uncertainty == pytest.approx({"a": 0.3, "b": 0.7}, rel=1e-6)


def test_uncertainty_is_the_spread_of_repeated_fits() -> None:
    # Second derivation: 200 draws of the same experiment, whose fits scatter as each one says.
    x = np.linspace(1.0, 4.0, 40)
    parameters = [Parameter("slope", 1.0, 5.0), Parameter("offset", 1.0, 5.0)]
    found = [
        solve(
            parameters,
            lambda values: values["offset"] + values["slope"] * x,
            (2.0 + 3.0 * x) * np.exp(np.random.default_rng(seed).normal(0, 0.04, x.size)),
        )
        for seed in range(200)
    ]
    for name in ("slope", "offset"):
        scatter = np.std([np.log(one.values[name]) for one in found])
        stated = np.median([one.uncertainty[name] for one in found])
        assert stated == pytest.approx(scatter, rel=0.2)


def test_too_few_measurements_say_how_many() -> None:
    with pytest.raises(MeasurementError) as error:
        fit_gemm(measured([Gemm(8, 8, 8)] * 3, truth()), "bf16", device("h100"), quantized=False)
    assert str(error.value) == "3 measured bf16 products are too few for a fit; measure at least 6 shapes"
    with pytest.raises(MeasurementError, match="1 collectives do not make a fit of a node's links; measure at least 4"):
        fit_node_link([CollectiveSample("all_reduce", 8, 2, 1, 1.0, "")], Cluster.parse("h100:8").node_link)
    assert fit_memory(measured([MemoryBound(8)], truth()), "elementwise", device("h100")) is None
