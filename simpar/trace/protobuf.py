"""A trace in Perfetto's own format: half the size of its JSON, with tracks in an explicit order.

Only the few messages that are written are declared here, with the field numbers of Perfetto's public schema
(github.com/google/perfetto, protos/perfetto/trace: trace.proto, trace_packet.proto, track_event/*.proto,
interned_data.proto); the ``protobuf`` package does the encoding.
"""

import gzip
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from simpar.errors import JobError
from simpar.trace.export import MAX_FLOWS, counters, crossings, write_whole
from simpar.trace.trace import KINDS, NONE, Spans, Trace, spans_from_columns

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4
_EXPLICIT = 3  # ChildTracksOrdering
_CLEARED, _NEEDED = 1, 2  # SequenceFlags of interned data
_BYTES, _COUNT = 3, 2  # CounterDescriptor.Unit
_ROOT = 1  # uuid of the track above all
_ARGUMENTS = ("microbatch", "chunk", "layer", "bytes", "flop")

# message: {field: (number, type, repeated)}; a type that begins with a capital is a message
_SCHEMA: dict[str, dict[str, tuple[int, str, bool]]] = {
    "Trace": {"packet": (1, "TracePacket", True)},
    "TracePacket": {
        "timestamp": (8, "uint64", False),
        "trusted_packet_sequence_id": (10, "uint32", False),
        "track_event": (11, "TrackEvent", False),
        "interned_data": (12, "InternedData", False),
        "sequence_flags": (13, "uint32", False),
        "track_descriptor": (60, "TrackDescriptor", False),
    },
    "TrackDescriptor": {
        "uuid": (1, "uint64", False),
        "name": (2, "string", False),
        "parent_uuid": (5, "uint64", False),
        "counter": (8, "CounterDescriptor", False),
        "child_ordering": (11, "int32", False),
        "sibling_order_rank": (12, "int32", False),
    },
    "CounterDescriptor": {"unit": (3, "int32", False), "unit_name": (6, "string", False)},
    "TrackEvent": {
        "category_iids": (3, "uint64", True),
        "debug_annotations": (4, "DebugAnnotation", True),
        "type": (9, "int32", False),
        "name_iid": (10, "uint64", False),
        "track_uuid": (11, "uint64", False),
        "double_counter_value": (44, "double", False),
        "flow_ids": (47, "fixed64", True),
        "terminating_flow_ids": (48, "fixed64", True),
    },
    "DebugAnnotation": {
        "name_iid": (1, "uint64", False),
        "int_value": (4, "int64", False),
        "double_value": (5, "double", False),
    },
    "InternedData": {
        "event_categories": (1, "Interned", True),
        "event_names": (2, "Interned", True),
        "debug_annotation_names": (3, "Interned", True),
    },
    "Interned": {"iid": (1, "uint64", False), "name": (2, "string", False)},
}


def to_protobuf(trace: Trace, path: str | Path, *, kernels: bool = False) -> None:
    """Writes a ``.pb`` (``.pftrace``) for ui.perfetto.dev: what its JSON has, on tracks in the order of the lanes.

    Args:
        trace: what to write.
        path: the file; gzipped (reproducibly) if its name ends in ``.gz``.
        kernels: also write the kernels, nested in their operations.

    Raises:
        JobError: the protobuf package is not installed.
        OutputError: the file cannot be written.
    """
    message = messages()
    document = message["Trace"]()
    document.packet.extend(_packets(trace, message, kernels=kernels))
    content = document.SerializeToString(deterministic=True)
    write_whole(path, gzip.compress(content, 9, mtime=0) if Path(path).name.endswith(".gz") else content)


@cache
def messages() -> dict[str, Any]:
    """Classes of the messages.

    Raises:
        JobError: the protobuf package is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # noqa: PLC0415 - an extra
    except ImportError:
        raise JobError(
            "Perfetto's protobuf needs the package protobuf, which is not installed; pip install 'simpar[protobuf]', "
            "or write .json.gz"
        ) from None
    file = descriptor_pb2.FileDescriptorProto(name="simpar/perfetto.proto", package="simpar.perfetto", syntax="proto2")
    field_type = descriptor_pb2.FieldDescriptorProto
    for name, fields in _SCHEMA.items():
        declared = file.message_type.add(name=name)
        for field, (number, kind, repeated) in fields.items():
            added = declared.field.add(name=field, number=number, label=3 if repeated else 1)
            if kind[0].isupper():
                added.type, added.type_name = field_type.TYPE_MESSAGE, f".simpar.perfetto.{kind}"
            else:
                added.type = getattr(field_type, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"simpar.perfetto.{name}")) for name in _SCHEMA
    }


def _packets(trace: Trace, message: dict[str, Any], *, kernels: bool) -> Iterator[Any]:
    packet = message["TracePacket"]
    sequence = {"trusted_packet_sequence_id": 1, "sequence_flags": _NEEDED}
    spans = trace.spans
    names = {text: iid for iid, text in enumerate(dict.fromkeys(_titles(trace)), 1)}
    first = packet(trusted_packet_sequence_id=1, sequence_flags=_CLEARED)
    interned = first.interned_data
    for iid, kind in enumerate(KINDS, 1):
        interned.event_categories.add(iid=iid, name=kind)
    for text, iid in names.items():
        interned.event_names.add(iid=iid, name=text)
    for iid, argument in enumerate(_ARGUMENTS, 1):
        interned.debug_annotation_names.add(iid=iid, name=argument)
    yield first
    tables = (spans, *((trace.kernels(),) if kernels else ()))
    changes = list(counters(trace, tables))
    yield from _tracks(trace, packet, dict.fromkeys((rank, name) for name, rank, _, _ in changes))
    flows = _flows(trace)
    both = _joined(*tables) if kernels else spans
    for lane in range(len(trace.lanes)):
        for row, begins, time in _nested(both, lane):
            event: dict[str, Any] = {"track_uuid": _lane_uuid(lane)}
            if begins:
                title = _title(trace, both, row)
                event |= {"type": _BEGIN if both.duration_ns[row] else _INSTANT, "name_iid": names[title]}
                event |= {"category_iids": [int(both.kind[row]) + 1], "debug_annotations": _annotations(both, row)}
                event |= flows.get(row, {}) if row < len(spans) else {}
            else:
                event["type"] = _END
            yield packet(timestamp=time, track_event=event, **sequence)
    for name, rank, time, value in changes:
        event = {"type": _COUNTER, "track_uuid": _counter_uuid(rank, name), "double_counter_value": value}
        yield packet(timestamp=time, track_event=event, **sequence)


def _lane_uuid(lane: int) -> int:
    return 1_000_000 + lane


def _rank_uuid(rank: int) -> int:
    return 2_000_000_000 + rank


def _counter_uuid(rank: int, name: str) -> int:
    return (rank + 1 << 40) + sum(byte << (8 * place) for place, byte in enumerate(name.encode()[-5:]))


def _tracks(trace: Trace, packet: Any, shown: Iterable[tuple[int, str]]) -> Iterator[Any]:
    """Ranks by stage, their lanes, then their counters, in this order."""

    def track(uuid: int, name: str, parent: int, order: int, **more: Any) -> Any:
        described = {"uuid": uuid, "name": name, "child_ordering": _EXPLICIT, "sibling_order_rank": order, **more}
        if parent:
            described["parent_uuid"] = parent
        return packet(track_descriptor=described, trusted_packet_sequence_id=1)

    yield track(_ROOT, "step", 0, 0)
    ranks = {lane.rank: lane for lane in reversed(trace.lanes)}
    for order, lane in enumerate(sorted(ranks.values(), key=lambda lane: (lane.stage, lane.rank))):
        copies = f" ×{lane.replicas} equal" if lane.replicas > 1 else ""
        yield track(_rank_uuid(lane.rank), f"stage {lane.stage} · GPU {lane.rank}{copies}", _ROOT, order)
    for index, lane in enumerate(trace.lanes):
        yield track(_lane_uuid(index), lane.stream, _rank_uuid(lane.rank), index)
    for order, (rank, name) in enumerate(shown, len(trace.lanes)):
        unit = {"unit": _BYTES} if name.startswith("memory") else {"unit": _COUNT, "unit_name": "%"}
        yield track(_counter_uuid(rank, name), name, _rank_uuid(rank), order, counter=unit)


def _titles(trace: Trace) -> Iterator[str]:
    for kind in KINDS:
        yield kind
        yield from (f"{kind}: {name}" for name in trace.names if name not in ("", kind))


def _title(trace: Trace, spans: Spans, row: int) -> str:
    kind, name = KINDS[spans.kind[row]], trace.names[spans.name[row]]
    return kind if name in ("", kind) else f"{kind}: {name}"


def _annotations(spans: Spans, row: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for iid, name in enumerate(_ARGUMENTS, 1):
        if name in ("bytes", "flop"):
            value = float((spans.nbytes if name == "bytes" else spans.flop)[row])
            if value:
                found.append({"name_iid": iid, "double_value": value})
        elif getattr(spans, name)[row] != NONE:
            found.append({"name_iid": iid, "int_value": int(getattr(spans, name)[row])})
    return found


def _flows(trace: Trace) -> dict[int, dict[str, list[int]]]:
    """Arrows from and to operations, by row."""
    found: dict[int, dict[str, list[int]]] = {}
    rows, before = crossings(trace)
    for row, source in zip(rows[:MAX_FLOWS].tolist(), before[:MAX_FLOWS].tolist(), strict=True):
        found.setdefault(source, {}).setdefault("flow_ids", []).append(row + 1)
        found.setdefault(row, {}).setdefault("terminating_flow_ids", []).append(row + 1)
    return found


def _joined(operations: Spans, kernels: Spans) -> Spans:
    return spans_from_columns(
        {n: np.concatenate([getattr(operations, n), getattr(kernels, n)]) for n in Spans.__dataclass_fields__}
    )


def _nested(spans: Spans, lane: int) -> Iterator[tuple[int, bool, int]]:
    """Begins and ends of a lane's spans in order of time, a child inside its parent: row, whether it begins, when."""
    rows = np.flatnonzero(spans.lane == lane)
    rows = rows[np.lexsort((rows, -spans.duration_ns[rows], spans.start_ns[rows]))]
    opened: list[tuple[int, int]] = []
    for row, start, end in zip(rows.tolist(), spans.start_ns[rows].tolist(), spans.end_ns[rows].tolist(), strict=True):
        while opened and opened[-1][1] <= start:
            closed, at = opened.pop()
            yield closed, False, at
        yield row, True, start
        if end > start:
            opened.append((row, min(end, opened[-1][1]) if opened else end))
    while opened:
        closed, at = opened.pop()
        yield closed, False, at
