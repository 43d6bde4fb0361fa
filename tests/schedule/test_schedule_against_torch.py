"""Our orders against those of ``torch.distributed.pipelining`` (2.13), which needs neither GPU nor process
group."""

from dataclasses import replace

import pytest

from simpar.errors import PlanError
from simpar.schedule import SCHEDULES, Schedule, build, from_csv, gpipe, interleaved, one_f_one_b

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


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("looped-bfs", "LoopedBFS"),
        ("zb-1p", "InterleavedZeroBubble"),
        ("zb-v", "ZBVZeroBubble"),
        ("dualpipev", "DualPipeV"),
    ],
)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_order_placement_and_overlaps(ours: str, theirs: str, pp: int, chunks: int) -> None:
    if chunks == 3 and "chunks" not in SCHEDULES[ours].options:
        pytest.skip("always two chunks")
    for microbatches in (1, 2, 3, 4, 8, 9, 12, 16, 17, 20):
        try:
            expected = _torch(theirs, pp, microbatches, chunks)
        except ValueError:
            with pytest.raises(PlanError):
                build(ours, pp=pp, microbatches=microbatches, chunks=chunks)
        else:
            ours_built = build(ours, pp=pp, microbatches=microbatches, chunks=chunks)
            assert replace(expected, name=ours) == ours_built


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_zb_h1_is_torch_s_interleaved_zero_bubble_with_one_chunk(pp: int) -> None:
    """Torch refuses one chunk, but its generator does not mind."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    microbatches = 3 * pp
    for rank in range(pp):
        warmup = schedules._get_warmup_ops(rank, 1, pp, pp, microbatches, multiply_factor=1)
        stage = lambda _, rank=rank: rank  # noqa: E731 - both directions
        theirs = schedules._get_1f1b_rank_ops(
            1, pp, warmup, microbatches - warmup, warmup, rank, stage, stage, rank, enable_zero_bubble=True
        )
        ours = build("zb-h1", pp=pp, microbatches=microbatches).ranks[rank]
        assert [str(action) for action in ours] == [str(action) for action in theirs if action is not None]


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (4, 14), (8, 20)])
def test_a_rank_of_dualpipe_does_what_a_rank_of_half_as_many_does_in_a_v(pp: int, microbatches: int) -> None:
    """DualPipeV is DualPipe cut in half, so torch's order of the one is the order of the other."""
    half = _torch("DualPipeV", pp // 2, microbatches // 2, 2)
    whole = build("dualpipe", pp=pp, microbatches=microbatches)
    for rank, order in enumerate(whole.ranks):
        outer = min(rank, pp - 1 - rank)
        # chunk 0 is the direction that begins on this rank's half
        chunks = [sorted(whole.stages_of(rank), reverse=rank >= pp // 2).index(action.stage) for action in order]
        theirs = [half.chunk_of(action.stage) for action in half.ranks[outer]]
        assert chunks == theirs
        assert [action.op for action in order] == [action.op for action in half.ranks[outer]]
