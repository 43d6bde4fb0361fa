"""Named topologies as lists of cables: what a :class:`~simpar.hardware.graph.Graph` is made of.

GPUs are ``gpu0``, ``gpu1``, …; switches have names of their own. Each function's parameters are the fields that a
mapping with ``topology`` takes. Large fat trees, dragonflies and TPU slices need no graph:
:class:`~simpar.hardware.links.Fabric` and :class:`~simpar.hardware.links.NodeLink` have them by arithmetic.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from math import prod
from typing import Any

from simpar.errors import ClusterError, nearest
from simpar.hardware.torus import Torus

Cable = tuple[str, str, float, float]
"""Source, target, Gb/s, µs."""


def ring(*, gpus: int, bandwidth_gbps: float, latency_us: float = 0.0) -> Iterator[Cable]:
    """Each GPU has a cable to the next, the last to the first."""
    for gpu in range(gpus if gpus > 2 else gpus - 1):
        yield f"gpu{gpu}", f"gpu{(gpu + 1) % gpus}", bandwidth_gbps, latency_us


def line(*, gpus: int, bandwidth_gbps: float, latency_us: float = 0.0) -> Iterator[Cable]:
    """A ring that is not closed."""
    for gpu in range(gpus - 1):
        yield f"gpu{gpu}", f"gpu{gpu + 1}", bandwidth_gbps, latency_us


def fully_connected(*, gpus: int, bandwidth_gbps: float, latency_us: float = 0.0) -> Iterator[Cable]:
    """Each two GPUs have a cable.

    A collective's one ring goes over one cable of each GPU. A mesh whose library runs a ring over every cable, as RCCL
    does on Infinity Fabric, is a ``node_link`` of kind ``mesh`` instead, such as the catalog's ``xgmi3``.
    """
    for a, b in combinations(range(gpus), 2):
        yield f"gpu{a}", f"gpu{b}", bandwidth_gbps, latency_us


def star(*, gpus: int, bandwidth_gbps: float, latency_us: float = 0.0) -> Iterator[Cable]:
    """All GPUs on one switch."""
    for gpu in range(gpus):
        yield f"gpu{gpu}", "switch", bandwidth_gbps, latency_us


def torus(
    *,
    shape: Sequence[int],
    bandwidth_gbps: float,
    latency_us: float = 0.0,
    closed: bool = True,
    twisted: bool = False,
) -> Iterator[Cable]:
    """GPUs along axes, the last one fastest; ``twisted`` joins the short axes with a shift along the long ones."""
    made = Torus(tuple(shape), tuple(closed and length > 2 for length in shape), twisted)
    for (gpu, _, way), other in made.hops():
        if way == "+":
            yield f"gpu{gpu}", f"gpu{other}", bandwidth_gbps, latency_us


def leaf_spine(
    *,
    leaves: int,
    gpus_per_leaf: int,
    spines: int,
    bandwidth_gbps: float,
    uplink_gbps: float,
    latency_us: float = 0.0,
) -> Iterator[Cable]:
    """A two-level fat tree: every leaf has a cable to every spine."""
    for leaf in range(leaves):
        for gpu in range(leaf * gpus_per_leaf, (leaf + 1) * gpus_per_leaf):
            yield f"gpu{gpu}", f"leaf{leaf}", bandwidth_gbps, latency_us
        for spine in range(spines):
            yield f"leaf{leaf}", f"spine{spine}", uplink_gbps, latency_us


def dragonfly(
    *,
    groups: int,
    routers_per_group: int,
    gpus_per_router: int,
    bandwidth_gbps: float,
    local_gbps: float,
    global_gbps: float,
    latency_us: float = 0.0,
) -> Iterator[Cable]:
    """Groups of fully connected routers, and one cable between each two groups (Kim et al. 2008).

    The cables of a group are dealt out to its routers in turn.
    """
    per_group = routers_per_group * gpus_per_router
    for group, router in product(range(groups), range(routers_per_group)):
        first = group * per_group + router * gpus_per_router
        for gpu in range(first, first + gpus_per_router):
            yield f"gpu{gpu}", f"router{group}.{router}", bandwidth_gbps, latency_us
    for group in range(groups):
        for a, b in combinations(range(routers_per_group), 2):
            yield f"router{group}.{a}", f"router{group}.{b}", local_gbps, latency_us
    for a, b in combinations(range(groups), 2):
        ends = (f"router{a}.{(b - a - 1) % routers_per_group}", f"router{b}.{(a - b - 1) % groups % routers_per_group}")
        yield (*ends, global_gbps, latency_us)


TOPOLOGIES: dict[str, Callable[..., Iterator[Cable]]] = {
    made.__name__: made for made in (ring, line, fully_connected, star, torus, leaf_spine, dragonfly)
}
"""Every named topology."""

_MOST_CABLES = 1_000_000


def cables(fields: Mapping[str, Any]) -> list[Cable]:
    """The cables of a mapping such as ``{topology: ring, gpus: 8, bandwidth_gbps: 400}``.

    Raises:
        ClusterError: no such topology, or its parameters are wrong.
    """
    name, given = str(fields["topology"]), {key: value for key, value in fields.items() if key != "topology"}
    if name not in TOPOLOGIES:
        raise ClusterError(
            f"unknown topology '{name}'{nearest(name, list(TOPOLOGIES))} (known: {', '.join(TOPOLOGIES)})"
        )
    known = inspect.signature(TOPOLOGIES[name]).parameters
    for key in given:
        if key not in known:
            hint = nearest(key, list(known)) or f" (known: {', '.join(known)})"
            raise ClusterError(f"topology '{name}' has no parameter '{key}'{hint}")
    missing = [key for key, one in known.items() if one.default is one.empty and key not in given]
    if missing:
        raise ClusterError(
            f"topology '{name}' needs {' and '.join(missing)}; add {'it' if len(missing) == 1 else 'them'}"
        )
    counts = {key: value for key, value in given.items() if known[key].annotation is int}
    shape = given.get("shape", ())
    if not isinstance(shape, list | tuple):
        raise ClusterError(f"topology '{name}': shape is {shape!r:.40}, but should be a list of lengths, one an axis")
    counts |= {f"shape[{axis}]": length for axis, length in enumerate(shape)}
    for key, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ClusterError(f"topology '{name}': {key} is {value!r}, but should be a whole number of at least 1")
    if prod(counts.values()) ** (2 if name == "fully_connected" else 1) > _MOST_CABLES:
        raise ClusterError(
            f"topology '{name}' of {prod(counts.values()):,} parts is too large for a graph; describe it by node_link "
            "and fabric, whose routes are arithmetic"
        )
    return list(TOPOLOGIES[name](**given))
