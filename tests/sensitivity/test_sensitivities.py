"""d(step)/d(parameter) from the critical path, against simulating again with the parameter 1 % up and down."""

import pytest
from synthetic import ideal_cluster, ideal_device, program, work

from simpar.engine.simulate import execute
from simpar.job import Job
from simpar.program.ir import COMPUTE, Collective, Group, Record, Recv, Send, Sync, Wait
from simpar.result import Result
from simpar.sensitivity.adjoint import weigh
from simpar.sensitivity.blocks import Blocks
from simpar.sensitivity.parameters import ATTENTION_BACKWARD, PARAMETERS, Machine, cost_classes, slowed
from simpar.sensitivity.prices import Prices, Weights
from simpar.sensitivity.step import CHANGE, Dependence, sensitivities
from simpar.sensitivity.steps import match
from simpar.simulation import simulate

BATCH = {"seq_len": 2048, "global_batch": 32}
JOBS = {
    "tensor": {"model": "llama3-8b", "cluster": "h100-sxm:1x8", "plan": {"tp": 8, "zero": 1, **BATCH}},
    "pipeline": {
        "model": "llama3-8b",
        "cluster": "a100-sxm:2x8",
        "plan": {"tp": 4, "pp": 4, "zero": 1, "recompute": "full", **BATCH},
    },
    "rendezvous": {
        "model": "llama3-8b",
        "cluster": "h100-sxm:2x8",
        "plan": {"tp": 4, "pp": 4, "zero": 1, "stage_sync": "condition_variable", "recompute": "full", **BATCH},
    },
    "sharded": {"model": "llama3-8b", "cluster": "h100-sxm:4x8", "plan": {"zero": 3, **BATCH}},
    "replicated": {"model": "gpt2", "cluster": "h100-sxm:4x8", "plan": {"micro_batch": 8, "seq_len": 1024}},
    "stages first": {
        "model": "llama3-8b",
        "cluster": "a100-sxm:2x8",
        "plan": {"tp": 2, "pp": 4, "zero": 1, "rank_order": "tp-pp-dp", "recompute": "full", **BATCH},
    },
    "launches": {"model": "gpt2", "cluster": "h100-sxm:1x8", "plan": {"seq_len": 256, "launch_s": 40e-6}},
}
# Costs are rounded to nanoseconds alike in both.
CLOSE = 2e-4  # of the step


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {name: simulate(job, allow_oom=True) for name, job in JOBS.items()}


def difference(job: Job, slower: object, change: float = CHANGE) -> float:
    """Seconds of the step per 100 % of a parameter's time, by simulating twice."""
    return sum(sides(job, slower, change)) / 2


def sides(job: Job, slower: object, change: float = CHANGE) -> tuple[float, float]:
    """The same from below and from above, the smaller one first: they differ where another path becomes critical."""
    less, now, more = (
        simulate(slowed(job, slower, 1 + sign * change), allow_oom=True).step_time_s  # type: ignore[arg-type]
        for sign in (-1, 0, 1)
    )
    below, above = (now - less) / change, (more - now) / change
    return min(below, above), max(below, above)


@pytest.mark.parametrize("name", JOBS)
def test_every_sensitivity_is_the_finite_difference(name: str, results: dict[str, Result]) -> None:
    result = results[name]
    found = sensitivities(result)
    close = CLOSE * result.step_time_s
    assert [each.parameter for each in found] == list(PARAMETERS)
    for each in found:
        low, high = sides(result.job, each.parameter)
        assert low - close <= each.seconds <= high + close, each.parameter.name
        assert each.share == pytest.approx(each.seconds / result.step_time_s)
        assert each.is_exact


@pytest.mark.parametrize("name", JOBS)
def test_classes_of_costs_add_up_to_the_step(name: str, results: dict[str, Result]) -> None:
    # Euler: the step is homogeneous of degree 1 in all times, whatever the path
    dependence = Dependence(results[name])
    classes = cost_classes(results[name].job.cluster.device)
    total = sum(dependence.seconds(slower) for key, slower in classes.items() if key != ATTENTION_BACKWARD)
    assert total == pytest.approx(results[name].step_time_s, rel=5e-4)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_message_to_a_server_costs_what_one_to_its_gpu_does(nodes: int) -> None:
    plan = {"micro_batch": 8, "seq_len": 1024, "sync": {"on": "workers"}}
    dependence = Dependence(simulate({"model": "gpt2", "cluster": f"h100-sxm:{nodes}x4", "plan": plan}))
    at = dict(dependence.steps.program.guests)
    to_servers = [each for each in dependence.weights.latencies if set(each.ranks) & set(at)]
    assert to_servers
    for transfer in to_servers:
        ends = tuple(at.get(rank, rank) for rank in transfer.ranks)
        assert ends[0] != ends[1]
        moved = transfer._replace(ranks=ends)
        assert dependence.prices.alone_ns(transfer) == dependence.prices.alone_ns(moved)


@pytest.mark.parametrize(
    "graph",
    [
        {"topology": "ring", "gpus": 4},
        {"topology": "star", "gpus": 4},
        {"topology": "fully_connected", "gpus": 4},
        {"topology": "torus", "shape": [2, 2]},
        {"topology": "leaf_spine", "leaves": 2, "gpus_per_leaf": 2, "spines": 1, "uplink_gbps": 800},
    ],
    ids=lambda graph: graph["topology"],
)
def test_a_graph_has_sensitivities_too(graph: dict[str, object]) -> None:
    cluster = {"base": "h100-sxm:1x4", "graph": {**graph, "bandwidth_gbps": 1600}}
    result = simulate({"model": "gpt2", "cluster": cluster, "plan": {"tp": 2, "seq_len": 1024}})
    found = {each.parameter.name: each for each in sensitivities(result)}
    assert found["device.memory_bytes_per_s"].share > 0
    # the graph's edges are what collectives wait for; the node link only says how hard they work the device beside it
    assert found["fabric.nic_gbps"].share > 10 * found["node_link.bandwidth_bytes_per_s"].share
    for each in found.values():
        low, high = sides(result.job, each.parameter)
        close = CLOSE * result.step_time_s
        assert low - close <= each.seconds <= high + close, each.parameter.name


def test_asynchronous_steps_are_those_of_their_workers() -> None:
    # cycles begin when a worker is free for the next step, not when the trace of both has ended
    sync = {"on": "workers", "servers": 1, "mode": "asynchronous", "steps": 2}
    result = simulate({"model": "gpt2", "cluster": "h100-sxm:1x4", "plan": {"seq_len": 1024, "sync": sync}})
    assert result.step_time_s != pytest.approx(result.trace.step_s / 2, rel=0.05)
    for each in sensitivities(result):
        low, high = sides(result.job, each.parameter)
        close = CLOSE * result.step_time_s
        assert low - close <= each.seconds <= high + close, each.parameter.name


def test_attention_backward_is_a_part_of_attention(results: dict[str, Result]) -> None:
    dependence = Dependence(results["tensor"])
    classes = cost_classes(results["tensor"].job.cluster.device, {"bf16"})
    both, backward = (dependence.seconds(classes[key]) for key in ("attention", ATTENTION_BACKWARD))
    assert 0 < backward < both


def test_an_unfolded_step_has_the_sensitivities_of_the_folded_one() -> None:
    job = {"model": "gpt2", "cluster": "h100-sxm:2x8", "plan": {"pp": 2, "zero": 1, "grad_accum": 4, "seq_len": 512}}
    folded, unfolded = (sensitivities(simulate(job, fold=fold)) for fold in (True, False))
    for one, other in zip(folded, unfolded, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=1e-6, abs=1e-12)


def test_links_that_streams_fight_over_count_with_the_time_that_they_really_take() -> None:
    # pods whose uplinks are oversubscribed: the NICs' time is stretched, and scales as a whole
    cluster = {"base": "h100-sxm:4x8", "fabric": {"pod_nodes": 2, "oversubscription": 4}}
    result = simulate({"model": "gpt2", "cluster": cluster, "plan": {"micro_batch": 2, "seq_len": 512}})
    found = {each.parameter.name: each for each in sensitivities(result)}["fabric.nic_gbps"]
    assert found.share > 0.05
    assert found.seconds == pytest.approx(difference(result.job, found.parameter), rel=0.05)


def test_a_step_that_ends_with_its_host_depends_on_launches_and_its_last_kernel_only() -> None:
    result = simulate({"model": "gpt2", "cluster": "h100-sxm:1x1", "plan": {"seq_len": 64, "launch_s": 1e-3}})
    found = {each.parameter.name: each.share for each in sensitivities(result)}
    assert found["device.launch_s"] > 0.99


# ---- programs by hand -----------------------------------------------------------------------------------------------


def weights(
    body: object, launch_ns: int, latency_ns: int = 0, rate: float = 1.0, **handed_over: object
) -> tuple[Weights, int]:
    device = ideal_device(launch_s=launch_ns * 1e-9, compute_rate_during_collectives=rate)
    cluster = ideal_cluster(latency_s=latency_ns * 1e-9, device=device)
    made = program(body, launch_s=launch_ns * 1e-9, **handed_over)  # type: ignore[arg-type]
    trace = execute(made, cluster)
    steps = match(made, trace)
    prices = Prices(Machine(cluster, made.launch_s), made, steps.ranks)
    return weigh(steps, prices, Blocks(prices)), trace.step_ns


def test_after_the_host_waited_for_the_device_only_later_launches_count() -> None:
    # a: 0-10 launch, 10-110 device; the host goes on at 110: b and c are issued at 120 and 130
    found, step_ns = weights({0: [work(100, "a"), Sync(), work(1, "b"), work(1, "c")]}, 10)
    assert step_ns == 131
    assert found.launches == 3  # one for a, two behind the wait
    assert sum(found.kernels.values()) == 2  # a and c


def test_a_host_that_waits_for_a_collective_is_late_by_it() -> None:
    pair = Group("dp", range(2))

    def member(before: int) -> list[object]:
        reduce = [Record(COMPUTE, "e"), Wait("dp", "e"), Collective("all_gather", 100.0, pair), Record("dp", "d")]
        return [work(before), *reduce, Wait(COMPUTE, "d"), Sync(), work(1, "last")]

    found, step_ns = weights({0: member(30), 1: member(200)}, 5, latency_ns=40)
    assert list(found.latencies.values()) == list(found.streams.values()) == [1]
    assert step_ns == 5 + 200 + 40 + 50 + 5 + 1
    assert found.launches == 2  # of the late member's first kernel, and of the last one


def test_a_rendezvous_depends_on_the_collective_that_kept_its_receiver() -> None:
    # rank 1 takes the message once its collective with rank 2 has ended, at 30 + 40 + 100
    pair = Group("tp", (1, 2))

    def member() -> list[object]:
        reduce = [Record(COMPUTE, "e"), Wait("tp", "e"), Collective("all_gather", 200.0, pair), Record("tp", "d")]
        return [work(30), *reduce, Wait(COMPUTE, "d")]

    sends = [work(10), Record(COMPUTE, "e"), Wait("pp", "e"), Send("pp", 1, 50.0, "x")]
    ranks = {0: sends, 1: [*member(), Recv(0, "x"), work(5)], 2: member()}
    found, step_ns = weights(ranks, 0, latency_ns=40, stage_sync="condition_variable")
    assert step_ns == 30 + 40 + 100 + 40 + 50 + 5
    assert found.launches == 0
    assert sorted((transfer.op, weight) for transfer, weight in found.streams.items()) == [
        ("all_gather", 1.0),
        ("p2p", 1.0),
    ]
    assert sorted(kernel.nbytes for kernel, _ in found.kernels) == [5, 30]


def test_a_full_buffer_depends_on_what_the_receiver_had_waited_for() -> None:
    # y may leave when x is taken, and that is when the first message on another stream has come, at 90 + 50
    def send(stream: str, peer: int, tag: str) -> list[object]:
        return [Record(COMPUTE, tag), Wait(stream, tag), Send(stream, peer, 50.0, tag)]

    ranks = {
        0: [work(10), *send("pp", 1, "x"), *send("pp", 1, "y")],
        1: [Recv(2, "z"), Recv(0, "x"), Recv(0, "y"), work(5)],
        2: [work(90), *send("side", 1, "z")],
    }
    found, step_ns = weights(ranks, 0, stage_buffer=1)
    assert step_ns == 90 + 50 + 50 + 5
    assert sorted(kernel.nbytes for kernel, _ in found.kernels) == [5, 90]


def test_the_host_of_the_member_that_comes_last_is_what_a_collective_waits_for() -> None:
    pair = Group("dp", range(2))
    gather = Collective("all_gather", 200.0, pair)
    found, step_ns = weights({0: [gather], 1: [work(1), work(1), gather]}, 10)
    assert step_ns == 3 * 10 + 100
    assert found.launches == 3


def test_compute_that_a_collective_slows_depends_on_when_it_began_and_ended() -> None:
    # the message arrives at 60; the collective runs 60-160 beside 400 ns of compute, which it slows to half its speed
    pair = Group("dp", range(2))

    def other() -> list[object]:
        return [work(60, "before"), Record(COMPUTE, "e"), Wait("dp", "e"), Collective("all_gather", 200.0, pair)]

    found, step_ns = weights({0: [Collective("all_gather", 200.0, pair), work(400, "slowed")], 1: other()}, 0, 0, 0.5)
    assert step_ns == 450
    slowed_kernel = max(found.kernels, key=lambda key: key[0].nbytes)
    assert found.kernels[slowed_kernel] == pytest.approx(1.0)
    assert list(found.streams.values()) == [pytest.approx(0.5)]  # a longer collective slows for longer
    # a later collective slows just as much, so what comes before it does not count
    assert [w for (kernel, _), w in found.kernels.items() if kernel.nbytes == 60] in ([], [pytest.approx(0.0)])


def test_messages_and_latencies_are_weighed_apart() -> None:
    sends = [work(100), Record(COMPUTE, "e"), Wait("pp", "e"), Send("pp", 1, 50.0, "x")]
    found, step_ns = weights({0: sends, 1: [Recv(0, "x"), work(200)]}, 0, latency_ns=10)
    assert step_ns == 360
    assert list(found.streams.values()) == list(found.latencies.values()) == [1.0]
