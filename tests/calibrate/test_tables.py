"""Readers of recorded measurements: what each table means, and what malformed ones are told."""

import json
from pathlib import Path

import pytest

from calibrate.errors import MeasurementError
from calibrate.lines import write_measurements
from calibrate.samples import CollectiveSample, InterferenceSample, KernelSample, Measurements, UpdateSample
from calibrate.tables import merge, read_any, read_measurements
from simpar.model.work import Attention, Gemm, GroupedGemm, MemoryBound

SOME = Measurements(
    kernels=(
        KernelSample(Gemm(64, 128, 256, "fp32", batch=3, out_bytes=4), 1.5e-5, "run", "torch/2.13.0"),
        KernelSample(Attention(1, 8, 8, 4, 2, 64, backward=True, window=5, dtype="fp16"), 2e-4, "run"),
        KernelSample(MemoryBound(10**9, "norm"), 0.1, "run"),
        KernelSample(GroupedGemm(64, 32, 16, 4, over="k"), 0.2, "run"),
    ),
    collectives=(CollectiveSample("all_reduce", 1e6, 8, 2, 3e-4, "run", "nccl/2.29.2"),),
    launch_s=(6e-6, 7.5e-6),
    interference=(InterferenceSample(0.6, 0.8, "run"), InterferenceSample(0.5, 1.0, "run")),
    updates=(UpdateSample("adamw", 1000, 1e-5, "run"),),
    datasheet={"name": "cpu", "sms": 2},
    kernel_spread=0.1,
    collective_spread=0.2,
    provenance={"host": "box", "date": "2026-01-01"},
)


def written(tmp_path: Path, text: str, name: str = "table.csv") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_json_lines_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    write_measurements(path, SOME)
    assert read_measurements(path) == SOME
    first, second, *_ = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(first)["schema_version"] == 1
    assert json.loads(second) == {"datasheet": {"name": "cpu", "sms": 2}}
    assert [file.name for file in tmp_path.iterdir()] == ["some.jsonl"]


def test_products(tmp_path: Path) -> None:
    path = written(tmp_path, "m,n,k,bf16_vllm_us,fp8_trtllm_us\n64,128,256,10.5,\n1,32,32,2,3\n", "gemm.csv")
    assert read_measurements(path).kernels == (
        KernelSample(Gemm(64, 128, 256), pytest.approx(10.5e-6), "gemm.csv", "vllm"),
        KernelSample(Gemm(1, 32, 32), 2e-6, "gemm.csv", "vllm"),
        KernelSample(Gemm(1, 32, 32, "fp8"), 3e-6, "gemm.csv", "trtllm"),
    )


def test_attention_of_many_queries_and_of_one(tmp_path: Path) -> None:
    text = "b,s,h,kv,d,sglang_us\n2,512,8,4,128,40\n"
    (prefill,) = read_measurements(written(tmp_path, text)).kernels
    assert prefill.kernel == Attention(2, 512, 512, 8, 4, 128)
    assert (prefill.stack, prefill.time_s) == ("sglang", pytest.approx(40e-6))
    (decode,) = read_measurements(written(tmp_path, text, "decode.csv")).kernels
    assert decode.kernel == Attention(2, 1, 512, 8, 4, 128, causal=False)


def test_collectives_of_one_system_and_several_nodes(tmp_path: Path) -> None:
    one = (
        "system,nccl_version,op,ranks,bytes,time_us,repeats\na_x,2.27,alltoall,8,1024,9,1\nb,2.27,all_reduce,2,8,5,1\n"
    )
    path = written(tmp_path, one)
    assert read_measurements(path, systems=["a-x"]).collectives == (
        CollectiveSample("all_to_all", 1024, 8, 1, pytest.approx(9e-6), "table.csv", "nccl/2.27"),
    )
    with pytest.raises(MeasurementError) as error:
        read_measurements(path)
    assert str(error.value) == "table.csv: holds 2 systems; say which one, of 'a_x', 'b'"
    many = "system,nodes,gpus,op,bytes,config,time_us\ns,2,16,all_reduce,8,best,50\n"
    (found,) = read_measurements(written(tmp_path, many)).collectives
    assert (found.ranks, found.nodes, found.stack) == (16, 2, "best")


def test_of_rounds_the_lowest_counts(tmp_path: Path) -> None:
    text = "ranks,op,bytes,round,med_us\n2,sendrecv_pp,8,0,90\n2,sendrecv_pp,8,1,60\n2,sendrecv_pp,8,2,70\n"
    (found,) = read_measurements(written(tmp_path, text)).collectives
    assert found == CollectiveSample("sendrecv", 8, 2, 1, pytest.approx(60e-6), "table.csv", "gloo")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "table.csv:1: columns a,b are of no known table; have m,n,k,<dtype>_<stack>_us; "),
        ("", "table.csv:1: columns none are of no known table; have "),
        ("m,n,k\n1,2,3\n", "table.csv:1: has no column of times; name each <stack>_us, in µs"),
        (
            "m,n,k,vllm_us\n1,2,3,4\n",
            "table.csv:1: column 'vllm_us' begins with no dtype; name it <dtype>_<stack>_us, such as bf16_vllm_us",
        ),
        ("m,n,k,bf16_x_us\n1,2,3\n", "table.csv:2: has 3 cells, the header 4; give every column a cell"),
        ("m,n,k,bf16_x_us\n1,2,3,4\n1,2,x,4\n", "table.csv:3: k 'x' is no number; give a positive one"),
        ("m,n,k,bf16_x_us\n1,2,0,4\n", "table.csv:2: k 0 is out of range; give a positive number"),
        ("m,n,k,bf16_x_us\n1.5,2,3,4\n", "table.csv:2: m 1.5 is not a whole number; give one"),
        ("m,n,k,bf16_x_us\n1,2,3,-4\n", "table.csv:2: bf16_x_us -4 is out of range; give a positive number"),
        ("m,n,k,bf16_x_us\n1,2,3,nan\n", "table.csv:2: bf16_x_us nan is out of range; give a positive number"),
        (
            "op,ranks,bytes\nall_reduce,2,8\n",
            "table.csv:1: has no time; name its column time_us (or med_us for rounds)",
        ),
        (
            "op,gpus,nodes,bytes,time_us\nall_reduce,2,4,8,9\n",
            "table.csv:2: 2 ranks cannot be on 4 nodes; give at least one a node",
        ),
    ],
)
def test_malformed_tables(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MeasurementError) as error:
        read_measurements(written(tmp_path, text))
    assert str(error.value).startswith(message)


HEADER = '{"format": "simpar measurements", "schema_version": 1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}\n", 'a.jsonl:1: does not begin with {"format": "simpar measurements"}; give a file that simpar wrote'),
        (
            HEADER.replace("1}", "7}"),
            "a.jsonl:1: has schema_version 7, but this simpar reads 1; measure again, or install the simpar",
        ),
        (HEADER + "{\n", "a.jsonl:2: is not JSON (Expecting property name"),
        (HEADER + "\n[1]\n", "a.jsonl:3: is no object; write one measurement a line"),
        (HEADER + "{}\n", "a.jsonl:2: is no measurement; give one of kernel, collective, launch_s, interference, up"),
        (HEADER + '{"launch_s": "soon"}\n', "a.jsonl:2: launch_s 'soon' is no number; give a positive one"),
        (
            HEADER + '{"interference": {"compute_rate": 1.5, "collective_rate": 0.5}}\n',
            "a.jsonl:2: compute_rate 1.5 is a share of the speed alone; give one of at most 1",
        ),
        (
            HEADER + '{"update": {"optimizer": "adamw", "time_s": 1}}\n',
            "a.jsonl:2: field 'parameters' is missing; give it",
        ),
        (HEADER + '{"datasheet": {"sms": 1}}\n', "a.jsonl:2: datasheet names no device; give the catalog's as name"),
        (HEADER + '{"datasheet": {"sm": 1}}\n', "a.jsonl:2: datasheet has an unknown field 'sm'; use name, title, pea"),
        (HEADER + '{"spread": {"kernels": -1}}\n', "a.jsonl:2: kernels -1 is out of range; give a positive number"),
        (HEADER + '{"wind": {}}\n', "a.jsonl:2: is no measurement; give one of kernel, "),
        (
            HEADER + '{"kernel": "grouped_gemm", "m": 1, "n": 1, "k": 1, "groups": 1, "over": "n", "time_s": 1}\n',
            "a.jsonl:2: over 'n' is no dimension that groups share; use m or k",
        ),
        (
            HEADER + '{"kernel": "conv"}\n',
            "a.jsonl:2: kernel 'conv' is unknown; use one of gemm, grouped_gemm, attention, memory_bound",
        ),
        (
            HEADER + '{"kernel": "gemm", "m": 1, "n": 2, "time_s": 1}\n',
            "a.jsonl:2: field 'k' is missing; give it",
        ),
        (
            HEADER + '{"kernel": "gemm", "m": 1, "n": 2, "k": 3, "q": 4, "time_s": 1}\n',
            "a.jsonl:2: unknown field 'q'; use m, n, k, dtype, batch, out_bytes",
        ),
        (
            HEADER + '{"kernel": "gemm", "m": 1, "n": 2, "k": 3, "dtype": "int4", "time_s": 1}\n',
            "a.jsonl:2: dtype 'int4' is unknown; use one of fp8, bf16, fp16, tf32, fp32",
        ),
        (
            HEADER + '{"collective": "all_reduce", "nbytes": 8, "ranks": 2, "nodes": 1}\n',
            "a.jsonl:2: field 'time_s' is missing; give it",
        ),
    ],
)
def test_malformed_lines(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(MeasurementError) as error:
        read_measurements(written(tmp_path, text, "a.jsonl"))
    assert str(error.value).startswith(message)


def test_nothing_half_written(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=r"cannot write '.*': No such file or directory; choose another place"):
        write_measurements(tmp_path / "none" / "a.jsonl", SOME)
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_recognised(tmp_path: Path) -> None:
    log = "\n".join(
        (
            "#  Rank  0 Group  0 Pid 1 on node0 device  0 [0x0f] NVIDIA H100",
            "#  Rank  1 Group  0 Pid 2 on node0 device  1 [0x1f] NVIDIA H100",
            "#       size         count      type   redop    root     time   algbw   busbw #wrong",
            "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
            "     1048576        262144     float     sum      -1    50.00   20.97   20.97      0",
        )
    )
    (found,) = read_any(written(tmp_path, f"# all_reduce_perf\n{log}\n", "all_reduce_perf.log")).collectives
    assert (found.op, found.nbytes, found.ranks, found.time_s) == ("all_reduce", 2**20, 2, pytest.approx(50e-6))
    table = "framework,version,device,gemm_dtype,m,n,k,latency\nVLLM,1,x,bfloat16,8,16,32,0.01\n"
    (other,) = read_any(written(tmp_path, table, "gemm_perf.txt")).kernels
    assert (other.kernel, other.time_s) == (Gemm(8, 16, 32), pytest.approx(1e-5))
    write_measurements(tmp_path / "a.jsonl", SOME)
    assert read_any(tmp_path / "a.jsonl") == SOME
    with pytest.raises(MeasurementError, match=r"is no measurement that can be imported.*or a CSV with columns m,n,k"):
        read_any(written(tmp_path, "poem\n"))


def test_merge_keeps_everything() -> None:
    both = merge([SOME, Measurements(launch_s=(1e-6,), provenance={"host": "other"})])
    assert (both.kernels, both.launch_s) == (SOME.kernels, (6e-6, 7.5e-6, 1e-6))
    assert both.provenance == {"host": "other", "date": "2026-01-01"}
