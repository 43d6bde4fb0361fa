"""The network on the clock: coupled flows that share links.

A transfer is a latency (no link held) followed by one *coupled flow* ``{link: bytes}`` whose bytes progress in
lock-step. Its progress rate is max-min fair over the flows that share a link with it, and never more than 1: alone,
it takes exactly the time that the cost function says. Rates are recomputed only for flows that share a saturated link
with a change.
"""

from collections.abc import Callable, Iterable
from math import ceil
from typing import cast

import simpy

_SLACK = 1 + 1e-9  # a link is saturated when demand exceeds capacity by more than rounding


class Link:
    """One direction of a physical link: who uses it, and how much they would at full speed (bytes per ns)."""

    __slots__ = ("capacity", "demand", "flows", "total_bytes")

    def __init__(self, capacity_bytes_per_s: float) -> None:
        self.capacity = capacity_bytes_per_s * 1e-9
        self.demand = 0.0
        self.flows: list[Flow] = []
        self.total_bytes = 0.0


class Flow:
    """A transfer in progress: ``left`` nanoseconds of uncontended streaming at ``rate`` (1 = uncontended)."""

    __slots__ = ("done", "limit", "loads", "left", "rate", "since", "version")

    def __init__(self, duration_ns: int, loads: list[tuple[Link, float, int]], done: simpy.Event) -> None:
        self.left = float(duration_ns)
        self.loads = loads  # (link, bytes per ns at full speed, number of equal flows it stands for)
        self.done = done
        self.rate = 0.0
        self.limit = 1.0
        self.since = 0
        self.version = 0


class Network:
    """All links of a run; created by the engine with the run's environment."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._links: dict[str, Link] = {}

    def link(self, name: str, capacity_bytes_per_s: float) -> Link:
        """The link of that name, made on first use."""
        found = self._links.get(name)
        if found is None:
            found = self._links[name] = Link(capacity_bytes_per_s)
        return found

    def usage(self) -> Iterable[tuple[str, float, float]]:
        """Name, bytes carried and capacity (bytes/s) of every link that was used."""
        return ((n, x.total_bytes, x.capacity * 1e9) for n, x in self._links.items() if x.total_bytes > 0)

    def transfer(self, latency_ns: int, duration_ns: int, loads: Iterable[tuple[Link, float, int]]) -> Flow:
        """Starts a transfer of ``loads`` (link, bytes, equal flows); ``flow.done`` fires with its end."""
        env = self._env
        per_ns = 1.0 / duration_ns if duration_ns else 0.0
        demands = []
        for link, nbytes, flows in loads:
            link.total_bytes += nbytes
            demands.append((link, nbytes * per_ns, flows))
        flow = Flow(duration_ns, demands, env.event())
        if latency_ns:
            _after(env, latency_ns, lambda _: self._begin(flow))
        else:
            self._begin(flow)
        return flow

    def set_limit(self, flow: Flow, limit: float) -> None:
        """Caps the progress rate of a running flow (compute beside it takes memory bandwidth and SMs)."""
        if flow.limit != limit:
            flow.limit = limit
            if flow.rate > 0:
                self._share(self._component(flow))

    def _begin(self, flow: Flow) -> None:
        flow.since = self._env.now
        saturated = flow.limit < 1
        for link, demand, _ in flow.loads:
            link.flows.append(flow)
            link.demand += demand
            saturated |= link.demand > link.capacity * _SLACK
        if saturated:
            self._share(self._component(flow))
        else:
            self._set_rate(flow, 1.0)

    def _finish(self, flow: Flow) -> None:
        contended: list[Flow] = []
        for link, demand, _ in flow.loads:
            if link.demand > link.capacity * _SLACK:
                contended.extend(other for other in link.flows if other is not flow)
            link.flows.remove(flow)
            link.demand = link.demand - demand if link.flows else 0.0
        flow.rate = 0.0
        flow.done.succeed()
        seen: set[Flow] = set()
        for other in contended:
            if other not in seen:
                component = self._component(other)
                seen.update(component)
                self._share(component)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        env = self._env
        flow.left = max(flow.left - (env.now - flow.since) * flow.rate, 0.0)
        flow.since = env.now
        flow.rate = rate
        flow.version = version = flow.version + 1
        # a hair below the next nanosecond counts as there: floats must not add a tick to an exact time
        delay = ceil(flow.left / rate - 1e-6)
        _after(env, delay, lambda _: self._finish(flow) if flow.version == version else None)

    @staticmethod
    def _component(start: Flow) -> list[Flow]:
        """The flows connected to ``start`` through saturated links, in a deterministic order."""
        found, queue = {start: None}, [start]
        while queue:
            for link, _, _ in queue.pop().loads:
                if link.demand > link.capacity * _SLACK:
                    for other in link.flows:
                        if other not in found:
                            found[other] = None
                            queue.append(other)
        return list(found)

    def _share(self, flows: list[Flow]) -> None:
        """Progressive filling: every link's bytes/s are shared equally among its flows, each capped at full speed."""
        free = {link: link.capacity for flow in flows for link, _, _ in flow.loads}
        waiting = dict.fromkeys(flows)
        while waiting:
            users: dict[Link, int] = {}
            for flow in waiting:
                for link, _, count in flow.loads:
                    users[link] = users.get(link, 0) + count
            best, rate = None, float("inf")
            for flow in waiting:
                shares = (free[x] / users[x] * count / demand for x, demand, count in flow.loads if demand > 0)
                fair = min(shares, default=flow.limit)
                capped = min(fair, flow.limit)
                if capped < rate:
                    best, rate = flow, capped
            assert best is not None
            for link, demand, _ in best.loads:
                free[link] = max(free[link] - rate * demand, 0.0)
            del waiting[best]
            if rate != best.rate:
                self._set_rate(best, max(rate, 1e-12))


def _after(env: simpy.Environment, delay: int, callback: "Callable[[simpy.Event], None]") -> None:
    """Calls back after ``delay`` nanoseconds."""
    timeout = env.timeout(delay)
    assert timeout.callbacks is not None
    timeout.callbacks.append(callback)
