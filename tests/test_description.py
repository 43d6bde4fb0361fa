"""Mistakes in descriptions: one family of errors in Python, whose texts name field, value and rule."""

import pickle
from collections.abc import Callable
from importlib import import_module
from itertools import product
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from simpar import (
    Cluster,
    ClusterError,
    Job,
    JobError,
    ModelError,
    Overlap,
    Plan,
    PlanError,
    SimparError,
    Transformer,
    simulate,
)
from simpar import mlp as perceptron
from simpar.cli.jobfile import read_draft
from simpar.description import Description
from simpar.model.presets import preset

SIMULATION = import_module("simpar.simulation")  # the package's own name is the function
GOOD = {"model": "llama3-8b", "cluster": "h100-sxm:1x8"}


class Inner(Description):
    """Something that lies inside."""

    count: int = 1
    ratio: float | None = None
    choice: Literal[1, 2] = 1


class Outer(Description):
    """Something with parts."""

    inner: Inner | None = None
    parts: tuple[Inner, ...] = ()
    counts: dict[str, float] | None = None
    switch: bool | int = False


def said(build: Callable[[], object], kind: type[SimparError] = SimparError) -> str:
    with pytest.raises(kind) as caught:
        build()
    assert type(caught.value) is kind
    assert "pydantic" not in str(caught.value)
    return str(caught.value)


def of_plan(**plan: Any) -> str:
    return said(lambda: simulate({**GOOD, "plan": plan}), JobError)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        ({"zeero": 1}, "plan.zeero: unknown key; did you mean 'zero'?"),
        (
            {"zeero": 1, "TPP": 2},
            "plan.zeero: unknown key; did you mean 'zero'?\nplan.TPP: unknown key; did you mean 'tp'?",
        ),
        ({"micro-batch": 1}, "plan.micro-batch: unknown key; did you mean 'micro_batch'?"),
        ({"overlap": {"p2pp": True}}, "plan.overlap.p2pp: unknown key; did you mean 'p2p'?"),
        ({"tp": "eight"}, "plan.tp: 'eight' should be a whole number"),
        ({"tp": True}, "plan.tp: true should be a whole number"),
        ({"tp": 1.5}, "plan.tp: 1.5 should be a whole number"),
        ({"tp": None}, "plan.tp: null should be a whole number"),
        ({"tp": [1]}, "plan.tp: should be a whole number, not a list"),
        ({"tp": {"n": 1}}, "plan.tp: should be a whole number, not a mapping"),
        ({"tp": 1j}, "plan.tp: should be a whole number, not a value of type complex"),
        ({"zero": True}, "plan.zero: true should be a whole number"),
        ({"layer_split": [True, 31]}, "plan.layer_split: holds true or false where numbers belong; give the numbers"),
        ({"launch_s": True}, "plan.launch_s: true should be a number"),
        ({"launch_s": float("nan")}, "plan.launch_s: nan should be a finite number"),
        ({"launch_s": 1e400}, "plan.launch_s: inf should be a finite number"),
        ({"launch_s": -1e-6}, "plan.launch_s: -1e-06 should be greater than or equal to 0"),
        ({"tp": 10**25}, f"plan.tp: {10**25} should be a whole number of fewer digits"),
        ({"tp": 10**5000}, "plan.tp: a number of about 5001 digits should be a whole number of fewer digits"),
        (
            {"precision": "BF16"},
            "plan.precision: 'BF16' should be 'bf16', 'fp16', 'tf32', 'fp32' or 'fp8'; did you mean 'bf16'?",
        ),
        (
            {"overlap": {"tp": "Bulk"}},
            "plan.overlap.tp: 'Bulk' should be 'none', 'bulk' or 'pipelined'; did you mean 'bulk'?",
        ),
        (
            {"tp": 0, "pp": "two"},
            "plan.tp: 0 should be greater than or equal to 1\nplan.pp: 'two' should be a whole number",
        ),
        ({"recompute_layers": 2}, "plan: recompute_layers 2 needs recompute 'full'"),
    ],
)
def test_every_wrong_field_is_a_line_with_path_value_and_rule(plan, text):
    assert of_plan(**plan).startswith(text)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "model and cluster are missing"),
        ({**GOOD, "plam": {}}, "plam: unknown key; did you mean 'plan'?"),
        ({**GOOD, "model": "lama3-8b"}, "model: unknown model 'lama3-8b'; did you mean 'llama3-8b'?; give a preset"),
        ({**GOOD, "model": {"base": "gpt2", "layrs": 1}}, "model.layrs: unknown key; did you mean 'layers'?"),
        ({**GOOD, "model": {"base": "gpt2", "layers": True}}, "model.layers: true should be a whole number"),
        (
            {**GOOD, "cluster": {"base": "h100:2x8", "fabric": {"nic_gbps": "fast"}}},
            "cluster.fabric.nic_gbps: 'fast' should be a number",
        ),
        ({**GOOD, "plan": 3}, "plan: 3 should be a mapping of fields"),
    ],
)
def test_wrong_jobs(fields, text):
    assert said(lambda: Job.model_validate(fields), JobError).startswith(text)
    assert said(lambda: Job(**fields), JobError).startswith(text)
    assert said(lambda: simulate(fields), JobError).startswith(text)


def test_each_description_raises_the_error_of_its_room():
    assert said(lambda: Plan(tp=0), PlanError) == "tp: 0 should be greater than or equal to 1"
    assert said(lambda: Plan().replace(tp=0), PlanError) == "tp: 0 should be greater than or equal to 1"
    assert said(lambda: Overlap(p2p=7), PlanError) == "p2p: 7 should be true or false"
    assert said(lambda: preset("gpt2").replace(layers=-1), ModelError) == "layers: -1 should be greater than 0"
    assert said(lambda: Transformer(name="x"), ModelError).endswith("and tied_embeddings are missing")
    assert said(lambda: Cluster(device="h100", nodes=0), ClusterError).startswith("nodes: 0 should be greater than")


def test_a_wrong_edge_of_a_graph_is_one_line():
    edges = [{"source": "gpu0", "target": "gpu1", "bandwidth_gbps": -3}]
    text = said(lambda: Cluster(device="h100-sxm", gpus_per_node=2, graph=edges), ClusterError)
    assert text == "graph.edges.0.bandwidth_gbps: -3 should be greater than 0"


def test_json_texts_raise_the_same_errors():
    assert (
        said(lambda: Plan.model_validate_json('{"tp": 0}'), PlanError) == "tp: 0 should be greater than or equal to 1"
    )
    assert said(lambda: Plan.model_validate_json('{"tp": 1e400}'), PlanError) == "tp: inf should be a finite number"
    assert said(lambda: Plan.model_validate_json("{"), PlanError).startswith("is not valid JSON (EOF while parsing")


def test_errors_are_value_errors_that_carry_paths_and_pydantics_own():
    with pytest.raises(ValueError, match="overlap") as caught:
        Job(**GOOD, plan={"overlap": {"tp": 3}, "pp": 0})
    error = caught.value
    assert isinstance(error, SimparError)
    assert [path for path, _ in error.problems] == [("plan", "pp"), ("plan", "overlap", "tp")]
    assert isinstance(error.__context__, ValidationError)
    assert error.__suppress_context__
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.problems) == (str(error), error.problems)


def test_problems_of_all_levels_are_collected():
    fields = {"inner": {"count": "x", "ratio": True}, "parts": [{"choice": True}, {"cont": 1}], "counts": {"a": True}}
    assert said(lambda: Outer.model_validate(fields)).splitlines() == [
        "inner.count: 'x' should be a whole number",
        "inner.ratio: true should be a number",
        "parts.0.choice: true should be a whole number",
        "parts.1.cont: unknown key; did you mean 'count'?",
        "counts: holds true or false where numbers belong; give the numbers",
    ]
    assert Outer(inner=Inner(count=2), switch=True) == Outer.model_validate({"inner": {"count": 2}, "switch": True})


def test_of_many_fields_some_are_listed():
    text = said(lambda: Plan.model_validate({"zzz": 1}), PlanError)
    listed = text.partition("(known: ")[2].removesuffix(")").split(", ")
    assert [*Plan.model_fields][: len(listed) - 1] == listed[:-1]
    assert listed[-1] == f"and {len(Plan.model_fields) - len(listed) + 1} more"


def test_frozen_fields_say_how_to_vary_them():
    inner = Inner()
    with pytest.raises(SimparError, match=r"^count: a Inner is frozen; make another one with \.replace\(count=…\)$"):
        inner.count = 2
    assert inner.replace(count=2).count == 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"plan": {"tp": 8, "launch_s": 1e300}}, "plan.launch_s: 1e+300 is too large to be simulated; check it"),
        ({"plan": {"tp": 8, "launch_s": 1e10}}, "plan.launch_s: 10000000000.0 is too large to be simulated; check it"),
        (
            {
                "cluster": {"base": "h100-sxm:1x8", "node_link": {"bandwidth_bytes_per_s": 1e-310}},
                "plan": {"tp": 8, "zero": 1},
            },
            "cluster.node_link.bandwidth_bytes_per_s: 1e-310 is too small to be simulated; check it",
        ),
    ],
)
def test_numbers_beyond_arithmetic_are_named(fields, text):
    assert said(lambda: simulate({**GOOD, **fields}, allow_oom=True), JobError) == text


def test_whichever_number_is_off_by_much_is_the_one_that_is_named():
    job = Job.model_validate({"model": "gpt2", "cluster": "h100-sxm:2x8"})
    given = [(("model",), "gpt2"), (("cluster",), "h100-sxm:2x8")]
    floats = [(path, value) for path, value in SIMULATION._numbers((), job) if isinstance(value, float) and value]
    named = 0
    for (path, value), off in product(floats, (1e-9, 1e9)):
        try:
            odd = read_draft(None, [*given, (path, value * off)]).job()
        except SimparError:
            continue  # a rule of its own refuses it
        found, text = SIMULATION._most_extreme(odd)
        assert found == path
        assert ("too large" if off > 1 else "too small") in text
        named += 1
    assert named > 100


def test_steps_that_would_run_for_hours_are_refused():
    text = said(lambda: simulate({**GOOD, "plan": {"grad_accum": 10**9}}), PlanError)
    assert text.startswith(
        "plan: 1,000,000,000 microbatches on 1 virtual stages are 2,000,000,000 operations, more than"
    )
    text = said(lambda: simulate({**GOOD, "model": {"base": "gpt2", "layers": 10**6}}), ModelError)
    assert text.startswith("model.layers: 1,000,000 layers are more than the 10,000 that can be simulated")


def test_a_huge_microbatch_is_answered_at_once():
    with pytest.raises(SimparError, match=r"needs .* GiB"):
        simulate({**GOOD, "plan": {"micro_batch": 10**18}})


def test_a_result_shows_itself_in_one_line():
    result = simulate({"model": perceptron("784-500-10"), "cluster": "cpu:2", "plan": {"micro_batch": 64}})
    assert repr(result) == f"<Result: {result.title} · {result.subtitle}>"
    assert "\n" not in repr(result)
    assert len(repr(result)) < 250
