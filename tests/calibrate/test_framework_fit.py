"""The constants of a framework come back from steps that were made with them."""

import json
from pathlib import Path

import numpy as np
import pytest

from calibrate.cli import main
from calibrate.framework import fit_framework
from simpar import simulate
from simpar.errors import RunsError
from simpar.framework.framework import framework, load_framework
from simpar.validation.jobs import describe
from simpar.validation.runs import Run

TRUTH = framework("nanotron").replace(launch_s=40e-6, traffic_factor=1.3)
SHAPES = [(hidden, micro) for hidden in (1024, 4096) for micro in (1, 2, 4, 8)]  # launch-bound and device-bound ones


def made(number: int, hidden: int, micro_batch: int) -> Run:
    fields = {"layers": 2, "hidden": hidden, "heads": hidden // 128, "ffn_hidden": 4 * hidden, "vocab": 1024}
    batch = {"seq_len": 1024, "micro_batch": micro_batch, "global_batch": 2 * micro_batch, "recompute": "none"}
    run = Run(id=f"r{number}", framework="nanotron", gpu="h100-sxm", num_gpus=1, step_time_s=1.0, **fields, **batch)
    return run.replace(step_time_s=simulate(describe(run, TRUTH).job).step_time_s)


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [made(number, *shape) for number, shape in enumerate(SHAPES)]


def test_the_constants_that_made_the_steps_are_found(runs: list[Run]) -> None:
    start = TRUTH.replace(launch_s=28e-6, traffic_factor=1.6)
    told: list[tuple[int, int, str]] = []
    found = fit_framework(runs, start, rows="8 made rows", workers=1, progress=lambda *what: told.append(what))
    assert set(found.values) == {"launch_s", "traffic_factor"}  # no row has tensor parallelism or shards
    assert found.values["launch_s"] == pytest.approx(40e-6, rel=0.05)
    assert found.values["traffic_factor"] == pytest.approx(1.3, rel=0.08)
    assert np.median(found.after) < 0.02 < np.median(found.before)
    assert found.framework.fitted["launch_s"].rows == "8 made rows"
    first, *tries = told
    assert first == (0, 0, "predicting 8 rows")
    assert [done for done, _, _ in tries] == list(range(1, len(tries) + 1))
    assert all(done <= most for done, most, _ in tries)


def table(path: Path, runs: list[Run]) -> Path:
    columns = [name for name in Run.model_fields if getattr(runs[0], name) not in (None, "")]
    lines = [",".join(str(getattr(run, name)) for name in columns) for run in runs]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return path


def test_the_command_writes_a_framework_that_plans_take(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine.yaml"
    words = ["framework", str(table(tmp_path / "runs.csv", runs[:6])), "--out", str(out), "--name", "mine", "--json"]
    assert main([*words, "--workers", "1"]) == 0
    said = json.loads(capsys.readouterr().out)
    mine = load_framework(out)
    assert (mine.name, mine.layer_split) == ("mine", "greedy")
    assert mine.launch_s == pytest.approx(said["values"]["launch_s"], rel=1e-3)
    assert mine.residual_80 == said["residual_80"]
    assert said["median_error"] <= said["median_error_before"]


def test_too_few_rows_and_several_frameworks_are_told(
    runs: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunsError, match="only 2 rows can be simulated, but a fit needs 6"):
        fit_framework(runs[:2], TRUTH, rows="2 rows", workers=1)
    mixed = [runs[0], runs[1].replace(framework="megatron-core")]
    path = str(table(tmp_path / "runs.csv", mixed))
    assert main(["framework", path, "--out", str(tmp_path / "x.yaml")]) == 2
    assert "its rows name 2 frameworks (megatron-core, nanotron), and a fit is for one" in capsys.readouterr().err
    assert main(["framework", path, "--base", "nanotron", "--out", str(tmp_path / "none" / "x.yaml")]) == 2
    assert "create it first" in capsys.readouterr().err
    assert not (tmp_path / "x.yaml").exists()
