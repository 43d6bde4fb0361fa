"""Lowers a job to a program: model, cluster and plan become the instructions of every rank.

What flows in: units (:mod:`simpar.program.transformer`, :mod:`simpar.program.module`), a pipeline schedule, a layout.
What flows out: a :class:`~simpar.program.ir.Program`. No times here, and no strategy has a formula of its own: data
parallelism, ZeRO and pipelining are only different orders of runs, collectives, messages and events.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from simpar.cost.memory import optimizer_traffic, state_bytes, weight_bytes
from simpar.hardware.cluster import Cluster
from simpar.model.module import ModuleModel
from simpar.model.transformer import Transformer
from simpar.model.work import DTYPE_BYTES, MemoryBound
from simpar.plan.layout import Layout, Model
from simpar.plan.partition import partition
from simpar.program.body import Body
from simpar.program.data_parallel import STREAM, DataParallel, FullySharded, Groups, Replicated, Runner
from simpar.program.fold import replicas_are_alike
from simpar.program.ir import (
    Alloc,
    Collective,
    Group,
    Operation,
    Phase,
    Program,
    RankProgram,
    Recv,
    Run,
    Send,
)
from simpar.program.module import module_units
from simpar.program.transformer import TransformerParts
from simpar.program.unit import Placed, Unit
from simpar.program.writer import Writer
from simpar.schedule.registry import build
from simpar.schedule.schedule import Action, Schedule

Chunk = tuple[Placed, ...]
Opening = Literal["all", "beside", "none"]


def lower(model: Model, cluster: Cluster, layout: Layout, *, fold: bool = True, opened: bool = False) -> Program:
    """The program of one training step.

    Args:
        model: the model.
        cluster: the machines; decides which links communication shares.
        layout: the plan laid over both.
        fold: let one tensor-parallel rank stand for all of its group, and one replica for all replicas.
        opened: simulate every kernel and every collective inside blocks one by one.

    Raises:
        PlanError: the layers cannot be split over the stages, or the schedule cannot run so many microbatches.
    """
    plan = layout.plan
    schedule = build(plan.schedule, pp=plan.pp, microbatches=layout.microbatches, chunks=plan.vpp)
    chunks, boundary_bytes = _place(model, layout, schedule.stages)
    operations = _Operations(chunks)
    fold = fold and replicas_are_alike(layout, cluster)
    opened = opened or cluster.graph is not None  # any two streams may share a link
    # collectives of a block that leave a leaf switch load links that other ranks share
    leaves = plan.tp > cluster.gpus_per_node and cluster.fabric is not None and cluster.fabric.pod_nodes is not None
    opening: Opening = "all" if opened or leaves else "beside" if _shares_links(layout, cluster) else "none"
    context = _Context(layout, schedule, operations, boundary_bytes, opening, fold)
    ranks = tuple(
        _Rank(context, stage, replica, tp_rank).program(cluster.device.context_bytes)
        for stage in range(plan.pp)
        for replica in range(1 if fold else layout.dp)
        for tp_rank in range(1 if fold else plan.tp)
    )
    return Program(
        ranks=ranks,
        launch_s=layout.launch_s,
        algorithm=plan.collective_algorithm,
        stage_sync=plan.stage_sync,
        stage_buffer=plan.stage_buffer,
    )


def _place(model: Model, layout: Layout, stages: int) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    """Units of every virtual stage, and the bytes that leave each one forward."""
    if isinstance(model, ModuleModel):
        return _place_module(model, layout, stages)
    return _place_transformer(model, layout, stages)


def _place_module(model: ModuleModel, layout: Layout, stages: int) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    units = module_units(model, layout)
    ranges = partition(len(units), stages, split=layout.plan.layer_split)
    chunks = tuple(tuple(Placed(units[i], i) for i in layers) for layers in ranges)
    return chunks, tuple(model.layers[layers[-1]].output_bytes(layout.plan.micro_batch) for layers in ranges)


def _place_transformer(model: Transformer, layout: Layout, stages: int) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    plan = layout.plan
    parts = TransformerParts(model, layout)
    embedding = parts.embedding()
    head = parts.head(shares_embedding=model.tied_embeddings and stages == 1)
    made: dict[tuple[int | None, str], Unit] = {}

    def layer(index: int, recompute: str) -> Unit:
        key = (model.layer_window(index), recompute)
        if key not in made:
            made[key] = parts.layer(*key)
        return made[key]

    ranges = partition(
        model.layers,
        stages,
        split=plan.layer_split,
        layer_cost=_flop(layer(0, plan.recompute)),
        first_cost=_flop(embedding),
        last_cost=_flop(head),
    )
    chunks = []
    for stage, layers in enumerate(ranges):
        placed = [Placed(layer(index, _recompute(layout, position)), index) for position, index in enumerate(layers)]
        if stage == 0:
            placed.insert(0, Placed(embedding, -1))
        if stage == stages - 1:
            placed.append(Placed(head, -1))
        chunks.append(tuple(placed))
    return tuple(chunks), (parts.boundary_bytes,) * stages


def _recompute(layout: Layout, position: int) -> str:
    plan = layout.plan
    partial = plan.recompute == "full" and plan.recompute_layers is not None
    return "none" if partial and position >= (plan.recompute_layers or 0) else plan.recompute


def _flop(unit: Unit) -> float:
    return unit.forward.work.flop + unit.backward.work.flop


def _shares_links(layout: Layout, cluster: Cluster) -> bool:
    """Whether tensor- and data-parallel traffic of one rank use the same links: both in the node, or both across."""
    tp, local = layout.plan.tp, cluster.gpus_per_node
    if tp == 1 or layout.dp == 1:
        return False
    return tp > local or local // tp > 1


class _Operations:
    """Makes each distinct operation once."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        self._made: dict[tuple[int, Phase, int, int], Operation] = {}
        self._transient: dict[tuple[int, int, int], int] = {}
        self._updates: dict[int, Operation] = {}

    def units(self, stage: int, phase: Phase, first: int, last: int) -> Operation:
        """Units ``first`` to ``last`` (exclusive) of a virtual stage, forward or backward."""
        key = (stage, phase, first, last)
        if key not in self._made:
            placed = self.chunks[stage][first:last]
            if phase == "backward":
                placed = placed[::-1]
            blocks = tuple(p.unit.forward if phase == "forward" else p.unit.backward for p in placed)
            self._made[key] = Operation(phase, phase, blocks, tuple(p.layer for p in placed))
        return self._made[key]

    def transient_bytes(self, stage: int, first: int, last: int) -> int:
        """What the hungriest of these units holds beside its activations while it runs backward."""
        key = (stage, first, last)
        if key not in self._transient:
            placed = self.chunks[stage][first:last]
            self._transient[key] = max((p.unit.transient_bytes for p in placed), default=0)
        return self._transient[key]

    def update(self, parameters: int, layout: Layout) -> Operation:
        """The optimizer step over the parameters that a rank holds."""
        if parameters not in self._updates:
            plan = layout.plan
            body = Body(phase="optimizer")
            shard = layout.shard if plan.zero else 1
            traffic = optimizer_traffic(
                -(-parameters // shard),
                precision=layout.precision,
                grad_dtype=layout.grad_dtype,
                optimizer=plan.optimizer,
                optimizer_dtype=plan.optimizer_dtype,
                clips=layout.clips_gradients,
            )
            for name, nbytes in traffic.items():
                body.run(MemoryBound(nbytes), name)
            if layout.keeps_gradients:
                kept = -(-parameters // (shard if plan.zero >= 2 else 1))
                body.run(MemoryBound(kept * DTYPE_BYTES[layout.grad_dtype]), "zero gradients")
            self._updates[parameters] = Operation("optimizer", "optimizer", (body.block("optimizer"),), (-1,))
        return self._updates[parameters]


@dataclass(frozen=True, slots=True)
class _Context:
    """What all ranks of a program have in common; ``opening`` says which runs are simulated kernel by kernel."""

    layout: Layout
    schedule: Schedule
    operations: _Operations
    boundary_bytes: tuple[int, ...]
    opening: Opening
    fold: bool


class _Rank:
    """Writes the instructions of one rank, in host order."""

    def __init__(self, context: _Context, stage: int, replica: int, tp_rank: int) -> None:
        layout, schedule = context.layout, context.schedule
        self._context = context
        self._layout = layout
        self._schedule = schedule
        self._operations = context.operations
        self._stage, self._replica, self._tp_rank = stage, replica, tp_rank
        # ranks of a stage follow each other, so what this one stands for are the next ones
        self._copies = range(layout.plan.tp * layout.dp if context.fold else 1)
        self._activations = [sum(p.unit.activation_bytes for p in chunk) for chunk in context.operations.chunks]
        self._writer = Writer()
        self._held = schedule.stages_of(self._stage)
        order = schedule.ranks[self._stage]
        self._firsts = {next(a for a in order if a.op == "F" and a.stage == v) for v in self._held}
        self._lasts = {next(a for a in reversed(order) if a.op != "F" and a.stage == v) for v in self._held}
        strategy: type[Replicated] | type[FullySharded] = FullySharded if layout.plan.zero == 3 else Replicated
        chunks = [self._operations.chunks[v] for v in self._held]
        groups = Groups(layout, stage, self._replica, tp_rank, folded=context.fold)
        self._data: DataParallel = strategy(layout, groups, self._writer, chunks)

    def program(self, context_bytes: int) -> RankProgram:
        """The rank's program."""
        self._data.begin_step()
        for action in self._schedule.ranks[self._stage]:
            if action.op == "F":
                self._forward(action)
            else:
                self._backward(action)
        self._reduce_tied_embedding()
        self._data.before_update()
        self._reduce_norm()
        self._writer.add(Run(self._operations.update(self._parameters, self._layout)))
        self._data.end_step()
        return RankProgram(
            rank=self._layout.rank(self._stage, self._replica, self._tp_rank),
            stage=self._stage,
            replicas=len(self._copies),
            resident=self._resident(context_bytes),
            instructions=tuple(self._writer.instructions),
        )

    def _forward(self, action: Action) -> None:
        stage = action.stage
        self._receive(action, stage - 1)
        self._writer.add(Alloc("activations", self._activations[stage]))
        chunk = self._held.index(stage)
        self._data.forward(self._runner(action, "forward"), chunk, first=action in self._firsts)
        self._send(action, stage + 1, "pp_forward", stage)

    def _backward(self, action: Action) -> None:
        stage = action.stage
        self._receive(action, stage + 1)
        chunk = self._held.index(stage)
        run = self._runner(action, "backward")
        self._data.backward(run, chunk, action.microbatch, last=action in self._lasts)
        self._writer.add(Alloc("activations", -self._activations[stage]))
        self._send(action, stage - 1, "pp_backward", stage - 1)

    def _runner(self, action: Action, phase: Phase) -> Runner:
        return partial(self._run, action, phase)

    def _run(self, action: Action, phase: Phase, first: int, last: int, *, beside: bool) -> None:
        """Units of a virtual stage; opened where data-parallel traffic may run beside them on the same links."""
        self._writer.add(
            Run(
                self._operations.units(action.stage, phase, first, last),
                action.microbatch,
                self._held.index(action.stage) if len(self._held) > 1 else -1,
                self._operations.transient_bytes(action.stage, first, last) if phase == "backward" else 0,
                self._context.opening == "all" or (beside and self._context.opening == "beside"),
            )
        )

    @property
    def _parameters(self) -> int:
        return sum(p.unit.parameters for v in self._held for p in self._operations.chunks[v])

    # ---- pipeline messages ------------------------------------------------------------------------------------------

    def _holder(self, stage: int) -> int | None:
        """Global rank that holds a virtual stage of this rank's pipeline; None if there is none, or it is this rank."""
        if not 0 <= stage < self._schedule.stages or stage in self._held:
            return None
        return self._layout.rank(self._schedule.rank_of_stage[stage], self._replica, self._tp_rank)

    def _receive(self, action: Action, source: int) -> None:
        peer = self._holder(source)
        if peer is not None:
            self._writer.add(Recv(peer, action))

    def _send(self, action: Action, target: int, stream: str, boundary: int) -> None:
        """What an action makes goes to the same action of the neighbouring stage."""
        peer = self._holder(target)
        if peer is not None:
            self._writer.wait(self._writer.record(), stream)
            tag = Action(action.op, target, action.microbatch)
            nbytes = self._context.boundary_bytes[boundary]
            self._writer.add(Send(stream, peer, nbytes, tag, action.microbatch, self._copies))
            if not self._layout.overlaps_messages:
                self._writer.wait(self._writer.record(stream))

    # ---- end of the step --------------------------------------------------------------------------------------------

    def _reduce_tied_embedding(self) -> None:
        """First and last stage hold a copy each of a tied embedding; they add their gradients."""
        first, last = self._operations.chunks[0], self._operations.chunks[-1]
        embedding, head = first[0].unit, last[-1].unit
        pp = self._layout.plan.pp
        tied = embedding.name == "embedding" and head.tied_parameters > 0
        if pp == 1 or not tied or self._stage not in (0, pp - 1):
            return
        ranks = tuple(self._layout.rank(stage, self._replica, self._tp_rank) for stage in (0, pp - 1))
        nbytes = head.tied_parameters * DTYPE_BYTES[self._layout.grad_dtype] / self._gradient_shards
        self._data.before_update()
        group = Group("embedding", ranks, self._copies)
        done = self._writer.after([Collective("all_reduce", nbytes, group, "tied embedding")])
        if done is not None:
            self._writer.wait(done)

    @property
    def _gradient_shards(self) -> int:
        return self._layout.shard if self._layout.plan.zero >= 2 else 1

    def _reduce_norm(self) -> None:
        """Clipping needs the norm of all gradients: no stage updates before the last one has its gradients."""
        layout, plan = self._layout, self._layout.plan
        if not layout.clips_gradients or plan.tp * plan.pp * layout.dp == 1:
            return
        if plan.zero:
            group = Group(STREAM, range(plan.tp * plan.pp * layout.dp))
        else:
            ranks = [layout.rank(stage, self._replica, t) for stage in range(plan.pp) for t in range(plan.tp)]
            if len(ranks) == 1:
                return
            group = Group(STREAM, tuple(ranks), range(0, len(self._copies), plan.tp))
        done = self._writer.after([Collective("all_reduce", 4.0, group, "gradient norm")])
        if done is not None:
            self._writer.wait(done)

    def _resident(self, context_bytes: int) -> tuple[tuple[str, int], ...]:
        layout, plan = self._layout, self._layout.plan
        states = state_bytes(
            self._parameters,
            precision=layout.precision,
            grad_dtype=layout.grad_dtype,
            optimizer=plan.optimizer,
            optimizer_dtype=plan.optimizer_dtype,
            zero=plan.zero,
            shard=layout.shard,
        )
        states["buffers"] = self._buffer_bytes()
        states["context"] = context_bytes
        return tuple(states.items())

    def _buffer_bytes(self) -> int:
        """What ZeRO holds in full for a while.

        ZeRO-2: the gradients of a bucket, or of all where buckets do not overlap. ZeRO-3: the weights of two units (all
        of them where forward keeps them) and the gradients of two.
        """
        layout, plan = self._layout, self._layout.plan
        if plan.zero < 2 or layout.shard == 1:
            return 0
        width = DTYPE_BYTES[layout.grad_dtype]
        if plan.zero == 2:
            bucketed = plan.overlap.grad_reduce and not layout.buckets_first_chunk_only
            return width * (min(layout.bucket_parameters, self._parameters) if bucketed else self._parameters)
        units = sorted(
            (p.unit.parameters + p.unit.borrowed_parameters for v in self._held for p in self._operations.chunks[v]),
            reverse=True,
        )
        gathered = sum(units[:2]) if plan.reshard_after_forward else sum(units)
        return gathered * weight_bytes(layout.precision) + sum(units[:2]) * width
