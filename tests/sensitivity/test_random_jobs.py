"""What holds of every job: classes of cost add up to its step, and sensitivities are what simulating again shows."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic import small_transformer

from simpar.errors import SimparError
from simpar.result import Result
from simpar.sensitivity.parameters import ATTENTION_BACKWARD, cost_classes, slowed
from simpar.sensitivity.step import CHANGE, Dependence, sensitivities
from simpar.simulation import simulate

MODELS = {
    "dense": small_transformer(),
    "experts": small_transformer(name="experts", moe={"experts": 4, "top_k": 2, "ffn_hidden": 1024}),
    "wide": small_transformer(name="wide", hidden=2048, heads=16, ffn_hidden=8192),
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
        "grad_accum": draw(st.sampled_from([1, 2, 4])),
        "seq_len": draw(st.sampled_from([256, 1024])),
        "launch_s": draw(st.sampled_from([0.0, 1e-6, 5e-6, 40e-6])),
        "bucket_parameters": draw(st.sampled_from([None, 1_000_000])),
        "recompute": draw(st.sampled_from(["none", "full"])),
    }
    if draw(st.integers(0, 3)) == 0:
        return {**plan, "sync": draw(st.sampled_from(SERVERS)), "tp": draw(st.sampled_from([1, 2]))}
    plan.update(
        tp=draw(st.sampled_from([1, 2, 4])),
        pp=draw(st.sampled_from([1, 1, 2])),
        cp=draw(st.sampled_from([1, 1, 2])),
        zero=draw(st.sampled_from([0, 1, 3])),
        stage_sync=draw(st.sampled_from(["message_passing", "condition_variable"])),
        offload=draw(st.sampled_from(["none", "none", "none", "optimizer", "both"])),
    )
    if plan["stage_sync"] == "message_passing":
        plan["stage_buffer"] = draw(st.sampled_from([None, 1]))
    return plan


@st.composite
def results(draw) -> Result:
    """Of jobs that are valid."""
    model, cluster, plan = draw(st.sampled_from(sorted(MODELS))), draw(clusters()), draw(plans())
    if model == "experts":
        plan["ep"] = draw(st.sampled_from([1, 2]))
    try:
        return simulate({"model": MODELS[model], "cluster": cluster, "plan": plan}, allow_oom=True)
    except SimparError:
        assume(False)
        raise


cases = settings(max_examples=40, deadline=None)
CLOSE = 2e-4  # of the step, as in test_sensitivities


@cases
@given(results())
def test_classes_of_costs_add_up_to_the_step(result: Result) -> None:
    dependence = Dependence(result)
    classes = cost_classes(result.job.cluster.device)
    total = sum(dependence.seconds(slower) for key, slower in classes.items() if key != ATTENTION_BACKWARD)
    assert total == pytest.approx(result.step_time_s, rel=5e-4)


@cases
@given(results())
def test_sensitivities_are_finite_differences(result: Result) -> None:
    close = CLOSE * result.step_time_s
    for found in sensitivities(result):
        slower, faster = (
            simulate(slowed(result.job, found.parameter, 1 + sign * CHANGE), allow_oom=True).step_time_s
            for sign in (1, -1)
        )
        above, below = (slower - result.step_time_s) / CHANGE, (result.step_time_s - faster) / CHANGE
        if abs(above - below) <= 4 * close:
            assert found.seconds == pytest.approx((above + below) / 2, abs=close), found.parameter.name
        else:  # another path takes over within the step of the difference; this one is that of one side
            assert min(above, below) - close <= found.seconds <= max(above, below) + close, found.parameter.name
