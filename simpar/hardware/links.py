"""The links of a cluster as descriptions: the path between GPUs of a node, and the network between nodes.

The parameters belong to one closed form, ``t = (L^p + X^p)^(1/p)`` with latency L, streaming time X and
smoothness p; p = 1 is latency plus bytes over bandwidth.
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from simpar.description import Description
from simpar.errors import ClusterError, SimparError
from simpar.hardware.torus import Torus, usual_shape
from simpar.units import gbps

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, le=1)]
# Above 1 the smooth form would let a transfer undercut latency plus streaming, that is, overtake its own
# link.
Smoothness = Annotated[float, Field(gt=0, le=1)]


class FitError(Description):
    """Relative errors of a collective's predicted time: of all sizes, and of large ones (1 MB and more).

    The defaults are the errors of priors on seven NVLink systems, that is, where nothing was measured.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    median: NonNegative = 0.119
    p90: NonNegative = 0.378
    median_large: NonNegative = 0.089
    p90_large: NonNegative = 0.273


class NodeLink(Description):
    """The path between the GPUs of one node, as a collective library sees it.

    Attributes:
        about: one line for people.
        kind: ``nvlink``, ``pcie``, ``mesh`` (every GPU has a cable to every other of its node, no switch), ``torus``
            (chips forward for each other, TPU slices), or ``host`` (processes of a CPU box, gloo).
        nominal_bytes_per_s: datasheet rate of a GPU, one direction; in a torus that of one link.
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
        peers: GPUs of the node that a GPU of a ``mesh`` has a cable to, each with an equal share of its bandwidth.
        axes: of a ``torus``: 2 or 3 usually.
        wrap_multiple: an axis of a ``torus`` closes if its length is a multiple of this; 0 means that none does.
        shape: chips along each axis of a ``torus``; None means the usual shape of so many chips.
        twisted: whether the ``torus`` is joined with a shift.
        known_gpus: most GPUs of one such domain that anybody sells; None means that nothing limits it.
        reach: GPUs in an aligned block that these values describe; None means the whole node.
        beyond: the path of groups wider than ``reach``, as on PCIe servers whose sockets are far apart.
        sources: where the values come from.
        errors: of the fit.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

    about: str = ""
    kind: Literal["nvlink", "pcie", "mesh", "torus", "host"]
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
    peers: Annotated[int, Field(ge=1)] | None = None
    axes: Annotated[int, Field(ge=1, le=6)] | None = None
    wrap_multiple: Annotated[int, Field(ge=0)] = 1
    shape: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] | None = None
    twisted: bool = False
    known_gpus: Annotated[int, Field(ge=1)] | None = None
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
        if (self.kind == "torus") != (self.axes is not None):
            raise ValueError(f"axes belongs to kind 'torus', but kind is '{self.kind}'; give both or neither")
        if self.shape is not None and len(self.shape) != self.axes:
            raise ValueError(
                f"shape {self.shape} has {len(self.shape)} axes, but the link has {self.axes or 'none'}; "
                "name one length per axis, in a link of kind torus"
            )
        if self.twisted:
            self._check_twist()
        return self

    def _check_twist(self) -> None:
        lengths = sorted(set(self.shape or ()))
        closes = all(self.wrap_multiple and length % self.wrap_multiple == 0 for length in lengths)
        if len(lengths) != 2 or lengths[1] != 2 * lengths[0] or not closes:
            raise ValueError(
                f"twisted needs a shape of closed axes of k and 2k chips, such as (4, 4, 8), not {self.shape}; "
                "change shape or drop twisted"
            )

    def torus(self, chips: int) -> Torus | None:
        """The torus of a node of so many chips; None for links of another kind."""
        if self.axes is None:
            return None
        shape = self.shape or usual_shape(chips, self.axes, self.wrap_multiple or 1)
        wraps = tuple(bool(self.wrap_multiple) and length % self.wrap_multiple == 0 for length in shape)
        return Torus(shape, wraps, self.twisted)

    def group_bytes_per_s(self, size: float) -> float:
        """Bandwidth of one of ``size`` GPUs of a node that only talk to each other: in a mesh, by fewer cables."""
        if self.peers is None:
            return self.bandwidth_bytes_per_s
        return self.bandwidth_bytes_per_s * min(max(size - 1, 1), self.peers) / self.peers

    @property
    def pair_bytes_per_s(self) -> float:
        """Bandwidth of a message between two GPUs of a node."""
        return self.group_bytes_per_s(2)

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
        topology: ``fat_tree`` (leaves below a spine), or ``dragonfly``, whose groups of ``pod_nodes`` nodes have a
            direct bundle of links between each two of them; ``oversubscription`` then divides the sum of a group's
            bundles.
        routing: in a dragonfly, ``minimal`` (the bundle between the two groups) or ``valiant`` (spread over all other
            groups; twice the traffic, but never all of it on one bundle). Adaptive routers lie between the two.
        rail_optimized: whether GPU i of every node of a pod shares a leaf with the other GPUs i, instead of
            all GPUs of the pod sharing one.
        pxn: whether what is for another rail first hops to that rail's GPU of the own node (NCCL's PXN).
        sharp: whether switches reduce (SHARP), which gives all-reduces between nodes the algorithm ``sharp``.
        sharp_ratio: bandwidth that such a reduction reaches of what its links could.
        sources: where the values come from.
        errors: of the fit.
        measured_nodes: most nodes that the fit has seen; None means that nothing was measured.
    """

    error_type: ClassVar[type[SimparError]] = ClusterError

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
    topology: Literal["fat_tree", "dragonfly"] = "fat_tree"
    routing: Literal["minimal", "valiant"] = "minimal"
    rail_optimized: bool = True
    pxn: bool = True
    sharp: bool = False
    sharp_ratio: Share = 0.85
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
        if self.topology == "dragonfly":
            if self.pod_nodes is None:
                raise ValueError("a dragonfly is made of groups; say how many nodes each has, such as pod_nodes=16")
            if self.rail_optimized:
                raise ValueError("a dragonfly has no rails; set rail_optimized=false")
        elif self.routing != "minimal":
            raise ValueError(
                f"routing '{self.routing}' belongs to topology 'dragonfly', not '{self.topology}'; drop one of the two"
            )
        return self

    @property
    def nic_bytes_per_s(self) -> float:
        """Usable rate of one NIC, one direction."""
        return gbps(self.nic_gbps) * self.efficiency
