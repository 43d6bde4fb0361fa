"""What can be made faster or slower: the parameters of a machine, and the classes of costs whose errors go together.

A :class:`Parameter` is a way to scale a part of the machine, written as data. Rates are divided and times multiplied,
so that a factor of 1.01 always means "1 % slower": a part's sensitivity is the seconds that the step takes because of
it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from simpar.description import Description
from simpar.hardware.cluster import Cluster, Fabric, NodeLink
from simpar.hardware.device import Device
from simpar.hardware.host import Host
from simpar.job import Job
from simpar.plan.layout import lay_out

Resource = Literal[
    "matrix units", "memory", "kernel overheads", "host launches", "node link", "network", "hosts", "interference"
]
RESOURCES: tuple[Resource, ...] = Resource.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a program runs: the cluster, and the host's time per launch in seconds."""

    cluster: Cluster
    launch_s: float

    def device(self, change: Callable[[Device], Mapping[str, Any]]) -> "Machine":
        """A copy with fields of the device changed, of all kinds of devices if there are several.

        Nothing is checked: a fit may be scaled beyond what a file may say.
        """
        groups = tuple(_changed(g, device=_changed(g.device, **change(g.device))) for g in self.cluster.groups)
        device = _changed(self.cluster.device, **change(self.cluster.device))
        return replace(self, cluster=_changed(self.cluster, device=device, groups=groups))

    def node_link(self, change: Callable[[NodeLink], NodeLink]) -> "Machine":
        """A copy with the node link changed, on every level and of every kind of node."""
        groups = tuple(_changed(g, node_link=_each_level(g.node_link, change)) for g in self.cluster.groups)
        link = _each_level(self.cluster.node_link, change)
        return replace(self, cluster=_changed(self.cluster, node_link=link, groups=groups))

    def host(self, change: Callable[[Host], Host]) -> "Machine":
        """A copy with the hosts of nodes changed: their memory and their links to devices."""
        return replace(self, cluster=_changed(self.cluster, host=change(self.cluster.host)))

    def network(self, change: Callable[[Fabric], Fabric], rate: float = 1.0, time: float = 1.0) -> "Machine":
        """A copy with the fabric changed; its NICs of other kinds of nodes, and a graph's edges, by these factors."""
        fabric, graph = self.cluster.fabric, self.cluster.graph
        if graph is not None:
            edges = tuple(
                _changed(e, bandwidth_gbps=e.bandwidth_gbps * rate, latency_us=e.latency_us * time) for e in graph.edges
            )
            graph = _changed(graph, edges=edges)
        groups = tuple(
            g if g.nic_gbps is None else _changed(g, nic_gbps=g.nic_gbps * rate) for g in self.cluster.groups
        )
        fabric = None if fabric is None else change(fabric)
        return replace(self, cluster=_changed(self.cluster, fabric=fabric, graph=graph, groups=groups))


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, or several that change together.

    Attributes:
        name: dotted path of the field in a cluster, or of what the fields have in common.
        label: for people.
        resource: what it belongs to.
        slower: the machine with this part's times multiplied by a factor (its rates divided by it).
    """

    name: str
    label: str
    resource: Resource
    slower: Callable[[Machine, float], Machine]


def slowed(job: Job, parameter: Parameter, factor: float) -> Job:
    """The job on a machine that is slower by ``factor`` in one parameter (faster where it is below 1)."""
    plan = job.plan
    launch_s = lay_out(plan, job.model, job.cluster).launch_s
    machine = parameter.slower(Machine(job.cluster, launch_s), factor)
    if machine.launch_s != launch_s:
        plan = plan.replace(launch_s=machine.launch_s)
    return job.model_copy(update={"cluster": machine.cluster, "plan": plan})


def _changed(description: Any, **changes: Any) -> Any:
    """A copy without validation: limits that hold for what people write need not hold for what-ifs."""
    return description.model_copy(update=changes)


def _each_level(link: NodeLink, change: Callable[[NodeLink], NodeLink]) -> NodeLink:
    changed = change(link)
    return changed if link.beyond is None else _changed(changed, beyond=_each_level(link.beyond, change))


def _scaled(
    description: Description, factor: float, *, times: tuple[str, ...] = (), rates: tuple[str, ...] = ()
) -> Any:
    """Times multiplied and rates divided by ``factor``."""
    slow = {name: getattr(description, name) * factor for name in times}
    return _changed(description, **slow, **{name: getattr(description, name) / factor for name in rates})


def _with_scaled(fits: Mapping[Any, Any], key: Any, factor: float, **fields: tuple[str, ...]) -> dict[Any, Any]:
    """The fits with one of them scaled, if it is there."""
    return {name: _scaled(fit, factor, **fields) if name == key else fit for name, fit in fits.items()}


# ---- the device -----------------------------------------------------------------------------------------------------


def _peak(machine: Machine, factor: float) -> Machine:
    return machine.device(lambda d: {"peak_flop_per_s": {t: peak / factor for t, peak in d.peak_flop_per_s.items()}})


def _memory(machine: Machine, factor: float) -> Machine:
    return machine.device(lambda d: {"memory_bytes_per_s": d.memory_bytes_per_s / factor})


def _overheads(machine: Machine, factor: float) -> Machine:
    def change(device: Device) -> dict[str, Any]:
        fits: dict[str, Mapping[Any, Description]] = {
            "gemm": device.gemm,
            "attention": device.attention,
            "memory_bound": device.memory_bound,
        }
        return {
            part: {key: _scaled(fit, factor, times=("overhead_s",)) for key, fit in of.items()}
            for part, of in fits.items()
        }

    return machine.device(change)


def _launch(machine: Machine, factor: float) -> Machine:
    return replace(machine, launch_s=machine.launch_s * factor)


def _interference(machine: Machine, factor: float) -> Machine:
    """What compute loses beside collectives, 1 - rate, times ``factor``."""

    def change(device: Device) -> dict[str, float]:
        lost = 1 - device.compute_rate_during_collectives
        return {"compute_rate_during_collectives": max(1 - lost * factor, 1e-3)}

    return machine.device(change)


# ---- links ----------------------------------------------------------------------------------------------------------

_LINK_LATENCIES = ("base_latency_s", "step_latency_s", "p2p_latency_s", "peer_latency_s", "nvls_latency_s")
_FABRIC_LATENCIES = ("ring_intra_step_s", "ring_step_s", "tree_level_s", "p2p_latency_s")


def _node_bandwidth(machine: Machine, factor: float) -> Machine:
    rates = ("bandwidth_bytes_per_s", "nominal_bytes_per_s")
    return machine.node_link(lambda link: _scaled(link, factor, rates=rates))


def _node_latency(*fields: str) -> Callable[[Machine, float], Machine]:
    return lambda machine, factor: machine.node_link(lambda link: _scaled(link, factor, times=fields))


def _nic(machine: Machine, factor: float) -> Machine:
    return machine.network(lambda f: _scaled(f, factor, rates=("nic_gbps",)), rate=1 / factor)


def _network_bandwidth(machine: Machine, factor: float) -> Machine:
    rates = ("nic_gbps", "p2p_channel_bytes_per_s")
    return machine.network(lambda f: _scaled(f, factor, rates=rates), rate=1 / factor)


def _channels(machine: Machine, factor: float) -> Machine:
    return machine.network(lambda f: _scaled(f, factor, rates=("p2p_channel_bytes_per_s",)))


def _network_latency(*fields: str) -> Callable[[Machine, float], Machine]:
    edges = fields == _FABRIC_LATENCIES
    return lambda machine, factor: machine.network(
        lambda fabric: _scaled(fabric, factor, times=fields), time=factor if edges else 1.0
    )


def _host_link(machine: Machine, factor: float) -> Machine:
    return machine.host(lambda host: _scaled(host, factor, rates=("link_bytes_per_s",)))


def _host_memory(machine: Machine, factor: float) -> Machine:
    return machine.host(lambda host: _changed(host, device=_scaled(host.device, factor, rates=("memory_bytes_per_s",))))


def _host_bandwidth(machine: Machine, factor: float) -> Machine:
    return _host_link(_host_memory(machine, factor), factor)


def _host_latency(machine: Machine, factor: float) -> Machine:
    def change(host: Host) -> Host:
        fits = {name: _scaled(fit, factor, times=("overhead_s",)) for name, fit in host.device.memory_bound.items()}
        slower: Host = _scaled(host, factor, times=("latency_s",))
        return slower.model_copy(update={"device": _changed(host.device, memory_bound=fits)})

    return machine.host(change)


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("device.peak_flop_per_s", "peak FLOP/s", "matrix units", _peak),
    Parameter("device.memory_bytes_per_s", "memory bandwidth", "memory", _memory),
    Parameter("device.overhead_s", "start and end of kernels", "kernel overheads", _overheads),
    Parameter("device.launch_s", "host time per launch", "host launches", _launch),
    Parameter("node_link.bandwidth_bytes_per_s", "node-link bandwidth", "node link", _node_bandwidth),
    *(
        Parameter(f"node_link.{field}", f"node-link {text}", "node link", _node_latency(field))
        for field, text in zip(
            _LINK_LATENCIES,
            ("base latency", "ring-step latency", "message latency", "latency per peer", "NVLS latency"),
            strict=True,
        )
    ),
    Parameter("fabric.nic_gbps", "NIC bandwidth", "network", _nic),
    Parameter("fabric.p2p_channel_bytes_per_s", "bandwidth of a message channel", "network", _channels),
    *(
        Parameter(f"fabric.{field}", f"network {text}", "network", _network_latency(field))
        for field, text in zip(
            _FABRIC_LATENCIES,
            ("ring-step latency inside nodes", "ring-step latency", "tree-level latency", "message latency"),
            strict=True,
        )
    ),
    Parameter("host.link_bytes_per_s", "links to hosts", "hosts", _host_link),
    Parameter("host.device.memory_bytes_per_s", "memory bandwidth of hosts", "hosts", _host_memory),
    Parameter("device.compute_rate_during_collectives", "slowdown beside collectives", "interference", _interference),
)
"""The parameters that :func:`simpar.sensitivity.step.sensitivities` answers for, in the order of reports."""


# ---- classes of costs -----------------------------------------------------------------------------------------------


def _gemm_class(dtype: str) -> Callable[[Machine, float], Machine]:
    rates = ("peak_efficiency", "bandwidth_efficiency")
    return lambda machine, factor: machine.device(
        lambda d: {"gemm": _with_scaled(d.gemm, dtype, factor, times=("overhead_s",), rates=rates)}
    )


def _attention_class(machine: Machine, factor: float) -> Machine:
    rates = ("efficiency", "bandwidth_efficiency")

    def change(device: Device) -> dict[str, Any]:
        fits = device.attention.items()
        return {"attention": {size: _scaled(fit, factor, times=("overhead_s",), rates=rates) for size, fit in fits}}

    return machine.device(change)


def _attention_backward_class(machine: Machine, factor: float) -> Machine:
    """The backward pass relative to the forward pass (its overhead, a few µs, stays the forward's)."""

    def change(device: Device) -> dict[str, Any]:
        fit = device.attention_backward
        ratios = {size: ratio / factor for size, ratio in fit.efficiency_ratio.items()}
        return {"attention_backward": _changed(fit, efficiency_ratio=ratios, linear_ratio=fit.linear_ratio * factor)}

    return machine.device(change)


def _memory_class(kind: str) -> Callable[[Machine, float], Machine]:
    rates = ("bandwidth_efficiency",)
    return lambda machine, factor: machine.device(
        lambda d: {"memory_bound": _with_scaled(d.memory_bound, kind, factor, times=("overhead_s",), rates=rates)}
    )


def cost_classes(device: Device, dtypes: "set[str] | None" = None) -> dict[str, Callable[[Machine, float], Machine]]:
    """The classes of costs, whose times add up to the step: kernels by class, launches, links by term.

    ``attention_backward`` lies inside ``attention``; all other classes are disjoint. Scaling all of them (but that one)
    by a factor scales the step by it, which a test holds.

    Args:
        device: whose kernels.
        dtypes: of products, those that matter; None means all that the device has.
    """
    classes: dict[str, Callable[[Machine, float], Machine]] = {
        f"gemm.{dtype}": _gemm_class(dtype) for dtype in device.gemm if dtypes is None or dtype in dtypes
    }
    classes["attention"] = _attention_class
    classes["attention_backward"] = _attention_backward_class
    classes.update({f"memory_bound.{kind}": _memory_class(kind) for kind in device.memory_bound})
    classes["launch"] = _launch
    classes["node_link.bandwidth"] = _node_bandwidth
    classes["node_link.latency"] = _node_latency(*_LINK_LATENCIES)
    classes["network.bandwidth"] = _network_bandwidth
    classes["network.latency"] = _network_latency(*_FABRIC_LATENCIES)
    classes["host.bandwidth"], classes["host.latency"] = _host_bandwidth, _host_latency
    return classes


ATTENTION_BACKWARD = "attention_backward"
"""The one class that lies inside another (``attention``)."""
INTERFERENCE = _interference
