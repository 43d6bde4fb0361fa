"""A prediction beside a profile: times that are known, and a real profile of the very job."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibrate.cli import main
from calibrate.compare import compare, kind_seconds
from calibrate.importers import read_kineto_trace
from simpar import simulate

torch = pytest.importorskip("torch")

JOB = "model: mlp:64-128-8\ncluster: cpu:1x1\nplan: {micro_batch: 32, precision: fp32, optimizer: sgd}\n"


def kernel(name: str, start: float, length: float, stream: int = 7, **args: Any) -> dict[str, Any]:
    args |= {"device": 0, "stream": stream}
    return {"ph": "X", "name": name, "cat": "kernel", "ts": start, "dur": length, "pid": 0, "tid": stream, "args": args}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """150 µs of products and 40 µs of elementwise kernels beside 400 µs of all-reduce."""
    events = [
        kernel("void cutlass::Kernel2<x>(P)", 0, 100),
        kernel("void cutlass::Kernel2<x>(P)", 100, 50),
        kernel("void vectorized_elementwise_kernel<4>(int)", 200, 40),
        kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 100, 400, stream=20),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events, "distributedInfo": {"rank": 5}}))
    return path


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_kinds_of_a_profile_are_what_was_recorded(profile: Path) -> None:
    found = kind_seconds(read_kineto_trace(profile), 5)
    assert found == pytest.approx({"products": 150e-6, "memory-bound": 40e-6, "all_reduce": 400e-6})


def test_kinds_of_a_prediction_add_up_to_what_its_rank_is_busy() -> None:
    result = simulate({"model": "gpt2", "cluster": "h100-sxm:1x8", "plan": {"tp": 2, "zero": 1, "seq_len": 512}})
    found = kind_seconds(result.trace, 0)
    assert {"products", "attention", "memory-bound", "optimizer", "all_gather", "reduce_scatter"} <= found.keys()
    rank = next(time for time in result.ranks if time.rank == 0)
    computed = sum(rank.compute_s.values()) + rank.optimizer_s
    kernels = sum(found[name] for name in ("products", "attention", "memory-bound", "optimizer"))
    # what waits for launches is part of an operation, and what communicates slows kernels
    assert kernels == pytest.approx(computed, rel=0.05)


def test_the_command_says_the_same_in_words_and_in_json(
    job: Path, profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["compare", str(job), str(profile), "--json", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured_s"] == pytest.approx(500e-6)
    assert found["error"] == pytest.approx(found["predicted_s"] / 500e-6 - 1)
    assert found["inside"] == (found["low_s"] <= 500e-6 <= found["high_s"])
    assert found["kinds"]["all_reduce"] == {"predicted_s": 0.0, "measured_s": pytest.approx(400e-6)}
    assert found["kinds"]["products"]["measured_s"] == pytest.approx(150e-6)
    assert "plotly" in page.read_text(encoding="utf-8").lower()
    assert main(["compare", str(job), str(profile)]) == 0
    said = capsys.readouterr().out
    assert "only measured" in said
    assert f"error {found['error']:+.0%}" in said


def test_a_real_profile_of_the_job_has_the_kinds_that_were_predicted(job: Path, tmp_path: Path) -> None:
    from simpar.cli.jobfile import load_job  # noqa: PLC0415

    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    update = torch.optim.SGD(layers.parameters(), 0.01)
    inputs, targets = torch.randn(32, 64), torch.randn(32, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiled:
        torch.nn.functional.mse_loss(layers(inputs), targets).backward()
        update.step()
    profiled.export_chrome_trace(str(tmp_path / "real.json"))
    found = compare(simulate(load_job(job)), read_kineto_trace(tmp_path / "real.json"))
    both = {name for name, times in found.kinds.items() if all(times)}
    assert {"products", "memory-bound", "optimizer"} <= both
    assert sum(theirs for _, theirs in found.kinds.values()) <= found.measured.step_s
    assert np.isfinite(found.error)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.yaml", "trace.json"], "no.yaml"),
        (["job.yaml", "no.json"], "no.json"),
        (["job.yaml", "trace.json", "--step", "3"], "step 3"),
        (["job.yaml", "trace.json", "--html", "no/page.html"], "--html: cannot write 'no/page.html'"),
    ],
)
@pytest.mark.usefixtures("job", "profile")
def test_mistakes_are_one_sentence_and_write_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"job.yaml", "trace.json"}
