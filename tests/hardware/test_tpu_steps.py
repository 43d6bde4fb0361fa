"""Published MaxText steps on TPU slices: the median error of dense models. Mixture-of-experts rows are not among them.

``custom`` and offloading recomputation policies are read as full ones, ``minimal`` as selective; per-device batches are
those of the whole tensor-parallel group. Each generation's one efficiency was derived from these rows.
"""

import csv
from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from simpar.hardware.torus import usual_shape
from simpar.simulation import simulate
from simpar.validation.jobs import describe
from simpar.validation.runs import read_runs

TABLE = Path(__file__).resolve().parents[3] / "shared" / "data" / "runs" / "tpu.csv"
FLAT = {"tpu-v5e", "tpu-v6e"}  # 2D tori of at most 256 chips
KNOWN = {*FLAT, "tpu-v4", "tpu-v5p"}


def job(row: dict[str, str]) -> dict[str, object]:
    device, chips, tp = row["gpu"], int(row["num_gpus"]), int(row["tp"] or 1)
    slices = max(1, chips // 256) if device == "tpu-v5e" else int(row["slices"] or 1)
    chips //= slices
    shape = list(usual_shape(chips, 2, 16) if device in FLAT else usual_shape(chips, 3, 4))
    if tp in shape:  # as JAX assigns devices to a mesh: a logical axis on a physical one of its length
        shape.remove(tp)
        shape.append(tp)
    replicas = chips * slices // tp
    sizes = {key: int(row[key]) for key in ("layers", "hidden", "heads", "head_dim", "ffn_hidden", "vocab")}
    plan = {
        "tp": tp,
        "zero": 3,
        "micro_batch": int(row["global_batch"]) // replicas,
        "global_batch": int(row["global_batch"]),
        "seq_len": int(row["seq_len"]),
        "recompute": "selective" if row["recompute"] == "minimal" else "full",
        "sequence_parallel": tp > 1,
        "launch_s": 0.0,
        "attention": "flash2",
    }
    if slices > 1:
        plan["dp_shard"] = chips // tp
    spec = "x".join(map(str, ([slices] if slices > 1 else []) + shape))
    model = {
        "name": row["model"],
        **sizes,
        "kv_heads": int(row["kv_heads"] or row["heads"]),
        "gated_mlp": row["gated_mlp"] == "true",
        "tied_embeddings": row["tied_embeddings"] == "true",
    }
    return {"model": model, "cluster": f"{device}:{spec}", "plan": plan}


def test_dense_steps_are_met_within_a_fifth():
    if not TABLE.exists():
        pytest.skip(f"the published steps are not at {TABLE.name}'s usual place")
    errors: defaultdict[str, list[float]] = defaultdict(list)
    with TABLE.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["gpu"] in KNOWN and row["layers"] and not row["experts"]]
    for row in rows:
        predicted = simulate(job(row), allow_oom=True).step_time_s
        errors[row["gpu"]].append(abs(predicted / float(row["step_time_s"]) - 1))
    assert len(rows) == 38
    assert median(error for found in errors.values() for error in found) < 0.1
    assert all(median(found) < 0.2 for found in errors.values())


def test_dense_steps_of_a_generation_that_brought_no_efficiency_are_met_too():
    if not TABLE.exists():
        pytest.skip(f"the published steps are not at {TABLE.name}'s usual place")
    runs = [run for run in read_runs(TABLE) if run.gpu == "tpu-v7x" and run.layers and not run.experts]
    errors = [abs(simulate(describe(run).job, allow_oom=True).step_time_s / run.step_time_s - 1) for run in runs]
    assert len(runs) == 8
    assert max(errors) < 0.1
