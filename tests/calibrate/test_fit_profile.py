"""Profiles put together from measurements, by the function and by the command; the shipped ones come from it."""

import json
import math
import re
import shlex
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import typer

from calibrate.cli import MISTAKE, main, register
from calibrate.datasheet import datasheet_of
from calibrate.errors import MeasurementError
from calibrate.fit import fit_profile, select
from calibrate.lines import write_measurements
from calibrate.samples import CollectiveSample, InterferenceSample, KernelSample, Measurements, UpdateSample
from simpar import simulate
from simpar.cost.error import log_sd
from simpar.cost.kernel import extrapolated, kernel_error, kernel_s
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import GemmFit, device
from simpar.hardware.profile import load_profile
from simpar.hardware.shipped import shipped_profile_names
from simpar.model.work import Attention, Gemm, GroupedGemm, MemoryBound

FITTED = ("gemm", "attention")
TABLES = Path(__file__).resolve().parents[3] / "shared" / "data"


def on_a_cpu() -> Measurements:
    """What a small run on a CPU measures: fp32 products, norms, launches and two ranks of gloo."""
    made = device("cpu").replace(
        gemm={dtype: fit.replace(peak_efficiency=0.35) for dtype, fit in device("cpu").gemm.items()}
    )
    kernels = [Gemm(m, n, k, "fp32", out_bytes=4) for m in (64, 256) for n in (10, 500) for k in (500, 784)]
    norms = [MemoryBound(2**p, "norm") for p in (20, 23, 26)]
    return Measurements(
        kernels=tuple(KernelSample(k, kernel_s(k, made), "run", "torch/2.13.0") for k in (*kernels, *norms)),
        collectives=tuple(
            CollectiveSample("all_reduce", nbytes, 2, 1, 200e-6 + nbytes / 2e9, "run", "gloo")
            for nbytes in (1e3, 1e5, 1e6, 1e7)
        ),
        launch_s=(8e-6, 9e-6, 9e-6, 10e-6, 50e-6),
        provenance={"host": "box", "torch": "2.13.0"},
    )


def test_what_was_measured_is_fitted_and_the_rest_is_said_to_be_kept() -> None:
    base = device("cpu")
    found = fit_profile(on_a_cpu(), base, name="box", today="2026-01-02")
    one = found.device
    assert (found.name, one.name, one.fit_from, one.machine) == ("box", "box", None, "box")
    assert one.gemm["fp32"].peak_efficiency == pytest.approx(0.35, rel=0.1)
    assert one.gemm["bf16"] == one.gemm["fp32"]  # the catalog's CPU has no bf16 units, so bf16 goes with it
    assert one.sources["gemm.bf16"] == "assumed from fp32: same efficiencies of its own peak"
    assert one.sources["gemm.fp32"] == "fitted by simpar calibrate fit to run: torch/2.13.0; 8 points"
    assert (one.launch_s, one.attention) == (9e-6, base.attention)
    assert one.memory_bound["norm"] != base.memory_bound["norm"]
    assert one.memory_bound["activation"] == base.memory_bound["activation"]
    assert one.sustained_slowdown == 1.0
    assert found.fabric == Cluster.parse("cpu:2").fabric
    assert found.node_link is not None
    assert found.node_link.sources == ("fitted by simpar calibrate fit to run: gloo; 4 points",)
    assert found.notes == (
        "attention backward was not measured; it keeps the base's ratios to forward",
        "memory-bound elementwise, activation not measured; kept as the base has them",
        "too few rounds were measured to see how much this machine's speed changes; it is assumed",
        "collectives between nodes were not measured; the fabric is the base's usual one",
    )
    assert found.provenance.host == "box"
    assert (found.provenance.date, found.provenance.facts) == ("2026-01-02", {"torch": "2.13.0"})
    assert {"device.gemm.fp32.k0", "device.launch_s", "node_link.step_latency_s"} <= set(found.uncertainty)
    measured = Gemm(64, 512, 784, "fp32")
    assert extrapolated(measured, one) is None
    assert kernel_error(measured, one) < 0.1 < kernel_error(Attention(1, 1024, 1024, 8, 8, 128, dtype="fp32"), one)


def test_rounds_that_differ_widen_the_level_and_the_link() -> None:
    calm = fit_profile(on_a_cpu(), device("cpu"))
    wild = fit_profile(replace(on_a_cpu(), kernel_spread=0.2, collective_spread=0.3), device("cpu"))
    assert "level" not in calm.device.errors
    assert any("too few rounds" in note for note in calm.notes)
    assert not any("too few rounds" in note for note in wild.notes)
    assert log_sd(wild.device.errors["level"], wild.device.errors["level.p90"]) == pytest.approx(0.2, rel=0.01)
    assert calm.node_link is not None
    assert wild.node_link is not None
    before, after = calm.node_link.errors, wild.node_link.errors
    for statistic in ("median", "p90"):
        one, both = (log_sd(**{"median": 0.0, statistic: getattr(errors, statistic)}) for errors in (before, after))
        assert both == pytest.approx(math.hypot(one, 0.3), rel=0.01)
    assert wild.device.gemm == calm.device.gemm


def test_interference_and_optimizer_steps_come_back_from_the_measurements() -> None:
    rates = tuple(InterferenceSample(rate, rate / 2, "run") for rate in (0.5, 0.8, 0.6))
    steps = (UpdateSample("adamw", 1_000_000, 2e-3, "run"),)
    found = fit_profile(replace(on_a_cpu(), interference=rates, updates=steps), device("cpu"))
    one = found.device
    assert (one.compute_rate_during_collectives, one.collective_rate_during_compute) == (0.6, 0.3)
    assert one.sources["collective_rate_during_compute"].startswith("median of 3 rounds of products beside all-red")
    assert found.uncertainty["device.compute_rate_during_collectives"] > 0
    ratio = 2e-3 / kernel_s(MemoryBound(28_000_000), one)
    told = f"a fused AdamW step over 1,000,000 parameters took 2 ms, {ratio:.2f} times what its traffic costs as an "
    assert any(note.startswith(told) for note in found.notes)


def test_the_speed_of_grouped_products_is_found() -> None:
    made = device("cpu").replace(grouped_gemm_speed=0.7)
    kernels = [GroupedGemm(m, 256, 512, 8, "fp32", 4, over) for m in (512, 2048) for over in ("m", "k")]  # type: ignore[arg-type]
    samples = tuple(KernelSample(k, kernel_s(k, made), "run") for k in kernels)
    found = fit_profile(Measurements(kernels=samples), device("cpu"))
    assert found.device.grouped_gemm_speed == pytest.approx(0.7, rel=0.02)
    assert found.device.errors["grouped_gemm.fp32"] < 0.02
    assert found.uncertainty["device.grouped_gemm_speed"] > 0
    assert found.device.sources["grouped_gemm_speed"].endswith("4 points")


def test_small_products_of_a_cpu_show_what_packing_costs() -> None:
    fit = GemmFit(peak_efficiency=0.8, bandwidth_efficiency=0.12, overhead_s=2e-5, k0=20)
    made = device("cpu").replace(gemm={"fp32": fit, "bf16": fit})
    shapes = [(1, 64, 64), (16, 800, 800), (64, 1600, 1600), (192, 800, 800), (800, 800, 96), (1600, 800, 800)]
    samples = tuple(
        KernelSample(kernel, kernel_s(kernel, made), "run") for kernel in (Gemm(*s, "fp32", 1, 4) for s in shapes)
    )
    found = fit_profile(Measurements(kernels=samples), device("cpu")).device.gemm["fp32"]
    assert found.bandwidth_efficiency == pytest.approx(0.12, rel=0.1)


def test_the_datasheet_of_the_measured_device_goes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = datasheet_of(device("cpu").replace(sms=2, peak_flop_per_s={"bf16": 1e11, "fp32": 1e11}))
    recorded, out = tmp_path / "run.jsonl", tmp_path / "box.json"
    write_measurements(recorded, replace(on_a_cpu(), datasheet=sheet))
    assert main(["fit", str(recorded), "--device", "cpu", "--out", str(out)]) == 0
    found = load_profile(out).device
    assert (found.sms, found.peak_flop_per_s["fp32"]) == (2, 1e11)
    capsys.readouterr()
    assert main(["fit", str(recorded), "--device", "h100", "--out", str(out)]) == MISTAKE
    assert capsys.readouterr().err == (
        "the measurements are of device 'cpu', not of 'h100-sxm'; fit them with --device cpu, or name it with --base\n"
    )
    write_measurements(recorded, replace(on_a_cpu(), datasheet={"name": "cpu", "sms": -1}))
    assert main(["fit", str(recorded), "--device", "cpu", "--out", str(out)]) == MISTAKE
    assert capsys.readouterr().err.startswith("the datasheet in the measurements is none: ")


def test_one_gpu_keeps_the_usual_links_with_wide_uncertainty() -> None:
    samples = tuple(KernelSample(Gemm(2**p, 2**p, 2**p), 1e-5 * 8**p / 8**7, "run") for p in range(7, 14))
    found = fit_profile(Measurements(kernels=samples), device("h100"))
    assert found.node_link == Cluster.parse("h100:8").node_link
    assert found.uncertainty["node_link.bandwidth_bytes_per_s"] == 0.3
    assert any("collectives inside a node were not measured" in note for note in found.notes)
    assert found.device.gemm["fp8"] == device("h100").gemm["fp8"]


def test_serving_attention_is_the_devices_own_kernel_and_decode_is_left_out() -> None:
    h100 = device("h100")
    kernels = [Attention(1, s, s, h, h, 128) for s in (1024, 2048, 4096, 8192) for h in (8, 16, 32)]
    samples = [KernelSample(k, 1e-3, "t", "vllm") for k in kernels]
    decode = KernelSample(Attention(4, 1, 512, 8, 8, 128, causal=False), 1e-5, "t", "vllm")
    as_flash2 = fit_profile(Measurements(kernels=(*samples, decode)), h100)
    native = [KernelSample(Attention(1, k.seq_q, k.seq_q, k.heads, k.heads, 128, kernel="flash3"), 1e-3, "t", "vllm")
              for k in kernels]  # fmt: skip
    assert as_flash2.device == fit_profile(Measurements(kernels=tuple(native)), h100).device
    assert as_flash2.notes[-1] == "1 decode attention kernels were left out; no form prices them yet"


def test_select_keeps_what_is_asked_for() -> None:
    kernels = tuple(KernelSample(Gemm(8, 8, 8, dtype), 1.0, "", stack) for dtype in ("bf16", "fp8") for stack in "ab")
    calls = tuple(CollectiveSample("all_reduce", 8, n, 1, 1.0, "", v) for n in (2, 4) for v in ("nccl/1", "nccl/2"))
    everything = Measurements(kernels=kernels, collectives=calls)
    chosen = select(everything, {"gemm.fp8": ["a"], "collective": ["nccl/2"]}, ranks=[4])
    assert [(s.kernel.dtype, s.stack) for s in chosen.kernels if isinstance(s.kernel, Gemm)] == [
        ("bf16", "a"), ("bf16", "b"), ("fp8", "a"),
    ]  # fmt: skip
    assert chosen.collectives == (calls[3],)
    assert len(select(everything, {"collective": ["nccl"]}).collectives) == 4
    with pytest.raises(MeasurementError, match=r"'gemms' is no class of measurements; did you mean 'gemm'\?; use"):
        select(everything, {"gemms": ["a"]})
    with pytest.raises(MeasurementError, match="no gemm of stack c was measured; there are a, b, nccl/1, nccl/2"):
        select(everything, {"gemm": ["c"]})


def test_nothing_to_fit() -> None:
    with pytest.raises(MeasurementError, match="there are no measurements to fit; give files that hold some"):
        fit_profile(Measurements(), device("cpu"))


# The command.


def test_the_command_writes_a_profile_that_simulates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded, out = tmp_path / "run.jsonl", tmp_path / "box.json"
    write_measurements(recorded, on_a_cpu())
    assert main(["fit", str(recorded), "--device", "box", "--base", "cpu", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["device"], told["profile"]) == ("box", str(out))
    assert {row["what"] for row in told["accuracy"]} >= {"gemm.fp32", "memory_bound.norm", "collective.all_reduce"}
    profile = load_profile(out)
    assert profile.provenance.command == "simpar calibrate fit run.jsonl --device box --base cpu"
    assert profile.provenance.files == {"run": 15}
    result = simulate({"model": "mlp:784-500-10", "cluster": f"{out}:1x2", "plan": {"dp": 2, "global_batch": 64}})
    assert result.step_time_s > 0
    assert main(["fit", str(recorded), "--device", "cpu", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"gemm\.fp32 +all +8 +\d+\.\d%", shown)
    rows = len(load_profile(out).accuracy)
    classes = len({row.what for row in load_profile(out).accuracy})
    assert re.search(
        rf"^{classes} classes, mean errors of [\d.]+% to [\d.]+%.*; --verbose shows all {rows} rows", shown, re.M
    )
    assert main(["fit", str(recorded), "--device", "cpu", "--out", str(out), "--verbose"]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= rows + 2
    assert f"wrote {out}" in shown.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.csv", "--device", "h100"], "cannot read 'none.csv': No such file or directory"),
        (["run.csv", "--device", "h100x"], "unknown device 'h100x'; did you mean 'h100'?"),
        (["run.csv", "--device", "mine", "--base", "h200x"], "unknown device 'h200x'; did you mean 'h200'?"),
        (["run.csv", "--device", "h100"], "run.csv:2: k '?' is no number; give a positive one"),
        (["run.csv"], "Missing option '--device'"),
        (["good.csv", "--device", "h100", "--stack", "gemm"], "--stack 'gemm' is no class with a stack; write it as"),
        (["good.csv", "--device", "h100", "--out", "none/p.json"], "none/p.json: cannot be written (No such file"),
        (["good.csv", "--device", "h100", "--fabric", "ndr40"], "unknown fabric 'ndr40'; did you mean 'ndr400'?"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.csv").write_text("m,n,k,bf16_x_us\n1,2,?,4\n", encoding="utf-8")
    rows = "".join(f"{2**p},4096,4096,{2**p}\n" for p in range(3, 12))
    Path("good.csv").write_text("m,n,k,bf16_x_us\n" + rows, encoding="utf-8")
    assert main(["fit", *words]) == MISTAKE
    shown = capsys.readouterr()
    assert shown.err.startswith(message)
    assert shown.err.count("\n") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["good.csv", "run.csv"]


def test_the_commands_can_be_mounted() -> None:
    parent = typer.Typer()
    register(parent)
    assert [group.name for group in parent.registered_groups] == ["calibrate"]


# The shipped profiles.


@pytest.mark.skipif(not TABLES.is_dir(), reason="the measured tables are not beside the repository")
@pytest.mark.parametrize("name", shipped_profile_names())
def test_the_command_reproduces_the_shipped_profile(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = (files("simpar.hardware") / "catalog" / "profiles" / f"{name}.json").read_text(encoding="utf-8")
    words = shlex.split(json.loads(shipped)["provenance"]["command"])[2:]
    judged = name.startswith("a100")  # the smallest tables; the fits of the others are made without judging them
    if not judged:
        for room in ("gemm.kernel_splits", "attention.kernel_splits", "collectives.collective_splits"):
            monkeypatch.setattr(f"calibrate.fit.{room}", lambda *_: {})
    folders = {"gemm": TABLES / "kernels", "attention": TABLES / "kernels", "one": TABLES / "collectives"}
    paths = [str(folders[word.partition("_")[0]] / word) if word.endswith(".csv") else word for word in words]
    out = tmp_path / "again.json"
    assert main([*paths, "--out", str(out)]) == 0
    ours, theirs = json.loads(out.read_text(encoding="utf-8")), json.loads(shipped)
    for part in ("node_link", "fabric"):  # a fact of a link that the catalog has learned since is no fit
        ours[part] = {key: value for key, value in ours[part].items() if key in theirs[part]}
    for fields in (ours, theirs):  # the rest of a device is the catalog's, which has a file for it
        fields["device"] = {
            key: value for key, value in fields["device"].items() if key in (*FITTED, "sources", "errors")
        }
        for part in ("sources", "errors"):
            stated = fields["device"][part]
            fields["device"][part] = {key: value for key, value in stated.items() if key.partition(".")[0] in FITTED}
    for fields in () if judged else (ours, theirs):
        fields["accuracy"] = [row for row in fields["accuracy"] if row["split"] == "fitted"]
    close(ours, theirs)


def close(ours: Any, theirs: Any, path: str = "") -> None:
    """Equal but for the last digits of numbers, whose sums may run in another order, and for the day and versions."""
    if path.endswith((".provenance.date", ".provenance.versions")):
        return
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key, value in theirs.items():
            close(ours[key], value, f"{path}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), path
        for index, value in enumerate(theirs):
            close(ours[index], value, f"{path}.{index}")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-3 if ".accuracy." in path else 1e-12), path
    else:
        assert ours == theirs, path


@pytest.mark.skipif(not TABLES.is_dir(), reason="the measured tables are not beside the repository")
@pytest.mark.parametrize(("name", "limit"), [("a100-sxm-80gb", 0.075), ("h100-sxm", 0.065), ("b200-sxm", 0.065)])
def test_held_out_errors_of_the_shipped_profiles(name: str, limit: float) -> None:
    path = files("simpar.hardware") / "catalog" / "profiles" / f"{name}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["accuracy"]
    errors = {(row["what"], row["region"], row["split"]): row for row in rows}
    assert errors["gemm.bf16", "training", "stack trtllm"]["mean"] < limit
    assert errors["gemm.bf16", "training", "stack trtllm, level known"]["mean"] < 0.066
    assert errors["collective", "all", "every other size"]["median"] < 0.08


def test_an_old_log_without_its_operation_is_told_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = [2**n for n in range(16, 27)]
    cells = [(size, 10 + size / 200e3) for size in sizes]  # µs at 200 GB/s
    rows = [f"{size} {size // 4} float {t:.2f} {size / t / 1e3:.2f} {size / t / 1e3:.2f} N/A" for size, t in cells]
    head = [
        "# nThread 1 nGpus 8 minBytes 65536 maxBytes 67108864 step: 2(factor) warmup iters: 5 iters: 20 validation: 0",
        "# Using devices",
        *(f"#   Rank {n:2d} Pid 100 on host device {n:2d} [0x{n:02d}] NVIDIA H100 80GB HBM3" for n in range(8)),
        "#                                  out-of-place",
        "#       size         count    type     time   algbw   busbw  error",
        "#        (B)    (elements)             (us)  (GB/s)  (GB/s)",
    ]
    recorded, out = tmp_path / "old.log", tmp_path / "h100.json"
    recorded.write_text("\n".join([*head, *rows]) + "\n", encoding="utf-8")
    words = ["fit", str(recorded), "--device", "h100-sxm", "--out", str(out)]
    assert main(words) == MISTAKE
    assert "does not name its operation; pass --op" in capsys.readouterr().err
    assert main([*words, "--op", "broadcast"]) == 0
    profile = load_profile(out)
    assert {row.what for row in profile.accuracy} >= {"collective.broadcast"}
    assert profile.provenance.command.endswith("--device h100-sxm --op broadcast")
