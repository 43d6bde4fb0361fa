"""Public bug reports and questions with a checkable answer: where each is a test, and those that no other room holds.

The reports are facts with their sources in the issue trackers of Megatron-LM, DeepSpeed, torch, NCCL, vLLM, SimAI,
ASTRA-sim, networkx, plotly and others. Their ids are those of the table ``cases.jsonl``.
"""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import sleep

import pytest
from synthetic import job, small_transformer

from calibrate.importers import parse_nccl_tests
from simpar.cost.collective import collective_cost
from simpar.cost.memory import state_bytes
from simpar.errors import PlanError
from simpar.framework.framework import framework
from simpar.hardware.cluster import Cluster
from simpar.hardware.fabric import Network
from simpar.model.presets import preset
from simpar.model.transformer import Transformer
from simpar.plan.layout import lay_out
from simpar.plan.plan import Plan
from simpar.program.ir import Collective
from simpar.program.lower import lower
from simpar.schedule import build
from simpar.simulation import simulate
from simpar.units import GB, GIB

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parents[1] / "shared" / "data" / "cases.jsonl"
HERE = "cases/test_public_reports.py"

# Serving is not simulated, so nothing can be held against these.
SERVING = {"V02", "V04", "V07", "V11", "V12", "V18"}

FOUND_IN = {
    "M02": (HERE, "test_states_of_zero_3"),
    "M04": (HERE, "test_states_of_zero_3"),
    "M07": (HERE, "test_fp32_weights_need_no_master_copy"),
    "M10": ("model/test_cases.py", "test_parameters_of_a_mixture_fall_into_buckets"),
    "T09": ("model/test_cases.py", "test_grouped_queries_shrink_keys_and_values_only"),
    "T10": ("model/test_cases.py", "test_a_gated_mlp_has_three_products"),
    "T14": ("model/test_cases.py", "test_a_window_shortens_the_core_attention_and_nothing_else"),
    "U01": ("model/test_cases.py", "test_mfu_of_h200_is_against_the_dense_peak"),
    "U10": (HERE, "test_bytes_times_1e_6_over_milliseconds_are_gb_per_s"),
    "S01": ("schedule/test_schedule_closed_forms.py", "test_warmup_counts"),
    "S03": ("plan/test_partition.py", "test_uniform"),
    "S04": ("plan/test_partition.py", "test_uniform"),
    "S09": ("schedule/test_schedule_closed_forms.py", "test_torch_rule_of_divisibility"),
    "S10": (HERE, "test_a_rank_of_zbv_holds_both_ends_of_a_v"),
    "S15": ("schedule/test_schedule_closed_forms.py", "test_1f1b_has_no_smaller_bubble_than_gpipe"),
    "S17": ("schedule/test_schedule_closed_forms.py", "test_bigger_microbatches_raise_the_bubble"),
    "S19": (HERE, "test_group_sizes_multiply_to_the_world"),
    "C06": ("calibrate/test_importers_nccl.py", "test_case_c06_tags_inside_rows_and_a_cliff"),
    "C12": ("calibrate/test_importers_nccl.py", "test_busbw_above_any_link_is_legal"),
    "C15": (HERE, "test_two_nodes_of_dgx_a100_reach_their_published_bus_bandwidth"),
    "C24": ("cost/test_collective.py", "test_mid_size_bus_bandwidth_falls_with_nodes"),
    "C26": ("cost/test_collective.py", "test_more_bytes_take_longer"),
    "C27": (HERE, "test_fixed_costs_dominate_small_all_reduces"),
    "P02": (HERE, "test_results_react_to_the_topology"),
    "P07": (HERE, "test_groups_over_two_nodes_take_longer"),
    "P08": (HERE, "test_the_shortest_path_counts_latency_and_not_hops"),
    "P09": (HERE, "test_a_free_edge_does_not_double_a_path"),
    "F02": ("model/test_cases.py", "test_head_dim_is_read_and_not_derived"),
    "F03": ("model/test_cases.py", "test_head_dim_is_read_and_not_derived"),
    "F04": ("model/test_cases.py", "test_head_dim_is_read_and_not_derived"),
    "F06": ("model/test_cases.py", "test_key_value_groups_are_heads"),
    "F08": ("model/test_cases.py", "test_head_dim_is_read_and_not_derived"),
    "F09": ("model/test_cases.py", "test_qkv_width_of_a_tensor_parallel_rank"),
    "F10": (HERE, "test_degrees_of_ulysses"),
    "F15": ("model/test_cases.py", "test_vocabulary_padding"),
    "R01": ("calibrate/test_importers_kineto.py", "test_case_r01_synchronisation_is_no_computation"),
    "R04": ("calibrate/test_importers_kineto.py", "test_case_r04_ends_that_were_never_written"),
    "R06": ("calibrate/test_importers_kineto.py", "test_case_r06_malformed_traces"),
    "R10": ("calibrate/test_importers_kineto.py", "test_case_r10_nanoseconds_survive_times_since_1970"),
    "K03": (HERE, "test_first_calls_do_not_count_and_ranks_meet_before_each"),
    "K06": (HERE, "test_more_work_takes_longer"),
    "L07": ("view/test_timeline.py", "test_bars_of_a_large_timeline_carry_no_text"),
}


def test_every_report_has_its_test():
    for file, name in FOUND_IN.values():
        assert f"\ndef {name}(" in (TESTS / file).read_text(encoding="utf-8"), (file, name)
    if not TABLE.exists():
        pytest.skip("the table of public reports is not here")
    with TABLE.open(encoding="utf-8") as lines:
        ids = [json.loads(line)["id"] for line in lines]
    assert sorted(ids) == sorted([*FOUND_IN, *SERVING])


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("millions", "largest", "gpus", "expected"),
    [(6805, 131, 4, (0.49, 3.66, 29.01)), (2851, 32, 8, (0.12, 0.78, 6.09))],
    ids=["M02", "M04"],
)
def test_states_of_zero_3(millions, largest, gpus, expected):
    # DeepSpeed's estimator: weights and gradients of the largest layer in 2 bytes (4 L), and of the shard 2 P / n of
    # weights, 18 P / n of all states; what it prints as GB are GiB. Its columns: parameters and optimizer on hosts,
    # which leaves the largest layer alone; the optimizer on hosts; nothing there
    deepspeed = framework("megatron-deepspeed")
    states_if = partial(
        state_bytes,
        millions * 10**6,
        precision="fp16",
        grad_dtype="fp32",
        optimizer="adam",
        optimizer_dtype="fp32",
        zero=3,
        shard=gpus,
        compute_shard=deepspeed.keeps_compute_shard,
    )
    gathered = 4 * largest * 10**6
    on_device = [sum(states_if(offloaded=offloaded).values()) for offloaded in (True, False)]
    found = (gathered, *(gathered + nbytes for nbytes in on_device))
    assert [nbytes / GIB for nbytes in found] == pytest.approx(expected, abs=0.01)


def test_fp32_weights_need_no_master_copy():
    # M07: 12 bytes a parameter, 80.4 GB of 6.7 billion; a recipe with a master copy says 134 GB and would refuse
    states = state_bytes(
        6_700_000_000,
        precision="fp32",
        grad_dtype="fp32",
        optimizer="adam",
        optimizer_dtype="fp32",
        zero=0,
        shard=1,
    )
    assert (states["weights"] + states["optimizer"]) / GB == pytest.approx(80.4)


# ---- schedules and groups -------------------------------------------------------------------------------------------


def test_a_rank_of_zbv_holds_both_ends_of_a_v():
    # S10: placed in a loop, torch's schedule ends with KeyError 6
    schedule = build("zb-v", pp=4, microbatches=8)
    assert [schedule.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_group_sizes_multiply_to_the_world(pp):
    # S19: a simulator that counted pp as 1 made wrong dp and ep groups, and never ended with pp above 2
    model = small_transformer(moe={"experts": 4, "top_k": 2, "ffn_hidden": 512})
    cluster = Cluster.parse("h100-sxm:4x8")
    layout = lay_out(Plan(tp=2, pp=pp, ep=2, etp=1, sequence_parallel=True, grad_accum=4), model, cluster)
    assert 2 * pp * layout.dp == 32
    assert layout.expert_ranks * layout.expert_replicas * pp == 32
    sizes = {
        (i.group.stream, len(i.group.ranks))
        for rank in lower(model, cluster, layout).ranks
        for i in rank.instructions
        if isinstance(i, Collective) and "gradients" in i.name
    }
    assert sizes == {("dp", 16 // pp), ("dp_experts", 16 // pp)}
    assert simulate(job(model, cluster, **dict(layout.plan))).step_time_s > 0


# ---- collectives and networks ---------------------------------------------------------------------------------------


def test_bytes_times_1e_6_over_milliseconds_are_gb_per_s():
    # U10, a false alarm: nccl-tests' GB/s are right
    row = "1048576 262144 float sum -1 1626.5 0.64 1.24 0 1630.0 0.64 1.23 0"
    (sample,) = parse_nccl_tests(row, op="all_reduce", ranks=24, nodes=3).collectives
    by_hand = sample.nbytes * 1e-6 / (sample.time_s * 1e3)
    assert by_hand == pytest.approx(sample.nbytes / sample.time_s / GB)
    assert round(by_hand, 2) == 0.64


def test_two_nodes_of_dgx_a100_reach_their_published_bus_bandwidth():
    # C15: 192 GB/s with 8 x 200 Gb/s; a tree sends S between two nodes where a ring sends 2 S (N-1)/N
    nbytes = 8 * GB
    cost = collective_cost("all_reduce", nbytes, 16, 2, Cluster.parse("a100-sxm:2x8"))
    assert 2 * 15 / 16 * nbytes / cost.total_s / GB == pytest.approx(192, rel=0.1)


def test_fixed_costs_dominate_small_all_reduces():
    # C27: 186 all-reduces of 64 tokens over 16 ranks on two nodes; at 2 us each, latency alone is 372 us
    def each_s(nbytes: float, gbps: float) -> float:
        cluster = Cluster(device="h100-sxm", nodes=2, fabric={"base": "ndr400", "nic_gbps": gbps})
        return collective_cost("all_reduce", nbytes, 16, 2, cluster).total_s

    nbytes = 64 * 6144 * 2
    fixed_s = each_s(8, 400)
    assert 186 * fixed_s > 372e-6
    assert each_s(nbytes, 400) - each_s(nbytes, 800) < 0.1 * fixed_s


GRAPHS = {
    "ring": {"topology": "ring", "gpus": 8},
    "line": {"topology": "line", "gpus": 8},
    "fully_connected": {"topology": "fully_connected", "gpus": 8},
    "switch": {"topology": "star", "gpus": 8},
    "torus": {"topology": "torus", "shape": [2, 4]},
}


def step_ns(graph: dict[str, object], plan: dict[str, object], **cables: float) -> int:
    model = small_transformer(moe={"experts": 8, "top_k": 2, "ffn_hidden": 1024}, layers=2)
    cluster = Cluster(device="h100-sxm", gpus_per_node=8, graph={**graph, "bandwidth_gbps": 100, **cables})
    return simulate(job(model, cluster, launch_s=0.0, seq_len=1024, micro_batch=4, **plan)).trace.step_ns


def test_results_react_to_the_topology():
    # P02: another simulator gave 1,082,450,000 cycles on every topology
    spread = {name: step_ns(graph, {"ep": 8}) for name, graph in GRAPHS.items()}
    assert len(set(spread.values())) == len(spread), spread
    assert spread["fully_connected"] < spread["torus"] < spread["ring"] < spread["line"]
    for graph in GRAPHS.values():
        for plan in ({"ep": 8}, {"zero": 3}):
            usual = step_ns(graph, plan)
            assert step_ns(graph, plan, bandwidth_gbps=50) > 1.2 * usual
            assert step_ns(graph, plan, latency_us=50.0) > usual


@pytest.mark.parametrize("plan", [{"tp": 8, "sequence_parallel": True}, {"ep": 8}, {"cp": 8, "zero": 1}], ids=str)
def test_groups_over_two_nodes_take_longer(plan):
    # P07: traffic between nodes must not be free
    model = small_transformer(moe={"experts": 8, "top_k": 2, "ffn_hidden": 1024})
    one, two = (
        simulate(job(model, Cluster.parse(f"h100-sxm:{nodes}"), seq_len=1024, launch_s=0.0, **plan)).trace.step_ns
        for nodes in ("1x8", "2x4")
    )
    assert two > 1.01 * one


def ways(edges: list[tuple[str, str, float, float]], gpus: int) -> Network:
    return Network(Cluster(device="h100-sxm", gpus_per_node=gpus, graph=edges))


def test_the_shortest_path_counts_latency_and_not_hops():
    # P08: networkx counts hops unless it is told a weight: 681 in two hops against 660 in three
    edges = [
        ("gpu0", "D", 100, 340),
        ("D", "gpu1", 100, 341),
        ("gpu0", "F", 100, 220),
        ("F", "H", 100, 220),
        ("H", "gpu1", 100, 220),
    ]
    network = ways(edges, 2)
    assert [link.name for link in network.route(0, 1)] == ["gpu0>F", "F>H", "H>gpu1"]
    assert network.latency_s(0, 1) - network.cluster.node_link.p2p_latency_s == pytest.approx(660e-6)


def test_a_free_edge_does_not_double_a_path():
    # P09: networkx 3.6.1 lists a path with an edge of weight 0 twice, which would halve its share
    network = ways([("gpu0", "sw", 100, 0), ("sw", "gpu1", 100, 100)], 2)
    assert [(link.name, share) for link, share in network.spread(0, 1)] == [("gpu0>sw", 1.0), ("sw>gpu1", 1.0)]


# ---- configurations -------------------------------------------------------------------------------------------------


def test_degrees_of_ulysses():
    # F10: 40 heads and 8 key/value heads; other divisors of 40 would cut a group of heads
    model = Transformer(
        name="m",
        layers=2,
        hidden=2560,
        heads=40,
        kv_heads=8,
        gated_mlp=True,
        ffn_hidden=1024,
        vocab=1000,
        tied_embeddings=False,
    )
    legal = []
    for cp in range(1, 41):
        try:
            lay_out(Plan(cp=cp, cp_method="all_to_all", seq_len=128 * cp), model, Cluster.parse(f"h100-sxm:{cp}x1"))
        except PlanError:
            continue
        legal.append(cp)
    assert legal == [1, 2, 4, 8, 40]


# ---- measuring and predicting ---------------------------------------------------------------------------------------


def test_first_calls_do_not_count_and_ranks_meet_before_each(monkeypatch):
    # K03: without a barrier and warm-up the first all-reduce looked fastest, or slowest
    torch = pytest.importorskip("torch")
    from calibrate.measure.collectives import CollectiveBench  # noqa: PLC0415
    from calibrate.measure.plan import CollectiveItem  # noqa: PLC0415
    from calibrate.measure.timer import CpuTimer  # noqa: PLC0415

    dist, threads = torch.distributed, torch.get_num_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        item = CollectiveItem("all_reduce", 1024, (0,))
        bench = CollectiveBench(CpuTimer(0, 1), [item], dist.group.WORLD, rank=0, one_machine=True, timeout_s=10)
        calls, meetings, barrier = [], [], dist.barrier

        def call() -> None:
            calls.append(len(meetings))
            sleep(0.2 if len(calls) <= 5 else 0.0)  # connections are made when they are first used

        def meet(**options: object) -> None:
            meetings.append(len(calls))
            barrier(**options)

        monkeypatch.setattr(bench, "call", lambda _: call)
        monkeypatch.setattr(dist, "barrier", meet)
        assert bench.measure_s(item) < 0.008  # a single slow call among the twenty would make it 10 ms
        timed = calls[-len(meetings) :]
        assert timed == list(range(1, len(meetings) + 1))
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


@pytest.mark.parametrize("field", ["seq_len", "micro_batch", "grad_accum"])
def test_more_work_takes_longer(field):
    # K06: a predictor had no sensitivity at all to the number of tokens
    model, cluster = preset("llama3-8b").replace(layers=4), Cluster.parse("h100-sxm:1x8")
    usual = {"tp": 8, "seq_len": 1024, "micro_batch": 1, "grad_accum": 1}
    found = [
        simulate(job(model, cluster, **{**usual, field: usual[field] * factor})).trace.step_ns
        for factor in (1, 2, 4, 8)
    ]
    assert all(more > less for less, more in pairwise(found)), found
