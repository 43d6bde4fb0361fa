"""Who waits for whom: messages, buffers, rendezvous, and programs that can never end."""

import pytest
from synthetic import ideal_cluster, lane_spans, pipeline, program, work

from simpar import DeadlockError
from simpar.engine.simulate import execute
from simpar.program.ir import COMPUTE, Collective, Group, Record, Recv, Send, Wait
from simpar.schedule.registry import build

CLUSTER = ideal_cluster()
PAIR = Group("dp", range(2))


def gather(group=PAIR, op="all_gather"):
    return Collective(op, 100.0, group, "c")


def deadlock(ranks, **fields) -> str:
    with pytest.raises(DeadlockError) as caught:
        execute(program(ranks, **fields), CLUSTER)
    return str(caught.value)


def test_a_receive_without_a_send_is_named():
    assert deadlock({0: [work(5)], 1: [Recv(0, "x")]}) == (
        "no instruction can run at 5 ns: rank 1 (compute) waits for message 'x' from rank 0; "
        "check that sends, receives and collectives pair up in the same order"
    )


def test_a_send_that_nobody_takes_is_named_where_both_must_be_there():
    text = deadlock({0: [Send("pp", 1, 8.0, "x")], 1: [work(1)]}, stage_sync="condition_variable")
    assert "rank 0 (pp) waits for rank 1 to take message 'x'" in text


def test_a_send_that_nobody_takes_is_an_error_by_message_passing_too():
    text = deadlock({0: [Send("pp", 1, 8.0, "x")], 1: []})
    assert text == "rank 0 sends message 'x' to rank 1, which never receives it; add the receive"


def test_members_that_disagree_on_the_size_are_named():
    two = Group("dp", range(2))
    text = deadlock({rank: [Collective("all_gather", 8.0 + rank, two)] for rank in (0, 1)})
    assert text == (
        "rank 1 runs all_gather 0 of its dp group over 9 bytes, another member over 8; give all members the same size"
    )


def test_a_full_buffer_that_nobody_empties_is_named():
    sends = [Send("pp", 1, 8.0, "x"), Send("pp", 1, 8.0, "y")]
    text = deadlock({0: sends, 1: [work(3)]}, stage_buffer=1)
    assert "rank 0 (pp) waits for rank 1 to take message 'y'" in text


def test_a_collective_without_its_last_member_is_named():
    # rank 2 also belongs to the group, but waits for something that comes after
    three = Group("dp", range(3))
    ranks = {
        0: [gather(three)],
        1: [gather(three)],
        2: [Recv(0, "x"), Record(COMPUTE, "e"), Wait("dp", "e"), gather(three)],
    }
    text = deadlock(ranks)
    for rank in (0, 1):
        assert f"rank {rank} (dp) waits for 1 more of 3 members of all_gather 0 of a dp group of 3 ranks" in text
    assert "rank 2 (compute) waits for message 'x' from rank 0" in text
    assert "rank 2 (dp) waits for event 'e'" in text


def test_another_order_of_collectives_in_one_group_is_named():
    ranks = {0: [gather(), gather(op="all_reduce")], 1: [gather(op="all_reduce"), gather()]}
    assert deadlock(ranks) == (
        "rank 1 runs all_reduce as number 0 of its dp group, where another member runs all_gather; "
        "give all members the same order"
    )


def test_fewer_collectives_than_the_others_is_named():
    assert "rank 0 (dp) waits for 1 more of 2 members of all_gather 1" in deadlock(
        {0: [gather(), gather()], 1: [gather()]}
    )


def test_groups_entered_in_another_order_are_named():
    # two communicators on one stream, as a misplaced barrier would have it
    other = Group("dp", (0, 1))
    ranks = {0: [gather(PAIR), gather(other)], 1: [gather(other), gather(PAIR)]}
    text = deadlock(ranks)
    assert "rank 0 (dp) waits for 1 more of 2 members of all_gather 0" in text
    assert "rank 1 (dp) waits for 1 more of 2 members of all_gather 0" in text


def test_a_cycle_of_messages_names_both_ranks():
    def waits(peer, mine, theirs):
        return [Recv(peer, theirs), Record(COMPUTE, "e"), Wait("pp", "e"), Send("pp", peer, 8.0, mine)]

    text = deadlock({0: waits(1, "a", "b"), 1: waits(0, "b", "a")})
    assert "rank 0 (compute) waits for message 'b' from rank 1" in text
    assert "rank 1 (compute) waits for message 'a' from rank 0" in text


def test_an_event_that_nobody_records_is_named():
    assert "rank 0 (compute) waits for event 'never'" in deadlock({0: [Wait(COMPUTE, "never")]})


def test_many_stuck_streams_are_summed_up():
    text = deadlock({rank: [Recv(9, f"m{rank}")] for rank in range(12)})
    assert "rank 7 (compute)" in text
    assert "rank 8 (compute)" not in text
    assert "and 4 more streams" in text


def test_a_program_without_instructions_takes_no_time():
    trace = execute(program({0: [], 1: []}), CLUSTER)
    assert trace.step_ns == 0
    assert len(trace.spans) == len(trace.kernels()) == 0


# ---- stage synchronisation ------------------------------------------------------------------------------------------


def test_by_message_passing_the_sender_goes_on():
    ranks = {
        0: [work(10), Record(COMPUTE, "e"), Wait("pp", "e"), Send("pp", 1, 20.0, "x"), work(500)],
        1: [work(300, "busy"), Recv(0, "x"), work(5, "then")],
    }
    trace = execute(program(ranks), CLUSTER)
    assert lane_spans(trace, 0, "pp") == [("pp", 10, 30)]
    assert lane_spans(trace, 0)[1][1:] == (10, 510)
    assert lane_spans(trace, 1)[1] == ("then", 300, 305)


def test_by_condition_variable_a_transfer_starts_when_both_are_there():
    ranks = {0: [Send("pp", 1, 20.0, "x"), work(500)], 1: [work(300), Recv(0, "x"), work(5, "then")]}
    trace = execute(program(ranks, stage_sync="condition_variable"), CLUSTER)
    assert lane_spans(trace, 0, "pp") == [("pp", 300, 320)]
    assert lane_spans(trace, 1)[1] == ("then", 320, 325)
    # its compute stream goes on meanwhile
    assert lane_spans(trace, 0)[0][1:] == (0, 500)


def test_a_bounded_buffer_holds_the_sender_s_stream_back():
    sends = [Send("pp", 1, 20.0, i) for i in range(3)]
    takes = [work(100), Recv(0, 0), work(100), Recv(0, 1), work(100), Recv(0, 2)]
    for buffer, starts in ((None, [0, 20, 40]), (1, [0, 100, 200]), (2, [0, 20, 100])):
        trace = execute(program({0: sends, 1: takes}, stage_buffer=buffer), CLUSTER)
        assert [start for _, start, _ in lane_spans(trace, 0, "pp")] == starts


@pytest.mark.parametrize(
    ("schedule", "pp", "m", "v"),
    [("gpipe", 4, 6, 1), ("1f1b", 4, 9, 1), ("1f1b", 3, 2, 1), ("interleaved", 3, 6, 2), ("interleaved", 4, 8, 3)],
)
@pytest.mark.parametrize("transfer", [0, 9, 40])
def test_stricter_synchronisation_neither_hangs_nor_helps(schedule, pp, m, v, transfer):
    order = build(schedule, pp=pp, microbatches=m, chunks=v)
    cluster = ideal_cluster(latency_s=transfer * 1e-9)

    def step(**fields):
        return execute(pipeline(order, forward=11, backward=23, **fields), cluster).step_ns

    unbounded = step()
    bounded = [step(stage_buffer=buffer) for buffer in (1, 2, 64)]
    assert bounded[2] == unbounded
    assert bounded[0] >= bounded[1] >= unbounded
    assert step(stage_sync="condition_variable") >= unbounded


@pytest.mark.parametrize("fields", [{"stage_buffer": 1}, {"stage_sync": "condition_variable"}])
@pytest.mark.parametrize("nbytes", [9.0, 40.0])
@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_messages_that_share_links_end_under_every_synchronisation(schedule, v, nbytes, fields):
    # No order of step times is promised here: where messages share a link, holding one back can speed up another.
    order = build(schedule, pp=4, microbatches=8, chunks=v)
    trace = execute(pipeline(order, forward=11, backward=23, nbytes=nbytes, **fields), CLUSTER)
    assert trace.step_ns > 8 * v * 34
