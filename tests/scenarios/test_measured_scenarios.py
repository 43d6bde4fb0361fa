"""Scenarios that measure this machine: their numbers vary, so structure and plausibility are what is checked."""

import re
from typing import Any

import pytest

pytest.importorskip("torch", reason="these scenarios train with torch")

from loading import load

from calibrate.check import run as bench
from simpar.engine.simulate import execute


def test_mlp_is_trained_and_predicted_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PULSE_STEP_S", 0.001)
    scenario = load("mlp_on_this_machine")
    scenario.ROUNDS = 1
    scenario.main()
    printed = capsys.readouterr().out
    rows = re.findall(r"^ +(\d+) +(\d+) +([\d.]+) ms +([\d.]+) ms +([\d.]+) ms +([\d.]+) s +([\d.]+) s$", printed, re.M)
    assert [(ranks, steps) for ranks, steps, *_ in rows] == [("1", "938"), ("2", "469")]
    for _, steps, predicted, replayed, trained, *epochs in rows:
        for step in (predicted, replayed, trained):
            assert 0.05 < float(step) < 5_000
        # a step is printed to a hundredth of a millisecond
        for step, epoch in zip((predicted, trained), epochs, strict=True):
            assert float(epoch) == pytest.approx(int(steps) * float(step) * 1e-3, abs=0.01 + int(steps) * 5e-6)
    assert "2 processes train" in printed
    assert "profile 'cpu' is of no machine (generic CPU)" in printed


def test_two_linears_are_split_and_predicted_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = load("two_linears_on_two_devices")
    scenario.ROUNDS = 1
    scenario.MODELS = {(10, 10, 5): 20, (64, 64, 64): 16}

    class Nobody:
        """Stands for processes: what is predicted is also what is measured."""

        def __init__(self, size: int, **options: Any) -> None:
            self.size = size

        def __enter__(self) -> "Nobody":
            return self

        def __exit__(self, *exception: object) -> None:
            return None

        def run(self, recipe: Any, *, steps: int) -> Any:
            return type("Trained", (), {"step_s": (1e-3 * recipe.ranks * recipe.microbatches,) * steps})

    def replay_all(program: Any, *, repeats: int, **options: Any) -> list[Any]:
        cluster = bench.cluster_of(scenario.Profile(name="cpu", device=scenario.device("cpu")), len(program.ranks))
        return [execute(program, cluster)] * repeats

    for name, fake in (("Workers", Nobody), ("Trainers", Nobody), ("replay_all", replay_all)):
        monkeypatch.setattr(bench, name, fake)
    scenario.main()
    printed = capsys.readouterr().out
    rows = re.findall(r"^([\d-]+) +(\d) +(\d) +([\d.]+) ms +([\d.]+) ms +([\d.]+) ms$", printed, re.M)
    assert [(name, devices, pieces) for name, devices, pieces, *_ in rows] == [
        (name, *way) for name in ("10-10-5", "64-64-64") for way in (("1", "1"), ("2", "1"), ("2", "4"))
    ]
    assert [trained for *_, trained in rows] == ["1.00", "2.00", "8.00"] * 2
    assert all(predicted == replayed for *_, predicted, replayed, _ in rows)
    assert len(re.findall(r"^two devices: [\d.]+ times as fast as one predicted, 0.50 measured$", printed, re.M)) == 2
