"""The search: bounds of branches and families first, then of their plans, then simulations, in the order of bounds."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from typing import Any

from simpar import __version__
from simpar.economics import cost
from simpar.errors import PlanError
from simpar.hardware.cluster import Cluster
from simpar.job import Job, read_cluster, read_model
from simpar.model.transformer import Transformer
from simpar.plan.plan import Plan
from simpar.reading import read_text
from simpar.search.answers import check_answers
from simpar.search.choices import read_choices
from simpar.search.families import Opened, Outlook
from simpar.search.found import Counts, Found, SearchResult, pareto
from simpar.search.journal import Journal
from simpar.search.space import Fields, Space, axes_of
from simpar.search.tasks import Branch, Candidate, Family, Group, answer, token_of
from simpar.search.workers import LATER, WorkerLostError, Workers

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and of how much."""

_ENDED = "ended"  # key of the record of a search that has ended
_CHUNK = 4  # families whose bounds are one task


def search(
    model: Any,
    cluster: Any,
    *,
    global_batch: int,
    seq_len: int | None = None,
    plan: Plan | Mapping[str, Any] | None = None,
    choices: Mapping[str, Iterable[Any]] | None = None,
    top: int = 5,
    whole_front: bool = False,
    prune: bool = True,
    executor: Executor | None = None,
    workers: int | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> SearchResult:
    """Finds the fastest plans of all that fit.

    Every valid combination of tp, cp, pp, micro-batch, sequence parallelism, recomputation, schedule, vpp and ZeRO
    stage is looked at, and of ep and etp for a model with experts. Plans whose lower bound of memory exceeds the
    device, or whose lower bound of the step time exceeds what was simulated already, are left out, and so are whole
    families of plans whose common bound does; since no bound is above the simulation, the best plans reported are the
    best of all.

    Args:
        model: as in :class:`~simpar.job.Job`.
        cluster: as there, or a list of clusters: then the best of each are found, and the front compares all.
        global_batch: samples per step.
        seq_len: tokens per sample.
        plan: other fields, the same for all plans.
        choices: lists of values to choose from, by field: restricts the search, or adds fields to it.
        top: how many plans are the fastest for sure (of each cluster).
        whole_front: also simulate whatever could be on the Pareto front of time, memory, GPUs and cost.
        prune: switched off, everything that fits is simulated.
        executor: where to run; left open, in processes of this machine.
        workers: processes (left open, one per core; 1 works in this one), or tasks that the executor gets at a time.
        output: file of JSON lines that takes every answer as it comes.
        resume: go on with an existing ``output``; a search that had ended is answered by it alone.
        progress: is told how far the search is.

    Returns:
        Simulated plans, the fastest first.

    Raises:
        PlanError: a choice is none of a plan's field, all plans share it, or ``plan`` fixes it; no plan is valid; or
            ``top`` is below 1.
        JobError: the output cannot be written, or belongs to another search.

    >>> found = search("gpt2", "h100-sxm:4", global_batch=64, choices={"recompute": ["none"]}, top=1, workers=1)
    >>> found.best.plan["tp"]
    1
    """
    if top < 1:
        raise PlanError(f"top={top} finds nothing; give 1 or more")
    clusters = [Cluster.model_validate(read_cluster(one)) for one in _listed(cluster)]
    fixed = plan if isinstance(plan, Mapping) else {} if plan is None else plan.model_dump(exclude_unset=True)
    given = {"global_batch": global_batch, **({} if seq_len is None else {"seq_len": seq_len})}
    base = Plan.model_validate({**fixed, **given})
    jobs = tuple(Job(model=read_model(model), cluster=one, plan=base) for one in clusters)
    chosen = read_choices(choices or {})
    _check_free(chosen, fixed, base)
    # what the plan fixes is not searched
    kept = {name: (getattr(base, name),) for name in fixed if name in axes_of({}, jobs[0].model)}
    hunt = _Hunt(jobs, {**kept, **chosen}, top, whole_front, prune, progress or (lambda *_: None))
    question = {"search": hunt.question(), "simpar": __version__}
    with Journal(output, question, resume=resume) as journal:
        check_answers(journal.records, str(output), len(clusters))
        ended = hunt.ended(journal)
        if ended is not None:
            return ended
        with Workers(executor, workers) as pool:
            hunt.weigh(pool)
            hunt.simulate(pool, journal)
        hunt.check_any()
        hunt.end(journal)
    return hunt.result()


def _check_free(chosen: Mapping[str, Sequence[Any]], fixed: Iterable[str], base: Plan) -> None:
    """Refuses a field that is both fixed and chosen, of which one would win in silence."""
    for name in fixed:
        if name in chosen:
            raise PlanError(
                f"{name}: choices {list(chosen[name])} cannot go with plan {name}={getattr(base, name)}, which fixes "
                "it for all plans; drop one of the two"
            )


def _listed(cluster: Any) -> Sequence[Any]:
    return cluster if isinstance(cluster, (list, tuple)) else [cluster]


@dataclass
class _Hunt:
    """A search under way.

    Branches, families and plans wait in one queue, in the order of their bounds: whatever may be the fastest is looked
    at next, a branch by asking for the outlooks of its families, a family by opening it, a plan by simulating it. Once
    all that waits has a bound above the top plans, these are the best.
    """

    jobs: tuple[Job, ...]
    choices: dict[str, tuple[Any, ...]]
    top: int
    whole_front: bool
    prune: bool
    progress: Progress
    queue: list[tuple[float, int, str, Branch | Family | Candidate]] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    opening: int = 0
    families: int = 0
    opened: int = 0
    bounded: int = 0
    enumerated: int = 0
    invalid: int = 0
    too_large: int = 0
    pruned: int = 0
    resumed: int = 0
    lost: int = 0

    def question(self) -> dict[str, Any]:
        """What the search is about, as plain values."""
        model, plan = self.jobs[0].model, self.jobs[0].plan
        schedules = sorted({plan.schedule, *self.choices.get("schedule", ())})
        return {
            "model": model.model_dump(mode="json") if isinstance(model, Transformer) else [model.name, _digest(model)],
            "clusters": [job.cluster.model_dump(mode="json") for job in self.jobs],
            "plan": plan.model_dump(mode="json"),
            "choices": self.choices,
            "files": {name: _digest(_schedule_text(name)) for name in schedules if name.endswith(".csv")},
        }

    @cached_property
    def _tokens(self) -> list[bytes]:
        return [token_of(job, self.choices, prune=self.prune) for job in self.jobs]

    # ---- a search that has ended ------------------------------------------------------------------------------------

    @property
    def _wanted(self) -> dict[str, Any]:
        """What decides which of all plans are simulated; a file goes on whatever it is."""
        return {"top": self.top, "whole_front": self.whole_front, "prune": self.prune}

    def end(self, journal: Journal) -> None:
        """Writes down that nothing is left to do, with all that the result says; plans that were lost may be tried."""
        if not self.lost:
            found = [asdict(one) for one in self._shown()]
            journal.write({_ENDED: self._wanted, "counts": asdict(self._counts()), "found": found}, remember=False)

    def ended(self, journal: Journal) -> SearchResult | None:
        """The result of a search for the same that has ended, as its file has it; None if none has."""
        for record in journal.records:
            if record.get(_ENDED) == self._wanted:
                found = (Found(**{**one, "plan": _with_tuples(one["plan"])}) for one in record["found"])
                counts = Counts(**record["counts"])
                return self._result(tuple(found), replace(counts, resumed=counts.simulated))
        return None

    # ---- families ---------------------------------------------------------------------------------------------------

    def weigh(self, pool: Workers) -> None:
        """Asks for the bound of every branch and family, and queues those that may have a plan that fits."""
        asked: list[Group | Branch] = []
        for number, job in enumerate(self.jobs):
            alone: list[Fields] = []
            for branch in Space(job.model, job.cluster, job.plan, self.choices).branches():
                self.families += len(branch)
                if self.prune and len(branch) > 1:
                    asked.append(Branch(number, branch))
                else:  # its families are looked at anyway
                    alone += branch
            asked += [Group(number, tuple(alone[at : at + _CHUNK])) for at in range(0, len(alone), _CHUNK)]
        done = 0
        self.progress("families", done, self.families)
        tasks = ((self._tokens[some.cluster], some) for some in asked)
        for (_, some), answered in pool.run(answer, tasks):
            if isinstance(answered, WorkerLostError):
                raise answered
            if isinstance(some, Branch):
                assert isinstance(answered, Outlook), "a branch is answered by its outlook"
                self._count(answered)
                if answered.bound is not None:
                    self._queue(some._replace(outlook=answered))
            else:
                assert isinstance(answered, list), "families are answered by outlooks"
                for outlook in answered:
                    self._count(outlook)
                self._take_outlooks(some, answered)
            done += len(some.families)
            self.progress("families", done, self.families)

    def check_any(self) -> None:
        """Refuses a search of which no plan is valid.

        Raises:
            PlanError: there is none.
        """
        if not self.enumerated:
            raise PlanError(
                f"no combination of the choices makes a plan for {self.jobs[0].model.name} on "
                f"{self.jobs[0].cluster.gpus} GPUs; change global_batch or the GPUs, or choose from more values"
            )
        if self.invalid == self.enumerated:
            raise PlanError(
                f"none of {self.enumerated:,} plans is valid for {self.jobs[0].model.name}; change global_batch or the "
                "GPUs, or fix fewer fields"
            )

    def _count(self, outlook: Outlook) -> None:
        self.enumerated += outlook.plans
        self.invalid += outlook.invalid
        self.too_large += outlook.too_large

    def _take_outlooks(self, group: Group, outlooks: Iterable[Outlook]) -> None:
        """Queues the families of which something may fit."""
        for fields, outlook in zip(group.families, outlooks, strict=True):
            if outlook.bound is not None:
                self._queue(Family(group.cluster, fields, outlook.bound, outlook))

    def _queue(self, item: Branch | Family | Candidate) -> None:
        heappush(self.queue, (item.bound.step_s, item.bound.memory_bytes, str(item.fields), item))

    # ---- the queue --------------------------------------------------------------------------------------------------

    def simulate(self, pool: Workers, journal: Journal) -> None:
        """Opens what waits and simulates plans, the most promising first, as long as one can be among the best."""
        known = {_key(record["cluster"], record["plan"]): record for record in journal.records if _ENDED not in record}
        self._tell()
        for (_, question), answered in pool.run(answer, self._worthwhile(known)):
            self.opening -= isinstance(question, (Group, Family))
            if isinstance(answered, list):
                self.invalid += sum(outlook.invalid for outlook in answered)
                self.too_large += sum(outlook.too_large for outlook in answered)
                self._take_outlooks(question, answered)
            elif isinstance(answered, Opened):
                self._take_opened(question, answered)
            elif isinstance(answered, dict):
                journal.write(answered)
                self._take(question, answered)
            elif isinstance(question, (Group, Family)):  # its worker is lost: what its plans are is not known
                assert isinstance(answered, WorkerLostError), "an opened family is an answer"
                raise answered
            else:
                self.lost += 1
            self._tell()
        self._tell()

    def _worthwhile(self, known: Mapping[str, dict[str, Any]]) -> Iterator[Any]:
        """What to ask next; while only an answer can tell, :data:`~simpar.search.workers.LATER`."""
        while self.queue or self.opening:
            if not self.queue:
                yield LATER
                continue
            item = heappop(self.queue)[-1]
            if self._hopeless(item):
                self.pruned += item.plans
            elif isinstance(item, Branch):
                self.opening += 1
                yield self._tokens[item.cluster], Group(item.cluster, item.families)
            elif isinstance(item, Family):
                self.opening += 1
                yield self._tokens[item.cluster], item._replace(limit_s=self._limit_s(item.cluster))
            elif (record := known.get(_key(item.cluster, item.fields))) and not self._lacks(item.cluster, record):
                self.resumed += 1
                self._take(item, record)
            else:
                yield self._tokens[item.cluster], item._replace(worth_s=self._worth_s(item.cluster))

    def _lacks(self, cluster: int, record: Mapping[str, Any]) -> bool:
        """Whether an answer needs an interval now, which a search for fewer plans did not ask for."""
        return "error" not in record and record["low_s"] is None and record["step_time_s"] <= self._worth_s(cluster)

    def _take_opened(self, family: Family, opened: Opened) -> None:
        """Queues the plans of a family; what is now known of the others replaces what was known of it."""
        self.opened += 1
        self.bounded += opened.bounded
        self.invalid += opened.invalid - family.outlook.invalid
        self.too_large += opened.too_large - family.outlook.too_large
        self.pruned += opened.pruned
        for fields, bound in opened.plans:
            self._queue(Candidate(family.cluster, fields, bound))

    def _take(self, candidate: Candidate, record: dict[str, Any]) -> None:
        if "error" in record:
            self.too_large += record["error"] == "memory"
            self.invalid += record["error"] != "memory"
            return
        # a file has lists for tuples
        self.found.append(Found(**{**record, "plan": candidate.fields}, bound_s=candidate.bound.step_s))
        self.found.sort(key=lambda one: (one.step_time_s, one.memory_bytes, str(one.plan)))

    def _hopeless(self, item: Branch | Family | Candidate) -> bool:
        """Whether enough plans are surely faster and, if the front is asked for, one is better in everything."""
        if not self.prune or item.bound.step_s <= self._slowest_top_s(item.cluster):
            return False
        if not self.whole_front:
            return True
        cluster = self.jobs[item.cluster].cluster
        goals = (
            item.bound.step_s,
            item.bound.memory_bytes,
            cluster.gpus,
            _price(cluster, item.bound.step_s) or 0.0,
        )
        return any(all(a <= b for a, b in zip(one.goals, goals, strict=True)) for one in pareto(self.found))

    def _slowest_top_s(self, cluster: int) -> float:
        """Step time of the last of the top plans so far; infinite while there are fewer."""
        times = [one.step_time_s for one in self.found if one.cluster == cluster][: self.top]
        return times[-1] if len(times) == self.top else inf

    def _limit_s(self, cluster: int) -> float:
        """The step time beyond which a plan is of no interest, whatever else is good about it."""
        return self._slowest_top_s(cluster) if self.prune and not self.whole_front else inf

    def _worth_s(self, cluster: int) -> float:
        return inf if self.whole_front else self._slowest_top_s(cluster)

    def _tell(self) -> None:
        """Says how many plans are decided: all but those that may still be among the best; and what is simulated.

        That may become less, as better plans are found, and more, as families are opened.
        """
        limits = [self._limit_s(number) for number in range(len(self.jobs))]
        waiting = [item for *_, item in self.queue if item.bound.step_s <= limits[item.cluster]]
        self.progress("plans", self.enumerated - sum(item.plans for item in waiting), self.enumerated)
        simulated = len(self.found)
        self.progress("simulated", simulated, simulated + sum(isinstance(item, Candidate) for item in waiting))

    def _shown(self) -> tuple[Found, ...]:
        """What was found; intervals that only some orders of simulating leave behind are dropped."""
        return tuple(
            one if one.step_time_s <= self._worth_s(one.cluster) else replace(one, low_s=None, high_s=None)
            for one in self.found
        )

    def result(self) -> SearchResult:
        """What came of it."""
        return self._result(self._shown(), self._counts())

    def _result(self, found: tuple[Found, ...], counts: Counts) -> SearchResult:
        whole_front = self.whole_front or not self.prune
        return SearchResult(found, counts, self.top, self.jobs, whole_front, self.choices)

    def _counts(self) -> Counts:
        return Counts(
            enumerated=self.enumerated,
            invalid=self.invalid,
            too_large=self.too_large,
            pruned=self.pruned,
            simulated=len(self.found),
            resumed=self.resumed,
            lost=self.lost,
            families=self.families,
            opened=self.opened,
            bounded=self.bounded,
        )


def _key(cluster: int, fields: Mapping[str, Any]) -> str:
    return json.dumps([cluster, fields], sort_keys=True)


def _with_tuples(plan: Mapping[str, Any]) -> Fields:
    """Fields of a plan as they were chosen: a file has lists for tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in plan.items()}


def _digest(described: Any) -> str:
    """Tells a text, or whatever else a frozen description says, from any other."""
    return sha256(repr(described).encode()).hexdigest()


def _schedule_text(path: str) -> str:
    try:
        return read_text(path)
    except OSError as error:
        raise PlanError(
            f"schedule file '{path}' cannot be read: {error.strerror}; give the path of a .csv file"
        ) from None


def _price(cluster: Cluster, step_s: float) -> float | None:
    return cost(cluster, step_s=step_s, busy_fraction=0.0, step_tokens=1).step_price
