"""Tori of chips that forward for each other, such as TPU slices: neighbours, routes, and the boxes that groups form.

A chip has two links per axis, one to each neighbour. Chips are numbered with the last axis fastest, so tensor-parallel
groups lie along it. An axis *closes* where its ends are joined. In a *twisted* torus the joined ends of the short axes
are shifted by half of the long ones (k×k×2k, k×2k×2k; Camarero, Martínez and Beivide 2010, Jouppi et al. 2023).

Collectives use all axes of a group's box at once: the buffer is cut into shares that pass the axes in different orders.
Let h(A) = (Πᵢ∈A mᵢ - 1)/n be the least share of the output that must cross the axes A (if they come first), and c(A)
their links per chip and direction: 2 for a closed axis, 1 for a line, over which a ring must also travel back. An
all-gather of S bytes then takes max over A of h(A) S / (c(A) b) and no less, since h is supermodular: the axes' loads
form the base of a contrapolymatroid, of which c·λ dominates a point exactly if it keeps every such bound.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import combinations, product
from math import prod
from typing import NamedTuple

Hop = tuple[int, int, str]
"""A link direction: the chip that it leaves, the axis, and ``+`` or ``-``."""


class Side(NamedTuple):
    """One axis of a box: ``chips`` chips, each ``stride`` links from the last, ``closed`` if a ring joins its ends."""

    axis: int
    chips: int
    stride: int
    closed: bool

    @property
    def links(self) -> int:
        """Links per chip and direction that a ring collective can fill."""
        return 2 if self.closed else 1

    @property
    def steps(self) -> int:
        """Hops of the farthest block of an all-gather; both ways round, where there are two."""
        return self.stride * (self.chips // 2 if self.closed else self.chips - 1)

    @property
    def pair_crossings(self) -> float:
        """Most messages over one link direction per member if each member sends one to every member (itself too)."""
        return max(self.crossings(place) for place in range(self.chips // 2 + 1))

    def crossings(self, place: int) -> float:
        """The same for the link behind the member at a place; in a ring, ties go both ways in equal parts."""
        m = self.chips
        if self.closed:
            return (m * m - m % 2) / 8 / m
        return (place + 1) * (m - 1 - place) / m


class Box(NamedTuple):
    """The chips of a group as a box of a torus; sides of one chip are left out."""

    sides: tuple[Side, ...]

    @property
    def size(self) -> int:
        """Chips of the box."""
        return prod(side.chips for side in self.sides)

    @property
    def steps(self) -> int:
        """Hops on the critical path of one pass over all axes."""
        return sum(side.steps for side in self.sides)

    def link_bytes(self, wire: float) -> tuple[float, ...]:
        """Bytes on every link direction of each side if each chip sends ``wire`` bytes in a ring collective."""
        size, sides = self.size, self.sides
        bounds: dict[tuple[Side, ...], float] = {
            chosen: (prod(side.chips for side in chosen) - 1) / (size - 1) / sum(side.links for side in chosen)
            for number in range(1, len(sides) + 1)
            for chosen in combinations(sides, number)
        }
        tight = max(bounds, key=lambda chosen: (bounds[chosen], len(chosen)))
        rest = [side for side in sides if side not in tight]
        left = 1.0 - (prod(side.chips for side in tight) - 1) / (size - 1)
        other = left / sum(side.links for side in rest) if rest else 0.0
        return tuple(wire * (bounds[tight] if side in tight else other) for side in sides)


class Torus(NamedTuple):
    """A torus (or mesh) of chips.

    Attributes:
        shape: chips along each axis.
        wraps: whether the ends of each axis are joined.
        twisted: whether the short axes are joined with a shift along the long ones.
    """

    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    twisted: bool = False

    @property
    def size(self) -> int:
        """Chips of the torus."""
        return prod(self.shape)

    def coordinates(self, chip: int) -> tuple[int, ...]:
        """Place of a chip."""
        found = []
        for length in reversed(self.shape):
            chip, place = divmod(chip, length)
            found.append(place)
        return tuple(reversed(found))

    def chip(self, place: Iterable[int]) -> int:
        """The chip at a place, which may lie beyond the joined ends."""
        at = list(place)
        longest = max(self.shape)
        for axis, length in enumerate(self.shape):
            if self.wraps[axis]:
                rounds, at[axis] = divmod(at[axis], length)
                if self.twisted and rounds and length < longest:
                    for other, reach in enumerate(self.shape):
                        if reach == longest:
                            at[other] += rounds * length
        for axis, length in enumerate(self.shape):
            if self.wraps[axis]:
                at[axis] %= length
        number = 0
        for place_on_axis, length in zip(at, self.shape, strict=True):
            number = number * length + place_on_axis
        return number

    def neighbour(self, chip: int, axis: int, way: str) -> int | None:
        """The chip behind a link; None where an axis ends."""
        place = list(self.coordinates(chip))
        place[axis] += 1 if way == "+" else -1
        if not self.wraps[axis] and not 0 <= place[axis] < self.shape[axis]:
            return None
        return self.chip(place)

    def hops(self) -> Iterator[tuple[Hop, int]]:
        """Every link direction with the chip that it enters. The two links between two chips of a ring are one."""
        for chip, axis, way in product(range(self.size), range(len(self.shape)), "+-"):
            other = self.neighbour(chip, axis, way)
            if other is not None and other != chip:
                yield (chip, axis, way), other

    def route(self, src: int, dst: int) -> tuple[Hop, ...]:
        """A shortest way, axis by axis; in a twisted torus one that needs the fewest hops."""
        if self.twisted:
            return _twisted_route(self, src, dst)
        at, route = list(self.coordinates(src)), []
        for axis, end in enumerate(self.coordinates(dst)):
            length = self.shape[axis]
            ahead = end - at[axis]
            if self.wraps[axis]:
                ahead = (ahead + length // 2) % length - length // 2
                ahead = ahead if ahead != -length / 2 else length // 2
            way = "+" if ahead > 0 else "-"
            for _ in range(abs(ahead)):
                route.append((self.chip(at), axis, way))
                at[axis] += 1 if way == "+" else -1
        return tuple(route)

    def box(self, ranks: "range | tuple[int, ...]") -> Box | None:
        """The group's chips (counted within the torus) as a box; None if they form none."""
        return _box(self, ranks)

    def hops_of(
        self, box: Box, ranks: "range | tuple[int, ...]", near: frozenset[int] | None = None
    ) -> Iterator[tuple[int, int, Hop]]:
        """Link directions that a box spans: number of the side, place of the member before the link, and the link.

        Where only the links of a few chips matter, ``near``, others may be left out.
        """
        for number, side in enumerate(box.sides):
            chosen: Iterable[int] = ranks
            if near is not None and side.stride == 1:
                before = (self.neighbour(chip, side.axis, "-") for chip in near)
                useful = near.union(chip for chip in before if chip is not None)
                chosen = [rank for rank in sorted(useful) if rank in ranks]
            ends = (ranks[0], ranks[-1]) if isinstance(ranks, range) else ranks
            first = min(self.coordinates(rank)[side.axis] for rank in ends)
            for rank in chosen:
                at = list(self.coordinates(rank))
                place = (at[side.axis] - first) // side.stride
                if not side.closed and place == side.chips - 1:
                    continue
                for _ in range(side.stride):
                    here = self.chip(at)
                    at[side.axis] += 1
                    yield number, place, (here, side.axis, "+")
                    yield number, place, (self.chip(at), side.axis, "-")

    def ring_crossings(self, ranks: "range | tuple[int, ...]") -> tuple[int, int]:
        """Most steps of a ring in this order over one link direction, and the hops of all its steps but the last."""
        routes = [self.route(a, b) for a, b in zip(ranks, (*ranks[1:], ranks[0]), strict=True)]
        used = Counter(hop for route in routes for hop in route)
        return max(used.values()), sum(len(route) for route in routes[:-1])

    def all_to_all_crossings(self) -> tuple[float, ...]:
        """Per axis, messages over one link direction if every chip sends one to every other by all shortest ways.

        Counted from one chip, since a closed torus looks alike from all: a message splits evenly over its shortest
        ways, and the crossings of an axis are spread evenly over its links.
        """
        return _crossings(self)


@lru_cache(maxsize=4096)
def _box(torus: Torus, ranks: "range | tuple[int, ...]") -> Box | None:
    places = [torus.coordinates(rank) for rank in ranks]
    sides = []
    whole = len(ranks) == torus.size
    for axis, length in enumerate(torus.shape):
        used = sorted({place[axis] for place in places})
        if len(used) == 1:
            continue
        stride = used[1] - used[0]
        if used != list(range(used[0], used[-1] + 1, stride)):
            return None
        closed = torus.wraps[axis] and length == stride * len(used)
        if torus.twisted and length < max(torus.shape) and not whole:
            closed = False  # the ring along a short axis comes back elsewhere
        sides.append(Side(axis, len(used), stride, closed))
    box = Box(tuple(sides))
    return box if box.size == len(set(ranks)) == len(ranks) else None


@lru_cache(maxsize=64)
def _levels(torus: Torus) -> tuple[dict[int, int], dict[int, list[tuple[int, int, str]]]]:
    """Hops from chip 0, and the links by which shortest ways enter each chip, as (previous chip, axis, way)."""
    distance, entries = {0: 0}, {0: []}  # type: tuple[dict[int, int], dict[int, list[tuple[int, int, str]]]]
    front = [0]
    while front:
        later: list[int] = []
        for chip in front:
            for axis, way in product(range(len(torus.shape)), "+-"):
                other = torus.neighbour(chip, axis, way)
                if other is None:
                    continue
                if other not in distance:
                    distance[other] = distance[chip] + 1
                    entries[other] = []
                    later.append(other)
                if distance[other] == distance[chip] + 1:
                    entries[other].append((chip, axis, way))
        front = later
    return distance, entries


@lru_cache(maxsize=64)
def _crossings(torus: Torus) -> tuple[float, ...]:
    distance, entries = _levels(torus)
    ways = {0: 1}
    for chip in sorted(distance, key=lambda chip: distance[chip])[1:]:
        ways[chip] = sum(ways[before] for before, _, _ in entries[chip])
    carried: Counter[int] = Counter()
    through = dict.fromkeys(distance, 1.0)  # the message for the chip itself, and those that it passes on
    for chip in sorted(distance, key=lambda chip: -distance[chip])[:-1]:
        for before, axis, _ in entries[chip]:
            part = through[chip] * ways[before] / ways[chip]
            carried[axis] += part  # type: ignore[assignment]  # a counter of parts
            through[before] += part
    return tuple(carried[axis] / 2 for axis in range(len(torus.shape)))


def _twisted_route(torus: Torus, src: int, dst: int) -> tuple[Hop, ...]:
    _, entries = _levels(torus)
    start = torus.coordinates(src)
    ahead = [end - begin for begin, end in zip(start, torus.coordinates(dst), strict=True)]
    chip, route = torus.chip(ahead), []
    while chip:
        chip, axis, way = entries[chip][0]
        moved = [a + b for a, b in zip(torus.coordinates(chip), start, strict=True)]
        route.append((torus.chip(moved), axis, way))
    return tuple(reversed(route))


def slice_loads(
    torus: Torus,
    members: "range | tuple[int, ...]",
    wire: float,
    *,
    every_pair: bool = False,
    near: frozenset[int] | None = None,
) -> dict[Hop, float]:
    """Bytes on every link direction if each of a group's chips sends ``wire`` bytes to the others.

    A ring collective runs along all axes of the group's box at once, an all-to-all axis by axis (in a whole twisted
    torus by all shortest ways). Chips that form no box make one ring in the given order, or send by their routes. Where
    only the links of a few chips matter, ``near``, others may be left out.
    """
    box = torus.box(members)
    loads: dict[Hop, float] = {}
    if len(members) < 2:
        return loads
    if box is None:
        pairs = (
            [(a, b) for a in members for b in members if a != b]
            if every_pair
            else list(zip(members, (*members[1:], members[0]), strict=True))
        )
        part = wire / (len(members) - 1) if every_pair else wire
        for a, b in pairs:
            for hop in torus.route(a, b):
                loads[hop] = loads.get(hop, 0.0) + part
        return loads
    pair_bytes = wire / (box.size - 1)
    if every_pair and torus.twisted and box.size == torus.size:
        crossings = torus.all_to_all_crossings()
        return {hop: crossings[hop[1]] * pair_bytes for hop, _ in torus.hops()}
    along = box.link_bytes(wire)
    for side, place, hop in torus.hops_of(box, members, near):
        carried = box.sides[side].crossings(place) * box.size * pair_bytes if every_pair else along[side]
        loads[hop] = loads.get(hop, 0.0) + carried
    return loads


@lru_cache(maxsize=4096)  # a pure function of integers; a large slice has thousands of links
def busiest(torus: Torus, members: "range | tuple[int, ...]", *, every_pair: bool) -> float:
    """Bytes on the busiest link direction for each byte that a chip sends: the most of :func:`slice_loads`."""
    box = torus.box(members)
    if box is None or (every_pair and torus.twisted):
        return max(slice_loads(torus, members, 1.0, every_pair=every_pair).values())
    if every_pair:
        return max(side.pair_crossings for side in box.sides) * box.size / (box.size - 1)
    return max(box.link_bytes(1.0))


@lru_cache(maxsize=256)
def usual_shape(chips: int, axes: int, wrap_multiple: int) -> tuple[int, ...]:
    """The shape of a slice of so many chips that is named by its size: all axes closed if possible, then compact.

    >>> usual_shape(128, 3, 4), usual_shape(32, 2, 16)
    ((4, 4, 8), (4, 8))
    """
    found: list[tuple[int, ...]] = []

    def split(left: int, first: int, head: tuple[int, ...]) -> None:
        if len(head) == axes - 1:
            if left >= first:
                found.append((*head, left))
            return
        for length in range(first, left + 1):
            if left % length == 0 and length ** (axes - len(head)) <= left:
                split(left // length, length, (*head, length))

    split(chips, 1, ())
    return min(found, key=lambda shape: (any(length % wrap_multiple for length in shape), sum(shape)))
