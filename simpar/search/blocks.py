"""How long blocks take alone: by the engine, and at least, without asking it."""

from simpar.engine.costs import Costs
from simpar.engine.simulate import execute
from simpar.errors import DeadlockError
from simpar.hardware.cluster import Cluster
from simpar.program.ir import COMPUTE, Block, Collective, Instruction, Launch, Program, RankProgram, Record, Wait
from simpar.units import ns

Body = tuple[Instruction, ...]

_MOST_BLOCKS = 2000  # of which something is remembered: those of a unit come together, and seldom again


def is_even(cluster: Cluster) -> bool:
    """Whether any group of neighbouring ranks is like any other: one kind of device, standard links, nothing moved."""
    is_torus = cluster.node_link.axes is not None
    return not (cluster.groups or cluster.graph is not None or cluster.placement is not None or is_torus)


class BlockTimes:
    """The times of blocks on a device of one cluster that does nothing else, in nanoseconds.

    Args:
        cluster: where they run.
        algorithm: of collectives, as in a plan.
    """

    def __init__(self, cluster: Cluster, algorithm: str) -> None:
        self._cluster = cluster
        self._kinds = range(len(cluster.devices))
        self._is_even = is_even(cluster)
        self._algorithm = algorithm
        self._forget()

    def _forget(self) -> None:
        self._costs = Costs(self._cluster, self._algorithm)
        self._alone: dict[Body, int] = {}
        self._calm: dict[Body, int] = {}
        self._beside: dict[Body, int] = {}

    def kernels_ns(self, block: Block) -> int:
        """Its kernels one after the other, on the quickest kind of device: no way to cut or reorder them takes less."""
        kernels = [instruction.kernel for instruction in block.body if isinstance(instruction, Launch)]
        return min(sum(self._costs.kernel_ns(kernel, kind) for kernel in kernels) for kind in self._kinds)

    def calm_ns(self, block: Block) -> int:
        """The longest path through its kernels and collectives, each as quick as alone.

        No order in which the engine runs them one by one, beside whatever else, takes less. Where groups lie on the
        cluster in different ways, collectives are left out.
        """
        found = self._calm.get(block.body)
        if found is None:
            self._make_room()
            found = self._calm[block.body] = self._longest_path_ns(block) if self._is_even else self.kernels_ns(block)
        return found

    def opened_ns(self, block: Block) -> int:
        """Run kernel by kernel, beside whatever else.

        Where its collectives follow each other on one stream, each sets back what runs beside it as it does alone:
        disturbed, it takes longer, or the path waits for it instead, which costs more. Collectives of several streams
        may come to run at the same time, and slow ones are quicker while nothing is computed; so then the path is sure.
        """
        streams = {each.group.stream for each in block.body if isinstance(each, Collective)}
        if len(streams) > 1 or self._cluster.device.collective_rate_during_compute < 1:
            return self.calm_ns(block)
        return self.alone_ns(block)

    def collectives_ns(self, block: Block) -> int:
        """Its collectives, one after the other."""
        return sum(self._collective_ns(each) for each in block.body if isinstance(each, Collective))

    def beside_ns(self, block: Block) -> int:
        """The longest path where collectives count only as much as the rate of compute beside them.

        With ``rate`` that rate, kernels ``K`` and collectives ``C`` on a path: while another collective runs, the path
        falls behind by ``1 - rate`` of the time, but not during ``C``. So beside one that takes ``T`` in all, paths
        take no less than ``K + C + (1 - rate) (T - C) = K + rate C + (1 - rate) T``.
        """
        found = self._beside.get(block.body)
        if found is None:
            self._make_room()
            rate = self._cluster.device.compute_rate_during_collectives
            found = self._longest_path_ns(block, rate) if self._is_even else self.kernels_ns(block)
            self._beside[block.body] = found
        return found

    def alone_ns(self, block: Block) -> int:
        """With the slowdown of collectives and compute beside each other: a run that is one event never takes less."""
        found = self._alone.get(block.body)
        if found is None:
            self._make_room()
            found = self._alone[block.body] = self._ask(block) if self._is_even else self.kernels_ns(block)
        return found

    def _longest_path_ns(self, block: Block, share: float = 1.0) -> int:
        """With so much of each collective."""
        ends, events = {COMPUTE: 0}, dict[object, int]()
        for instruction in block.body:
            if isinstance(instruction, Launch):
                ends[COMPUTE] += self._costs.kernel_ns(instruction.kernel)
            elif isinstance(instruction, Record):
                events[instruction.event] = ends.get(instruction.stream, 0)
            elif isinstance(instruction, Wait):
                ends[instruction.stream] = max(ends.get(instruction.stream, 0), events[instruction.event])
            elif isinstance(instruction, Collective):
                stream = instruction.group.stream
                ends[stream] = ends.get(stream, 0) + int(share * self._collective_ns(instruction))
        return max(ends.values())

    def _collective_ns(self, collective: Collective) -> int:
        group = collective.group
        transfer = self._costs.collective(collective.op, collective.nbytes, group, group.ranks[0])
        return transfer.latency_ns + ns(collective.extra_s) + transfer.stream_ns

    def _ask(self, block: Block) -> int:
        """What the engine says; where nothing runs beside a collective, the longest path is all there is."""
        if not _has_beside(block.body):
            return self.calm_ns(block)
        alone = Program(ranks=(RankProgram(0, 0, 1, (), block.body),), launch_s=0.0, algorithm=self._algorithm)
        try:
            return execute(alone, self._cluster).step_ns
        except DeadlockError:  # it talks to other ranks, so that it cannot run alone
            return self.calm_ns(block)

    def _make_room(self) -> None:
        if len(self._alone) + len(self._calm) + len(self._beside) >= _MOST_BLOCKS:
            self._forget()


def _has_beside(body: Body) -> bool:
    """Whether a kernel or a collective is issued while another collective may run."""
    running: set[object] = set()
    for instruction in body:
        if isinstance(instruction, Wait) and instruction.stream == COMPUTE:
            running.discard(instruction.event)
        elif isinstance(instruction, Record) and instruction.stream != COMPUTE:
            running.add(instruction.event)
        elif running and isinstance(instruction, (Launch, Collective)):
            return True
    return False
