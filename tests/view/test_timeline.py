"""The timeline figure, against the trace that it draws."""

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
from pipeline_traces import Recorder, memory_events, pipeline_trace, trace_of

from simpar.trace.export import OutputError
from simpar.trace.trace import KINDS, Lane, Trace, empty_spans
from simpar.units import GIB
from simpar.view.bars import MAX_LABELS
from simpar.view.memory_row import memory_lines
from simpar.view.palette import label, palette
from simpar.view.timeline import timeline, write_timeline

LANES = (Lane(0, 0, "compute", 64), Lane(0, 0, "tp"), Lane(8, 1, "compute"))


def bars(figure: go.Figure) -> dict[str, go.Bar]:
    return {trace.name: trace for trace in figure.data if trace.type == "bar"}


def lines(figure: go.Figure) -> list[go.Scatter]:
    return [trace for trace in figure.data if trace.type == "scatter"]


def annotations(figure: go.Figure) -> list[str]:
    return [note.text for note in figure.layout.annotations]


def one_span(**columns: float) -> Trace:
    record = Recorder()
    lane, kind = (
        int(columns.pop("lane", 0)),
        "forward" if not columns.pop("communication", 0) else "all_gather",
    )
    record.span(lane, kind, 250_000, 2_000_000, name="layers 0–11", **columns)
    return trace_of(record.spans(), LANES, 10_000_000, ("layers 0–11",))


def test_one_bar_trace_per_kind_with_the_span_as_base_and_length() -> None:
    trace = pipeline_trace(4, 8)
    drawn = bars(timeline(trace))
    assert {name for name in drawn if not name.startswith("bubble")} == {
        "forward", "backward", "optimizer", "all-reduce", "p2p"
    }  # fmt: skip
    for kind in ("forward", "backward", "optimizer", "p2p"):
        rows = np.flatnonzero(trace.spans.kind == KINDS.index(kind))
        bar = drawn[label(kind)]
        drawn_spans = sorted(zip(bar.base, bar.x, strict=True))
        start_ms, duration_ms = trace.spans.start_ns[rows] * 1e-6, trace.spans.duration_ns[rows] * 1e-6
        expected = sorted(zip(start_ms, duration_ms, strict=True))
        assert np.array(drawn_spans) == pytest.approx(np.array(expected))
        assert np.array_equal(bar.customdata, bar.x)
        assert (bar.orientation, bar.legendgroup) == ("h", kind)


@pytest.mark.parametrize("budget", [300, 5000])
def test_drawn_area_is_busy_time_by_lane_and_kind(budget: int) -> None:
    trace = pipeline_trace(4, 96)
    figure = timeline(trace, budget=budget)
    centres, streams = figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext
    assert streams == ("compute", "tp", "pp", "dp") * 4
    height = [1.0 if stream == "compute" else 0.55 for stream in streams]
    tops = [centre - full / 2 for centre, full in zip(centres, height, strict=True)]
    area: dict[tuple[int, str], float] = defaultdict(float)
    for name, bar in bars(figure).items():
        for x, y, width in zip(bar.x, bar.y, bar.width, strict=True):
            lane = int(np.searchsorted(tops, y)) - 1
            area[lane, name] += float(x) * float(width) / (0.92 * height[lane])
    inside = trace.kernels()
    used = {*trace.spans.lane.tolist(), *inside.lane.tolist()}
    for place, lane in enumerate(lane for lane in range(len(trace.lanes)) if lane in used):
        for kind in range(len(KINDS)):
            # kernels show on the lanes that have no operations
            table = trace.spans if (trace.spans.lane == lane).any() else inside
            mine = (table.lane == lane) & (table.kind == kind)
            busy = table.duration_ns[mine].sum() * 1e-6
            assert area[place, label(KINDS[kind])] == pytest.approx(busy, rel=1e-9)


def test_bubbles_fill_what_the_compute_lanes_leave_and_name_their_cause() -> None:
    trace = pipeline_trace(4, 8)
    idle = {name: bar for name, bar in bars(timeline(trace)).items() if name.startswith("bubble: ")}
    assert set(idle) == {
        "bubble: warm-up", "bubble: dependency", "bubble: cool-down", "bubble: exposed communication"
    }  # fmt: skip
    compute = [lane for lane, described in enumerate(trace.lanes) if described.stream == "compute"]
    busy = trace.spans.duration_ns[np.isin(trace.spans.lane, compute)].sum()
    assert sum(np.sum(bar.x) for bar in idle.values()) == pytest.approx((4 * trace.step_ns - busy) * 1e-6)
    exposed = idle["bubble: exposed communication"].hovertext
    assert any(text.endswith("waits for dp") for text in exposed)
    assert any(text.endswith("waits for pp") for text in exposed)


def test_the_critical_path_is_an_overlay_that_the_legend_toggles(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pipeline_trace(4, 8)
    (path,) = [trace for trace in timeline(trace).data if trace.name == "critical path"]
    assert (path.visible, path.x[0], path.x[-1]) == (True, 0, pytest.approx(trace.step_ns * 1e-6))
    assert (np.diff(path.x) >= -1e-12).all()
    assert not [t for t in timeline(one_span()).data if t.name == "critical path"]  # no predecessors, no path
    monkeypatch.setattr("simpar.view.bars.MAX_LABELS", 1)
    (path,) = [trace for trace in timeline(pipeline_trace(4, 8)).data if trace.name == "critical path"]
    assert path.visible == "legendonly"


def test_links_are_as_busy_as_the_raw_spans() -> None:
    trace = pipeline_trace(4, 8)
    drawn = {line.name: line for line in lines(timeline(trace)) if line.yaxis == "y3"}
    assert set(drawn) == {"tp", "pp", "dp"}
    for name, line in drawn.items():
        mine = [i for i, lane in enumerate(trace.lanes) if lane.stream == name]
        busy = sum(int(table.duration_ns[np.isin(table.lane, mine)].sum()) for table in (trace.spans, trace.kernels()))
        # ranks without messages have no such stream
        ranks = len({i for table in (trace.spans, trace.kernels()) for i in np.unique(table.lane) if i in mine})
        shown = np.sum(np.diff(line.x) * np.asarray(line.y)[:-1]) / 100
        assert shown == pytest.approx(busy * 1e-6 / ranks, rel=1e-6)


def test_links_are_used_by_bytes_over_capacity_where_these_are_known() -> None:
    trace = pipeline_trace(4, 8)
    use = np.full((len(trace.lanes), len(KINDS)), 2e-12)
    known = replace(trace, traffic=lambda: use)
    drawn = {line.name: line for line in lines(timeline(known)) if line.yaxis == "y3"}
    for name, line in drawn.items():
        mine = [i for i, lane in enumerate(trace.lanes) if lane.stream == name]
        tables = (trace.spans, trace.kernels())
        needed_ms = sum(2e-9 * float(table.nbytes[np.isin(table.lane, mine)].sum()) for table in tables)
        ranks = len({i for table in tables for i in np.unique(table.lane) if i in mine})
        shown = np.sum(np.diff(line.x) * np.asarray(line.y)[:-1]) / 100
        assert shown == pytest.approx(needed_ms / ranks, rel=1e-6)
        assert "of its links' capacity" in line.hovertemplate
    assert timeline(known).layout.yaxis3.title.text == "links<br>used %"
    assert timeline(trace).layout.yaxis3.title.text == "links<br>busy %"


def test_lanes_of_several_replicas_are_grouped_by_pipeline() -> None:
    record = Recorder()
    lanes = tuple(Lane(rank, stage, "compute", replicas) for rank, stage, replicas in
                  ((0, 0, 7), (1, 0, 1), (8, 1, 7), (9, 1, 1)))  # fmt: skip
    for lane in range(4):
        record.span(lane, "forward", 10 * lane, 10, microbatch=0)
    figure = timeline(trace_of(record.spans(), lanes, 40, ("forward",)))
    texts = [re.sub("<.*?>", " ", text).split() for text in annotations(figure)]
    assert ["pipeline", "0"] in texts
    assert ["pipeline", "1"] in texts
    height = {" ".join(words): note.y for words, note in zip(texts, figure.layout.annotations, strict=True) if words}
    order = sorted((name for name in height if name.startswith(("pipeline", "stage"))), key=lambda n: height[n])
    assert order == [
        "pipeline 0", "stage 0 GPU 0 ×7 equal", "stage 1 GPU 8 ×7 equal",
        "pipeline 1", "stage 0 GPU 1", "stage 1 GPU 9",
    ]  # fmt: skip


def test_chunks_are_shades_of_their_kind() -> None:
    record = Recorder()
    for chunk in (1, 0, 1):
        record.span(0, "forward", 100 * len(record.rows), 100, microbatch=0, chunk=chunk)
    colours = palette(False)
    (forward,) = [
        bar for name, bar in bars(timeline(trace_of(record.spans(), LANES, 300))).items() if name == "forward"
    ]
    assert list(forward.marker.color) == [colours.kinds["forward"], *["#6C91E6"] * 2]
    assert list(forward.base) == pytest.approx([0.1, 0.0, 0.2])


def test_bars_of_a_large_timeline_carry_no_text() -> None:
    """Case L07: text on every bar costs the browser a minute."""
    drawn = bars(timeline(pipeline_trace(8, 400), budget=5000)).values()
    assert sum(len(bar.x) for bar in drawn) > 1000
    assert {bar.textposition for bar in drawn} == {"none"}


def test_many_spans_keep_the_budget_and_say_what_they_merge() -> None:
    trace = pipeline_trace(8, 400)
    figure = timeline(trace, budget=1500, title="big")
    drawn = bars(figure)
    count = sum(len(bar.x) for bar in drawn.values())
    assert len(trace.spans) > 5000
    assert count <= 1500
    shown = sum(len(bar.x) for name, bar in drawn.items() if not name.startswith("bubble"))
    heading = figure.layout.title.subtitle.text
    count = len(trace.spans) + len(trace.kernels())
    assert heading.startswith(f"{count:,} spans drawn as {shown:,} bars, 1 px = ")
    merged = [text for text in drawn["all-reduce"].hovertext if "spans merged" in text]
    assert merged
    assert re.search(r"<br>\d+ spans merged, \d+ % busy$", merged[0])


def test_text_only_where_it_can_be_read_and_never_on_thousands_of_bars() -> None:
    small = bars(timeline(pipeline_trace(4, 8)))
    assert sorted(small["forward"].text) == sorted(str(m) for m in range(8) for _ in range(4))
    assert set(small["forward"].textposition) == {"inside"}
    assert small["p2p"].textposition == small["all-reduce"].textposition == "none"
    crowd = bars(timeline(pipeline_trace(16, 90), budget=100_000))
    texts = [text for bar in crowd.values() for text in (bar.text or ())]
    assert sum(len(bar.x) for bar in crowd.values()) > 5000
    assert sum(text != "" for text in texts) <= MAX_LABELS
    narrow = crowd["forward"]
    assert narrow.textposition == "none" or set(narrow.textposition) <= {"inside", "none"}


def test_more_wide_bars_than_labels_leaves_the_narrower_without() -> None:
    record = Recorder()
    lanes = tuple(Lane(rank, rank, "compute") for rank in range(20))
    for lane in range(20):
        for m in range(100):
            record.span(lane, "forward", 10_000 * m, 10_000 if lane else 10_001 * (m % 2), microbatch=m % 10)
    figure = timeline(trace_of(record.spans(), lanes, 1_000_001, ("forward",)), budget=100_000)
    assert sum(text != "" for text in bars(figure)["forward"].text) == MAX_LABELS


def test_hover_of_compute_says_work_and_rate() -> None:
    trace = one_span(microbatch=3, chunk=1, layer=7, flop=1.2e12)
    assert bars(timeline(trace))["forward"].hovertext[0].split("<br>") == [
        "<b>forward</b>  2 ms",
        "stage 0 · GPU 0 ×64 · compute",
        "0.250 → 2.250 ms",
        "layers 0–11 · microbatch 3 · chunk 1 · layer 7",
        "1.2 TFLOP · 600 TFLOP/s",
    ]


def test_hover_has_no_exponents() -> None:
    trace = one_span(flop=3.21e15, nbytes=4e12)
    assert bars(timeline(trace))["forward"].hovertext[0].split("<br>")[-2:] == [
        "3,725 GiB · 2,000,000 GB/s",
        "3.21 PFLOP · 1,605,000 TFLOP/s",
    ]


def test_hover_of_communication_says_bytes_and_rate() -> None:
    trace = one_span(lane=1, communication=1, nbytes=2**30)
    assert bars(timeline(trace))["all-gather"].hovertext[0].split("<br>") == [
        "<b>all-gather</b>  2 ms",
        "stage 0 · GPU 0 · tp",
        "0.250 → 2.250 ms",
        "layers 0–11",
        "1 GiB · 537 GB/s",
    ]


def test_lanes_go_by_stage_compute_first_and_empty_ones_are_hidden() -> None:
    record = Recorder()
    lanes = (
        Lane(3, 1, "dp"), Lane(3, 1, "compute"),
        Lane(0, 0, "compute", 64), Lane(0, 0, "tp", 64), Lane(0, 0, "dp", 64), Lane(0, 0, "pp_forward", 64),
    )  # fmt: skip
    for lane in (0, 1, 2, 4, 5):
        record.span(lane, "forward" if lane in (1, 2) else "p2p", 0, 1000)
    figure = timeline(trace_of(record.spans(), lanes, 1000))
    assert sorted(zip(figure.layout.yaxis.tickvals, figure.layout.yaxis.ticktext, strict=True)) == [
        (0.5, "compute"),
        (1.275, "pp forward"),
        (pytest.approx(1.825), "dp"),
        (pytest.approx(2.95), "compute"),
        (pytest.approx(3.725), "dp"),
    ]
    low, high = figure.layout.yaxis.range
    assert low > high  # stage 0 on top
    groups = [text for text in annotations(figure) if "stage" in text]
    assert re.sub("<.*?>", " ", groups[0]).split() == ["stage", "0", "GPU", "0", "×64", "equal"]
    assert re.sub("<.*?>", " ", groups[1]).split() == ["stage", "1", "GPU", "3"]


@pytest.mark.parametrize(
    ("step_ns", "unit", "end"), [(900_000, "µs", 900), (36_000_000, "ms", 36), (5 * 10**9, "s", 5)]
)
def test_the_time_axis_is_numeric_in_a_unit_that_fits(step_ns: int, unit: str, end: float) -> None:
    record = Recorder()
    record.span(0, "forward", 0, step_ns)
    figure = timeline(trace_of(record.spans(), LANES, step_ns))
    assert figure.layout.xaxis.title.text == f"time ({unit})"
    assert figure.layout.xaxis.type in (None, "linear")
    assert list(bars(figure)["forward"].x) == [end]
    assert figure.layout.shapes[-1].x0 == end
    assert figure.layout.xaxis.range[0] < 0 < end < figure.layout.xaxis.range[1]
    assert (figure.layout.yaxis.fixedrange, figure.layout.dragmode) == (True, "pan")


def test_heading_counts_spans_and_names_the_step() -> None:
    figure = timeline(one_span(), title="a plan", subtitle="1F1B")
    assert figure.layout.title.text == "<b>a plan</b>"
    assert figure.layout.title.subtitle.text == "1F1B · 1 span, 1 px = 8.33 µs"
    assert "step 10 ms" in annotations(figure)


def test_kernels_replace_their_operations() -> None:
    figure = timeline(pipeline_trace(2, 2), kernels=True)
    assert {name for name in bars(figure) if not name.startswith("bubble")} == {
        "gemm", "attention", "norm", "optimizer", "all-reduce", "p2p"
    }  # fmt: skip
    assert "qkv · microbatch 0 · chunk 0 · layer 0" in bars(figure)["gemm"].hovertext[0]


def test_memory_row_shows_categories_of_the_fullest_rank_the_others_and_the_capacity() -> None:
    trace = pipeline_trace(4, 8)
    figure = timeline(trace, memory_capacity_bytes=80 * GIB)
    drawn = [line for line in lines(figure) if line.yaxis == "y2"]
    assert [line.name for line in drawn] == [
        "weights",
        "optimizer",
        "activations",
        *["other ranks, all categories"] * 3,
    ]
    # 10 + 30 GiB of weights and optimizer, and in 1F1B at most (stages - stage) microbatches in flight.
    assert [max(line.y) for line in drawn] == [10, 30, 4, 43, 42, 41]
    assert [line.stackgroup for line in drawn[:3]] == ["memory2"] * 3
    assert {line.line.shape for line in drawn} == {"hv"}
    assert [line.showlegend for line in drawn[3:]] == [True, False, False]
    assert "capacity 80 GiB" in annotations(figure)
    assert [shape.y0 for shape in figure.layout.shapes if shape.yref == "y2"] == [80]
    assert figure.layout.yaxis2.range[1] > 80
    assert figure.layout.xaxis.anchor == "y2"


def test_no_memory_row_without_memory_events() -> None:
    figure = timeline(pipeline_trace(2, 2, memory=False), memory_capacity_bytes=80 * GIB)
    assert not [line for line in lines(figure) if line.yaxis == "y2"]
    assert "capacity 80 GiB" not in annotations(figure)
    assert timeline(one_span()).layout.yaxis.domain == (0.0, 1.0)


def test_thinned_memory_keeps_peaks_and_levels() -> None:
    steps = np.random.default_rng(7).integers(-GIB, GIB, 20_000)
    trace = trace_of(empty_spans(), LANES[:1], 20_001)
    events = memory_events([(time, 0, "activations", int(delta)) for time, delta in enumerate(steps, start=1)])
    (line,) = memory_lines(replace(trace, memory=events))
    held = np.cumsum(steps) / GIB
    assert len(line.time_ns) <= 302
    assert (line.held_gib.max(), line.held_gib.min()) == (held.max(), min(held.min(), 0.0))
    assert (line.held_gib[1:-1] == held[line.time_ns[1:-1] - 1]).all()
    assert line.held_gib[-1] == held[-1]
    for end in np.linspace(1, 20_001, 101)[1:-1]:  # where one bin hands over to the next
        shown = line.held_gib[np.searchsorted(line.time_ns, end) - 1]
        assert shown == held[int(np.ceil(end)) - 2]


@pytest.mark.parametrize("dark", [False, True])
def test_empty_and_single_span_traces_have_a_figure(dark: bool, tmp_path: Path) -> None:
    empty = timeline(trace_of(empty_spans(), LANES, 0), dark=dark)
    assert "this trace has no spans" in annotations(empty)
    assert not empty.data
    assert timeline(trace_of(empty_spans(), (), 0), dark=dark).layout.title.subtitle.text.startswith("0 spans")
    figure = timeline(one_span(), dark=dark)
    assert set(bars(figure)) == {"bubble: dependency", "bubble: cool-down", "forward"}
    assert figure.layout.paper_bgcolor == palette(dark).surface
    write_timeline(figure, tmp_path / "one.html")
    assert f"--surface: {palette(dark).surface}" in (tmp_path / "one.html").read_text()


def test_a_span_without_length_is_drawn_and_has_no_rate() -> None:
    record = Recorder()
    record.span(0, "forward", 10, 0, flop=1e9, nbytes=5)
    figure = timeline(trace_of(record.spans(), LANES, 100))
    assert bars(figure)["forward"].hovertext[0].endswith("<br>5 B<br>1 GFLOP")


def test_names_cannot_become_markup() -> None:
    record = Recorder()
    record.span(0, "forward", 0, 10, name="<b>x</b>")
    figure = timeline(trace_of(record.spans(), LANES, 10, ("<b>x</b>",)))
    assert "&lt;b&gt;x&lt;/b&gt;" in bars(figure)["forward"].hovertext[0]


def test_heading_has_the_headline() -> None:
    figure = timeline(one_span(), subtitle="1F1B", headline={"step": "10 ms", "MFU": "40.0%"})
    assert figure.layout.title.subtitle.text == "1F1B · step 10 ms · MFU 40.0% · 1 span, 1 px = 8.33 µs"


def test_writing_into_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"there is no folder '.*nowhere'; create it first"):
        write_timeline(timeline(one_span()), tmp_path / "nowhere" / "t.html")


def test_plotly_s_own_page_does_not_share_either(tmp_path: Path) -> None:
    timeline(one_span()).write_html(tmp_path / "plotly.html", include_plotlyjs="cdn")
    assert '"showSendToCloud": false' in (tmp_path / "plotly.html").read_text()


def test_a_copy_without_the_spans_still_writes_a_safe_page(tmp_path: Path) -> None:
    write_timeline(go.Figure(timeline(one_span(), title="a copy")), tmp_path / "copy.html")
    page = (tmp_path / "copy.html").read_text()
    assert "<title>a copy</title>" in page
    assert "default-src 'none'" in page
    assert '"showSendToCloud": false' in page


def test_a_notebook_shows_the_figure_without_the_button_that_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("plotly.io.show", lambda figure, **options: shown.append(options["config"]))
    timeline(one_span())._ipython_display_()
    assert [config["showSendToCloud"] for config in shown] == [False]
