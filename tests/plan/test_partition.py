"""Layers to stages and samples to microbatches."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.errors import PlanError
from simpar.plan.partition import partition, samples_to_microbatches


def _sizes(*args: Any, **options: Any) -> list[int]:
    return [len(layers) for layers in partition(*args, **options)]


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (32, 4, [8, 8, 8, 8]),
        (30, 4, [7, 8, 8, 7]),  # a user's model whose 30 layers must not become 4 × 7 = 28
        (7, 2, [4, 3]),  # likewise 7 layers on 2 stages
        (31, 4, [8, 8, 8, 7]),
        (29, 4, [7, 7, 8, 7]),
        (126, 16, [7, *[8] * 14, 7]),  # Llama 3.1 405B on 16 ranks, arXiv:2407.21783, section 3.3.2
        (5, 1, [5]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_uniform(layers: int, stages: int, sizes: list[int]) -> None:
    assert _sizes(layers, stages) == sizes


@pytest.mark.parametrize(
    ("layers", "stages", "costs", "sizes"),
    [
        (30, 4, {"first_cost": 1, "last_cost": 1}, [7, 8, 8, 7]),
        (30, 4, {"last_cost": 3}, [8, 8, 9, 5]),
        (8, 4, {"last_cost": 10}, [2, 3, 3, 0]),
        (8, 4, {"first_cost": 10}, [0, 3, 3, 2]),
        (4, 4, {"first_cost": 1, "last_cost": 1}, [1, 1, 1, 1]),  # no empty stage where it gains nothing
        (61, 8, {"layer_cost": 0.1, "last_cost": 0.15}, [7, 8, 8, 8, 8, 8, 8, 6]),
        (6, 1, {"first_cost": 5, "last_cost": 5}, [6]),
    ],
)
def test_balanced(layers: int, stages: int, costs: dict[str, float], sizes: list[int]) -> None:
    assert _sizes(layers, stages, split="balanced", **costs) == sizes


def test_explicit() -> None:
    assert partition(6, 3, split=(1, 3, 2)) == (range(1), range(1, 4), range(4, 6))
    assert partition(2, 4, split=(0, 1, 1, 0)) == (range(0), range(1), range(1, 2), range(2, 2))


SHAPES = st.integers(1, 12).flatmap(lambda stages: st.tuples(st.integers(stages, 200), st.just(stages)))
COSTS = st.floats(0, 20, allow_nan=False)


def _worst(split: Any, layers: int, stages: int, first: float, last: float) -> float:
    parts = _sizes(layers, stages, split=split, first_cost=first, last_cost=last)
    costs = [float(size) for size in parts]
    costs[0] += first
    costs[-1] += last
    return max(costs)


@given(SHAPES, st.sampled_from(["uniform", "balanced"]), COSTS, COSTS)
def test_each_layer_on_one_stage_in_order(shape: tuple[int, int], split: Any, first: float, last: float) -> None:
    layers, stages = shape
    parts = partition(layers, stages, split=split, first_cost=first, last_cost=last)
    assert len(parts) == stages
    assert list(itertools.chain(*parts)) == list(range(layers))
    assert all(len(part) >= 1 for part in parts[1:-1])
    if split == "uniform":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert len(parts[-1]) == layers // stages


@given(SHAPES, COSTS, COSTS)
def test_balanced_is_no_worse_than_uniform(shape: tuple[int, int], first: float, last: float) -> None:
    balanced, uniform = (_worst(split, *shape, first, last) for split in ("balanced", "uniform"))
    assert balanced <= uniform


@given(SHAPES)
def test_balanced_without_ends_is_uniform(shape: tuple[int, int]) -> None:
    assert partition(*shape, split="balanced") == partition(*shape)


@given(st.integers(2, 4), st.integers(0, 8), st.integers(0, 6), st.integers(0, 6))
@settings(max_examples=80)
def test_balanced_is_the_best_of_all_splits(stages: int, extra: int, first: int, last: int) -> None:
    layers = stages + extra
    lowest = [0 if first else 1, *[1] * (stages - 2), 0 if last else 1]
    every = (s for s in itertools.product(range(layers + 1), repeat=stages) if sum(s) == layers)
    best = min(
        max(first + sizes[0], last + sizes[-1], *sizes)
        for sizes in every
        if all(size >= low for size, low in zip(sizes, lowest, strict=True))
    )
    assert _worst("balanced", layers, stages, first, last) == best


@given(
    st.lists(st.sampled_from([1.0, 2.0, 2.5, 3.0]), min_size=2, max_size=4),
    st.lists(st.integers(1, 3), min_size=4, max_size=9),
    st.integers(0, 4),
)
@settings(max_examples=80)
def test_balanced_heeds_speeds_as_well_as_any_split(speeds: list[float], costs: list[int], last: int) -> None:
    layers, stages = len(costs), len(speeds)

    def worst(cuts: Iterable[int]) -> float:
        ends = [*itertools.accumulate(cuts)]
        work = [float(sum(costs[end - size : end])) for end, size in zip(ends, cuts, strict=True)]
        work[-1] += last
        return max(each / speed for each, speed in zip(work, speeds, strict=True))

    lowest = [*[1] * (stages - 1), 0 if last else 1]
    every = (s for s in itertools.product(range(layers + 1), repeat=stages) if sum(s) == layers)
    best = min(worst(s) for s in every if all(size >= low for size, low in zip(s, lowest, strict=True)))
    found = _sizes(layers, stages, split="balanced", layer_cost=costs, last_cost=last, speeds=speeds)
    assert worst(found) == pytest.approx(best)


def test_uniform_heeds_no_speed() -> None:
    assert _sizes(8, 2, speeds=[3.0, 1.0]) == [4, 4]
    assert _sizes(8, 2, split="balanced", speeds=[3.0, 1.0]) == [6, 2]


@pytest.mark.parametrize(
    ("layers", "stages", "options", "message"),
    [
        (
            4,
            8,
            {},
            "8 stages are more than the 4 layers, but each stage needs one; set pp × vpp to at most 4",
        ),
        (0, 2, {}, "0 layers on 2 stages is no pipeline; set both to at least 1"),
        (
            4,
            2,
            {"split": "balance"},
            "layer split 'balance' is not known; did you mean 'balanced'?; "
            "take 'uniform', 'balanced', 'greedy' or one number of layers per stage",
        ),
        (
            30,
            4,
            {"split": (7, 7, 7, 7)},
            "layer split 7 + 7 + 7 + 7 = 28 does not cover the model's 30 layers; change it by +2",
        ),
        (
            4,
            2,
            {"split": (1, 2, 1)},
            "layer split 1 + 2 + 1 names 3 stages, but the pipeline has 2; give 2 numbers of layers",
        ),
        (
            4,
            3,
            {"split": (2, 0, 2)},
            "layer split 2 + 0 + 2 gives stage 1 0 layers, but only the first and the last stage, "
            "which hold embedding and head, can do without; give it at least 1",
        ),
        (
            4,
            2,
            {"split": "balanced", "last_cost": float("nan")},
            "last_cost is nan, but a cost is finite and not negative; set last_cost=0 or more",
        ),
        (
            4,
            2,
            {"split": "balanced", "first_cost": -1},
            "first_cost is -1, but a cost is finite and not negative; set first_cost=0 or more",
        ),
        (
            4,
            2,
            {"layer_cost": 0},
            "layer_cost is 0, but a layer costs something finite; set layer_cost above 0",
        ),
    ],
)
def test_bad_partition(layers: int, stages: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        partition(layers, stages, **options)
    assert str(error.value) == message


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64))
def test_microbatches(microbatches: int, dp: int, micro_batch: int) -> None:
    assert samples_to_microbatches(microbatches * dp * micro_batch, dp, micro_batch) == microbatches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (1000, 16, 2),
            "global batch 1000 is not a multiple of dp 16 × micro-batch 2 = 32; set global_batch=992 or 1024",
        ),
        (
            (8, 16, 2),
            "global batch 8 is not a multiple of dp 16 × micro-batch 2 = 32; set global_batch=32",
        ),
        (
            (8, 0, 2),
            "global_batch=8, dp=0, micro_batch=2 must all be at least 1; raise the smallest",
        ),
    ],
)
def test_bad_batches(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(PlanError) as error:
        samples_to_microbatches(*arguments)
    assert str(error.value) == message


@given(
    st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=1, max_size=9),
    st.integers(1, 4),
    st.sampled_from([0.0, 1.0, 4.0]),
    st.sampled_from([0.0, 3.0]),
)
def test_layers_that_differ_in_cost_are_balanced_as_well_as_they_can_be(costs, stages, first, last):
    """Against all ways to cut the layers."""
    extras = [0.0] * stages
    extras[0] += first
    extras[-1] += last
    least = [0 if extra else 1 for extra in extras]
    if sum(least) > len(costs) or stages > len(costs):
        return
    found = partition(len(costs), stages, split="balanced", layer_cost=costs, first_cost=first, last_cost=last)

    def costliest(edges: tuple[int, ...]) -> float:
        return max(
            extra + sum(costs[a:b])
            for extra, a, b in zip(extras, *zip(*itertools.pairwise(edges), strict=True), strict=True)
        )

    ways = [
        (0, *cuts, len(costs))
        for cuts in itertools.combinations_with_replacement(range(len(costs) + 1), stages - 1)
        if all(b - a >= n for n, a, b in zip(least, (0, *cuts), (*cuts, len(costs)), strict=True))
    ]
    assert costliest((*(r.start for r in found), len(costs))) == pytest.approx(min(map(costliest, ways)))
    assert [i for r in found for i in r] == list(range(len(costs)))


def test_greedy_fills_stages_by_each_layer_s_own_weights():
    assert [len(r) for r in partition(6, 2, split="greedy", layer_cost=[1, 1, 1, 1, 4, 4])] == [5, 1]
