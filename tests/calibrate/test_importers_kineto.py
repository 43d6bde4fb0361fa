"""Importing torch profiles: synthetic traces with known times, and a real one that torch writes here and now."""

import gzip
import json
import re

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from calibrate.importers import MeasurementError, MeasurementWarning, kineto_steps, read, read_kineto, read_kineto_trace
from calibrate.importers.kineto_kernels import ATTENTION_FORMS, GEMM_OPERANDS, kernel_of, kind_by_name
from simpar.model.work import Attention, Gemm, MemoryBound
from simpar.trace.trace import KINDS

NCCL_KERNEL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def event(name, cat, ts, dur, *, pid=0, tid=7, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}


def kernel(name, ts, dur, stream=7, **args):
    return event(name, "kernel", ts, dur, tid=stream, device=0, stream=stream, **args)


def write(path, events, **header):
    document = {"schemaVersion": 1, "traceEvents": events, **header}
    path.write_text(json.dumps(document))
    return path


def spans(trace):
    s = trace.spans
    return [
        (trace.lanes[lane].stream, KINDS[kind], trace.names[name], int(start), int(length))
        for lane, kind, name, start, length in zip(s.lane, s.kind, s.name, s.start_ns, s.duration_ns, strict=True)
    ]


def two_steps():
    """Host issues 10 µs ahead; in step 1 (2,000–3,000 µs) a product in two kernels, an all-reduce beside, an update."""
    mm = {"Input Dims": [[512, 256], [256, 1024]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    events = []
    for number, base in ((0, 1000), (1, 2000)):
        c = 100 * number
        events += [
            event(f"ProfilerStep#{number}", "user_annotation", base, 1000, pid=9, tid=9),
            event(f"ProfilerStep#{number}", "gpu_user_annotation", base + 5, 990, stream=7),
            event("aten::mm", "cpu_op", base + 10, 20, pid=9, tid=9, **mm, **{"External id": c + 1}),
            event("cudaLaunchKernel", "cuda_runtime", base + 12, 3, pid=9, tid=9, correlation=c + 1),
            event("cudaLaunchKernel", "cuda_runtime", base + 16, 3, pid=9, tid=9, correlation=c + 2),
            event("cudaLaunchKernel", "cuda_runtime", base + 30, 3, pid=9, tid=9, correlation=c + 3),
            event("Optimizer.step#AdamW.step", "user_annotation", base + 900, 60, pid=9, tid=9),
            event("cudaLaunchKernel", "cuda_runtime", base + 910, 3, pid=9, tid=9, correlation=c + 4),
            kernel("void cutlass::Kernel2<x>(P)", base + 100.25, 50.125, correlation=c + 1, **{"External id": c + 1}),
            kernel("splitKreduce_kernel", base + 151, 9.875 + number, correlation=c + 2, **{"External id": c + 1}),
            kernel(
                NCCL_KERNEL, base + 120, 400, stream=20, correlation=c + 3,
                **{"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16"},
                **{"Process Group Description": "mesh_dp"},
            ),
            # the update is issued in the step, and runs after its end on the host
            kernel("void vectorized_elementwise_kernel<4>(int)", base + 1010, 40, correlation=c + 4),
        ]  # fmt: skip
    return events


def test_kernel_samples_by_external_id(tmp_path):
    made = read(
        write(tmp_path / "t.json", two_steps(), deviceProperties=[{"name": "NVIDIA H100"}], distributedInfo={"rank": 3})
    )
    (sample,) = made.kernels
    assert sample.kernel == Gemm(512, 1024, 256, "bf16")
    assert sample.time_s == pytest.approx(60.5e-6)  # median of 60 and 61 µs: both kernels of the product
    assert made.provenance["device"] == "NVIDIA H100"
    assert made.provenance["rank"] == "3"


def test_the_last_complete_step_is_the_measured_one(tmp_path):
    path = write(tmp_path / "t.json", two_steps(), distributedInfo={"rank": 3})
    assert kineto_steps(path) == (0, 1)
    trace = read_kineto_trace(path)
    # the device ends 50 µs after the host's annotation, so the window of 1,000 µs lies 50 µs later
    assert trace.step_ns == 1_000_000
    assert spans(trace) == [
        ("compute", "gemm", "aten::mm", 50_250, 50_125),
        ("dp", "all_reduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 70_000, 400_000),
        ("compute", "gemm", "aten::mm", 101_000, 10_875),
        ("compute", "optimizer", "vectorized_elementwise_kernel", 960_000, 40_000),
    ]
    assert {lane.rank for lane in trace.lanes} == {3}
    assert trace.spans.nbytes[1] == 2000
    # the work of the product is counted once, on its longer kernel
    assert list(trace.spans.flop) == [2.0 * 512 * 1024 * 256, 0, 0, 0]
    assert spans(read_kineto_trace(path, step=0))[2][-1] == 9_875
    with pytest.raises(MeasurementError, match=r"no complete step 5 \(complete: 0, 1\)"):
        read_kineto_trace(path, step=5)


def test_an_unfinished_step_is_not_complete(tmp_path):
    events = two_steps()
    events.append(event("ProfilerStep#2", "user_annotation", 3000, -3000, pid=9, tid=9))
    path = write(tmp_path / "t.json", events)
    with pytest.warns(MeasurementWarning, match=r"1 events end before they start, 'ProfilerStep#2' first"):
        assert kineto_steps(path) == (0, 1)


def test_a_step_longer_on_the_device_than_on_the_host(tmp_path):
    events = [
        event("ProfilerStep#4", "user_annotation", 0, 100, pid=9, tid=9),
        event("cudaLaunchKernel", "cuda_runtime", 10, 1, pid=9, tid=9, correlation=1),
        event("cudaLaunchKernel", "cuda_runtime", 20, 1, pid=9, tid=9, correlation=2),
        kernel("nvjet_a", 15, 200, correlation=1),
        kernel("nvjet_b", 215, 300, correlation=2),
    ]
    trace = read_kineto_trace(write(tmp_path / "t.json", events))
    assert trace.step_ns == 500_000
    assert [s[3:] for s in spans(trace)] == [(0, 200_000), (200_000, 300_000)]


def test_case_r01_synchronisation_is_no_computation(tmp_path):
    rows = (("Stream Sync", "cuda_sync"), ("Event Sync", "kernel"), ("Device Sync", "kernel"))
    waits = [event(name, cat, 0, 10_000, tid=7, stream=7, device=0) for name, cat in rows]
    trace = read_kineto_trace(write(tmp_path / "t.json", [*waits, kernel(NCCL_KERNEL, 0, 10_000, stream=20)]))
    assert spans(trace) == [("nccl", "all_reduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 0, 10_000_000)]


def test_case_r04_ends_that_were_never_written(tmp_path):
    path = write(
        tmp_path / "t.json",
        [kernel("nvjet_a", 5, 3), kernel("nvjet_b", 100, -100), {**kernel("nvjet_c", 200, 0), "dur": None}],
    )
    with pytest.warns(MeasurementWarning, match=r"2 events end before they start, 'nvjet_b' first; they are left out"):
        trace = read_kineto_trace(path)
    assert spans(trace) == [("compute", "gemm", "nvjet_a", 0, 3000)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [\n{"ph": "X", tid": 0}]}', r"t.json:2: not valid JSON at character 30 .*near '.*tid\": 0"),
        ('"name": "x", "ph": "X"}]}', r"t.json:1: not valid JSON at character 6"),
        ('{"traceEvents": [{"ph": "X"', r"t.json:1: not valid JSON at character 27"),
        ('{"traceEvents": 3, "ph": 0}', r"has no list 'traceEvents'"),
        ('{"traceEvents": [{"ph": "X", "ts": "soon", "dur": 1}]}', r"traceEvents\[0\]: ts is 'soon', which is no time"),
        ('{"traceEvents": [{"ph": "X", "ts": NaN, "dur": 1}]}', r"traceEvents\[0\]: ts is nan"),
        ('{"traceEvents": []}', r"nothing was recorded"),
    ],
)  # fmt: skip
def test_case_r06_malformed_traces(tmp_path, text, message):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(MeasurementError, match=message):
        read(tmp_path / "t.json")


def test_case_r10_nanoseconds_survive_times_since_1970(tmp_path):
    """A double has a step of 0.25 µs at 1.7e15 µs."""
    text = """{"traceEvents": [
      {"ph": "X", "cat": "kernel", "name": "nvjet_a", "ts": 1700000000000000.001, "dur": 2.001, "args": {"stream": 7}},
      {"ph": "X", "cat": "kernel", "name": "nvjet_b", "ts": 1700000000000002.003, "dur": 1.999, "args": {"stream": 7}}
    ]}"""
    (tmp_path / "t.json").write_text(text)
    assert [s[3:] for s in spans(read_kineto_trace(tmp_path / "t.json"))] == [(0, 2001), (2002, 1999)]


def test_case_r10_whole_microseconds_overlap_by_rounding(tmp_path):
    trace = read_kineto_trace(write(tmp_path / "t.json", [kernel("nvjet_a", 0, 10), kernel("nvjet_b", 9, 5)]))
    assert [s[3:] for s in spans(trace)] == [(0, 10_000), (10_000, 4_000)]
    with pytest.warns(MeasurementWarning, match="1 spans overlap others on their stream"):
        read_kineto_trace(write(tmp_path / "t.json", [kernel("nvjet_a", 0, 10), kernel("nvjet_b", 5, 9)]))


def test_old_categories_and_ids_on_the_launch(tmp_path):
    dims = {"Input Dims": [[8], [16, 4], [4, 8]], "Input type": ["float", "float", "float"]}
    events = [
        event("aten::addmm", "Operator", 0, 9, pid=9, tid=9, **dims, **{"external id": 5}),
        event("cudaLaunchKernel", "Runtime", 2, 3, pid=9, tid=9, correlation=1, **{"external id": 5}),
        event("volta_sgemm_32x32", "Kernel", 20, 4, stream=7, correlation=1),
        event("Memcpy HtoD", "Memcpy", 30, 2, stream=8, bytes=4096),
    ]
    path = write(tmp_path / "t.json", events)
    assert [s.kernel for s in read_kineto(path).kernels] == [Gemm(16, 8, 4, "fp32", out_bytes=4)]
    trace = read_kineto_trace(path)
    assert [lane.stream for lane in trace.lanes] == ["compute", "copy"]
    assert trace.spans.nbytes[1] == 4096


def test_collectives_of_a_cpu_are_annotations_on_other_threads(tmp_path):
    shape = {"Input Dims": [[262912]], "Input type": ["float"]}
    events = [
        event("aten::mm", "cpu_op", 0, 10, pid=9, tid=1),
        event("c10d::allreduce_", "cpu_op", 10, 3, pid=9, tid=1),
        event("gloo:all_reduce", "user_annotation", 11, 40, pid=9, tid=2, **shape),
        event("gloo:all_reduce", "user_annotation", 60, 5, pid=9, tid=3, **shape),
        event("aten::mm", "cpu_op", 15, 10, pid=9, tid=1),
    ]
    trace = read_kineto_trace(write(tmp_path / "t.json", events))
    assert spans(trace) == [
        ("compute", "gemm", "aten::mm", 0, 10_000),
        ("gloo", "all_reduce", "gloo:all_reduce", 11_000, 40_000),
        ("compute", "gemm", "aten::mm", 15_000, 10_000),
        ("gloo", "all_reduce", "gloo:all_reduce", 60_000, 5_000),
    ]
    assert list(trace.spans.nbytes) == [0, 4 * 262912, 0, 4 * 262912]


def test_copies_over_the_bus_are_no_samples_of_device_memory(tmp_path):
    dims = {"Input Dims": [[1024], [1024]], "Input type": ["float", "float"]}
    events = []
    for number, (name, category) in enumerate(
        [("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy"), ("Memcpy DtoD", "gpu_memcpy"), ("copy_kernel", "kernel")]
    ):
        events.append(event("aten::copy_", "cpu_op", 10 * number, 5, pid=9, tid=9, **dims, **{"External id": number}))
        events.append(event(name, category, 10 * number + 5, 2 + number, stream=7, **{"External id": number}))
    (sample,) = read_kineto(write(tmp_path / "t.json", events)).kernels
    assert sample.kernel == MemoryBound(8192, "elementwise")
    assert sample.time_s == pytest.approx(3.5e-6)  # median of the two on the device


def test_gzipped_traces_whatever_their_name(tmp_path):
    plain = write(tmp_path / "t.json", two_steps())
    (tmp_path / "t.trace").write_bytes(gzip.compress(plain.read_bytes()))
    assert spans(read_kineto_trace(tmp_path / "t.trace")) == spans(read_kineto_trace(plain))
    assert read(tmp_path / "t.trace").kernels[0].time_s == read(plain).kernels[0].time_s


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "gemm"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT128x128x32", "gemm"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<x>>>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("void at::native::vectorized_layer_norm_kernel<float>", "norm"),
        ("_rms_norm_fwd_kernel", "norm"),
        ("void at::native::distribution_elementwise_grid_stride_kernel<normal_and_transform>", "elementwise"),
        ("void at::native::silu_kernel", "activation"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", "all_gather"),
        ("ncclDevKernel_SendRecv", "p2p"),
        ("ncclDevKernel_Broadcast_RING_LL", "broadcast"),
        ("void vllm::cross_device_reduce_1stage<bf16, 8>", "all_reduce"),
        ("gloo:all_reduce", "all_reduce"),
        ("Memset (Device)", "elementwise"),
    ],
)
def test_kinds_by_name(name, kind):
    assert kind_by_name(name) == kind


def test_a_collective_of_messages_is_told_by_its_record():
    assert kind_by_name("ncclDevKernel_SendRecv", {"Collective name": "all_to_allv"}) == "all_to_all"


def schema(name):
    return getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema.arguments


@pytest.mark.parametrize("name", sorted(ATTENTION_FORMS))
def test_attention_forms_agree_with_the_schemas_of_torch(name):
    form, names = ATTENTION_FORMS[name], [a.name for a in schema(name)]
    assert names[form.query : form.query + 3] == ["query", "key", "value"]
    assert names[form.causal] in ("is_causal", "custom_mask_type")
    assert form.backward == names[0].startswith("grad_out")


@pytest.mark.parametrize("name", sorted(GEMM_OPERANDS))
def test_operands_agree_with_the_schemas_of_torch(name):
    names = [a.name for a in schema(name)]
    assert names[GEMM_OPERANDS[name] :][:2] in (["self", "mat2"], ["mat1", "mat2"], ["batch1", "batch2"])


def test_shapes_that_describe_no_kernel():
    def shaped(name, dims, types, concrete=()):
        return kernel_of(name, {"Input Dims": dims, "Input type": types, "Concrete Inputs": list(concrete)})

    half = "c10::Half"
    assert shaped("aten::bmm", [[3, 8, 4], [3, 4, 2]], [half] * 2) == Gemm(8, 2, 4, "fp16", 3)
    assert shaped("aten::mm", [[8, 4], [5, 2]], [half] * 2) is None
    assert shaped("aten::mm", [[8, 4], [4, 2]], ["double"] * 2) is None
    assert shaped("aten::mm", [[0, 4], [4, 2]], [half] * 2) is None
    assert shaped("aten::mm", [[8, 4]], [half]) is None
    assert kernel_of("aten::mm", {}) is None
    packed = [[100, 8, 64]] * 3 + [[5], [5], [], [], [], []]
    assert shaped("aten::_flash_attention_forward", packed, [half] * 3 + [""] * 6, ["False"] * 9) is None
    whole = [[2, 128, 8, 64], [2, 256, 2, 64], [2, 256, 2, 64], [], [], [], [], [], []]
    concrete = ["", "", "", "", "", "128", "256", "0.", "True"]
    assert shaped("aten::_flash_attention_forward", whole, [half] * 3 + [""] * 6, concrete) == Attention(
        2, 128, 256, 8, 2, 64, causal=True, dtype="fp16"
    )
    assert shaped("aten::mul", [[4, 8], [4, 8]], [half] * 2) == MemoryBound(2 * 32 * 3, "elementwise")
    assert shaped("aten::copy_", [[4, 8], [4, 8]], [half, "float"]) == MemoryBound(32 * 6, "elementwise")


def test_without_shapes_there_are_no_samples(tmp_path):
    path = write(tmp_path / "t.json", [kernel("nvjet_a", 5, 3)])
    with pytest.warns(MeasurementWarning, match="record_shapes=True"):
        assert read_kineto(path).kernels == ()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shapes", [True, False])
def test_a_real_profile_of_torch_on_the_cpu(tmp_path, shapes):
    batch, width, hidden = 48, 64, 96
    model = torch.nn.Sequential(
        torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.LayerNorm(hidden), torch.nn.Linear(hidden, 8)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    query = torch.randn(2, 4, 16, 32)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=shapes, schedule=schedule(wait=0, warmup=1, active=2, repeat=1)
    ) as profiler:
        for _ in range(3):
            torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            model(torch.randn(batch, width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    path = tmp_path / "real.json.gz"
    profiler.export_chrome_trace(str(path))

    assert kineto_steps(path) == (1, 2)
    trace = read_kineto_trace(path)
    text = gzip.decompress(path.read_bytes()).decode()
    annotation = next(e for e in json.loads(text)["traceEvents"] if e["name"] == "ProfilerStep#2")
    assert trace.step_ns == pytest.approx(annotation["dur"] * 1e3, abs=1000)
    made = spans(trace)
    # forward 2 products; backward 2 for the second layer, 1 for the first, whose input needs no gradient
    assert [name for _, kind, name, *_ in made if kind == "gemm"] == ["aten::addmm"] * 2 + ["aten::mm"] * 3
    kinds = {kind for _, kind, *_ in made}
    assert {"gemm", "attention", "activation", "norm", "optimizer"} <= kinds
    s = trace.spans
    assert np.all(np.diff(s.start_ns) >= 0)
    assert 0 < s.duration_ns.sum() <= trace.step_ns
    assert np.all(s.start_ns[1:] >= s.end_ns[:-1])  # one thread
    assert s.end_ns.max() <= trace.step_ns
    if not shapes:
        assert not read_kineto(path).kernels
        return
    kernels = {sample.kernel for sample in read(path).kernels}
    fp32 = {"dtype": "fp32", "out_bytes": 4}
    assert {k for k in kernels if isinstance(k, Gemm)} == {
        Gemm(batch, hidden, width, **fp32),  # forward
        Gemm(batch, 8, hidden, **fp32),
        Gemm(batch, hidden, 8, **fp32),  # gradient of the input
        Gemm(8, hidden, batch, **fp32),  # gradients of the weights
        Gemm(hidden, width, batch, **fp32),
    }
    assert Attention(2, 16, 16, 4, 4, 32, causal=True, dtype="fp32") in kernels
    assert all(sample.time_s > 0 for sample in read(path).kernels)
    flop = 2 * batch * hidden * (2 * width + 3 * 8) + 2 * (2 * 4 * 16 * 16 * 32)
    assert s.flop.sum() == flop
    assert not re.search(r"aten::(view|t|empty)\b", " ".join(trace.names))
