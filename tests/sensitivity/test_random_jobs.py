"""What holds of every job: costs times their weights are its step, and sensitivities are what simulating again shows.

Derivatives are compared with small changes on machines that are slower by a million in everything, where costs in whole
nanoseconds are as good as real numbers.
"""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic import small_transformer

from simpar.errors import SimparError
from simpar.job import Job
from simpar.result import Result
from simpar.sensitivity.parameters import ATTENTION_BACKWARD, PARAMETERS, Parameter, cost_classes, slowed
from simpar.sensitivity.step import Dependence
from simpar.simulation import simulate

MODELS = {
    "dense": small_transformer(layers=2),
    "experts": small_transformer(name="experts", layers=2, moe={"experts": 4, "top_k": 2, "ffn_hidden": 1024}),
    "wide": small_transformer(name="wide", layers=2, hidden=2048, heads=16, ffn_hidden=8192),
}
GRAPHS = (
    {"topology": "ring", "gpus": 8},
    {"topology": "star", "gpus": 8},
    {"topology": "torus", "shape": [2, 4]},
    {"topology": "leaf_spine", "leaves": 2, "gpus_per_leaf": 4, "spines": 1, "uplink_gbps": 400},
)
MIXED = {
    "nodes": [{"device": "h100-sxm", "count": 1}, {"device": "a100-sxm", "count": 1}],
    "gpus_per_node": 4,
    "fabric": "ndr400",
}
PODS = {"base": "h100-sxm:4x2", "fabric": {"pod_nodes": 2, "oversubscription": 4}}
CLUSTERS: tuple[Any, ...] = ("h100-sxm:1x8", "a100-sxm:2x4", "l40s:1x8", "v100-sxm:2x4", "tpu-v5p:2x4", MIXED, PODS)
SERVERS: tuple[dict[str, Any], ...] = (
    {"servers": 1, "on": "workers"},
    {"on": "workers", "sharding": "whole"},
    {"on": "hosts"},
    {"servers": 2, "mode": "asynchronous", "steps": 2},
    {"mode": "stale_synchronous", "bound": 1, "steps": 3},
)
SLOWER = 1e6
SMALL = 1e-5  # a change; between ties that lie no nearer a step is linear in it
CLOSE = 2e-5  # of the step


@st.composite
def clusters(draw) -> Any:
    """Of eight GPUs: shipped ones, mixed ones, and graphs of one's own."""
    if draw(st.booleans()):
        return draw(st.sampled_from(CLUSTERS))
    graph = {**draw(st.sampled_from(GRAPHS)), "bandwidth_gbps": draw(st.sampled_from([100, 800, 1600]))}
    return {"base": "h100-sxm:1x8", "graph": graph}


@st.composite
def plans(draw) -> dict[str, Any]:
    """Of all kinds of parallelism."""
    plan: dict[str, Any] = {
        "micro_batch": draw(st.sampled_from([1, 4])),
        "grad_accum": draw(st.sampled_from([1, 2])),
        "seq_len": draw(st.sampled_from([256, 1024])),
        "launch_s": draw(st.sampled_from([0.0, 1e-6, 5e-6, 40e-6])),
        "bucket_parameters": draw(st.sampled_from([None, 1_000_000])),
        "recompute": draw(st.sampled_from(["none", "full"])),
        "tp": draw(st.sampled_from([1, 2, 4])),
    }
    if draw(st.integers(0, 3)) == 0:
        return {**plan, "sync": draw(st.sampled_from(SERVERS))}
    plan.update(
        pp=draw(st.sampled_from([1, 2])),
        cp=draw(st.sampled_from([1, 1, 2])),
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        stage_sync=draw(st.sampled_from(["message_passing", "condition_variable"])),
        offload=draw(st.sampled_from(["none", "none", "none", "optimizer", "both"])),
    )
    if plan["pp"] > 1:
        plan["schedule"] = draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"]))
        if plan["schedule"] == "interleaved":
            plan["vpp"] = 2
        if plan["stage_sync"] == "message_passing":
            plan["stage_buffer"] = draw(st.sampled_from([None, 1]))
    return plan


@st.composite
def jobs(draw) -> Job:
    """Those that are valid."""
    model, plan = draw(st.sampled_from(sorted(MODELS))), draw(plans())
    if model == "experts":
        plan["ep"] = draw(st.sampled_from([1, 2]))
    try:
        return simulate({"model": MODELS[model], "cluster": draw(clusters()), "plan": plan}, allow_oom=True).job
    except SimparError:
        assume(False)
        raise


def magnified(job: Job) -> Result:
    """The step on a machine on which everything takes a million times as long."""
    for name, slower in cost_classes(job.cluster.device).items():
        if name != ATTENTION_BACKWARD:
            job = slowed(job, Parameter(name, name, "memory", slower), SLOWER)
    return simulate(job, allow_oom=True)


@settings(max_examples=40, deadline=None)
@given(jobs())
def test_costs_times_their_weights_add_up_to_the_step(job: Job) -> None:
    result = simulate(job, allow_oom=True)
    assert Dependence(result).residual_s == pytest.approx(0.0, abs=1e-9 * result.step_time_s)


@settings(max_examples=20, deadline=None)
@given(jobs(), st.lists(st.sampled_from(PARAMETERS), min_size=6, max_size=6, unique=True))
def test_sensitivities_are_what_a_small_change_does(job: Job, parameters: list[Parameter]) -> None:
    result = magnified(job)
    dependence, step_s = Dependence(result), result.step_time_s
    if not dependence.is_exact:  # only flows that meet may be estimates
        assert job.cluster.graph is not None or job.cluster.fabric is not None or job.plan.offload != "none"
        return
    for parameter in parameters:
        slower, faster = (
            simulate(slowed(result.job, parameter, 1 + sign * SMALL), allow_oom=True).step_time_s for sign in (1, -1)
        )
        sides = sorted(((slower - step_s) / SMALL, (step_s - faster) / SMALL))  # they differ at a tie
        found = dependence.seconds(parameter.slower, SMALL)
        assert sides[0] - CLOSE * step_s <= found <= sides[1] + CLOSE * step_s, parameter.name
