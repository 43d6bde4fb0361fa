"""A torch profiler trace as events: what ran on the devices, which operator launched it, where steps begin.

Kineto writes the Trace Event Format. Times are µs: whole ones before nanosecond export (Kineto of torch 2.2), with a
fraction since; they are read as decimals, because a double cannot hold nanoseconds since 1970.
"""

import gc
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from calibrate.errors import MeasurementError
from calibrate.importers.source import read_text, warn

_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_RUNTIME = {"cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "xpu_runtime", "privateuse1_runtime"}
# Categories as torch before 1.13 wrote them.
_OLD_CATEGORIES = {"operator": "cpu_op", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "runtime": "cuda_runtime"}
# The device waits, it does not compute: such rows stand on GPU streams too.
_SYNC = re.compile(r"(?:\bSync|Stream Wait Event|Synchroni[sz]e)$")
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)$")


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Something that ran.

    Attributes:
        name: operator, kernel or annotation.
        category: Kineto's category.
        start_ns: on the trace's own clock.
        duration_ns: never negative.
        process: of the host, or the device.
        thread: of the host, or the stream.
        args: what Kineto knows of it.
    """

    name: str
    category: str
    start_ns: int
    duration_ns: int
    process: Any
    thread: Any
    args: Mapping[str, Any]

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True, slots=True)
class Step:
    """One ``ProfilerStep#number`` on the host."""

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One file of the torch profiler: one rank.

    Attributes:
        path: the file, for messages.
        rank: global rank (0 unless the job was distributed).
        device: name of the first device, or an empty string.
        operators: operators on the host, by start.
        on_device: kernels, copies and memsets, by start; without synchronisation.
        launches: runtime calls on the host, by the correlation that their kernels carry.
        steps: complete steps, by start.
        optimizer: intervals of the optimizer's step on the host.
    """

    path: str
    rank: int
    device: str
    operators: tuple[Event, ...]
    on_device: tuple[Event, ...]
    launches: Mapping[int, Event]
    steps: tuple[Step, ...]
    optimizer: tuple[tuple[int, int], ...]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Millions of small records, none of them garbage: looking for some would take three quarters of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def load_profile(path: str | Path) -> Profile:
    """Reads one file, plain or gzipped.

    Events whose end precedes their start (an end that was never written) are left out with a warning.

    Raises:
        MeasurementError: if the file is no JSON (with the offset) or no trace.
    """
    document = _document(read_text(path), str(path))
    listed = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise MeasurementError(
            f"'{path}' has no list 'traceEvents'; pass what torch.profiler's export_chrome_trace wrote"
        )
    events: list[Event] = []
    broken: list[Event] = []
    for index, raw in enumerate(listed):
        if isinstance(raw, dict) and raw.get("ph") == "X":
            event = _event(raw, f"{path}: traceEvents[{index}]")
            (broken if event.duration_ns < 0 else events).append(event)
    if broken:
        warn(f"{path}: {len(broken)} events end before they start, '{broken[0].name}' first; they are left out")
    header = document if isinstance(document, dict) else {}
    return _profile(events, str(path), header)


def _document(text: str, path: str) -> Any:
    try:
        return json.loads(text, parse_float=Decimal)
    except json.JSONDecodeError as problem:
        raise MeasurementError(
            f"{path}:{problem.lineno}: not valid JSON at character {problem.pos} ({problem.msg}), near "
            f"{text[max(problem.pos - 20, 0) : problem.pos + 20]!r}; the trace may be truncated: export it again"
        ) from problem
    except RecursionError as problem:
        raise MeasurementError(f"{path}: JSON nested too deeply to be a trace; pass another file") from problem


def _event(raw: dict[str, Any], where: str) -> Event:
    name, category, args = str(raw.get("name", "")), str(raw.get("cat", "")).lower(), raw.get("args")
    if name.startswith(("gloo:", "mpi:")):
        category = "cpu_op"  # collectives of CPUs are written as annotations of the threads that run them
    start, duration = _ns(raw.get("ts"), where, "ts"), raw.get("dur")
    return Event(
        name,
        _OLD_CATEGORIES.get(category, category),
        start,
        # an event without a duration never ended
        -1 if duration is None else _ns(duration, where, "dur"),
        raw.get("pid"),
        raw.get("tid"),
        args if isinstance(args, dict) else {},
    )


def _ns(value: Any, where: str, field: str) -> int:
    try:
        return int((Decimal(value) * 1000).to_integral_value())
    except (InvalidOperation, TypeError, ValueError, OverflowError) as problem:
        raise MeasurementError(
            f"{where}: {field} is {value!r}, which is no time in µs; export the trace again"
        ) from problem


def _profile(events: list[Event], path: str, header: Mapping[str, Any]) -> Profile:
    events.sort(key=lambda event: (event.start_ns, -event.duration_ns))
    steps: dict[int, Step] = {}
    for event in events:
        match = _STEP.match(event.name)
        # the same annotation is repeated on every stream, as gpu_user_annotation
        if match and not event.category.startswith("gpu") and event.duration_ns > 0:
            steps.setdefault(int(match[1]), Step(int(match[1]), event.start_ns, event.end_ns))
    launches = {}
    for event in events:
        correlation = event.args.get("correlation")
        if event.category in _RUNTIME and isinstance(correlation, int):
            launches[correlation] = event
    properties = header.get("deviceProperties")
    first = properties[0] if isinstance(properties, list) and properties else {}
    distributed = header.get("distributedInfo")
    rank = distributed.get("rank", 0) if isinstance(distributed, dict) else 0
    return Profile(
        path=path,
        rank=rank if isinstance(rank, int) and rank >= 0 else 0,
        device=str(first.get("name", "")) if isinstance(first, dict) else "",
        operators=tuple(e for e in events if e.category == "cpu_op"),
        on_device=tuple(e for e in events if e.category in _DEVICE and not _SYNC.search(e.name)),
        launches=launches,
        steps=tuple(sorted(steps.values(), key=lambda step: step.start_ns)),
        optimizer=_optimizer(events),
    )


def _optimizer(events: Iterable[Event]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (e.start_ns, e.end_ns)
        for e in events
        if e.name.startswith("Optimizer.step#") and not e.category.startswith("gpu")
    )


def external_id(event: Event) -> int | None:
    """What links a kernel to the operator that launched it."""
    found = event.args.get("External id", event.args.get("external id"))
    return found if isinstance(found, int) else None
