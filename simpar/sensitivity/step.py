"""How many seconds of the step are due to each parameter: d(step time)/d(parameter), from the critical path.

One simulation is enough for all parameters: the walk of :mod:`simpar.sensitivity.adjoint` says how the step depends
on the cost of each of its parts, and only the distinct parts are priced again with a parameter 1 % up and down.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from simpar.result import Result
from simpar.sensitivity.adjoint import weigh
from simpar.sensitivity.blocks import Blocks
from simpar.sensitivity.ends import ends_of
from simpar.sensitivity.parameters import PARAMETERS, Machine, Parameter
from simpar.sensitivity.prices import Prices, Weights
from simpar.sensitivity.steps import Steps, steps_of
from simpar.sensitivity.waits import Waits

CHANGE = 0.01
"""By how much a parameter is changed to see what follows, up and down."""
MOST_SWING = 5.0
"""Gross time of costs over the step beyond which the first order holds for tiny changes only."""
MEETING_SWING = 1.02
"""The same where it says that workers that run apart meet on links."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How the step answers to one parameter.

    Attributes:
        parameter: which one.
        seconds: seconds by which the step grows per 100 % more of the parameter's time (1/100 of it for 1 %); for a
            rate that is what the step would shrink by per 100 % more of it, to first order.
        share: of the step time; the elasticity.
        is_exact: whether it is the derivative; else it is an estimate (:attr:`Dependence.is_exact`).
    """

    parameter: Parameter
    seconds: float
    share: float
    is_exact: bool = True


class Dependence:
    """The step's first-order dependence on everything that costs time.

    Attributes:
        steps: program and trace.
        step_ns: end of the trace.
        machine: where it ran.
        prices: there.
        blocks: run there alone.
        swing: gross time of all costs, whatever their signs, over the step: 1 where each cost only adds to it. Where
            many flows share links each on its own, costs cancel: one flow ends later, so another is faster, and so on.
        weights: how the step depends on costs.
    """

    def __init__(self, result: Result) -> None:
        self.steps: Steps = steps_of(result)
        self.step_ns = result.trace.step_ns
        program, cluster = self.steps.program, result.job.cluster
        if program.placement is not None:
            cluster = cluster.replace(placement=program.placement)
        self.machine = Machine(cluster, program.launch_s)
        self.prices = self._prices(self.machine)
        self.blocks = Blocks(self.prices)
        ends = ends_of(result, self.steps, Waits(self.steps, self.prices, self.blocks))
        self.weights: Weights = weigh(self.steps, self.prices, self.blocks, ends)
        self._step_s = result.step_time_s
        self.swing = self.prices.gross_ns(self.weights) * 1e-9 / self._step_s if self._step_s else 1.0
        server = result.layout.server
        self._runs_apart = server is not None and not server.is_synchronous
        if self.swing > MOST_SWING:
            self.weights = weigh(self.steps, self.prices, self.blocks, ends, steady=True)

    @property
    def residual_s(self) -> float:
        """Seconds of the step that no cost explains.

        A step is homogeneous of degree 1 in all its times, so the costs times their weights add up to it, whatever the
        path (Euler); what is left over are times that belong to no parameter: a rank that starts late, jitter, slow
        devices and links of a job with faults.
        """
        return self._step_s - self.prices.spent_ns(self.weights) * 1e-9

    @property
    def is_exact(self) -> bool:
        """Whether weights are derivatives, which a small change confirms; else they are estimates.

        Two classes of jobs have estimates only. Where workers of a parameter server run apart and meet on links,
        messages begin and end at the same instants for reasons of their own, and the step jumps when their order
        changes. And where costs cancel to many steps (:attr:`swing`), flows are taken as steady.
        """
        return self.swing <= (MEETING_SWING if self._runs_apart else MOST_SWING)

    def seconds(self, slower: Callable[[Machine, float], Machine], change: float = CHANGE) -> float:
        """d(step)/d(ln of a time): seconds of the step that scale with what ``slower`` scales.

        Args:
            slower: scales it.
            change: by how much, up and down.
        """
        up, down = (self._prices(slower(self.machine, 1 + c)).total_ns(self.weights) for c in (change, -change))
        return (up - down) / (2 * change) * 1e-9

    def _prices(self, machine: Machine) -> Prices:
        known = self.prices if machine is not self.machine else None
        return Prices(machine, self.steps.program, self.steps.ranks, known)


def sensitivities(result: Result, dependence: Dependence | None = None) -> tuple[Sensitivity, ...]:
    """The step's sensitivity to every parameter, in the order of :data:`~simpar.sensitivity.parameters.PARAMETERS`.

    Right to first order, as long as no other path becomes critical; that is what a finite difference of 1 % shows too.
    What can only be estimated says so (:attr:`Sensitivity.is_exact`).

    Args:
        result: the step.
        dependence: its dependence on costs, if it is known already.
    """
    dependence = dependence or Dependence(result)
    found = []
    for parameter in PARAMETERS:
        seconds = dependence.seconds(parameter.slower)
        share = seconds / result.step_time_s if result.step_time_s else 0.0
        found.append(Sensitivity(parameter, seconds, share, dependence.is_exact))
    return tuple(found)


def class_seconds(
    dependence: Dependence, classes: Mapping[str, Callable[[Machine, float], Machine]]
) -> dict[str, float]:
    """Seconds of the step by class of cost."""
    return {name: dependence.seconds(slower) for name, slower in classes.items()}
