"""Experts on ranks: what they compute, hold and send, by the model's closed forms and Megatron's rank order."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from synthetic import even_model, small_transformer

from simpar import Cluster, Overlap, Plan, PlanError, Transformer, simulate
from simpar.engine.simulate import execute
from simpar.faults.description import Faults
from simpar.model.work import GroupedGemm
from simpar.plan.layout import Layout, lay_out
from simpar.program.groups import Groups
from simpar.program.ir import Block, Collective, Launch, Program, Run, Wait, open_run
from simpar.program.lower import lower

CLUSTER = Cluster.parse("h100-sxm:4x4")
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 512}
SHARED = {**MOE, "shared_ffn_hidden": 256, "shared_gate": True, "first_dense": 1}
SEQ = 512


def model(moe: dict[str, Any] | None = None, **changes: Any) -> Transformer:
    return small_transformer(**{"kv_heads": 4, "moe": moe or MOE, **changes})


def layout_of(described: Transformer, cluster: Cluster = CLUSTER, **plan: Any) -> Layout:
    return lay_out(Plan(**{"seq_len": SEQ, **plan}), described, cluster)


def program(described: Transformer, cluster: Cluster = CLUSTER, *, fold: bool = True, **plan: Any) -> Program:
    return lower(described, cluster, layout_of(described, cluster, **plan), fold=fold)


def runs(found: Program) -> list[tuple[Block, int]]:
    """Every block as often as it runs on all ranks of the job."""
    return [
        (block, rank.replicas)
        for rank in found.ranks
        for i in rank.instructions
        if isinstance(i, Run)
        for block in i.operation.blocks
    ]


def traffic(found: Program, stream: str) -> Counter[str]:
    """Bytes of the collectives inside layers by kind, over all ranks."""
    total: Counter[str] = Counter()
    for block, count in runs(found):
        for i in block.body:
            if isinstance(i, Collective) and i.group.stream == stream:
                total[i.op] += int(i.nbytes) * count
    return total


PLANS: list[dict[str, Any]] = [
    {"ep": 8},
    {"ep": 4, "etp": 2},
    {"tp": 2, "ep": 4, "sequence_parallel": True},
    {"tp": 4, "ep": 8, "etp": 1, "sequence_parallel": True},
    {"tp": 2, "cp": 2, "ep": 8, "etp": 1, "sequence_parallel": True},
    {"pp": 2, "ep": 4, "grad_accum": 2, "zero": 1},
    {"tp": 2, "ep": 1, "etp": 1, "sequence_parallel": True, "zero": 3},
]


def name(plan: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in plan.items())


# ---- work -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS, ids=name)
@pytest.mark.parametrize("moe", [MOE, SHARED, {**MOE, "pattern": "DE"}], ids=["all", "shared", "every other"])
def test_ranks_compute_the_model_s_own_flop(moe, plan):
    described = model(moe)
    found = program(described, **plan)
    products: Counter[str] = Counter()
    for block, count in runs(found):
        for i in block.body:
            if isinstance(i, Launch) and i.name != "attention":
                products[i.phase] += round(i.kernel.work.flop) * count
    tokens = layout_of(described, **plan).global_batch * SEQ
    expected = described.flop_per_token(SEQ).matmul * tokens
    assert products["forward"] == expected
    assert products["backward"] + products["weight_grad"] == 2 * expected


def test_without_sequence_parallelism_tensor_parallel_ranks_share_each_expert():
    described = model()
    found = program(described, tp=2, ep=4)
    rows = {(i.kernel.rows, i.kernel.n, i.kernel.groups) for i in launches(found) if i.name == "expert up"}
    assert rows == {(SEQ * 2, 2 * 512 // 2, 2)}
    assert traffic(found, "etp") == {}
    # every token is sent by each of the two ranks that hold it
    assert traffic(found, "ep")["all_to_all"] == 2 * 4 * 4 * SEQ * 8 * 2 * 512 * 2


def launches(found: Program) -> list[Launch]:
    return [i for block, _ in runs(found) for i in block.body if isinstance(i, Launch)]


def grouped(found: Program, name: str) -> GroupedGemm:
    kernels = {i.kernel for i in launches(found) if i.name == name}
    assert len(kernels) == 1
    kernel = kernels.pop()
    assert isinstance(kernel, GroupedGemm)
    return kernel


def test_weight_gradients_sum_over_rows_and_add_into_the_accumulated_ones():
    kernel = grouped(program(model(), ep=4), "expert up wgrad")
    assert (kernel.m, kernel.n, kernel.k, kernel.groups, kernel.over) == (1024, 512, SEQ * 2, 2, "k")
    assert kernel.out_bytes == 8  # an fp32 sum is read and written
    assert grouped(program(model(), ep=4, zero=3), "expert up wgrad").out_bytes == 2


def test_in_fp8_rows_are_cast_before_their_products():
    found = [i.name for i in launches(program(model(), ep=4, precision="fp8"))]
    for product in ("expert up", "expert down", "expert up dgrad", "expert down dgrad"):
        assert (f"{product} cast", product) in list(pairwise(found))
    assert not [name for name in [i.name for i in launches(program(model(), ep=4))] if name.endswith("cast")]


# ---- traffic --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS, ids=name)
def test_each_token_travels_to_its_experts_and_back_in_both_passes(plan):
    described = model()
    tokens = layout_of(described, **plan).global_batch * SEQ
    once = tokens * 2 * 512 * 2  # a row of bf16 for each of two experts
    sent = traffic(program(described, **plan), "ep")["all_to_all"]
    assert sent == (4 * described.layers * once if plan["ep"] > 1 else 0)


def test_ranks_that_share_an_expert_gather_rows_and_reduce_outputs():
    found = traffic(program(model(), ep=4, etp=2), "etp")
    once = 16 * 2 * SEQ * 2 * 512 * 2  # both members' rows, on every rank
    assert found == {"all_gather": 2 * 4 * once, "reduce_scatter": 2 * 4 * once}


def test_with_skewed_load_every_rank_costs_what_the_fullest_does():
    described = model()
    even, skewed = (grouped(program(described, ep=4, expert_skew=skew), "expert up") for skew in (0.0, 1.0))
    shares = described.moe.rank_shares(4, 1.0)
    assert even.m == SEQ * 2
    assert skewed.m == pytest.approx(SEQ * 2 * 4 * shares[0], abs=1)
    even_bytes, skewed_bytes = (
        traffic(program(described, ep=4, expert_skew=skew), "ep")["all_to_all"] for skew in (0.0, 1.0)
    )
    assert skewed_bytes / even_bytes == pytest.approx(4 * shares[0], rel=1e-3)


def test_a_capacity_bounds_the_fullest_rank():
    bounded = grouped(program(model(), ep=4, expert_skew=1.0, expert_capacity=1.0), "expert up")
    free = grouped(program(model(), ep=4, expert_skew=1.0), "expert up")
    assert bounded.m <= SEQ * 2 < free.m
    assert grouped(program(model({**MOE, "capacity_factor": 1.0}), ep=4, expert_skew=1.0), "expert up") == bounded
    # 8 experts that take half their share each leave half of all rows
    assert grouped(program(model(), ep=4, expert_capacity=0.5), "expert up").m == SEQ


def test_shared_experts_run_beside_the_traffic_if_told():
    def between(plan: dict[str, Any], collective: str) -> set[str]:
        """Kernels that run between a trade's start and its end."""
        block = next(b for b, _ in runs(program(model(SHARED), ep=8, **plan)) if "dispatch" in names(b))
        body = block.body
        begin = next(n for n, i in enumerate(body) if isinstance(i, Collective) and i.name == collective)
        end = next(n for n, i in enumerate(body) if n > begin and isinstance(i, Wait) and i.stream == "compute")
        return {i.name for i in body[begin:end] if isinstance(i, Launch)}

    overlap = {"overlap": Overlap(ep=True)}
    assert between(overlap, "dispatch") == {"shared expert up", "activation"}
    assert between(overlap, "combine") == {"shared expert down"}
    assert between({}, "dispatch") == between({}, "combine") == set()
    slow, fast = (simulate(job(SHARED, ep=8, launch_s=0.0, **plan)).step_time_s for plan in ({}, overlap))
    assert fast < slow


def names(block: Block) -> set[str]:
    return {i.name for i in block.body if isinstance(i, Launch | Collective)}


def job(moe: dict[str, Any], **plan: Any) -> dict[str, Any]:
    return {"model": model(moe), "cluster": CLUSTER, "plan": Plan(**{"seq_len": SEQ, **plan})}


# ---- ranks ----------------------------------------------------------------------------------------------------------


def coordinates(rank: int, layout: Layout) -> tuple[int, ...]:
    """Expert-tensor, expert, expert-data and pipeline index: Megatron-Core's order ``tp-ep-dp-pp`` of expert ranks."""
    found = []
    for size in (layout.etp, layout.plan.ep, layout.expert_replicas):
        rank, index = divmod(rank, size)
        found.append(index)
    return (*found, rank)


@pytest.mark.parametrize("plan", PLANS[:6], ids=name)
def test_groups_are_those_of_megatron_s_expert_ranks(plan):
    described = model()
    layout = layout_of(described, **plan)
    found = program(described, **plan)
    block = next(b for b, _ in runs(found) if "dispatch" in names(b))
    for rank in range(16):
        own = coordinates(rank, layout)
        expert_peers = {
            r for r in range(16) if coordinates(r, layout)[::2] == own[::2] and own[3] == coordinates(r, layout)[3]
        }
        run = next(
            Run(i.operation) for i in found.ranks[0].instructions if isinstance(i, Run) and block in i.operation.blocks
        )
        traded = {
            tuple(i.group.ranks) for i in open_run(run, rank, 0) if isinstance(i, Collective) and i.name == "dispatch"
        }
        assert {frozenset(ranks) for ranks in traded} == {frozenset(expert_peers)}
        stage, place = divmod(rank, 16 // layout.plan.pp)
        replica, tp_rank = divmod(place, layout.plan.tp)
        holders = Groups(layout, stage, replica, tp_rank, folded=False).experts.all
        assert set(holders.ranks) == {
            r for r in range(16) if coordinates(r, layout)[:2] == own[:2] and coordinates(r, layout)[3] == own[3]
        }


@pytest.mark.parametrize(
    ("plan", "simulated"),
    [
        ({"ep": 8}, 16),  # all replicas wait inside layers
        ({"etp": 2}, 16),
        ({"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True, "zero": 1}, 4),  # only its own tensor-parallel group
    ],
    ids=str,
)
def test_a_slow_gpu_holds_up_those_with_whom_it_shares_experts(plan, simulated):
    described, faults = model(), Faults(slow_gpus={5: 0.5})
    layout = layout_of(described, launch_s=0.0, **plan)
    folded = lower(described, CLUSTER, layout, faults=faults)
    whole = lower(described, CLUSTER, layout, fold=False, opened=True, faults=faults)
    assert (len(folded.ranks), len(whole.ranks)) == (simulated, 16)
    assert execute(folded, CLUSTER, faults).step_ns == execute(whole, CLUSTER, faults).step_ns


# ---- memory ---------------------------------------------------------------------------------------------------------


def held(found: Program, category: str) -> int:
    return sum(dict(rank.resident)[category] * rank.replicas for rank in found.ranks)


@pytest.mark.parametrize("plan", PLANS[:6], ids=name)
def test_ranks_hold_experts_once_per_expert_replica_and_the_rest_as_ever(plan):
    described = model(SHARED)
    layout, found = layout_of(described, **plan), program(described, **{**plan, "zero": 0})
    experts = 3 * described.moe.experts * described.expert_parameters
    hidden, tp = described.hidden, layout.plan.tp
    # norms, router and gate are replicated over tensor-parallel ranks, all matrices are split over them
    whole = 3 * described.moe.router_parameters(hidden) + (2 * described.layers + 1) * described.norm_parameters
    split = described.parameters - experts - whole
    ranks = (split + whole * tp) * layout.replicas + experts * layout.expert_replicas
    assert held(found, "weights") == 2 * ranks


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_are_sharded_over_the_ranks_that_hold_the_same_parameters(zero):
    # case M10: optimizer states of experts over world / (etp · ep · pp), not over dp; so each exists once in the job
    described = model()
    found = program(described, ep=4, etp=1, tp=2, sequence_parallel=True, zero=zero)
    whole = 4 * described.moe.router_parameters(512) + 9 * 512
    once = described.parameters + whole  # tensor-parallel ranks have what is not split twice
    width = 8 if zero == 3 else 12  # with ZeRO-3 the sharded weights are the master copy
    assert held(found, "optimizer") == pytest.approx(width * once, rel=1e-5)
    if zero >= 2:
        assert held(found, "gradients") == pytest.approx(4 * once, rel=1e-5)
    if zero == 3:
        assert held(found, "weights") == pytest.approx(4 * once, rel=1e-5)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_of_experts_are_reduced_among_those_who_hold_them(zero):
    described = model()
    found = program(described, ep=4, zero=zero).ranks[0].instructions
    reduced = [i for i in found if isinstance(i, Collective) and i.name == "expert gradients"]
    assert {i.group.stream for i in reduced} == {"dp_experts"}
    assert {tuple(i.group.ranks) for i in reduced} == {(0, 4, 8, 12)}
    assert sum(i.nbytes for i in reduced) == 4 * 4 * 8 * described.expert_parameters / 4
    dense = [i for i in found if isinstance(i, Collective) and i.name == "gradients"]
    rest = described.parameters - 4 * 8 * described.expert_parameters
    assert sum(i.nbytes for i in dense) == pytest.approx(4 * rest, rel=1e-4)


def test_where_nobody_else_holds_an_expert_nothing_is_reduced():
    found = program(model({**MOE, "experts": 16}), ep=16).ranks[0].instructions
    assert not [i for i in found if isinstance(i, Collective) and i.name.startswith("expert")]


def test_buckets_of_experts_fill_on_their_own():
    found = program(model(), ep=2, zero=1, bucket_parameters=4 * 3 * 512 * 512).ranks[0].instructions
    sizes = [(i.name, int(i.nbytes)) for i in found if isinstance(i, Collective) and i.name.endswith("gradients")]
    layer = 4 * 4 * 3 * 512 * 512  # four experts of a rank
    assert [size for name, size in sizes if name == "expert gradients"] == [layer] * 4
    assert [name for name, _ in sizes].count("gradients") < 5


def test_experts_keep_rows_and_both_inner_tensors():
    plain, kept = (peak(job(moe, ep=8, zero=1, grad_accum=2), "activations") for moe in (MOE, {**MOE, "top_k": 4}))
    rows = 4 * SEQ * 2  # two more experts a token, in each of four layers
    assert kept - plain == rows * (512 + 2 * 512 + 512) * 2


def peak(found: dict[str, Any], category: str) -> int:
    return max(f.by_category[category] for f in simulate(found).footprints)


# ---- rules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"ep": 3}, "ep 3 does not divide the 8 experts of small; set ep to a divisor of 8"),
        ({"etp": 3}, "etp 3 does not divide the experts' ffn_hidden 512 of small; set etp to a divisor of 512"),
        (
            {"ep": 8, "etp": 4},
            "ep 8 × etp 4 = 32 does not divide the 16 ranks of a stage (tp 1 × cp 1 × dp 16), over which experts are "
            "spread; choose degrees whose product divides 16",
        ),
        (
            {"ep": 8, "etp": 1, "tp": 2},
            "etp 1 beside tp 2 needs sequence_parallel: without it tensor-parallel ranks hold the same tokens, and "
            "each would send all of them to the experts; set sequence_parallel=true or drop etp",
        ),
        (
            {"ep": 8, "zero": 3, "dp_shard": 4},
            "dp_shard 4 makes 4 replicas of the sharded states, among which the 2 ranks with the same experts cannot "
            "be divided; raise dp_shard or lower ep",
        ),
    ],
    ids=str,
)
def test_degrees_that_do_not_fit_the_experts(plan, message):
    with pytest.raises(PlanError) as error:
        layout_of(model(), **plan)
    assert str(error.value) == message


def test_a_tensor_parallel_degree_that_does_not_fit_an_expert_says_that_etp_follows_it():
    with pytest.raises(PlanError) as error:
        layout_of(model({**MOE, "ffn_hidden": 510}), tp=4, ep=4)
    assert str(error.value) == (
        "etp 4 (that of tp) does not divide the experts' ffn_hidden 510 of small; set etp to a divisor of 510"
    )


def test_shared_experts_are_split_like_an_mlp():
    with pytest.raises(PlanError) as error:
        layout_of(model({**MOE, "shared_ffn_hidden": 255}), tp=2, ep=2)
    assert str(error.value) == (
        "tp 2 does not divide the shared experts' ffn_hidden 255 of small; set tp to a divisor of 255"
    )


def test_a_dense_mlp_that_no_layer_has_need_not_divide():
    assert layout_of(model(ffn_hidden=1023), tp=2, ep=2).etp == 2
    with pytest.raises(PlanError, match="tp 2 does not divide the 1023 ffn_hidden"):
        layout_of(model({**MOE, "first_dense": 1}, ffn_hidden=1023), tp=2, ep=2)


@pytest.mark.parametrize(
    ("field", "value"), [("ep", 2), ("etp", 2), ("expert_skew", 0.5), ("expert_capacity", 1.25)], ids=str
)
def test_plans_for_experts_need_some(field, value):
    with pytest.raises(PlanError) as error:
        layout_of(small_transformer(), **{field: value})
    assert str(error.value) == f"{field} {value} spreads experts, but small has none; drop {field}"


def test_a_traced_module_has_no_experts():
    with pytest.raises(PlanError) as error:
        lay_out(Plan(ep=2), even_model(2, forward=1, backward=1), CLUSTER)
    assert str(error.value) == "ep 2 needs a transformer description, but even is a traced module; drop it"


# ---- whole jobs -----------------------------------------------------------------------------------------------------


def test_deepseek_v3_on_2048_gpus():
    plan = {"tp": 1, "pp": 16, "ep": 64, "zero": 1, "seq_len": 4096, "global_batch": 15360}
    found = simulate({"model": "deepseek-v3", "cluster": "h100-sxm:256x8", "plan": plan}, allow_oom=True)
    # published bf16 runs reach 0.2 to 0.3 without overlapping the all-to-alls; its own report 0.4 with fp8 and DualPipe
    assert 0.15 < found.mfu < 0.35


def test_the_report_says_what_the_fullest_rank_gets():
    even, usual, capped = (
        simulate(job(MOE, ep=8, **plan))
        for plan in ({}, {"expert_skew": 0.18}, {"expert_skew": 1.0, "expert_capacity": 1.0})
    )
    assert even.expert_load == pytest.approx(1.0)
    shares = [rank**-0.18 for rank in range(1, 9)]
    assert usual.expert_load == pytest.approx(8 * shares[0] / sum(shares))
    assert usual.to_dict()["expert_load"] == usual.expert_load
    assert capped.expert_load == pytest.approx(1.0)
