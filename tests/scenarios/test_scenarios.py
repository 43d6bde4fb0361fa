"""Scenarios run as a user runs them, and print what lies beside them."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from loading import ROOT, load

import simpar

MEASURING = {"mlp_on_this_machine", "two_linears_on_two_devices"}  # see test_measured_scenarios.py
SCENARIOS = sorted(path for path in (ROOT / "scenarios").glob("*.py") if path.stem not in MEASURING)
EXPECTED = ROOT / "scenarios" / "expected"


def comparable(text: str) -> list[str]:
    """The lines that do not depend on what is installed."""
    return [line for line in text.splitlines() if find_spec("torch") or not line.startswith("torch:")]


@pytest.mark.parametrize("script", SCENARIOS, ids=lambda script: script.stem)
def test_output_is_as_expected(script: Path, tmp_path: Path, update_golden: bool) -> None:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    golden = EXPECTED / f"{script.stem}.txt"
    if update_golden:
        golden.write_text(ran.stdout, encoding="utf-8")
    assert comparable(ran.stdout) == comparable(golden.read_text(encoding="utf-8"))
    pages = [line.split(": ")[1] for line in ran.stdout.splitlines() if line.startswith(("timeline of", "chart: "))]
    assert {page.name for page in tmp_path.glob("*.html")} == set(pages)
    for name in pages:
        page = (tmp_path / name).read_text(encoding="utf-8").lower()
        assert "plotly" in page or "<canvas" in page


def test_every_expected_output_has_its_scenario() -> None:
    assert {path.stem for path in EXPECTED.glob("*.txt")} == {script.stem for script in SCENARIOS}


def test_parts_of_the_step_add_up() -> None:
    scenario = load("llama3_70b_strategies")
    plan = scenario.PLANS["TP8 PP4, recompute"].replace(global_batch=128, seq_len=scenario.SEQ_LEN)
    result = simpar.simulate(simpar.Job(model=scenario.MODEL, cluster=scenario.CLUSTER, plan=plan))
    parts = scenario.seconds(result)
    assert sum(parts.values()) == pytest.approx(result.step_time_s, rel=1e-9)
    # recomputation repeats the forward pass, a third of the model's FLOP but for the head
    assert 0.3 < parts["recompute"] / parts["compute"] < 1 / 3


def test_timeline_goes_where_it_is_told_and_a_single_plan_wins_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = load("llama3_70b_strategies")
    monkeypatch.setattr(scenario, "PLANS", {"TP8 PP4": scenario.PLANS["TP8 PP4"]})
    monkeypatch.setattr(scenario, "GLOBAL_BATCH", 64)
    scenario.main(str(tmp_path / "winner.html"))
    assert (tmp_path / "winner.html").stat().st_size > 1_000
    printed = capsys.readouterr().out
    assert "TP8 PP4 wins with" in printed
    assert "slower" not in printed


def test_plans_that_do_not_fit_have_no_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = load("llama3_70b_strategies")
    monkeypatch.setattr(scenario, "PLANS", {"FSDP": scenario.PLANS["FSDP"]})
    scenario.main(str(tmp_path / "winner.html"))
    assert not (tmp_path / "winner.html").exists()
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(r"FSDP  does not fit: stage 0 needs \d+ GiB \(activations", last)


@pytest.mark.parametrize(("samples", "ranks"), [(60_000, 8), (60_000, 7), (5, 8), (1, 1)])
def test_blocks_hold_each_sample_once_and_differ_by_at_most_one(samples: int, ranks: int) -> None:
    blocks = load("mlp_data_parallel").blocks(samples, ranks)
    assert [sample for block in blocks for sample in block] == list(range(samples))
    assert len(blocks) == ranks
    assert max(map(len, blocks)) - min(map(len, blocks)) <= 1


def test_kernels_of_the_perceptron_are_those_that_torch_runs() -> None:
    pytest.importorskip("torch", reason="tracing a module needs torch")
    scenario = load("mlp_data_parallel")
    assert "the same 11 kernels" in scenario.compare_with_torch(simpar.mlp(scenario.LAYERS))
    assert "other" in scenario.compare_with_torch(simpar.mlp(scenario.LAYERS, activation="tanh"))
