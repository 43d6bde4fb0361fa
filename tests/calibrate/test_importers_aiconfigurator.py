"""Importing the silicon tables of aiconfigurator-core, in the layouts of its releases."""

import importlib
import importlib.util

import pytest

from calibrate.importers import MeasurementError, MeasurementWarning, read, read_aiconfigurator, read_table, tables
from simpar.model.work import Attention, Gemm

HEAD = "framework,version,device,op_name,kernel_source"
GEMM = f"""{HEAD},gemm_dtype,m,n,k,latency
VLLM,0.24.0,NVIDIA H100 80GB HBM3,gemm,torch.nn.functional.linear,bfloat16,4096,8192,1024,0.125
VLLM,0.24.0,NVIDIA H100 80GB HBM3,gemm,CutlassFP8ScaledMMLinearKernel,fp8,4096,8192,1024,0.075
VLLM,0.24.0,NVIDIA H100 80GB HBM3,gemm,DeepGemmFp8BlockScaledMMKernel,fp8_block,4096,8192,1024,0.08
"""
ATTENTION_COLUMNS = (
    "batch_size,isl,num_heads,num_key_value_heads,head_dim,beam_width,"
    "attn_dtype,kv_cache_dtype,step,window_size,latency"
)
PREFILL = f"""{HEAD},{ATTENTION_COLUMNS}
VLLM,0.24.0,NVIDIA H100 80GB HBM3,context_attention,vllm_flash_attn_fa3,4,2048,32,8,128,1,bfloat16,bfloat16,0,0,0.5
VLLM,0.24.0,NVIDIA H100 80GB HBM3,context_attention,flashinfer,1,1,32,0,128,1,bfloat16,bfloat16,0,0,0.01
VLLM,0.24.0,NVIDIA H100 80GB HBM3,context_attention,vllm_flash_attn_fa3,4,2048,32,8,128,1,bfloat16,bfloat16,0,1024,0.3
VLLM,0.24.0,NVIDIA H100 80GB HBM3,context_attention,vllm_flash_attn_fa3,4,2048,32,8,128,1,bfloat16,fp8,0,0,0.4
"""
DECODE = f"""{HEAD},{ATTENTION_COLUMNS}
VLLM,0.24.0,NVIDIA H100 80GB HBM3,generation_attention,vllm_flash_attn_fa3,64,1,32,8,128,1,bfloat16,bfloat16,1023,0,0.06
"""
NCCL = f"""{HEAD},nccl_dtype,num_gpus,message_size,latency
TRTLLM,2.29.2,NVIDIA H100 80GB HBM3,all_reduce,NCCL,half,8,268435456,2.5
TRTLLM,2.29.2,NVIDIA H100 80GB HBM3,alltoall,NCCL,int8,4,536870912,1.5
TRTLLM,2.29.2,NVIDIA H100 80GB HBM3,all_reduce,NCCL,half,16,1024,0.1
"""


@pytest.fixture
def package(tmp_path):
    data = tmp_path / "aiconfigurator_core" / "systems" / "data"
    for name, text in {
        "h100_sxm/gemm/vllm/0.24.0/gemm_perf": GEMM,
        "h100_sxm/gemm/trtllm/1.3.0/gemm_perf": GEMM.replace("0.125", "0.2"),
        "h100_sxm/attention/vllm/0.24.0/context_attention_perf": PREFILL,
        "h100_sxm/attention/vllm/0.24.0/generation_attention_perf": DECODE,
        "h100_sxm/comm/nccl/2.29.2/nccl_perf": NCCL,
        "h100_sxm/moe/vllm/0.24.0/moe_perf": "a,b,c\n",
        "a100_sxm/vllm/0.14.0/gemm_perf": GEMM,
    }.items():
        path = data / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_tables_are_found_in_both_layouts(package):
    found = [(t.system, t.kind, t.stack) for t in tables(package)]
    assert found == [
        ("a100_sxm", "gemm", "vllm/0.14.0"),
        ("h100_sxm", "gemm", "trtllm/1.3.0"),
        ("h100_sxm", "gemm", "vllm/0.24.0"),
        ("h100_sxm", "context_attention", "vllm/0.24.0"),
        ("h100_sxm", "generation_attention", "vllm/0.24.0"),
        ("h100_sxm", "nccl", "nccl/2.29.2"),
    ]
    with pytest.raises(
        MeasurementError, match=r"no tables of system 'h100'; did you mean 'h100_sxm'\? \(known: a100_sxm, h100_sxm\)"
    ):
        tables(package, system="h100")


def test_gemm_rows(package):
    made = read_aiconfigurator("h100_sxm", kinds=("gemm",), stacks=("vllm",), root=package)
    assert [(s.kernel, s.stack) for s in made.kernels] == [
        (Gemm(4096, 8192, 1024, "bf16"), "vllm/0.24.0"),
        (Gemm(4096, 8192, 1024, "fp8", out_bytes=2), "vllm/0.24.0"),
    ]
    assert [s.time_s for s in made.kernels] == pytest.approx([125e-6, 75e-6])
    assert made.provenance["device"] == "NVIDIA H100 80GB HBM3"
    assert made.provenance["license"] == "Apache-2.0"


def test_attention_rows(package):
    made = read_aiconfigurator("h100_sxm", kinds=("context_attention", "generation_attention"), root=package)
    assert [s.kernel for s in made.kernels] == [
        Attention(4, 2048, 2048, 32, 8, 128, kernel="flash3"),
        Attention(1, 1, 1, 32, 32, 128),  # one token to prefill is no decode step
        Attention(4, 2048, 2048, 32, 8, 128, kernel="flash3", window=1024),
        Attention(64, 1, 1024, 32, 8, 128, causal=False, kernel="flash3"),
    ]


def test_message_sizes_are_elements(package):
    made = read_aiconfigurator("h100_sxm", kinds=("nccl",), root=package)
    # 512 MiB both: 2 bytes times 2^28, 1 byte times 2^29
    assert [(s.op, s.nbytes, s.ranks, s.nodes) for s in made.collectives] == [
        ("all_reduce", 2.0**29, 8, 1),
        ("all_to_all", 2.0**29, 4, 1),
    ]
    assert [s.time_s for s in made.collectives] == pytest.approx([2.5e-3, 1.5e-3])


def test_what_is_left_out_is_said(package):
    path = next(t.path for t in tables(package, system="h100_sxm") if t.kind == "context_attention")
    assert read_table(path).provenance["left_out"] == "1 rows of attention in bfloat16 on a cache in fp8"
    assert read(path).kernels == read_table(path).kernels
    nccl = next(t.path for t in tables(package, system="h100_sxm") if t.kind == "nccl")
    assert read_table(nccl).provenance["left_out"] == "1 rows of all_reduce on 16 GPUs"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GEMM.replace(",4096,8192,1024,0.075", ",4096,8192,none,0.075"), r"t.csv:3: malformed row \(.*'none'\)"),
        (GEMM.replace("0.075", "0"), r"t.csv:3: latency 0 ms is not positive"),
        (GEMM.replace("0.075", "nan"), r"t.csv:3: latency nan ms is not positive"),
        ("a,b,c\n1,2,3\n", r"is no table of GEMM, attention or NCCL times"),
        ("", r"is no table of GEMM, attention or NCCL times"),
    ],
)
def test_malformed_tables(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(MeasurementError, match=message):
        read_table(tmp_path / "t.csv")


def test_a_table_of_nothing_we_know(tmp_path):
    (tmp_path / "t.csv").write_text(
        "\n".join(line for line in GEMM.splitlines() if "fp8," not in line and "bfloat16" not in line)
    )
    with pytest.warns(MeasurementWarning, match=r"nothing to import \(1 rows of gemm_dtype fp8_block\)"):
        assert read_table(tmp_path / "t.csv").kernels == ()


def test_absent_package_and_folder(tmp_path, package, monkeypatch):
    with pytest.raises(MeasurementError, match=r"there is no folder '.*nowhere'"):
        tables(tmp_path / "nowhere")
    with pytest.raises(MeasurementError, match=r"no table of a100_sxm fits nccl \(there are: gemm of vllm/0.14.0\)"):
        read_aiconfigurator("a100_sxm", kinds=("nccl",), root=package)
    monkeypatch.setattr("calibrate.importers.aiconfigurator.find_spec", lambda name: None)
    with pytest.raises(
        MeasurementError, match=r"aiconfigurator-core is not installed: pip install aiconfigurator-core"
    ):
        tables()


def test_the_installed_package_is_found_without_importing_it(package, monkeypatch):
    (package / "aiconfigurator_core" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(package))
    assert len(tables()) == 6


def test_parquet(tmp_path, monkeypatch):
    path = tmp_path / "gemm_perf.parquet"
    if importlib.util.find_spec("pyarrow") is None:
        path.write_bytes(b"PAR1")
        with pytest.raises(MeasurementError, match=r"needs pyarrow, .*; install it with: pip install"):
            read(path)
        return
    pyarrow, parquet = (importlib.import_module(name) for name in ("pyarrow", "pyarrow.parquet"))
    names = GEMM.splitlines()[0].split(",")
    rows = [dict(zip(names, line.split(","), strict=True)) for line in GEMM.splitlines()[1:]]
    for row in rows:
        row.update({key: int(row[key]) for key in "mnk"}, latency=float(row["latency"]))
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (tmp_path / "t.csv").write_text(GEMM)
    assert [(s.kernel, s.time_s) for s in read(path).kernels] == [
        (s.kernel, s.time_s) for s in read(tmp_path / "t.csv").kernels
    ]
    path.write_bytes(b"PAR1broken")
    with pytest.raises(MeasurementError, match=r"cannot read '.*gemm_perf.parquet'"):
        read(path)
