"""One execution of a program on a clock of its own."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from operator import itemgetter

from simpar.engine.clock import Clock
from simpar.engine.costs import Costs
from simpar.engine.gpu import Gpu, awaited
from simpar.engine.load import Loader
from simpar.engine.network import Network
from simpar.engine.noise import Noise
from simpar.engine.price import OperationPrice
from simpar.engine.rows import Recorder
from simpar.errors import DeadlockError
from simpar.program.ir import COMPUTE, Operation, Program, RankProgram
from simpar.trace.trace import Lane


class Execution:
    """Loads rank programs into streams and lets the clock go.

    Args:
        program: what the ranks run.
        costs: bound to the cluster where they run it.
        recorder: takes down what happens.
        launch_ns: one call of a host.
        first_issue_ns: when hosts begin to issue.
        price: the price of an operation, for a rank and the kind of its device; None for a program of single kernels.
        noise: of compute.

    Attributes:
        lanes: one per stream.
        network: the links, with what they carried.
    """

    def __init__(
        self,
        program: Program,
        costs: Costs,
        recorder: Recorder,
        *,
        launch_ns: int,
        first_issue_ns: int = 0,
        price: Callable[[Operation, int, int], OperationPrice] | None = None,
        noise: Noise | None = None,
    ) -> None:
        self.lanes: list[Lane] = []
        self._clock = Clock()
        self.network = Network(self._clock, costs.slow.link_rates)
        self._recorder = recorder
        self._costs = costs
        self._noise = noise
        self._rendezvous = program.stage_sync == "condition_variable"
        self._gpus: list[Gpu] = []
        self._loader = Loader(
            costs,
            self.network,
            recorder,
            price,
            launch_ns=launch_ns,
            first_issue_ns=first_issue_ns,
            stage_buffer=program.stage_buffer,
        )
        for rank in program.ranks:
            self._load(rank)

    def run(self) -> int:
        """Lets the clock go; returns the end of the last span."""
        self._clock.run()
        stuck = [(gpu.rank, stream, step) for gpu in self._gpus for stream, step in gpu.blocked.items()]
        if stuck:
            shown = "; ".join(f"rank {rank} ({stream}) waits for {awaited(step)}" for rank, stream, step in stuck[:8])
            more = f"; and {len(stuck) - 8} more streams" if len(stuck) > 8 else ""
            raise DeadlockError(
                f"no instruction can run at {self._clock.ns} ns: {shown}{more}; "
                "check that sends, receives and collectives pair up in the same order"
            )
        for mail in chain.from_iterable(letters.values() for letters in self._loader.mail.values()):
            if not mail.posted:
                raise DeadlockError(
                    f"rank {mail.source} sends message '{mail.tag}' to rank {mail.target}, which never receives it; "
                    "add the receive"
                )
        return max(map(itemgetter(1), self._recorder.rows), default=0)

    def book_block_traffic(self) -> None:
        """Adds what the collectives inside blocks carried to the links of the ranks that ran them."""
        runs = Counter(map(itemgetter(1, 2), self._recorder.runs))
        for (lane, price), count in runs.items():
            for (kind, end), nbytes in price.links.items():
                link = self._costs.own_link(kind, end, self.lanes[lane].rank)
                self.network.link(link.name, link.capacity_bytes_per_s).total_bytes += nbytes * count

    def _load(self, rank: RankProgram) -> None:
        """Makes one coroutine per stream of the rank."""
        device = self._costs.device(self._costs.kind_of(rank.rank))
        gpu = Gpu(
            self._clock,
            self.network,
            self._recorder,
            rank=rank.rank,
            letters=self._loader.mail[rank.rank],
            compute_rate=device.compute_rate_during_collectives,
            collective_rate=device.collective_rate_during_compute,
            rendezvous=self._rendezvous,
        )
        self._gpus.append(gpu)
        for name, steps in self._loader.streams(rank).items():
            if self._noise is not None and name == COMPUTE:
                steps = self._noise.disturbed(rank.rank, steps, self._recorder)  # noqa: PLW2901
            self.lanes.append(Lane(rank.rank, rank.stage, name, rank.replicas))
            lane = len(self.lanes) - 1
            is_compute = name == COMPUTE
            self._clock.start(gpu.compute(lane, steps) if is_compute else gpu.communicate(name, lane, steps))
