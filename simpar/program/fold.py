"""Folding: whether replicas behave exactly alike, so that one of them can stand for all.

Data-parallel replicas run the same program on the same devices. They differ only if their messages take different
ways: within a node or between nodes, below one leaf switch or across. Where stages and sharding groups are aligned with
nodes and leaves, a shift along the ranks maps each replica onto the next and nothing can tell them apart. On a custom
graph any two ranks may be connected differently.
"""

from dataclasses import dataclass
from math import prod

from simpar.faults.description import Faults
from simpar.hardware.cluster import Cluster
from simpar.plan.layout import Layout
from simpar.plan.placement import places


@dataclass(frozen=True, slots=True)
class Simulated:
    """Which ranks are simulated.

    Attributes:
        folded: whether one rank of each stage stands for all of it.
        replicas: data-parallel indices, each with how many it stands for.
        opened: those of them that are simulated kernel by kernel: their ranks wait for each other unevenly, or each
            kernel has noise of its own.
    """

    folded: bool
    replicas: dict[int, int]
    opened: frozenset[int] = frozenset()


def simulated(layout: Layout, cluster: Cluster, faults: Faults | None, *, fold: bool) -> Simulated:
    """The ranks to simulate, the fewest that give exactly what all of them give.

    Replicas that a fault strikes are simulated rank by rank. Where each data-parallel group holds all replicas, the
    others stay alike, so one of them, rank by rank, stands for these. Sharding groups that are replicas of each other,
    context or expert parallelism, and links that replicas share would tell them apart, so there all are simulated.
    """
    alike = fold and layout.server is None and replicas_are_alike(layout, cluster)
    classes = _classes(layout)
    struck = frozenset() if faults is None else _struck(layout, cluster, faults)
    if alike and struck == frozenset() and len(classes) == 1:
        return Simulated(folded=True, replicas={0: 1})
    everyone = range(layout.replicas)
    hit = frozenset(everyone) if struck is None else struck
    rests = [rest for each in classes if (rest := [replica for replica in each if replica not in hit])]
    replicas = dict.fromkeys(everyone, 1)
    if alike and rests and _told_apart_by_groups_only(layout, cluster):
        replicas = {**{rest[0]: len(rest) for rest in rests}, **dict.fromkeys(sorted(hit), 1)}
    uneven = faults is not None and bool(faults.speeds or faults.link_rates or faults.jitter.spread)
    by_kernel = faults is not None and faults.jitter.per == "kernel" and faults.jitter.spread > 0
    wait = by_kernel or layout.plan.tp * layout.plan.cp * layout.expert_ranks > 1
    waiting = frozenset(everyone) if layout.experts_span_replicas else hit  # experts are spread over replicas
    return Simulated(folded=False, replicas=replicas, opened=waiting if uneven and wait else frozenset())


def _classes(layout: Layout) -> list[list[int]]:
    """Replicas whose microbatches have the same lengths."""
    if layout.samples is None:
        return [list(range(layout.replicas))]
    found: dict[tuple[int, ...], list[int]] = {}
    for replica in range(layout.replicas):
        found.setdefault(layout.samples.padded[replica // layout.plan.cp], []).append(replica)
    return list(found.values())


def _struck(layout: Layout, cluster: Cluster, faults: Faults) -> frozenset[int] | None:
    """Data-parallel indices that faults strike; None where they tell all replicas apart."""
    own, loader = faults.own_links, faults.loader
    is_late = loader.strikes
    if faults.jitter.spread or own is None or (is_late and loader.replicas is None and not loader.is_certain):
        return None
    plan = layout.plan
    at = places(layout, cluster) or cluster.placement
    ranks = list(faults.speeds) + [place if at is None else at.index(place) for place in own]
    found = {rank // plan.tp % layout.replicas // plan.cp for rank in ranks}
    found.update(loader.replicas or () if is_late else ())
    return frozenset(index * plan.cp + i for index in found if index < layout.dp for i in range(plan.cp))


def _told_apart_by_groups_only(layout: Layout, cluster: Cluster) -> bool:
    """Whether replicas that nothing strikes stay alike beside others that are late."""
    apart = layout.shard != layout.replicas and layout.plan.zero > 0
    shares = cluster.node_link.axes is not None or (cluster.fabric is not None and cluster.fabric.pod_nodes is not None)
    shares = shares or layout.plan.offload != "none"  # hosts, and links to them
    return not apart and not shares and layout.plan.cp == 1 and not layout.experts_span_replicas


def replicas_are_alike(layout: Layout, cluster: Cluster) -> bool:
    """Whether one replica (and one rank of each tensor-parallel group) can stand for all."""
    if cluster.graph is not None or cluster.placement is not None or not _of_one_kind(layout, cluster):
        return False
    near = _near_a_host(layout, cluster)
    if not tile_alike(layout, cluster) or any(cluster.gpus_per_node % gpus for gpus in near):
        return False  # groups, or the last switch of a node, differ from the others
    tp = layout.plan.tp
    blocks = [cluster.gpus_per_node, *near]
    link = cluster.node_link
    while link.beyond is not None and link.reach is not None:
        blocks.append(link.reach)
        link = link.beyond
    torus = link.torus(cluster.gpus_per_node)
    if torus is not None:
        if not all(torus.wraps) and tp * layout.plan.pp * (layout.replicas // layout.shard) > 1:
            return False  # groups along a line meet in its middle and not at its ends
        blocks += [prod(torus.shape[axis:]) for axis in range(1, len(torus.shape))]
    pod_nodes = None if cluster.fabric is None else cluster.fabric.pod_nodes
    if pod_nodes is not None and pod_nodes < cluster.nodes:
        if cluster.nodes % pod_nodes:
            return False  # the last leaf has fewer nodes, and so less to carry
        blocks.append(pod_nodes * cluster.gpus_per_node)
    pieces = [tp * layout.shard] if layout.plan.pp == 1 else [tp * layout.shard, tp * layout.replicas]
    if layout.has_experts:
        pieces += [layout.etp, layout.expert_ranks, layout.expert_ranks * layout.expert_shard]
    if layout.plan.cp > 1:
        pieces.append(tp * layout.plan.cp)
    if layout.plan.rank_order == "tp-pp-dp":
        pieces = [tp * layout.plan.cp, tp * layout.plan.cp * layout.plan.pp, tp * layout.shard * layout.plan.pp]
        if layout.has_experts:  # their groups reach over as many replicas, each with its other stages between
            pieces += [layout.etp, layout.expert_ranks, layout.expert_ranks * layout.plan.pp]
            pieces.append(layout.expert_ranks * layout.expert_shard * layout.plan.pp)
    return all(_aligned(piece, block) for piece in pieces for block in blocks)


def _near_a_host(layout: Layout, cluster: Cluster) -> list[int]:
    """GPUs that share a host, and those that share a link to it, where anything lies there."""
    if layout.plan.offload == "none":
        return []
    return [cluster.host.gpus_per_link, cluster.host.gpus_per_host or cluster.gpus_per_node]


def inner_groups(layout: Layout) -> list[tuple[int, int]]:
    """Step and size of the groups whose collectives run inside layers."""
    plan = layout.plan
    groups = [(1, plan.tp), (plan.tp, plan.cp)]
    if layout.has_experts:
        groups += [(1, layout.etp), (layout.etp, plan.ep)]
    return groups


def tile_alike(layout: Layout, cluster: Cluster) -> bool:
    """Whether all groups inside layers lie on nodes in one way, so that one block's price is every stage's.

    Groups of ``size`` ranks, ``step`` apart, tile the ranks; a tile, and the steps in it, must fit the nodes.
    """
    local, plan = cluster.gpus_per_node, layout.plan
    inner = plan.tp * plan.cp
    # with stages counted first, experts' groups that reach beyond a replica skip the other stages' ranks
    skips = plan.rank_order == "tp-pp-dp" and plan.pp > 1 and layout.expert_ranks > inner
    if skips and (layout.expert_ranks % inner or not _aligned(inner * plan.pp, local)):
        return False
    tiles = {edge for step, size in inner_groups(layout) if size > 1 for edge in (step, step * size)}
    return all(_aligned(tile, local) for tile in tiles)


def _of_one_kind(layout: Layout, cluster: Cluster) -> bool:
    """Whether all ranks of each stage run on one kind of device; nodes of a kind follow each other."""
    if len(cluster.devices) == 1:
        return True
    if layout.plan.rank_order != "tp-dp-pp":
        return False
    ranks = layout.plan.tp * layout.replicas
    stages = range(0, ranks * layout.plan.pp, ranks)
    return all(cluster.kind_of(first) == cluster.kind_of(first + ranks - 1) for first in stages)


def _aligned(piece: int, block: int) -> bool:
    """Whether pieces laid end to end never straddle a block's edge in different ways."""
    return piece % block == 0 or block % piece == 0
