"""How long blocks take alone, as the engine says; asked once for every distinct block."""

from typing import NamedTuple

from simpar.engine.simulate import execute
from simpar.errors import DeadlockError
from simpar.hardware.cluster import Cluster
from simpar.program.ir import Block, Instruction, Launch, Program, RankProgram, host_launches


class BlockTime(NamedTuple):
    """Times of one block on a device that does nothing else.

    Attributes:
        alone_ns: with its collectives and the slowdown that they cause beside compute: a run that is one event for the
            engine never takes less.
        calm_ns: the longest path through its kernels and collectives without that slowdown: no order in which the
            engine runs them one by one, beside whatever else, takes less.
        kernels_ns: its kernels one after the other: no way to cut and reorder them takes less.
        launches: calls that the host issues.
    """

    alone_ns: int
    calm_ns: int
    kernels_ns: int
    launches: int


def is_even(cluster: Cluster) -> bool:
    """Whether any group of neighbouring ranks is like any other: one kind of device, standard links, nothing moved."""
    is_torus = cluster.node_link.axes is not None
    return not (cluster.groups or cluster.graph is not None or cluster.placement is not None or is_torus)


class BlockTimes:
    """The times of blocks on one cluster.

    Args:
        cluster: where they run.
        algorithm: of collectives, as in a plan.
    """

    def __init__(self, cluster: Cluster, algorithm: str) -> None:
        self._cluster = cluster
        # the quickest kind of several sets the pace that none undercuts
        self._kinds = [
            cluster.model_copy(update={"device": device, "groups": (), "placement": None}) for device in cluster.devices
        ]
        calm = {"compute_rate_during_collectives": 1.0, "collective_rate_during_compute": 1.0}
        self._calm = cluster.model_copy(update={"device": cluster.device.model_copy(update=calm)})
        self._is_even = is_even(cluster)
        self._algorithm = algorithm
        self._found: dict[tuple[Instruction, ...], BlockTime] = {}

    def of(self, block: Block) -> BlockTime:
        """The times of a block."""
        found = self._found.get(block.body)
        if found is None:
            found = self._found[block.body] = self._ask(block.body)
        return found

    def _ask(self, body: tuple[Instruction, ...]) -> BlockTime:
        kernels = tuple(instruction for instruction in body if isinstance(instruction, Launch))
        kernels_ns = min(self._run(kernels, kind) for kind in self._kinds)
        if len(kernels) == len(body) or not self._is_even:
            return BlockTime(kernels_ns, kernels_ns, kernels_ns, host_launches(body))
        try:
            alone_ns, calm_ns = self._run(body, self._cluster), self._run(body, self._calm)
        except DeadlockError:  # it talks to other ranks, so that it cannot run alone
            alone_ns = calm_ns = kernels_ns
        return BlockTime(alone_ns, min(calm_ns, alone_ns), kernels_ns, host_launches(body))

    def _run(self, body: tuple[Instruction, ...], cluster: Cluster) -> int:
        alone = Program(ranks=(RankProgram(0, 0, 1, (), body),), launch_s=0.0, algorithm=self._algorithm)
        return execute(alone, cluster).step_ns
