"""Parameter servers against closed forms and bounds, periodic averaging against its parts."""

import pytest

import simpar
from simpar.errors import ClusterError, PlanError, SimparError
from simpar.plan.layout import lay_out
from simpar.program.ir import Collective, Launch, Recv, Send
from simpar.program.lower import lower
from simpar.program.parameter_server import bucketed
from simpar.units import GB

MODEL = "mlp:4096-4096-4096-4096-4096"  # compute is next to nothing beside 268 MB of parameters
PARAMETERS = 4 * (4096 * 4096 + 4096)
# processors that need no time, so that only links count
HOST = {"device": {"base": "cpu", "memory_bytes_per_s": 1e16, "launch_s": 0.0}, "link_bytes_per_s": 10 * GB}
HOST["device"]["memory_bound"] = {
    name: {"bandwidth_efficiency": 1.0, "overhead_s": 0.0} for name in ("elementwise", "activation", "norm")
}
NEVER = {"grad_reduce": False, "param_gather": False}


def job(cluster, model=MODEL, **plan):
    usual = {"micro_batch": 1, "optimizer": "sgd", "launch_s": 0.0, "bucket_parameters": 1}
    return simpar.Job(model=model, cluster=cluster, plan={**usual, **plan})


def h100(nodes=1, gpus=8, **changes):
    return {"device": "h100-sxm", "nodes": nodes, "gpus_per_node": gpus, "host": HOST, **changes}


def step_s(cluster, **plan):
    return simpar.simulate(job(cluster, **plan)).step_time_s


def link_bytes(result):
    return {link.name: link.nbytes for link in result.trace.links}


def program(found):
    return lower(found.model, found.cluster, lay_out(found.plan, found.model, found.cluster))


# ---- closed form: push and pull each take the busiest of the links of a worker and of a server ----------------------


@pytest.mark.parametrize(("workers", "servers"), [(4, 1), (8, 2), (8, 8), (8, 4)])
def test_time_between_nodes_is_that_of_the_busiest_link(workers, servers):
    cluster = h100(nodes=workers + servers, gpus=1)
    found = simpar.simulate(job(cluster, sync={"on": "nodes", "servers": servers}, overlap=NEVER))
    nbytes, rate = 4.0 * PARAMETERS, found.job.cluster.nic_bytes_per_s
    # Li et al.: max(M / b, W · M / (P · b)) for the push, and as much for the pull
    expected = 2 * max(nbytes / rate, workers * nbytes / (servers * rate))
    assert expected < found.step_time_s < 1.06 * expected  # the rest is latency, and the kernels of the perceptron


def test_gpus_below_a_switch_share_its_link_to_the_host():
    apart, shared = (
        step_s(h100(gpus=4, host={**HOST, "gpus_per_link": n}), sync={"on": "hosts"}, overlap=NEVER) for n in (1, 2)
    )
    nbytes = 4.0 * PARAMETERS
    assert apart == pytest.approx(2 * nbytes / (10 * GB), rel=0.05)
    assert shared == pytest.approx(2 * apart, rel=0.05)


def test_every_byte_is_pushed_and_pulled_once():
    found = simpar.simulate(job(h100(nodes=5, gpus=1), sync={"on": "nodes", "servers": 2}))
    carried = link_bytes(found)
    for worker in range(3):
        assert carried[f"nic{worker}>"] == carried[f"nic{worker}<"] == pytest.approx(4 * PARAMETERS)
    for server in (3, 4):
        assert carried[f"nic{server}<"] == pytest.approx(3 * 4 * PARAMETERS / 2)


def test_servers_on_the_workers_spare_what_stays_at_home():
    found = simpar.simulate(job(h100(nodes=4, gpus=1), sync={"on": "workers"}))
    assert link_bytes(found)["nic0>"] == pytest.approx(2 * 4 * PARAMETERS * 3 / 4)


@pytest.mark.parametrize("sharding", ["sliced", "whole"])
def test_servers_keep_all_parameters(sharding):
    made = program(job(h100(), sync={"servers": 3, "sharding": sharding}))
    pulled = [i for rank in made.ranks if not rank.replicas for i in rank.instructions if isinstance(i, Send)]
    assert sum(nbytes for send in pulled for peer, nbytes in send.parts if peer == 0) == 4 * PARAMETERS


def test_whole_keys_go_to_the_server_that_has_the_least():
    made = program(job(h100(), sync={"servers": 2, "sharding": "whole"}, model="mlp:10-4000-10-10"))
    # forward order: 44,000 · 40,010 · 110
    pushed = [i for i in made.ranks[0].instructions if isinstance(i, Send)]
    assert [(send.peer - 8, send.nbytes) for send in pushed] == [(1, 440.0), (1, 160_040.0), (0, 176_000.0)]


def test_pulls_and_pushes_run_beside_compute():
    cluster = h100(gpus=4)
    plan = {"model": "gpt2", "seq_len": 1024, "micro_batch": 8, "sync": {"on": "hosts"}}
    plan["bucket_parameters"] = 7_000_000
    found = [simpar.simulate(job(cluster, **plan, overlap=o)) for o in ({}, NEVER)]
    ideal = simpar.simulate(job({**cluster, "host": {**HOST, "link_bytes_per_s": 1e15, "latency_s": 0}}, **plan))
    assert ideal.step_time_s < found[0].step_time_s < found[1].step_time_s
    assert sum(found[0].ranks[0].hidden_s.values()) > 0


def test_optimizer_states_are_the_servers():
    plain, served = (
        {f.rank: f.by_category for f in simpar.simulate(job(h100(gpus=4), optimizer="adam", sync=sync)).footprints}
        for sync in ("all_reduce", {"on": "hosts"})
    )
    assert plain[0]["optimizer"] == 8 * PARAMETERS
    assert served[0]["optimizer"] == 0
    assert sorted(served) == [0, 1, 2, 3]
    shared = simpar.simulate(job(h100(gpus=4), optimizer="adam", sync={"servers": 2})).footprints
    assert [f.by_category["optimizer"] for f in shared] == [16 * PARAMETERS // 2, 0, 16 * PARAMETERS // 2, 0]


def test_kernels_of_servers_take_the_hosts_memory():
    slow = {**HOST, "device": {**HOST["device"], "memory_bytes_per_s": 100e9}}
    fast, found = (step_s(h100(gpus=4, host=h), sync={"on": "hosts"}, overlap=NEVER) for h in (HOST, slow))
    # three further gradients are added (read, read, write), and sgd reads the sum, reads and writes parameters; pushes
    # of later keys hide some of it
    work = (3 * 12 + 12) * PARAMETERS / 100e9
    assert 0 < found - fast <= work * 1.001


# ---- modes ----------------------------------------------------------------------------------------------------------


NEAR = {**HOST, "link_bytes_per_s": 1e15, "latency_s": 0.0}  # links that need no time either
LARGE = {"model": "gpt2", "seq_len": 1024, "micro_batch": 16, "bucket_parameters": 30_000_000}


def mixed(**sync):
    cluster = {
        "nodes": [{"device": "h100-sxm", "count": 1}, {"device": "a100-sxm-80gb", "count": 1}],
        "gpus_per_node": 1,
        "fabric": {"base": "ndr400", "nic_gbps": 1e7},
        "host": NEAR,
    }
    return step_s(cluster, **LARGE, sync={"on": "hosts", **sync})


def test_asynchronous_workers_go_at_their_own_speed():
    kinds = ("h100-sxm", "a100-sxm-80gb")
    alone = [
        step_s({"device": kind, "gpus_per_node": 1, "host": NEAR}, **LARGE, sync={"on": "hosts"}) for kind in kinds
    ]
    harmonic = 2 / sum(1 / each for each in alone)
    assert mixed(mode="asynchronous", steps=3) == pytest.approx(harmonic, rel=0.01)
    assert mixed() == pytest.approx(max(alone), rel=0.01)


def test_a_bound_lies_between_waiting_and_not_waiting():
    free = mixed(mode="asynchronous", steps=6)
    bounded = {bound: mixed(mode="stale_synchronous", bound=bound, steps=6) for bound in (0, 2)}
    waiting = mixed()
    assert free < bounded[2] <= bounded[0] * 1.0001
    assert bounded[0] == pytest.approx(waiting, rel=0.1)


def test_a_bound_beyond_all_steps_changes_nothing_for_the_slowest():
    plan = {"model": "gpt2", "seq_len": 512, "bucket_parameters": 30_000_000}
    free, bounded = (
        simpar.simulate(job(h100(gpus=2), **plan, sync={"steps": 4, **sync})).trace.step_ns
        for sync in ({"mode": "asynchronous"}, {"mode": "stale_synchronous", "bound": 4})
    )
    assert bounded == pytest.approx(free, abs=200_000)  # the last word to the clock comes after the last push


def test_no_worker_begins_a_step_before_the_bound_lets_it():
    made = program(job(h100(gpus=2), sync={"mode": "stale_synchronous", "bound": 1, "steps": 4}))
    clock = made.guests[-1][0]
    gates = [i.tag for i in made.ranks[0].instructions if isinstance(i, Recv) and i.peer == clock]
    assert [tag[:2] for tag in gates] == [("go", 0), ("go", 1)]  # before steps 2 and 3


# ---- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"sync": "parameter_sever"}, "sync 'parameter_sever' is not known; did you mean 'parameter_server'?"),
        ({"sync": "parameter_server", "zero": 1}, "zero 1 cannot go with sync 'parameter_server'"),
        ({"sync": "parameter_server", "pp": 2}, "pp 2 cannot go with sync 'parameter_server'"),
        ({"sync": {"bound": 2}}, "bound 2 belongs to mode 'stale_synchronous', not 'synchronous'"),
        ({"sync": {"mode": "stale_synchronous"}}, "mode 'stale_synchronous' needs a bound, such as bound=3"),
        ({"sync": {"steps": 3}}, "steps 3 has no meaning with mode 'synchronous'"),
        ({"sync": {"mode": "asynchronous", "steps": 1}}, "steps 1 shows no step that follows another"),
        ({"sync": {"on": "nodes"}}, "servers on nodes of their own need a second node"),
        ({"sync": "parameter_server", "sync_every": 2}, "sync_every 2 averages by all-reduce"),
        ({"sync_every": 2, "zero": 1}, "sync_every 2 with zero 1 needs several groups that shard"),
        ({"sync_every": 2, "cp": 2}, "sync_every 2 with cp 2 needs groups that hold whole sequences"),
        ({"sync_every": 2, "grad_compression": "fp16"}, "sync_every 2 sends no gradients"),
        ({"outer_optimizer": "nesterov"}, "outer_optimizer 'nesterov' acts when replicas average"),
    ],
)
def test_what_cannot_be_says_what_to_change(plan, message):
    with pytest.raises(SimparError) as error:
        simpar.simulate(job(h100(), model="gpt2", **plan))
    assert message in str(error.value)


def test_more_server_nodes_than_leave_a_worker():
    with pytest.raises(PlanError, match="2 servers on nodes of their own leave no worker of the cluster's 2 nodes"):
        simpar.simulate(job(h100(nodes=2), sync={"on": "nodes", "servers": 2}))


def test_hosts_of_a_torus_have_no_links():
    with pytest.raises(ClusterError, match="the hosts of a torus have no links of their own"):
        simpar.simulate(job("tpu-v5e:4x4", model="gpt2", sync={"on": "hosts"}))


# ---- periodic averaging ---------------------------------------------------------------------------------------------


def test_a_round_is_steps_without_traffic_and_one_average():
    one_gpu = simpar.simulate(job(h100(gpus=1), optimizer="adam")).trace.step_ns
    found = simpar.simulate(job(h100(nodes=8, gpus=1), optimizer="adam", sync_every=5))
    spans = found.trace.spans
    averages = [i for i, name in enumerate(spans.name) if found.trace.names[name] == "average parameters"]
    assert len(averages) == 1
    update = [i for i, name in enumerate(spans.name) if found.trace.names[name] == "outer update"]
    rest = int(spans.duration_ns[averages[0]] + spans.duration_ns[update[0]])
    assert found.trace.step_ns == pytest.approx(5 * one_gpu + rest, rel=1e-6)
    assert found.step_time_s == pytest.approx(found.trace.step_s / 5)
    assert found.communication_bytes["dp"] == pytest.approx(4 * PARAMETERS / 5)


def test_rounds_grow_cheaper_with_their_length():
    times = [step_s(h100(nodes=8, gpus=1), sync_every=n) for n in (1, 2, 8, 32)]
    assert times == sorted(times, reverse=True)


def test_an_outer_optimizer_keeps_and_moves_more():
    results = [
        simpar.simulate(job(h100(nodes=8, gpus=1), sync_every=4, outer_optimizer=outer))
        for outer in ("average", "nesterov")
    ]
    assert results[0].step_time_s < results[1].step_time_s
    kept = [r.footprints[0].by_category["optimizer"] for r in results]
    assert kept[1] - kept[0] == 8 * PARAMETERS


@pytest.mark.parametrize("plan", [{"zero": 3}, {"zero": 1}, {"zero": 1, "pp": 2, "grad_accum": 2, "dp_shard": 4}])
def test_islands_that_shard_meet_once_a_round(plan):
    found = job(h100(nodes=2), model="gpt2", seq_len=512, sync_every=3, **{"dp_shard": 8, **plan})
    folded, unfolded = (simpar.simulate(found, fold=fold) for fold in (True, False))
    assert folded.step_time_s == pytest.approx(unfolded.step_time_s, rel=1e-9)
    made = program(found).ranks[0].instructions
    across = [i for i in made if isinstance(i, Collective) and i.group.stream == "dp_replicas"]
    assert [c.name for c in across] == ["average parameters"]


def test_buckets_fill_from_the_end():
    class Unit:
        def __init__(self, count):
            self.trained_parameters = count

    class Placed:
        def __init__(self, count):
            self.unit = Unit(count)

    assert bucketed([Placed(n) for n in (5, 1, 1, 3, 2)], 4) == [(0, 3), (3, 5)]


def test_kernels_of_servers_are_launched_by_nobody():
    made = program(job(h100(), sync={"servers": 1}))
    server = next(rank for rank in made.ranks if not rank.replicas)
    assert all(i.launches == 0 for i in server.instructions if isinstance(i, (Launch, Recv, Send)))
