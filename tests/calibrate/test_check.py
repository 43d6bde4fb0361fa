"""The check against a machine whose speed is known: a slower cluster, simulated, stands for the real devices."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import simpar
from calibrate.check import CheckError, case_of, cases, check, check_cases, command, run
from calibrate.check.cases import PLANS, chosen, cluster_of, perceptron_of, plan_of
from calibrate.check.pulse import Level, at_level, level, pulse
from calibrate.check.report import differences, summary, tables, to_dict
from calibrate.check.run import Outcome, Row, program_of
from calibrate.cli import app, main
from calibrate.detect import Machine
from calibrate.training.recipe import Gpt, Perceptron, Recipe
from simpar.cost.kernel import kernel_s
from simpar.engine.simulate import execute
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import device
from simpar.hardware.profile import Profile, Provenance
from simpar.model.work import Gemm, MemoryBound
from simpar.program.ir import Program

HERE = Machine(host="abc", cpu="Some CPU", cores=2)
ERRORS = {"gemm.fp32": 0.06745, "memory_bound": 0.06745, "level": 0.05}


@pytest.fixture
def profile() -> Profile:
    """The catalog's CPU, with errors of its own and no launches that would bound a step."""
    measured = device("cpu").replace(errors=ERRORS, fit_from=None, machine="abc", launch_s=0.0, sms=1)
    return Profile(
        name="here",
        device=measured,
        node_link=Cluster.model_validate({"device": measured, "gpus_per_node": 2}).node_link,
        provenance=Provenance(host="abc"),
    )


class FakeWorkers:
    """Stands for the processes; :func:`slow_machine` does their work."""

    def __init__(self, size: int, *, timeout_s: float) -> None:
        self.size = size

    def __enter__(self) -> "FakeWorkers":
        return self

    def __exit__(self, *exception: object) -> None:
        return None


class FakeTrainers(FakeWorkers):
    """A training step takes a tenth longer than a second."""

    def run(self, recipe: Recipe, *, steps: int) -> SimpleNamespace:
        return SimpleNamespace(step_s=tuple(1.1 + 0.1 * (i % 2) for i in range(steps)))


@pytest.fixture
def slow_machine(monkeypatch: pytest.MonkeyPatch, profile: Profile) -> Level:
    """Kernels take twice, communication three times what the profile says."""
    slow = Level(compute=2.0, communication=3.0)

    def replay_all(program: Program, *, repeats: int, **options: Any) -> list[Any]:
        cluster = at_level(cluster_of(profile, len(program.ranks)), slow)
        return [execute(program, cluster) for _ in range(repeats)]

    monkeypatch.setattr(run, "Workers", FakeWorkers)
    monkeypatch.setattr(run, "Trainers", FakeTrainers)
    monkeypatch.setattr(run, "replay_all", replay_all)
    return slow


# ---- what is checked ----------------------------------------------------------------------------------------------


def test_cases_are_the_same_job_as_the_recipe(profile: Profile) -> None:
    for case in cases(PLANS, 4, profile):
        recipe, layout = case.recipe, simpar.simulate(simpar.Job.model_validate(run_job(case, profile))).layout
        assert layout.global_batch == recipe.batch * recipe.replicas
        assert layout.microbatches == recipe.microbatches
        assert (layout.dp, case.plan.pp) == (recipe.replicas, recipe.stages)
        program, _ = program_of(case, profile)
        assert len(program.ranks) == recipe.ranks
    names = [case.name for case in cases(PLANS, 4, profile)]
    assert len(names) == len(set(names))
    assert {name.split(" ")[0] for name in names} == set(PLANS)


def run_job(case: Any, profile: Profile) -> dict[str, Any]:
    return {"model": case.model, "cluster": cluster_of(profile, case.recipe.ranks), "plan": case.plan}


def test_parameters_are_those_of_the_real_networks() -> None:
    torch = pytest.importorskip("torch", reason="counts the parameters of torch modules")
    from calibrate.training.models import layers  # noqa: PLC0415 - imports torch

    for network in (Perceptron((784, 500, 10)), Gpt(layers=2, hidden=64, heads=4, vocab=96, seq_len=16)):
        recipe = Recipe(network=network, strategy="one", ranks=1, micro_batch=2)
        real = sum(p.numel() for layer in layers(recipe, torch.device("cpu")) for p in layer.parameters())
        model = case_of(recipe).model
        assert model.parameters == real


def test_large_perceptron_takes_about_as_long_as_asked(profile: Profile) -> None:
    for wanted in (0.02, 0.1):
        network, batch = perceptron_of(profile, wanted)
        recipe = Recipe(network=network, strategy="one", ranks=1, micro_batch=batch)
        found = simpar.simulate(simpar.Job.model_validate(run_job(case_of(recipe), profile)), allow_oom=True)
        # widths double, and the step grows with their cube
        assert wanted / 3.2 < found.step_time_s < wanted * 3.2


def test_quick_checks_fewer_networks(profile: Profile) -> None:
    names = [case.name for case in cases(("one", "dp", "tp", "1f1b"), 2, profile, quick=True)]
    assert len(names) == 5
    assert sum(name.startswith("dp") for name in names) == 2
    assert len(cases(("one", "dp", "tp", "1f1b"), 2, profile)) == 9


def test_plans_overlap_what_the_libraries_do() -> None:
    network = Perceptron((64, 64, 64))
    plans = {s: plan_of(Recipe(network=network, strategy=s, ranks=2, micro_batch=4)) for s in ("dp", "zero1", "fsdp")}
    assert [plan.overlap.param_gather for plan in plans.values()] == [False, False, True]
    assert all(plan.overlap.grad_reduce for plan in plans.values())
    assert plans["dp"].bucket_parameters == 25 * 2**20 // 4


def test_plans_that_the_ranks_cannot_hold() -> None:
    assert chosen(None, 1) == (("one",), tuple(n for n in chosen(None, 1)[1]))
    plans, notes = chosen(None, 2)
    assert plans == PLANS[:-1]
    assert notes == ("dp-pp was left out: it needs at least 4 ranks",)
    assert chosen(["fsdp", "dp", "fsdp"], 2)[0] == ("fsdp", "dp")
    with pytest.raises(CheckError, match="unknown plan 'fspd'; did you mean 'fsdp'\\?; choose of one, dp"):
        chosen(["fspd"], 2)
    with pytest.raises(
        CheckError, match="plan 'dp-pp' needs at least 4 ranks and an even number of them, not 2; raise"
    ):
        chosen(["dp-pp"], 2)
    with pytest.raises(CheckError, match="0 ranks can hold no plan"):
        chosen(None, 0)


# ---- level of the minute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compute", "communication"), [(1.0, 1.0), (2.0, 1.0), (1.0, 4.0), (0.5, 3.0)])
def test_level_of_a_machine_of_known_speed(profile: Profile, compute: float, communication: float) -> None:
    network, batch = perceptron_of(profile, 0.02)
    program = pulse(network, batch, 2, "fp32", launch_s=0.0)
    cluster = cluster_of(profile, 2)
    real = at_level(cluster, Level(compute=compute, communication=communication))
    found = level(execute(program, cluster), [execute(program, real)] * 3)
    assert found.compute == pytest.approx(compute, rel=1e-4)
    assert found.communication == pytest.approx(communication, rel=1e-4)


def test_interference_of_a_machine_of_known_rate(profile: Profile) -> None:
    network, batch = perceptron_of(profile, 0.02)
    program = pulse(network, batch, 2, "fp32", launch_s=0.0)
    cluster = cluster_of(profile, 2)

    def lost(rate: float) -> float:
        changed = cluster.replace(device=profile.device.replace(compute_rate_during_collectives=rate))
        found = level(execute(program, cluster), [execute(program, changed)])
        assert found.compute == pytest.approx(1.0, rel=1e-6)
        assert found.communication == pytest.approx(1.0, rel=1e-6)
        assert found.compute_beside is not None
        return 1 - found.compute_beside

    # a collective takes of compute's speed in proportion to one less the rate, and to what it moves
    assert lost(1.0) == pytest.approx(0.0, abs=1e-6)
    assert lost(0.5) > 0.1
    assert lost(0.25) == pytest.approx(1.5 * lost(0.5), rel=1e-3)


def test_a_slower_collective_beside_compute_is_seen(profile: Profile) -> None:
    network, batch = perceptron_of(profile, 0.02)
    program = pulse(network, batch, 2, "fp32", launch_s=0.0)
    cluster = cluster_of(profile, 2)
    changed = cluster.replace(device=profile.device.replace(collective_rate_during_compute=0.5))
    found = level(execute(program, cluster), [execute(program, changed)])
    assert found.communication_beside is not None
    assert 0.5 - 1e-3 < found.communication_beside < 0.75  # its latency is not slowed
    assert found.communication == pytest.approx(1.0, rel=1e-6)


def test_one_rank_has_no_communication(profile: Profile) -> None:
    network, batch = perceptron_of(profile, 0.02)
    program = pulse(network, batch, 1, "fp32", launch_s=0.0)
    trace = execute(program, cluster_of(profile, 1))
    assert level(trace, [trace]) == Level(compute=1.0)


def test_kernels_at_a_level_take_that_much_longer(profile: Profile) -> None:
    cluster = cluster_of(profile, 2)
    slow = at_level(cluster, Level(compute=3.0))
    for kernel in (Gemm(64, 500, 784, "fp32", out_bytes=4), MemoryBound(10**6), MemoryBound(100, "norm")):
        assert kernel_s(kernel, slow.device) == pytest.approx(3 * kernel_s(kernel, cluster.device))


# ---- the check ----------------------------------------------------------------------------------------------------


@pytest.fixture
def outcome(slow_machine: Level, profile: Profile) -> Outcome:
    return check(profile, plans=["one", "dp", "tp"], quick=True, rounds=2, machine=HERE)


def test_predictions_at_the_level_meet_a_machine_that_is_only_slower(outcome: Outcome) -> None:
    replays = outcome.of("replay")
    assert len(replays) == len(outcome.of("training")) == 4
    for row in replays:
        assert row.error_at_level == pytest.approx(0.0, abs=0.02)
        assert -0.68 < row.error < -0.45
        assert row.lowest_s == row.measured_s == row.rounds_s[0]
        assert row.low_s < row.predicted_s < row.high_s
    assert replays[0].error == pytest.approx(-0.5, abs=1e-3)  # one device only computes
    for row in outcome.of("training"):
        assert (row.measured_s, row.lowest_s) == pytest.approx((1.1, 1.1))
    assert outcome.median_error("replay") == pytest.approx(float(np.median([abs(r.error) for r in replays])))
    assert outcome.notes == ()
    now = outcome.level()
    assert now.compute == pytest.approx(2.0, rel=1e-3)
    assert outcome.levels["dp · mlp 784-500-10"].communication == pytest.approx(3.0, rel=1e-3)


def test_intervals_are_those_of_any_prediction(outcome: Outcome, profile: Profile) -> None:
    listed = cases(("one", "dp", "tp"), 2, profile, quick=True)
    for case, replayed, trained in zip(listed, outcome.of("replay"), outcome.of("training"), strict=True):
        result = simpar.simulate(simpar.Job.model_validate(run_job(case, profile)), allow_oom=True)
        assert result.step_time_s == replayed.predicted_s
        assert (trained.low_s, trained.high_s) == result.step_time_interval(0.9)
        assert (replayed.low_s, replayed.high_s) == result.uncertainty.interval(0.9)


def test_coverage_counts_rows_inside(profile: Profile) -> None:
    def row(kind: Any, measured: float) -> Row:
        return Row(
            kind=kind, plan="dp", network="x", ranks=2, predicted_s=1.0, low_s=0.8, high_s=1.25, rounds_s=(measured,),
            at_level_s=(1.0,),
        )  # fmt: skip

    rows = (row("replay", 0.8), row("replay", 1.3), row("replay", 1.0), row("training", 0.7))
    found = Outcome(profile=profile, machine=HERE, rows=rows)
    assert found.coverage() == 0.5
    assert found.coverage("replay") == pytest.approx(2 / 3)
    assert found.coverage("training") == 0.0
    assert found.median_error("replay") == pytest.approx(0.3 / 1.3)
    uneven = Row(
        kind="replay", plan="dp", network="x", ranks=2, predicted_s=1.0, low_s=0.8, high_s=1.25,
        rounds_s=(1.0, 2.0, 4.0), at_level_s=(1.1, 2.2, 1.0),
    )  # fmt: skip
    assert (uneven.measured_s, uneven.lowest_s) == (2.0, 1.0)
    assert uneven.error_at_level == pytest.approx(0.1)  # each round against its own minute
    empty = Outcome(profile=profile, machine=HERE, rows=())
    assert (empty.coverage(), empty.median_error("replay")) == (None, None)


def test_json_and_table_say_the_same(outcome: Outcome) -> None:
    found = json.loads(json.dumps(to_dict(outcome)))
    assert {"median_error", "rows"} <= found["replay"].keys() & found["training"].keys()
    assert len(found["replay"]["rows"]) == 4
    first = found["replay"]["rows"][0]
    assert first["error"] == pytest.approx(first["predicted_s"] / first["measured_s"] - 1)
    assert found["coverage"] == outcome.coverage()
    assert found["level"]["compute"] == pytest.approx(2.0, rel=1e-3)
    replayed, trained = tables(outcome)[:2]
    assert (replayed.row_count, trained.row_count) == (4, 4)  # type: ignore[union-attr]
    lines = "\n".join(summary(outcome))
    assert "kernels took 2.00 and communication" in lines
    assert "real training steps: median error" in lines


def test_differences_add_up_to_what_the_spans_differ(outcome: Outcome) -> None:
    pair = next(pair for pair in outcome.pairs if pair.name.startswith("dp · mlp 784"))
    found = {d.name: d for d in differences(pair)}
    gradients = found["gradients (all_reduce)"]
    assert gradients.count == 2
    assert gradients.error == pytest.approx(-2 / 3, abs=0.01)
    assert found["layer 0 gemm"].error == pytest.approx(-0.5, abs=0.01)
    kernels = pair.predicted.kernels()
    assert sum(d.predicted_ns for d in found.values()) == int(kernels.duration_ns.sum()) + gradients.predicted_ns


def test_a_foreign_profile_and_other_threads_are_named(slow_machine: Level, profile: Profile) -> None:
    foreign = profile.replace(provenance=Provenance(host="xyz", facts={"cpu": "Other CPU"}))
    listed = [case_of(Recipe(network=Perceptron((8, 8)), strategy="one", ranks=1, micro_batch=8))]
    notes = check_cases(foreign, listed, rounds=1, machine=HERE).notes
    assert notes == (
        "profile 'here' is of another machine (Other CPU, host xyz), and this one is Some CPU, host abc; its "
        "predictions need not hold here, so calibrate this machine",
    )
    wide = Machine(host="abc", cpu="Some CPU", cores=8)
    assert check_cases(profile, listed, rounds=1, machine=wide).notes == (
        "the profile is of 1 threads a rank, but 2 ranks on 8 cores have 4; calibrate with --ranks 2",
    )
    with pytest.raises(CheckError, match="0 rounds measure nothing; take at least one"):
        check_cases(profile, listed, rounds=0, machine=HERE)


def test_more_ranks_than_devices(profile: Profile) -> None:
    with pytest.raises(simpar.SimparError, match="9") as problem:
        check(profile, ranks=9, plans=["dp"], machine=HERE)
    assert "core" in str(problem.value)


# ---- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "detect", lambda: HERE)


def test_command_prints_json_only(slow_machine: Level, here: None, profile: Profile, tmp_path: Path) -> None:
    profile.write(tmp_path / "here.json")
    page = tmp_path / "page.html"
    words = ["check", str(tmp_path / "here.json"), "--plans", "dp", "--quick", "--json", "--html", str(page)]
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert [row["plan"] for row in found["training"]["rows"]] == ["dp", "dp"]
    assert "plotly" in page.read_text(encoding="utf-8").lower()
    table = CliRunner().invoke(app, [*words[:5], "--html", str(page)])
    assert "replayed programs" in table.stdout
    assert table.stdout.rstrip().endswith(f"wrote {page}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plans", "ddp"], "unknown plan 'ddp'"),
        (["--plans", ","], "--plans ',' names no plan"),
        (["--html", "no/page.html"], "--html: cannot write 'no/page.html': there is no folder 'no'; create it first"),
        (["--ranks", "99"], "99"),
    ],
)
def test_mistakes_are_one_sentence_and_write_nothing(  # noqa: PLR0917 - fixtures
    here: None,
    profile: Profile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    profile.write(tmp_path / "here.json")
    monkeypatch.chdir(tmp_path)
    assert main(["check", "here.json", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


def test_interruption_writes_nothing(
    here: None, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.write(tmp_path / "here.json")

    def interrupted(*arguments: object, **options: object) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "check", interrupted)
    assert main(["check", str(tmp_path / "here.json"), "--html", str(tmp_path / "page.html")]) == 130
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[0] == "interrupted; nothing was written"
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


def test_a_profile_of_another_schema_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old.json").write_text('{"schema_version": 0, "device": {}}')
    assert main(["check", str(tmp_path / "old.json")]) == 2
    assert "schema_version 0" in capsys.readouterr().err
