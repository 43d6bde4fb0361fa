"""The benchmarks run; how fast or how accurate something is, is not asked here."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import simpar
from simpar.model.work import MemoryBound
from simpar.program.ir import Alloc, Block, Launch, Operation, Program, RankProgram, Run

ROOT = Path(__file__).parents[1]

# GPT 22B on 8 A100, full recomputation: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer
# Models, Table 5
ROW = {
    "id": "first",
    "source": "korthikanti2022",
    "framework": "megatron-lm-2021",
    "model": "GPT-22B",
    "gpu": "a100-sxm-80gb",
    "gpus_per_node": "8",
    "num_gpus": "8",
    "fabric": "infiniband",
    "nic_gbps_per_gpu": "200",
    "layers": "48",
    "hidden": "6144",
    "heads": "64",
    "kv_heads": "64",
    "head_dim": "96",
    "ffn_hidden": "24576",
    "gated_mlp": "false",
    "vocab": "51200",
    "seq_len": "2048",
    "tied_embeddings": "true",
    "experts": "",
    "tp": "8",
    "pp": "1",
    "cp": "1",
    "dp": "1",
    "vpp": "1",
    "zero": "0",
    "sequence_parallel": "false",
    "micro_batch": "4",
    "global_batch": "4",
    "recompute": "full",
    "recompute_fraction": "",
    "attention": "unfused",
    "step_time_s": "1.42",
    "flag": "",
}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "benchmarks" / f"{name}.py"), *arguments],
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )


def table(path: Path, *changes: dict[str, str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes)
    return path


@pytest.mark.parametrize("name", ["speed", "accuracy"])
def test_help(name: str) -> None:
    ran = run(name, "--help")
    assert ran.returncode == 0
    assert "--json" in ran.stdout
    assert "--child" not in ran.stdout


def test_speed_measures_every_part_with_a_tiny_job() -> None:
    ran = run("speed", "--quick", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["quick"] is True
    assert {figure["part"] for figure in found["figures"]} == set("abcdef")
    heavy = [figure for figure in found["figures"] if figure["unit"] == "packages"]
    assert [(figure["what"], figure["value"]) for figure in heavy] == [("heavy packages loaded by both (none)", 0)]
    assert all(figure["value"] > 0 for figure in found["figures"] if figure not in heavy)


def test_speed_measures_only_what_is_asked_for() -> None:
    ran = run("speed", "--quick", "--only", "c")
    assert ran.returncode == 0, ran.stderr
    machine, empty, *lines = ran.stdout.splitlines()
    assert "cores" in machine
    assert "tiny job" in machine
    assert not empty
    assert [line[0] for line in lines] == ["c", "c", "c"]


def test_instructions_of_opened_runs_count_one_by_one() -> None:
    launch = Launch(MemoryBound(1024, "elementwise"), "add")
    operation = Operation("two layers", "forward", (Block("layer", (launch, launch)),) * 2, (0, 1))
    instructions = (Run(operation), Run(operation, opened=True), Alloc("activations", 1))
    program = Program(ranks=(RankProgram(0, 0, 1, (), instructions),) * 3, launch_s=0.0)
    assert load("speed").instructions(program) == 3 * (1 + 4 + 1)


def test_accuracy_predicts_what_the_same_job_written_by_hand_takes(tmp_path: Path) -> None:
    accuracy = load("accuracy")
    by_hand = simpar.simulate(
        simpar.Job(
            model="gpt3-22b",
            cluster="a100-sxm-80gb:8",
            plan=simpar.Plan(
                tp=8,
                micro_batch=4,
                seq_len=2048,
                recompute="full",
                attention="unfused",
                precision="fp16",
                grad_dtype="fp16",
                overlap=simpar.Overlap(grad_reduce=False, param_gather=False, p2p=False),
            ),
        )
    )
    (row,) = accuracy.read(table(tmp_path / "runs.csv", {}, {"source": "other"}), ["korthikanti2022"])
    prediction = accuracy.predict(row)
    assert prediction.predicted_s == by_hand.step_time_s
    assert prediction.error == pytest.approx(by_hand.step_time_s / 1.42 - 1)


def test_plan_of_a_row(tmp_path: Path) -> None:
    accuracy = load("accuracy")
    change = {"num_gpus": "64", "pp": "4", "tp": "8", "dp": "2", "vpp": "3", "recompute_fraction": "0.5"}
    (row,) = accuracy.read(table(tmp_path / "runs.csv", change), ["korthikanti2022"])
    plan, cluster = accuracy.plan(row), accuracy.cluster(row)
    assert (plan.schedule, plan.vpp, plan.recompute_layers) == ("interleaved", 3, 2)  # half of 48 / (4 · 3) layers
    assert (cluster.nodes, cluster.gpus_per_node, cluster.fabric.nic_gbps) == (8, 8, 200)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"zero": "3"}, "DeepSpeed ZeRO-3 of 2021"),
        ({"experts": "8"}, "mixture of experts"),
        ({"cp": "2"}, "context parallelism"),
        ({"framework": "nanotron"}, "framework nanotron is not described yet"),
        ({"flag": "polling"}, "flagged: polling"),
        ({"num_gpus": "12"}, "12 GPUs do not fill nodes of 8"),
        ({"num_gpus": "16", "fabric": "omni-path"}, "no fabric for omni-path with 200 Gb/s a GPU"),
        ({"dp": "3"}, "dp 3 × tp 8 × pp 1 = 24 ranks, but the cluster has 8 GPUs"),
    ],
)
def test_rows_that_no_job_expresses_say_why(change: dict[str, str], reason: str) -> None:
    predictions, skipped = load("accuracy").predict_all([{**ROW, **change}])
    assert predictions == []
    assert reason in skipped["first"]


def test_summary_of_errors() -> None:
    accuracy = load("accuracy")
    made = [
        accuracy.Prediction(str(i), "paper", "m", 8, "tp8", 1.0, 1.0 + error, error, True)
        for i, error in enumerate([-0.10, 0.01, 0.02, -0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09])
    ]
    (summary,) = accuracy.summarise(made)
    assert summary.rows == 10
    assert summary.median == pytest.approx(0.055)
    assert summary.p90 == pytest.approx(0.09)
    assert summary.bias == pytest.approx(0.029)


def test_accuracy_as_a_command(tmp_path: Path) -> None:
    runs = table(tmp_path / "runs.csv", {}, {"id": "second", "zero": "3"}, {"id": "third", "source": "sc21_megatron"})
    ran = run("accuracy", str(runs), "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [(s["source"], s["rows"]) for s in found["sources"]] == [("korthikanti2022", 1), ("sc21_megatron", 1)]
    assert [row["id"] for row in found["rows"]] == ["first", "third"]
    assert list(found["skipped"]) == ["second"]
    ran = run("accuracy", str(runs), "--source", "korthikanti")
    assert ran.returncode == 1
    assert "no row of runs.csv has the source 'korthikanti'; it has korthikanti2022, sc21_megatron" in ran.stderr
