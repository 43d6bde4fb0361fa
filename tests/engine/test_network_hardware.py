"""Jobs on tori, mixed kinds, placements and detours: folded equals unfolded, and limits that follow from the parts."""

import pytest

from simpar.cost.collective import collective_cost
from simpar.engine.simulate import execute
from simpar.errors import ClusterError, DoesNotFitError, PlanError
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import device
from simpar.job import Job
from simpar.model.presets import preset
from simpar.plan.layout import lay_out
from simpar.plan.placement import places, stage_devices
from simpar.plan.plan import Plan
from simpar.program.ir import Collective, Group, Program, RankProgram
from simpar.result import Result
from simpar.simulation import simulate
from simpar.units import MIB

MODEL = preset("gpt2").replace(layers=4)
MIXED = {"nodes": [{"device": "h100-sxm", "count": 1}, {"device": "a100-sxm-80gb", "count": 1}]}
LEAVES = {"base": "ndr400", "pod_nodes": 2, "oversubscription": 4}
DRAGONFLY = {"base": "ndr400", "pod_nodes": 1, "topology": "dragonfly", "rail_optimized": False, "oversubscription": 2}


def run(cluster: object, plan: dict[str, object], *, fold: bool = True) -> Result:
    return simulate(Job(model=MODEL, cluster=cluster, plan={"global_batch": 32, "launch_s": 0.0, **plan}), fold=fold)


@pytest.mark.parametrize(
    ("cluster", "plan"),
    [
        ("tpu-v5p:2x4x4", {"tp": 4, "pp": 2}),
        ("tpu-v5p:4x2x4x4", {"zero": 3, "dp_shard": 32, "global_batch": 128}),
        ("tpu-v5p:1x4x4", {"tp": 2, "zero": 3}),
        ("tpu-v5e:4x4", {"tp": 2, "pp": 2}),
        ("tpu-v5e:4x4", {"zero": 3}),
        ("mi300x:2x8", {"tp": 2, "zero": 1}),
        (MIXED, {"tp": 2, "pp": 2}),
        (MIXED, {"tp": 4}),
        ("h100-sxm:4x8", {"tp": 2, "pp": 4, "rank_order": "tp-pp-dp"}),
        ({"device": "h100-sxm", "nodes": 4, "fabric": LEAVES}, {"tp": 2, "pp": 4, "rank_order": "tp-pp-dp"}),
        ({"device": "h100-sxm", "nodes": 4, "fabric": DRAGONFLY}, {"pp": 2}),
        ({"device": "h100-sxm", "nodes": 4, "fabric": {**DRAGONFLY, "routing": "valiant"}}, {"tp": 2}),
    ],
    ids=str,
)
def test_folded_equals_unfolded(cluster, plan):
    folded, whole = run(cluster, plan), run(cluster, plan, fold=False)
    assert folded.trace.step_ns == whole.trace.step_ns


def test_a_stage_runs_at_the_pace_of_its_own_device():
    mixed = run(MIXED, {"pp": 2})
    fast, slow = (run(f"{name}:2x8", {"pp": 2}) for name in ("h100-sxm", "a100-sxm-80gb"))
    assert fast.trace.step_ns < mixed.trace.step_ns < slow.trace.step_ns

    def forward_ns(result: Result, stage: int) -> int:
        trace = result.trace
        lane = next(i for i, x in enumerate(trace.lanes) if (x.stage, x.stream) == (stage, "compute"))
        mine = (trace.spans.lane == lane) & (trace.spans.kind == 0)
        return int(trace.spans.duration_ns[mine].min())

    assert forward_ns(mixed, 0) == forward_ns(fast, 0)
    assert forward_ns(mixed, 1) == forward_ns(slow, 1)


def test_a_balanced_split_gives_a_slow_device_fewer_layers():
    def step_ns(split: object) -> int:
        model = preset("llama3-8b").replace(layers=16)
        plan = {"tp": 4, "pp": 2, "seq_len": 4096, "global_batch": 32, "zero": 1, "layer_split": split}
        return simulate(Job(model=model, cluster=MIXED, plan=plan)).trace.step_ns

    best = min(step_ns((fast, 16 - fast)) for fast in range(8, 15))
    assert step_ns("balanced") < 1.02 * best
    assert step_ns("balanced") < 0.7 * step_ns("uniform")
    # where the replicas of both stages lie on both kinds, neither is the slower one
    assert stage_devices(Plan(tp=4, pp=2, rank_order="tp-pp-dp"), 2, "bf16", Cluster(**MIXED)) == ()


def test_utilisation_is_of_all_kinds():
    cluster, result = Cluster(**MIXED), run(MIXED, {"pp": 2})
    peaks = [device.peak("bf16") for device in cluster.devices]
    assert result.peak_flop_per_s == 8 * peaks[0] + 8 * peaks[1]
    assert result.mfu == pytest.approx(result.model_flop / result.step_time_s / (8 * sum(peaks)))
    assert "8 h100-sxm + 8 a100-sxm-80gb" in result.title


@pytest.mark.parametrize("order", ["tp-dp-pp", "tp-pp-dp"])
def test_every_rank_must_fit_its_own_device(order):
    cluster = {"nodes": [{"device": "h100-sxm", "count": 1}, {"device": "a100-sxm-40gb", "count": 1}]}
    plan = {"tp": 4, "pp": 2, "seq_len": 4096, "global_batch": 12, "micro_batch": 6, "rank_order": order}
    result = simulate(Job(model="llama3-8b", cluster=cluster, plan=plan), allow_oom=True)
    small = device("a100-sxm-40gb").memory_bytes
    assert small < result.peak_memory_bytes < device("h100-sxm").memory_bytes
    assert not result.fits
    assert result.to_dict()["memory"]["capacity_bytes"] == small
    with pytest.raises(DoesNotFitError, match="but a100-sxm-40gb has"):
        simulate(result.job)


def test_replicas_of_several_kinds_wait_for_the_slowest():
    mixed, slow = run(MIXED, {"zero": 1}), run("a100-sxm-80gb:2x8", {"zero": 1})
    assert mixed.trace.step_ns <= slow.trace.step_ns
    busy = {
        lane.rank: int(mixed.trace.spans.duration_ns[mixed.trace.spans.lane == number].sum())
        for number, lane in enumerate(mixed.trace.lanes)
        if lane.stream == "compute"
    }
    assert busy[0] < busy[8]


def test_kinds_without_the_kernel_of_the_others_run_their_own():
    steps = []
    for order in (("a100-sxm-80gb", "v100-sxm-32gb"), ("v100-sxm-32gb", "a100-sxm-80gb")):
        cluster = {
            "nodes": [{"device": name, "count": 1} for name in order],
            "node_link": "nvlink2",
            "fabric": "efa-p4de",
        }
        plan = {"precision": "fp16", "seq_len": 512, "global_batch": 16}
        result = simulate({"model": "gpt2", "cluster": cluster, "plan": plan})
        assert result.step_time_interval()[0] < result.step_time_s
        steps.append(result.step_time_s)
    assert steps[0] == pytest.approx(steps[1], rel=1e-3)


def test_a_collective_of_several_kinds_has_the_slowest_links():
    cluster = Cluster(nodes=[{"device": "h100-sxm", "count": 1}, {"device": "a100-sxm", "count": 1, "nic_gbps": 100}])
    both, first = cluster.seen_by([0, 1]), cluster.seen_by([0])
    assert (both.node_link.nvls, first.node_link.nvls) == (False, True)
    assert both.nic_bytes_per_s == pytest.approx(first.nic_bytes_per_s / 4)
    assert (
        collective_cost("all_reduce", MIB, 16, 2, both).total_s
        > collective_cost("all_reduce", MIB, 16, 2, first).total_s
    )
    assert [cluster.devices[cluster.kind_of(gpu)].name for gpu in (7, 8)] == ["h100-sxm", "a100-sxm-80gb"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": []}, "nodes is an empty list; give a number, or groups such as {device: h100-sxm, count: 8}"),
        ({"nodes": [{"device": "h100-sxm", "count": 0}]}, "count: 0 should be greater than or equal to 1"),
        ({"nodes": [{"device": "h100", "count": 1}], "placement": [0, 0]}, "placement of 2 ranks is no permutation"),
        (
            {"device": "h100", "nodes": 3, "groups": [{"device": "h100", "count": 2}]},
            "groups hold 2 nodes, but nodes is 3",
        ),
    ],
)
def test_wrong_groups_say_what_is_right(fields, message):
    with pytest.raises(ClusterError) as error:
        Cluster(**fields)
    assert message in str(error.value)


def test_every_kind_must_know_the_precision():
    with pytest.raises(ClusterError, match="device 'a100-sxm-80gb' does not compute in fp8"):
        run(MIXED, {"precision": "fp8"})


def test_an_order_of_ranks_is_a_placement():
    plan = {"tp": 2, "pp": 4, "rank_order": "tp-pp-dp"}
    cluster = Cluster.parse("h100-sxm:2x8")
    layout = lay_out(Plan(global_batch=32, **plan), MODEL, cluster)
    placed = places(layout, cluster)
    assert placed is not None
    assert sorted(placed) == list(range(16))
    for stage in range(4):
        for replica in range(2):
            for shard in range(2):
                assert placed[layout.rank(stage, replica, shard)] == shard + 2 * (stage + 4 * replica)
    ordered = run(cluster, plan)
    permuted = run(cluster.replace(placement=placed), {"tp": 2, "pp": 4})
    assert ordered.trace.step_ns == permuted.trace.step_ns
    assert ordered.trace.step_ns != run(cluster, {"tp": 2, "pp": 4}).trace.step_ns


def test_a_placement_that_only_renames_nodes_changes_nothing():
    cluster = Cluster.parse("h100-sxm:4x8")
    swapped = [node * 8 + gpu for node in (2, 0, 3, 1) for gpu in range(8)]
    plan = {"tp": 2, "pp": 2, "zero": 1}
    assert run(cluster.replace(placement=swapped), plan).trace.step_ns == run(cluster, plan).trace.step_ns
    spread = [rank % 4 * 8 + rank // 4 for rank in range(32)]  # tensor-parallel groups over nodes
    assert run(cluster.replace(placement=spread), plan).trace.step_ns > run(cluster, plan).trace.step_ns


def test_bytes_of_a_folded_torus_are_those_of_one_of_its_chips():
    folded, whole = run("tpu-v5p:1x4x4", {"zero": 3}), run("tpu-v5p:1x4x4", {"zero": 3}, fold=False)
    mine = {link.name: link.nbytes for link in folded.trace.links}
    theirs = {link.name: link.nbytes for link in whole.trace.links}
    assert mine == pytest.approx({name: theirs[name] for name in mine})
    assert set(mine) == {f"ici0.{axis}{way}" for axis in (1, 2) for way in "+-"}
    assert len(set(map(round, theirs.values()))) == 1


def test_reducing_switches_send_each_byte_once():
    plain = Cluster.parse("h100-sxm:8x8")
    sharp = plain.replace(fabric={"base": "ndr400", "sharp": True})
    ring, switch = (
        collective_cost("all_reduce", 1024 * MIB, 64, 8, c, algorithm=a) for c, a in ((plain, "ring"), (sharp, "sharp"))
    )
    assert switch.nic_bytes == pytest.approx(1024 * MIB / 8)
    assert switch.nic_bytes / ring.nic_bytes == pytest.approx(64 / 63 / 2)
    large = collective_cost("all_reduce", 16384 * MIB, 64, 8, sharp, algorithm="sharp")
    bus = 2 * 63 / 64 * 16384 * MIB / large.total_s
    assert bus == pytest.approx(450e9, rel=0.07)  # Azure publishes 450 GB/s, CoreWeave 386
    assert collective_cost("all_reduce", 1024 * MIB, 64, 8, sharp).algorithm == "sharp"
    with pytest.raises(PlanError, match="algorithm 'sharp' does not apply"):
        collective_cost("all_reduce", MIB, 64, 8, plain, algorithm="sharp")
    one_each = collective_cost("all_reduce", 1024 * MIB, 8, 8, sharp, algorithm="sharp")
    assert one_each.node_link_bytes == 0


def test_in_a_mesh_two_gpus_have_one_cable():
    mesh = Cluster.parse("mi300x:8").node_link
    assert mesh.pair_bytes_per_s == pytest.approx(mesh.bandwidth_bytes_per_s / 7)
    assert mesh.group_bytes_per_s(4) == pytest.approx(mesh.bandwidth_bytes_per_s * 3 / 7)
    assert mesh.group_bytes_per_s(8) == mesh.bandwidth_bytes_per_s
    box = Cluster.parse("mi300x:8")
    two, eight = (collective_cost("all_gather", 512 * MIB, n, 1, box, algorithm="ring") for n in (2, 8))
    assert two.total_s > 3 * eight.total_s


def test_a_domain_beyond_what_is_sold_is_warned_of():
    result = simulate(Job(model=MODEL, cluster="h100-sxm:1x16", plan={}))
    (warning,) = [text for text in result.warnings if "known to join" in text]
    assert warning == (
        "a node of 16 GPUs goes beyond the 8 that such links are known to join; "
        "write h100-sxm:2x8 for nodes of that size"
    )
    assert not [text for text in run("gb200:1x72", {"global_batch": 72}).warnings if "known to join" in text]


def test_a_kernel_of_another_generation_runs_as_the_device_s_own():
    # attention of the first kind (flash3) is flash2 on the other
    result = run(MIXED, {"pp": 2, "attention": "flash3"})
    assert result.trace.step_ns > 0


@pytest.mark.parametrize(
    ("topology", "crossings"),
    # how many of a ring's steps cross the busiest cable, in its busier direction
    [
        ({"topology": "ring", "gpus": 6}, 1),
        ({"topology": "line", "gpus": 6}, 1),
        ({"topology": "star", "gpus": 6}, 1),
        ({"topology": "fully_connected", "gpus": 6}, 1),
        ({"topology": "torus", "shape": [2, 3]}, 1),
        # the step within a group, and half of one between the two others, which has two ways of three hops
        ({"topology": "dragonfly", "groups": 3, "routers_per_group": 2, "gpus_per_router": 1}, 1.5),
    ],
    ids=lambda value: value["topology"] if isinstance(value, dict) else "",
)
def test_a_ring_on_slow_cables_takes_what_its_bytes_take(topology, crossings):
    rate = 80.0  # Gb/s: far below NVLink
    fields = dict.fromkeys(["local_gbps", "global_gbps"], rate) if topology["topology"] == "dragonfly" else {}
    cluster = Cluster(device="h100-sxm", gpus_per_node=6, graph={**topology, **fields, "bandwidth_gbps": rate})
    nbytes, group = 256.0 * MIB, Group("dp", range(6))
    ranks = tuple(RankProgram(rank, 0, 1, (), (Collective("all_reduce", nbytes, group),)) for rank in range(6))
    trace = execute(Program(ranks=ranks, launch_s=0.0, algorithm="ring"), cluster)
    cost = collective_cost("all_reduce", nbytes, 6, 1, cluster, algorithm="ring")
    wire = 2 * 5 / 6 * nbytes * crossings
    busiest = max(link.nbytes for link in trace.links)
    assert busiest == pytest.approx(wire)
    assert trace.step_s - cost.latency_s == pytest.approx(busiest / (rate * 1e9 / 8), rel=1e-5)
