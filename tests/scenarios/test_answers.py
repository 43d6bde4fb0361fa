"""What the scenarios derive from their numbers, and the facts that stand in them."""

import csv
from types import SimpleNamespace

import pytest
from loading import ROOT, load

RUNS = ROOT.parent / "shared" / "data" / "runs" / "runs.csv"
SOURCES = {"Korthikanti et al. 2022, Table 5": "korthikanti2022", "Narayanan et al. 2021, Table 2": "sc21_megatron"}


def test_published_steps_are_those_of_the_measured_runs() -> None:
    if not RUNS.exists():
        pytest.skip("the table of measured runs is not there")
    with RUNS.open(encoding="utf-8") as file:
        measured = list(csv.DictReader(file))
    for row in load("published_tables").ROWS:
        alike = [
            float(run["step_time_s"])
            for run in measured
            if run["source"] == SOURCES[row.source]
            and run["zero"] == "0"
            and (int(run["num_gpus"]), int(run["global_batch"])) == (row.gpus, row.plan["global_batch"])
            and (run["pp"], run["recompute"]) == (str(row.plan.get("pp", 1)), row.plan["recompute"])
        ]
        assert alike == [pytest.approx(row.published_s, rel=1e-3)], row.name


@pytest.mark.parametrize("strategy", ["TP", "TP8 + PP", "FSDP", "TP8 + PP4 + DP"])
def test_strategies_use_all_gpus_or_say_that_they_cannot(strategy: str) -> None:
    scenario = load("tp_pp_fsdp_as_nodes_grow")
    for nodes in scenario.NODES:
        plan = scenario.plan(strategy, nodes)
        if plan is not None:
            replicas, rest = divmod(nodes * scenario.GPUS_PER_NODE, plan.tp * plan.pp)
            assert rest == 0
            assert scenario.GLOBAL_BATCH % replicas == 0
    assert scenario.plan("TP", 16) is None
    assert scenario.plan("TP8 + PP", 32) is None
    assert scenario.plan("FSDP", 32) is None


def test_uneven_stages_hold_all_layers() -> None:
    scenario = load("heterogeneous_gpus")
    assert {sum(scenario.layers(first)) for first in scenario.FIRST_HALF} == {scenario.LAYERS}


def test_a_budget_that_no_schedule_keeps_has_no_winner() -> None:
    scenario = load("pipeline_schedules")
    step = (0.0, SimpleNamespace(step_time_s=2.0))
    half = (0.4, SimpleNamespace(step_time_s=1.0))
    table = {"1f1b": {64: step, 40: step, 26: None}, "zb-v": {64: half, 40: None, 26: None}}
    roomy, tight, none = scenario.verdict(table).splitlines()
    assert roomy == "Within 64 GiB zb-v is fastest with 1.00 s, 100% faster than 1f1b."
    assert tight == "Within 40 GiB 1f1b is fastest with 2.00 s; zb-v cannot stay within."
    assert none == "Within 26 GiB none fits."


def test_a_sample_is_spread_where_it_does_not_fit_and_over_no_more_than_there_are() -> None:
    scenario = load("long_context")
    longest = max(scenario.SEQ_LENS)
    assert not scenario.fits(longest, 8)
    assert scenario.fits(longest, 32)


def test_the_cheaper_device_is_the_one_whose_price_is_below_its_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = load("h100_or_b200")

    def step(name: str, step_time_s: float) -> SimpleNamespace:
        cluster = SimpleNamespace(device=SimpleNamespace(name=name))
        return SimpleNamespace(step_time_s=step_time_s, job=SimpleNamespace(cluster=cluster))

    monkeypatch.setattr(
        scenario.simpar, "compare", lambda *_: SimpleNamespace(ratio_interval=(1.8, 2.2)), raising=False
    )
    h100, b200 = step("h100-sxm", 2.0), step("b200-sxm", 1.0)
    for price, words in ((3.0, "b200-sxm saves 25% of the money over h100-sxm."), (8.0, "h100-sxm saves 50%")):
        monkeypatch.setattr(scenario, "PRICES", {"h100-sxm": 2.0, "b200-sxm": price})
        assert words in scenario.verdict(h100, b200)
    monkeypatch.setattr(scenario, "PRICES", {"h100-sxm": 2.0, "b200-sxm": 4.2})
    assert scenario.verdict(h100, b200).endswith("so it may be the other.")
