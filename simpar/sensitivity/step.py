"""How many seconds of the step are due to each parameter: d(step time)/d(parameter), from the critical path.

One simulation is enough for all parameters: the walk of :mod:`simpar.sensitivity.adjoint` says how the step depends
on the cost of each of its parts, and only the distinct parts are priced again with a parameter 1 % up and down.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simpar.result import Result
from simpar.sensitivity.adjoint import weigh
from simpar.sensitivity.blocks import Blocks
from simpar.sensitivity.parameters import PARAMETERS, Machine, Parameter
from simpar.sensitivity.prices import Prices, Weights
from simpar.sensitivity.steps import Steps, steps_of

CHANGE = 0.01
"""By how much a parameter is changed to see what follows, up and down."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How the step answers to one parameter.

    Attributes:
        parameter: which one.
        seconds: seconds by which the step grows per 100 % more of the parameter's time (1/100 of it for 1 %); for a
            rate
            that is what the step would shrink by per 100 % more of it, to first order.
        share: of the step time; the elasticity.
    """

    parameter: Parameter
    seconds: float
    share: float


class Dependence:
    """The step's first-order dependence on everything that costs time."""

    def __init__(self, result: Result) -> None:
        self.steps: Steps = steps_of(result)
        self.step_ns = result.trace.step_ns
        # a trace may cover several steps
        self._of_a_step = result.step_time_s / result.trace.step_s if result.trace.step_ns else 0.0
        program, cluster = self.steps.program, result.job.cluster
        if program.placement is not None:
            cluster = cluster.replace(placement=program.placement)
        self.machine = Machine(cluster, program.launch_s)
        self.prices = self._prices(self.machine)
        self.blocks = Blocks(self.prices)
        self.weights: Weights = weigh(self.steps, self.prices, self.blocks)

    def seconds(self, slower: Callable[[Machine, float], Machine]) -> float:
        """d(step)/d(ln of a time): seconds of the step that scale with what ``slower`` scales."""
        up, down = (
            self._prices(slower(self.machine, factor)).total_ns(self.weights) for factor in (1 + CHANGE, 1 - CHANGE)
        )
        return (up - down) / (2 * CHANGE) * 1e-9 * self._of_a_step

    def _prices(self, machine: Machine) -> Prices:
        known = self.prices if machine is not self.machine else None
        return Prices(machine, self.steps.program, self.steps.ranks, known)


def sensitivities(result: Result, dependence: Dependence | None = None) -> tuple[Sensitivity, ...]:
    """The step's sensitivity to every parameter, in the order of :data:`~simpar.sensitivity.parameters.PARAMETERS`.

    Right to first order, as long as no other path becomes critical; that is what a finite difference of 1 % shows too.

    Args:
        result: the step.
        dependence: its dependence on costs, if it is known already.
    """
    dependence = dependence or Dependence(result)
    found = []
    for parameter in PARAMETERS:
        seconds = dependence.seconds(parameter.slower)
        found.append(Sensitivity(parameter, seconds, seconds / result.step_time_s if result.step_time_s else 0.0))
    return tuple(found)


def class_seconds(
    dependence: Dependence, classes: Mapping[str, Callable[[Machine, float], Machine]]
) -> dict[str, float]:
    """Seconds of the step by class of cost."""
    return {name: dependence.seconds(slower) for name, slower in classes.items()}
