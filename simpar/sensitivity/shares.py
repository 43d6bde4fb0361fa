"""The pace of a flow among others on shared links, and how it depends on what links carry.

With ρ_i the rate of flow i (1/ns), b_il its bytes on link l and C_l what that carries, every flow is held either by
itself (it streams as alone, 1/ρ_i = stream_i) or by one full link l(i). The flows S_l that a link holds keep their
proportions (max-min fairness gives each the same bytes/s): dρ_i = ρ_i ds_l(i). What a full link carries is C_l, so

    Σ_l' M_ll' ds_l' = dC_l - Σ_held by themselves b_jl dρ_j,  M_ll' = Σ_i in S_l' b_il ρ_i.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simpar.engine.clock import Clock
from simpar.engine.network import Flow as EngineFlow
from simpar.engine.network import Network, fair_rates
from simpar.sensitivity.prices import Flow, Prices, Transfer, Way

_CLOSE = 1e-6  # to a limit


class Pace(NamedTuple):
    """How a flow streams in some company.

    Attributes:
        streaming_ns: how long it would stream if it had that company all the time.
        streams: of it, per nanosecond that a transfer streams when alone.
        links: of it, per nanosecond that a link takes for a byte.
    """

    streaming_ns: float
    streams: dict[Transfer, float]
    links: dict[Way, float]


class Shares:
    """Asks the network for fair rates; each distinct company is asked about once.

    Args:
        prices: on the machine of the trace.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._known: dict[tuple[Flow, ...], _Sharing] = {}
        self._paces: dict[tuple[Flow, tuple[Flow, ...]], Pace] = {}

    def pace(self, flow: Flow, company: tuple[Flow, ...]) -> Pace:
        """The pace of a flow in a company that it belongs to."""
        found = self._paces.get((flow, company))
        if found is None:
            sharing = self._known.get(company)
            if sharing is None:
                sharing = self._known[company] = _shared(company, self._prices)
            found = self._paces[flow, company] = sharing.pace(company.index(flow))
        return found


@dataclass(frozen=True, slots=True)
class _Sharing:
    """Flows at their fair rates.

    Attributes:
        flows: with the time that each streams when alone.
        rates: 1/ns.
        loads: per flow, bytes by link.
        capacities: bytes/ns by link.
        held: per flow the link that holds it, or None if nothing but itself does.
    """

    flows: tuple[tuple[Flow, int], ...]
    rates: list[float]
    loads: list[dict[str, float]]
    capacities: dict[str, float]
    held: "list[str | None]"

    def pace(self, number: int) -> Pace:
        """The pace of one of them."""
        time_ns, held = 1 / self.rates[number], self.held[number]
        if held is None:
            return Pace(time_ns, {self.flows[number][0].transfer: time_ns / self.flows[number][1]}, {})
        links = sorted({link for link in self.held if link is not None})
        place = {link: i for i, link in enumerate(links)}
        matrix = np.zeros((len(links), len(links)))
        for rate, loads, holder in zip(self.rates, self.loads, self.held, strict=True):
            for link in () if holder is None else place.keys() & loads.keys():
                matrix[place[link], place[holder or ""]] += loads[link] * rate
        asked = np.zeros(len(links))
        asked[place[held]] = 1.0
        answer = np.linalg.lstsq(matrix.T, asked, rcond=None)[0]  # equal bottlenecks may make it singular
        streams: dict[Transfer, float] = {}
        capacities: dict[Way, float] = {}
        for link, weight in zip(links, (time_ns * answer).tolist(), strict=True):
            user = next(flow for (flow, _), loads in zip(self.flows, self.loads, strict=True) if link in loads)
            capacities[Way(link, user)] = weight * self.capacities[link] ** 2
            for (flow, alone), rate, loads, holder in zip(self.flows, self.rates, self.loads, self.held, strict=True):
                if holder is None and link in loads:
                    less = weight * loads[link] * rate / alone
                    streams[flow.transfer] = streams.get(flow.transfer, 0.0) - less
        return Pace(time_ns, streams, capacities)


def _shared(company: tuple[Flow, ...], prices: Prices) -> _Sharing:
    network = Network(Clock())
    flows: list[EngineFlow] = []
    loads: list[dict[str, float]] = []
    parts: list[dict[str, int]] = []
    capacities: dict[str, float] = {}
    costs = [prices.cost(flow) for flow in company]
    for cost in costs:
        each = [(network.link(x.link.name, x.link.capacity_bytes_per_s), x.nbytes, x.flows) for x in cost.loads]
        flows.append(EngineFlow(cost.stream_ns, network.route(0, cost.stream_ns, each).demands, 0))
        mine, equal = defaultdict[str, float](float), defaultdict[str, int](int)
        for link, nbytes, count in cost.loads:
            mine[link.name] += nbytes
            equal[link.name] += count
            capacities[link.name] = link.capacity_bytes_per_s * 1e-9
        loads.append(mine)
        parts.append(equal)
    found = fair_rates(flows)
    shares = [max(found[flow], 1e-12) for flow in flows]
    rates = [share / cost.stream_ns for share, cost in zip(shares, costs, strict=True)]
    timed = tuple((flow, cost.stream_ns) for flow, cost in zip(company, costs, strict=True))
    carried = [{link: nbytes * rate for link, nbytes in mine.items()} for rate, mine in zip(rates, loads, strict=True)]
    full = _full(carried, capacities)
    part = [{link: carried[i][link] / parts[i][link] for link in mine if link in full} for i, mine in enumerate(loads)]
    held = [None if share >= 1 - _CLOSE else _holder(mine, part) for share, mine in zip(shares, part, strict=True)]
    return _Sharing(timed, rates, loads, capacities, held)


def _full(carried: "list[dict[str, float]]", capacities: dict[str, float]) -> set[str]:
    """Links that carry all that they can."""
    used: defaultdict[str, float] = defaultdict(float)
    for mine in carried:
        for link, rate in mine.items():
            used[link] += rate
    return {link for link, rate in used.items() if rate >= capacities[link] * (1 - _CLOSE)}


def _holder(mine: dict[str, float], of_all: "list[dict[str, float]]") -> str | None:
    """The full link that holds a flow: where nobody gets more than it, or nearly so."""
    most = {link: max(other.get(link, 0.0) for other in of_all) for link in mine}
    return max(mine, key=lambda link: (mine[link] / most[link], link), default=None)
