"""Prices operations: runs each of their blocks alone, once, on a clock of its own."""

import numpy as np

from simpar.engine.costs import Costs
from simpar.engine.execution import Execution
from simpar.engine.price import BlockPrice, OperationPrice
from simpar.engine.rows import Recorder
from simpar.program.ir import COMPUTE, Block, Launch, Operation, Program, RankProgram, Run, host_launches, open_run
from simpar.trace.trace import NONE


class Pricing:
    """Prices the operations of a run, each once.

    Args:
        costs: bound to the cluster.
        recorder: of the run; it numbers the names of kernels.
        launch_ns: one call of a host.
    """

    def __init__(self, costs: Costs, recorder: Recorder, launch_ns: int) -> None:
        self._costs = costs
        self._recorder = recorder
        self._launch_ns = launch_ns
        self._blocks: dict[tuple[Block, int], BlockPrice] = {}
        self._operations: dict[tuple[Operation, int], OperationPrice] = {}

    def operation(self, operation: Operation, rank: int, kind: int) -> OperationPrice:
        """The price of an operation on a rank, which is a device of that kind."""
        found = self._operations.get((operation, kind))
        if found is None:
            prices = {block: self._block(block, rank, kind) for block in dict.fromkeys(operation.blocks)}
            blocks = tuple(prices[block] for block in operation.blocks)
            found = self._operations[operation, kind] = OperationPrice(blocks, operation.layers)
        return found

    def _block(self, block: Block, rank: int, kind: int) -> BlockPrice:
        found = self._blocks.get((block, kind))
        if found is None:
            found = self._blocks[block, kind] = self._priced(block, self._costs.home(rank))
        return found

    def _priced(self, block: Block, home: int) -> BlockPrice:
        """The (max,+) map of a block: it runs alone in both regimes, issued long ago and stream long free."""
        body = tuple(open_run(Run(Operation(block.name, "forward", (block,), (NONE,))), home, 0))
        alone = Program(ranks=(RankProgram(home, 0, 1, (), body),), launch_s=0.0)
        recorder, late_recorder = Recorder(), Recorder()
        early = Execution(alone, self._costs, recorder, launch_ns=0)
        gpu_ns = early.run()
        late = Execution(alone, self._costs, late_recorder, launch_ns=self._launch_ns, first_issue_ns=gpu_ns)
        host_ns = late.run() - gpu_ns
        names, labels = recorder.names, recorder.labels
        rows, late_rows = recorder.by_lane(), late_recorder.by_lane()
        streams = (COMPUTE, *sorted({lane.stream for lane in early.lanes} - {COMPUTE}))
        stream = np.array([streams.index(early.lanes[row.lane].stream) for row in rows], np.int64)
        duration = np.array([row.end_ns - row.start_ns for row in rows], np.int64)
        kinds = np.array([labels[row.label].kind for row in rows], np.int64)
        busy = np.bincount(kinds, weights=duration) if len(rows) else np.zeros(0)
        work = [i.kernel.work for i in block.body if isinstance(i, Launch)]
        return BlockPrice(
            gpu_ns=gpu_ns,
            host_ns=host_ns,
            issue_ns=self._launch_ns * host_launches(block.body),
            flop=sum(w.flop for w in work),
            busy_ns=tuple((int(k), int(busy[k])) for k in np.flatnonzero(busy)),
            exposed_ns=gpu_ns - int(duration[stream == 0].sum()),
            links=tuple(
                (*own, nbytes)
                for name, nbytes, _ in early.network.usage()
                if (own := self._costs.own_part(name, home)) is not None
            ),
            gpu_start_ns=np.array([row.start_ns for row in rows], np.int64),
            host_start_ns=np.array([row.start_ns for row in late_rows], np.int64) - gpu_ns,
            gpu_end_ns=np.array([row.end_ns for row in rows], np.int64),
            host_end_ns=np.array([row.end_ns for row in late_rows], np.int64) - gpu_ns,
            streams=streams,
            stream=stream,
            kind=kinds,
            name=np.array([self._recorder.name(names[labels[row.label].name]) for row in rows], np.int64),
            # the compute lane comes first and keeps the order of the launches
            nbytes=np.array(
                [w.nbytes for w in work] + [labels[row.label].value for row in rows[len(work) :]], np.float64
            ),
            span_flop=np.array([w.flop for w in work] + [0.0] * (len(rows) - len(work)), np.float64),
        )
