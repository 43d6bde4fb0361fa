"""Time and link bytes of collectives and messages: closed forms with fitted parameters, no clock.

An algorithm takes ``t = (L^p + X^p)^(1/p)``: L is the latency of its critical path, X the streaming time of
its busiest link, and p <= 1 how smoothly pipelining blends the two (p = 1 adds them). The library picks the
fastest algorithm, and so does :func:`collective_cost`. The form beats latency plus bytes over bandwidth with
fewer parameters: held out on seven NVLink systems it errs by 6 % (median) instead of 11 %.

Since p <= 1, ``t - L >= X >= bytes / capacity`` on every link: spread evenly over ``t - L``, the bytes of an
uncontended collective never exceed a link, and contention can only slow it down.

Notation: n ranks on k nodes, g = n/k a node; S bytes as nccl-tests counts them; B bandwidth of a GPU's node
link, b of its share of the NICs, per direction. Sources of formulas: NCCL's tuning model
(src/graph/tuning.cc) for the critical paths; counting bytes for the rest. Tori are in :mod:`simpar.cost.torus`.
Not modelled: uplinks (:mod:`simpar.hardware.fabric` has them as links), and what a mistuned library loses between
64 KB and 32 MB on several nodes.
"""

from collections.abc import Sequence
from math import ceil, log2
from operator import add
from typing import Literal, NamedTuple, get_args

from simpar.cost.algorithms import (
    CollectiveCost,
    all_to_all,
    blend,
    broadcast,
    nvls,
    ring,
    sharp,
    shift,
    tree,
)
from simpar.cost.all_reduce import halving_doubling, hierarchical
from simpar.cost.torus import torus_cost
from simpar.errors import PlanError, nearest
from simpar.hardware.cluster import Cluster, FitError
from simpar.hardware.fabric import Network
from simpar.units import MIB

CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "shift"]
CollectiveAlgorithm = Literal[
    "auto",
    "ring",
    "tree",
    "nvls",
    "nvls_tree",
    "sharp",
    "halving_doubling",
    "hierarchical",
    "reduce_broadcast",
    "pairwise",
    "torus",
]

COLLECTIVE_OPS: tuple[str, ...] = get_args(CollectiveOp)
ALGORITHMS: tuple[str, ...] = get_args(CollectiveAlgorithm)

# Errors of what was fitted on 1-4 nodes and predicted 8-512 (GH200 on Slingshot): a floor beyond the measured
# nodes.
_EXTRAPOLATED = FitError(median=0.172, p90=0.457, median_large=0.112, p90_large=0.249)


class CollectiveError(NamedTuple):
    """Relative errors of a predicted time: half of all lie within ``median``, 90 % within ``p90``."""

    median: float
    p90: float


_PHASES = {"halving_doubling": halving_doubling, "hierarchical": hierarchical}
_NAMED = (*_PHASES, "reduce_broadcast")  # all-reduces that NCCL would not choose
_NOTHING = CollectiveCost("none", 0.0, 0.0, 0.0, 0.0)


def collective_cost(
    op: str,
    nbytes: float,
    size: int,
    nodes: int,
    cluster: Cluster,
    *,
    algorithm: str = "auto",
    ranks: Sequence[int] | None = None,
    network: Network | None = None,
) -> CollectiveCost:
    """Cost of one collective over ``size`` ranks that are spread evenly over ``nodes`` nodes.

    | algorithm | L | X | p |
    |---|---|---|---|
    | ring, one node | a + m(n-1)i | (m(n-1)/n + kappa/n) S/B | p |
    | ring, more | a + m[k(g-1)im + (k-1)er] | max((m(n-1)/n + kappa/n) S/B, m(n-1)/n S/(gb)) | pr |
    | tree | a + 2(g-1)i + 2 log2(k)et | max(2S/(0.9B), c S/(gb)), c = 1, 4/3, 2 for k = 2, 3, more | pt |
    | nvls | an | (g+1)/g S/(rho B), for more than 4 GPUs on one node | p |
    | nvls_tree | an + 2 log2(k)et | max((g+1)/g S/(rho B), c S/(gb)) | pt |
    | sharp | an or a + 2(g-1)i, + 2et | max(inside, S/(gb)) / sharp_ratio | pt |
    | halving_doubling, hierarchical | see :mod:`simpar.cost.all_reduce` | | p, pr |
    | reduce_broadcast | twice that of a broadcast | twice, too | p, pr |
    | pairwise (all-to-all) | ap + am(n-1) [+ ep] | max((g-1)/n S/B, (n-g)/n S/b) | p, pr |
    | ring (broadcast, reduce) | a + (n-k)i + (k-1)er | max(S/B, S/(gb)) | p, pr |

    with m = 2 for an all-reduce and 1 for its halves. Trees and NVLS do all-reduces only; on one node a tree
    has ``tree_ratio`` instead of 0.9. ``sharp`` reduces in the switches (Graham et al. 2016): a node sends each byte
    once; inside it is nvls, or a ring's two halves. Its ratio is 0.85, as NCCL's tuning model takes off CollNet on
    Hopper; 64 H100 then reach a bus bandwidth of 450 GB/s, as Azure publishes, where CoreWeave publishes 386. A group
    has g shares of the NICs of each node. On ``host`` links (gloo)
    a reduce-scatter costs what an all-reduce does, and an all-to-all also copies the own block at link speed:
    both seen in measured times of torch 2.13. On a graph of one's own no switch reduces, and the flights along its
    routes come on top: a ring's chunk passes all hops but one (2 or 1 times), a broadcast all but the last, a tree goes
    up and down 2(g-1 + log2(k)) of the longest, an all-to-all waits for the farthest pair.

    Args:
        op: one of ``COLLECTIVE_OPS``.
        nbytes: buffer of an all-reduce, broadcast or reduce; output of an all-gather; input of a
            reduce-scatter; what one rank sends in total in an all-to-all, its own block included.
        size: number of ranks; one rank costs nothing.
        nodes: number of nodes they are on.
        cluster: where they run.
        algorithm: the fastest one by default (``auto``), or the name of one.
        ranks: the group; only in a torus and on a graph does it matter which, and in a torus the first ones are
            assumed.
        network: the cluster's links, for the flights on a graph, which are left out without it.

    Raises:
        PlanError: unknown operation or algorithm, an algorithm that does not apply here, or a group that the
            cluster cannot hold.
    """
    if not (0 < nodes <= size <= nodes * cluster.gpus_per_node and nodes <= cluster.nodes and nbytes >= 0):
        raise PlanError(_misfit(nbytes, size, nodes, cluster))
    if op not in COLLECTIVE_OPS:
        raise PlanError(
            f"unknown collective '{op}'{nearest(op, COLLECTIVE_OPS)}; use one of {', '.join(COLLECTIVE_OPS)}"
        )
    if size == 1 and algorithm in ALGORITHMS:
        return _NOTHING
    if cluster.node_link.axes is not None and cluster.graph is None:
        latency_s, streaming_s, inside, nic = torus_cost(op, nbytes, size, nodes, cluster, ranks=ranks)
        total_s = blend(latency_s, streaming_s, cluster.node_link.smoothness)
        costs = [CollectiveCost("torus", latency_s, total_s, inside, nic)]
    elif op == "all_reduce":
        asked = (nbytes, size, nodes, cluster)
        costs = [_named(algorithm, *asked)] if algorithm in _NAMED else _all_reduce(*asked)
    elif op == "all_to_all":
        costs = [all_to_all(nbytes, size, nodes, cluster)]
    elif op in ("broadcast", "reduce"):
        costs = [broadcast(nbytes, size, nodes, cluster)]
    elif op == "shift":
        costs = [shift(nbytes, size, nodes, cluster)]
    else:
        whole = op == "reduce_scatter" and cluster.node_link.kind == "host"
        costs = [ring(nbytes, size, nodes, cluster, 2 if whole else 1)]
    if cluster.graph is not None and network is not None and ranks is not None:
        costs = [_flown(cost, op, ranks, nodes, network) for cost in costs]
    if algorithm != "auto":
        admissible = [cost.algorithm for cost in costs]
        costs = [cost for cost in costs if cost.algorithm == algorithm]
        if not costs:
            raise PlanError(_not_admissible(op, size, nodes, algorithm, admissible))
    return min(costs, key=_total) if len(costs) > 1 else costs[0]


def p2p_cost(
    nbytes: float,
    src: int,
    dst: int,
    cluster: Cluster,
    *,
    channels: int | None = None,
    network: Network | None = None,
) -> CollectiveCost:
    """Cost of one message between two global ranks.

    L = ap and X = S/B inside a node, L = ap + ep and X = S/min(b, channels x 14 GB/s) between nodes.

    Args:
        nbytes: size of the message.
        src: sending rank.
        dst: receiving rank.
        cluster: where they are.
        channels: channels of the library between the two; None takes the fabric's, or as many as fill the
            NIC.
        network: the cluster's links; where the cluster has a graph, latency and bandwidth are those of its
            route.

    Raises:
        PlanError: negative size, or a rank outside the cluster.
    """
    if not (0 <= src < cluster.gpus and 0 <= dst < cluster.gpus and nbytes >= 0):
        raise PlanError(
            f"a message of {nbytes:g} bytes from rank {src} to {dst} does not fit a cluster of "
            f"{cluster.gpus} GPUs; give a size of at least 0 and ranks from 0 to {cluster.gpus - 1}"
        )
    if src == dst:
        return _NOTHING
    local = cluster.gpus_per_node
    link, fabric = cluster.node_link, cluster.fabric
    same_node = src // local == dst // local
    if network is not None and cluster.graph is not None:
        bandwidth = network.message_bytes_per_s(src, dst)
        smoothness = link.smoothness if same_node or fabric is None else fabric.smoothness
        latency_s = network.latency_s(src, dst)
    elif same_node:
        link = link.between(src % local, dst % local)
        bandwidth, smoothness, latency_s = link.pair_bytes_per_s, link.smoothness, link.p2p_latency_s
        if torus := link.torus(local):
            latency_s += len(torus.route(src % local, dst % local)) * link.step_latency_s
    else:
        assert fabric is not None, "several nodes have a fabric"
        bandwidth, smoothness = cluster.nic_bytes_per_s, fabric.smoothness
        if channels := channels or fabric.p2p_channels:
            bandwidth = min(bandwidth, channels * fabric.p2p_channel_bytes_per_s)
        latency_s = link.p2p_latency_s + fabric.p2p_latency_s
    total_s = blend(latency_s, nbytes / bandwidth, smoothness)
    return CollectiveCost("p2p", latency_s, total_s, nbytes if same_node else 0.0, 0.0 if same_node else nbytes)


def p2p_channels(cluster: Cluster, communicator_size: int, budget: int = 16) -> int:
    """Channels that NCCL gives a message to another node: enough for the NIC, fewer in large groups.

    ceil(line rate / 14 GB/s) channels, halved while channels x ceil(ranks/8) exceeds the budget of a
    communicator (NCCL's src/graph/paths.cc). Logs do not state the budget; 16 agrees with messages measured
    over 400 Gb/s between H100 at 16, 40 and 80 ranks (45, 25, 15 GB/s), but not at 10 and 20 (25 too).
    """
    if cluster.fabric is None:
        return 1
    line_bytes_per_s = cluster.nic_bytes_per_s / cluster.fabric.efficiency
    channels = ceil(line_bytes_per_s / cluster.fabric.p2p_channel_bytes_per_s)
    while channels > 1 and channels * ceil(communicator_size / 8) > budget:
        channels //= 2
    return channels


def collective_error(nbytes: float, size: int, nodes: int, cluster: Cluster) -> CollectiveError:
    """Relative error to expect of :func:`collective_cost`, from the statistics of the fits behind it.

    More nodes than the fabric's fit has seen count at least as much as what a fit on 4 nodes missed by on up
    to 512.

    Args:
        nbytes: size as for :func:`collective_cost`; from 1 MiB on it counts as large.
        size: number of ranks.
        nodes: number of nodes they are on.
        cluster: where they run.
    """
    if nodes > 1 and cluster.fabric is not None:
        fits = [cluster.fabric.errors]
        if cluster.fabric.measured_nodes is None or nodes > cluster.fabric.measured_nodes:
            fits.append(_EXTRAPOLATED)
    else:
        fits = [cluster.node_link.over(size / nodes).errors]
    if nbytes >= MIB:
        return CollectiveError(max(f.median_large for f in fits), max(f.p90_large for f in fits))
    return CollectiveError(max(f.median for f in fits), max(f.p90 for f in fits))


def _total(cost: CollectiveCost) -> float:
    return cost.total_s


def _all_reduce(nbytes: float, n: int, k: int, cluster: Cluster) -> list[CollectiveCost]:
    costs = [ring(nbytes, n, k, cluster, 2)]
    if cluster.node_link.kind != "host":
        costs.append(tree(nbytes, n, k, cluster))
        reduces = cluster.graph is None  # no switch of a graph of one's own does
        if reduces and cluster.node_link.nvls and n > 4 * k:
            costs.append(nvls(nbytes, n, k, cluster))
        if reduces and k > 1 and cluster.fabric is not None and cluster.fabric.sharp:
            costs.append(sharp(nbytes, n, k, cluster))
    return costs


def _flown(cost: CollectiveCost, op: str, ranks: Sequence[int], nodes: int, network: Network) -> CollectiveCost:
    """A collective on a graph, with the flights of its critical path."""
    if op == "all_to_all":
        flight_s = network.farthest_s(ranks)
    else:
        hops = network.flights_s(ranks)
        # a chunk goes once around but for one hop, or in an all-reduce twice but for two
        once, twice = sum(hops) - min(hops), 2 * sum(hops) - min(map(add, hops, [*hops[1:], hops[0]]))
        levels = len(ranks) / nodes - 1 + log2(nodes)
        if op == "shift":
            flight_s = max(hops)
        elif op in ("broadcast", "reduce"):
            flight_s = sum(hops[:-1])
        elif cost.algorithm == "tree":
            flight_s = 2 * levels * max(hops)
        elif cost.algorithm == "halving_doubling":
            flight_s = 2 * ceil(log2(len(ranks))) * network.farthest_s(ranks)
        else:
            flight_s = twice if op == "all_reduce" else once
    return cost._replace(latency_s=cost.latency_s + flight_s, total_s=cost.total_s + flight_s)


def _named(algorithm: str, nbytes: float, n: int, k: int, cluster: Cluster) -> CollectiveCost:
    """An all-reduce in phases; ``reduce_broadcast`` reduces to one rank and broadcasts from it."""
    if algorithm == "reduce_broadcast":
        one = broadcast(nbytes, n, k, cluster)
        return CollectiveCost(algorithm, *(2 * each for each in one[1:]))
    latency_s, streaming_s, inside, nic = _PHASES[algorithm](nbytes, n, k, cluster)
    smoothness = cluster.fabric.smoothness if k > 1 and cluster.fabric is not None else cluster.node_link.smoothness
    return CollectiveCost(algorithm, latency_s, blend(latency_s, streaming_s, smoothness), inside, nic)


def _misfit(nbytes: float, size: int, nodes: int, cluster: Cluster) -> str:
    plural = "s" if nodes != 1 else ""
    return (
        f"a collective of {nbytes:g} bytes over {size} ranks on {nodes} node{plural} does not fit "
        f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs; give a size of at least 0 and one to "
        f"{cluster.gpus_per_node} ranks a node"
    )


def _not_admissible(op: str, size: int, nodes: int, algorithm: str, admissible: list[str]) -> str:
    if algorithm not in ALGORITHMS:
        hint = nearest(algorithm, ALGORITHMS)
        return f"unknown algorithm '{algorithm}'{hint}; use one of {', '.join(ALGORITHMS)}"
    why, plural = "", "s" if nodes != 1 else ""
    if algorithm.startswith("nvls"):
        span = "one node" if algorithm == "nvls" else "several nodes"
        why = f" ({algorithm} needs all_reduce, an NVSwitch that reduces, over 4 GPUs a node and {span})"
    return (
        f"algorithm '{algorithm}' does not apply to {op} over {size} ranks on {nodes} "
        f"node{plural}{why}; use {', '.join(['auto', *admissible])}"
    )
