"""A torch profiler trace, turned into kernel samples and into the measured step as a :class:`simpar.trace.trace.Trace`.

On a GPU the spans are what ran on its streams; a kernel's shape is that of the operator which launched it. In a profile
without devices the operators themselves are the spans: the innermost ones that compute, one lane a host thread.
Collectives become spans only, not samples: their kernels' time includes waiting for the other ranks.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from calibrate.errors import MeasurementError
from calibrate.importers.kineto_events import Event, Profile, Step, external_id, load_profile, no_garbage_collection
from calibrate.importers.kineto_kernels import communication_bytes, is_one_kernel, kernel_of, kind_by_name
from calibrate.importers.kineto_lanes import lane_names, separate
from calibrate.importers.source import warn
from calibrate.samples import KernelSample, Measurements
from simpar.model.work import Kernel
from simpar.trace.trace import COMMUNICATION_KINDS, KINDS, NONE, Lane, MemoryEvents, Trace, spans_from_columns

# Operators that only rename, allocate or record; they take host time, and compute nothing.
_BOOKKEEPING = {
    "aten::_local_scalar_dense",
    "aten::_reshape_alias",
    "aten::_unsafe_view",
    "aten::alias",
    "aten::as_strided",
    "aten::chunk",
    "aten::contiguous",
    "aten::detach",
    "aten::detach_",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::expand",
    "aten::expand_as",
    "aten::flatten",
    "aten::is_nonzero",
    "aten::item",
    "aten::lift_fresh",
    "aten::linear",
    "aten::matmul",
    "aten::movedim",
    "aten::narrow",
    "aten::permute",
    "aten::reshape",
    "aten::resize_",
    "aten::resolve_conj",
    "aten::resolve_neg",
    "aten::result_type",
    "aten::scaled_dot_product_attention",
    "aten::select",
    "aten::set_",
    "aten::size",
    "aten::slice",
    "aten::split",
    "aten::squeeze",
    "aten::t",
    "aten::to",
    "aten::transpose",
    "aten::unbind",
    "aten::unflatten",
    "aten::unsafe_view",
    "aten::unsqueeze",
    "aten::view",
    "aten::view_as",
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A span before it has a lane: what ran, and what it is."""

    event: Event
    name: str
    kind: str
    kernel: Kernel | None
    nbytes: float
    issued_ns: int


@no_garbage_collection()
def kineto_steps(path: str | Path) -> tuple[int, ...]:
    """Numbers of the complete ``ProfilerStep#`` annotations of a trace, in time order; empty if it has none.

    Raises:
        MeasurementError: as :func:`read_kineto`.
    """
    return tuple(step.number for step in load_profile(path).steps)


@no_garbage_collection()
def read_kineto(path: str | Path) -> Measurements:
    """Kernel samples of every operator whose shape was recorded: the median of each distinct kernel.

    Args:
        path: what ``export_chrome_trace`` of a profile with ``record_shapes=True`` wrote, plain or gzipped.

    Raises:
        MeasurementError: if the file is no JSON (with the offset) or no trace, or nothing ran.
    """
    profile = load_profile(path)
    times: dict[Kernel, list[int]] = defaultdict(list)
    if profile.on_device:
        for operator, kernels in _kernels_by_operator(profile):
            shape = kernel_of(operator.name, operator.args)
            if shape is not None and not any(_crosses_the_bus(kernel) for kernel in kernels):
                # a split product and its reduction are one product
                times[shape].append(sum(kernel.duration_ns for kernel in kernels))
    else:
        for event in _computing(profile.operators):
            shape = kernel_of(event.name, event.args)
            if shape is not None:
                times[shape].append(event.duration_ns)
    if not times:
        _require_events(profile)
        warn(f"{path}: no operator with a recorded shape; profile with record_shapes=True to get kernel samples")
    where = Path(path).name
    return Measurements(
        kernels=tuple(
            KernelSample(kernel, median(found) * 1e-9, f"{where} (median of {len(found)})", "torch")
            for kernel, found in times.items()
            if median(found) > 0
        ),
        provenance={
            "format": "kineto",
            "file": str(path),
            "device": profile.device or "cpu",
            "rank": str(profile.rank),
            "steps": ", ".join(str(step.number) for step in profile.steps),
        },
    )


@no_garbage_collection()
def read_kineto_trace(path: str | Path, *, step: int | None = None) -> Trace:
    """The measured step of one rank, with a span for each kernel.

    Kinds follow names, so forward and backward are not told apart; what runs during the optimizer's step has kind
    ``optimizer``. A step holds what the host issued during its ``ProfilerStep#`` annotation, and is as long as that
    annotation, or as what ran for it if that took longer. Without annotations the whole trace is the step.

    Args:
        path: one rank's trace, plain or gzipped.
        step: number of the annotation; None means the last complete one.

    Raises:
        MeasurementError: if the file cannot be read, the step is not in it, or nothing ran in the step.
    """
    profile = load_profile(path)
    chosen = _choose(profile, step)
    pieces = _pieces(profile)
    if chosen is not None:
        pieces = [p for p in pieces if chosen.start_ns <= p.issued_ns < chosen.end_ns]
    if not pieces:
        _require_events(profile)
        raise MeasurementError(f"{path}: nothing ran in step {chosen.number if chosen else 0}; choose another step")
    return _trace(profile, pieces, chosen)


def _choose(profile: Profile, step: int | None) -> Step | None:
    if step is None:
        return profile.steps[-1] if profile.steps else None
    for candidate in profile.steps:
        if candidate.number == step:
            return candidate
    known = ", ".join(str(s.number) for s in profile.steps) or "none"
    raise MeasurementError(f"{profile.path}: no complete step {step} (complete: {known}); choose one of these")


def _require_events(profile: Profile) -> None:
    if not profile.on_device and not profile.operators:
        raise MeasurementError(
            f"{profile.path}: nothing was recorded, neither kernels nor operators; export the trace after a profiled "
            f"step has ended"
        )


def _kernels_by_operator(profile: Profile) -> Iterable[tuple[Event, list[Event]]]:
    operators = {external_id(op): op for op in profile.operators}
    launched: dict[int, list[Event]] = defaultdict(list)
    for event in profile.on_device:
        number = _operator_id(profile, event)
        if number is not None and number in operators:
            launched[number].append(event)
    return ((operators[number], kernels) for number, kernels in launched.items())


def _operator_id(profile: Profile, event: Event) -> int | None:
    """The operator's id: on the kernel itself, or (older traces) on the call that launched it."""
    number = external_id(event)
    if number is None and (launch := profile.launches.get(event.args.get("correlation", -1))) is not None:
        number = external_id(launch)
    return number


def _pieces(profile: Profile) -> list[_Piece]:
    if not profile.on_device:
        return [_host_piece(profile, event) for event in _computing(profile.operators)]
    operators = {external_id(op): op for op in profile.operators}
    shaped: set[int] = set()
    pieces = []
    # the longest kernel of an operator carries its work, so that sums stay right
    for event in sorted(profile.on_device, key=lambda e: -e.duration_ns):
        number = _operator_id(profile, event)
        operator = operators.get(number) if number is not None else None
        kernel = None
        if operator is not None and number is not None and number not in shaped:
            kernel = kernel_of(operator.name, operator.args)
            shaped.add(number)
        launch = profile.launches.get(event.args.get("correlation", -1))
        issued = launch.start_ns if launch is not None else event.start_ns
        kind = kind_by_name(event.name, event.args)
        if kind not in COMMUNICATION_KINDS and _within(profile.optimizer, issued):
            kind = "optimizer"
        name = operator.name if operator is not None and kind not in COMMUNICATION_KINDS else _short(event.name)
        nbytes = communication_bytes(event.args) if kind in COMMUNICATION_KINDS else _bytes(kernel, event)
        pieces.append(_Piece(event, name, kind, kernel, nbytes, issued))
    return pieces


def _host_piece(profile: Profile, event: Event) -> _Piece:
    kind = kind_by_name(event.name, event.args)
    if kind not in COMMUNICATION_KINDS and _within(profile.optimizer, event.start_ns):
        kind = "optimizer"
    kernel = kernel_of(event.name, event.args)
    nbytes = communication_bytes(event.args) if kind in COMMUNICATION_KINDS else _bytes(kernel, event)
    return _Piece(event, event.name, kind, kernel, nbytes, event.start_ns)


def _crosses_the_bus(event: Event) -> bool:
    """Copies between host and device tell nothing of device memory."""
    return event.category == "gpu_memcpy" and "DtoD" not in event.name


def _bytes(kernel: Kernel | None, event: Event) -> float:
    copied = event.args.get("bytes")
    if kernel is not None:
        return kernel.work.nbytes
    return float(copied) if isinstance(copied, int) else 0.0


def _within(intervals: Sequence[tuple[int, int]], time_ns: int) -> bool:
    """Whether a time lies in one of the intervals, which are ordered and do not nest."""
    index = bisect_right(intervals, (time_ns, 1 << 62)) - 1
    return index >= 0 and time_ns < intervals[index][1]


def _short(name: str) -> str:
    """A kernel's name without its return type, arguments and template parameters."""
    bare = name.removeprefix("void ").split("(", 1)[0]
    return bare.split("<", 1)[0] or name


def _computing(operators: Sequence[Event]) -> list[Event]:
    """The innermost operators that compute, of every thread, by start.

    An operator that we know as one kernel counts as a whole; any other counts if nothing inside it does.
    """
    children: dict[int, list[Event]] = defaultdict(list)
    roots: list[Event] = []
    open_operators: dict[tuple[object, object], list[Event]] = defaultdict(list)
    for event in operators:
        enclosing = open_operators[event.process, event.thread]
        while enclosing and event.start_ns >= enclosing[-1].end_ns:
            enclosing.pop()
        (children[id(enclosing[-1])] if enclosing else roots).append(event)
        enclosing.append(event)

    def inner(event: Event) -> list[Event]:
        if is_one_kernel(event.name):
            return [event]
        found = [leaf for child in children[id(event)] for leaf in inner(child)]
        return found or ([event] if _computes(event) else [])

    return sorted((leaf for root in roots for leaf in inner(root)), key=lambda event: event.start_ns)


def _computes(event: Event) -> bool:
    return event.name.startswith(("aten::", "gloo:", "mpi:")) and event.name not in _BOOKKEEPING


def _trace(profile: Profile, pieces: Sequence[_Piece], step: Step | None) -> Trace:
    first = min(p.event.start_ns for p in pieces)
    last = max(p.event.end_ns for p in pieces)
    length = max(last - first, step.end_ns - step.start_ns if step else 0)
    # the device lags behind the host, so the window of the step moves with what ran
    origin = min(first, max(step.start_ns if step else first, last - length))
    streams: dict[tuple[object, object], list[_Piece]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda p: (p.event.start_ns, p.event.end_ns)):
        streams[_place(piece)].append(piece)
    names = lane_names({key: [(p.kind, p.event) for p in found] for key, found in streams.items()})
    texts: dict[str, int] = {}
    rows: list[tuple[float, ...]] = []
    for lane, key in enumerate(names):
        times = separate([(p.event.start_ns - origin, p.event.end_ns - origin) for p in streams[key]], profile.path)
        for piece, (start, end) in zip(streams[key], times, strict=True):
            name = texts.setdefault(piece.name, len(texts))
            flop = piece.kernel.work.flop if piece.kernel is not None else 0.0
            rows.append((start, end - start, lane, KINDS.index(piece.kind), name, piece.nbytes, flop))
    rows.sort(key=lambda row: (row[0], row[2]))
    columns = ("start_ns", "duration_ns", "lane", "kind", "name", "nbytes", "flop")
    known = dict(zip(columns, zip(*rows, strict=True), strict=True))
    unknown = dict.fromkeys(("microbatch", "chunk", "layer", "parent", "predecessor"), [NONE] * len(rows))
    nothing = np.zeros(0, np.int64)
    return Trace(
        step_ns=length,
        lanes=tuple(Lane(profile.rank, 0, name) for name in names.values()),
        names=tuple(texts),
        spans=spans_from_columns({**known, **unknown}),
        memory=MemoryEvents(time_ns=nothing, rank=nothing, category=nothing, delta_bytes=nothing),
    )


def _place(piece: _Piece) -> tuple[object, object]:
    """Device and stream, or process and thread; a CPU's collectives run beside the thread that asks for them."""
    event = piece.event
    if event.category == "cpu_op":
        return event.process, "collectives" if piece.kind in COMMUNICATION_KINDS else event.thread
    return event.args.get("device", event.process), event.args.get("stream", event.thread)
