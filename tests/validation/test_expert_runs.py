"""Measured runs of models with experts: what their columns become, and how far predictions lie from them."""

from pathlib import Path

import pytest

from simpar import simulate
from simpar.validation.jobs import describe
from simpar.validation.predict import predict
from simpar.validation.runs import Run, read_runs
from simpar.validation.statistics import summarise

RUNS = Path(__file__).parents[2].parent / "shared" / "data" / "runs" / "runs.csv"
FIELDS = {
    "id": "a",
    "framework": "megatron-core",
    "gpu": "h100-sxm",
    "num_gpus": 16,
    "layers": 6,
    "hidden": 1024,
    "heads": 8,
    "ffn_hidden": 4096,
    "vocab": 32000,
    "seq_len": 2048,
    "dp": 16,
    "step_time_s": 1.0,
}
EXPERTS = {"experts": 8, "top_k": 2, "moe_ffn_hidden": 2048, "shared_expert_ffn": 512, "ep": 8, "etp": 1}


def test_columns_of_experts_become_a_model_and_a_plan():
    job, _ = describe(Run(**FIELDS, **EXPERTS))
    moe = job.model.moe
    assert (moe.experts, moe.top_k, moe.ffn_hidden, moe.shared_ffn_hidden) == (8, 2, 2048, 512)
    assert (job.plan.ep, job.plan.etp) == (8, 1)


@pytest.mark.parametrize(
    ("fraction", "layers"), [(None, 6 * [True]), (0.5, 3 * [False, True]), (5 / 6, [False, *(5 * [True])])], ids=str
)
def test_a_fraction_of_layers_has_experts(fraction, layers):
    moe = describe(Run(**FIELDS, **EXPERTS, moe_layer_fraction=fraction)).job.model.moe
    assert [moe.has_experts(layer) for layer in range(6)] == layers


def test_a_dense_run_has_none():
    job, _ = describe(Run(**FIELDS))
    assert (job.model.moe, job.plan.ep, job.plan.etp) == (None, 1, None)


def test_published_runs_of_experts():
    """Grok-1 in its small proxies and the smallest Grok-1 and Llama 4 Maverick jobs; the others take minutes."""
    if not RUNS.exists():
        pytest.skip("runs.csv does not lie in shared/data/runs beside this checkout")
    runs = [run for run in read_runs(RUNS) if run.experts and not run.flag]
    small = [run for run in runs if run.num_gpus <= (128 if run.gpu == "gb200" else 64)]
    error = summarise([predict(run) for run in small], "experts")
    assert error.refused == 0
    assert error.n >= 20
    assert error.median < 0.20
    assert error.scaled_median < 0.10


def test_deepseek_v3_as_it_was_trained():
    """180 thousand H800 hours per trillion tokens on 2,048 of them, fp8 and DualPipe (DeepSeek-V3 report, table 1).

    What it keeps for backward is less than here (fp8, recomputed norms and up projections), so memory is not judged.
    """
    plan = {
        "pp": 16,
        "ep": 64,
        "zero": 1,
        "schedule": "dualpipe",
        "precision": "fp8",
        "seq_len": 4096,
        "global_batch": 15360,
    }
    found = simulate({"model": "deepseek-v3", "cluster": "h800-sxm:256x8", "plan": plan}, allow_oom=True)
    measured_s = 15360 * 4096 / 1e12 * 180e3 * 3600 / 2048
    assert found.step_time_s == pytest.approx(measured_s, rel=0.20)
