"""How data-parallel replicas agree on their parameters beside a plain all-reduce in every step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simpar.description import Description
from simpar.errors import PlanError, SimparError, nearest
from simpar.hardware.cluster import Cluster

if TYPE_CHECKING:
    from simpar.plan.plan import Plan

OuterOptimizer = Literal["average", "nesterov"]
Positive = Annotated[int, Field(ge=1)]
_WORDS = ("all_reduce", "parameter_server")


class ParameterServer(Description):
    """Servers that keep the parameters: workers push gradients, servers update, workers pull (Li et al. 2014, OSDI).

    Attributes:
        servers: how many; left open, one for each worker (``workers``) or node (``hosts``), or one (``nodes``).
        on: where they run: ``workers`` on the workers' GPUs, ``hosts`` on the processors of the workers' nodes,
            ``nodes`` on the processors of further nodes, the last ones of the cluster.
        sharding: ``sliced`` cuts each bucket of parameters into equal parts for all servers (BytePS, MXNet's large
            arrays), ``whole`` gives each bucket to the server that has the least so far (TensorFlow's
            ``GreedyLoadBalancingStrategy``).
        mode: ``synchronous`` updates once all workers have pushed; ``asynchronous`` after every push, and nobody waits
            for another worker (Hogwild, Dean et al. 2012); ``stale_synchronous`` likewise, but no worker is more than
            ``bound`` steps ahead of the slowest (Ho et al. 2013).
        bound: see ``mode``; 0 lets nobody begin a step that others have not ended the one before.
        steps: steps that are simulated where workers do not wait for each other; times are their mean.
    """

    error_type: ClassVar[type[SimparError]] = PlanError

    servers: Positive | None = None
    on: Literal["workers", "hosts", "nodes"] = "workers"
    sharding: Literal["sliced", "whole"] = "sliced"
    mode: Literal["synchronous", "asynchronous", "stale_synchronous"] = "synchronous"
    bound: Annotated[int, Field(ge=0)] | None = None
    steps: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bound is not None and self.mode != "stale_synchronous":
            raise ValueError(f"bound {self.bound} belongs to mode 'stale_synchronous', not '{self.mode}'; drop it")
        if self.bound is None and self.mode == "stale_synchronous":
            raise ValueError("mode 'stale_synchronous' needs a bound, such as bound=3; asynchronous has none")
        if self.steps == 1:
            raise ValueError("steps 1 shows no step that follows another; set steps to at least 2")
        if self.steps is not None and self.mode == "synchronous":
            raise ValueError(
                f"steps {self.steps} has no meaning with mode 'synchronous', whose steps are alike; drop it"
            )
        return self

    @property
    def is_synchronous(self) -> bool:
        """Whether all workers push before anything is updated."""
        return self.mode == "synchronous"

    def count(self, workers: int, nodes: int) -> int:
        """How many servers there are for so many workers on so many nodes."""
        return self.servers or {"workers": workers, "hosts": nodes, "nodes": 1}[self.on]

    @property
    def simulated_steps(self) -> int:
        """Steps of one simulation."""
        if self.is_synchronous:
            return 1
        return self.steps or max(8, 2 * (self.bound or 0))


def read_sync(value: Any) -> Any:
    """``all_reduce``, ``parameter_server``, or the fields of a :class:`ParameterServer`.

    Raises:
        PlanError: it is none of these.
    """
    if value == "parameter_server":
        return ParameterServer()
    if isinstance(value, str) and value not in _WORDS:
        raise PlanError(
            f"sync '{value}' is not known{nearest(value, _WORDS)}; write all_reduce, parameter_server, or fields such "
            "as {servers: 4, on: hosts}"
        )
    return ParameterServer.model_validate(value) if isinstance(value, Mapping) else value


def check_sync(plan: "Plan") -> None:
    """Refuses what cannot go together.

    Raises:
        ValueError: the first rule that the plan breaks.
    """
    if isinstance(plan.sync, ParameterServer):
        _check_server(plan)
    if plan.sync_every > 1:
        _check_periodic(plan)
    elif plan.outer_optimizer is not None:
        raise ValueError(
            f"outer_optimizer '{plan.outer_optimizer}' acts when replicas average after several steps, but sync_every "
            "is 1; raise sync_every or drop it"
        )
    if plan.compression_ratio is not None and plan.grad_compression != "topk":
        raise ValueError(
            f"compression_ratio {plan.compression_ratio:g} belongs to grad_compression 'topk', not "
            f"'{plan.grad_compression}'; drop one of the two"
        )
    if plan.grad_compression != "none" and (plan.zero or plan.ep > 1):
        held = f"zero {plan.zero}" if plan.zero else f"ep {plan.ep}"
        raise ValueError(
            f"grad_compression '{plan.grad_compression}' works on gradients that every replica holds in full, but "
            f"{held} spreads them; set zero=0 and ep=1"
        )


def _check_server(plan: "Plan") -> None:
    for name, value, most in (("zero", plan.zero, 0), ("pp", plan.pp, 1), ("cp", plan.cp, 1), ("ep", plan.ep, 1)):
        if value > most:
            raise ValueError(
                f"{name} {value} cannot go with sync 'parameter_server', whose servers hold the states and whose "
                f"workers hold whole models; set {name}={most} or sync=all_reduce"
            )
    if plan.sync_every > 1:
        raise ValueError(
            f"sync_every {plan.sync_every} averages by all-reduce, which sync 'parameter_server' replaces; drop one of "
            "the two"
        )


def _check_periodic(plan: "Plan") -> None:
    every = f"sync_every {plan.sync_every}"
    if plan.ep > 1:
        raise ValueError(f"{every} needs replicas that are whole models, but ep {plan.ep} spreads experts; set ep=1")
    if plan.grad_compression != "none":
        raise ValueError(
            f"{every} sends no gradients that grad_compression '{plan.grad_compression}' could compress; drop one of "
            "the two"
        )
    if plan.zero and plan.dp_shard is None:
        raise ValueError(
            f"{every} with zero {plan.zero} needs several groups that shard, to train apart from each other; set "
            "dp_shard to the ranks of such a group"
        )
    if plan.cp > 1 and (plan.zero == 0 or (plan.dp_shard or 1) % plan.cp):
        raise ValueError(
            f"{every} with cp {plan.cp} needs groups that hold whole sequences; set zero and a dp_shard that is a "
            f"multiple of {plan.cp}"
        )


def worker_gpus(plan: "Plan", cluster: Cluster) -> int:
    """GPUs that train: all but those of nodes that are parameter servers.

    Raises:
        PlanError: no node is left for a worker.
    """
    if not isinstance(plan.sync, ParameterServer) or plan.sync.on != "nodes":
        return cluster.gpus
    if cluster.nodes == 1:
        raise PlanError("servers on nodes of their own need a second node, but the cluster has one; set sync.on=hosts")
    nodes = plan.sync.servers or 1
    if nodes >= cluster.nodes:
        raise PlanError(
            f"{nodes} servers on nodes of their own leave no worker of the cluster's {cluster.nodes} nodes; set "
            f"sync.servers to at most {cluster.nodes - 1}, or add nodes"
        )
    return cluster.gpus - nodes * cluster.gpus_per_node
