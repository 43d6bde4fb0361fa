"""Makespan and live activations against the formulas of the papers, and against publicly reported cases."""

from fractions import Fraction
from itertools import pairwise

import pytest

from simpar.errors import PlanError
from simpar.schedule import (
    Schedule,
    bubble_fraction,
    build,
    gpipe,
    interleaved,
    makespan,
    one_f_one_b,
    peak_live,
    timetable,
)

TIMES = [(1, 1), (1, 2), (5, 3), (7, 0)]


@pytest.mark.parametrize(("forward", "backward"), TIMES)
@pytest.mark.parametrize("pp", [1, 2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 8, 19])
def test_gpipe_and_1f1b_take_as_long(pp: int, microbatches: int, forward: int, backward: int) -> None:
    expected = (microbatches + pp - 1) * (forward + backward)  # arXiv:2104.04473, section 2.2.1
    for schedule in (gpipe(pp, microbatches), one_f_one_b(pp, microbatches)):
        assert makespan(schedule, forward=forward, backward=backward) == expected


@pytest.mark.parametrize(("forward", "backward"), TIMES)
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble(pp: int, rounds: int, chunks: int, forward: int, backward: int) -> None:
    microbatches = rounds * pp
    length = makespan(interleaved(pp, microbatches, chunks), forward=forward, backward=backward)
    bubble = length - microbatches * chunks * (forward + backward)
    # arXiv:2104.04473, section 2.2.2: (p - 1)(f + b) / v, where f and b are a rank's times: v chunks.
    assert bubble == Fraction((pp - 1) * chunks * (forward + backward), chunks)


def test_gpipe_pays_each_transfer_once_a_direction() -> None:
    assert makespan(gpipe(4, 6), forward=2, backward=3, transfer=11) == 9 * 5 + 2 * 3 * 11


def test_a_transfer_within_a_rank_is_free() -> None:
    assert makespan(interleaved(1, 3, 2), forward=1, backward=1, transfer=100) == 3 * 2 * 2


def test_timetable_of_a_small_1f1b_by_hand() -> None:
    spans = timetable(one_f_one_b(2, 2), forward=1, backward=2, transfer=1)
    assert {str(action): tuple(span) for action, span in spans.items()} == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (2, 3),
        "1B0": (3, 5),
        "0B0": (6, 8),
        "1F1": (5, 6),
        "1B1": (6, 8),
        "0B1": (9, 11),
    }


@pytest.mark.parametrize("arguments", [{"forward": -1, "backward": 1}, {"forward": 1, "backward": 1, "weight": 2}])
def test_bad_times(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="set 0 <= weight <= backward"):
        makespan(gpipe(1, 1), **arguments)


def test_live_microbatches() -> None:
    assert peak_live(gpipe(4, 9)) == (9, 9, 9, 9)
    assert peak_live(one_f_one_b(4, 9)) == (4, 3, 2, 1)
    assert peak_live(one_f_one_b(4, 2)) == (2, 2, 2, 1)


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaving_keeps_more(pp: int, chunks: int) -> None:
    peak = peak_live(interleaved(pp, 4 * pp, chunks))
    # Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3: 1 + (p - 1)/(p v) times the activations of
    # 1F1B, which are those of p microbatches on the first rank.
    assert Fraction(peak[0], chunks) == pp * (1 + Fraction(pp - 1, pp * chunks))
    assert [a - b for a, b in pairwise(peak)] == [2] * (pp - 1)
    assert peak_live(interleaved(pp, pp, chunks))[0] == pp * chunks


def _warmup(schedule: Schedule) -> list[int]:
    """Forwards of each rank before the one that its first backward follows."""
    return [next(i for i, action in enumerate(order) if action.op == "B") - 1 for order in schedule.ranks]


def test_warmup_counts() -> None:
    """Megatron-Core's count; (p - r - 1) v is a common misreading (Megatron-LM issue 675)."""
    assert _warmup(interleaved(4, 16, 2)) == [10, 8, 6, 4]
    assert _warmup(one_f_one_b(4, 16)) == [3, 2, 1, 0]


def test_torch_rule_of_divisibility() -> None:
    """rounds = max(1, m // pp) divides m (``ScheduleInterleaved1F1B``'s docstring; pytorch issue 137783)."""
    for microbatches in (10, 3):
        interleaved(4, microbatches, 2)
    with pytest.raises(PlanError) as error:
        interleaved(4, 9, 2)
    assert (
        str(error.value) == "9 microbatches do not form 2 equal groups of at least pp=4; "
        "take 8 or 12 microbatches, or microbatch_group=5"
    )
    interleaved(4, 9, 2, group=5)


def test_megatron_rule_of_divisibility() -> None:
    """With groups of pp, pp divides the microbatches."""
    interleaved(4, 8, 2, group=4)
    with pytest.raises(PlanError) as error:
        interleaved(4, 10, 2, group=4)
    assert (
        str(error.value) == "10 microbatches with microbatch_group 4 leave a last group of 2, below pp=4; "
        "take 8 or 12 microbatches, or microbatch_group=5"
    )


def test_1f1b_has_no_smaller_bubble_than_gpipe() -> None:
    """Reported: 71 steps and 9.86 % for 8 stages and 32 microbatches. That leaves out the last backward's way
    back."""
    ours = {name: build(name, pp=8, microbatches=32) for name in ("gpipe", "1f1b")}
    assert [makespan(s, forward=1, backward=1) for s in ours.values()] == [78, 78]
    assert [round(bubble_fraction(s, forward=1, backward=1), 4) for s in ours.values()] == [0.1795, 0.1795]
    assert [max(peak_live(s)) for s in ours.values()] == [32, 8]


def test_bigger_microbatches_raise_the_bubble() -> None:
    """Global batch 64 on one replica of 4 stages: micro-batch 1 idles 4.5 %, micro-batch 4 idles 15.8 %."""
    bubbles = [
        bubble_fraction(one_f_one_b(4, 64 // micro_batch), forward=micro_batch, backward=2 * micro_batch)
        for micro_batch in (1, 2, 4, 8)
    ]
    assert bubbles == sorted(bubbles)
    assert [bubbles[0], bubbles[2]] == [pytest.approx(0.0448, abs=5e-5), pytest.approx(0.1579, abs=5e-5)]
