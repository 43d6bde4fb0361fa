"""What ends a step on one rank: gradients meet those of other stages, their norm is agreed on, weights are updated."""

from simpar.model.work import DTYPE_BYTES
from simpar.program.data_parallel import DataParallel
from simpar.program.groups import STREAM, Groups
from simpar.program.ir import Collective, Group, Run
from simpar.program.offload import HostUpdate
from simpar.program.operations import Operations
from simpar.program.parameter_server import Served
from simpar.program.periodic import average
from simpar.program.position import Position
from simpar.program.writer import Writer


class StepEnd:
    """Writes what one rank does after the passes of a step.

    Args:
        position: the rank.
        operations: of the model.
        groups: of the rank's data parallelism.
        writer: of the rank's program.
        data: how gradients are reduced over replicas; all of them are before anything else is done with them.
        host: the optimizer on the rank's host; None where devices or servers update.
    """

    def __init__(
        self,
        position: Position,
        operations: Operations,
        groups: Groups,
        writer: Writer,
        *,
        data: DataParallel | Served,
        host: HostUpdate | None,
    ) -> None:
        self._position = position
        self._layout = position.layout
        self._operations = operations
        self._groups = groups
        self._writer = writer
        self._data = data
        self._host = host

    def add(self, *, is_last: bool) -> None:
        """The end of a step, of the program's last one or not."""
        self._reduce_tied_embedding()
        self._reduce_copies()
        self._data.before_update()
        if self._layout.server is None:  # else servers update
            self._update()
            if is_last:
                average(self._layout, self._groups, self._writer, self._position.trained.total)
        self._data.end_step()

    # ---- gradients of other stages ----------------------------------------------------------------------------------

    def _reduce_tied_embedding(self) -> None:
        """First and last stage hold a copy each of a tied embedding; they add their gradients."""
        position, layout = self._position, self._layout
        if not position.shares_embedding:
            return
        head = position.chunks[-1][-1].unit
        shards = layout.shard if layout.plan.zero >= 2 else 1
        nbytes = head.tied_parameters * DTYPE_BYTES[layout.grad_dtype] / shards
        self._add_up(position.ends, nbytes, "embedding", "tied embedding")

    def _reduce_copies(self) -> None:
        """Where a schedule holds two copies of the model, a rank and its mirror image add their gradients."""
        position, layout, trained = self._position, self._layout, self._position.trained
        if position.mirror == position.stage or not trained.total:
            return
        # by then each rank has reduced gradients of its own shard only
        kept = trained.dense / (layout.shard if layout.plan.zero else 1)
        kept += trained.experts / (layout.expert_shard if layout.plan.zero else 1)
        nbytes = kept * DTYPE_BYTES[layout.grad_dtype]
        self._add_up({position.stage, position.mirror}, nbytes, STREAM, "gradients of both copies")

    def _add_up(self, stages: set[int], nbytes: float, stream: str, name: str) -> None:
        """Pipeline ranks add up gradients that replicas have reduced."""
        position = self._position
        ranks = tuple(self._layout.rank(stage, position.replica, position.tp_rank) for stage in sorted(stages))
        self._data.before_update()
        done = self._writer.after([Collective("all_reduce", nbytes, Group(stream, ranks, position.copies), name)])
        if done is not None:
            self._writer.wait(done)

    # ---- update -----------------------------------------------------------------------------------------------------

    def _update(self) -> None:
        """The optimizer's step, on the device or on the host."""
        host, ready = self._host, None
        if host is not None:
            host.send_waiting()
            ready = host.norm()
        agreed = self._reduce_norm(ready)
        if agreed is not None and host is None:
            self._writer.wait(agreed)
        trained = self._position.trained
        if trained.total:
            tensors = sum(unit.tensors for unit in self._position.units)
            operation = self._operations.update(trained, tensors, self._layout)
            if operation.blocks:
                self._writer.add(Run(operation))
        if host is not None:
            host.update(agreed)

    def _reduce_norm(self, begin: int | None) -> int | None:
        """Clipping needs the norm of all gradients: no stage updates before the last one has its gradients.

        The event of its end, None where nothing is to be reduced; ``begin`` is when the rank knows its part, if not
        what compute has done.
        """
        layout, plan, position = self._layout, self._layout.plan, self._position
        if not layout.clips_gradients or plan.tp * plan.pp * layout.replicas == 1:
            return None
        if plan.zero and layout.reducing == layout.replicas:
            group = Group(STREAM, range(plan.tp * plan.pp * layout.replicas))
        elif plan.zero:
            first = position.replica - position.replica % layout.shard  # these shard, and train apart from the others
            group = self._across_stages(range(first, first + layout.shard))
        elif plan.tp * plan.pp == 1:
            return None
        else:
            group = self._across_stages(range(position.replica, position.replica + 1))
        return self._writer.after([Collective("all_reduce", 4.0, group, "gradient norm")], begin)

    def _across_stages(self, replicas: range) -> Group:
        """All ranks of these replicas; folded, also of those behind them, as many at a time."""
        layout, plan = self._layout, self._layout.plan
        ranks = [layout.rank(s, r, t) for s in range(plan.pp) for r in replicas for t in range(plan.tp)]
        return Group(STREAM, tuple(ranks), range(0, len(self._position.copies), plan.tp * len(replicas)))
