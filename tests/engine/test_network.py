"""The network of the engine: by hand, and against progressive filling in exact fractions."""

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simpar.engine.clock import Clock
from simpar.engine.network import Network


@dataclass
class Transfer:
    """``loads`` are bytes per link; links carry one byte per nanosecond and equal flow."""

    loads: dict[str, int]
    duration_ns: int
    start_ns: int = 0
    latency_ns: int = 0
    limits: list[tuple[int, float]] = field(default_factory=list)  # at these times, progress is capped so


def finish_times(transfers: list[Transfer], capacities: dict[str, float]) -> list[int]:
    """Runs transfers on an engine network; a capacity is in bytes per nanosecond."""
    clock = Clock()
    network = Network(clock)
    finished: dict[int, int] = {}

    def start(number: int, transfer: Transfer) -> None:
        loads = [(network.link(name, capacities[name] * 1e9), float(b), 1) for name, b in transfer.loads.items()]
        flow = network.transfer(network.route(transfer.latency_ns, transfer.duration_ns, loads))
        flow.then(lambda _: finished.setdefault(number, clock.ns))
        for when, limit in transfer.limits:
            clock.after(when - clock.ns, lambda _, limit=limit: number in finished or network.set_limit(flow, limit))

    for number, transfer in enumerate(transfers):
        clock.after(transfer.start_ns, lambda _, number=number, transfer=transfer: start(number, transfer))
    clock.run()
    return [finished[number] for number in range(len(transfers))]


def test_alone_a_transfer_takes_latency_plus_streaming():
    assert finish_times([Transfer({"a": 100, "b": 30}, 100, start_ns=7, latency_ns=20)], {"a": 1, "b": 1}) == [127]


def test_two_equal_flows_take_twice_as_long():
    assert finish_times([Transfer({"a": 100}, 100), Transfer({"a": 100}, 100)], {"a": 1}) == [200, 200]


def test_flows_that_fit_side_by_side_do_not_disturb_each_other():
    assert finish_times([Transfer({"a": 50}, 100), Transfer({"a": 50}, 100)], {"a": 1}) == [100, 100]


def test_during_its_latency_a_transfer_holds_no_link():
    # the second one streams from 100 on, when the first is over
    assert finish_times([Transfer({"a": 100}, 100), Transfer({"a": 100}, 100, latency_ns=100)], {"a": 1}) == [100, 200]


def test_a_later_flow_takes_half_from_then_on():
    # first: 60 alone, then 40 bytes at half speed until 140; second: 40 of its 100 by then, the rest alone
    assert finish_times([Transfer({"a": 100}, 100), Transfer({"a": 100}, 100, start_ns=60)], {"a": 1}) == [140, 200]


def test_three_flows_on_two_links_by_hand():
    # The classical case: the long flow shares both links, each with a short one, and all get half. The short ones are
    # done at 200, when the long one has 100 of 200 bytes left and both links for itself.
    flows = [Transfer({"a": 200, "b": 200}, 200), Transfer({"a": 100}, 100), Transfer({"b": 100}, 100)]
    assert finish_times(flows, {"a": 1, "b": 1}) == [300, 200, 200]


def test_what_a_flow_loses_on_one_link_the_others_get_on_the_next():
    # b carries half a byte per ns: the long flow and c each get 1/4 there, so the flow on a gets 3/4
    flows = [Transfer({"a": 100, "b": 100}, 100), Transfer({"a": 300}, 300), Transfer({"b": 100}, 100)]
    # at 400 the long flow and c are done; a's flow has had 300 by then
    assert finish_times(flows, {"a": 1, "b": 0.5}) == [400, 400, 400]


def test_what_a_slow_flow_leaves_the_fast_one_takes():
    # wants 1 and 0.4 of a link of 1: shares 0.6 and 0.4, not 0.5 and 0.4
    assert finish_times([Transfer({"a": 60}, 60), Transfer({"a": 40}, 100)], {"a": 1}) == [100, 100]


def test_a_flow_that_another_link_holds_back_leaves_the_rest():
    # demands 10, 100 and 4 on links of 10 and 4: on the second link 2 and 2, so the big one gets 8 of the first
    flows = [Transfer({"a": 200, "b": 200}, 20), Transfer({"a": 800}, 8), Transfer({"b": 200}, 50)]
    assert finish_times(flows, {"a": 10, "b": 4}) == [100, 100, 100]


def test_a_capped_flow_is_slower_alone_and_leaves_room_beside_another():
    capped = Transfer({"a": 100}, 100, limits=[(0, 0.25)])
    assert finish_times([capped], {"a": 1}) == [400]
    # 1/4 for the capped one, 3/4 for the other, which is done with its 150 bytes at 200
    assert finish_times([capped, Transfer({"a": 150}, 150)], {"a": 1}) == [400, 200]


def test_a_cap_may_come_and_go():
    # 10 at full speed, 40 at half speed, the remaining 70 at full speed again
    assert finish_times([Transfer({"a": 100}, 100, limits=[(10, 0.5), (50, 1.0)])], {"a": 1}) == [120]


def test_flows_that_load_links_in_different_proportions_share_each_link():
    # the collective puts 8 on the node's link for each 1 on the NIC; the message only uses the NIC: half of it each
    flows = [Transfer({"gpu": 800, "nic": 100}, 100), Transfer({"nic": 100}, 100)]
    assert finish_times(flows, {"gpu": 8, "nic": 1}) == [200, 200]


def test_bundled_flows_count_for_as_many():
    clock = Clock()
    network = Network(clock)
    link = network.link("a", 4e9)
    bundle = network.transfer(network.route(0, 100, [(link, 300.0, 3)]))  # three flows of one byte per ns each
    single = network.transfer(
        network.route(0, 50, [(link, 150.0, 1)])
    )  # wants three bytes per ns, gets one, a quarter of the link
    ends = {}
    for name, flow in (("bundle", bundle), ("single", single)):
        flow.then(lambda _, name=name: ends.setdefault(name, clock.ns))
    clock.run()
    assert ends == {"bundle": 100, "single": 117}  # 100 bytes by 100, the last 50 at three bytes per ns


def test_every_link_reports_the_bytes_that_it_carried():
    clock = Clock()
    network = Network(clock)
    a, b = network.link("a", 1e9), network.link("b", 2e9)
    network.link("idle", 1e9)
    network.transfer(network.route(0, 10, [(a, 10.0, 1), (b, 5.0, 1)]))
    network.transfer(network.route(5, 10, [(a, 7.0, 1)]))
    clock.run()
    assert sorted(network.usage()) == [("a", 17.0, 1e9), ("b", 5.0, 2e9)]


# ---- against exact fractions ----------------------------------------------------------------------------------------


def max_min(active: list[int], transfers: list[Transfer], capacities: dict[str, Fraction]) -> dict[int, Fraction]:
    """Progress rates by progressive filling: all bandwidths grow alike until a link or a demand is full."""
    demand = {i: Fraction(max(transfers[i].loads.values()), transfers[i].duration_ns) for i in active}
    given = dict.fromkeys(active, Fraction(0))
    growing = set(active)
    while growing:
        room = [
            (c - sum(given[i] for i in active if link in transfers[i].loads))
            / sum(1 for i in growing if link in transfers[i].loads)
            for link, c in capacities.items()
            if any(link in transfers[i].loads for i in growing)
        ]
        step = min([*room, *(demand[i] - given[i] for i in growing)])
        for i in growing:
            given[i] += step
        full = {k for k, c in capacities.items() if sum(given[i] for i in active if k in transfers[i].loads) == c}
        growing = {i for i in growing if given[i] < demand[i] and not full & transfers[i].loads.keys()}
    return {i: given[i] / demand[i] for i in active}


def reference(transfers: list[Transfer], capacities: dict[str, Fraction]) -> list[int]:
    """Finish times, each rounded up to a whole nanosecond as the engine does."""
    left = {i: Fraction(t.duration_ns) for i, t in enumerate(transfers)}
    begins = {i: t.start_ns + t.latency_ns for i, t in enumerate(transfers)}
    finished: dict[int, int] = {}
    now = 0
    while len(finished) < len(transfers):
        active = [i for i in left if begins[i] <= now and i not in finished]
        rates = max_min(active, transfers, capacities)
        ends = {i: now + ceil(left[i] / rates[i] - Fraction(1, 10**6)) for i in active}
        later = [b for b in begins.values() if b > now]
        then = min([*ends.values(), *later])
        for i in active:
            left[i] = max(left[i] - (then - now) * rates[i], Fraction(0))
            if ends[i] == then:
                finished[i] = then
        now = then
    return [finished[i] for i in range(len(transfers))]


@st.composite
def traffic(draw):
    capacities = {name: draw(st.sampled_from([1, 2, 3, 5, 8])) for name in "abcd"[: draw(st.integers(1, 4))]}
    transfers = []
    for _ in range(draw(st.integers(1, 6))):
        links = draw(st.sets(st.sampled_from(sorted(capacities)), min_size=1))
        # alone, no flow asks more of a link than it has
        widest = min(capacities[link] for link in links)
        duration = draw(st.integers(1, 400))
        nbytes = draw(st.integers(1, duration * widest))
        start, latency = draw(st.integers(0, 300)), draw(st.sampled_from([0, 0, 1, 50]))
        transfers.append(Transfer(dict.fromkeys(sorted(links), nbytes), duration, start, latency))
    return transfers, capacities


@settings(max_examples=100, deadline=None)
@given(traffic())
def test_rates_are_max_min_fair(case):
    transfers, capacities = case
    exact = {name: Fraction(capacity) for name, capacity in capacities.items()}
    assert finish_times(transfers, capacities) == reference(transfers, exact)


@settings(max_examples=40, deadline=None)
@given(traffic())
def test_a_lone_transfer_ends_as_if_it_had_been_shared_all_along(case):
    # an empty flow on the same links forces the general path, and asks for nothing
    transfers, capacities = case
    alone = transfers[0]
    beside = Transfer(dict.fromkeys(alone.loads, 0), 1000)
    expected = alone.start_ns + alone.latency_ns + alone.duration_ns
    assert finish_times([alone], capacities) == [expected]
    assert finish_times([beside, alone], capacities)[1] == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6), st.data())
def test_coupled_flows_never_exceed_a_link_and_each_has_a_bottleneck(count, data):
    # in any proportions: rates at time 0 read from how long flows would take
    capacities = {"a": 4.0, "b": 8.0, "c": 2.0}
    clock = Clock()
    network = Network(clock)
    flows = []
    for _ in range(count):
        names = data.draw(st.sets(st.sampled_from("abc"), min_size=1))
        loads = [
            (network.link(name, capacities[name] * 1e9), data.draw(st.integers(1, int(capacities[name] * 1000))), 1)
            for name in sorted(names)
        ]
        flows.append(network.transfer(network.route(0, 1000, loads)))
    clock.run(until=1)
    rates = {flow: flow.rate or 1.0 for flow in flows}  # whoever has a link for itself is not even given a rate
    for name, capacity in capacities.items():
        link = network.link(name, capacity * 1e9)
        used = sum(rates[f] * demand for f in flows for on, demand, _ in f.loads if on is link)
        assert used <= link.capacity * (1 + 1e-9)
    for flow in flows:
        full = [
            on
            for on, _, _ in flow.loads
            if sum(rates[f] * d for f in flows for x, d, _ in f.loads if x is on) >= on.capacity * (1 - 1e-9)
        ]
        assert rates[flow] == pytest.approx(1.0) or full, "a flow is slowed although all its links have room"
