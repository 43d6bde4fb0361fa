"""Who gets what: layers to virtual stages, samples to microbatches."""

import heapq
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

from simpar.errors import PlanError, nearest

Split = Literal["uniform", "balanced", "greedy"] | tuple[int, ...]
_RULES = ("uniform", "balanced", "greedy")


def partition(
    layers: int,
    stages: int,
    *,
    split: Split = "uniform",
    layer_cost: float | Sequence[float] = 1.0,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    speeds: Sequence[float] = (),
) -> tuple[range, ...]:
    """Contiguous layers of each virtual stage; every layer lies on exactly one.

    * ``uniform``: as many layers everywhere; those left over go to the middle stages from the last one
      backward, then to the first stage, never to the last. The first stage also holds the embedding and the
      last one the head and the loss, and under 1F1B a later stage keeps fewer microbatches alive. 30 layers
      on 4 stages become 7, 8, 8, 7, as with Megatron's ``--account-for-embedding-in-pipeline-split`` and
      ``--account-for-loss-in-pipeline-split``.
    * ``balanced``: the costliest stage costs as little as possible, where a stage costs its layers, and the
      first and the last one ``first_cost`` and ``last_cost`` on top, over the stage's speed. Ties are broken as in
      ``uniform``.
    * ``greedy``: layers go to a stage until the costs so far, those of the head at the end, reach its share of the
      whole (nanotron's ``build_model``, where a cost is a number of weights). A head of many layers' cost leaves the
      stages before it empty, there as here. At an exact tie that code gives the stage one layer more; steps and peaks
      of the one published model that ties say that it did not, as if its vocabulary were a little smaller than stated.
    * a tuple: as many layers as it says.

    The last and the first stage may be left without layers where they have an embedding or a head to do: with
    ``uniform`` if stages are more than layers (30 layers on 32 stages, as Megatron's
    ``--account-for-embedding-in-pipeline-split`` counts), with ``balanced`` and ``greedy`` if these have a cost, with a
    tuple if it says so.

    >>> [len(r) for r in partition(30, 4)], [len(r) for r in partition(30, 4, split="balanced", last_cost=3)]
    ([7, 8, 8, 7], [8, 8, 9, 5])

    Args:
        layers: layers of the model.
        stages: virtual stages of the pipeline.
        split: the rule.
        layer_cost: cost of a layer, in any unit, or of each.
        first_cost: cost of the embedding in the same unit.
        last_cost: cost of the head and the loss in the same unit.
        speeds: of the stages, in any unit, which ``balanced`` heeds; empty where all are alike.

    Raises:
        PlanError: the split cannot hold these layers.
    """
    if layers < 1 or stages < 1:
        raise PlanError(f"{layers} layers on {stages} stages is no pipeline; set both to at least 1")
    if isinstance(split, str):
        if split not in _RULES:
            raise PlanError(
                f"layer split '{split}' is not known{nearest(split, _RULES)}; "
                f"take {', '.join(map(repr, _RULES))} or one number of layers per stage"
            )
        each = [layer_cost] * layers if isinstance(layer_cost, int | float) else list(layer_cost)
        extras = _extras(stages, first_cost, last_cost)
        counts = _by_rule([*map(_checked_cost, each)], stages, split, extras, speeds or [1.0] * stages)
    else:
        _check_counts(layers, stages, split)
        counts = list(split)
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def _by_rule(costs: list[float], stages: int, rule: str, extras: list[float], speeds: Sequence[float]) -> list[int]:
    layers = len(costs)
    ends = sum(extra > 0 for extra in extras) if stages > 1 else 0
    if stages > layers + ends:
        raise PlanError(
            f"{stages} stages are more than the {layers} layers{' and both ends' if ends == 2 else ''}, but each stage "
            f"needs one; set pp × vpp to at most {layers + ends}"
        )
    if rule == "greedy":
        return _greedy(costs, extras)
    if rule == "balanced":
        if len(set(costs)) == 1:
            return _spread(layers, extras, costs[0], speeds)
        return _pack(costs, extras) if len(set(speeds)) == 1 else _pack_at(costs, extras, speeds)
    even = [1.0] * stages
    if stages <= layers:
        return _spread(layers, [0.0] * stages, 1.0, even)
    return _spread(layers, [1.0 if extra > 0 else 0.0 for extra in extras], 1.0, even)


def _greedy(costs: Sequence[float], extras: list[float]) -> list[int]:
    stages = len(extras)
    share = (sum(extras) + sum(costs)) / stages
    counts, stage, cost = [0] * stages, 0, extras[0] if stages > 1 else 0.0
    for layer_cost in costs:
        counts[stage] += 1
        cost += layer_cost
        if cost >= share * (stage + 1) and stage < stages - 1:
            stage += 1
    return counts


def _pack(costs: Sequence[float], extras: Sequence[float]) -> list[int]:
    """Layers per stage with the smallest possible costliest stage, where layers differ in cost.

    Every stage's cost is a sum of neighbouring layers, so the least limit that all stages can keep is found by halving;
    stages are filled up to it from the last one on, as later stages keep fewer microbatches alive.
    """
    low, high = max(costs), sum(costs) + sum(extras)
    while high - low > 1e-9 * high:
        limit = (low + high) / 2
        if _filled(costs, extras, limit) is None:
            low = limit
        else:
            high = limit
    counts = _filled(costs, extras, high)
    assert counts is not None, "all layers fit under the sum of all costs"
    return counts


def _pack_at(costs: Sequence[float], extras: Sequence[float], speeds: Sequence[float]) -> list[int]:
    """Layers per stage with the smallest possible slowest stage, where layers differ in cost and stages in speed.

    Stage by stage, for each number of layers that the stages so far may have together: how fast the slowest can be.
    """
    ends = range(len(costs) + 1)
    cost_to = [0.0, *accumulate(costs)]
    slowest, taken = [0.0, *[math.inf] * len(costs)], []
    for extra, speed in zip(extras, speeds, strict=True):
        found, sizes = [math.inf] * len(ends), [0] * len(ends)
        for end in ends:
            for size in range(0 if extra > 0 else 1, end + 1):
                own = (extra + cost_to[end] - cost_to[end - size]) / speed
                if own >= found[end]:
                    break  # more layers take even longer
                if slowest[end - size] < found[end]:
                    found[end], sizes[end] = max(own, slowest[end - size]), size
        slowest = found
        taken.append(sizes)
    counts, end = [], len(costs)
    for sizes in reversed(taken):
        counts.append(sizes[end])
        end -= sizes[end]
    return counts[::-1]


def _filled(costs: Sequence[float], extras: Sequence[float], limit: float) -> list[int] | None:
    """Layers per stage, from the last one on as many as cost no more than the limit; None if layers are left over."""
    least = [0 if extra > 0 else 1 for extra in extras]
    counts, left = [0] * len(extras), len(costs)
    for stage in range(len(extras) - 1, -1, -1):
        cost, spared = extras[stage], sum(least[:stage])
        while left > spared and (cost + costs[left - 1] <= limit or counts[stage] < least[stage]):
            left -= 1
            cost += costs[left]
            counts[stage] += 1
        if cost > limit:
            return None
    return None if left else counts


def samples_to_microbatches(global_batch: int, dp: int, micro_batch: int) -> int:
    """Microbatches that each data-parallel replica runs in a step.

    >>> samples_to_microbatches(1024, dp=16, micro_batch=2)
    32

    Raises:
        PlanError: the batch does not divide, or a number is below 1.
    """
    if min(global_batch, dp, micro_batch) < 1:
        raise PlanError(
            f"global_batch={global_batch}, dp={dp}, micro_batch={micro_batch} must all be at least 1; raise "
            "the smallest"
        )
    samples = dp * micro_batch
    if global_batch % samples:
        below = global_batch // samples * samples
        choices = f"{below} or {below + samples}" if below else f"{samples}"
        raise PlanError(
            f"global batch {global_batch} is not a multiple of dp {dp} × micro-batch {micro_batch} = "
            f"{samples}; set global_batch={choices}"
        )
    return global_batch // samples


def _spread(layers: int, extras: Sequence[float], layer_cost: float, speeds: Sequence[float]) -> list[int]:
    """Layers per stage with the smallest possible maximum of ``(extras[i] + layer_cost * counts[i]) / speeds[i]``.

    Layers cost alike, so giving one after the other to the stage that is then the cheapest is exact: that
    stage's new cost is the least to which any choice could have led.
    """
    last = len(extras) - 1
    # A stage may stay empty only if it has something else to do.
    counts = [0 if extra > 0 else 1 for extra in extras]

    def bid(stage: int) -> tuple[float, bool, int]:
        preference = {0: 1, last: 2}.get(stage, -stage)
        return (extras[stage] + layer_cost * (counts[stage] + 1)) / speeds[stage], counts[stage] > 0, preference

    bids = [(bid(stage), stage) for stage in range(len(extras))]
    heapq.heapify(bids)
    for _ in range(layers - sum(counts)):
        stage = bids[0][1]
        counts[stage] += 1
        heapq.heapreplace(bids, (bid(stage), stage))
    return counts


def _extras(stages: int, first_cost: float, last_cost: float) -> list[float]:
    for name, cost in (("first_cost", first_cost), ("last_cost", last_cost)):
        if not (math.isfinite(cost) and cost >= 0):
            raise PlanError(f"{name} is {cost}, but a cost is finite and not negative; set {name}=0 or more")
    extras = [0.0] * stages
    extras[0] += first_cost
    extras[-1] += last_cost
    return extras


def _checked_cost(layer_cost: float) -> float:
    if not (math.isfinite(layer_cost) and layer_cost > 0):
        raise PlanError(f"layer_cost is {layer_cost}, but a layer costs something finite; set layer_cost above 0")
    return layer_cost


def _check_counts(layers: int, stages: int, counts: tuple[int, ...]) -> None:
    shown = " + ".join(map(str, counts))
    if len(counts) != stages:
        raise PlanError(
            f"layer split {shown} names {len(counts)} stages, but the pipeline has {stages}; "
            f"give {stages} numbers of layers"
        )
    empty = next((i for i, count in enumerate(counts) if count < (0 if i in (0, stages - 1) else 1)), None)
    if empty is not None:
        raise PlanError(
            f"layer split {shown} gives stage {empty} {counts[empty]} layers, but only the first and the "
            "last stage, which hold embedding and head, can do without; give it at least 1"
        )
    if sum(counts) != layers:
        raise PlanError(
            f"layer split {shown} = {sum(counts)} does not cover the model's {layers} layers; "
            f"change it by {layers - sum(counts):+d}"
        )
