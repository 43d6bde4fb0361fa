"""What a search left out that would fit, where nothing did that it looked at."""

from typing import Any, NamedTuple

from simpar.job import Job
from simpar.program.relief import Relief, fitting, most_frugal
from simpar.search.found import SearchResult, shown_plan
from simpar.search.space import AXES


class Unsearched(NamedTuple):
    """A plan that fits, and that a search did not look at.

    Attributes:
        fields: of the plan, those that the search left out, with their values.
        relief: how it differs from the job of the search.
        job: that job.
        searched: what the search looked at of these fields.
    """

    fields: dict[str, Any]
    relief: Relief
    job: Job
    searched: dict[str, tuple[Any, ...]]

    def __str__(self) -> str:
        words = []
        for name, value in self.fields.items():
            if name in self.job.plan.model_fields_set:  # what a job says is not searched
                words.append(f"--set plan.{name}={_word(value)}")
            else:
                words.append(f"--choose {name}={','.join(map(_word, (*self.searched[name], value)))}")
        return f"{' '.join(words)} (as {shown_plan(self.relief.change)}: {self.relief.need})"


def unsearched(result: SearchResult) -> list[Unsearched]:
    """Plans that fit, one for each smallest set of fields that the search would have to look at.

    They are the most frugal ones (:func:`~simpar.program.relief.most_frugal`): where none is found, only more GPUs, or
    GPUs with more memory, would help.
    """
    found: dict[tuple[str, ...], Unsearched] = {}
    for job in result.jobs:
        searched = {**{name: (value,) for name, value in job.plan if name not in AXES}, **result.choices}
        for relief in fitting(job.model, job.cluster, job.plan, most_frugal(job.plan, job.cluster.gpus_per_node)):
            left_out = {n: v for n, v in relief.change.items() if n in searched and v not in searched[n]}
            if left_out:
                looked = {name: tuple(searched[name]) for name in left_out}
                found.setdefault(tuple(left_out), Unsearched(left_out, relief, job, looked))
    # what needs more of them than another way is no news
    return [way for names, way in found.items() if not any(set(other) < set(names) for other in found)]


def _word(value: Any) -> str:
    """A value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
