"""Tables of measured runs: what is read, what is refused and how that is told."""

import pytest

from simpar.errors import RunsError
from simpar.job import read_model
from simpar.validation.jobs import describe
from simpar.validation.runs import read_runs

HEADER = (
    "id,source,framework,model,gpu,num_gpus,layers,hidden,heads,"
    "ffn_hidden,vocab,seq_len,tp,pp,dp,micro_batch,global_batch,step_time_s"
)
ROW = "a-1,mine,megatron-core,m,h100-sxm,8,4,1024,8,4096,32000,2048,2,1,4,1,8,0.5"


def table(tmp_path, *lines):
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_blank_is_what_the_source_does_not_say_and_other_columns_are_ignored(tmp_path):
    (run,) = read_runs(table(tmp_path, f"{HEADER},flag,mood", f"{ROW},,good"))
    assert (run.id, run.tp, run.step_time_s, run.flag, run.recompute) == ("a-1", 2, 0.5, "", None)
    job, assumptions = describe(run)
    assert (job.plan.tp, job.plan.dp, job.cluster.gpus) == (2, 4, 8)
    assert "the source does not say what is recomputed: taken as none" in assumptions


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["id,source"], "has no column 'framework'"),
        ([HEADER], "has a header but no row; add a run"),
        ([HEADER, ROW, ROW], "the id 'a-1' names two rows; give each row its own"),
        ([HEADER, f"{ROW},7"], ":2: has more cells than the header; quote cells that hold a comma"),
        ([HEADER, ROW.replace(",0.5", ",fast")], ":2: step_time_s: 'fast' should be a number"),
        ([HEADER, ROW.replace(",0.5", ",")], ":2: step_time_s: "),
        ([HEADER, ROW.replace(",0.5", ",-1")], ":2: step_time_s: '-1' should be greater than 0"),
        ([HEADER, ROW.replace(",2048,2,", ",2048,two,")], ":2: tp: 'two' should be a whole number"),
        ([HEADER, f'"{ROW}'], "is not CSV"),
    ],
)
def test_bad_tables_name_file_line_and_column(tmp_path, lines, message):
    with pytest.raises(RunsError) as caught:
        read_runs(table(tmp_path, *lines))
    assert "runs.csv" in str(caught.value)
    assert message in str(caught.value)


def test_a_missing_table_is_told(tmp_path):
    with pytest.raises(RunsError, match="cannot be read"):
        read_runs(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("fabric", "gbps", "gpu", "gpus", "base"),
    [
        ("efa", 400, "h100-sxm", 16, "AWS EFA of p5"),
        ("efa", 50, "a100-sxm-80gb", 16, "AWS EFA of p4de"),
        ("infiniband", 400, "h100-sxm", 16, "InfiniBand NDR"),
        ("infiniband", 100, "a100-sxm-80gb", 16, "InfiniBand HDR"),
        ("omni-path", 50, "a100-sxm-80gb", 16, "InfiniBand EDR"),
        ("roce", 200, "a100-sxm-80gb", 16, "RoCE"),
    ],
)
def test_fabrics_take_the_catalog_s_latencies_and_the_row_s_rate(  # noqa: PLR0917 - by name from pytest
    tmp_path, fabric, gbps, gpu, gpus, base
):
    row = ROW.replace("h100-sxm,8", f"{gpu},{gpus}").replace(",4,1,8,0.5", f",{gpus // 2},1,{gpus},0.5")
    (run,) = read_runs(table(tmp_path, f"{HEADER},fabric,nic_gbps_per_gpu", f"{row},{fabric},{gbps}"))
    found = describe(run).job.cluster.fabric
    assert found.about.startswith(base)
    assert (found.nic_gbps, found.nics_per_node) == (gbps, 8)


def test_partly_filled_nodes_and_unknown_software_are_assumed_and_said(tmp_path):
    row = ROW.replace("h100-sxm,8", "gb200,128").replace("megatron-core", "homegrown").replace(",4,1,8,", ",64,1,64,")
    (run,) = read_runs(table(tmp_path, f"{HEADER},gpus_per_node,fabric", f"{row},72,infiniband"))
    job, assumptions = describe(run)
    assert (job.cluster.nodes, job.cluster.gpus_per_node, job.plan.framework.name) == (2, 64, "megatron-core")
    said = "; ".join(assumptions)
    assert "128 GPUs do not fill nodes of 72: taken as nodes of 64" in said
    assert "framework 'homegrown' is not described: taken as megatron-core" in said
    assert "the source does not state the network's rate" in said


def test_tpu_slices_policies_and_precisions_by_other_names_are_read(tmp_path):
    header = HEADER.replace("tp,", "precision,recompute,slices,tp,")
    row = ROW.replace("h100-sxm,8", "tpu-v5p,64").replace(
        "2048,2,1,4,1,8", "2048,bf16 (fp32 weights),custom,1,4,1,64,0.5,64"
    )
    (run,) = read_runs(table(tmp_path, header, row.replace("megatron-core", "maxtext")))
    job, assumptions = describe(run)
    assert (job.cluster.gpus, job.cluster.node_link.kind, job.plan.framework.name) == (64, "torus", "maxtext")
    assert (job.plan.precision, job.plan.recompute, job.plan.micro_batch) == ("bf16", "full", 4)
    assert "recomputation policy 'custom' is not known: taken as full" in assumptions


def test_a_row_without_a_model_is_a_refusal_not_a_bad_table(tmp_path):
    (run,) = read_runs(table(tmp_path, HEADER, ROW.replace(",4,1024,8,4096,", ",,1024,8,4096,")))
    with pytest.raises(RunsError, match="the row does not state layers, without which there is no model; fill them in"):
        describe(run)


def test_a_row_without_sizes_has_those_of_the_preset_that_it_names(tmp_path):
    header = "id,framework,model,gpu,num_gpus,seq_len,tp,step_time_s"
    known, unknown, unsized = read_runs(
        table(
            tmp_path,
            header,
            "a,torchtitan,llama3-8b,h100-sxm,8,2048,2,1",
            "b,torchtitan,my-8b,h100-sxm,8,2048,2,1",
            "c,torchtitan,llama3-8b,h100-sxm,8,,2,1",
        )
    )
    job, assumptions = describe(known)
    assert job.model == read_model("llama3-8b")
    assert job.plan.framework.name == "torchtitan"
    assert "the row does not state the sizes of llama3-8b: taken as the preset's" in assumptions
    with pytest.raises(RunsError, match="layers, hidden, heads, vocab, without which there is no model"):
        describe(unknown)
    with pytest.raises(RunsError, match="does not state seq_len"):
        describe(unsized)
