"""The vectorised twins price exactly what the cost functions price."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.fit import attention, collectives, gemm
from calibrate.samples import CollectiveSample
from simpar.cost.collective import COLLECTIVE_OPS, collective_cost, p2p_cost
from simpar.cost.kernel import attention_s, gemm_s
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import device
from simpar.model.work import Attention, Gemm

sizes = st.integers(1, 20_000)
devices = st.sampled_from(["a100", "h100", "b200", "cpu"])


@settings(max_examples=60, deadline=None)
@given(
    name=devices,
    shapes=st.lists(
        st.builds(Gemm, sizes, sizes, sizes, batch=st.integers(1, 64), out_bytes=st.sampled_from([2, 8])), min_size=1
    ),
)
def test_products(name: str, shapes: list[Gemm]) -> None:
    one = device(name)
    table = gemm.GemmTable.of(shapes, one)
    fit = dict(one.gemm_fit("bf16"))
    times = gemm.gemm_times(table, fit, one.peak("bf16"), one.memory_bytes_per_s, one.sustained_slowdown)
    assert times == pytest.approx([gemm_s(shape, one) for shape in shapes], rel=1e-12)


def test_products_that_quantise() -> None:
    h100, shape = device("h100"), Gemm(3000, 4096, 512, "fp8")
    table = gemm.GemmTable.of([shape], h100)
    times = gemm.gemm_times(table, dict(h100.gemm["fp8"]), 1978e12, 3.35e12, h100.sustained_slowdown)
    assert times[0] == pytest.approx(gemm_s(shape, h100, quantize=True), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    name=devices,
    kernel=st.builds(
        Attention,
        batch=st.integers(1, 16),
        seq_q=sizes,
        seq_kv=sizes,
        heads=st.sampled_from([8, 32]),
        kv_heads=st.sampled_from([1, 8]),
        head_dim=st.sampled_from([64, 80, 128]),
        causal=st.booleans(),
        backward=st.booleans(),
        kernel=st.sampled_from(["flash1", "flash2"]),
    ),
)
def test_attention(name: str, kernel: Attention) -> None:
    one = device(name)
    table = attention.AttentionTable.of([kernel], one)
    fit = dict(attention.nearest_fit(kernel.head_dim, one.attention))
    if kernel.backward:
        ratios = one.attention_backward
        ratio = ratios.efficiency_ratio[min(ratios.efficiency_ratio, key=lambda d: (abs(d - kernel.head_dim), d))]
        times = attention.backward_times(
            table,
            fit,
            one.sms,
            flop_factor=ratios.flop_factor,
            efficiency_ratio=ratio,
            linear_ratio=ratios.linear_ratio,
            slowdown=one.sustained_slowdown,
        )
    else:
        times = attention.forward_times(table, fit, one.sms, one.sustained_slowdown)
    assert times[0] == pytest.approx(attention_s(kernel, one), rel=1e-12)


@pytest.mark.parametrize("spec", ["a100-sxm:8x8", "h100-sxm:8x8", "b200-sxm:8x8@slingshot11-polaris", "cpu:4x4"])
def test_collectives_and_messages(spec: str) -> None:
    cluster = Cluster.parse(spec)
    fabric = cluster.fabric
    assert fabric is not None
    samples = [
        CollectiveSample(op, float(nbytes), ranks * nodes, nodes, 1.0, "")
        for op in COLLECTIVE_OPS
        if op != "shift"  # a message to a neighbour, which is measured as sendrecv
        for nbytes in (1, 4096, 1e6, 3e9)
        for ranks in {1, 2, 4, cluster.gpus_per_node}
        for nodes in (1, 2, 3, 4)
        if ranks * nodes > 1
    ]
    messages = [
        CollectiveSample("sendrecv", float(nbytes), 2, nodes, 1.0, "") for nbytes in (1, 1e6, 3e9) for nodes in (1, 2)
    ]
    link = {name: value for name, value in dict(cluster.node_link).items() if isinstance(value, float)}
    between = {name: value for name, value in dict(fabric).items() if isinstance(value, float)}
    between["nic_bytes_per_s"] = cluster.nic_bytes_per_s
    points = collectives.Points.of([*samples, *messages])
    kind, nvls = cluster.node_link.kind, cluster.node_link.nvls
    times = collectives.collective_times(points, link, between, kind=kind, nvls=nvls)
    costs = [collective_cost(s.op, s.nbytes, s.ranks, s.nodes, cluster) for s in samples]
    costs += [p2p_cost(m.nbytes, 0, 1 if m.nodes == 1 else cluster.gpus_per_node, cluster) for m in messages]
    assert times == pytest.approx([cost.total_s for cost in costs], rel=1e-12)
    # Fitting on one node needs no fabric.
    alone = points.nodes == 1
    inside = collectives.collective_times(points.where(alone), link, None, kind=kind, nvls=nvls)
    assert np.array_equal(inside, times[alone])
