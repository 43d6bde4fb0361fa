"""Clusters: devices in nodes, the path between GPUs of a node, the fabric between nodes; descriptions only.

Routes over these descriptions are made in :mod:`simpar.hardware.fabric`, times in
:mod:`simpar.cost.collective`. Fitted values lie in ``catalog/networks/*.yaml`` and ``catalog/profiles/*.json``
with their sources and errors.
The parameters belong to one closed form, ``t = (L^p + X^p)^(1/p)`` with latency L, streaming time X and
smoothness p; p = 1 is latency plus bytes over bandwidth.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from math import prod
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from simpar.description import Description
from simpar.errors import ClusterError, SimparError, nearest
from simpar.hardware.device import Device, device
from simpar.hardware.graph import Graph
from simpar.hardware.host import Host, read_device
from simpar.hardware.links import Fabric, FitError, NodeLink
from simpar.hardware.shipped import shipped_profile
from simpar.reading import read_yaml

__all__ = [
    "Cluster",
    "Fabric",
    "FitError",
    "NodeGroup",
    "NodeLink",
    "cluster_presets",
    "fabric_names",
    "host_names",
    "named_fabric",
    "named_host",
    "named_node_link",
    "node_link_names",
]

_SPEC = re.compile(r"(?P<device>[^:@]+):(?P<sizes>\d+(?:x\d+)*)(?:@(?P<fabric>.+))?")
_PROFILE = ".json"
_RIGHT_FORM = "write device:nodes×GPUs with an x, as in 'h100-sxm:64x8', or 'h100-sxm:8' for one node"

_MOST_GPUS = 4_000_000  # far beyond any cluster; what follows scales with the ranks of a group


@cache  # package data never changes while a process runs
def _catalog(name: str) -> dict[str, Any]:
    text = (files("simpar.hardware") / "catalog" / "networks" / f"{name}.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = read_yaml(text)
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


def host_names() -> tuple[str, ...]:
    """Names of the catalog's hosts."""
    return tuple(_catalog("hosts"))


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


def named_host(name: str) -> Host:
    """The catalog's host of that name.

    Raises:
        ClusterError: no such host; the message names the nearest one.
    """
    return Host.model_validate(_lookup("hosts", "host", name))


def _defaults(device_name: str) -> dict[str, Any]:
    """Node link, fabric, host and GPUs per node by the longest known prefix of a device's name, or nothing."""
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
    named = found["device"]
    sizes = [int(size) for size in found["sizes"].split("x")]
    data: dict[str, Any] = {
        "profile" if named.endswith(_PROFILE) else "device": named,
        **_read_sizes(named, sizes, text),
    }
    return {**data, "fabric": found["fabric"]} if found["fabric"] else data


def _read_sizes(named: str, sizes: list[int], text: str) -> dict[str, Any]:
    """Nodes and GPUs per node; of chips in a torus slices (if more than one) and the axes of a slice."""
    usual = {} if named.endswith(_PROFILE) else _defaults(device(named).name)
    axes = named_node_link(usual["node_link"]).axes if usual else None
    if axes is None or len(sizes) == 1 or (len(sizes) == 2 and axes > 2):
        if len(sizes) > 2:
            raise ClusterError(f"cluster '{text}' is not understood; {_RIGHT_FORM}")
        return {"nodes": sizes[0] if len(sizes) == 2 else 1, "gpus_per_node": sizes[-1]}
    if len(sizes) not in (axes, axes + 1):
        usual_form = "x".join(["4"] * axes)
        raise ClusterError(
            f"cluster '{text}' names {len(sizes)} lengths, but {named} is a torus of {axes} axes; write "
            f"'{named}:{usual_form}' for a slice, '{named}:2x{usual_form}' for two, or '{named}:64' for the usual "
            "slice of 64 chips"
        )
    shape = tuple(sizes[-axes:])
    return {
        "nodes": sizes[0] if len(sizes) > axes else 1,
        "gpus_per_node": prod(shape),
        "node_link": {"base": usual["node_link"], "shape": shape},
    }


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


class NodeGroup(Description):
    """The nodes of one kind in a cluster of several.

    Attributes:
        device: the GPU.
        count: number of nodes.
        node_link: the path between GPUs of a node; left open, the device's usual one.
        nic_gbps: line rate of one NIC in Gb/s; None takes that of the cluster's fabric.
        price_per_gpu_hour: money for a GPU and hour; None takes that of the cluster.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    device: Annotated[Device, BeforeValidator(read_device)]
    count: Annotated[int, Field(ge=1)]
    node_link: Annotated[NodeLink, BeforeValidator(lambda value: _expand("node_links", "node link", value))]
    nic_gbps: Annotated[float, Field(gt=0)] | None = None
    price_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _follow_device(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "device" in data and "node_link" not in data:
            chosen = read_device(data["device"])
            if isinstance(chosen, Device) and (usual := _defaults(chosen.name)):
                return {**data, "device": chosen, "node_link": usual["node_link"]}
        return data


class Cluster(Description):
    """GPUs in nodes of equal size, of one kind or of several.

    ``device``, ``node_link``, ``fabric`` and ``host`` take a catalog name, or a mapping with a catalog name as ``base``
    and the fields that differ. What is not given follows from the device. A text such as ``h100-sxm:64x8``
    (or a preset's name) stands for a whole cluster. The path of a profile (``profile.json:1x8``, or a mapping
    with ``profile`` instead of ``device``) brings the device, node link and fabric that were measured. Several kinds
    of nodes are a list in place of their number, such as ``nodes: [{device: h100-sxm, count: 8}, {device: a100-sxm,
    count: 8}]``; ranks lie on them in that order.

    >>> cluster = Cluster(device="h100-sxm", nodes=64, fabric={"base": "ndr400", "nic_gbps": 800})
    >>> cluster.gpus, cluster.node_link.kind, cluster.nic_bytes_per_s / 1e9
    (512, 'nvlink', 98.0)
    >>> Cluster.parse("tpu-v5p:2x4x4x8").node_link.shape
    (4, 4, 8)

    Attributes:
        device: the GPU; of several kinds the first.
        nodes: number of nodes.
        gpus_per_node: GPUs of a node, that is, of one NVLink domain, one PCIe server or one slice of a torus.
        node_link: the path between GPUs of a node.
        fabric: the network between nodes; None only for one node.
        graph: a topology of one's own, which then replaces the routes of ``node_link`` and ``fabric``.
        groups: the kinds of nodes, where there are several.
        placement: the GPU that each rank runs on, a permutation; None means rank i on GPU i.
        host: the processor of every node, for what runs on it.
        price_per_gpu_hour: money for a GPU and hour, in any currency, where its kind has no price of its own; None
            leaves money out.
        overhead_w_per_gpu: watts that hosts, NICs and switches draw for each GPU.
        pue: power usage effectiveness: what the site draws over what its machines do.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    device: Annotated[Device, BeforeValidator(read_device)]
    nodes: Annotated[int, Field(ge=1)] = 1
    gpus_per_node: Annotated[int, Field(ge=1)]
    node_link: Annotated[NodeLink, BeforeValidator(lambda value: _expand("node_links", "node link", value))]
    fabric: Annotated[Fabric | None, BeforeValidator(lambda value: _expand("fabrics", "fabric", value))]
    graph: Graph | None = None
    groups: tuple[NodeGroup, ...] = ()
    placement: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    host: Annotated[Host, BeforeValidator(lambda value: _expand("hosts", "host", value))] = Field(default_factory=Host)
    price_per_gpu_hour: Annotated[float, Field(ge=0)] | None = None
    overhead_w_per_gpu: Annotated[float, Field(ge=0)] = 0.0
    pue: Annotated[float, Field(ge=1)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _follow_device(cls, data: Any) -> Any:
        if isinstance(data, str):
            data = _read_spec(data)
        if isinstance(data, Mapping) and data.get("profile") is not None:
            data = _read_profile(data)
        if isinstance(data, Mapping) and isinstance(data.get("nodes"), Sequence) and not isinstance(data["nodes"], str):
            data = _read_groups(data)
        if not isinstance(data, Mapping) or "device" not in data:
            return data
        chosen = read_device(data["device"])
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
        shape = self.node_link.shape
        if shape is not None and prod(shape) != self.gpus_per_node:
            raise ClusterError(
                f"a torus of {'×'.join(map(str, shape))} has {prod(shape)} chips, but gpus_per_node is "
                f"{self.gpus_per_node}; set gpus_per_node={prod(shape)} or change the node link's shape"
            )
        if self.groups and sum(group.count for group in self.groups) != self.nodes:
            raise ClusterError(
                f"groups hold {sum(group.count for group in self.groups)} nodes, but nodes is {self.nodes}; "
                "give the list of groups in place of the number of nodes"
            )
        if self.placement is not None and sorted(self.placement) != list(range(self.gpus)):
            raise ClusterError(
                f"placement of {len(self.placement)} ranks is no permutation of the cluster's GPUs; "
                f"name each of 0 to {self.gpus - 1} once"
            )
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
        except ClusterError as error:
            raise ClusterError(f"{error} (in cluster '{text}')" if error.problems[0][0] else str(error)) from None

    def replace(self, **changes: Any) -> Self:
        """A validated copy with some fields changed; what followed from the device follows the new one."""
        fields = dict(self)
        if isinstance(read_device(changes.get("device")), Device):
            usual = _defaults(self.device.name)
            if usual and self.node_link == named_node_link(usual["node_link"]):
                del fields["node_link"]
            if usual and self.fabric == named_fabric(usual["fabric"]):
                del fields["fabric"]
            if "host" in usual and self.host == named_host(usual["host"]):
                del fields["host"]
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

    @property
    def devices(self) -> tuple[Device, ...]:
        """The kinds of GPUs, in the order of their nodes."""
        return tuple(group.device for group in self.groups) or (self.device,)

    @property
    def gpus_by_kind(self) -> tuple[int, ...]:
        """GPUs of each kind in :attr:`devices`."""
        return tuple(group.count * self.gpus_per_node for group in self.groups) or (self.gpus,)

    @property
    def price_per_hour(self) -> float | None:
        """Money for all GPUs and an hour; None where the price of some is not known."""
        own = [group.price_per_gpu_hour for group in self.groups] or [None]
        prices = [self.price_per_gpu_hour if price is None else price for price in own]
        parts = [count * price for count, price in zip(self.gpus_by_kind, prices, strict=True) if price is not None]
        return sum(parts) if len(parts) == len(prices) else None

    def kind_of(self, gpu: int) -> int:
        """Number of the kind in :attr:`devices` of the GPU at a place."""
        node = gpu // self.gpus_per_node
        ends = accumulate(group.count for group in self.groups)
        return next((kind for kind, end in enumerate(ends) if node < end), 0)

    def seen_by(self, kinds: Iterable[int]) -> "Cluster":
        """The cluster as GPUs of these kinds see it in a collective: each link as fast as the slowest of theirs."""
        if not self.groups:
            return self
        chosen = [self.groups[kind] for kind in sorted(set(kinds))]
        link = min((group.node_link for group in chosen), key=lambda link: link.bandwidth_bytes_per_s)
        if not all(group.node_link.nvls for group in chosen):
            link = link.replace(nvls=False)
        rates = [group.nic_gbps for group in chosen if group.nic_gbps is not None]
        fabric = self.fabric
        if fabric is not None and rates:
            usual = [fabric.nic_gbps] if len(rates) < len(chosen) else []
            fabric = fabric.replace(nic_gbps=min(rates + usual))
        return self.replace(groups=(), device=chosen[0].device, node_link=link, fabric=fabric)


def _read_groups(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a cluster whose ``nodes`` is a list of groups."""
    if not data["nodes"]:
        raise ClusterError("nodes is an empty list; give a number, or groups such as {device: h100-sxm, count: 8}")
    groups = tuple(NodeGroup.model_validate(group) for group in data["nodes"])
    first = groups[0]
    stated = {"device": first.device, "node_link": first.node_link, **data}
    return {**stated, "nodes": sum(group.count for group in groups), "groups": groups}
