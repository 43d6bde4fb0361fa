"""The search: bounds first, then simulations in the order of the bounds until none can be better."""

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from simpar import __version__
from simpar.economics import cost
from simpar.errors import PlanError, SimparError
from simpar.hardware.cluster import Cluster
from simpar.job import Job, read_cluster, read_model
from simpar.plan.layout import lay_out
from simpar.plan.plan import Plan
from simpar.program.footprint import footprints
from simpar.program.lower import lower
from simpar.search.bound import Bound, Bounds
from simpar.search.found import Counts, Found, SearchResult, pareto
from simpar.search.journal import Journal
from simpar.search.space import axes_of, plans
from simpar.search.workers import WorkerLostError, Workers
from simpar.simulation import simulate

Progress = Callable[[str, int, int], None]
"""Is told what is being done, how much of it is done, and of how much."""

_CHUNK = 256  # plans whose bounds are one task
_SURE = 0.5  # of the device's memory: below, what the bound does not count is not worth a look before simulating


class Candidate(NamedTuple):
    """A plan that may be worth simulating: the number of its cluster, its fields, its bound.

    ``worth_s`` is the step time from which on its interval will not be asked for, which takes as long as the step.
    """

    cluster: int
    fields: dict[str, Any]
    bound: Bound
    worth_s: float = inf


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

    Every valid combination of tp, pp, micro-batch, sequence parallelism, recomputation, schedule, vpp and ZeRO stage is
    looked at. Plans whose lower bound of memory exceeds the device, or whose lower bound of the step time exceeds what
    was simulated already, are left out; since both bounds are never above the simulation, the best plans reported are
    the best of all.

    Args:
        model: as in :class:`~simpar.job.Job`.
        cluster: as there, or a list of clusters: then the best of each are found, and the front compares all.
        global_batch: samples per step.
        seq_len: tokens per sample.
        plan: other fields, the same for all plans.
        choices: values to choose from, by field: restricts the search, or adds fields to it.
        top: how many plans are the fastest for sure (of each cluster).
        whole_front: also simulate whatever could be on the Pareto front of time, memory, GPUs and cost.
        prune: switched off, everything that fits is simulated.
        executor: where to run; left open, in processes of this machine.
        workers: processes (left open, one per core; 1 works in this one), or tasks that the executor gets at a time.
        output: file of JSON lines that takes every answer as it comes.
        resume: go on with an existing ``output``.
        progress: is told how far the search is.

    Returns:
        Simulated plans, the fastest first.

    Raises:
        PlanError: a field that plans do not have, or no plan is valid.
        JobError: the output cannot be written, or belongs to another search.

    >>> found = search("gpt2", "h100-sxm:4", global_batch=64, choices={"recompute": ["none"]}, top=1, workers=1)
    >>> found.best.plan["tp"]
    1
    """
    clusters = [Cluster.model_validate(read_cluster(one)) for one in _listed(cluster)]
    fixed = plan if isinstance(plan, Mapping) else {} if plan is None else plan.model_dump(exclude_unset=True)
    given = {"global_batch": global_batch, **({} if seq_len is None else {"seq_len": seq_len})}
    base = Plan.model_validate({**fixed, **given})
    jobs = tuple(Job(model=read_model(model), cluster=one, plan=base) for one in clusters)
    chosen = {name: list(values) for name, values in (choices or {}).items()}
    # what the plan fixes is not searched
    chosen = {**{name: [value] for name, value in fixed.items() if name in axes_of({})}, **chosen}
    hunt = _Hunt(jobs, chosen, top, whole_front, prune, progress or (lambda *_: None))
    question = {"search": hunt.question(), "simpar": __version__}
    with Journal(output, question, resume=resume) as journal, Workers(executor, workers) as pool:
        hunt.weigh(pool)
        hunt.simulate(pool, journal)
    return hunt.result()


def _listed(cluster: Any) -> Sequence[Any]:
    return cluster if isinstance(cluster, (list, tuple)) else [cluster]


@dataclass
class _Hunt:
    """A search under way."""

    jobs: tuple[Job, ...]
    choices: dict[str, list[Any]]
    top: int
    whole_front: bool
    prune: bool
    progress: Progress
    candidates: list[Candidate] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    enumerated: int = 0
    invalid: int = 0
    too_large: int = 0
    pruned: int = 0
    resumed: int = 0
    lost: int = 0

    def question(self) -> dict[str, Any]:
        """What the search is about, as plain values."""
        model = self.jobs[0].model
        described = getattr(model, "model_dump", lambda **_: model.name)
        return {
            "model": described(mode="json"),
            "clusters": [job.cluster.model_dump(mode="json") for job in self.jobs],
            "plan": self.jobs[0].plan.model_dump(mode="json"),
            "choices": self.choices,
        }

    def _tokens(self) -> list[bytes]:
        axes = axes_of(self.choices)
        return [pickle.dumps((job, axes)) for job in self.jobs]

    # ---- bounds -----------------------------------------------------------------------------------------------------

    def weigh(self, pool: Workers) -> None:
        """Enumerates plans and asks for their bounds; leaves the candidates in the order of their bounds."""
        tokens = self._tokens()
        tasks = []
        for number, job in enumerate(self.jobs):
            every = plans(job.model, job.cluster, job.plan, self.choices)
            while some := list(islice(every, _CHUNK)):
                tasks.append((number, some))
                self.enumerated += len(some)
        done = 0
        self.progress("bounds", done, self.enumerated)
        payloads = ((tokens[number], number, some) for number, some in tasks)
        for (_, number, some), bounds in pool.run(bound_plans, payloads):
            if isinstance(bounds, WorkerLostError):
                raise bounds
            self._sort_in(number, some, bounds)
            done += len(some)
            self.progress("bounds", done, self.enumerated)
        if self.invalid == self.enumerated:
            raise PlanError(
                f"none of {self.enumerated:,} plans is valid for {self.jobs[0].model.name}; change global_batch or the "
                "GPUs, or fix fewer fields"
            )
        self.candidates.sort(key=lambda c: (c.bound.step_s, c.bound.memory_bytes, str(c.fields)))

    def _sort_in(self, number: int, some: list[dict[str, Any]], bounds: list[Bound | None]) -> None:
        capacity = _capacity_bytes(self.jobs[number].cluster)
        for fields, bound in zip(some, bounds, strict=True):
            if bound is None:
                self.invalid += 1
            elif bound.memory_bytes > capacity:
                self.too_large += 1
            else:
                self.candidates.append(Candidate(number, fields, bound))

    # ---- simulations ------------------------------------------------------------------------------------------------

    def simulate(self, pool: Workers, journal: Journal) -> None:
        """Simulates candidates, the most promising first, as long as one can be among the best."""
        known = {_key(record["cluster"], record["plan"]): record for record in journal.records}
        tokens = self._tokens()
        done = 0

        def worthwhile() -> Iterator[tuple[bytes, Candidate]]:
            nonlocal done
            for number, candidate in enumerate(self.candidates):
                done = number
                if self._hopeless(candidate):
                    self.pruned += 1
                    continue
                record = known.get(_key(candidate.cluster, candidate.fields))
                if record is not None:
                    self.resumed += 1
                    self._take(candidate, record)
                else:
                    yield tokens[candidate.cluster], candidate._replace(worth_s=self._worth_s(candidate.cluster))

        self.progress("simulations", 0, len(self.candidates))
        for (_, candidate), answer in pool.run(simulate_plan, worthwhile()):
            if isinstance(answer, WorkerLostError):
                self.lost += 1
                continue
            journal.write(answer)
            self._take(candidate, answer)
            self.progress("simulations", done, len(self.candidates))
        self.progress("simulations", len(self.candidates), len(self.candidates))

    def _take(self, candidate: Candidate, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.too_large += answer["error"] == "memory"
            self.invalid += answer["error"] != "memory"
            return
        self.found.append(Found(**answer, bound_s=candidate.bound.step_s))
        self.found.sort(key=lambda one: (one.step_time_s, one.memory_bytes, str(one.plan)))

    def _hopeless(self, candidate: Candidate) -> bool:
        """Whether enough plans are surely faster and, if the front is asked for, one is better in everything."""
        if not self.prune:
            return False
        if candidate.bound.step_s <= self._slowest_top_s(candidate.cluster):
            return False
        if not self.whole_front:
            return True
        cluster = self.jobs[candidate.cluster].cluster
        goals = (
            candidate.bound.step_s,
            candidate.bound.memory_bytes,
            cluster.gpus,
            _price(cluster, candidate.bound.step_s) or 0.0,
        )
        return any(all(a <= b for a, b in zip(one.goals, goals, strict=True)) for one in pareto(self.found))

    def _slowest_top_s(self, cluster: int) -> float:
        """Step time of the last of the top plans so far; infinite while there are fewer."""
        times = [one.step_time_s for one in self.found if one.cluster == cluster][: self.top]
        return times[-1] if len(times) == self.top else inf

    def _worth_s(self, cluster: int) -> float:
        return inf if self.whole_front else self._slowest_top_s(cluster)

    def _shown(self) -> tuple[Found, ...]:
        """What was found; intervals that only some orders of simulating leave behind are dropped."""
        return tuple(
            one if one.step_time_s <= self._worth_s(one.cluster) else replace(one, low_s=None, high_s=None)
            for one in self.found
        )

    def result(self) -> SearchResult:
        """What came of it."""
        counts = Counts(
            enumerated=self.enumerated,
            invalid=self.invalid,
            too_large=self.too_large,
            pruned=self.pruned,
            simulated=len(self.found),
            resumed=self.resumed,
            lost=self.lost,
        )
        return SearchResult(self._shown(), counts, self.top, self.jobs, self.whole_front or not self.prune)


def _key(cluster: int, fields: Mapping[str, Any]) -> str:
    return f"{cluster} {sorted(fields.items())}"


def _capacity_bytes(cluster: Cluster) -> int:
    """Memory of the roomiest device."""
    return max(device.memory_bytes for device in cluster.devices)


def _price(cluster: Cluster, step_s: float) -> float | None:
    return cost(cluster, step_s=step_s, busy_fraction=0.0, step_tokens=1).step_price


# ---- in a worker ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=16)  # a worker answers for the same few jobs again and again
def _opened(token: bytes) -> tuple[Job, Bounds]:
    job, axes = pickle.loads(token)
    return job, Bounds(job.model, job.cluster, axes, job.plan.collective_algorithm)


def bound_plans(task: tuple[bytes, int, list[dict[str, Any]]]) -> list[Bound | None]:
    """Bounds of plans by their fields; None for one that breaks a rule."""
    token, _, some = task
    job, bounds = _opened(token)
    return [_bound(job, bounds, fields) for fields in some]


def _bound(job: Job, bounds: Bounds, fields: dict[str, Any]) -> Bound | None:
    try:
        # a plan that breaks a rule of its own is found out when it is simulated: to check each would take the most time
        return bounds.of(job.plan.model_copy(update=fields))
    except (SimparError, ValueError):
        return None


def simulate_plan(task: tuple[bytes, Candidate]) -> dict[str, Any]:
    """The record of a simulated plan; ``error`` is ``memory`` for one that does not fit, else a broken rule."""
    token, candidate = task
    base, _ = _opened(token)
    record = {"plan": candidate.fields, "cluster": candidate.cluster}
    try:
        job = base.replace(plan=base.plan.replace(**candidate.fields))
        capacity = _capacity_bytes(job.cluster)
        if candidate.bound.memory_bytes > _SURE * capacity and _peak_bytes(job) > capacity:
            return {**record, "error": "memory"}
        result = simulate(job, allow_oom=True)
    except (SimparError, ValueError) as error:
        return {**record, "error": str(error)}
    if not result.fits:
        return {**record, "error": "memory"}
    low_s, high_s = result.step_time_interval() if result.step_time_s <= candidate.worth_s else (None, None)
    return {
        **record,
        "step_time_s": result.step_time_s,
        "low_s": low_s,
        "high_s": high_s,
        "memory_bytes": result.peak_memory_bytes,
        "gpus": job.cluster.gpus,
        "tokens_per_s": result.tokens_per_s,
        "mfu": result.mfu,
        "cost_per_step": result.cost().step_price,
    }


def _peak_bytes(job: Job) -> int:
    layout = lay_out(job.plan, job.model, job.cluster)
    return max(footprint.peak_bytes for footprint in footprints(lower(job.model, job.cluster, layout)))
