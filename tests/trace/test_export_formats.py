"""Other files of a trace: as the PyTorch profiler writes it, Perfetto's protobuf, Parquet."""

import gzip
import json
import re
import sys
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpar.cli.app import main
from simpar.errors import JobError
from simpar.result import Result
from simpar.simulation import simulate
from simpar.trace.export import CSV_HEADER, OutputError
from simpar.trace.formats import FORMATS, check_format, write_trace
from simpar.trace.intervals import intervals, overlap_ns
from simpar.trace.kineto import kineto, to_kineto
from simpar.trace.protobuf import messages
from simpar.trace.table import span_table
from simpar.trace.trace import COMMUNICATION_KINDS, KINDS

JOB = {
    "model": {"base": "llama3-8b", "layers": 4},
    "cluster": "h100-sxm:1x8",
    "plan": {"tp": 2, "pp": 2, "zero": 1, "global_batch": 16, "seq_len": 2048},
}


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(JOB)


def test_a_profile_has_every_kernel_once_with_its_launch(result: Result) -> None:
    trace = result.trace
    rank = trace.lanes[0].rank
    events = kineto(trace, rank)["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") == "cuda_runtime"}
    assert len(launches) == len(kernels)
    assert all(launches[e["args"]["correlation"]]["ts"] <= e["ts"] for e in kernels)
    lanes = [i for i, lane in enumerate(trace.lanes) if lane.rank == rank]
    carried = np.isin(trace.spans.lane, lanes) & np.isin(
        trace.spans.kind, [KINDS.index(k) for k in COMMUNICATION_KINDS]
    )
    expected = int(np.isin(trace.kernels().lane, lanes).sum() + carried.sum())
    assert len(kernels) == expected
    assert {e["name"].partition("_")[0] for e in kernels if "nccl" in e["name"]} == {"ncclDevKernel"}


def test_a_profile_holds_compute_and_overlap_of_the_trace(result: Result) -> None:
    # what a reader of profiles computes, with interval arithmetic of its own
    trace, rank = result.trace, result.ranks[0]
    spans: dict[bool, list[tuple[int, int]]] = defaultdict(list)
    for event in kineto(trace, rank.rank)["traceEvents"]:
        if event.get("cat") == "kernel":
            start = round(event["ts"] * 1000)
            spans[event["name"].startswith("nccl")].append((start, start + round(event["dur"] * 1000)))
    busy = {nccl: intervals(*np.array(found).T) for nccl, found in spans.items()}
    compute_ns = int((busy[False][:, 1] - busy[False][:, 0]).sum())
    own = sum(rank.compute_s.values()) + rank.optimizer_s + rank.interference_s
    assert compute_ns * 1e-9 == pytest.approx(own, rel=1e-6)
    exposed_ns = int((busy[True][:, 1] - busy[True][:, 0]).sum()) - overlap_ns(busy[True], busy[False])
    assert exposed_ns * 1e-9 == pytest.approx(sum(rank.exposed_s.values()), rel=0.25)  # streams overlap each other


def test_a_profile_is_a_folder_that_is_written_again_but_replaces_nothing_else(result: Result, tmp_path: Path) -> None:
    folder = tmp_path / "step.kineto"
    files = to_kineto(result.trace, folder)
    assert [path.name for path in files] == [f"rank-{rank.rank}.json.gz" for rank in result.ranks]
    first = files[0].read_bytes()
    document = json.loads(gzip.decompress(first))
    assert document["distributedInfo"]["rank"] == 0
    assert to_kineto(result.trace, folder)[0].read_bytes() == first
    (folder / "mine.txt").write_text("precious", encoding="utf-8")
    with pytest.raises(OutputError, match="holds something else; choose another name"):
        to_kineto(result.trace, folder)
    with pytest.raises(OutputError, match="create it first"):
        to_kineto(result.trace, tmp_path / "none" / "step.kineto")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.kineto"]


def test_the_rank_of_a_profile_stands_where_readers_look_for_it(result: Result, tmp_path: Path) -> None:
    # HolisticTraceAnalysis takes a folder's files apart by this pattern, before it reads them as JSON
    pattern = re.compile(r'"rank":\s+(\d+)')
    for path in to_kineto(result.trace, tmp_path / "step.kineto"):
        first = pattern.search(gzip.decompress(path.read_bytes()).decode())
        assert first is not None
        assert f"rank-{first[1]}.json.gz" == path.name


@pytest.mark.filterwarnings("ignore")  # of what it asks pandas 3
def test_holistic_trace_analysis_reads_a_profile(result: Result, tmp_path: Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis", reason="needs HolisticTraceAnalysis")
    folder = tmp_path / "step.kineto"
    to_kineto(result.trace, folder)
    table = analysis.TraceAnalysis(trace_dir=str(folder)).get_temporal_breakdown(visualize=False)
    for row, rank in zip(table.itertuples(), result.ranks, strict=True):
        own = sum(rank.compute_s.values()) + rank.optimizer_s + rank.interference_s
        assert row[3] * 1e-6 == pytest.approx(own, rel=0.02)  # whole microseconds a kernel


@pytest.mark.parametrize("kernels", [False, True])
def test_protobuf_nests_spans_and_keeps_the_order_of_tracks(result: Result, tmp_path: Path, kernels: bool) -> None:
    pytest.importorskip("google.protobuf", reason="needs protobuf")
    trace, path = result.trace, tmp_path / "step.pb"
    write_trace(trace, path, kernels=kernels)
    read = messages()["Trace"].FromString(path.read_bytes())
    tracks = [p.track_descriptor for p in read.packet if p.HasField("track_descriptor")]
    names = {track.uuid: track.name for track in tracks}
    assert [track.name for track in tracks[1:3]] == [
        f"stage {rank.stage} · GPU {rank.rank} ×{rank.replicas} equal" for rank in result.ranks
    ]
    texts = {entry.iid: entry.name for p in read.packet for entry in p.interned_data.event_names}
    count = len(trace.spans) + (len(trace.kernels()) if kernels else 0)
    opened: dict[int, list[int]] = defaultdict(list)
    begun, length, clock = 0, 0, defaultdict(int)
    for packet in read.packet:
        event = packet.track_event
        if not packet.HasField("track_event") or event.type == 4:
            continue
        assert packet.timestamp >= clock[event.track_uuid]
        clock[event.track_uuid] = packet.timestamp
        if event.type == 2:
            length += packet.timestamp - opened[event.track_uuid].pop()
        else:
            begun += 1
            assert texts[event.name_iid]
            assert event.track_uuid in names
            if event.type == 1:
                opened[event.track_uuid].append(packet.timestamp)
    assert begun == count
    assert not any(opened.values())
    total = int(trace.spans.duration_ns.sum() + (trace.kernels().duration_ns.sum() if kernels else 0))
    assert length == pytest.approx(total, rel=1e-3)
    counted = [p for p in read.packet if p.HasField("track_event") and p.track_event.type == 4]
    assert len(counted) >= len(trace.memory.time_ns)


def test_protobuf_has_the_field_numbers_of_perfetto(result: Result, tmp_path: Path) -> None:
    published = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2", reason="needs perfetto")
    write_trace(result.trace, tmp_path / "step.pb")
    read = published.Trace.FromString((tmp_path / "step.pb").read_bytes())
    assert read.packet[1].track_descriptor.child_ordering == published.TrackDescriptor.ChildTracksOrdering.EXPLICIT
    flows = sum(len(packet.track_event.terminating_flow_ids) for packet in read.packet)
    assert flows > 0
    assert len(read.SerializeToString()) == (tmp_path / "step.pb").stat().st_size  # nothing was unknown


def test_a_table_has_the_columns_of_the_csv(result: Result, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    write_trace(result.trace, tmp_path / "step.parquet", kernels=True)
    read = parquet.read_table(tmp_path / "step.parquet")
    assert tuple(read.column_names) == CSV_HEADER == tuple(span_table(result.trace))
    assert read.num_rows == len(result.trace.spans) + len(result.trace.kernels())
    assert read["start_ns"].to_pylist()[: len(result.trace.spans)] == result.trace.spans.start_ns.tolist()
    batches = read["microbatch"].to_pylist()
    assert None in batches
    assert -1 not in batches
    assert set(read["level"].to_pylist()) == {"operation", "kernel"}


def test_the_ending_says_the_format(result: Result, tmp_path: Path) -> None:
    for suffix in (".json", ".csv.gz", ".kineto"):
        write_trace(result.trace, tmp_path / f"step{suffix}")
        assert (tmp_path / f"step{suffix}").exists()
    assert check_format("a.b.JSON.GZ") == ".json.gz"
    assert ".pb" in FORMATS
    with pytest.raises(JobError, match=r"'step' does not say in which format to write the trace; end the name with"):
        write_trace(result.trace, "step")


def test_the_command_checks_the_ending_before_the_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--model", "gpt2", "--cluster", "h100-sxm:8", "--json"]
    assert main([*words, "--trace", str(tmp_path / "t.foo")]) == 2
    assert "does not say in which format" in capsys.readouterr().err
    for _ in range(2):  # a folder of its own is written again
        assert main([*words, "--trace", str(tmp_path / "t.kineto")]) == 0
    assert list(tmp_path.iterdir()) == [tmp_path / "t.kineto"]


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("folder.kineto", None, "cannot write 'folder.kineto': it is there and holds something else; choose another"),
        ("folder.KINETO", None, "cannot write 'folder.KINETO': it is there and holds something else; choose another"),
        ("file.kineto", None, "cannot write 'file.kineto': it is there and holds something else; choose another name"),
        ("t.parquet", "pyarrow", "Parquet needs pyarrow, which is not installed; "),
        ("t.pb.gz", "google.protobuf", "Perfetto's protobuf needs the package protobuf, which is not installed; "),
    ],
)
def test_what_keeps_a_trace_from_being_written_is_found_before_the_work(
    said: Any, monkeypatch: pytest.MonkeyPatch, name: str, missing: str | None, message: str
) -> None:
    for folder in ("folder.kineto", "folder.KINETO"):
        Path(folder).mkdir()
        Path(folder, "mine.txt").touch()
    Path("file.kineto").touch()
    if missing is not None:
        messages.cache_clear()
        monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(import_module("simpar.simulation"), "simulate", lambda *_, **__: pytest.fail("in vain"))
    code, _, err = said("simulate", "job.yaml", "--trace", name)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(message)


@pytest.mark.parametrize(("module", "suffix", "extra"), [("pyarrow", ".parquet", "parquet")])
def test_a_missing_package_is_named(
    result: Result, monkeypatch: pytest.MonkeyPatch, module: str, suffix: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(JobError, match=rf"pip install 'simpar\[{extra}\]'"):
        write_trace(result.trace, f"step{suffix}")


def test_missing_protobuf_is_named(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    messages.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(JobError, match=r"pip install 'simpar\[protobuf\]'"):
        write_trace(result.trace, "step.pb")
    messages.cache_clear()
