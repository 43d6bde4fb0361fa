"""``simpar goodput`` and job files with faults, as a user sees them."""

import json
from pathlib import Path

import pytest

from simpar.cli.app import main

JOB = "model: gpt2\ncluster: h100-sxm:2x8\nplan: {seq_len: 512}\n"
FLAGS = ("--checkpoint-s", "30", "--restart-s", "300", "--days", "20", "--runs", "2")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB, encoding="utf-8")
    return path


def test_tables(job: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["goodput", str(job), "--mtbf-gpu-h", "800", *FLAGS]) == 0
    printed = capsys.readouterr().out
    assert "a failure every" in printed
    assert "50 h" in printed  # 800 h over 16 GPUs
    for row in ("best of those simulated", "Daly", "Young", "done again", "tokens in 20 days"):
        assert row in printed


def test_json(job: Path, capsys: pytest.CaptureFixture[str]):
    words = ["goodput", str(job), "--mtbf-node-h", "100", *FLAGS, "--interval-s", "1000", "--json", "--seed", "3"]
    assert main(words) == 0
    first = capsys.readouterr().out
    found = json.loads(first)
    assert found["mtbf_s"] == 50 * 3600
    assert found["interval_s"] == pytest.approx(1000, abs=found["step_time_s"])
    assert found["tokens"] == pytest.approx(found["steps"] * 16 * 512)
    assert found["steps"] * found["step_time_s"] == pytest.approx(found["goodput"] * 20 * 86400)
    assert len(found["runs"]) == 2
    main(words)
    assert capsys.readouterr().out == first


def test_page(job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("plotly", reason="pages need plotly")
    page = tmp_path / "goodput.html"
    assert main(["goodput", str(job), "--mtbf-gpu-h", "800", *FLAGS, "--html", str(page)]) == 0
    assert f"wrote {page}" in capsys.readouterr().err
    assert "simpar goodput" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "how often something fails is not given; give --mtbf-gpu-h or --mtbf-node-h"),
        (("--mtbf-gpu-h", "0"), "mtbf_gpu_h: 0.0 should be greater than 0"),
        (("--mtbf-gpu-h", "800", "--html", "no/such/page.html"), "cannot write 'no/such/page.html'"),
        (("--mtbf-gpu-h", "800", "--interval-s", "-1"), "interval_s=-1 must be positive"),
    ],
)
def test_mistakes(job: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["goodput", str(job), *FLAGS, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_job_file_with_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "faults: {slow_gpus: {3: 0.8}, slow_links: {nic5: 0.5}}\n", encoding="utf-8")
    assert main(["simulate", str(path), "--json"]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert "GPU of rank 3 at 80%, link nic5> at 0.5 of its rate, link nic5< at 0.5" in str(slow["warnings"])
    path.write_text(JOB, encoding="utf-8")
    assert main(["simulate", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] < slow["step_time_s"]


def test_faults_can_be_swept_and_set(job: Path, capsys: pytest.CaptureFixture[str]):
    words = ["sweep", str(job), "--vary", "faults.jitter.spread=0,0.2", "--set", "faults.seed=4", "--json"]
    assert main([*words, "--workers", "1"]) == 0
    quiet, noisy = json.loads(capsys.readouterr().out)
    assert quiet["step_time_s"] < noisy["step_time_s"]


def test_a_mistake_in_faults_names_file_and_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "faults: {slow_gpus: {3: 8}}\n", encoding="utf-8")
    assert main(["simulate", str(path)]) == 2
    assert f"{path}: faults.slow_gpus.3: 8" in capsys.readouterr().err


def test_a_search_knows_no_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "job.yaml"
    path.write_text(JOB + "faults: {slow_gpus: {3: 0.8}}\n", encoding="utf-8")
    assert main(["search", str(path), "--global-batch", "64"]) == 2
    assert "faults: a search compares plans where nothing is slow" in capsys.readouterr().err
