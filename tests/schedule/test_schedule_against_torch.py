"""Our orders against those of ``torch.distributed.pipelining`` (2.13), which needs neither GPU nor process
group."""

import pytest

from simpar.errors import PlanError
from simpar.schedule import Schedule, from_csv, gpipe, interleaved, makespan, one_f_one_b, peak_live, validate

visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")


def _torch_csv(name: str, pp: int, microbatches: int, chunks: int | None = None) -> str:
    """What torch's ``_dump_csv`` writes: its idle steps are empty cells."""
    ranks = visualizer.get_schedule_ops(name, pp, microbatches, chunks)
    return "\n".join(",".join("" if action is None else str(action) for action in order) for order in ranks)


def _torch(name: str, pp: int, microbatches: int, chunks: int | None = None) -> Schedule:
    return from_csv(_torch_csv(name, pp, microbatches, chunks), name=name)


@pytest.mark.parametrize("pp", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 8, 13])
def test_gpipe(pp: int, microbatches: int) -> None:
    assert gpipe(pp, microbatches).ranks == _torch("GPipe", pp, microbatches).ranks


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 4, 8, 9, 10, 12, 16])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved(pp: int, microbatches: int, chunks: int) -> None:
    if microbatches % max(1, microbatches // pp):
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            _torch_csv("Interleaved1F1B", pp, microbatches, chunks)
        with pytest.raises(PlanError, match="equal groups"):
            interleaved(pp, microbatches, chunks)
        return
    theirs = _torch("Interleaved1F1B", pp, microbatches, chunks)
    ours = interleaved(pp, microbatches, chunks)
    assert (ours.ranks, ours.rank_of_stage) == (theirs.ranks, theirs.rank_of_stage)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_1f1b_but_for_the_last_rank(pp: int, extra: int) -> None:
    """Torch's table runs forwards 1 … m on the last rank, though microbatches are 0 … m - 1 (its execution
    does not).

    So all other ranks are compared with torch, and the last one with the paper: each forward is followed by
    its own backward at once (arXiv:2104.04473, figure 4). If this test fails after an update of torch,
    compare all ranks.
    """
    microbatches = pp + extra
    theirs = _torch("1F1B", pp, microbatches).ranks
    ours = one_f_one_b(pp, microbatches).ranks
    assert ours[:-1] == theirs[:-1]

    last = pp - 1
    paper = [f"{last}{op}{m}" for m in range(microbatches) for op in "FB"]
    assert [str(action) for action in ours[-1]] == paper
    shifted = [f"{last}F{m + 1}" if op == "F" else f"{last}B{m}" for m in range(microbatches) for op in "FB"]
    assert [str(action) for action in theirs[-1]] == shifted


@pytest.mark.parametrize("name", ["LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_torch_schedules_that_we_do_not_generate_can_be_read(name: str) -> None:
    pp, microbatches = 4, 8
    schedule = _torch(name, pp, microbatches, 2)
    validate(schedule)
    assert schedule.stages == 2 * pp
    assert schedule.rank_of_stage == ((0, 1, 2, 3, 3, 2, 1, 0) if name == "ZBVZeroBubble" else (0, 1, 2, 3) * 2)
    busy = 2 * microbatches * 3
    assert busy < makespan(schedule, forward=1, backward=2, weight=1) < pp * busy
    assert all(peak <= 2 * microbatches for peak in peak_live(schedule))


def test_zero_bubble_v_leaves_only_the_fill() -> None:
    """With forward = input gradient = weight gradient = 1 and m >= 2p, ZB-V idles p - 1 units
    (arXiv:2401.10241)."""
    pp, microbatches = 4, 8
    schedule = _torch("ZBVZeroBubble", pp, microbatches, 2)
    assert makespan(schedule, forward=1, backward=2, weight=1) == 2 * microbatches * 3 + pp - 1
