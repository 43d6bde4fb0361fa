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


@pytest.mark.parametrize("name", ["speed", "ablation"])
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


def test_ablation_predicts_rows_with_each_mechanism_switched_off(tmp_path: Path) -> None:
    ran = run("ablation", str(table(tmp_path / "runs.csv", {})), "--json", "--workers", "1")
    assert ran.returncode == 0, ran.stderr
    variants = {v["variant"]: v["medians"]["korthikanti2022"] for v in json.loads(ran.stdout)["variants"]}
    assert variants["no traffic of small operations"] != variants["everything"]
    ran = run("ablation", str(tmp_path / "none.csv"))
    assert ran.returncode == 1
    assert "cannot be read" in ran.stderr
