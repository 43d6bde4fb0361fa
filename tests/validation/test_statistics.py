"""Error statistics against second derivations."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from simpar.cli import main
from simpar.errors import RunsError
from simpar.validation.predict import Prediction, predict, predict_all
from simpar.validation.report import ValidationReport
from simpar.validation.runs import Run, read_runs
from simpar.validation.statistics import REGIMES, by_group, scaled_errors, spearman, summarise
from simpar.view.accuracy import accuracy

FIELDS = {
    "framework": "megatron-core",
    "gpu": "h100-sxm",
    "num_gpus": 8,
    "layers": 2,
    "hidden": 512,
    "heads": 8,
    "vocab": 1000,
    "seq_len": 512,
    "global_batch": 8,
    "ffn_hidden": 1024,
}


def made(number, measured, predicted, **fields):
    run = Run(**{**FIELDS, "id": f"r{number}", "step_time_s": measured, **fields})
    return Prediction(run, predicted_s=predicted, interval_s=(predicted * 0.9, predicted * 1.1))


def test_the_errors_of_a_group():
    found = summarise([made(0, 1.0, 1.1), made(1, 2.0, 1.8), made(2, 4.0, 5.2), Prediction(made(3, 1, 1).run)], "x")
    assert (found.n, found.refused) == (3, 1)
    assert found.median == pytest.approx(0.1)
    assert found.mean == pytest.approx((0.1 + 0.1 + 0.3) / 3)
    assert found.bias == pytest.approx(0.1)
    # predicted best is r0, which is measured best
    assert (found.regret, found.questions) == (1.0, 1)
    assert found.spearman == pytest.approx(1.0)
    # 1.0 lies in 0.99..1.21, 2.0 above 1.98, 4.0 below 4.68
    assert found.covered == pytest.approx(1 / 3)


def test_regret_is_what_the_predicted_best_costs_over_the_measured_best():
    rows = [made(0, 1.0, 3.0), made(1, 1.5, 2.0), made(2, 2.0, 4.0)]
    assert summarise(rows, "x").regret == pytest.approx(1.5)
    other = [made(3, 9.0, 1.0, global_batch=16)]
    assert summarise(rows + other, "x").questions == 1


def test_a_scale_factor_never_knows_the_row_that_it_is_applied_to():
    rows = [made(0, 1.0, 0.5), made(1, 2.0, 1.0), made(2, 4.0, 8.0), made(3, 1.0, 1.0, gpu="a100-sxm-80gb")]
    found = scaled_errors(rows)
    assert found["r0"] == pytest.approx(0.5 * np.median([2.0, 0.5]) / 1.0 - 1)
    assert found["r2"] == pytest.approx(2.0 * np.median([2.0, 2.0]) - 1)
    assert found["r3"] is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=12))
def test_rank_correlation_as_scipy_has_it(pairs):
    first, second = (np.array(column, float) for column in zip(*pairs, strict=True))
    if len(set(first)) > 1 and len(set(second)) > 1:
        assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)
    else:
        assert spearman(first, second) == 0.0


def test_groups_and_an_unknown_column():
    rows = [made(0, 1, 1), made(1, 1, 1, gpu="b200-sxm"), made(2, 1, 1)]
    assert {g.group: g.n for g in by_group(rows, ["gpu"])} == {"h100-sxm": 2, "b200-sxm": 1}
    with pytest.raises(RunsError, match="runs have no column 'gpuu' to group by; did you mean 'gpu'"):
        by_group(rows, ["gpuu"])


def table(tmp_path):
    header = ",".join([*FIELDS, "id", "step_time_s", "micro_batch", "flag", "peak_mem_gib"])
    base = ",".join(map(str, FIELDS.values()))
    rows = [f"{base},a,0.05,1,,1.5", f"{base},b,0.05,1,polling,", f"{base.replace('h100-sxm', 'h900')},c,0.05,1,,"]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_row_that_cannot_be_simulated_comes_back_with_its_reason(tmp_path):
    first, flagged, refused = predict_all(read_runs(table(tmp_path)), workers=1)
    assert first.predicted_s
    assert first.interval_s[0] < first.predicted_s < first.interval_s[1]
    assert first.memory_error is not None
    assert flagged.predicted_s == first.predicted_s
    assert refused.predicted_s is None
    assert "unknown device 'h900'" in refused.refusal


def test_processes_give_what_one_gives(tmp_path):
    runs = read_runs(table(tmp_path))
    done = []
    assert predict_all(runs, workers=2, progress=done.append) == [predict(run) for run in runs]
    assert done == [1, 2, 3]


def test_the_command_prints_one_json_object_and_writes_a_page(tmp_path, capsys):
    page = tmp_path / "accuracy.html"
    assert main(["validate", str(table(tmp_path)), "--json", "--workers", "1", "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in found["rows"]] == ["a", "b", "c"]
    assert found["overall"]["n"] == 1
    assert found["flagged"]["n"] == 1
    assert found["overall"]["refused"] == 1
    needed = {"group", "n", "median", "mean", "p90", "bias", "scaled_median", "scaled_p90", "spearman", "regret"}
    assert needed | {"memory_median"} <= set(found["groups"][0])
    assert {"id", "measured_s", "predicted_s", "interval_s", "error"} <= set(found["rows"][0])
    assert page.stat().st_size > 100_000


def test_the_command_shows_groups_worst_rows_and_refusals(tmp_path, capsys):
    assert main(["validate", str(table(tmp_path)), "--workers", "1", "--by", "gpu"]) == 0
    shown = capsys.readouterr().out
    for text in (
        "Error of the predicted step time",
        "flagged",
        "Furthest off",
        "Not simulated",
        "unknown device 'h900'",
    ):
        assert text in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by", "colour"], "runs have no column 'colour' to group by"),
        (["--scale", "all"], "--scale: 'all' is not known; give leave-one-out or none"),
        (["--html", "nowhere/x.html"], "there is no folder 'nowhere'; create it first"),
    ],
)
def test_a_wrong_option_is_told_before_the_work(tmp_path, capsys, words, message):
    assert main(["validate", str(table(tmp_path)), *words]) == 2
    assert message in capsys.readouterr().err


def test_the_page_has_every_row_and_every_regime():
    report = ValidationReport((made(0, 1.0, 1.1), made(1, 2.0, 1.8, flag="odd")))
    figure = accuracy(report)
    dots = [trace for trace in figure.data if trace.type == "scatter" and trace.mode == "markers"]
    assert sum(len(trace.x) for trace in dots) == 2
    assert any("flagged" in trace.name for trace in dots)
    assert sum("error by" in (a.text or "") for a in figure.layout.annotations) == len(REGIMES)


def test_no_two_groups_look_alike_however_many_there_are():
    rows = tuple(made(n, 1.0 + n, 1.1 + n, source=f"table {n}") for n in range(60))
    drawn = accuracy(ValidationReport(rows)).data
    dots = [trace for trace in drawn if trace.type == "scatter" and trace.mode == "markers"]
    assert len(dots) == 60
    assert len({(trace.marker.color, trace.marker.symbol) for trace in dots}) == 60
