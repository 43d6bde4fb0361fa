"""Lowers a job to a program: model, cluster and plan become the instructions of every rank.

What flows in: units (:mod:`simpar.program.transformer`, :mod:`simpar.program.module`), a pipeline schedule, a layout.
What flows out: a :class:`~simpar.program.ir.Program`. No times here, and no strategy has a formula of its own: data
parallelism, ZeRO and pipelining are only different orders of runs, collectives, messages and events, which
:class:`~simpar.program.rank.Rank` writes. Here it is decided which ranks are written, and which runs are simulated
kernel by kernel.
"""

from dataclasses import replace

from simpar.errors import PlanError
from simpar.faults.description import Faults
from simpar.hardware.cluster import Cluster
from simpar.plan.layout import Layout, Model
from simpar.plan.offload import offloads_activations
from simpar.plan.placement import places
from simpar.program.fold import inner_groups, simulated, tile_alike
from simpar.program.ir import Program
from simpar.program.late import with_delays
from simpar.program.parameter_server import Keys, servers
from simpar.program.position import Position
from simpar.program.rank import Common, Opening, Rank
from simpar.program.sized import sized
from simpar.schedule.registry import build
from simpar.schedule.schedule import Schedule


def lower(
    model: Model,
    cluster: Cluster,
    layout: Layout,
    *,
    fold: bool = True,
    opened: bool = False,
    faults: Faults | None = None,
) -> Program:
    """The program of one training step.

    Args:
        model: the model.
        cluster: the machines; decides which links communication shares.
        layout: the plan laid over both.
        fold: let one tensor-parallel rank stand for all of its group, and one replica for all replicas.
        opened: simulate every kernel and every collective inside blocks one by one.
        faults: replicas that these strike are simulated rank by rank.

    Raises:
        PlanError: the layers cannot be split over the stages, or the schedule cannot run so many microbatches.
    """
    plan = layout.plan
    schedule = build(
        plan.schedule,
        pp=plan.pp,
        microbatches=layout.microbatches,
        chunks=plan.vpp,
        group=plan.microbatch_group,
    )
    _check_passes(layout, schedule)
    by_length = sized(model, layout, schedule)
    chunks = by_length[layout.seq_len].operations.chunks
    keys = None if layout.server is None else Keys(layout, chunks, cluster)
    chosen = simulated(layout, cluster, faults, fold=fold)
    common = Common(by_length, "all" if opened else _opening(layout, cluster), keys)
    apart = replace(common, opening="all")
    ranks = tuple(
        Rank(
            apart if replica in chosen.opened else common,
            Position(layout, schedule, chunks, stage, replica, tp_rank, chosen.folded, stands_for),
        ).program(cluster.device.context_bytes)
        for stage in range(plan.pp)
        for replica, stands_for in chosen.replicas.items()
        for tp_rank in range(1 if chosen.folded else plan.tp)
    )
    program = Program(
        ranks=ranks if keys is None else (*ranks, *servers(keys)),
        launch_s=layout.launch_s,
        algorithm=plan.collective_algorithm,
        placement=places(layout, cluster),
        stage_sync=plan.stage_sync,
        stage_buffer=plan.stage_buffer,
        guests=() if keys is None else keys.guests,
    )
    return program if faults is None else with_delays(program, layout, faults)


def _check_passes(layout: Layout, schedule: Schedule) -> None:
    """Refuses a schedule from a file that takes apart what offloaded activations come back for."""
    apart = next((action for order in schedule.ranks for action in order if action.op in ("I", "W")), None)
    if offloads_activations(layout.plan) and (apart or schedule.overlapped):
        found = f"{apart} as a half of one" if apart else "one woven with a forward pass"
        raise PlanError(
            f"offload '{layout.plan.offload}' needs whole backward passes, but schedule '{layout.plan.schedule}' has "
            f"{found}; set offload=optimizer or take another schedule"
        )


def _opening(layout: Layout, cluster: Cluster) -> Opening:
    """Which runs must be simulated kernel by kernel, because others may meet their collectives on a link."""
    # any two streams may share a link of a graph; groups that lie on nodes in different ways take different times
    if cluster.graph is not None or not tile_alike(layout, cluster):
        return "all"
    inside = set[str]().union(*(_tiers(*group, cluster) for group in inner_groups(layout)))
    # collectives of a block that leave a leaf switch load links that other ranks share
    if cluster.fabric is not None and cluster.fabric.pod_nodes is not None and "network" in inside:
        return "all"
    # where cards have one plug for all, copies to hosts load what collectives inside a node use
    if layout.plan.offload != "none" and cluster.node_link.kind == "pcie" and "node" in inside:
        return "all"
    outside = _tiers(layout.plan.tp, layout.replicas, cluster)
    if layout.has_experts:
        outside |= _tiers(layout.expert_ranks, layout.expert_replicas, cluster)
    return "beside" if inside & outside else "none"


def _tiers(step: int, size: int, cluster: Cluster) -> set[str]:
    """Links that a group of ``size`` ranks, ``step`` apart, uses: those of the node, those of the network."""
    if size == 1:
        return set()
    local = cluster.gpus_per_node
    return {tier for tier, used in (("node", step < local), ("network", step * size > local)) if used}
