"""Where the lanes of a timeline lie: by pipeline, stage and rank from top to bottom, compute before communicators."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from simpar.trace.trace import FloatColumn, IntColumn, Lane
from simpar.trace.utilisation import communicator

COMPUTE_HEIGHT, STREAM_HEIGHT = 1.0, 0.55
"""Heights of lanes; all lengths here are in units of a compute lane."""

_GROUP_GAP, _TITLE_GAP = 0.35, 1.0
_STREAM_ORDER = ("compute", "tp", "cp", "ep", "pp_forward", "pp_backward", "pp", "dp", "ps", "host", "cpu")


@dataclass(frozen=True, slots=True)
class Group:
    """The lanes of one rank.

    Attributes:
        lane: its first lane.
        top: upper edge.
        bottom: lower edge.
    """

    lane: int
    top: float
    bottom: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Places of lanes; lanes without spans have none (NaN).

    Attributes:
        top: upper edge of each lane.
        height: height of each lane.
        groups: the ranks that are drawn.
        titles: of pipelines, if there are several, and of what is compared; with the upper edge of each.
        total: height of all.
        labels: text beside each lane, if it is not the name of its stream.
    """

    top: FloatColumn
    height: FloatColumn
    groups: tuple[Group, ...]
    titles: tuple[tuple[str, float], ...] = ()
    total: float
    labels: tuple[str, ...] = ()

    def label(self, lanes: Sequence[Lane], lane: int) -> str:
        """The text beside a lane."""
        return self.labels[lane] if self.labels else lanes[lane].stream.replace("_", " ")

    @property
    def rules(self) -> tuple[float, ...]:
        """Where lines part the groups."""
        return tuple(
            min((above.bottom + below.top) / 2, above.bottom + _GROUP_GAP / 2) for above, below in pairwise(self.groups)
        )

    def stream_stretches(self, lanes: Sequence[Lane]) -> tuple[tuple[float, float], ...]:
        """Upper and lower edge of what lies below the compute lanes of each group, to be folded away; may be empty."""
        bottom = self.top + self.height
        computes = [i for i, lane in enumerate(lanes) if lane.stream == "compute" and np.isfinite(self.top[i])]
        return tuple(
            (
                max((float(bottom[i]) for i in computes if g.top <= self.top[i] < g.bottom), default=g.bottom),
                g.bottom,
            )
            for g in self.groups
        )

    @property
    def title_stretches(self) -> tuple[tuple[float, float], ...]:
        """Upper and lower edge of the groups below each title; empty where another title follows at once."""
        ends = [*(top for _, top in self.titles), float("inf")][1:]
        return tuple(
            (top + _TITLE_GAP, max((g.bottom for g in self.groups if top < g.top < end), default=top + _TITLE_GAP))
            for (_, top), end in zip(self.titles, ends, strict=True)
        )

    @property
    def unit_px(self) -> float:
        """Pixels per lane height: roomy for few ranks, dense for many."""
        return float(np.clip(900 / self.total, 17.0, 30.0))


def place(lanes: Sequence[Lane], used: IntColumn, *, stretch: float = 1.0) -> Rows:
    """Places for the lanes in ``used``.

    Args:
        lanes: of the trace.
        used: the lanes to place, by index.
        stretch: makes lanes so many times higher.
    """
    pipeline = pipeline_of(lanes)
    order = sorted(
        set(used.tolist()),
        key=lambda i: (pipeline[lanes[i].rank], lanes[i].stage, lanes[i].rank, _stream_place(lanes[i].stream), i),
    )
    several = len({pipeline[lanes[i].rank] for i in order}) > 1 and len({lane.stage for lane in lanes}) > 1
    top, height = np.full(len(lanes), np.nan), np.full(len(lanes), np.nan)
    groups: list[Group] = []
    titles: list[tuple[str, float]] = []
    y, shown = 0.0, -1
    for lane in order:
        rank = lanes[lane].rank
        if not groups or lanes[groups[-1].lane].rank != rank:
            if several and pipeline[rank] != shown:
                shown = pipeline[rank]
                y += _GROUP_GAP / 2 if groups else 0.0
                titles.append((f"pipeline {shown}", y))
                y += _TITLE_GAP
            elif groups:
                y += _GROUP_GAP
            groups.append(Group(lane, y, y))
        top[lane] = y
        height[lane] = stretch * (COMPUTE_HEIGHT if lanes[lane].stream == "compute" else STREAM_HEIGHT)
        y += float(height[lane])
        groups[-1] = Group(groups[-1].lane, groups[-1].top, y)
    return Rows(
        top=top, height=height, groups=tuple(groups), titles=tuple(titles), total=max(y, COMPUTE_HEIGHT * stretch)
    )


def pipeline_of(lanes: Sequence[Lane]) -> dict[int, int]:
    """The pipeline of each rank, which has one rank of each stage: its place among the simulated ranks of its stage.

    >>> pipeline_of([Lane(0, 0, "compute"), Lane(8, 1, "compute"), Lane(1, 0, "compute")])
    {0: 0, 1: 1, 8: 0}
    """
    of_stage: defaultdict[int, set[int]] = defaultdict(set)
    for lane in lanes:
        of_stage[lane.stage].add(lane.rank)
    return {rank: number for ranks in of_stage.values() for number, rank in enumerate(sorted(ranks))}


def who(lane: Lane) -> str:
    """The GPU of a lane, and for how many it stands; a parameter server stands for none of the job's.

    >>> who(Lane(8, 1, "tp", 64)), who(Lane(64, 0, "ps", 0))
    ('GPU 8 ×64 equal', 'rank 64')
    """
    if not lane.replicas:
        return f"rank {lane.rank}"
    return f"GPU {lane.rank}" + (f" ×{lane.replicas:,} equal" if lane.replicas > 1 else "")


def role(lane: Lane) -> str:
    """What a lane's rank does: a stage of a pipeline, or a parameter server."""
    return f"stage {lane.stage}" if lane.replicas else "server"


def _stream_place(stream: str) -> int:
    """Order of the lanes of a rank."""
    known = next((name for name in (stream, communicator(stream)) if name in _STREAM_ORDER), None)
    return _STREAM_ORDER.index(known) if known else len(_STREAM_ORDER)


def place_halves(first: Sequence[Lane], second: Sequence[Lane], used: IntColumn, words: tuple[str, str]) -> Rows:
    """Lanes of two traces of one job: each lane's upper half is the first's, its lower half the second's.

    Args:
        first: lanes of the one.
        second: lanes of the other.
        used: lanes to place, of ``(*first, *second)``.
        words: whose they are.
    """
    joint = {(lane.rank, lane.stage, lane.stream): lane for lane in (*second, *first)}
    lanes, number = list(joint.values()), {key: i for i, key in enumerate(joint)}
    of = np.array([number[lane.rank, lane.stage, lane.stream] for lane in (*first, *second)], np.int64)
    rows = place(lanes, np.unique(of[used]), stretch=1.6)
    lower = np.arange(len(of)) >= len(first)
    height = rows.height[of] / 2
    labels = [
        _half_label(lane.stream, words, bool(below)) for lane, below in zip((*first, *second), lower, strict=True)
    ]
    groups = tuple(Group(int(np.flatnonzero(of == g.lane)[0]), g.top, g.bottom) for g in rows.groups)
    return Rows(
        top=rows.top[of] + np.where(lower, height, 0.0),
        height=height,
        groups=groups,
        titles=rows.titles,
        total=rows.total,
        labels=tuple(labels),
    )


def place_below(first: Sequence[Lane], second: Sequence[Lane], used: IntColumn, words: tuple[str, str]) -> Rows:
    """Lanes of two traces, the second's below the first's; arguments as for :func:`place_halves`."""
    above, below = place(first, used[used < len(first)]), place(second, used[used >= len(first)] - len(first))
    offset = above.total + 2 * _TITLE_GAP
    titles = [(words[0], 0.0), *((t, y + _TITLE_GAP) for t, y in above.titles)]
    titles += [(words[1], offset), *((t, y + offset + _TITLE_GAP) for t, y in below.titles)]
    shift = (_TITLE_GAP, offset + _TITLE_GAP)
    return Rows(
        top=np.concatenate([above.top + shift[0], below.top + shift[1]]),
        height=np.concatenate([above.height, below.height]),
        groups=(
            *(Group(g.lane, g.top + shift[0], g.bottom + shift[0]) for g in above.groups),
            *(Group(g.lane + len(first), g.top + shift[1], g.bottom + shift[1]) for g in below.groups),
        ),
        titles=tuple(titles),
        total=below.total + shift[1],
    )


def _half_label(stream: str, words: tuple[str, str], below: bool) -> str:
    name = stream.replace("_", " ")
    if stream != "compute":
        return "" if below else name
    return words[1] if below else f"{name} {words[0]}"
