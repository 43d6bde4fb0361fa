"""Faults and noise of a cluster, as the section ``faults`` of a job: who is slow, by how much, and what is random.

Descriptions only. Slow devices and links enter where costs are asked, noise where instructions become steps, and a
late data loader is an instruction of the program (:mod:`simpar.program.late`).
"""

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from simpar.description import Description
from simpar.errors import JobError, SimparError

Rank = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, le=1)]
Loss = Annotated[float, Field(ge=0, lt=1)]
NonNegative = Annotated[float, Field(ge=0)]

_LINK = re.compile(r"[a-z]+\d[\w.]*[<>+-]?|.+>.+")  # nic3>, leaf0.1<, ici5.0+; in a graph, from>to
_OWN = re.compile(r"(gpu|nic)(\d+)([<>]?)")


class Jitter(Description):
    """Noise of compute: each kernel, or all of a microbatch's on a rank, takes a log-normal factor longer or shorter.

    The factor has mean 1, so that noise alone costs nothing; what it costs comes of waiting for the slowest.

    Attributes:
        spread: standard deviation of the factor over its mean (coefficient of variation); 0 is no noise.
        per: what draws a factor of its own: each ``kernel``, or each forward and backward pass of a ``microbatch`` on
            each rank.
    """

    error_type: ClassVar[type[SimparError]] = JobError

    spread: NonNegative = 0.0
    per: Literal["kernel", "microbatch"] = "microbatch"


class Loader(Description):
    """A data loader that is late: the host of a first stage waits for it before it issues a microbatch.

    A host that runs ahead of its device hides the delay, as prefetching does; what the device waits shows as waiting
    for the host. Tensor- and context-parallel ranks of one replica get the same samples, and so the same delay.

    Attributes:
        delay_s: mean of a delay.
        spread: standard deviation of a delay over its mean; delays are log-normal.
        probability: share of microbatches before which there is a delay.
        replicas: data-parallel indices that it strikes; None means all.
    """

    error_type: ClassVar[type[SimparError]] = JobError

    delay_s: NonNegative = 0.0
    spread: NonNegative = 0.0
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    replicas: tuple[Rank, ...] | None = None

    @property
    def is_certain(self) -> bool:
        """Whether every delay is the same."""
        return self.spread == 0 and self.probability in (0.0, 1.0)

    @property
    def strikes(self) -> bool:
        """Whether there is any delay."""
        return self.delay_s > 0 and self.probability > 0 and self.replicas != ()


class Faults(Description):
    """What is slow or random in a job's cluster; the default is nothing.

    Attributes:
        slow_gpus: speed of a rank's device, by rank: at 0.8 every kernel takes 1/0.8 of its time.
        slow_links: usable share of a link's rate, by the link's name as reports give it: ``nic3`` is the share of the
            NICs that GPU 3 has, ``gpu3`` its link inside the node, ``leaf0.1`` an uplink. Both directions, or one of
            them with ``nic3>`` (outward) or ``nic3<``.
        lossy_links: share of packets that a link loses, by its name.
        resent_packets: packets that are sent again for each one lost: 1 where only that one is (selective repeat), the
            packets under way where all after it are too (go-back-N, as older RDMA NICs do).
        jitter: noise of compute.
        loader: a late data loader.
        seed: of everything random; equal seeds give equal steps.
    """

    error_type: ClassVar[type[SimparError]] = JobError

    slow_gpus: dict[Rank, Rate] = Field(default_factory=dict)
    slow_links: dict[str, Rate] = Field(default_factory=dict)
    lossy_links: dict[str, Loss] = Field(default_factory=dict)
    resent_packets: Annotated[float, Field(ge=1)] = 1.0
    jitter: Jitter = Field(default_factory=Jitter)
    loader: Loader = Field(default_factory=Loader)
    seed: Annotated[int, Field(ge=0)] = 0

    @field_validator("slow_links", "lossy_links")
    @classmethod
    def _check_names(cls, links: dict[str, float]) -> dict[str, float]:
        for name in links:
            if not _LINK.fullmatch(name):
                raise ValueError(f"'{name}' is no link; name one as the report does, such as nic3, gpu3> or leaf0.1")
        return links

    @property
    def any(self) -> bool:
        """Whether there is any fault."""
        return bool(self.speeds or self.link_rates or self.jitter.spread or self.loader.strikes)

    @property
    def is_random(self) -> bool:
        """Whether another seed gives another step."""
        return self.jitter.spread > 0 or (self.loader.strikes and not self.loader.is_certain)

    @property
    def speeds(self) -> dict[int, float]:
        """Speed by rank of devices that are slow."""
        return {rank: speed for rank, speed in self.slow_gpus.items() if speed != 1}

    @property
    def link_rates(self) -> dict[str, float]:
        """Usable share of the rate by link direction, of those that have not all.

        A packet that is lost with probability p and costs W packets again is sent 1 + W p / (1 - p) times on average
        (the number of losses of a packet is geometric; Bertsekas and Gallager, Data Networks, 2.7.2 for go-back-N), so
        a link delivers (1 - p) / (1 + (W - 1) p) of its rate.
        """
        rates: dict[str, float] = {}
        for name, rate in self.slow_links.items():
            for way in _ways(name):
                rates[way] = rates.get(way, 1.0) * rate
        for name, loss in self.lossy_links.items():
            for way in _ways(name):
                rates[way] = rates.get(way, 1.0) * (1 - loss) / (1 + (self.resent_packets - 1) * loss)
        return {way: rate for way, rate in rates.items() if rate != 1}

    @property
    def own_links(self) -> dict[int, set[str]] | None:
        """GPUs whose own links are slow, with the kinds of these; None where a link that ranks share is slow."""
        found: dict[int, set[str]] = {}
        for way in self.link_rates:
            own = _OWN.fullmatch(way)
            if own is None:
                return None
            found.setdefault(int(own[2]), set()).add(own[1])
        return found

    def beyond(self, gpus: int) -> tuple[str, str] | None:
        """The first field, with what it says, that speaks of a GPU which a cluster of so many does not have."""
        ranks: Mapping[str, list[int]] = {
            "slow_gpus": list(self.slow_gpus),
            "slow_links": _gpus_of(self.slow_links),
            "lossy_links": _gpus_of(self.lossy_links),
        }
        return next(((name, str(n)) for name, numbers in ranks.items() for n in numbers if n >= gpus), None)

    def summary(self) -> str:
        """All faults in one line."""
        parts = [f"GPU of rank {rank} at {speed:.0%}" for rank, speed in self.speeds.items()]
        parts += [f"link {name} at {rate:.3g} of its rate" for name, rate in self.link_rates.items()]
        if self.jitter.spread:
            parts.append(f"{self.jitter.spread:.0%} jitter per {self.jitter.per}")
        if self.loader.strikes:
            parts.append(f"data late by {self.loader.delay_s:g} s before {self.loader.probability:.0%} of microbatches")
        shown = parts if len(parts) < 5 else [*parts[:4], f"{len(parts) - 4} more"]
        return ", ".join(shown) + (f" (seed {self.seed})" if self.is_random else "")


def _ways(name: str) -> tuple[str, ...]:
    return (name,) if name[-1] in "<>+-" or ">" in name else (f"{name}>", f"{name}<")


def _gpus_of(links: Mapping[str, float]) -> list[int]:
    return [int(own[2]) for own in map(_OWN.fullmatch, links) if own is not None]
