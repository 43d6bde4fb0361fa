"""Times of blocks and operations as (max,+) maps.

With a stream that is free at ``s`` and a host that starts to issue at ``h``, a block ends at ``max(s + D, h + H)`` and
its host is done at ``h + L``. Such maps compose, so an operation of a thousand kernels is one event and stays exact;
its spans are expanded afterwards. (Where collectives inside a block slow compute beside them, D and H are exact and
what lies between the two regimes is the larger of both.)
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockPrice:
    """The map of one block and its spans, as offsets.

    Attributes:
        gpu_ns: D, the block's length when everything was issued long ago.
        host_ns: H, from the first launch to the block's end when the stream was free long ago.
        issue_ns: L, the host's time to issue the block.
        flop: FLOP of its kernels.
        busy_ns: per kind (index into ``KINDS``), time its kernels and collectives run.
        exposed_ns: time within D in which no kernel runs on the compute stream.
        links: bytes that its collectives put on the rank's own links, as (kind, end, bytes).
        gpu_start_ns, host_start_ns: per span, start after s and after h.
        gpu_end_ns, host_end_ns: per span, its end likewise.
        streams: streams of the block, compute first.
        stream, kind, name, nbytes, span_flop: per span; ``stream`` counts in ``streams``.
    """

    gpu_ns: int
    host_ns: int
    issue_ns: int
    flop: float
    busy_ns: tuple[tuple[int, int], ...]
    exposed_ns: int
    links: tuple[tuple[str, str, float], ...]
    gpu_start_ns: IntArray
    host_start_ns: IntArray
    gpu_end_ns: IntArray
    host_end_ns: IntArray
    streams: tuple[str, ...]
    stream: IntArray
    kind: IntArray
    name: IntArray
    nbytes: npt.NDArray[np.float64]
    span_flop: npt.NDArray[np.float64]


class OperationPrice:
    """The composed map of an operation's blocks."""

    __slots__ = ("__dict__", "blocks", "flop", "gpu_ns", "host_ns", "issue_ns", "layers")

    def __init__(self, blocks: tuple[BlockPrice, ...], layers: tuple[int, ...]) -> None:
        self.blocks = blocks
        self.layers = layers
        self.gpu_ns = self.issue_ns = self.host_ns = 0
        self.flop = 0.0
        for block in blocks:
            self.host_ns = max(self.host_ns + block.gpu_ns, self.issue_ns + block.host_ns)
            self.gpu_ns += block.gpu_ns
            self.issue_ns += block.issue_ns
            self.flop += block.flop

    @cached_property
    def busy_ns(self) -> dict[int, int]:
        """Time per kind of its kernels and collectives."""
        total: dict[int, int] = {}
        for block, count in Counter(self.blocks).items():
            for kind, duration in block.busy_ns:
                total[kind] = total.get(kind, 0) + duration * count
        return total

    @cached_property
    def links(self) -> dict[tuple[str, str], float]:
        """Bytes of its collectives by kind and end of the rank's links."""
        total: dict[tuple[str, str], float] = {}
        for block in self.blocks:
            for kind, way, nbytes in block.links:
                total[kind, way] = total.get((kind, way), 0.0) + nbytes
        return total

    @cached_property
    def exposed_ns(self) -> int:
        """Time in which its compute stream waits for its own collectives."""
        return sum(block.exposed_ns for block in self.blocks)

    @cached_property
    def stream_busy_ns(self) -> dict[str, int]:
        """Time of its collectives by stream."""
        total: dict[str, int] = {}
        for block, count in Counter(self.blocks).items():
            length = (block.gpu_end_ns - block.gpu_start_ns).tolist()
            for number, duration in zip(block.stream.tolist(), length, strict=True):
                if number:
                    name = block.streams[number]
                    total[name] = total.get(name, 0) + duration * count
        return total


@dataclass(frozen=True, slots=True, eq=False)
class OpenedPrice:
    """What an operation turned out to be that was simulated kernel by kernel; same attributes as its composed kin."""

    busy_ns: dict[int, int]
    exposed_ns: int
    gpu_ns: int
    blocks: tuple[BlockPrice, ...] = ()
    layers: tuple[int, ...] = ()
    links: dict[tuple[str, str], float] = field(default_factory=dict)  # its flows were booked as they ran
    stream_busy_ns: dict[str, int] = field(default_factory=dict)
