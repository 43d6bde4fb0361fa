"""``simpar search`` and ``simpar sweep`` as a user runs them."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from simpar import simulate

JOB = "model: gpt2\ncluster: h100-sxm:1x4\nplan:\n  tp: 4\n  global_batch: 16\n  seq_len: 512\n"
FEW = ("--choose", "micro_batch=1", "--choose", "recompute=none", "--choose", "zero=0,1", "--choose", "vpp=1")


@pytest.fixture
def job_text() -> str:
    return JOB


def test_a_search_reports_counts_groups_and_front(said: Any) -> None:
    code, out, err = said("search", "job.yaml", *FEW, "--top", "3", "--workers", "1")
    assert (code, err) == (0, "")
    assert "gpt2 on 4 h100-sxm, 16 samples a step" in out
    assert "valid plans:" in out
    assert "3 plans that the errors of the model cannot tell apart" in out
    assert "Not beaten in time, memory" in out


def test_where_nothing_fits_it_says_what_was_not_searched(said: Any) -> None:
    few = ("--choose", "micro_batch=1", "--choose", "pp=1", "--choose", "cp=1", "--choose", "zero=3")
    words = ("search", "-m", "llama3-70b", "-c", "h100-sxm:1x8", "--global-batch", "8", "--seq-len", "4096", *few)
    code, out, err = said(*words, "--workers", "1")
    assert code == 1
    assert "do not fit, 0 cannot be among the best, 0 simulated" in out
    assert err.startswith("no plan fits; with what was not searched some would: --choose offload=none,optimizer (as ")
    assert said(*words, "--workers", "1", "--choose", "offload=none,optimizer", "--top", "1").code == 0
    code, out, _ = said(*words, "--workers", "1", "--json")
    assert (code, json.loads(out)["groups"]) == (1, [])


def test_set_overrides_flags(said: Any) -> None:
    words = ("search", "-m", "gpt2", "-c", "h100-sxm:1x4", "--global-batch", "16", "--seq-len", "512", *FEW)
    changed = ("--set", "plan.seq_len=256", "--set", "plan.global_batch=8", "--output", "plans.jsonl")
    assert said(*words, *changed, "--top", "1", "--workers", "1").code == 0
    asked = json.loads(Path("plans.jsonl").read_text(encoding="utf-8").splitlines()[0])["question"]["search"]["plan"]
    assert (asked["seq_len"], asked["global_batch"]) == (256, 8)


def test_its_best_is_that_of_the_job_with_other_degrees(said: Any) -> None:
    code, out, _ = said("search", "job.yaml", *FEW, "--json", "--workers", "1", "--top", "1")
    assert code == 0
    found = json.loads(out)
    best = found["groups"][0][0]
    plan = {name: best[name] for name in ("tp", "pp", "zero", "micro_batch", "sequence_parallel")}
    result = simulate(
        {"model": "gpt2", "cluster": "h100-sxm:1x4", "plan": {**plan, "global_batch": 16, "seq_len": 512}}
    )
    assert best["step_time_s"] == result.step_time_s
    assert best["tp"] != 4  # the file's degree was searched, not kept


def test_a_search_by_flags_streams_to_a_file_and_goes_on(said: Any) -> None:
    words = ("search", "-m", "gpt2", "-c", "h100-sxm:2", "--global-batch", "8", "--seq-len", "256", *FEW)
    out_file = ("--workers", "1", "-o", "found.jsonl")
    assert said(*words, *out_file, "--table", "found.csv").code == 0
    question, *records, end = map(json.loads, Path("found.jsonl").read_text().splitlines())
    assert "question" in question
    assert end["counts"]["simulated"] == len(records)
    assert len(Path("found.csv").read_text().splitlines()) == 1 + len(records)
    assert "exists already; resume it (--resume)" in said(*words, *out_file).err
    code, out, _ = said(*words, *out_file, "--resume")
    assert code == 0
    assert "of them before" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("search",), "give a job file, or --model and --cluster"),
        (("search", "-m", "gpt2", "-c", "h100-sxm:2"), "give --global-batch"),
        (("search", "job.yaml", "--choose", "tpp=1"), "'tpp' is not a field of a plan; did you mean 'tp'"),
        (("search", "job.yaml", "--choose", "tp"), "--choose 'tp': is not a field and its values"),
        (("search", "job.yaml", "--choose", "tp=two"), "tp: 'two' should be a whole number"),
        (
            ("search", "job.yaml", "--set", "plan.tp=2"),
            "--set 'plan.tp=2': tp is searched; restrict it by --choose tp=2",
        ),
        (("search", "job.yaml", "--set", "plan={zero: 1}"), "zero is searched; restrict it by --choose zero=1"),
        (("search", "job.yaml", "--set", "plan.dp=2"), "dp is searched; restrict it by --choose dp=2"),
        (("search", "job.yaml", "--resume"), "--resume: goes on with the file of --output"),
        (("search", "job.yaml", "--global-batch", "0"), "global_batch: 0 should be greater than or equal to 1"),
        (("search", "job.yaml", "--seq-len", "0"), "seq_len: 0 should be greater than or equal to 1"),
        (("search", "job.yaml", "--choose", "tp=1", "--choose", "plan.tp=2"), "--choose: 'tp' is given twice"),
        (("sweep", "job.yaml", "--vary", "plan.tp=1,2", "--vary", "plan.tp=4"), "--vary: 'plan.tp' is given twice"),
        (("sweep", "job.yaml"), "nothing is varied"),
        (("sweep", "job.yaml", "--vary", "plan.tpp=1"), "there is no field 'tpp'"),
        (("sweep", "job.yaml", "--vary", "plan.tp=1", "--resume"), "--resume: goes on with the file of --output"),
        (("sweep", "job.yaml", "--vary", "plan.tp=1", "--workers", "1", "--table", "a.xls"), "is no format of a table"),
        (
            ("sweep", "job.yaml", "--vary", "plan.tp=1", "--workers", "1", "--plot", "a.html", "--value", "speed"),
            "no row",
        ),
    ],
)
def test_a_mistake_is_one_line(said: Any, words: tuple[str, ...], message: str) -> None:
    code, _, err = said(*words)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["search job.yaml", "sweep job.yaml --vary plan.tp=1,2"])
@pytest.mark.parametrize("flag", ["--output", "--table", "--html"])
@pytest.mark.parametrize("name", ["no/a.csv", ".", "job.yaml"])
def test_outputs_are_checked_before_the_work(
    said: Any, monkeypatch: pytest.MonkeyPatch, command: str, flag: str, name: str
) -> None:
    for module, function in (("run", "search"), ("sweep", "sweep")):
        monkeypatch.setattr(import_module(f"simpar.search.{module}"), function, lambda *_, **__: pytest.fail("ran"))
    code, out, err = said(*command.split(), flag, name)
    assert (code, out) == (2, "")
    assert err.startswith(f"{flag}: cannot write '{name}': ")
    assert Path("job.yaml").read_text(encoding="utf-8") == JOB


def test_a_table_s_format_is_checked_before_the_work(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("simpar.search.run"), "search", lambda *_, **__: pytest.fail("ran"))
    assert "is no format of a table" in said("search", "job.yaml", "--table", "a.xls").err


def test_a_sweep_prints_a_row_for_each_combination(said: Any) -> None:
    code, out, err = said(
        "sweep", "job.yaml", "--vary", "plan.tp=1,2,3", "--vary", "plan.micro_batch=1..4", "--workers", "1"
    )
    assert (code, err) == (0, "")
    rows = [line for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert len(rows) == 9
    assert sum(row.endswith("error 1") for row in rows) == 3
    (reason,) = [line for line in out.splitlines() if line.startswith("error ")]  # once, below the table
    assert reason.startswith("error 1: ")
    assert "tp 3" in reason


def test_a_sweep_writes_tables_and_a_plot(said: Any) -> None:
    words = ("sweep", "job.yaml", "--vary", "plan.tp=1,2", "--vary", "plan.zero=0,1", "--workers", "1", "--json")
    code, out, err = said(*words, "--table", "rows.csv", "--plot", "rows.html")
    assert code == 0
    assert [row["plan.tp"] for row in json.loads(out)] == [1, 1, 2, 2]
    assert err.splitlines() == ["wrote rows.csv", "wrote rows.html"]
    assert len(Path("rows.csv").read_text().splitlines()) == 5
    assert Path("rows.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("command", ["search job.yaml --top 1", "sweep job.yaml --vary plan.micro_batch=1,2"])
def test_the_framework_has_a_flag(said: Any, command: str) -> None:
    few = FEW if command.startswith("search") else ()
    words = (*command.split(), *few, "--workers", "1", "--json")
    flag = said(*words, "--framework", "torchtitan")
    assert flag.code == 0
    assert flag == said(*words, "--set", "plan.framework=torchtitan")
    assert flag.out != said(*words).out
