"""The network on the clock: coupled flows that share links.

A transfer is a latency (no link held) followed by one *coupled flow* ``{link: bytes}`` whose bytes progress in
lock-step. Its progress rate is max-min fair over the flows that share a link with it, and never more than 1: alone,
it takes exactly the time that the cost function says. Rates are recomputed only for flows that share a saturated link
with a change.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from math import ceil
from typing import NamedTuple

from simpar.engine.clock import Clock, Signal

_SLACK = 1 + 1e-9  # a link is saturated when demand exceeds capacity by more than rounding


class Link:
    """One direction of a physical link: who uses it, and how much they would at full speed (bytes per ns).

    ``flows`` are on the link or still in their latency; ``demand`` is that of the former.
    """

    __slots__ = ("capacity", "demand", "flows", "total_bytes")

    def __init__(self, capacity_bytes_per_s: float) -> None:
        self.capacity = capacity_bytes_per_s * 1e-9
        self.demand = 0.0
        self.flows: list[Flow] = []
        self.total_bytes = 0.0

    @property
    def saturated(self) -> bool:
        """Whether its flows want more than it can carry."""
        return self.demand > self.capacity * _SLACK


LinkLoad = tuple[Link, float, int]  # link, bytes, number of equal flows behind them


class Flow(Signal):
    """A transfer, as a signal of its end.

    It has ``left`` nanoseconds of uncontended streaming, now at ``rate`` (1 uncontended, 0 not begun).

    ``slowed_by`` counts the members that compute meanwhile.
    """

    rate = 0.0
    limit = 1.0
    slowed_by = 0
    since = 0
    version = 0

    def __init__(self, duration_ns: int, loads: list[LinkLoad], begins_ns: int) -> None:
        self.left = float(duration_ns)
        self.loads = loads  # bytes per ns at full speed
        self.begins_ns = begins_ns


class Route(NamedTuple):
    """What one transfer asks of its links.

    Attributes:
        latency_ns: time during which no link is held.
        duration_ns: streaming time when alone.
        demands: link, bytes per nanosecond at full speed, and number of equal flows.
        carried: link and bytes.
        crowded: whether a link cannot even carry this transfer alone at full speed.
    """

    latency_ns: int
    duration_ns: int
    demands: list[LinkLoad]
    carried: list[tuple[Link, float]]
    crowded: bool


class Network:
    """All links of a run; created by the engine with the run's clock.

    Args:
        clock: of the run.
        rates: shares of their capacity that slow links have left, by name.
    """

    def __init__(self, clock: Clock, rates: Mapping[str, float] | None = None) -> None:
        self._clock = clock
        self._rates = rates or {}
        self._links: dict[str, Link] = {}
        self._changed: dict[Flow, None] = {}  # flows that may get another rate in this instant

    def link(self, name: str, capacity_bytes_per_s: float) -> Link:
        """The link of that name, made on first use."""
        found = self._links.get(name)
        if found is None:
            found = self._links[name] = Link(capacity_bytes_per_s * self._rates.get(name, 1.0))
        return found

    def usage(self) -> Iterable[tuple[str, float, float]]:
        """Name, bytes carried and capacity (bytes/s) of every link that was used."""
        return ((n, x.total_bytes, x.capacity * 1e9) for n, x in self._links.items() if x.total_bytes > 0)

    def route(self, latency_ns: int, duration_ns: int, loads: Iterable[LinkLoad]) -> "Route":
        """A transfer that may be started many times: what it asks of each link when alone."""
        loads = list(loads)
        per_ns = 1.0 / duration_ns if duration_ns else 0.0
        demands = [(link, nbytes * per_ns, flows) for link, nbytes, flows in loads]
        # a bundle of equal flows may be too much for a link all by itself
        crowded = any(demand > link.capacity * _SLACK for link, demand, _ in demands)
        return Route(latency_ns, duration_ns, demands, [(link, nbytes) for link, nbytes, _ in loads], crowded)

    def transfer(self, route: "Route") -> Flow:
        """Starts a transfer; the flow fires with its end."""
        clock = self._clock
        latency_ns, duration_ns, demands, carried, company = route
        for link, nbytes in carried:
            link.total_bytes += nbytes
            if link.flows:
                company = True
        flow = Flow(duration_ns, demands, clock.ns + latency_ns)
        if company:
            for link, _ in carried:
                for other in link.flows:
                    self._announce(other)
        for link, _ in carried:
            link.flows.append(flow)
        if company:
            self._announce(flow)
        else:
            # nobody else is there: unless a later transfer announces this one, it begins and ends undisturbed
            flow.version = 1
            clock.after(latency_ns + duration_ns, partial(self._finish_alone, flow))
        return flow

    def _finish_alone(self, flow: Flow, _: object) -> None:
        """Ends a flow that was alone all the time."""
        if flow.version == 1:
            for link, _, _ in flow.loads:
                link.flows.remove(flow)
            self._clock.fire(flow)

    def _finish_version(self, flow: Flow, version: int, _: object) -> None:
        """Ends a flow, unless its rate has changed since this end was foreseen."""
        if flow.version == version:
            self._finish(flow)

    def set_limit(self, flow: Flow, limit: float) -> None:
        """Caps the progress rate of a flow (compute beside it takes memory bandwidth and SMs)."""
        if flow.limit != limit:
            self._announce(flow)
            flow.limit = limit
            if flow.rate > 0:
                self._share(self._component(flow))

    def _announce(self, flow: Flow) -> None:
        """Makes a flow that was left alone, or is new, one that takes part in sharing."""
        if flow.version > 1:
            return
        flow.version = 2
        now = self._clock.ns
        if flow.begins_ns > now:
            self._clock.after(flow.begins_ns - now, lambda _: self._begin(flow))
        elif flow.begins_ns < now or flow.rate == 0:
            flow.left -= now - flow.begins_ns
            self._begin(flow)

    def _begin(self, flow: Flow) -> None:
        """The latency is over: the flow takes its share of its links."""
        flow.since = self._clock.ns
        saturated = flow.limit < 1
        for link, demand, _ in flow.loads:
            link.demand += demand
            saturated = saturated or link.saturated
        if saturated:
            flow.rate = 1e-12  # it is there, and gets its rate with the others
            self._share_soon(flow)
        else:
            self._set_rate(flow, 1.0)

    def _finish(self, flow: Flow) -> None:
        contended: list[Flow] = []
        for link, demand, _ in flow.loads:
            if link.saturated:
                contended.extend(other for other in link.flows if other is not flow and other.rate > 0)
            link.flows.remove(flow)
            link.demand = link.demand - demand if any(other.rate > 0 for other in link.flows) else 0.0
        flow.rate = 0.0
        self._clock.fire(flow)
        for other in contended:
            self._share_soon(other)

    def _share_soon(self, flow: Flow) -> None:
        """Shares out anew once all changes of this instant are known: equal flows begin and end together."""
        if not self._changed:
            self._clock.after(0, self._share_changed)
        self._changed[flow] = None

    def _share_changed(self, _: object) -> None:
        changed, self._changed = self._changed, {}
        seen: set[Flow] = set()
        for flow in changed:
            if flow.rate > 0 and flow not in seen:
                component = self._component(flow)
                seen.update(component)
                self._share(component)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        now = self._clock.ns
        flow.left = max(flow.left - (now - flow.since) * flow.rate, 0.0)
        flow.since = now
        flow.rate = rate
        flow.version = version = flow.version + 1
        # a hair below the next nanosecond counts as there: floats must not add a tick to an exact time
        delay = ceil(flow.left / rate - 1e-6)
        self._clock.after(delay, partial(self._finish_version, flow, version))

    @staticmethod
    def _component(start: Flow) -> list[Flow]:
        """The begun flows connected to ``start`` through saturated links, in a deterministic order."""
        found, queue = {start: None}, [start]
        while queue:
            for link, _, _ in queue.pop().loads:
                if link.saturated:
                    for other in link.flows:
                        if other.rate > 0 and other not in found:
                            found[other] = None
                            queue.append(other)
        return list(found)

    def _share(self, flows: list[Flow]) -> None:
        """Gives flows their fair rates; a flow whose rate stays keeps its course."""
        for flow, rate in fair_rates(flows).items():
            if rate != flow.rate:
                self._set_rate(flow, max(rate, 1e-12))


def fair_rates(flows: list[Flow]) -> dict[Flow, float]:
    """Max-min fair rates: a link's bytes/s are shared equally, and what a flow cannot use goes to the others.

    Rates are settled in rounds: first flows that want no more than their share; then those of a link that is the
    bottleneck of all its flows. Where every link has a flow that another one holds back (possible only if flows load
    links in different proportions), the smallest share is settled, and what is left over in the end goes to whom it
    helps.
    """
    free = {link: link.capacity for flow in flows for link, _, _ in flow.loads}
    waiting = dict.fromkeys(flows)
    rates: dict[Flow, float] = {}
    guessed = False
    while waiting:
        settled, certain = _settled(waiting, free)
        guessed = guessed or not certain
        for flow, rate in settled:
            rates[flow] = rate
            del waiting[flow]
            _take(flow, rate, free)
    if guessed:
        for flow in flows:
            spare = min((free[link] / demand for link, demand, _ in flow.loads if demand > 0), default=0.0)
            more = min(spare, flow.limit - rates[flow])
            rates[flow] += more
            _take(flow, more, free)
    return rates


def _take(flow: Flow, rate: float, free: dict[Link, float]) -> None:
    for link, demand, _ in flow.loads:
        free[link] = max(free[link] - rate * demand, 0.0)


def _settled(waiting: Iterable[Flow], free: Mapping[Link, float]) -> tuple[list[tuple[Flow, float]], bool]:
    """Flows whose rates the others cannot change any more, with those rates; False beside a rate that is a guess."""
    users: dict[Link, int] = {}
    flows_on: dict[Link, int] = {}
    for flow in waiting:
        for link, demand, count in flow.loads:
            if demand > 0:
                users[link] = users.get(link, 0) + count
                flows_on[link] = flows_on.get(link, 0) + 1
    content: list[tuple[Flow, float]] = []
    held: list[tuple[Flow, float, Link]] = []
    for flow in waiting:
        rate, bottleneck = flow.limit, None
        for link, demand, count in flow.loads:
            if demand > 0 and free[link] / users[link] * count / demand < rate:
                rate, bottleneck = free[link] / users[link] * count / demand, link
        if bottleneck is None:
            content.append((flow, rate))
        else:
            held.append((flow, rate, bottleneck))
            flows_on[bottleneck] -= 1
    if content:
        return content, True
    agreed = [(flow, rate) for flow, rate, link in held if flows_on[link] == 0]
    if agreed:
        return agreed, True
    flow, rate, _ = min(held, key=lambda entry: free[entry[2]] / users[entry[2]])
    return [(flow, rate)], False
