"""What is measured on which machine, and what is not and why."""

import pytest

import simpar
from calibrate.measure.plan import (
    GRID,
    CollectiveItem,
    InterferenceItem,
    KernelItem,
    LaunchItem,
    Limits,
    group_shapes,
    job_products,
    make_plan,
)
from simpar import Cluster, Plan
from simpar.hardware.device import device
from simpar.model.work import Attention, Gemm, GroupedGemm, MemoryBound
from simpar.plan.layout import lay_out
from simpar.program.lower import lower

EVERYTHING = Limits(1e15, 1e12)
SMALL = Limits(2e9, 64 * 2**20)


def kernels(plan, kind):
    return [item.kernel for item in plan.items if isinstance(item, KernelItem) and isinstance(item.kernel, kind)]


def collectives(plan):
    return [item for item in plan.items if isinstance(item, CollectiveItem)]


def test_a_gpu_gets_the_twelve_designed_products_in_its_training_dtype():
    plan = make_plan(device("h100"), EVERYTHING, mode="quick", cuda=True, ranks=8)
    assert [(g.m, g.n, g.k) for g in kernels(plan, Gemm)] == list(GRID)
    assert {(g.dtype, g.out_bytes) for g in kernels(plan, Gemm)} == {("bf16", 2)}
    assert plan.notes == ("fp8 products were not measured: torch has no plain product of that dtype",)


def test_the_three_largest_products_of_a_gpu_run_until_its_clocks_settle():
    plan = make_plan(device("h100"), EVERYTHING, mode="full", cuda=True, ranks=1)
    items = [i for i in plan.items if isinstance(i, KernelItem) and isinstance(i.kernel, Gemm) and i.burst_s >= 1]
    assert {i.kernel.dtype for i in items} == {"bf16", "fp16", "tf32"}
    bf16 = [i.kernel for i in items if i.kernel.dtype == "bf16"]
    smallest = min(g.m * g.n * g.k for g in bf16)
    assert len(bf16) == 3
    assert sum(m * n * k >= smallest for m, n, k in GRID) == 3


def test_a_v100_measures_the_dtype_and_attention_that_it_has():
    plan = make_plan(device("v100"), EVERYTHING, mode="quick", cuda=True, ranks=1)
    assert {g.dtype for g in kernels(plan, Gemm)} == {"fp16"}
    assert {a.kernel for a in kernels(plan, Attention)} <= set(device("v100").attention_kernel_speed)


@pytest.mark.parametrize("flop", [1e8, 2e9, 3e10])
def test_a_cpu_gets_the_grid_scaled_to_its_speed(flop):
    plan = make_plan(device("cpu"), Limits(flop, 2**26), mode="quick", cuda=False, ranks=2)
    products = kernels(plan, Gemm)
    assert {g.dtype for g in products} == {"fp32"}
    assert 10 <= len(products) == len(set(products)) <= 12
    assert 0.5 * flop < max(2 * g.m * g.n * g.k for g in products) < 1.4 * flop
    assert {1, 16, 64} <= {g.m for g in products}
    assert all(size % 32 == 0 for g in products for size in (g.n, g.k))
    assert all(a.work.flop <= flop for a in kernels(plan, Attention))
    assert sum(a.backward for a in kernels(plan, Attention)) <= len(kernels(plan, Attention)) / 2


def test_all_classes_of_kernels_are_in_a_round_once():
    plan = make_plan(device("cpu"), SMALL, mode="quick", cuda=False, ranks=2)
    assert len(set(plan.items)) == len(plan.items)
    assert plan.items.count(LaunchItem()) == 1
    sizes: dict[str, set[int]] = {}
    for kernel in kernels(plan, MemoryBound):
        sizes.setdefault(kernel.memory_class, set()).add(kernel.nbytes)
    assert {name: len(found) for name, found in sizes.items()} == {"elementwise": 5, "activation": 5, "norm": 5}


def test_full_measures_more_of_everything():
    quick, full = (make_plan(device("cpu"), SMALL, mode=m, cuda=False, ranks=2) for m in ("quick", "full"))
    assert set(quick.items) < set(full.items)
    assert full.rounds > quick.rounds
    assert full.budget_s > quick.budget_s


def test_six_operations_of_four_sizes_between_two_ranks():
    found = collectives(make_plan(device("cpu"), SMALL, mode="quick", cuda=False, ranks=2))
    assert {i.op for i in found} == {
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv",
    }  # fmt: skip
    assert {i.nbytes for i in found} == {2**10, 2**16, 2**20, 2**24}
    assert {(i.ranks, i.nodes) for i in found} == {((0, 1), 1)}


def test_collectives_that_no_memory_would_hold_are_left_out():
    plan = make_plan(device("h100"), Limits(1e15, 100e6), mode="quick", cuda=True, ranks=8, nodes=2)
    assert max(i.nbytes for i in collectives(plan)) <= 100e6


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (8, 1), (16, 2), (32, 4), (4, 4), (1, 1)])
def test_groups_are_distinct_and_spread_evenly(ranks, nodes):
    each = ranks // nodes
    shapes = group_shapes(ranks, nodes)
    seen = set()
    for members, count in shapes:
        on = [sum(rank // each == node for rank in members) for node in range(nodes)]
        used = [ranks_there for ranks_there in on if ranks_there]
        assert members[0] == 0
        assert len(used) == count
        assert len(set(used)) == 1
        seen.add((len(members), count))
    assert len(seen) == len(shapes)
    assert ((ranks, nodes) in seen) == (ranks > 1)
    assert (nodes in {count for _, count in shapes}) == (ranks > 1)


def test_compute_is_measured_beside_an_all_reduce_over_the_largest_group():
    plan = make_plan(device("h100"), EVERYTHING, mode="quick", cuda=True, ranks=8)
    (item,) = [item for item in plan.items if isinstance(item, InterferenceItem)]
    assert (item.collective.op, item.collective.ranks) == ("all_reduce", tuple(range(8)))
    assert isinstance(item.product.kernel, Gemm)


@pytest.mark.parametrize(("name", "cuda", "dtype"), [("h100", True, "bf16"), ("cpu", False, "fp32")])
def test_grouped_products_have_their_rows_or_their_inner_dimension_divided(name, cuda, dtype):
    plan = make_plan(device(name), EVERYTHING if cuda else SMALL, mode="quick", cuda=cuda, ranks=1)
    found = kernels(plan, GroupedGemm)
    assert {kernel.over for kernel in found} == {"m", "k"}
    assert {kernel.dtype for kernel in found} == {dtype}
    assert all(kernel.rows >= 8 * kernel.groups for kernel in found)
    assert cuda or all(kernel.work.flop <= 1.1 * SMALL.flop for kernel in found)


def test_one_rank_says_that_it_has_nobody_to_talk_to():
    plan = make_plan(device("cpu"), SMALL, mode="quick", cuda=False, ranks=1)
    assert not collectives(plan)
    assert not any(isinstance(item, InterferenceItem) for item in plan.items)
    assert plan.notes == (
        "one rank has nobody to communicate with: collectives and their interference were not measured",
    )


def products(**plan):
    model, cluster = simpar.mlp("784-500-10", loss="mse"), Cluster.parse("cpu:1x2")
    plan = Plan(**{"micro_batch": 64, "precision": "fp32", "optimizer": "sgd", **plan})
    return job_products(lower(model, cluster, lay_out(plan, model, cluster)))


def test_a_job_s_products_are_forward_input_and_weight_gradients():
    found = {(i.kernel.m, i.kernel.n, i.kernel.k): i for i in products()}
    # y = x Wᵀ; dx = dy W, but not for the first layer, whose input needs no gradient; dW = dyᵀ x
    assert set(found) == {(64, 500, 784), (500, 784, 64), (64, 10, 500), (64, 500, 10), (10, 500, 64)}
    assert {shape for shape, item in found.items() if item.transposed} == {(64, 500, 784), (64, 10, 500)}
    assert all(item.job for item in found.values())


def test_products_of_the_grid_are_not_measured_twice():
    plan = make_plan(device("cpu"), SMALL, mode="quick", cuda=False, ranks=1)
    again = [KernelItem(kernels(plan, Gemm)[0], job=True)]
    assert make_plan(device("cpu"), SMALL, mode="quick", cuda=False, ranks=1, job=again).items == plan.items


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (Gemm(64, 64, 64, "fp8"), "the job's product 64×64×64 was left out: fp8 cannot be measured on cpu"),
        (Gemm(8192, 8192, 8192, "fp32"), "left out: its 1.1 TFLOP take too long here"),
        (Gemm(2**20, 512, 1, "fp32", 1, 4), "left out: it is too large for the memory"),
    ],
)
def test_what_cannot_be_measured_is_said(product, reason):
    plan = make_plan(device("cpu"), SMALL, mode="quick", cuda=False, ranks=2, job=[KernelItem(product, job=True)])
    assert product not in kernels(plan, Gemm)
    assert reason in plan.notes[-1]
