"""What workers do for a search: look at families, open them, simulate plans.

Questions and answers travel between processes, so they are plain values.
"""

import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

from simpar.errors import SimparError
from simpar.hardware.cluster import Cluster
from simpar.job import Job
from simpar.plan.layout import lay_out
from simpar.program.footprint import footprints
from simpar.program.lower import lower
from simpar.search.bound import Bound, Bounds
from simpar.search.families import Families, Opened, Outlook
from simpar.search.space import SPREAD, Fields, Space
from simpar.simulation import simulate

_SURE = 0.9  # of the memory of a device: below, what the bound does not count is not worth a look before simulating


class Group(NamedTuple):
    """Families whose outlooks are asked for: the number of their cluster, the fields of each."""

    cluster: int
    families: tuple[Fields, ...]


class Branch(NamedTuple):
    """Families that differ only in how experts are spread: the number of their cluster, the fields of each.

    ``outlook`` is what is known of all of them; a branch without one asks for it.
    """

    cluster: int
    families: tuple[Fields, ...]
    outlook: Outlook | None = None

    @property
    def bound(self) -> Bound:
        """What none of their plans undercuts."""
        assert self.outlook is not None, "a branch is looked at before it is weighed"
        assert self.outlook.bound is not None, "a branch of which nothing fits is not weighed"
        return self.outlook.bound

    @property
    def fields(self) -> Fields:
        """What tells it from other branches."""
        return {name: value for name, value in self.families[0].items() if name not in SPREAD}

    @property
    def plans(self) -> int:
        """How many plans nothing is known of."""
        assert self.outlook is not None, "a branch is looked at before it is weighed"
        return self.outlook.plans


class Family(NamedTuple):
    """Plans that share their kernels: the number of their cluster, the fields of the family, what is known of it.

    ``limit_s`` is the step time beyond which its plans are of no interest when it is opened.
    """

    cluster: int
    fields: Fields
    bound: Bound
    outlook: Outlook
    limit_s: float = inf

    @property
    def plans(self) -> int:
        """How many plans nothing is known of."""
        return self.outlook.plans - self.outlook.invalid - self.outlook.too_large


class Candidate(NamedTuple):
    """A plan that may be worth simulating: the number of its cluster, its fields, its bound.

    ``worth_s`` is the step time from which on its interval will not be asked for, which takes as long as the step.
    """

    cluster: int
    fields: Fields
    bound: Bound
    worth_s: float = inf
    plans: int = 1


Question = Group | Branch | Family | Candidate
Answer = list[Outlook] | Outlook | Opened | dict[str, Any]


def token_of(job: Job, choices: Mapping[str, Sequence[Any]], *, prune: bool) -> bytes:
    """What a worker must know of a search on one cluster."""
    return pickle.dumps((job, dict(choices), prune))


@lru_cache(maxsize=16)  # a worker answers for the same few jobs again and again
def _opened(token: bytes) -> tuple[Job, Families]:
    job, choices, prune = pickle.loads(token)
    space = Space(job.model, job.cluster, job.plan, choices)
    bounds, common = (
        Bounds(job.model, job.cluster, space.axes, without_experts=without, prunes=prune) for without in (False, True)
    )
    return job, Families(space, bounds, job.plan, common)


def answer(task: tuple[bytes, Question]) -> Answer:
    """Answers whatever a search asks: outlooks of a branch or of families, an opened family, a simulated plan."""
    token, question = task
    job, families = _opened(token)
    if isinstance(question, Candidate):
        return simulate_plan(job, question)
    if isinstance(question, Branch):
        return families.branch_outlook(question.families)
    if isinstance(question, Family):
        return families.opened(question.fields, question.limit_s)
    return [families.outlook(fields) for fields in question.families]


def simulate_plan(base: Job, candidate: Candidate) -> dict[str, Any]:
    """The record of a simulated plan; ``error`` is ``memory`` for one that does not fit, else a broken rule."""
    record = {"plan": candidate.fields, "cluster": candidate.cluster}
    try:
        job = base.replace(plan=base.plan.replace(**candidate.fields))
        capacity = capacity_bytes(job.cluster)
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


def capacity_bytes(cluster: Cluster) -> int:
    """Memory of the roomiest device."""
    return max(device.memory_bytes for device in cluster.devices)
