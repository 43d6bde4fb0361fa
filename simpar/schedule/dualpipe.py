"""DualPipe and DualPipeV: forward and backward of different microbatches share a GPU, to hide communication.

Sources: DeepSeek-V3 technical report, arXiv:2412.19437, section 3.2.1, and its published schedule (Li, Deng and Liang,
github.com/deepseek-ai/DualPipe), which both read alike: a rank of DualPipeV does with its two chunks what a rank of
DualPipe does with its chunks of the two directions.
"""

from collections import deque

from simpar.errors import PlanError
from simpar.schedule.schedule import Action, Op, Schedule, require_counts, v_shape


def dualpipe(pp: int, microbatches: int) -> Schedule:
    """Bidirectional: one half of the microbatches enters at the first rank, the other half at the last one.

    Each rank holds two stages, r of the one copy of the model and pp - 1 - r of the other, so every parameter is there
    twice. The bubble is (pp/2 - 1)(F&B + B - 3W), where F&B is the time of a forward and a backward that overlap and B
    that of a full backward; pp + 1 activations of a stage are kept.

    >>> [str(action) for action in dualpipe(2, 4).ranks[0]]
    ['0F0', '3F2', '0F1', '3B2', '3F3', '0B0', '3B3', '0I1', '0W1']

    Raises:
        PlanError: pp or the microbatches are odd, or there are fewer than 2 pp of them.
    """
    require_counts("dualpipe", pp=pp, microbatches=microbatches)
    if pp % 2:
        raise PlanError(
            f"schedule 'dualpipe' mirrors one half of the ranks in the other, but pp is {pp}; set pp={pp + 1}, or take "
            "schedule 'dualpipev'"
        )
    if microbatches % 2 or microbatches < 2 * pp:
        raise PlanError(
            f"schedule 'dualpipe' needs an even number of at least 2 · pp = {2 * pp} microbatches, not {microbatches}; "
            f"set grad_accum={max(2 * pp, microbatches + microbatches % 2)}"
        )
    half, share = pp // 2, microbatches // 2
    ranks, overlapped = [], set[Action]()
    for rank in range(pp):
        down, up = (rank, 0), (2 * pp - 1 - rank, share)  # stage of each copy, and its first microbatch
        first, second = (down, up) if rank < half else (up, down)
        order, paired = _order(half, share, min(rank, pp - 1 - rank), (first[0], second[0]), (first[1], second[1]))
        ranks.append(order)
        overlapped |= paired
    return Schedule("dualpipe", tuple(ranks), microbatches, v_shape(pp), copies=2, overlapped=frozenset(overlapped))


def dualpipev(pp: int, microbatches: int) -> Schedule:
    """DualPipe cut in half: one copy of the model, two chunks per rank in a V (order as torch's ``ScheduleDualPipeV``).

    The bubble is (pp - 1)(F&B + B - 3W) with the times of a chunk, and 2 pp + 1 activations of a chunk are kept.

    Raises:
        PlanError: there are fewer than 2 pp microbatches.
    """
    require_counts("dualpipev", pp=pp, microbatches=microbatches)
    if microbatches < 2 * pp:
        raise PlanError(
            f"schedule 'dualpipev' needs at least 2 · pp = {2 * pp} microbatches, not {microbatches}; "
            f"set grad_accum={2 * pp}, or take schedule 'zb-v'"
        )
    ranks, overlapped = [], set[Action]()
    for rank in range(pp):
        order, paired = _order(pp, microbatches, rank, (rank, 2 * pp - 1 - rank), (0, 0))
        ranks.append(order)
        overlapped |= paired
    return Schedule("dualpipev", tuple(ranks), microbatches, v_shape(pp), overlapped=frozenset(overlapped))


class _Order:
    """A rank's order in the making, over the two stages that it holds."""

    def __init__(self, stages: tuple[int, int], first: tuple[int, int]) -> None:
        self.actions: list[Action] = []
        self.overlapped: set[Action] = set()
        self._stages = stages
        self._next = {(kind, side): first[side] for kind in ("forward", "backward") for side in (0, 1)}
        self._put_off: deque[Action] = deque()

    def forward(self, side: int) -> Action:
        return self._run("F", "forward", side)

    def backward(self, side: int, *, split: bool = False) -> None:
        action = self._run("I" if split else "B", "backward", side)
        if split:
            self._put_off.append(action._replace(op="W"))

    def pair(self, forward: int, backward: int) -> None:
        """A forward and a backward that overlap."""
        self.overlapped.add(self.forward(forward))
        self.backward(backward)

    def weight(self) -> None:
        """The oldest weight gradient that was put off, if any is left."""
        if self._put_off:
            self.actions.append(self._put_off.popleft())

    def _run(self, op: Op, kind: str, side: int) -> Action:
        action = Action(op, self._stages[side], self._next[kind, side])
        self._next[kind, side] += 1
        self.actions.append(action)
        return action


def _order(
    ranks: int, microbatches: int, rank: int, stages: tuple[int, int], first: tuple[int, int]
) -> tuple[tuple[Action, ...], set[Action]]:
    """The eight steps of rank ``rank`` of ``ranks``, counted from the pipeline's end towards its middle."""
    order = _Order(stages, first)
    behind = ranks - rank - 1
    for _ in range(2 * behind):
        order.forward(0)
    for _ in range(rank + 1):
        order.forward(0)
        order.forward(1)
    for _ in range(behind):
        order.backward(1, split=True)
        order.weight()
        order.forward(1)
    for turn in range(microbatches - 2 * ranks + rank + 1):
        if turn == 0 and not behind:  # the middle does not overlap its first pair, which shortens the bubble
            order.forward(0)
            order.backward(1)
        else:
            order.pair(0, 1)
        order.pair(1, 0)
    for _ in range(behind):
        order.backward(1)
        order.pair(1, 0)
    # the second half of these is split, so that the weight gradients fill what follows
    for turn in range(2 * (rank + 1)):
        order.backward(1 - turn % 2, split=turn > rank)
    for _ in range(behind):
        order.weight()
        order.backward(0, split=True)
    for _ in range(rank + 1):
        order.weight()
    return tuple(order.actions), order.overlapped
