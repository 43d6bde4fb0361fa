"""Sweeps: which values, where they go, and rows whatever happens."""

import json
from pathlib import Path

import pytest

from simpar import Job, simulate, sweep
from simpar.errors import JobError
from simpar.search.records import write_records
from simpar.search.vary import changed, locate, parse_vary

JOB = {"model": "gpt2", "cluster": "h100-sxm:2x4", "plan": {"zero": 1, "seq_len": 512}}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("plan.tp=1,2,4,8", [1, 2, 4, 8]),
        ("cluster.nic_gbps=200..800", [200, 400, 800]),
        ("cluster.nic_gbps=200..900", [200, 400, 800]),
        ("plan.pp=1..8:2", [1, 3, 5, 7]),
        ("plan.tp=1,4..16", [1, 4, 8, 16]),
        ("cluster=h100-sxm:8,b200-sxm:8", ["h100-sxm:8", "b200-sxm:8"]),
        ("plan.layer_split=[6, 6],[8, 4]", [[6, 6], [8, 4]]),
        ("plan.sequence_parallel=true,false", [True, False]),
    ],
)
def test_values_are_written_as_lists_and_ranges(text, values):
    assert parse_vary(text) == (text.partition("=")[0], values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan.tp", "is not a field and its values"),
        ("plan.tp=", "is not a field and its values"),
        ("plan.tp=8..1", "begins above its end; write it as 1..8"),
        ("plan.tp=a..b", "is not a range"),
        ("plan.tp=0..8", "is not a range"),
        ("plan.tp=1..8:0", "is not a range"),
        ("plan.tp=1..1000000:1", "is more than 100,000 values"),
        ("plan.tp='", "is not a value"),
    ],
)
def test_what_is_no_value_is_said(text, message):
    with pytest.raises(JobError, match=message):
        parse_vary(text)


def test_a_field_of_a_part_is_found_there():
    job = Job.model_validate(JOB)
    assert locate(job, "cluster.nic_gbps") == ("cluster", "fabric", "nic_gbps")
    assert locate(job, "cluster.fabric.nic_gbps") == ("cluster", "fabric", "nic_gbps")
    assert locate(job, "model") == ("model",)
    for path, message in (
        ("tp", "did you mean 'plan.tp'"),
        ("clutser.nodes", "does not begin with a section"),
        ("plan.tpp", "there is no field 'tpp'; did you mean"),
        ("cluster.smoothness", "several parts have 'smoothness'; write cluster"),
        ("plan.tp.x", "plan.tp has no fields"),
    ):
        with pytest.raises(JobError, match=message):
            locate(job, path)


def test_values_of_one_description_change_together():
    # each alone would break a rule: vpp needs the schedule, the schedule needs pp
    job = changed(
        Job.model_validate(JOB), [(("plan", "vpp"), 2), (("plan", "schedule"), "interleaved"), (("plan", "pp"), 2)]
    )
    assert (job.plan.pp, job.plan.vpp, job.plan.zero) == (2, 2, 1)


def test_rows_are_what_simulate_says_and_a_broken_rule_is_a_row():
    found = sweep(JOB, {"plan.tp": [1, 2, 3], "cluster.nic_gbps": [200, 400]}, workers=1)
    assert [(row["plan.tp"], row["cluster.nic_gbps"]) for row in found.rows] == [
        (tp, gbps) for tp in (1, 2, 3) for gbps in (200, 400)
    ]
    result = simulate(changed(Job.model_validate(JOB), [(("plan", "tp"), 2), (("cluster", "fabric", "nic_gbps"), 400)]))
    row = found.rows[3]
    assert (row["step_time_s"], row["memory_bytes"], row["mfu"]) == (
        result.step_time_s,
        result.peak_memory_bytes,
        result.mfu,
    )
    assert row["low_s"] < row["step_time_s"] < row["high_s"]
    assert all("tp 3" in row["error"] and "step_time_s" not in row for row in found.rows[4:])


def test_whole_sections_are_varied_too():
    found = sweep(JOB, {"model": ["gpt2", "gpt2-medium", "gpt22"], "cluster": ["h100-sxm:8"]}, workers=1)
    assert found.rows[0]["step_time_s"] < found.rows[1]["step_time_s"]
    assert "unknown model 'gpt22'" in found.rows[2]["error"]


def test_what_does_not_fit_is_marked_or_refused():
    job = {"model": "llama3-70b", "cluster": "h100-sxm:8"}
    assert sweep(job, {"plan.zero": [0]}, workers=1).rows[0]["fits"] is False
    assert "needs" in sweep(job, {"plan.zero": [0]}, workers=1, allow_oom=False).rows[0]["error"]


def test_a_sweep_goes_on_where_it_was(tmp_path: Path):
    output = tmp_path / "rows.jsonl"
    vary = {"plan.tp": [1, 2, 4], "plan.micro_batch": [1, 2]}
    whole = sweep(JOB, vary, workers=2, output=output)
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:4]))
    told: list[tuple[int, int]] = []
    again = sweep(JOB, vary, workers=1, output=output, resume=True, progress=lambda *far: told.append(far))
    assert again == whole
    assert told == [(3, 6), (4, 6), (5, 6), (6, 6)]


def test_rows_become_files(tmp_path: Path):
    found = sweep(JOB, {"plan.tp": [1, 3], "plan.attention": ["auto"]}, workers=1)
    found.write(tmp_path / "rows.csv")
    head, first, second = (tmp_path / "rows.csv").read_text().splitlines()
    assert head.startswith("plan.tp,plan.attention,step_time_s,")
    assert first.startswith("1,auto,0.")
    assert "tp 3" in second
    found.write(tmp_path / "rows.jsonl")
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == list(found.rows)
    assert len({tuple(record) for record in found.records()}) == 1
    with pytest.raises(JobError, match=r"'.xlsx' is no format of a table"):
        found.write(tmp_path / "rows.xlsx")


def test_rows_become_pandas_and_parquet(tmp_path: Path):
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    found = sweep(JOB, {"plan.tp": [1, 3]}, workers=1)
    frame = found.to_dataframe()
    assert frame["step_time_s"].notna().tolist() == [True, False]
    found.write(tmp_path / "rows.parquet")
    assert pd.read_parquet(tmp_path / "rows.parquet")["plan.tp"].tolist() == [1, 3]
    write_records([{"a": 1}, {"a": "auto"}], tmp_path / "mixed.parquet")
    assert pd.read_parquet(tmp_path / "mixed.parquet")["a"].tolist() == ["1", "auto"]


def test_nothing_to_vary_is_no_sweep():
    with pytest.raises(JobError, match="are no sweep"):
        sweep(JOB, {}, workers=1)
    with pytest.raises(JobError, match=r"plan.tp: is given no value"):
        sweep(JOB, {"plan.tp": []}, workers=1)
