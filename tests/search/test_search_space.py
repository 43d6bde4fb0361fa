"""The space: every valid plan is in it once, and families have bounds that none of their plans undercuts."""

from collections import Counter
from itertools import product

import pytest
from synthetic import small_transformer

from simpar import Cluster, Plan, PlanError, SimparError
from simpar.job import read_model
from simpar.search.bound import Bounds
from simpar.search.families import Families
from simpar.search.space import AXES, Space, axes_of

EXPERTS = small_transformer(moe={"experts": 4, "top_k": 2, "ffn_hidden": 256}, layers=4)
SMALL = Cluster.parse("h100-sxm:2x2")


def space_of(model, cluster, base, choices=None):
    return Space(model, cluster, base, choices or {})


def test_every_default_choice_is_a_field_of_a_plan_and_every_combination_a_plan():
    assert set(AXES) <= set(Plan.model_fields)
    base = Plan(global_batch=32)
    found = [tuple(sorted(fields.items())) for fields in space_of(read_model("gpt2"), SMALL, base).plans()]
    assert len(found) == len(set(found)) > 300
    for fields in found:
        base.replace(**dict(fields))


def test_fields_of_experts_are_searched_where_there_are_some():
    assert {"ep", "etp"} & set(axes_of({}, small_transformer())) == set()
    assert {"ep", "etp"} <= set(axes_of({}, EXPERTS))


@pytest.mark.parametrize("model", [small_transformer(), EXPERTS], ids=["dense", "experts"])
def test_the_space_is_all_that_is_valid(model):
    # a second way to it: every product of plain lists, kept if the plan can be laid out and scheduled
    base = Plan(global_batch=12, seq_len=96)
    space = space_of(model, SMALL, base, {"recompute": ["none"]})
    names = [name for name in space.axes if name != "recompute"]
    listed = Counter(tuple(fields[name] for name in names) for fields in space.plans())
    bounds = Bounds(model, SMALL, space.axes)
    lists = {
        "tp": (1, 2, 4),
        "cp": (1, 2, 4),
        "micro_batch": (1, 2, 3, 4, 6, 12),
        "sequence_parallel": (False, True),
        "pp": (1, 2, 4),
        "schedule": ("1f1b", "interleaved"),
        "vpp": (1, 2, 3, 4),
        "zero": (0, 1, 2, 3),
        **({"ep": (1, 2, 4), "etp": (1, 2, 4)} if model is EXPERTS else {}),
    }
    valid = set()
    for values in product(*(lists[name] for name in names)):
        fields = dict(zip(names, values, strict=True))
        if fields["zero"] and fields["tp"] * fields["pp"] == 4:
            continue  # nothing to shard over: the same as zero 0
        if fields.get("etp", 1) not in (1, fields["tp"]):
            continue  # experts in other pieces are asked for by name
        try:
            plan = base.replace(**fields)
            bounds.of(plan)
        except SimparError:
            continue
        valid.add(values)
    assert set(listed.values()) == {1}
    legal = {values for values in listed if _is_legal(bounds, base, dict(zip(names, values, strict=True)))}
    assert legal == valid


def _is_legal(bounds, base, fields):
    """Microbatches that form no equal groups are the one rule that the space leaves to the schedule."""
    try:
        bounds.of(base.replace(**fields))
    except PlanError as error:
        return "equal groups" not in str(error)
    return True


def test_without_context_parallelism_its_methods_are_one():
    base = Plan(global_batch=4, seq_len=512)
    choices = {"cp_method": ["ring", "all_gather"], "recompute": ["none"], "zero": [0]}
    methods = Counter(
        (fields["cp"] > 1, fields["cp_method"]) for fields in space_of(EXPERTS, SMALL, base, choices).plans()
    )
    assert set(methods) == {(False, "ring"), (True, "ring"), (True, "all_gather")}
    assert methods[True, "ring"] == methods[True, "all_gather"]


def test_heads_that_are_traded_are_divided():
    base = Plan(global_batch=8, seq_len=1024, cp_method="all_to_all")
    space = space_of(small_transformer(), Cluster.parse("h100-sxm:2x8"), base)
    assert {(f["tp"], f["cp"]) for f in space.families() if f["tp"] == 4} == {(4, 1), (4, 2)}  # 8 heads


@pytest.mark.parametrize(
    ("cluster", "choices"),
    [
        ("h100-sxm:2x2", {}),
        ("h100-sxm:4", {"zero": [0, 1]}),
        ("l40s:2x2", {"schedule": ["gpipe", "zb-h1", "zb-v", "dualpipe", "looped-bfs"]}),
        ("h100-sxm:2x2", {"layer_split": ["balanced", (1, 1, 1, 1)], "tp": [1], "cp": [1]}),
        ("h100-sxm:2x2", {"dp_shard": [1, 2], "cp": [1]}),
        ("h100-sxm:2x2", {"rank_order": ["tp-pp-dp"], "grad_compression": ["int8"], "zero": [0]}),
        ({"nodes": [{"device": "h100-sxm", "count": 1}, {"device": "h200-sxm", "count": 1}]}, {"tp": [4, 8]}),
    ],
)
@pytest.mark.parametrize("model", [small_transformer(), EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("memory_gib", [80, 0.12])
def test_no_plan_undercuts_its_family(model, cluster, choices, memory_gib):
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else Cluster.model_validate(cluster)
    if not cluster.groups:
        device = cluster.device.replace(memory_bytes=int(memory_gib * 2**30), context_bytes=0)
        cluster = cluster.replace(device=device)
    base = Plan(global_batch=8, seq_len=128)
    space = space_of(model, cluster, base, {"micro_batch": [1, 4], **choices})
    bounds, families = Bounds(model, cluster, space.axes), Families(space, Bounds(model, cluster, space.axes), base)
    outlooks = [(family, families.outlook(family)) for family in space.families()]
    assert sum(outlook.plans for _, outlook in outlooks) == len(list(space.plans()))
    for family, outlook in outlooks:
        found = {"invalid": 0, "too_large": 0}
        fitting = []
        for fields in (fields for pipeline in space.pipelines(family) for fields in pipeline.plans()):
            try:
                bound = bounds.of(base.model_copy(update=fields))
            except SimparError:
                found["invalid"] += 1
                continue
            if bound.memory_bytes > bounds.capacity_bytes:
                found["too_large"] += 1
            else:
                fitting.append((fields, bound))
        assert outlook.invalid <= found["invalid"]
        # what does not fit is not asked whether it breaks a rule as well
        assert outlook.too_large + outlook.invalid <= found["too_large"] + found["invalid"]
        if outlook.bound is None:
            assert not fitting
            continue
        for _, bound in fitting:
            assert outlook.bound.step_s <= bound.step_s
            assert outlook.bound.memory_bytes <= bound.memory_bytes
        limit_s = min((bound.step_s for _, bound in fitting), default=0.0) * 1.2
        opened = families.opened(family, limit_s)
        assert opened.plans == [each for each in fitting if each[1].step_s <= limit_s]
        assert opened.invalid <= found["invalid"]
        assert len(opened.plans) + opened.invalid + opened.too_large + opened.pruned == outlook.plans


@pytest.mark.parametrize(
    ("cluster", "choices"),
    [
        ("h100-sxm:2x4", {}),
        ("h100-sxm:4", {"recompute": ["none"], "schedule": ["dualpipe", "zb-h1"]}),
        ("l40s:2x4", {"ep": [2, 4], "etp": [1, 2]}),
        ("h100-sxm:2x4", {"layer_split": ["uniform", "balanced", (3, 1)], "ep": [1, 2]}),
        ({"nodes": [{"device": "h100-sxm", "count": 1}, {"device": "h200-sxm", "count": 1}]}, {"tp": [2, 8]}),
    ],
)
@pytest.mark.parametrize("memory_gib", [80, 0.3, 0.12])
def test_no_family_undercuts_its_branch(cluster, choices, memory_gib):
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else Cluster.model_validate(cluster)
    if not cluster.groups:
        device = cluster.device.replace(memory_bytes=int(memory_gib * 2**30), context_bytes=0)
        cluster = cluster.replace(device=device)
    base = Plan(global_batch=8, seq_len=128)
    space = space_of(EXPERTS, cluster, base, {"micro_batch": [1, 4], **choices})
    bounds, common = (Bounds(EXPERTS, cluster, space.axes, without_experts=without) for without in (False, True))
    families = Families(space, bounds, base, common)
    branches = list(space.branches())
    assert sorted(map(str, space.families())) == sorted(str(family) for branch in branches for family in branch)
    assert max(map(len, branches)) > 1
    for branch in branches:
        outlook, inside = families.branch_outlook(branch), [families.outlook(family) for family in branch]
        assert outlook.plans == sum(each.plans for each in inside)
        if outlook.bound is None:
            assert not any(each.bound for each in inside)
            assert outlook.invalid + outlook.too_large == outlook.plans
            continue
        assert (outlook.invalid, outlook.too_large) == (0, 0)
        for each in inside:
            if each.bound is not None:
                assert outlook.bound.step_s <= each.bound.step_s
                assert outlook.bound.memory_bytes <= each.bound.memory_bytes


def test_where_experts_are_next_to_nothing_a_branch_is_as_slow_as_its_families():
    # with as wide a stream as usual, so that the kernels around experts are next to nothing, too
    model = small_transformer(hidden=4096, heads=32, layers=4, moe={"experts": 2, "top_k": 1, "ffn_hidden": 16})
    cluster, base = Cluster.parse("h100-sxm:2x4"), Plan(global_batch=64, seq_len=8192)
    space = space_of(model, cluster, base, {"micro_batch": [1]})
    bounds, common = (Bounds(model, cluster, space.axes, without_experts=without) for without in (False, True))
    families = Families(space, bounds, base, common)
    seen = 0
    for branch in space.branches():
        for family in branch:
            if family["ep"] == family["etp"] == 1:
                whole, alone = families.outlook(family).bound, families.branch_outlook(branch).bound
                assert 0.9 * whole.step_s < alone.step_s < whole.step_s
                seen += 1
    assert seen > 8
