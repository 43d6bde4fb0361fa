"""What a plan keeps in the memory of hosts in place of devices, and the rules for that."""

from typing import TYPE_CHECKING, Literal

from simpar.errors import PlanError
from simpar.hardware.cluster import Cluster, host_names
from simpar.plan.sync import ParameterServer

if TYPE_CHECKING:
    from simpar.plan.plan import Plan

Offload = Literal["none", "optimizer", "activations", "both"]
_WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved", "looped-bfs")


def offloads_optimizer(plan: "Plan") -> bool:
    """Whether optimizer states lie on hosts, which update them."""
    return plan.offload in ("optimizer", "both")


def offloads_activations(plan: "Plan") -> bool:
    """Whether activations wait on hosts for their backward pass."""
    return plan.offload in ("activations", "both")


def check_offload(plan: "Plan") -> None:
    """Refuses what cannot go together.

    Raises:
        ValueError: the first rule that the plan breaks.
    """
    what = f"offload '{plan.offload}'"
    if offloads_optimizer(plan):
        if isinstance(plan.sync, ParameterServer):
            raise ValueError(
                f"{what} moves optimizer states to hosts, but with sync 'parameter_server' servers hold them; set "
                "sync.on=hosts in its place, or sync=all_reduce"
            )
        if plan.sync_every > 1:
            raise ValueError(
                f"{what} leaves the weights that sync_every {plan.sync_every} averages on hosts, and devices average; "
                "set sync_every=1 or drop offload"
            )
        if plan.grad_compression != "none":
            raise ValueError(
                f"{what} cannot go with grad_compression '{plan.grad_compression}', whose unpacked gradients are on "
                "devices only; drop one of the two"
            )
    if offloads_activations(plan) and plan.schedule not in _WHOLE_BACKWARD and not plan.is_read:
        raise ValueError(
            f"{what} needs a backward pass that gives back all activations of a layer at once, but schedule "
            f"'{plan.schedule}' splits it or weaves it with a forward pass; take schedule "
            f"{', '.join(_WHOLE_BACKWARD[:-1])} or {_WHOLE_BACKWARD[-1]}, or set offload=optimizer"
        )


def check_hosts(plan: "Plan", cluster: Cluster) -> None:
    """Refuses clusters whose hosts are unknown, or have no links to devices.

    Raises:
        PlanError: the first rule that the plan breaks.
    """
    if plan.offload == "none":
        return
    what = f"offload '{plan.offload}'"
    if cluster.node_link.kind == "host":
        raise PlanError(f"{what} has no meaning on {cluster.device.name}, which is a host itself; set offload=none")
    if cluster.graph is not None or cluster.node_link.axes is not None:
        kind = "a custom graph" if cluster.graph is not None else "a torus"
        raise PlanError(f"{what} needs links to hosts, which {kind} does not describe; set offload=none")
    if not cluster.host.is_known:
        raise PlanError(
            f"{what} needs to know the hosts, but nothing says what those of {cluster.device.name} are; set "
            f"cluster.host to one of {', '.join(host_names())}, or to fields with a device of their own"
        )
