"""The rounds of a check: a pulse, the replayed program and real training steps take turns, case by case."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Literal

from calibrate.check.cases import Case, CheckError, cases, chosen, cluster_of, job, perceptron_of, precision
from calibrate.check.pulse import UNMEASURED, Level, at_level, level, pulse
from calibrate.detect import Machine, detect
from calibrate.measure.checks import check_ranks
from calibrate.replay import Adapter, CpuAdapter, CudaAdapter, Workers, replay_all
from calibrate.training import Trainers
from simpar.engine.simulate import execute
from simpar.hardware.cluster import Cluster
from simpar.hardware.profile import Profile
from simpar.plan.layout import lay_out
from simpar.program.ir import Program
from simpar.program.lower import lower
from simpar.simulation import simulate
from simpar.trace.trace import Trace

Kind = Literal["replay", "training"]
Say = Callable[[str, int, int], None]
"""Hears what is being measured, how many rounds are done, and of how many."""

COVERAGE = 0.9
"""Share of measurements that should lie inside their interval."""

ROUNDS, QUICK_ROUNDS = 5, 3
_STEPS = 3  # of each kind in a round
PULSE_STEP_S = 0.02
"""Predicted step of the network whose kernels and gradients a pulse takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case, predicted and measured.

    Attributes:
        kind: whether the program was replayed, or a real step trained.
        plan: name of the plan.
        network: name of the network.
        ranks: processes.
        predicted_s: with the profile as it is.
        low_s, high_s: interval of the prediction: for training as :func:`simpar.uncertainty.interval` has it for any
            step; for a replay, to which no framework adds anything, from the profile's own errors alone.
        rounds_s: median step of each round.
        at_level_s: per round, predicted with kernels and communication as fast as the round's pulse ran.
    """

    kind: Kind
    plan: str
    network: str
    ranks: int
    predicted_s: float
    low_s: float
    high_s: float
    rounds_s: tuple[float, ...]
    at_level_s: tuple[float, ...]

    @property
    def measured_s(self) -> float:
        """Median of the rounds."""
        return median(self.rounds_s)

    @property
    def lowest_s(self) -> float:
        """Lowest of the rounds."""
        return min(self.rounds_s)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def error_at_level(self) -> float:
        """Median over the rounds of the same, with each round predicted at the level of its minute."""
        return median(at / measured - 1 for at, measured in zip(self.at_level_s, self.rounds_s, strict=True))

    @property
    def inside(self) -> bool:
        """Whether the measurement lies in the interval."""
        return self.low_s <= self.measured_s <= self.high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A program's predicted trace and, of its measured ones, that of median length."""

    name: str
    predicted: Trace
    measured: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check found.

    Attributes:
        profile: that was checked.
        machine: where.
        rows: replays and training steps, case by case.
        pairs: traces of the replays.
        levels: how fast the machine was, per case.
        expected: what the profile predicts of a pulse of the last case.
        load: load averages of one minute before and after.
        notes: what was left out or is odd, one sentence each.
    """

    profile: Profile
    machine: Machine
    rows: tuple[Row, ...]
    pairs: tuple[Pair, ...] = ()
    levels: dict[str, Level] = field(default_factory=dict)
    expected: Level = UNMEASURED
    load: tuple[float, float] = (0.0, 0.0)
    notes: tuple[str, ...] = ()

    def of(self, kind: Kind) -> tuple[Row, ...]:
        """Rows of one kind."""
        return tuple(row for row in self.rows if row.kind == kind)

    def median_error(self, kind: Kind, *, at_level: bool = False) -> float | None:
        """Median of the absolute errors of one kind; None without rows."""
        errors = [abs(row.error_at_level if at_level else row.error) for row in self.of(kind)]
        return median(errors) if errors else None

    def coverage(self, kind: Kind | None = None) -> float | None:
        """Share of rows (of one kind) inside their interval, which should be 90 %; None without rows."""
        rows = self.of(kind) if kind else self.rows
        return sum(row.inside for row in rows) / len(rows) if rows else None

    def level(self) -> Level:
        """The median level of the whole check."""

        def middle(name: str) -> float | None:
            found = [value for one in self.levels.values() if (value := getattr(one, name)) is not None]
            return median(found) if found else None

        return Level(
            compute=middle("compute") or 1.0,
            communication=middle("communication") or 1.0,
            compute_beside=middle("compute_beside"),
            communication_beside=middle("communication_beside"),
        )


def check(
    profile: Profile,
    *,
    plans: Sequence[str] | None = None,
    ranks: int = 2,
    quick: bool = False,
    rounds: int | None = None,
    say: Say | None = None,
    machine: Machine | None = None,
    timeout_s: float = 300.0,
) -> Outcome:
    """Predicts with the profile and measures on this machine.

    Args:
        profile: what predicts.
        plans: of :data:`~calibrate.check.cases.PLANS`; all that the ranks can hold if None.
        ranks: processes, each with a device of its own.
        quick: fewer networks and rounds.
        rounds: how often pulse, replay and training take turns for each case.
        say: hears of the progress.
        machine: where this runs; detected if None.
        timeout_s: seconds that one round of one case may take.

    Raises:
        CheckError: a plan is unknown or needs more ranks.
        MeasurementError: too few devices, or no back end between them.
        ReplayError: the replay failed.
        TrainingError: a training step failed.
    """
    wanted, notes = chosen(plans, ranks)
    outcome = check_cases(
        profile,
        cases(wanted, ranks, profile, quick=quick),
        ranks=ranks,
        rounds=(QUICK_ROUNDS if quick else ROUNDS) if rounds is None else rounds,
        say=say,
        machine=machine,
        timeout_s=timeout_s,
    )
    return replace(outcome, notes=(*outcome.notes, *notes))


def check_cases(
    profile: Profile,
    listed: Sequence[Case],
    *,
    ranks: int = 2,
    rounds: int = ROUNDS,
    say: Say | None = None,
    machine: Machine | None = None,
    timeout_s: float = 300.0,
) -> Outcome:
    """Checks cases of one's own (:func:`calibrate.check.cases.case_of`); see :func:`check`."""
    if rounds < 1:
        raise CheckError(f"{rounds} rounds measure nothing; take at least one")
    machine = machine or detect()
    cuda = bool(machine.gpus)
    check_ranks(machine, ranks, cuda=cuda, nccl="nccl" in machine.versions)
    say = say or _silent
    before = _load()
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(ranks, timeout_s=timeout_s))
        trainers = stack.enter_context(Trainers(ranks, timeout_s=timeout_s))
        bench = _Bench(profile, ranks, rounds, workers, trainers, cuda=cuda)
        for number, case in enumerate(listed):
            first, total = number * rounds, len(listed) * rounds
            bench.measure(case, partial(_tell, say, case.name, first, total))
    return Outcome(
        profile=profile,
        machine=machine,
        rows=tuple(bench.rows),
        pairs=tuple(bench.pairs),
        levels=bench.levels,
        expected=bench.expected,
        load=(before, _load()),
        notes=tuple(_oddities(profile, machine, ranks)),
    )


def _silent(name: str, done: int, total: int) -> None:
    """Nobody wants to hear."""


def _tell(say: Say, name: str, first: int, total: int, done: int) -> None:
    say(name, first + done, total)


def device_share(ranks: int, cuda: bool, index: int, count: int) -> Adapter:
    """The device of one rank of ``ranks``, also where a program has fewer: the profile is of such a share."""
    return CudaAdapter(index, count) if cuda else CpuAdapter(index, max(ranks, count))


def program_of(case: Case, profile: Profile) -> tuple[Program, Cluster]:
    """The case's program with every rank, and the profile's cluster for it."""
    cluster = cluster_of(profile, case.recipe.ranks)
    return lower(case.model, cluster, lay_out(case.plan, case.model, cluster), fold=False), cluster


class _Bench:
    """Measures case by case with the same processes."""

    def __init__(
        self, profile: Profile, ranks: int, rounds: int, workers: Workers, trainers: Trainers, *, cuda: bool
    ) -> None:
        self.rows: list[Row] = []
        self.pairs: list[Pair] = []
        self.levels: dict[str, Level] = {}
        self.expected = UNMEASURED
        self._profile, self._rounds = profile, rounds
        self._workers, self._trainers, self._adapter = workers, trainers, partial(device_share, ranks, cuda)
        launch_s = profile.device.launch_s
        network, batch = perceptron_of(profile, PULSE_STEP_S)
        self._pulses = {n: pulse(network, batch, n, precision(profile), launch_s=launch_s) for n in {1, ranks}}

    def measure(self, case: Case, done: Callable[[int], None]) -> None:
        """Predicts one case, and measures it round by round."""
        program, cluster = program_of(case, self._profile)
        predicted = execute(program, cluster)
        beat = self._pulses[case.recipe.ranks]
        pulses: list[Trace] = []
        replays: list[list[Trace]] = []
        trained: list[list[float]] = []
        for number in range(self._rounds):
            done(number)
            pulses += self._replay(beat, repeats=1)
            replays.append(self._replay(program, repeats=_STEPS))
            trained.append(list(self._trainers.run(case.recipe, steps=_STEPS).step_s))
        alone = execute(beat, cluster)
        self.levels[case.name] = level(alone, pulses)
        self.expected = level(alone, [alone])
        then = tuple(execute(program, at_level(cluster, level(alone, [one]))).step_s for one in pulses)
        result = simulate(job(case, self._profile), allow_oom=True)
        bounds: dict[Kind, tuple[float, float]] = {
            "replay": result.uncertainty.interval(COVERAGE),
            "training": result.step_time_interval(COVERAGE),
        }
        every = sorted((trace for part in replays for trace in part), key=lambda trace: trace.step_ns)
        self.pairs.append(Pair(name=case.name, predicted=predicted, measured=every[(len(every) - 1) // 2]))
        replayed = [[trace.step_s for trace in part] for part in replays]
        measured: tuple[tuple[Kind, list[list[float]]], ...] = (("replay", replayed), ("training", trained))
        for kind, rounds in measured:
            self.rows.append(
                Row(
                    kind=kind,
                    plan=case.recipe.strategy,
                    network=case.network,
                    ranks=case.recipe.ranks,
                    predicted_s=predicted.step_s,
                    low_s=bounds[kind][0],
                    high_s=bounds[kind][1],
                    rounds_s=tuple(median(part) for part in rounds),
                    at_level_s=then,
                )
            )
        done(self._rounds)

    def _replay(self, program: Program, *, repeats: int) -> list[Trace]:
        return list(replay_all(program, adapter=self._adapter, repeats=repeats, warmup=1, workers=self._workers))


def _oddities(profile: Profile, machine: Machine, ranks: int) -> list[str]:
    """What a reader should know before believing the comparison."""
    notes = list(machine.warnings)
    measured_on = profile.provenance.host
    if measured_on != machine.host:
        theirs = profile.provenance.facts.get("gpus") or profile.provenance.facts.get("cpu") or profile.device.title
        ours = f"{len(machine.gpus)} × {machine.gpus[0].name}" if machine.gpus else machine.cpu
        of = f"of another machine ({theirs}, host {measured_on})" if measured_on else f"of no machine ({theirs})"
        notes.append(
            f"profile '{profile.name}' is {of}, and this one is {ours}, host {machine.host}; its predictions need not "
            "hold here, so calibrate this machine"
        )
    threads = max(1, machine.cores // ranks)
    if not machine.gpus and measured_on == machine.host and profile.device.sms != threads:
        notes.append(
            f"the profile is of {profile.device.sms} threads a rank, but {ranks} ranks on {machine.cores} cores have "
            f"{threads}; calibrate with --ranks {ranks}"
        )
    if profile.node_link is None and ranks > 1:
        notes.append("the profile has no node link, so communication is predicted by the catalog's usual one")
    return notes


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not on every system
        return 0.0
