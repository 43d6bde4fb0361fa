"""Clusters: devices in nodes, the path between GPUs of a node, the fabric between nodes; descriptions only.

Routes over these descriptions are made in :mod:`simpar.hardware.fabric`, times in
:mod:`simpar.cost.collective`. Fitted values lie in ``catalog/networks/*.yaml`` and ``catalog/profiles/*.json``
with their sources and errors.
The parameters belong to one closed form, ``t = (L^p + X^p)^(1/p)`` with latency L, streaming time X and
smoothness p; p = 1 is latency plus bytes over bandwidth.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from simpar.description import Description
from simpar.errors import ClusterError, nearest
from simpar.hardware.device import Device, device
from simpar.hardware.graph import Graph
from simpar.hardware.shipped import shipped_profile
from simpar.units import gbps

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
# Above 1 the smooth form would let a transfer undercut latency plus streaming, that is, overtake its own
# link.
Smoothness = Annotated[float, Field(gt=0, le=1)]

_SPEC = re.compile(r"(?P<device>[^:@]+):(?:(?P<nodes>\d+)x)?(?P<gpus>\d+)(?:@(?P<fabric>.+))?")
_PROFILE = ".json"
_RIGHT_FORM = "write device:nodes×GPUs with an x, as in 'h100-sxm:64x8', or 'h100-sxm:8' for one node"

_MOST_GPUS = 4_000_000  # far beyond any cluster; what follows scales with the ranks of a group


class FitError(Description):
    """Relative errors of a collective's predicted time: of all sizes, and of large ones (1 MB and more).

    The defaults are the errors of priors on seven NVLink systems, that is, where nothing was measured.
    """

    median: NonNegative = 0.119
    p90: NonNegative = 0.378
    median_large: NonNegative = 0.089
    p90_large: NonNegative = 0.273


class NodeLink(Description):
    """The path between the GPUs of one node, as a collective library sees it.

    Attributes:
        about: one line for people.
        kind: ``nvlink``, ``pcie``, or ``host`` (processes of a CPU box, gloo).
        nominal_bytes_per_s: datasheet rate of a GPU, one direction.
        bandwidth_bytes_per_s: what a ring sees of it (B).
        base_latency_s: latency of an empty collective (a).
        step_latency_s: latency of one step of a ring (i).
        copy_fraction: share of a rank's own block that is copied at link speed too (kappa).
        smoothness: p of the closed form.
        p2p_latency_s: latency of a message or of an all-to-all (ap).
        peer_latency_s: what each further peer adds to an all-to-all (am).
        nvls: whether the switch can reduce (NVLink SHARP).
        nvls_ratio: bandwidth of such a reduction over ``bandwidth_bytes_per_s`` (rho).
        nvls_latency_s: latency of an empty one (an).
        tree_ratio: bandwidth of a tree inside a node over ``bandwidth_bytes_per_s`` (tB).
        reach: GPUs in an aligned block that these values describe; None means the whole node.
        beyond: the path of groups wider than ``reach``, as on PCIe servers whose sockets are far apart.
        sources: where the values come from.
        errors: of the fit.
    """

    about: str = ""
    kind: Literal["nvlink", "pcie", "host"]
    nominal_bytes_per_s: Positive
    bandwidth_bytes_per_s: Positive
    base_latency_s: NonNegative
    step_latency_s: NonNegative
    copy_fraction: NonNegative = 0.3
    smoothness: Smoothness = 0.6
    p2p_latency_s: NonNegative
    peer_latency_s: NonNegative = 0.2e-6
    nvls: bool = False
    nvls_ratio: Share = 0.83
    nvls_latency_s: NonNegative = 22e-6
    tree_ratio: Share = 0.6
    reach: Annotated[int, Field(ge=2)] | None = None
    beyond: "NodeLink | None" = None
    sources: tuple[str, ...] = ()
    errors: FitError = FitError()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.bandwidth_bytes_per_s > self.nominal_bytes_per_s:
            raise ValueError(
                f"bandwidth_bytes_per_s={self.bandwidth_bytes_per_s:g} exceeds nominal_bytes_per_s="
                f"{self.nominal_bytes_per_s:g}; both are bytes per second of one GPU and one direction"
            )
        if (self.reach is None) != (self.beyond is None):
            raise ValueError("reach and beyond belong together; give both, or neither for a uniform node")
        return self

    def over(self, block: float) -> "NodeLink":
        """The path that a group within an aligned block of ``block`` GPUs uses."""
        link = self
        while link.beyond is not None and link.reach is not None and block > link.reach:
            link = link.beyond
        return link

    def between(self, i: int, j: int) -> "NodeLink":
        """The path from GPU ``i`` to GPU ``j`` of the node: that of the smallest aligned block with both."""
        link = self
        while link.beyond is not None and link.reach is not None and i // link.reach != j // link.reach:
            link = link.beyond
        return link


class Fabric(Description):
    """The network between nodes.

    Attributes:
        about: one line for people.
        nic_gbps: line rate of one NIC in Gb/s, one direction.
        nics_per_node: NICs of a node; None means one for each GPU.
        efficiency: usable share of the line rate.
        ring_intra_step_s: latency of a ring's step inside a node when the ring spans nodes (im).
        ring_step_s: latency of a ring's step between nodes (er).
        tree_level_s: latency of one level of a tree between nodes (et).
        smoothness: p of rings, all-to-alls and messages between nodes (pr).
        tree_smoothness: p of trees between nodes (pt).
        p2p_latency_s: what the network adds to a message's latency (ep).
        p2p_channels: channels that a message between two ranks uses, each at most
            ``p2p_channel_bytes_per_s``; None means as many as fill the NIC. NCCL halves them as a
            communicator grows.
        p2p_channel_bytes_per_s: rate of one such channel.
        pod_nodes: nodes below one leaf switch (or group of leaf switches); None means all, and no bottleneck
            anywhere.
        oversubscription: bandwidth that enters a leaf from its nodes over bandwidth that leaves it to the
            spine.
        rail_optimized: whether GPU i of every node of a pod shares a leaf with the other GPUs i, instead of
            all GPUs of the pod sharing one.
        sources: where the values come from.
        errors: of the fit.
        measured_nodes: most nodes that the fit has seen; None means that nothing was measured.
    """

    about: str = ""
    nic_gbps: Positive
    nics_per_node: Annotated[int, Field(ge=1)] | None = None
    efficiency: Share = 0.95
    ring_intra_step_s: NonNegative = 3e-6
    ring_step_s: NonNegative = 8e-6
    tree_level_s: NonNegative = 6e-6
    smoothness: Smoothness = 0.8
    tree_smoothness: Smoothness = 0.5
    p2p_latency_s: NonNegative = 5e-6
    p2p_channels: Annotated[int, Field(ge=1)] | None = None
    p2p_channel_bytes_per_s: Positive = 14e9
    pod_nodes: Annotated[int, Field(ge=1)] | None = None
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    rail_optimized: bool = True
    sources: tuple[str, ...] = ()
    errors: FitError = FitError()
    measured_nodes: Annotated[int, Field(ge=2)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.oversubscription > 1 and self.pod_nodes is None:
            raise ValueError(
                f"oversubscription={self.oversubscription:g} acts where traffic leaves a leaf switch, "
                "but pod_nodes is not set; say how many nodes share a leaf, such as pod_nodes=32"
            )
        return self

    @property
    def nic_bytes_per_s(self) -> float:
        """Usable rate of one NIC, one direction."""
        return gbps(self.nic_gbps) * self.efficiency


@cache  # package data never changes while a process runs
def _catalog(name: str) -> dict[str, Any]:
    text = (files("simpar.hardware") / "catalog" / "networks" / f"{name}.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = yaml.safe_load(text)
    return data


def _lookup(catalog: str, what: str, name: str) -> dict[str, Any]:
    known = list(_catalog(catalog))
    if name not in known:
        raise ClusterError(f"unknown {what} '{name}'{nearest(name, known)} (known: {', '.join(known)})")
    entry: dict[str, Any] = _catalog(catalog)[name]
    if "fit" in entry:
        stated = {key: value for key, value in entry.items() if key != "fit"}
        return {**shipped_profile(entry["fit"])["node_link"], **stated}
    return entry


def _expand(catalog: str, what: str, value: Any) -> Any:
    """Turns a name, or a mapping with a ``base`` name and what differs, into the fields of a description."""
    if isinstance(value, str):
        return _lookup(catalog, what, value)
    if isinstance(value, Mapping) and "base" in value:
        changes = {key: field for key, field in value.items() if key != "base"}
        return {**_lookup(catalog, what, str(value["base"])), **changes}
    return value


def node_link_names() -> tuple[str, ...]:
    """Names of the catalog's node links."""
    return tuple(_catalog("node_links"))


def fabric_names() -> tuple[str, ...]:
    """Names of the catalog's fabrics."""
    return tuple(_catalog("fabrics"))


def named_node_link(name: str) -> NodeLink:
    """The catalog's node link of that name.

    Raises:
        ClusterError: no such node link; the message names the nearest one.
    """
    return NodeLink.model_validate(_lookup("node_links", "node link", name))


def named_fabric(name: str) -> Fabric:
    """The catalog's fabric of that name.

    Raises:
        ClusterError: no such fabric; the message names the nearest one.
    """
    return Fabric.model_validate(_lookup("fabrics", "fabric", name))


def _device(value: Any) -> Any:
    if isinstance(value, str):
        return device(value)
    if isinstance(value, Mapping) and "base" in value:
        return device(str(value["base"])).replace(**{k: v for k, v in value.items() if k != "base"})
    return value


def _defaults(device_name: str) -> dict[str, Any]:
    """Node link, fabric and GPUs per node by the longest known prefix of a device's name, or nothing."""
    defaults: dict[str, dict[str, Any]] = _catalog("clusters")["defaults"]
    known = [prefix for prefix in defaults if device_name == prefix or device_name.startswith(f"{prefix}-")]
    return defaults[max(known, key=len)] if known else {}


def cluster_presets() -> dict[str, str]:
    """Names of the catalog's clusters, which :meth:`Cluster.parse` understands, with one line on each."""
    presets: dict[str, dict[str, str]] = _catalog("clusters")["presets"]
    return {name: f"{preset['about']}: {preset['spec']}" for name, preset in presets.items()}


def _read_spec(text: str) -> dict[str, Any]:
    presets: dict[str, dict[str, str]] = _catalog("clusters")["presets"]
    spec = presets[text]["spec"] if text in presets else text
    found = _SPEC.fullmatch(spec.strip())
    if found is None:
        hint = nearest(text, list(presets)) if ":" not in text else ""
        raise ClusterError(f"cluster '{text}' is not understood; {_RIGHT_FORM}{hint}")
    data: dict[str, Any] = {
        "profile" if found["device"].endswith(_PROFILE) else "device": found["device"],
        "nodes": int(found["nodes"] or 1),
        "gpus_per_node": int(found["gpus"]),
    }
    return {**data, "fabric": found["fabric"]} if found["fabric"] else data


def _read_profile(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a cluster whose mapping names a profile; what the mapping states itself counts more."""
    from simpar.hardware.profile import load_profile  # noqa: PLC0415 - a profile is made of this module's classes

    if "device" in data:
        raise ClusterError(
            f"profile '{data['profile']}' brings its own device, so 'device' cannot be given too; leave one of them out"
        )
    profile = load_profile(str(data["profile"]))
    parts = {"device": profile.device, "node_link": profile.node_link, "fabric": profile.fabric}
    measured = {key: part for key, part in parts.items() if part is not None}
    return {**measured, **{key: value for key, value in data.items() if key != "profile"}}


class Cluster(Description):
    """GPUs of one kind in equal nodes.

    ``device``, ``node_link`` and ``fabric`` take a catalog name, or a mapping with a catalog name as ``base``
    and the fields that differ. What is not given follows from the device. A text such as ``h100-sxm:64x8``
    (or a preset's name) stands for a whole cluster. The path of a profile (``profile.json:1x8``, or a mapping
    with ``profile`` instead of ``device``) brings the device, node link and fabric that were measured.

    >>> cluster = Cluster(device="h100-sxm", nodes=64, fabric={"base": "ndr400", "nic_gbps": 800})
    >>> cluster.gpus, cluster.node_link.kind, cluster.nic_bytes_per_s / 1e9
    (512, 'nvlink', 98.0)

    Attributes:
        device: the GPU.
        nodes: number of nodes.
        gpus_per_node: GPUs of a node, that is, of one NVLink domain or one PCIe server.
        node_link: the path between GPUs of a node.
        fabric: the network between nodes; None only for one node.
        graph: a topology of one's own, which then replaces the routes of ``node_link`` and ``fabric``.
    """

    device: Annotated[Device, BeforeValidator(_device)]
    nodes: Annotated[int, Field(ge=1)] = 1
    gpus_per_node: Annotated[int, Field(ge=1)]
    node_link: Annotated[NodeLink, BeforeValidator(lambda value: _expand("node_links", "node link", value))]
    fabric: Annotated[Fabric | None, BeforeValidator(lambda value: _expand("fabrics", "fabric", value))]
    graph: Graph | None = None

    @model_validator(mode="before")
    @classmethod
    def _follow_device(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = _read_spec(data)
        if isinstance(data, Mapping) and data.get("profile") is not None:
            data = _read_profile(data)
        if not isinstance(data, Mapping) or "device" not in data:
            return data
        chosen = _device(data["device"])
        if not isinstance(chosen, Device):
            return data
        filled = {**_defaults(chosen.name), **data, "device": chosen}
        if "node_link" not in filled:
            raise ClusterError(
                f"device '{chosen.name}' has no usual node_link; name one of {', '.join(node_link_names())}"
            )
        return {"fabric": None, "gpus_per_node": 8, **filled}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gpus > _MOST_GPUS:
            raise ClusterError(
                f"{self.gpus:,} GPUs are more than the {_MOST_GPUS:,} that simpar takes; use fewer nodes"
            )
        if self.nodes > 1 and self.fabric is None:
            raise ClusterError(
                f"{self.nodes} nodes need a fabric between them; name one of {', '.join(fabric_names())}"
            )
        if self.graph is not None:
            self.graph.require([f"gpu{rank}" for rank in range(self.gpus)])
        return self

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Reads ``device:nodesxGPUs``, with ``@fabric`` behind it if wanted, or the name of a preset.

        >>> Cluster.parse("a100-sxm:2x8@efa-p4de").fabric.nic_gbps
        100.0
        >>> Cluster.parse("h100-sxm:8").nodes
        1

        Raises:
            ClusterError: the text, or a name or number in it, is not understood.
        """
        try:
            return cls.model_validate(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            reason = first["msg"].removeprefix("Value error, ")
            raise ClusterError(f"{where}: {reason} (in cluster '{text}')" if where else reason) from None

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed; what followed from the device follows the new one."""
        fields = dict(self)
        if "device" in changes:
            usual = _defaults(self.device.name)
            if usual and self.node_link == named_node_link(usual["node_link"]):
                del fields["node_link"]
            if usual and self.fabric == named_fabric(usual["fabric"]):
                del fields["fabric"]
        return type(self).model_validate({**fields, **changes})

    @property
    def gpus(self) -> int:
        """GPUs of the whole cluster."""
        return self.nodes * self.gpus_per_node

    @property
    def nic_bytes_per_s(self) -> float:
        """Usable network bandwidth of a GPU and direction: its share of the node's NICs; 0 without fabric."""
        fabric = self.fabric
        if fabric is None:
            return 0.0
        nics = fabric.nics_per_node or self.gpus_per_node
        return fabric.nic_bytes_per_s * nics / self.gpus_per_node
