"""Exports, against the trace that they write: times, names, nesting; and files are whole or not there."""

import csv
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simpar
from simpar.errors import SimparError
from simpar.trace import export
from simpar.trace.export import CSV_HEADER, OutputError, to_csv, to_perfetto
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

# Stage 1 is rank 0 here, so that sorting by stage differs from sorting by rank.
LANES = (
    Lane(0, 1, "compute", 4), Lane(0, 1, "tp", 4), Lane(0, 1, "pp", 4),
    Lane(8, 0, "compute"), Lane(8, 0, "pp"),
)  # fmt: skip
NAMES = ("forward", "backward", "activations to stage 1", "qkv, fused", "")


def spans(*rows: tuple[object, ...]) -> Spans:
    fields = tuple(Spans.__dataclass_fields__)
    return spans_from_columns({field: [row[i] for row in rows] for i, field in enumerate(fields)})


def kind(name: str) -> int:
    return KINDS.index(name)


def small_trace() -> Trace:
    """Two stages, one microbatch: forward, message, forward, backward; kernels with a tp collective."""
    operations = spans(
        (0, 1_000_001, 3, kind("forward"), 0, 0, 0, -1, 0, 5e12, -1, -1),
        (1_000_001, 250, 4, kind("p2p"), 2, 0, -1, -1, 4096, 0, -1, 0),
        (1_000_251, 2_000_000, 0, kind("forward"), 0, 0, 0, -1, 0, 5e12, -1, 1),
        (3_000_251, 4_000_003, 0, kind("backward"), 1, 0, 0, -1, 0, 1e13, -1, 2),
    )
    memory = MemoryEvents(
        time_ns=np.array([0, 0, 1_000_251, 7_000_254]),
        rank=np.array([0, 8, 0, 0]),
        category=np.array([MEMORY_CATEGORIES.index(name) for name in 2 * ["weights"] + 2 * ["activations"]]),
        delta_bytes=np.array([10 * GIB, 12 * GIB, GIB, -GIB]),
    )  # fmt: skip

    def expand() -> Spans:
        return spans(
            (1_000_251, 700, 0, kind("gemm"), 3, 0, 0, 11, 64, 1e9, 2, -1),
            (1_000_951, 300, 1, kind("all_reduce"), 4, 0, 0, 11, 128, 0, 2, -1),
            (1_001_251, 999_000, 0, kind("gemm"), 3, 0, 0, 12, 64, 1e9, 2, -1),
        )

    return Trace(step_ns=7_000_254, lanes=LANES, names=NAMES, spans=operations, memory=memory, expand=expand)


def events(path: Path, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    to_perfetto(small_trace(), tmp_path / "trace.json")
    return tmp_path / "trace.json"


def test_slices_hold_the_operations_with_all_nanoseconds(written: Path) -> None:
    trace, slices = small_trace(), events(written, "X")
    assert [round(event["ts"] * 1000) for event in slices] == trace.spans.start_ns.tolist()
    assert [round(event["dur"] * 1000) for event in slices] == trace.spans.duration_ns.tolist()
    assert [(event["pid"], event["tid"]) for event in slices] == [(8, 0), (8, 1), (0, 0), (0, 0)]
    assert [event["name"] for event in slices] == [
        "forward",
        "p2p: activations to stage 1",
        "forward",
        "backward",
    ]
    assert slices[1]["args"] == {"microbatch": 0, "bytes": 4096.0}
    assert slices[3]["args"] == {"microbatch": 0, "chunk": 0, "flop": 1e13}
    assert '"ts":1000.001' in written.read_text()


def test_processes_are_ranks_in_the_order_of_stages(written: Path) -> None:
    notes = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events(written, "M")}
    assert notes["process_name", 0, 0] == {"name": "stage 1 · GPU 0 ×4 equal"}
    assert notes["process_name", 8, 0] == {"name": "stage 0 · GPU 8"}
    assert notes["process_sort_index", 8, 0]["sort_index"] < notes["process_sort_index", 0, 0]["sort_index"]
    threads = [notes["thread_name", 0, tid]["name"] for tid in range(3)]
    assert threads == ["compute", "tp", "pp"]
    assert [notes["thread_sort_index", 0, tid]["sort_index"] for tid in range(3)] == [0, 1, 2]


def test_counters_add_up_the_memory(written: Path) -> None:
    held = [(e["pid"], e["name"], e["ts"], e["args"]["bytes"]) for e in events(written, "C") if "bytes" in e["args"]]
    assert held == [
        (0, "memory weights", 0.0, 10 * GIB),
        (8, "memory weights", 0.0, 12 * GIB),
        (0, "memory activations", 1000.251, GIB),
        (0, "memory activations", 7000.254, 0),
    ]


def test_arrows_cross_lanes_and_start_inside_their_span(written: Path) -> None:
    starts, ends = events(written, "s"), events(written, "f")
    slices = events(written, "X")
    # Forward to message, message to the next stage's forward; its backward is on the same lane: no arrow.
    assert [(e["pid"], e["tid"], e["id"]) for e in starts] == [(8, 0, 1), (8, 1, 2)]
    assert [(e["pid"], e["tid"], e["id"], e["bp"]) for e in ends] == [(8, 1, 1, "e"), (0, 0, 2, "e")]
    for start, end in zip(starts, ends, strict=True):
        assert start["ts"] <= end["ts"]
        inside = [
            s for s in slices
            if (s["pid"], s["tid"]) == (start["pid"], start["tid"])
            and s["ts"] <= start["ts"] < s["ts"] + s["dur"]
        ]  # fmt: skip
        assert len(inside) == 1
        assert any((s["pid"], s["tid"], s["ts"]) == (end["pid"], end["tid"], end["ts"]) for s in slices)


def test_arrows_are_bounded_and_the_rest_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_FLOWS", 1)
    to_perfetto(small_trace(), tmp_path / "t.json")
    assert len(events(tmp_path / "t.json", "s")) == len(events(tmp_path / "t.json", "f")) == 1
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["flows_left_out"] == 1


def test_document_says_who_made_it(written: Path) -> None:
    document = json.loads(written.read_text())
    assert document["displayTimeUnit"] == "ms"
    assert document["otherData"]["producer"] == f"simpar {simpar.__version__}"
    assert document["otherData"]["step_us"] == 7000.254


def test_slices_of_a_thread_nest(tmp_path: Path) -> None:
    to_perfetto(small_trace(), tmp_path / "t.json", kernels=True)
    slices = events(tmp_path / "t.json", "X")
    assert len(slices) == 4 + 3
    assert [e["name"] for e in slices if e["cat"] in ("gemm", "all_reduce")] == [
        "gemm: qkv, fused", "all_reduce", "gemm: qkv, fused"
    ]  # fmt: skip
    by_thread: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in slices:
        start = round(event["ts"] * 1000)
        by_thread.setdefault((event["pid"], event["tid"]), []).append((start, start + round(event["dur"] * 1000)))
    for intervals in by_thread.values():
        open_ends: list[int] = []
        for start, end in sorted(intervals, key=lambda interval: (interval[0], -interval[1])):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1]
            open_ends.append(end)


@pytest.mark.parametrize("write", [to_perfetto, to_csv])
def test_gz_holds_the_same_text_and_is_reproducible(write: Callable[..., None], tmp_path: Path) -> None:
    for name in ("plain", "a.gz", "b.gz"):
        write(small_trace(), tmp_path / name, kernels=True)
    packed = (tmp_path / "a.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "plain").read_bytes()
    assert packed == (tmp_path / "b.gz").read_bytes()
    assert packed[4:8] == bytes(4)  # no time of writing


def test_csv_has_units_in_its_header_and_one_line_per_span(tmp_path: Path) -> None:
    to_csv(small_trace(), tmp_path / "t.csv", kernels=True)
    text = (tmp_path / "t.csv").read_text()
    assert text.splitlines()[0] == (
        "level,span,start_ns,duration_ns,rank,stage,stream,replicas,kind,name,"
        "microbatch,chunk,layer,size_bytes,work_flop,parent_span,predecessor_span"
    )
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["level"] for row in rows] == ["operation"] * 4 + ["kernel"] * 3
    assert [int(row["start_ns"]) for row in rows[:4]] == small_trace().spans.start_ns.tolist()
    assert rows[1] == dict(
        zip(
            CSV_HEADER,
            ("operation", "1", "1000001", "250", "8", "0", "pp", "1", "p2p", "activations to stage 1",
             "0", "", "", "4096.0", "0.0", "", "0"),
            strict=True,
        )
    )  # fmt: skip
    assert (rows[4]["name"], rows[4]["parent_span"], rows[4]["layer"], rows[4]["span"]) == (
        "qkv, fused",
        "2",
        "11",
        "",
    )


@pytest.mark.parametrize("write", [to_perfetto, to_csv])
def test_an_empty_trace_has_a_valid_file(write: Callable[..., None], tmp_path: Path) -> None:
    nothing = np.zeros(0, dtype=np.int64)
    memory = MemoryEvents(time_ns=nothing, rank=nothing, category=nothing, delta_bytes=nothing)
    write(Trace(step_ns=0, lanes=(), names=(), spans=empty_spans(), memory=memory), tmp_path / "e", kernels=True)
    if write is to_perfetto:
        assert json.loads((tmp_path / "e").read_text())["traceEvents"] == []
    else:
        assert (tmp_path / "e").read_text() == ",".join(CSV_HEADER) + "\n"


@pytest.mark.parametrize("write", [to_perfetto, to_csv])
def test_a_folder_that_is_not_there_is_an_error_with_a_mend(write: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"^cannot write '.*t\.json': there is no folder '.*lost'; create it first$"):
        write(small_trace(), tmp_path / "lost" / "t.json")
    assert issubclass(OutputError, SimparError)
    with pytest.raises(OutputError, match="it is a folder; add a file name"):
        write(small_trace(), tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="there is no folder"):
        write(small_trace(), tmp_path / "file" / "t.json")


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "t.json"
    target.write_text("old")

    def full(source: object, destination: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError, match=r"cannot write '.*t\.json': No space left on device; choose another folder"):
        to_perfetto(small_trace(), target)
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert target.read_text() == "old"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write into every folder")
def test_a_folder_that_may_not_be_written_to_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(OutputError, match="Permission denied; choose another folder"):
            to_csv(small_trace(), tmp_path / "t.csv")
    finally:
        tmp_path.chmod(0o700)
