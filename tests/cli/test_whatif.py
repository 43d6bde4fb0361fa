"""`simpar explain`, `simpar compare` and `simpar simulate --tokens`."""

import json
from pathlib import Path
from typing import Any

import pytest

from simpar.simulation import simulate
from simpar.whatif.comparison import compare
from simpar.whatif.explanation import explain

SMALL = "model: gpt2\ncluster: h100-sxm:1x8\nplan:\n  zero: 1\n  micro_batch: 4\n"
JOB = {"model": "gpt2", "cluster": "h100-sxm:1x8", "plan": {"zero": 1, "micro_batch": 4}}


def test_explain_prints_words_and_tables(said: Any) -> None:
    code, out, err = said("explain", "job.yaml")
    assert (code, err) == (0, "")
    for sentence in explain(JOB).words:
        assert sentence in out
    assert {"critical path", "if it cost no time", "parameter, 1% better"} <= {
        line.split("  ")[0].strip() for line in out.splitlines()
    }


def test_explain_as_json_is_the_explanation(said: Any) -> None:
    code, out, _ = said("explain", "job.yaml", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(explain(JOB).to_dict()))


def test_explain_takes_changes(said: Any) -> None:
    out = said("explain", "job.yaml", "--set", "plan.launch_s=0.001", "--json").out
    assert json.loads(out)["headroom"][0]["resource"] == "host launches"


def test_both_write_a_page(said: Any) -> None:
    assert said("explain", "job.yaml", "--html", "e.html").code == 0
    code, _, err = said("compare", "job.yaml", "job.yaml", "--set-b", "plan.zero=0", "--html", "c.html")
    assert (code, err) == (0, "wrote c.html\n")
    for name in ("e.html", "c.html"):
        assert Path(name).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_compare_writes_both_timelines_on_one_axis(said: Any) -> None:
    code, _, err = said("compare", "job.yaml", "job.yaml", "--set-b", "plan.zero=0", "--timeline", "t.html")
    assert (code, err) == (0, "wrote t.html\n")
    page = Path("t.html").read_text(encoding="utf-8")
    assert '"A step ' in page
    assert '"B step ' in page
    code, _, err = said("compare", "job.yaml", "job.yaml", "--html", "t.html", "--timeline", "t.html")
    assert code == 2
    assert "it is the file of --html already" in err


def test_compare_as_json_is_the_comparison(said: Any) -> None:
    out = said("compare", "job.yaml", "job.yaml", "--set-b", "plan.zero=0", "--json").out
    expected = compare(JOB, {**JOB, "plan": {**JOB["plan"], "zero": 0}})  # type: ignore[dict-item]
    assert json.loads(out) == json.loads(json.dumps(expected.to_dict()))


def test_compare_prints_the_difference_by_part(said: Any) -> None:
    code, out, _ = said("compare", "job.yaml", "job.yaml", "--set", "plan.seq_len=512", "--set-a", "plan.micro_batch=2")
    assert code == 0
    assert "A: gpt2 on 8 h100-sxm" in out
    assert "B − A" in out
    assert "A is the faster one with a probability of" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("explain", "absent.yaml"), "absent.yaml: there is no such file; give the path of a job file in YAML"),
        (("explain", "job.yaml", "--html", "job.yaml"), "it is the job file already; choose another name"),
        (("compare", "job.yaml", "job.yaml", "--set-a", "plan.tp"), "is not a field and its value"),
        (("simulate", "job.yaml", "--tokens", "-5"), "tokens=-5 must be positive"),
    ],
)
def test_mistakes_are_one_sentence(said: Any, words: tuple[str, ...], expected: str) -> None:
    code, out, err = said(*words)
    assert (code, out) == (2, "")
    assert expected in err
    assert "Traceback" not in err


def test_tokens_add_the_run_to_report_and_json(said: Any) -> None:
    priced = ("--set", "cluster.price_per_gpu_hour=2.5")
    out = said("simulate", "job.yaml", "--tokens", "1e12", *priced).out
    assert "money and energy" in out
    plain = json.loads(said("simulate", "job.yaml", "--tokens", "1e12", "--json", *priced).out)["cost"]
    run = plain["run"]
    assert run["price"] == pytest.approx(2.5 * run["gpu_hours"])
    assert run["time_s"] == pytest.approx(1e12 / simulate(JOB).tokens_per_s)
    assert f"{run['gpu_hours']:,.0f} GPU-hours" in out
    assert f"{run['price']:,.0f}" in out


def test_without_price_and_tokens_the_report_is_silent_on_them(said: Any) -> None:
    assert "money and energy" not in said("simulate", "job.yaml").out
