"""A small maker of traces in the trace's own terms: 1F1B in unit times, without the simulator."""

from collections.abc import Callable

import numpy as np

from simpar.trace.trace import (
    KINDS,
    MEMORY_CATEGORIES,
    Lane,
    MemoryEvents,
    Spans,
    Trace,
    empty_spans,
    spans_from_columns,
)
from simpar.units import GIB

STREAMS = ("compute", "tp", "pp", "dp", "ep")


class Recorder:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.names: list[str] = []

    def name(self, text: str) -> int:
        if text not in self.names:
            self.names.append(text)
        return self.names.index(text)

    def span(self, lane: int, kind: str, start: int, duration: int, *, name: str = "", **more: float) -> int:
        self.rows.append(
            {
                "start_ns": start,
                "duration_ns": duration,
                "lane": lane,
                "kind": KINDS.index(kind),
                "name": self.name(name or kind),
                "microbatch": -1,
                "chunk": -1,
                "layer": -1,
                "nbytes": 0,
                "flop": 0,
                "parent": -1,
                "predecessor": -1,
                **more,
            }
        )
        return len(self.rows) - 1

    def spans(self) -> Spans:
        """The rows by start, predecessors renumbered."""
        if not self.rows:
            return empty_spans()
        columns = {key: np.array([row[key] for row in self.rows]) for key in self.rows[0]}
        order = np.lexsort((columns["lane"], columns["start_ns"]))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        columns["predecessor"] = np.where(columns["predecessor"] >= 0, place[columns["predecessor"].astype(int)], -1)
        return spans_from_columns({key: column[order] for key, column in columns.items()})


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[tuple[str, int]]:
    warm_up = min(stages - 1 - stage, microbatches)
    actions = [("forward", m) for m in range(warm_up)]
    for m in range(microbatches - warm_up):
        actions += [("forward", warm_up + m), ("backward", m)]
    return actions + [("backward", m) for m in range(microbatches - warm_up, microbatches)]


def pipeline_trace(
    stages: int = 4,
    microbatches: int = 8,
    *,
    forward_ns: int = 1_000_000,
    send_ns: int = 60_000,
    replicas: int = 64,
    layers: int = 4,
    memory: bool = True,
) -> Trace:
    """1F1B with backward = 2 forward, messages between stages, then an all-reduce and an optimizer each."""
    lanes = tuple(Lane(8 * s, s, stream, replicas) for s in range(stages) for stream in STREAMS)
    record, width = Recorder(), len(STREAMS)
    actions = [one_f_one_b(s, stages, microbatches) for s in range(stages)]
    done: dict[tuple[str, int, int], tuple[int, int]] = {}
    next_action, clock = [0] * stages, [0] * stages
    events: list[tuple[int, int, str, int]] = []
    for s in range(stages):
        events += [(0, 8 * s, "weights", 10 * GIB), (0, 8 * s, "optimizer", 30 * GIB)]
    while any(next_action[s] < len(actions[s]) for s in range(stages)):
        for s in range(stages):
            while next_action[s] < len(actions[s]):
                kind, m = actions[s][next_action[s]]
                source = s - 1 if kind == "forward" else s + 1
                ready, because = 0, -1
                if 0 <= source < stages:
                    if (kind, source, m) not in done:
                        break
                    ready, because = done[kind, source, m]
                start = max(clock[s], ready)
                duration = forward_ns if kind == "forward" else 2 * forward_ns
                row = record.span(
                    s * width, kind, start, duration, microbatch=m, chunk=0, flop=5e8 * duration,
                    predecessor=because if ready == start else -1,
                )  # fmt: skip
                clock[s] = start + duration
                sign = 1 if kind == "forward" else -1
                events.append((start if sign > 0 else clock[s], 8 * s, "activations", sign * GIB))
                target = s + 1 if kind == "forward" else s - 1
                if 0 <= target < stages:
                    message = record.span(
                        s * width + 2,
                        "p2p",
                        clock[s],
                        send_ns,
                        microbatch=m,
                        nbytes=64 * 2**20,
                        predecessor=row,
                    )
                    done[kind, s, m] = (clock[s] + send_ns, message)
                next_action[s] += 1
    for s in range(stages):
        reduce = record.span(s * width + 3, "all_reduce", clock[s], 2 * forward_ns, nbytes=4 * GIB)
        record.span(s * width, "optimizer", clock[s] + 2 * forward_ns, forward_ns // 2, predecessor=reduce)
        clock[s] += 2 * forward_ns + forward_ns // 2
    events.sort(key=lambda event: event[0])
    spans = record.spans()
    names = (*record.names, "qkv")
    return Trace(
        step_ns=max(clock),
        lanes=lanes,
        names=names,
        spans=spans,
        memory=memory_events(events if memory else []),
        expand=_expansion(spans, layers, len(names) - 1),
    )


def _expansion(spans: Spans, layers: int, name: int) -> Callable[[], Spans]:
    def expand() -> Spans:
        rows = []
        for row in np.flatnonzero(np.isin(spans.kind, [KINDS.index("forward"), KINDS.index("backward")])):
            start, piece = int(spans.start_ns[row]), int(spans.duration_ns[row]) // (4 * layers)
            for k in range(4 * layers):
                kind = ("norm", "gemm", "attention", "all_reduce")[k % 4]
                lane, flop = (1, 0.0) if kind == "all_reduce" else (0, 5e8 * piece)
                rows.append(
                    (start + k * piece, piece, spans.lane[row] + lane, KINDS.index(kind), name,
                     spans.microbatch[row], 0, k // 4, 2**20, flop, row, -1)
                )  # fmt: skip
        columns = dict(zip(Spans.__dataclass_fields__, zip(*rows, strict=True), strict=True))
        return spans_from_columns(columns)

    return expand


def memory_events(events: list[tuple[int, int, str, int]]) -> MemoryEvents:
    columns = list(zip(*events, strict=True)) if events else [(), (), (), ()]
    return MemoryEvents(
        time_ns=np.array(columns[0], dtype=np.int64),
        rank=np.array(columns[1], dtype=np.int64),
        category=np.array([MEMORY_CATEGORIES.index(name) for name in columns[2]], dtype=np.int64),
        delta_bytes=np.array(columns[3], dtype=np.int64),
    )


def trace_of(spans: Spans, lanes: tuple[Lane, ...], step_ns: int, names: tuple[str, ...] = ("",)) -> Trace:
    return Trace(step_ns=step_ns, lanes=lanes, names=names, spans=spans, memory=memory_events([]))
