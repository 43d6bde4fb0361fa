"""The command on this machine: two gloo ranks measure a small plan, are interrupted, go on, and a profile comes out."""

import json
import os
import signal
import sys
import time
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from multiprocessing import active_children

import pytest

import simpar
from calibrate import cli
from calibrate.detect import Machine
from calibrate.errors import MeasurementError
from calibrate.measure import command, runner, session
from calibrate.measure.checks import check_ranks
from calibrate.measure.plan import KernelItem, LaunchItem, Limits, MeasurementPlan, UpdateItem, make_plan
from calibrate.measure.runner import Options, run
from calibrate.rounds import DOUBTFUL, doubt
from calibrate.tables import read_measurements
from simpar.hardware.profile import load_profile
from simpar.model.work import Gemm, MemoryBound

torch = pytest.importorskip("torch")

TINY = Limits(4e6, 70_000)


def tiny_plan(rounds: int):
    """The real plan with kernels of microseconds."""

    def plan(*arguments, **options) -> MeasurementPlan:
        found = make_plan(*arguments, **options)
        small = {item: UpdateItem(1000) for item in found.items if isinstance(item, UpdateItem)}
        return replace(found, rounds=rounds, items=tuple(small.get(item, item) for item in found.items))

    return plan


@pytest.fixture
def tiny(monkeypatch):
    def choose(rounds: int) -> None:
        monkeypatch.setattr(runner, "make_plan", tiny_plan(rounds))

    monkeypatch.setattr(runner, "_limits", lambda *arguments, **options: TINY)
    return choose


def interrupting(options: Options, progress: runner.Progress) -> runner.Outcome | None:
    """A run at which somebody presses Ctrl-C after a dozen measurements: all its processes get the signal."""

    def press(done: int, total: int, text: str) -> None:
        progress(done, total, text)
        if done >= 12:
            for child in active_children():
                assert child.pid is not None
                os.kill(child.pid, signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    return run(options, press)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """An interrupted run: its folder, exit code, and what it said."""
    folder = tmp_path_factory.mktemp("interrupted")
    said = StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said):
        patch.setattr(runner, "_limits", lambda *arguments, **options: TINY)
        patch.setattr(runner, "make_plan", tiny_plan(100_000))
        patch.setattr(command, "run", interrupting)
        code = cli.main(["run", "--ranks", "2", "--on", "cpu", "--out", str(folder / "p.json")])
    assert not active_children()
    return folder, code, said.getvalue()


def test_an_interruption_keeps_what_was_measured_and_says_how_to_go_on(interrupted):
    folder, code, err = interrupted
    kept = read_measurements(folder / "p.measurements.jsonl")
    count = sum(map(len, (kept.kernels, kept.collectives, kept.launch_s, kept.interference, kept.updates)))
    assert code == 130, err
    kept_in = f"{count} measurements are kept in {folder / 'p.measurements.jsonl'}; go on with --resume"
    assert err.splitlines() == [f"interrupted; {kept_in}"]
    assert count >= 12
    assert not (folder / "p.json").exists()


def test_resume_goes_on_and_a_profile_comes_out(interrupted, tiny):
    folder = interrupted[0]
    raw, out = folder / "p.measurements.jsonl", folder / "p.json"
    before = raw.read_text()
    tiny(1)  # every item has a round already, unless the interruption came first
    outcome = run(Options(out=out, ranks=2, on="cpu", resume=True))
    assert outcome is not None
    assert raw.read_text().startswith(before)
    profile = load_profile(out)
    assert profile == outcome.profile
    device = profile.device
    assert device.fit_from is None
    assert 0 < device.compute_rate_during_collectives <= 1
    assert device.sources["compute_rate_during_collectives"].startswith("median of 1 rounds of products beside all-r")
    assert profile.node_link is not None
    assert profile.node_link.kind == "host"
    measured = {"device.gemm.fp32.peak_efficiency", "device.launch_s", "node_link.bandwidth_bytes_per_s"}
    assert measured <= profile.uncertainty.keys()
    assert {"gemm.fp32", "collective.all_reduce"} <= {row.what for row in profile.accuracy}
    facts = profile.provenance.facts
    assert (facts["ranks"], facts["back end"]) == ("2", "gloo")
    assert profile.provenance.versions["torch"] == torch.__version__
    assert any("AdamW step over 1,000 parameters" in note for note in profile.notes)

    again = folder / "again.json"
    assert cli.main(["fit", str(raw), "--device", "cpu", "--out", str(again)]) == 0
    assert load_profile(again).device == device  # with the measured peak, the settled rounds and the interference
    assert load_profile(again).node_link == profile.node_link

    job = {"model": "mlp:784-500-10", "cluster": f"{out}:1x2", "plan": {"micro_batch": 64, "precision": "fp32"}}
    assert 1e-5 < simpar.simulate(job).step_time_s < 1.0


@pytest.fixture
def in_this_process(monkeypatch):
    """One rank measures here: what a process of its own would do, without waiting for another torch."""

    def measure(assignment: session.Assignment, ranks: int, tell: session.Tell) -> None:
        assert ranks == 1
        threads, interval = torch.get_num_threads(), sys.getswitchinterval()
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            session.take_part(assignment, 0, index=0, count=1, tell=tell)
        finally:
            torch.distributed.destroy_process_group()
            torch.set_num_threads(threads)
            sys.setswitchinterval(interval)

    monkeypatch.setattr(runner, "measure_here", measure)


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("again_s", "most"), [(60.0, 5), (-60.0, 0)])
def test_a_class_is_measured_again_until_its_rounds_agree_while_there_is_time(monkeypatch, again_s, most):
    calm, wild = KernelItem(Gemm(8, 8, 8, "fp32")), KernelItem(MemoryBound(4096))
    values = iter([1.0, 2.0, 4.0, *[2.0] * 20])
    told: list[session.Measured] = []

    def timed(item, *rest):
        return next(values) if item == wild else 1.0

    monkeypatch.setattr(session, "_measure", timed)
    plan = MeasurementPlan(items=(calm, wild, LaunchItem()), rounds=3, again_s=again_s)
    assignment = session.Assignment(plan=plan, done={}, cuda=False, until=time.time())
    runner.measure_here(assignment, 1, told.append)
    times = [event.value for event in told if event.item == wild]
    assert [event.item for event in told[:3]] == [calm, wild, LaunchItem()]
    assert sum(event.item == calm for event in told) == 3
    assert 3 <= len(times) <= 3 + most
    assert (doubt([times]) <= DOUBTFUL) == (again_s > 0)
    assert again_s < 0 or doubt([times[:-1]]) > DOUBTFUL  # not once more than it takes


@pytest.mark.usefixtures("in_this_process")
def test_one_rank_says_what_it_could_not_measure_and_keeps_priors(tmp_path, tiny, capsys):
    tiny(1)
    job = tmp_path / "job.yaml"
    job.write_text("model: mlp:64-32-8\ncluster: cpu:1x1\nplan: {micro_batch: 16, precision: fp32, optimizer: sgd}\n")
    out = tmp_path / "alone.json"
    code = cli.main(["run", "--ranks", "1", "--on", "cpu", "--out", str(out), "--job", str(job), "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    # seven products of the tiny grid and five of the job
    assert said.err.startswith("measured 12 gemm, 4 grouped_gemm, 1 attention, ")
    outcome = json.loads(said.out)
    assert outcome["measurements"] == str(tmp_path / "alone.measurements.jsonl")
    profile = load_profile(out)
    assert profile.provenance.command == "simpar calibrate run --job job.yaml --on cpu --ranks 1"
    assert profile.uncertainty["node_link.bandwidth_bytes_per_s"] >= 0.3
    assert "one rank has nobody to communicate with: collectives and their interference were not measured" in (
        profile.notes
    )
    row = next(row for row in profile.accuracy if row.what == "gemm.job")
    assert row.count == 5


def refused(capsys, *words: str) -> str:
    """What the command says, in one line, and that it took it for the user's mistake."""
    assert cli.main(["run", "--on", "cpu", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    return said.err.strip()


def test_files_that_are_in_the_way_are_left_alone(tmp_path, capsys, monkeypatch):
    out, raw = tmp_path / "p.json", tmp_path / "p.measurements.jsonl"

    def says(*words: str) -> str:
        return refused(capsys, "--out", str(out), *words)

    assert says("--resume") == f"--resume: there is no '{raw}' to go on with; leave --resume out"
    out.write_text('{"my": "notes"}')
    assert says() == f"--out: cannot write '{out}': it exists and is no profile of simpar; choose another name"
    assert out.read_text() == '{"my": "notes"}'
    out.unlink()
    raw.write_text("a,b\n1,2\n")
    assert says() == (
        f"--out: cannot write '{out}': '{raw}' beside it exists and holds no measurements of simpar; "
        "choose another name"
    )
    raw.write_text('{"format": "simpar measurements", "schema_version": 1, "provenance": {}}\n')
    assert says() == (f"'{raw}' holds the measurements of a run that did not finish; go on with --resume, or delete it")
    assert says("--resume").startswith("p.measurements.jsonl was measured with host none, but here it is ")
    raw.unlink()
    gone = tmp_path / "nowhere" / "p.json"
    assert refused(capsys, "--out", str(gone)) == (
        f"--out: cannot write '{gone}': there is no folder '{gone.parent}'; create it first"
    )
    assert refused(capsys, "--out", str(tmp_path)) == (
        f"--out: cannot write '{tmp_path}': it is a folder; add a file name"
    )
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert says() == (
        f"--out: cannot write '{out}': there is no permission to write into '{tmp_path}'; choose another place"
    )
    assert list(tmp_path.iterdir()) == []


def test_what_this_machine_cannot_do_is_one_sentence(tmp_path, capsys, monkeypatch):
    out = ("--out", str(tmp_path / "p.json"))
    assert "ranks are too many for" in refused(capsys, *out, "--ranks", "100000")
    assert (
        refused(capsys, *out, "--on", "gpu")
        == "--on 'gpu' is unknown; did you mean 'cpu'?; choose one of auto, cpu, cuda"
    )
    assert "nothing.yaml" in refused(capsys, *out, "--job", str(tmp_path / "nothing.yaml"))
    if not torch.cuda.is_available():
        assert refused(capsys, *out, "--on", "cuda", "--ranks", "2").startswith(
            "2 ranks need 2 GPUs, but torch sees 0 here; use --ranks 1, or measure the CPU with --on cpu"
        )
    monkeypatch.setitem(sys.modules, "torch", None)
    assert refused(capsys, *out).startswith("measuring needs torch, which is not installed; install it with: pip")
    assert list(tmp_path.iterdir()) == []


def test_gpus_need_nccl_to_talk():
    from calibrate.detect import Gpu  # noqa: PLC0415

    machine = Machine(host="", cpu="", cores=4, gpus=(Gpu("NVIDIA H100 80GB HBM3", 1, 132),) * 2)
    with pytest.raises(MeasurementError, match=r"^2 GPUs communicate through NCCL, which this torch lacks; install"):
        check_ranks(machine, 2, cuda=True, nccl=False)
    check_ranks(machine, 1, cuda=True, nccl=False)
    check_ranks(machine, 2, cuda=True, nccl=True)
    with pytest.raises(MeasurementError, match=r"^3 ranks need 3 GPUs, but torch sees 2 here; use --ranks 2"):
        check_ranks(machine, 3, cuda=True, nccl=True)


class Unwritable(runner.Assignment):
    """An assignment that kills the process that receives it."""

    def __reduce__(self):
        return os._exit, (3,)


def test_a_process_that_dies_is_told_of():
    from calibrate.measure.spawn import measure_here  # noqa: PLC0415

    assignment = Unwritable(plan=MeasurementPlan(items=(), rounds=1), done={}, cuda=False)
    with pytest.raises(MeasurementError, match=r"^the process of rank 0 ended with code 3; look at its output"):
        measure_here(assignment, 1, lambda event: None)
