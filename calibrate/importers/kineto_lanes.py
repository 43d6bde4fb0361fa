"""Streams of a profile as lanes of a trace: their names, and spans that do not overlap."""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from calibrate.importers.kineto_events import Event
from calibrate.importers.source import warn
from simpar.trace.trace import COMMUNICATION_KINDS

Place = TypeVar("Place")

# Descriptions of process groups: mesh_tp of torch's device meshes, TENSOR_MODEL_PARALLEL_GROUP of Megatron.
_GROUPS = (
    ("tp", r"(?:^|_)tp(?:_|$)|tensor"),
    ("pp", r"(?:^|_)pp(?:_|$)|pipeline"),
    ("ep", r"(?:^|_)e?t?ep(?:_|$)|expert"),
    ("cp", r"(?:^|_)cp(?:_|$)|context"),
    ("dp", r"(?:^|_)(?:dp|fsdp|ddp)|data_parallel|shard|replicate"),
)
# Traces in whole microseconds overlap by rounding.
_ROUNDING_NS = 1_000


def lane_names(streams: Mapping[Place, Sequence[tuple[str, Event]]]) -> dict[Place, str]:
    """A name for each stream, in drawing order: ``compute`` for the busiest one, then the others by name.

    A stream of collectives is named after its process group (``tp``, ``dp``, ...) if the trace describes it, else
    ``nccl``; a stream of copies is ``copy``.

    Args:
        streams: per stream, the kind and the event of everything on it.
    """

    def busy(place: Place) -> int:
        return sum(event.duration_ns for kind, event in streams[place] if kind not in COMMUNICATION_KINDS)

    computing = [place for place in streams if any(kind not in COMMUNICATION_KINDS for kind, _ in streams[place])]
    main = max(computing, key=busy, default=None)
    wanted = {place: "compute" if place == main else _name(found) for place, found in streams.items()}
    names: dict[Place, str] = {}
    taken: set[str] = set()
    for place in sorted(streams, key=lambda p: (wanted[p] != "compute", wanted[p], streams[p][0][1].start_ns)):
        name, number = wanted[place], 2
        while name in taken:
            name, number = f"{wanted[place]} {number}", number + 1
        taken.add(name)
        names[place] = name
    return names


def _name(found: Sequence[tuple[str, Event]]) -> str:
    collectives = [event for kind, event in found if kind in COMMUNICATION_KINDS]
    if 2 * len(collectives) > len(found):
        group = str(collectives[0].args.get("Process Group Description", "")).lower()
        known = next((name for name, pattern in _GROUPS if re.search(pattern, group)), "")
        return known or ("gloo" if collectives[0].category == "cpu_op" else "nccl")
    if all(event.category in ("gpu_memcpy", "gpu_memset") for _, event in found):
        return "copy"
    event = found[0][1]
    return "thread" if event.category == "cpu_op" else f"stream {event.args.get('stream', event.thread)}"


def separate(intervals: Sequence[tuple[int, int]], path: str) -> list[tuple[int, int]]:
    """Intervals of one lane, ordered by start, cut so that none begins before the one before it has ended.

    Overlaps beyond rounding (graph launches, concurrent collectives) are cut with a warning.
    """
    made, end, cut = [], 0, 0
    for begun, ended in intervals:
        start = max(begun, end)
        cut += end - begun > _ROUNDING_NS
        end = max(ended, start)
        made.append((start, end))
    if cut:
        warn(f"{path}: {cut} spans overlap others on their stream; the later ones are shortened")
    return made
