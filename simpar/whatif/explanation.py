"""What bounds a step: its critical path, what each parameter would change, and what removing a resource could gain."""

from dataclasses import dataclass
from typing import Any

from simpar.job import Job
from simpar.result import Result
from simpar.sensitivity.attribution import path_time, seconds
from simpar.sensitivity.parameters import PARAMETERS, RESOURCES, Resource, slowed
from simpar.sensitivity.step import Dependence, Sensitivity, sensitivities
from simpar.simulation import simulate
from simpar.units import format_time

_FREE = 1e-9  # times the usual: far below a nanosecond for anything that a step is made of
_NOTABLE = 0.005  # share of the step below which words leave a part out
_VERBS: dict[Resource, str] = {
    "matrix units": "products and attention took no time to compute",
    "memory": "memory traffic took no time",
    "kernel overheads": "kernels started and ended at once",
    "host launches": "launching kernels took no time",
    "node link": "the links inside nodes were infinitely fast",
    "network": "the network between nodes were infinitely fast",
    "hosts": "the memory of hosts and the links to it were infinitely fast",
    "interference": "collectives did not slow compute beside them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What a resource that costs no time at all would leave of the step.

    Attributes:
        resource: which one.
        step_s: simulated step time without it.
        gain_s: by how much the step would be shorter: the most that any improvement of it can give.
    """

    resource: Resource
    step_s: float
    gain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What bounds a step.

    Attributes:
        result: the step.
        path_ns: nanoseconds of its critical path by kind of work; they add up to the step.
        sensitivities: by parameter, in the order of the catalog.
        headroom: by resource, largest gain first.
    """

    result: Result
    path_ns: dict[str, int]
    sensitivities: tuple[Sensitivity, ...]
    headroom: tuple[Headroom, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The answer in sentences."""
        step_s = self.result.step_time_s
        if not step_s:
            return ("The step takes no time.",)
        parts = sorted(seconds(self.path_ns).items(), key=lambda item: -item[1])
        notable = [f"{name} {spent / step_s:.0%}" for name, spent in parts[1:4] if spent > _NOTABLE * step_s]
        bound, most = parts[0]
        first = f"The step of {format_time(step_s)} is bound by {bound}: {most / step_s:.0%} of its critical path"
        said = [first + (f", then {', '.join(notable)}." if notable else ".")]
        for number, found in enumerate(self.headroom[:3]):
            if found.gain_s > _NOTABLE * step_s:
                limit = "which is the most that this can give" if number == 0 else "at most"
                said.append(
                    f"If {_VERBS[found.resource]}, the step would take {format_time(found.step_s)}, "
                    f"{found.gain_s / step_s:.0%} less, {limit}."
                )
        steepest = max(self.sensitivities, key=lambda s: s.seconds)
        said.append(
            f"The steepest single parameter is {steepest.parameter.label}: 1% better shortens the step by about "
            f"{max(steepest.share, 0.0) * 1e-2:.2%}."
        )
        if not all(found.is_exact for found in self.sensitivities):
            said.append("Slopes of single parameters are estimates here: small changes reorder what meets on links.")
        if self.result.bubble_fraction > _NOTABLE:
            cause = " (pipeline bubble)" if self.result.job.plan.pp > 1 else ""
            said.append(
                f"GPUs have nothing to do for {self.result.bubble_fraction:.0%} of the step on the mean{cause}; "
                "faster parts shorten it in proportion, another plan may remove it."
            )
        return tuple(said)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, times in seconds."""
        step_s = self.result.step_time_s
        return {
            "step_time_s": step_s,
            "words": list(self.words),
            "critical_path_s": seconds(self.path_ns),
            "sensitivities": [
                {
                    "parameter": s.parameter.name,
                    "resource": s.parameter.resource,
                    "step_seconds": s.seconds,
                    "share": s.share,
                    "is_exact": s.is_exact,
                }
                for s in self.sensitivities
            ],
            "headroom": [{"resource": h.resource, "step_time_s": h.step_s, "gain_s": h.gain_s} for h in self.headroom],
            "bubble_fraction": self.result.bubble_fraction,
        }


def explain(job: "Job | dict[str, Any] | Result", *, allow_oom: bool = False) -> Explanation:
    """What bounds the step of a job.

    Args:
        job: the job, its fields, or a result of it.
        allow_oom: explain also a job that does not fit its devices.

    Raises:
        SimparError: the job cannot be simulated; see :func:`simpar.simulation.simulate`.

    >>> found = explain(dict(model="gpt2", cluster="h100-sxm:8"))
    >>> found.headroom[0].resource
    'host launches'
    """
    result = job if isinstance(job, Result) else simulate(job, allow_oom=allow_oom)
    dependence = Dependence(result)
    rooms = [_headroom(result, resource) for resource in RESOURCES]
    return Explanation(
        result=result,
        path_ns=path_time(dependence),
        sensitivities=sensitivities(result, dependence),
        headroom=tuple(sorted(rooms, key=lambda found: -found.gain_s)),
    )


def without(job: Job, resource: Resource) -> Job:
    """The job on a machine on which a resource costs no time."""
    for parameter in PARAMETERS:
        if parameter.resource == resource:
            job = slowed(job, parameter, _FREE)
    return job


def _headroom(result: Result, resource: Resource) -> Headroom:
    step_s = simulate(without(result.job, resource), allow_oom=True).step_time_s
    return Headroom(resource=resource, step_s=step_s, gain_s=result.step_time_s - step_s)
