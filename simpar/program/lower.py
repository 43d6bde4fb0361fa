"""Lowers a job to a program: model, cluster and plan become the instructions of every rank.

What flows in: units (:mod:`simpar.program.transformer`, :mod:`simpar.program.module`), a pipeline schedule, a layout.
What flows out: a :class:`~simpar.program.ir.Program`. No times here, and no strategy has a formula of its own: data
parallelism, ZeRO and pipelining are only different orders of runs, collectives, messages and events.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from typing import ClassVar, Literal, NamedTuple

from simpar.cost.memory import host_state_bytes, state_bytes, weight_bytes
from simpar.errors import PlanError
from simpar.faults.description import Faults
from simpar.hardware.cluster import Cluster
from simpar.model.work import DTYPE_BYTES
from simpar.plan.layout import Layout, Model
from simpar.plan.offload import offloads_activations, offloads_optimizer
from simpar.plan.placement import places
from simpar.program.buffers import buffer_bytes
from simpar.program.compression import Compression
from simpar.program.data_parallel import DataParallel, FullySharded, Replicated, Runner
from simpar.program.fold import inner_groups, simulated, tile_alike
from simpar.program.groups import STREAM, Groups
from simpar.program.ir import (
    Alloc,
    Collective,
    Group,
    Operation,
    Program,
    RankProgram,
    Recv,
    Run,
    Send,
    Sync,
)
from simpar.program.late import with_delays
from simpar.program.offload import HostActivations, HostUpdate, UnitPass
from simpar.program.operations import Part, shard_of
from simpar.program.parameter_server import Keys, Served, servers
from simpar.program.periodic import average, outer_state_bytes
from simpar.program.sized import Sized, sized
from simpar.program.unit import Chunk, Held
from simpar.program.writer import Writer
from simpar.schedule.registry import build
from simpar.schedule.schedule import Action, Schedule

Opening = Literal["all", "beside", "none"]


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
    keys = None if layout.server is None else Keys(layout, by_length[layout.seq_len].operations.chunks, cluster)
    chosen = simulated(layout, cluster, faults, fold=fold)
    fold = chosen.folded
    # any two streams may share a link of a graph; groups that lie on nodes in different ways take different times
    opened = opened or cluster.graph is not None or not tile_alike(layout, cluster)
    # collectives of a block that leave a leaf switch load links that other ranks share
    has_pods = cluster.fabric is not None and cluster.fabric.pod_nodes is not None
    leaves = has_pods and any("network" in _tiers(*group, cluster) for group in inner_groups(layout))
    # where cards have one plug for all, copies to hosts load what collectives inside a node use
    plug = plan.offload != "none" and cluster.node_link.kind == "pcie"
    plug = plug and any("node" in _tiers(*group, cluster) for group in inner_groups(layout))
    opening: Opening = "all" if opened or leaves or plug else "beside" if _shares_links(layout, cluster) else "none"
    context = _Context(layout, schedule, by_length, opening, fold, keys)
    apart = replace(context, opening="all")
    ranks = tuple(
        _Rank(apart if replica in chosen.opened else context, stage, replica, tp_rank, stands_for).program(
            cluster.device.context_bytes
        )
        for stage in range(plan.pp)
        for replica, stands_for in chosen.replicas.items()
        for tp_rank in range(1 if fold else plan.tp)
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


def _shares_links(layout: Layout, cluster: Cluster) -> bool:
    """Whether collectives inside blocks and data-parallel ones use the same links: both in the node, or both across."""
    inside = set[str]().union(*(_tiers(*group, cluster) for group in inner_groups(layout)))
    outside = _tiers(layout.plan.tp, layout.replicas, cluster)
    if layout.has_experts:
        outside |= _tiers(layout.expert_ranks, layout.expert_replicas, cluster)
    return bool(inside & outside)


def _tiers(step: int, size: int, cluster: Cluster) -> set[str]:
    """Links that a group of ``size`` ranks, ``step`` apart, uses: those of the node, those of the network."""
    if size == 1:
        return set()
    local = cluster.gpus_per_node
    return {tier for tier, used in (("node", step < local), ("network", step * size > local)) if used}


@dataclass(frozen=True, slots=True)
class _Context:
    """What all ranks of a program have in common; ``opening`` says which runs are simulated kernel by kernel."""

    layout: Layout
    schedule: Schedule
    by_length: Mapping[int, Sized]
    opening: Opening
    fold: bool
    keys: Keys | None


def _whole(backward: Action) -> Action:
    """The backward pass that an action is, or is the first half of; messages are known by it."""
    return backward if backward.op == "B" else backward._replace(op="B")


class _Peer(NamedTuple):
    """The rank that holds a neighbouring virtual stage, and the stream of the messages that it is sent."""

    rank: int
    stage: int
    boundary: int  # the stage before it, of the two
    stream: str


class _Rank:
    """Writes the instructions of one rank, in host order."""

    def __init__(self, context: _Context, stage: int, replica: int, tp_rank: int, stands_for: int) -> None:
        layout, schedule = context.layout, context.schedule
        self._context = context
        self._layout = layout
        self._schedule = schedule
        usual = context.by_length[layout.seq_len]
        self._operations = usual.operations
        lengths = layout.samples and layout.samples.padded[replica // layout.plan.cp]
        self._sized = [context.by_length[length] for length in lengths] if lengths else [usual] * layout.microbatches
        self._stage, self._replica, self._tp_rank, self._stands_for = stage, replica, tp_rank, stands_for
        # ranks of a stage follow each other, so what this one stands for are the next ones
        self._copies = range(layout.plan.tp * layout.replicas if context.fold else 1)
        chunks = usual.operations.chunks
        self._trained_from = next(
            (stage for stage, chunk in enumerate(chunks) if any(p.unit.has_backward for p in chunk)), len(chunks)
        )
        self._writer = Writer()
        self._held = schedule.stages_of(self._stage)
        self._before = {v: self._peer(schedule.before(v), "pp_backward", v - 1) for v in self._held}
        self._after = {v: self._peer(schedule.after(v), "pp_forward", v) for v in self._held}
        order = schedule.ranks[self._stage]
        self._firsts = {next(a for a in order if a.op == "F" and a.stage == v) for v in self._held}
        self._lasts = {next(a for a in reversed(order) if a.op in ("B", "W") and a.stage == v) for v in self._held}
        self._step = 0
        self._groups = Groups(layout, stage, self._replica, tp_rank, folded=context.fold)
        self._waits = self._shares_embedding or self._mirror != stage
        on_host = offloads_optimizer(layout.plan)
        self._host = HostUpdate(layout, self._writer, self._copies, waits=self._waits) if on_host else None
        on_host = offloads_activations(layout.plan)
        self._host_activations = HostActivations(self._writer, self._copies) if on_host else None
        self._data = self._strategy([chunks[v] for v in self._held])

    def _strategy(self, chunks: "list[Chunk]") -> DataParallel | Served:
        if self._context.keys is not None:
            return Served(self._context.keys, self._writer, chunks, replica=self._replica, tp_rank=self._tp_rank)
        strategy: type[Replicated] | type[FullySharded] = FullySharded if self._layout.plan.zero == 3 else Replicated
        return strategy(self._layout, self._groups, self._writer, chunks, self._host)

    def program(self, context_bytes: int) -> RankProgram:
        """The rank's program."""
        for step in range(self._layout.steps):
            self._step = step
            self._add_step()
        return RankProgram(
            rank=self._layout.rank(self._stage, self._replica, self._tp_rank),
            stage=self._stage,
            replicas=len(self._copies) * self._stands_for,
            resident=self._resident(context_bytes),
            instructions=tuple(self._writer.instructions),
            host_bytes=self._host_bytes(),
        )

    def _add_step(self) -> None:
        if self._host_activations is not None:
            self._host_activations.begin_step(list(self._unit_passes()))
        self._data.begin_step()
        for turn in self._schedule.turns(self._stage):
            if len(turn) == 2 and self._overlaps(*turn):
                self._pair(*turn)
                continue
            for action in turn:
                self._pass[action.op](self, action)
        self._reduce_tied_embedding()
        self._reduce_copies()
        self._data.before_update()
        if self._context.keys is None:  # else servers update
            self._update()
            if self._step == self._layout.steps - 1:
                average(self._layout, self._groups, self._writer, self._trained.total)
        self._data.end_step()

    def _update(self) -> None:
        """The optimizer's step, on the device or on the host."""
        host, ready = self._host, None
        if host is not None:
            host.send_waiting()
            ready = host.norm()
        agreed = self._reduce_norm(ready)
        if agreed is not None and host is None:
            self._writer.wait(agreed)
        if self._trained.total:
            operation = self._operations.update(self._trained, self._tensors, self._layout)
            if operation.blocks:
                self._writer.add(Run(operation))
        if host is not None:
            host.update(agreed)

    def _forward(self, action: Action) -> None:
        self._receive_input(action)
        run, chunk = self._runner(action, "forward"), self._held.index(action.stage)
        self._data.forward(run, chunk, first=action in self._firsts)
        self._send_output(action)

    def _backward(self, action: Action) -> None:
        if not self._trains(action.stage):
            return
        self._receive_gradient(action)
        run, chunk = self._runner(action, "backward"), self._held.index(action.stage)
        self._data.backward(run, chunk, action.microbatch, last=action in self._lasts)
        self._send_gradient(action)

    def _input_gradient(self, action: Action) -> None:
        """The half of a backward pass for which another stage waits; it leaves what the weight gradient needs."""
        if not self._trains(action.stage):
            return
        self._receive_gradient(action)
        self._data.backward_input(self._runner(action, "backward_input"), self._held.index(action.stage))
        self._send_gradient(action)

    def _weight_gradient(self, action: Action) -> None:
        if not self._trains(action.stage):
            return
        run, chunk = self._runner(action, "backward_weight"), self._held.index(action.stage)
        self._data.backward_weight(run, chunk, action.microbatch, last=action in self._lasts)
        self._writer.add(Alloc("activations", -self._of(action).deferred[action.stage]))

    _pass: ClassVar = {"F": _forward, "B": _backward, "I": _input_gradient, "W": _weight_gradient}

    def _overlaps(self, forward: Action, backward: Action) -> bool:
        """Whether a pair that the schedule overlaps can be one run: no gathers and reductions come between."""
        return self._trains(backward.stage) and self._data.is_quiet(
            first=forward in self._firsts, last=backward in self._lasts
        )

    def _pair(self, forward: Action, backward: Action) -> None:
        self._receive_input(forward)
        self._receive_gradient(backward)
        first, second = self._of(forward).operations, self._of(backward).operations
        operation = first.pair(forward.stage, backward.stage, second)
        whole = len(second.chunks[backward.stage])
        self._add_run(operation, backward, second.transient_bytes(backward.stage, 0, whole), beside=False)
        self._send_output(forward)
        self._send_gradient(backward)

    def _trains(self, stage: int) -> bool:
        """Whether anything runs backward on a virtual stage: not on those before the first that has a gradient."""
        return stage % self._schedule.depth >= self._trained_from

    def _runner(self, action: Action, part: Part) -> Runner:
        return partial(self._run, action, part)

    def _run(self, action: Action, part: Part, first: int, last: int, *, beside: bool) -> None:
        """Units of a virtual stage, one part of them; one by one where their activations come and go."""
        if self._host_activations is None:
            self._run_units(action, part, first, last, beside=beside)
            return
        for unit in range(first, last) if part == "forward" else reversed(range(first, last)):
            moves = self._activations_of(action, unit) > 0
            if moves:
                self._host_activations.before()
            self._run_units(action, part, unit, unit + 1, beside=beside)
            if moves:
                self._host_activations.after()

    def _activations_of(self, action: Action, unit: int) -> int:
        """Bytes that a unit keeps for its backward pass."""
        placed = self._of(action).operations.chunks[action.stage][unit].unit
        return placed.activation_bytes if placed.has_backward else 0

    def _unit_passes(self) -> Iterator[UnitPass]:
        """The passes of all units that keep anything, in the order in which they will run."""
        for action in self._schedule.ranks[self._stage]:
            chunk = self._of(action).operations.chunks[action.stage]
            units = range(len(chunk))
            for unit in units if action.op == "F" else reversed(units):
                nbytes = self._activations_of(action, unit)
                if nbytes:
                    layer = chunk[unit].layer
                    yield UnitPass(action.op == "F", action.stage, action.microbatch, unit, nbytes, layer)

    def _run_units(self, action: Action, part: Part, first: int, last: int, *, beside: bool) -> None:
        operations = self._of(action).operations
        operation = operations.units(action.stage, part, first, last)
        if operation.blocks:
            holds = part in ("backward", "backward_input")
            transient = operations.transient_bytes(action.stage, first, last) if holds else 0
            if self._layout.framework.records_streams and part in ("forward", "backward"):
                transient = max(transient, self._queued_bytes(action, backward=part == "backward"))
            self._add_run(operation, action, transient, beside=beside)

    def _queued_bytes(self, action: Action, *, backward: bool) -> int:
        """What collectives in the launch queue hold.

        Without a pipeline the host never waits. In one it does before each backward pass, and on all but the first
        virtual stage before each forward pass, too. There, measured peaks (nanotron's, of rank 0) show none of it for
        two passes in a row and all but two passes' worth for more: read off them, not derived.
        """
        operations = self._of(action).operations
        if self._layout.plan.pp == 1:
            return operations.queued_bytes(action.stage, 1, backward=backward)
        if backward or action.stage:
            return 0
        alone = takewhile(lambda each: each.op == "F" and each.stage == 0, self._schedule.ranks[self._stage])
        return operations.queued_bytes(0, max(0, sum(1 for _ in alone) - 2), backward=False)

    def _add_run(self, operation: Operation, action: Action, transient_bytes: int, *, beside: bool) -> None:
        """Opened where data-parallel traffic may run beside it on the same links."""
        chunk = self._held.index(action.stage) if len(self._held) > 1 else -1
        opened = self._context.opening == "all" or (beside and self._context.opening == "beside")
        self._writer.add(Run(operation, action.microbatch, chunk, transient_bytes, opened))

    def _of(self, action: Action) -> Sized:
        """What a microbatch of that length runs."""
        return self._sized[action.microbatch]

    @property
    def _parameters(self) -> Held:
        return sum((p.unit.held for v in self._held for p in self._operations.chunks[v]), Held())

    @property
    def _trained(self) -> Held:
        """Parameters that get a gradient."""
        return sum((p.unit.trained for v in self._held for p in self._operations.chunks[v]), Held())

    @property
    def _tensors(self) -> int:
        return sum(p.unit.tensors for v in self._held for p in self._operations.chunks[v])

    # ---- pipeline messages ------------------------------------------------------------------------------------------

    def _receive_input(self, action: Action) -> None:
        """What a forward pass begins with."""
        self._receive(action, self._before[action.stage])
        if self._host_activations is None:
            self._writer.add(Alloc("activations", self._of(action).activations[action.stage]))

    def _send_output(self, action: Action) -> None:
        self._send(action, self._after[action.stage])

    def _receive_gradient(self, action: Action) -> None:
        self._receive(_whole(action), self._after[action.stage])

    def _send_gradient(self, action: Action) -> None:
        """What a backward pass, or its first half, ends with."""
        this = self._of(action)
        left = this.deferred[action.stage] if action.op == "I" else 0
        if self._host_activations is None:
            self._writer.add(Alloc("activations", left - this.activations[action.stage]))
        peer = self._before[action.stage]
        if peer is not None and self._trains(peer.stage):
            self._send(_whole(action), peer)

    def _peer(self, stage: int | None, stream: str, boundary: int) -> _Peer | None:
        """Who holds a virtual stage of this rank's pipeline; None if there is none, or it is this rank."""
        if stage is None or stage in self._held:
            return None
        # where a V comes back up, messages meet those that go down; neither may wait for the other
        way = "" if self._schedule.goes_round(boundary) else "_return"
        rank = self._layout.rank(self._schedule.rank_of_stage[stage], self._replica, self._tp_rank)
        return _Peer(rank, stage, boundary, stream + way)

    def _receive(self, action: Action, source: _Peer | None) -> None:
        if source is not None:
            self._writer.add(Recv(source.rank, self._tag(action)))
            self._wait_on_host()

    def _send(self, action: Action, target: _Peer | None) -> None:
        """What an action makes goes to the same action of the neighbouring stage."""
        if target is None:
            return
        rank, stage, boundary, stream = target
        self._writer.wait(self._writer.record(), stream)
        tag = self._tag(Action(action.op, stage, action.microbatch))
        nbytes = self._of(action).boundary_bytes[boundary]
        self._writer.add(Send(stream, rank, nbytes, tag, action.microbatch, self._copies))
        if not self._layout.overlaps_messages:
            self._writer.wait(self._writer.record(stream))
            self._wait_on_host()

    def _tag(self, action: Action) -> Action | tuple[int, Action]:
        """The name of a message; where a program has several steps, they have their own."""
        return (self._step, action) if self._step else action

    def _wait_on_host(self) -> None:
        if self._layout.framework.host_waits_for_messages:
            self._writer.add(Sync())

    # ---- end of the step --------------------------------------------------------------------------------------------

    @property
    def _ends(self) -> set[int]:
        """The ranks of the first and of the last virtual stage."""
        return {self._schedule.rank_of_stage[0], self._schedule.rank_of_stage[-1]}

    @property
    def _shares_embedding(self) -> bool:
        """Whether this rank and another one hold a copy each of a tied embedding that is trained."""
        embedding, head = self._operations.chunks[0][0].unit, self._operations.chunks[-1][-1].unit
        tied = embedding.name == "embedding" and embedding.has_backward and head.tied_parameters > 0
        return tied and len(self._ends) > 1 and self._stage in self._ends

    @property
    def _mirror(self) -> int:
        """The rank that holds the other copy of the model's stages, where a schedule has two; else this one."""
        schedule = self._schedule
        return schedule.rank_of_stage[(self._held[0] + schedule.depth) % schedule.stages]

    def _reduce_tied_embedding(self) -> None:
        """First and last stage hold a copy each of a tied embedding; they add their gradients."""
        if not self._shares_embedding:
            return
        head = self._operations.chunks[-1][-1].unit
        ranks = tuple(self._layout.rank(stage, self._replica, self._tp_rank) for stage in sorted(self._ends))
        nbytes = head.tied_parameters * DTYPE_BYTES[self._layout.grad_dtype] / self._gradient_shards
        self._data.before_update()
        group = Group("embedding", ranks, self._copies)
        done = self._writer.after([Collective("all_reduce", nbytes, group, "tied embedding")])
        if done is not None:
            self._writer.wait(done)

    def _reduce_copies(self) -> None:
        """Where a schedule holds two copies of the model, a rank and its mirror image add their gradients."""
        mirror = self._mirror
        if mirror == self._stage or not self._trained.total:
            return
        pair = sorted((self._stage, mirror))
        ranks = tuple(self._layout.rank(stage, self._replica, self._tp_rank) for stage in pair)
        self._data.before_update()
        layout, trained = self._layout, self._trained
        # by then each rank has reduced gradients of its own shard only
        kept = trained.dense / (layout.shard if layout.plan.zero else 1)
        kept += trained.experts / (layout.expert_shard if layout.plan.zero else 1)
        nbytes = kept * DTYPE_BYTES[layout.grad_dtype]
        group = Group(STREAM, ranks, self._copies)
        done = self._writer.after([Collective("all_reduce", nbytes, group, "gradients of both copies")])
        if done is not None:
            self._writer.wait(done)

    @property
    def _gradient_shards(self) -> int:
        return self._layout.shard if self._layout.plan.zero >= 2 else 1

    def _reduce_norm(self, begin: int | None) -> int | None:
        """Clipping needs the norm of all gradients: no stage updates before the last one has its gradients.

        The event of its end, None where nothing is to be reduced; ``begin`` is when the rank knows its part, if not
        what compute has done.
        """
        layout, plan = self._layout, self._layout.plan
        if not layout.clips_gradients or plan.tp * plan.pp * layout.replicas == 1:
            return None
        if plan.zero and layout.reducing == layout.replicas:
            group = Group(STREAM, range(plan.tp * plan.pp * layout.replicas))
        elif plan.zero:
            group = self._apart()
        else:
            ranks = [layout.rank(stage, self._replica, t) for stage in range(plan.pp) for t in range(plan.tp)]
            if len(ranks) == 1:
                return None
            group = Group(STREAM, tuple(ranks), range(0, len(self._copies), plan.tp))
        return self._writer.after([Collective("all_reduce", 4.0, group, "gradient norm")], begin)

    def _apart(self) -> Group:
        """All ranks of the group that shards with this one and trains apart from the others."""
        layout, plan = self._layout, self._layout.plan
        first = self._replica - self._replica % layout.shard
        among = range(first, first + layout.shard)
        ranks = [layout.rank(s, r, t) for s in range(plan.pp) for r in among for t in range(plan.tp)]
        return Group(STREAM, tuple(ranks), range(0, len(self._copies), plan.tp * layout.shard))

    def _resident(self, context_bytes: int) -> tuple[tuple[str, int], ...]:
        layout, plan = self._layout, self._layout.plan
        every, trained, states = self._parameters, self._trained, Counter[str]()
        for held, updated, shard in (
            (every.dense, trained.dense, layout.shard),
            (every.experts, trained.experts, layout.expert_shard),
        ):
            of = partial(
                state_bytes,
                updated,
                precision=layout.precision,
                grad_dtype=layout.grad_dtype,
                optimizer=plan.optimizer,
                optimizer_dtype=plan.optimizer_dtype,
                zero=plan.zero,
                shard=shard,
                compute_gradients=layout.framework.keeps_compute_gradients,
                compute_shard=layout.framework.keeps_compute_shard,
            )
            found = of(offloaded=self._host is not None)
            if self._waits:
                found["gradients"] = of()["gradients"]
            states.update(found)
            frozen = (held - updated) * weight_bytes(layout.precision)
            states["weights"] += -(-frozen // (shard if plan.zero == 3 else 1))
        if self._context.keys is not None:
            states["optimizer"] = self._context.keys.states_beside(self._replica)
        states["optimizer"] += outer_state_bytes(layout, trained.total)
        states["gradients"] += Compression.of(layout).state_bytes(trained.total)
        units = [placed.unit for stage in self._held for placed in self._operations.chunks[stage]]
        states["buffers"] = buffer_bytes(units, layout)
        states["context"] = context_bytes
        return tuple(states.items())

    def _host_bytes(self) -> int:
        """What the host holds for the rank at most."""
        held = 0 if self._host_activations is None else self._host_activations.most_bytes
        if self._host is not None:
            plan, layout = self._layout.plan, self._layout
            held += host_state_bytes(
                shard_of(self._trained, layout),
                grad_dtype=layout.grad_dtype,
                optimizer=plan.optimizer,
                optimizer_dtype=plan.optimizer_dtype,
            )
        return held
