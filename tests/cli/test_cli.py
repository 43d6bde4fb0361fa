"""The command: what it prints where, its exit codes, and that a user's mistake never ends in a traceback."""

import gzip
import json
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from simpar import __version__
from simpar.cli.app import app
from simpar.cli.terminal import narrowed
from simpar.errors import PlanError
from simpar.hardware.cluster import cluster_presets, fabric_names, node_link_names
from simpar.hardware.device import device_names
from simpar.model.presets import preset_names
from simpar.plan.plan import Plan
from simpar.simulation import simulate
from simpar.units import format_bytes

# By name: as an attribute of the package, `simulate` is the function.
SIMULATE = import_module("simpar.simulation")

SMALL = "model: gpt2\ncluster: h100-sxm:1x8\nplan:\n  zero: 1\n  micro_batch: 4\n"
PIPELINE = {"model": "llama3-8b", "cluster": "h100-sxm:2x8", "plan": {"tp": 1, "pp": 16, "zero": 1, "grad_accum": 16}}


def test_json_is_one_object_and_nothing_else(said: Any) -> None:
    code, out, err = said("simulate", "job.yaml", "--json")
    assert (code, err) == (0, "")
    got = json.loads(out)
    result = simulate({"model": "gpt2", "cluster": "h100-sxm:1x8", "plan": {"zero": 1, "micro_batch": 4}})
    assert got == json.loads(json.dumps(result.to_dict()))
    named = "step_time_s tokens_per_s tokens_per_s_per_gpu mfu hfu bubble_fraction breakdown memory warnings"
    assert set(named.split()) <= set(got)
    assert {"peak_bytes", "capacity_bytes", "fits", "by_category", "by_stage"} <= set(got["memory"])
    assert got["memory"]["fits"] is True


def test_flags_say_the_same_as_a_file(said: Any) -> None:
    file = said("simulate", "job.yaml", "--json")
    flags = said(
        "simulate", "--model", "gpt2", "--cluster", "h100-sxm:1x8", "--zero", "1", "--micro-batch", "4", "--json"
    )
    assert flags == file


def test_every_flag_reaches_the_plan(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []

    def stop(job: Any, **_: Any) -> None:
        jobs.append(job)
        raise PlanError("seen")

    monkeypatch.setattr(SIMULATE, "simulate", stop)
    flags = {
        "tp": "2", "pp": "2", "dp": "4", "dp-shard": "2", "zero": "1", "schedule": "interleaved", "vpp": "2",
        "layer-split": "3,3,3,3", "micro-batch": "2", "global-batch": "32", "grad-accum": "4", "seq-len": "512",
        "recompute": "full", "recompute-layers": "1", "precision": "fp16", "attention": "flash2", "optimizer": "sgd",
        "framework": "torchtitan",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    code, _, err = said("simulate", "-m", "gpt2", "-c", "h100-sxm:2x8", "--sequence-parallel", "--compile", *words)
    assert (code, err) == (2, "command line: plan: seen\n")
    expected = {name.replace("-", "_"): int(value) if value.isdecimal() else value for name, value in flags.items()}
    assert jobs[0].plan == Plan(**{**expected, "layer_split": (3, 3, 3, 3), "sequence_parallel": True, "compile": True})


def test_flags_override_the_file_and_set_overrides_both(said: Any) -> None:
    words = ["simulate", "job.yaml", "--micro-batch", "2", "--zero", "2", "--set", "plan.zero=3", "--json"]
    expected = said("simulate", "-m", "gpt2", "-c", "h100-sxm:1x8", "--zero", "3", "--micro-batch", "2", "--json")
    assert said(*words) == expected
    assert expected.code == 0


def test_sequence_parallel_can_be_switched_off(said: Any) -> None:
    Path("job.yaml").write_text("model: llama3-8b\ncluster: h100:8\nplan: {tp: 8, sequence_parallel: true}\n")
    on, off = said("simulate", "job.yaml", "--json"), said("simulate", "job.yaml", "--no-sequence-parallel", "--json")
    assert (on.code, off.code) == (0, 0)
    assert json.loads(on.out)["memory"]["peak_bytes"] < json.loads(off.out)["memory"]["peak_bytes"]


def test_the_report_is_plain_where_it_is_piped(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    code, out, err = said("simulate", "job.yaml", "--set", "plan.launch_s=0.001")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    assert "…" not in out
    lines = out.splitlines()
    assert lines[0] == "gpt2 on 8 h100-sxm · dp=8 zero=1"
    assert all(line == line.rstrip() for line in lines)
    assert [line for line in lines if line.startswith("warning: launch-bound")]
    parts = "step time|throughput|model FLOP|MFU|HFU|bubble|peak memory|where the time goes|matrix products|optimizer"
    for part in (*parts.split("|"), "waits for dp", "memory at its peak", "weights", "data parallel", "busiest links"):
        assert part in out, part


def test_times_of_the_report_add_up(said: Any) -> None:
    _, out, _ = said("simulate", "job.yaml")
    table = out.partition("where the time goes")[2].partition("\n\n")[0].splitlines()[3:]
    shares = {line[:21].strip(): float(line.split()[-1].removesuffix("%")) for line in table}
    parts = [share for name, share in shares.items() if name != "step" and not name.startswith("hidden")]
    assert len(parts) > 4
    assert sum(parts) == pytest.approx(100, abs=0.05 * len(parts))
    assert shares["step"] == 100


def test_many_stages_are_told_by_three_or_all(said: Any) -> None:
    Path("pipe.yaml").write_text(json.dumps(PIPELINE), encoding="utf-8")
    few, every = said("simulate", "pipe.yaml"), said("simulate", "pipe.yaml", "--stages")
    assert (few.code, every.code) == (0, 0)
    assert "(16 stages)" in few.out
    assert all(word in few.out for word in ("first", "slowest", "last", "fullest", "mean"))
    heads = [line.split()[1:] for line in every.out.splitlines() if line.startswith("stage ")]
    numbers = [word for head in heads for word in head if word.isdecimal()]
    assert numbers == [str(stage) for stage in range(16)] * 2


def test_files_are_written_and_named_on_stderr(said: Any) -> None:
    files = ["--timeline", "t.html", "--trace", "t.json.gz", "--csv", "t.csv"]
    code, out, err = said("simulate", "job.yaml", "--json", "--kernels", *files)
    assert code == 0
    assert json.loads(out)["gpus"] == 8
    assert err == "wrote t.html\nwrote t.json.gz\nwrote t.csv\n"
    assert "gpt2 on 8 h100-sxm" in Path("t.html").read_text(encoding="utf-8")
    with gzip.open("t.json.gz") as file:
        assert any(event["ph"] == "X" for event in json.load(file)["traceEvents"])
    assert "kernel" in {line.partition(",")[0] for line in Path("t.csv").read_text(encoding="utf-8").splitlines()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--timeline nowhere/x.html",
            "--timeline: cannot write 'nowhere/x.html': there is no folder 'nowhere'; create it",
        ),
        ("--trace .", "--trace: cannot write '.': it is a folder; add a file name"),
        ("--csv /dev/null", "--csv: cannot write '/dev/null': it is not a regular file; choose another name"),
        ("--csv job.yaml", "--csv: cannot write 'job.yaml': it is the job file already; choose another name"),
        ("--csv a --trace a", "--csv: cannot write 'a': it is the file of --trace already; choose another name"),
    ],
)
def test_outputs_are_checked_before_the_work(
    said: Any, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    monkeypatch.setattr(SIMULATE, "simulate", lambda *_, **__: pytest.fail("simulated in vain"))
    code, out, err = said("simulate", "job.yaml", *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert Path("job.yaml").read_text(encoding="utf-8") == SMALL


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("job.yaml --tp 3", "command line: plan.tp: 3 × pp 1 = 3 does not divide the cluster's 8 GPUs; "),
        ("job.yaml --tp eight", "command line: plan.tp: 'eight' should be a whole number"),
        ("job.yaml --zero 4", "command line: plan.zero: 4 should be 0, 1, 2 or 3"),
        ("job.yaml --layer-split 3,x", "command line: plan.layer_split.1: 'x' should be a whole number"),
        ("job.yaml --set plan.tpp=1", "command line: plan.tpp: unknown key; did you mean 'tp'?"),
        ("job.yaml --set tp=1", "--set 'tp=1': 'tp' is not a section of a job; did you mean 'plan.tp'?"),
        ("job.yaml --set plan.tp", "--set 'plan.tp': is not a field and its value; write it as in --set plan.tp=4"),
        ("job.yaml --model gpt3", "command line: model: unknown model 'gpt3'; did you mean "),
        ("no.yaml", "no.yaml: there is no such file; give the path of a job file in YAML"),
        (".", ".: is a folder, not a job file; name a YAML file in it"),
        ("", "simpar simulate: give a job file, or --model and --cluster; see simpar simulate --help"),
        ("--tp 3", "command line: model and cluster: missing; "),
        ("job.yaml --bogus", "simpar: No such option: --bogus"),
        ("job.yaml --tp", "simpar: Option '--tp' requires an argument."),
    ],
)
def test_a_mistake_is_one_line_on_stderr(said: Any, words: str, message: str) -> None:
    code, out, err = said("simulate", *words.split())
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_a_plan_that_fails_late_still_names_its_file(said: Any) -> None:
    Path("late.yaml").write_text("model: gpt2\ncluster: h100:2x8\nplan: {pp: 16}\n", encoding="utf-8")
    code, _, err = said("simulate", "late.yaml")
    assert code == 2
    assert err.startswith("late.yaml: plan: 16 stages are more than the 12 layers")


def test_a_job_that_does_not_fit_says_what_would(said: Any) -> None:
    Path("big.yaml").write_text("model: llama3-8b\ncluster: h100:8\n", encoding="utf-8")
    code, out, err = said("simulate", "big.yaml", "--json")
    assert (code, out) == (1, "")
    assert err.startswith("big.yaml: stage 0 needs ")
    assert err.count("\n") == 1
    offered = re.search(r"; what would fit: (.*), or simulate it anyway with --allow-oom$", err)
    assert offered, err
    for offer in offered.group(1).split("; "):
        flags, _, need = offer.partition(" (")
        assert flags.startswith("--set plan.")
        code, out, _ = said("simulate", "big.yaml", *flags.split(), "--json")
        assert code == 0
        assert format_bytes(json.loads(out)["memory"]["peak_bytes"]) == need.removesuffix(")").removesuffix(", tight")


def test_a_job_that_does_not_fit_can_be_simulated(said: Any) -> None:
    code, out, _ = said("simulate", "-m", "llama3-8b", "-c", "h100:8", "--allow-oom", "--json")
    assert code == 0
    assert json.loads(out)["memory"]["fits"] is False
    assert any(warning.startswith("does not fit") for warning in json.loads(out)["warnings"])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ("model.layers=1000000000000000000000", 2),
        ("model.hidden=768000000000000000", 1),
        ("plan.seq_len=1024", 0),
        ("plan.global_batch=8000000000000000000", 2),
        ("cluster.nodes=1000000000000000000000000", 2),
        ("plan.bucket_parameters=1000000000000000000", 0),
        ("plan.bucket_parameters=1000000000000000000000000", 2),
    ],
)
@pytest.mark.parametrize("anyway", [False, True])
def test_absurd_sizes_end_in_a_sentence(said: Any, change: str, code: int, anyway: bool) -> None:
    got = said("simulate", "job.yaml", "--set", change, *(["--allow-oom"] if anyway else []))
    assert got.code == (2 if anyway and code else code)
    assert got.err.count("\n") == (1 if code else 0)
    assert "Traceback" not in got.err


def test_an_interruption_has_its_code(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SIMULATE, "simulate", interrupted)
    code, out, err = said("simulate", "job.yaml")
    assert (code, out, err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("slip", [AssertionError, AttributeError, KeyError, NameError, TypeError, ValueError])
def test_a_slip_of_ours_has_the_code_of_a_mistake_and_asks_for_a_report(
    said: Any, monkeypatch: pytest.MonkeyPatch, slip: type[Exception]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise slip("something")

    monkeypatch.setattr(SIMULATE, "simulate", broken)
    code, out, err = said("simulate", "job.yaml")
    assert (code, out) == (2, "")  # 1, that of a traceback, says that a job does not fit
    assert err.startswith(f"simpar: {slip.__name__}: ")
    assert err.count("\n") == 1


def _commands_of_the_readme() -> list[str]:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    parts = [part for line in "".join(blocks).splitlines() for part in re.split(r"&&|\||;|\s#\s", line)]
    return [part.strip() for part in parts if part.strip().startswith("simpar ")]


@pytest.mark.parametrize("line", _commands_of_the_readme())
def test_the_readme_s_commands_have_the_options_that_they_need(line: str) -> None:
    name, *words = shlex.split(line)[1:]
    if name == "calibrate":  # has a command of its own
        return
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    command.make_context(name, words)  # raises a usage error


def test_the_readme_has_commands() -> None:
    assert len(_commands_of_the_readme()) > 15


def test_version(said: Any) -> None:
    assert said("--version") == (0, f"simpar {__version__}\n", "")


def test_no_command_shows_the_help(said: Any) -> None:
    code, out, _ = said()
    assert code == 0
    assert all(command in out for command in ("simulate", "models", "clusters", "schema"))


def test_help_names_what_its_flags_take(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = said("simulate", "--help")
    assert code == 0
    for field in ("schedule", "recompute", "precision", "attention", "optimizer"):
        annotation = Plan.model_fields[field].annotation
        options = [choice for part in get_args(annotation) for choice in (get_args(part) or (part,))]
        for choice in options:
            assert not isinstance(choice, str) or choice in out, f"{field}: {choice}"
    assert all(section in out for section in ("llama3-70b", "h100-sxm:64x8", "base:"))


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_terminals_that_claim_to_be_narrow_get_whole_words(
    said: Any, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = said("--help")
    assert code == 0
    assert "Predicts how long a training step of a" in out
    monkeypatch.setenv("COLUMNS", columns)
    assert "parameters" in said("models").out


def test_models_and_clusters_list_every_name(said: Any) -> None:
    models, clusters = said("models"), said("clusters")
    assert (models.code, clusters.code, models.err, clusters.err) == (0, 0, "", "")
    named = {line.split()[0] for line in models.out.splitlines() if line}
    assert set(preset_names()) <= named
    named = {line.split()[0] for line in clusters.out.splitlines() if line}
    assert {*device_names(), *node_link_names(), *fabric_names(), *cluster_presets()} <= named


def test_schema_is_printed_as_json(said: Any) -> None:
    code, out, err = said("schema")
    assert (code, err) == (0, "")
    assert json.loads(out)["$defs"]["Plan"]["properties"]["tp"]["description"]


def test_the_process(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(SMALL.replace("zero: 1", "zero: one"), encoding="utf-8")
    command = [sys.executable, "-m", "simpar", "simulate", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{path}: plan.zero: 'one' should be 0, 1, 2 or 3\n"


def test_a_reader_that_stops_is_no_error() -> None:
    command = f"'{sys.executable}' -m simpar schema | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "simpar", "schema"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "simpar: cannot write the output: No space left on device\n")


def test_the_version_needs_nothing_heavy() -> None:
    heavy = "{'numpy', 'simpy', 'networkx', 'plotly', 'torch', 'yaml', 'rich.table'}"
    code = f"import sys; from simpar.cli import main; main(['--version']); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"simpar {__version__}\n[]\n"


def test_control_c_stops_the_process() -> None:
    script = (
        "import os, signal, threading\n"
        "from simpar.cli import main\n"
        "import simpar.simulation\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "words = '-m gpt2 -c h100:8 --pp 8 --global-batch 120000 --allow-oom'.split()\n"
        "raise SystemExit(main(['simulate', *words]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr


# ---- terminals of any width -----------------------------------------------------------------------------------------


def test_columns_that_do_not_fit_are_left_out_the_least_important_first() -> None:
    rows = [{"a name": "some words here", "x": "1.00 s", "y": "2.00 s", "z": "3.00 s"}]
    heads = list(rows[0])

    def shown(width: int) -> list[str]:
        return narrowed(rows, heads, ("y", "x"), width, wraps={"a name": 8})

    assert shown(8 + 3 * 6 + 4 * 3) == heads
    assert shown(8 + 3 * 6 + 4 * 3 - 1) == ["a name", "x", "z"]
    assert shown(10) == ["a name", "z"]  # what is important stays, however narrow


def test_the_report_has_words_for_the_communication_of_experts(said: Any) -> None:
    plan = "{tp: 2, ep: 4, etp: 2, zero: 1, sequence_parallel: true, grad_accum: 2}"
    Path("moe.yaml").write_text(f"model: qwen1.5-moe-a2.7b\ncluster: h100-sxm:1x8\nplan: {plan}\n", encoding="utf-8")
    out = said("simulate", "moe.yaml").out
    labels = [line.split("  ")[0] for line in out.splitlines()]
    assert {"waits for experts", "waits for experts' tp", "tensor parallel, experts"} <= set(labels)
    assert not {"waits for etp", "waits for ep", "waits for dp_experts", "dp_experts", "etp"} & set(labels)
    assert "capacity, GB/s" in out


@pytest.mark.parametrize("command", ["explain", "view"])
def test_a_job_in_flags_is_that_of_a_file(said: Any, command: str) -> None:
    flags = ("-m", "gpt2", "-c", "h100-sxm:1x8", "--framework", "torchtitan")
    outputs = [
        said(command, *words, "--set", "plan.zero=1", "--set", "plan.micro_batch=4", *extra)
        for words, extra in (
            (("job.yaml", "--framework", "torchtitan"), ("--html", "a.html")),
            (flags, ("--html", "b.html")),
        )
    ]
    assert [each.code for each in outputs] == [0, 0]
    assert Path("a.html").read_bytes() == Path("b.html").read_bytes()
    assert outputs[0].out == outputs[1].out
    assert said(command).err.startswith(f"simpar {command}: give a job file, or --model and --cluster")


def test_a_field_that_is_cut_short_is_recognised(said: Any) -> None:
    err = said("simulate", "job.yaml", "--set", "cluster.price=2").err
    assert "did you mean 'price_per_gpu_hour'?" in err
