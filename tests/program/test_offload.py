"""Offloading to hosts against closed forms: bytes over links, seconds of a serial step, memory here and there."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import small_transformer

import simpar
from simpar.errors import DoesNotFitError, PlanError, SimparError
from simpar.plan.layout import lay_out
from simpar.plan.plan import Plan
from simpar.program.ir import Alloc, HostWork, Program, Run
from simpar.program.lower import lower
from simpar.program.place import place
from simpar.schedule import build
from simpar.sensitivity.parameters import ATTENTION_BACKWARD, cost_classes
from simpar.sensitivity.step import Dependence
from simpar.units import GB
from simpar.whatif.explanation import path_time

MLP = "mlp:4096-4096-4096-4096-4096"
PARAMETERS = 4 * (4096 * 4096 + 4096)
LINK, MEMORY, LATENCY, OVERHEAD = 10 * GB, 100 * GB, 1e-5, 2e-5
FIT = {"bandwidth_efficiency": 1.0, "overhead_s": OVERHEAD}
HOST = {
    "device": {
        "base": "cpu",
        "memory_bytes": 2 * 10**12,
        "memory_bytes_per_s": MEMORY,
        "memory_bound": dict.fromkeys(("elementwise", "activation", "norm"), FIT),
    },
    "link_bytes_per_s": LINK,
    "latency_s": LATENCY,
}
AT_ONCE = {name: {**FIT, "overhead_s": 0.0} for name in ("elementwise", "activation", "norm")}
FREE = {
    "device": {**HOST["device"], "memory_bytes_per_s": 1e24, "memory_bound": AT_ONCE},
    "link_bytes_per_s": 1e24,
    "latency_s": 0.0,
}


def h100(gpus=1, nodes=1, host=HOST, **changes):
    return {"device": "h100-sxm", "nodes": nodes, "gpus_per_node": gpus, "host": host, **changes}


def job(cluster, model="gpt2", **plan):
    usual = {"micro_batch": 1} if model == MLP else {"micro_batch": 1, "seq_len": 512}
    return simpar.Job(model=model, cluster=cluster, plan={**usual, **plan})


def run(cluster, **plan):
    return simpar.simulate(job(cluster, **plan), allow_oom=True)


def link_bytes(result):
    return {link.name: link.nbytes for link in result.trace.links}


def program(found, *, fold=True) -> Program:
    return lower(found.model, found.cluster, lay_out(found.plan, found.model, found.cluster), fold=fold)


def parts(rank):
    """All that a rank's step adds up to."""
    times = (*rank.compute_s.values(), *rank.exposed_s.values())
    return sum(times) + rank.optimizer_s + rank.interference_s + rank.host_wait_s + rank.bubble_s


# ---- the optimizer: seconds of a serial step ------------------------------------------------------------------------


def serial(**plan):
    """Nothing overlaps: one bucket, sent after backward, updated, brought back."""
    plan = {"bucket_parameters": 10**9, "launch_s": 0.0, "optimizer": "momentum", **plan}
    host = run(h100(), model=MLP, offload="optimizer", **plan)
    device = run(h100(), model=MLP, **plan)
    return host, device


@pytest.mark.parametrize(("optimizer", "traffic"), [("sgd", 12), ("momentum", 20), ("adam", 28)])
def test_a_serial_step_takes_out_update_and_in(optimizer, traffic):
    # in fp32: gradients out, read gradient, read and write weight and moments, weights in
    host, device = serial(optimizer=optimizer, overlap={"grad_reduce": False})
    copies = 2 * (4 * PARAMETERS / LINK + LATENCY)
    update = traffic * PARAMETERS / MEMORY + OVERHEAD
    computed = device.step_time_s - device.ranks[0].optimizer_s
    assert host.step_time_s == pytest.approx(computed + copies + update, rel=1e-6)
    exposed = host.ranks[0].exposed_s
    assert exposed == pytest.approx({"host": copies, "cpu": update}, rel=1e-6)


def test_pieces_are_updated_and_brought_back_side_by_side():
    whole, _ = serial(bucket_parameters=10**9, overlap={"grad_reduce": False})
    cut, _ = serial(bucket_parameters=PARAMETERS // 4, overlap={"grad_reduce": False})
    update, copy = 20 * PARAMETERS / MEMORY, 4 * PARAMETERS / LINK
    # a flow shop of three machines: the first piece passes all of them, the other three wait for the slowest, a copy
    saved = (2 * copy + update) - ((2 * copy + update) / 4 + 3 / 4 * copy)
    assert whole.step_time_s - cut.step_time_s == pytest.approx(saved, rel=0.05)  # all share the host's memory


def test_ranks_of_a_node_share_the_memory_of_its_host_and_those_of_a_switch_their_link():
    def step_s(gpus, **host):
        plan = {"bucket_parameters": 10**9, "launch_s": 0.0, "optimizer": "sgd", "zero": 0, "offload": "optimizer"}
        found = run(h100(gpus, host={**HOST, **host}), model=MLP, overlap={"grad_reduce": False}, **plan)
        return found.ranks[0].exposed_s

    one, four, pairs, two_hosts = step_s(1), step_s(4), step_s(4, gpus_per_link=2), step_s(4, gpus_per_host=2)
    alone = one["cpu"] - OVERHEAD
    assert four["cpu"] - OVERHEAD == pytest.approx(4 * alone, rel=1e-5)
    assert two_hosts["cpu"] - OVERHEAD == pytest.approx(2 * alone, rel=1e-5)
    assert four["host"] == pytest.approx(one["host"], rel=1e-3)
    assert pairs["host"] == pytest.approx(2 * one["host"], rel=1e-3)


def test_a_host_that_costs_nothing_leaves_the_step_without_its_optimizer():
    for zero in (0, 1, 3):  # with 2, a bucket waits until the gradients of the one before have left
        plan = {"zero": zero, "grad_accum": 2, "launch_s": 0.0, "overlap": {"grad_reduce": True}}
        free = run(h100(4, host=FREE), offload="optimizer", **plan)
        device = run(h100(4, host=FREE), **plan)
        spared = device.ranks[0].optimizer_s - free.ranks[0].optimizer_s
        assert free.step_time_s == pytest.approx(device.step_time_s - spared, rel=0.005)


# ---- the optimizer: bytes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_leave_and_parameters_return_once(zero):
    found = run(h100(8), model="llama3-8b", zero=zero, grad_accum=3, offload="optimizer")
    share = found.job.model.parameters // (8 if zero else 1)
    carried = link_bytes(found)
    times = 3 if zero >= 2 else 1  # where no device keeps them, each microbatch sends its own
    assert carried["pcie0>"] == pytest.approx(times * 4 * share, rel=1e-6)  # fp32
    assert carried["pcie0<"] == pytest.approx(2 * share, rel=1e-6)  # bf16
    # the memory of the host: copies of 8 ranks; norm, clipping, Adam (a gradient, three states read and written), cast;
    # and what is added up: two reads and a write for each further microbatch
    passes = 4 + 8 + (4 + 24) + 6 + (times - 1) * 12
    assert carried["ram0"] == pytest.approx(8 * share * (times * 4 + 2 + passes), rel=1e-6)


def test_experts_are_updated_by_those_who_hold_them():
    model = small_transformer(moe={"experts": 4, "top_k": 2, "ffn_hidden": 512, "first_dense": 1})
    found = run(h100(4), model=model, ep=4, zero=1, offload="optimizer")
    held = {f.rank: f for f in run(h100(4), model=model, ep=4, zero=1).footprints}[0]
    assert link_bytes(found)["pcie0>"] == pytest.approx(4 * held.by_category["optimizer"] / 12, rel=1e-3)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_moves_from_device_to_host(zero):
    plan = {"model": "llama3-8b", "zero": zero}
    device, host = run(h100(8), **plan), run(h100(8), offload="optimizer", **plan)
    share = device.job.model.parameters // (8 if zero else 1)
    before, after = device.footprints[0].by_category, host.footprints[0].by_category
    moved = {name: before[name] - after[name] for name in ("weights", "gradients", "optimizer")}
    assert moved == {
        "weights": 2 * share if zero == 3 else 0,  # the fp32 shard is the host's, the device reads bf16
        "gradients": 4 * share if zero >= 2 else 0,
        "optimizer": (8 if zero == 3 else 12) * share,
    }
    assert host.host_bytes == 8 * 16 * share
    assert device.host_bytes == 0
    assert host.to_dict()["memory"]["host_bytes"] == host.host_bytes


def test_a_lone_device_keeps_the_gradients_of_two_buckets():
    plan = {"model": MLP, "zero": 2, "bucket_parameters": 4096 * 4097, "offload": "optimizer"}
    held = run(h100(), **plan).footprints[0].by_category
    assert held["gradients"] == 0
    assert held["buffers"] == 2 * 4 * 4096 * 4097


def test_stages_that_share_an_embedding_send_gradients_after_they_added_them():
    model = small_transformer(tied_embeddings=True)
    found = job(h100(4), model=model, pp=4, zero=0, grad_accum=4, offload="optimizer")
    for rank in program(found).ranks:
        work = [i for i, each in enumerate(rank.instructions) if isinstance(each, HostWork)]
        tied = [i for i, each in enumerate(rank.instructions) if getattr(each, "name", "") == "tied embedding"]
        assert work
        assert len(tied) == (rank.stage in (0, 3))
        assert all(place < work[0] for place in tied)


def test_where_both_copies_of_a_model_add_gradients_these_are_sent_behind():
    found = run(h100(4), model=small_transformer(), pp=4, schedule="dualpipe", grad_accum=8, offload="optimizer")
    assert sum(parts(rank) for rank in found.ranks) == pytest.approx(4 * found.step_time_s, rel=1e-9)


# ---- activations ----------------------------------------------------------------------------------------------------


def unit_bytes(found):
    """Activations of every unit of a pipeline of one stage."""
    layout = lay_out(found.plan, found.model, found.cluster)
    chunks, _ = place(found.model, layout, build("1f1b", pp=1, microbatches=layout.microbatches))
    return [placed.unit.activation_bytes for placed in chunks[0]]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("zero", [0, 3])
def test_all_activations_but_the_last_leave_and_return(zero, recompute):
    found = run(h100(4), zero=zero, grad_accum=3, recompute=recompute, offload="activations")
    sizes = unit_bytes(found.job)
    carried = link_bytes(found)
    assert carried["pcie0>"] == carried["pcie0<"] == 3 * sum(sizes[:-1])
    assert found.host_bytes == 4 * sum(sizes[:-1])


def test_the_working_set_is_two_layers_and_one_that_comes():
    plain, found = (run(h100(4), model="llama3-8b", zero=3, offload=o) for o in ("none", "activations"))
    sizes = unit_bytes(found.job)
    transient = plain.footprints[0].by_category["activations"] - sum(sizes)
    layer = sizes[1]
    most = max(3 * layer, sizes[-1] + 2 * layer) + transient
    assert max(layer, sizes[-1]) < found.footprints[0].by_category["activations"] <= most
    assert found.peak_memory_bytes < plain.peak_memory_bytes


@pytest.mark.parametrize("plan", [{"zero": 3}, {"zero": 1, "tp": 2}, {"pp": 2, "grad_accum": 4}], ids=str)
def test_a_free_host_costs_no_time(plan):
    plain, found = (run(h100(4, host=FREE), launch_s=0.0, offload=o, **plan) for o in ("none", "activations"))
    assert found.step_time_s == pytest.approx(plain.step_time_s, rel=1e-6)


def test_copies_are_exposed_only_as_far_as_they_are_slower_than_compute():
    def step(rate):
        host = {**HOST, "link_bytes_per_s": rate, "device": {**HOST["device"], "memory_bytes_per_s": 1e15}}
        return run(h100(4, host=host), model="llama3-8b", micro_batch=4, zero=3, grad_accum=2, offload="activations")

    plain = run(h100(4), model="llama3-8b", micro_batch=4, zero=3, grad_accum=2)
    fast, slow = step(1000 * GB), step(5 * GB)
    assert fast.step_time_s == pytest.approx(plain.step_time_s, rel=0.01)
    assert sum(fast.ranks[0].hidden_s.values()) > 0
    # bound by the link in both directions, which take turns: activations leave, then come back
    expected = sum(link_bytes(slow)[f"pcie0{way}"] for way in "<>") / (5 * GB)
    assert expected < slow.step_time_s < expected * 1.15
    assert slow.ranks[0].exposed_s["host"] > 0.5 * slow.step_time_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "looped-bfs"])
def test_pipelines_fetch_what_waits_longest(schedule):
    vpp = 2 if schedule in ("interleaved", "looped-bfs") else 1
    plan = {"pp": 2, "vpp": vpp, "schedule": schedule, "grad_accum": 8}
    plain, found = (run(h100(2), model=small_transformer(), offload=o, **plan) for o in ("none", "activations"))
    before, after = (result.footprints[0].by_category["activations"] for result in (plain, found))
    assert after < before
    carried = link_bytes(found)
    assert carried["pcie0>"] == carried["pcie0<"] > 0


def test_samples_of_several_lengths_leave_as_they_are():
    lengths = [128, 512, 256, 384]
    data = {"lengths": lengths, "multiple": 128}
    plan = {"model": small_transformer(), "data": data, "global_batch": 4, "offload": "activations", "seq_len": 512}
    carried = link_bytes(run(h100(2), **plan))
    assert carried["pcie0>"] == carried["pcie0<"]
    assert carried["pcie1>"] == carried["pcie1<"]


# ---- what holds for both --------------------------------------------------------------------------------------------

PLANS = [
    {"tp": 2, "zero": 1, "grad_accum": 2},
    {"zero": 3, "grad_accum": 2},
    {"tp": 2, "pp": 2, "grad_accum": 4, "zero": 1},
    {"pp": 2, "grad_accum": 4, "zero": 2, "rank_order": "tp-pp-dp"},
    {"zero": 3, "dp_shard": 2},
    {"cp": 2, "zero": 1},
]


@pytest.mark.parametrize("offload", ["optimizer", "activations", "both"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("sharing", [(1, None), (2, 4), (4, 2)], ids=str)
def test_folded_equals_unfolded(plan, offload, sharing):
    links, hosts = sharing
    cluster = h100(4, nodes=2, host={**HOST, "gpus_per_link": links, "gpus_per_host": hosts})
    found = job(cluster, offload=offload, **plan)
    folded, unfolded = (simpar.simulate(found, allow_oom=True, fold=fold) for fold in (True, False))
    assert len(folded.ranks) < len(unfolded.ranks)
    assert folded.trace.step_ns == unfolded.trace.step_ns
    assert folded.peak_memory_bytes == unfolded.peak_memory_bytes
    assert folded.host_bytes == unfolded.host_bytes


def test_switches_that_differ_are_not_folded():
    cluster = h100(4, host={**HOST, "gpus_per_link": 3})  # three GPUs below one, one below the other
    found = job(cluster, zero=3, offload="optimizer")
    folded, unfolded = (simpar.simulate(found, allow_oom=True, fold=fold) for fold in (True, False))
    assert folded.trace.step_ns == unfolded.trace.step_ns
    assert len(folded.ranks) == 4


@st.composite
def some_plan(draw):
    schedule, vpp = draw(st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved", 2)]))
    pp = 2 if schedule == "interleaved" else draw(st.sampled_from([1, 2]))
    return {
        "schedule": schedule if pp > 1 else "1f1b",
        "vpp": vpp,
        "pp": pp,
        "tp": draw(st.sampled_from([1, 2])),
        "zero": draw(st.integers(0, 3)),
        "grad_accum": draw(st.sampled_from([2, 4])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "frozen_layers": draw(st.sampled_from([None, 1])),
        "clip_gradients": draw(st.booleans()),
        "framework": draw(st.sampled_from(["megatron-core", "torchtitan", "nanotron", "megatron-deepspeed"])),
        "precision": draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        "overlap": {"grad_reduce": draw(st.booleans()), "param_gather": draw(st.booleans())},
        "offload": draw(st.sampled_from(["optimizer", "activations", "both"])),
    }


@settings(max_examples=25, deadline=None)
@given(some_plan())
def test_whatever_the_plan(plan):
    found = job(h100(4), model=small_transformer(), **plan)
    for rank in program(found).ranks:
        level = least = 0
        for each in rank.instructions:
            if isinstance(each, Alloc):
                level += each.nbytes
                least = min(least, level)
        assert (level, least) == (0, 0)
    result = simpar.simulate(found, allow_oom=True)
    for rank in result.ranks:
        assert parts(rank) == pytest.approx(result.step_time_s, rel=1e-9)
        assert rank.bubble_s >= -1e-12
    faster = {**HOST, "link_bytes_per_s": 10 * LINK, "device": {**HOST["device"], "memory_bytes_per_s": 10 * MEMORY}}
    sooner = run(h100(4, host=faster), model=small_transformer(), **plan)
    assert sooner.step_time_s <= result.step_time_s * (1 + 1e-9)
    assert sooner.peak_memory_bytes == result.peak_memory_bytes


@pytest.mark.parametrize("plan", [{"zero": 3}, {"zero": 1, "pp": 2, "tp": 2}], ids=str)
def test_the_step_is_attributed_in_full(plan):
    found = run("a100-sxm:1x8", model="llama3-8b", grad_accum=2, offload="both", **plan)
    dependence = Dependence(found)
    path = path_time(dependence)
    assert sum(path.values()) == found.trace.step_ns
    assert path["host streaming"] > 0
    assert path["optimizer"] > 0
    # Euler: the step is homogeneous of degree 1 in all times
    classes = cost_classes(found.job.cluster.device)
    total = sum(dependence.seconds(slower) for name, slower in classes.items() if name != ATTENTION_BACKWARD)
    assert total == pytest.approx(found.step_time_s, rel=5e-3)


def test_a_card_has_one_plug_for_its_host_and_the_others():
    cluster = {"device": "l40s", "gpus_per_node": 4, "host": HOST}
    found = run(cluster, model=small_transformer(), tp=2, zero=1, offload="activations")
    carried = link_bytes(found)
    assert carried["gpu0>"] > carried["pcie0>"] > 0
    assert any(i.opened for rank in program(found.job).ranks for i in rank.instructions if isinstance(i, Run))


def test_bounds_of_a_search_stay_below():
    from simpar.search.bound import Bounds  # noqa: PLC0415

    cluster = simpar.Job(model="gpt2", cluster=h100(4)).cluster
    for offload in ("optimizer", "activations", "both"):
        for zero in (0, 1, 2, 3):
            found = job(h100(4), zero=zero, grad_accum=4, offload=offload)
            bound = Bounds(found.model, cluster, ("zero", "offload")).of(found.plan)
            result = simpar.simulate(found)
            assert bound.step_s <= result.step_time_s
            assert bound.memory_bytes <= result.peak_memory_bytes


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"offload": "optimizer", "sync": "parameter_server"}, "servers hold them; set sync.on=hosts"),
        ({"offload": "both", "sync_every": 4}, "set sync_every=1 or drop offload"),
        ({"offload": "optimizer", "grad_compression": "int8"}, "grad_compression 'int8'"),
        ({"offload": "activations", "pp": 2, "schedule": "zb-h1"}, "take schedule gpipe, 1f1b, interleaved or looped"),
        ({"offload": "both", "pp": 2, "schedule": "dualpipev"}, "set offload=optimizer"),
        ({"offload": "gpu"}, "offload"),
    ],
    ids=str,
)
def test_plans_that_cannot_be(plan, words):
    with pytest.raises(PlanError, match=words):
        Plan(**plan)


def test_halves_of_a_backward_pass_in_a_file_are_refused(tmp_path):
    path = tmp_path / "halves.csv"
    path.write_text("0F0,,0I0,0W0\n,1F0,1I0,1W0\n", encoding="utf-8")
    plan = {"pp": 2, "schedule": str(path), "micro_batch": 1}
    with pytest.raises(PlanError, match="has 0I0 as a half of one; set offload=optimizer"):
        run(h100(2), offload="activations", **plan)
    assert run(h100(2), offload="optimizer", **plan).step_time_s > 0


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("l40s:1x8", "nothing says what those of l40s are; set cluster.host to one of dgx-a100"),
        ("cpu:1x2", "which is a host itself; set offload=none"),
        ("tpu-v5p:4x4x4", "which a torus does not describe"),
    ],
)
def test_clusters_without_known_hosts(cluster, words):
    with pytest.raises(SimparError, match=words):
        run(cluster, offload="optimizer")


def test_a_host_that_is_too_small_is_found_out():
    small = {**HOST, "device": {**HOST["device"], "memory_bytes": 10**10}}
    found = job(h100(8, host=small), model="llama3-8b", zero=3, offload="optimizer")
    with pytest.raises(DoesNotFitError, match=r"keeps 120 GiB on a host, but generic CPU has 9\.31 GiB; raise zero"):
        simpar.simulate(found)
    result = simpar.simulate(found, allow_oom=True)
    assert any("hosts are too small" in warning for warning in result.warnings)
    tight = {**HOST, "device": {**HOST["device"], "memory_bytes": int(result.host_bytes / 0.95)}}
    warned = run(h100(8, host=tight), model="llama3-8b", zero=3, offload="optimizer").warnings
    assert any("memory of hosts is 95% full" in warning for warning in warned)


def test_what_does_not_fit_may_fit_with_the_help_of_hosts():
    with pytest.raises(DoesNotFitError, match="offload=optimizer zero=1"):
        simpar.simulate({"model": "llama3-8b", "cluster": "h100-sxm:1x1", "plan": {"seq_len": 1024}})


def test_exports_know_copies(tmp_path):
    found = run(h100(2), offload="both")
    found.trace.to_perfetto(tmp_path / "trace.json")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"copy: gradients", "copy: parameters", "copy: activations", "optimizer: grad norm"} <= names
