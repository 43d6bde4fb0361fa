"""The page of a timeline: what it carries, and what a browser makes of it without a network."""

import base64
import json
import re
import zlib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, browse
from pipeline_traces import pipeline_trace

from simpar.trace.trace import KINDS, Spans, Trace, empty_spans
from simpar.trace.utilisation import busy_share, link_share
from simpar.units import GIB
from simpar.view.compare import compare
from simpar.view.pack import pack, span_columns
from simpar.view.palette import DRAWN_KINDS
from simpar.view.rows import place
from simpar.view.scene import scene
from simpar.view.timeline import timeline, write_timeline

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the path")


def unpacked(manifest: list[Any], text: str) -> dict[str, np.ndarray]:
    """What assets/unpack.js does, in numpy."""
    raw, at, columns = zlib.decompress(base64.b64decode(text)), 0, {}
    for name, kind, count in manifest:
        dtype = np.dtype(f"<{kind}")
        size = dtype.itemsize * count
        shuffled = np.frombuffer(raw[at : at + size], np.uint8).reshape(dtype.itemsize, count)
        columns[name] = np.frombuffer(shuffled.T.tobytes(), dtype)
        at += size
    assert at == len(raw)
    return columns


def read_page(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    page = path.read_text(encoding="utf-8")
    contents = re.search(r'id="contents">(.*?)</script>', page, re.DOTALL)
    columns = re.search(r'id="columns">([^<]*)</script>', page)
    assert contents
    assert columns
    facts = json.loads(contents[1])
    return facts, unpacked(facts["manifest"], columns[1])


def with_jitter(trace: Trace) -> Trace:
    kernels = trace.kernels()
    shrunk = 1 - 0.05 * np.random.default_rng(1).random(len(kernels))
    changed = replace(kernels, duration_ns=(kernels.duration_ns * shrunk).astype(np.int64))
    return replace(trace, expand=lambda: changed)


def test_columns_come_back_as_they_were() -> None:
    columns = {
        "bytes": np.array([0, 255]), "words": np.array([65535, 3]), "signed": np.array([-1, 40_000]),
        "long": np.array([2**40, -(2**35), 0]), "none": np.zeros(0, np.int64), "real": np.array([0.1, -3e9]),
        "single": np.array([1.5], np.float32),
    }  # fmt: skip
    manifest, text = pack(columns)
    back = unpacked(manifest, text)
    assert {name: column.tolist() for name, column in back.items()} == {n: c.tolist() for n, c in columns.items()}
    assert [kind for _, kind, _ in manifest] == ["u1", "u2", "i4", "i8", "u1", "f8", "f4"]


def test_packed_spans_are_the_scene_s() -> None:
    shown = scene(pipeline_trace(3, 5))
    lanes = len(shown.lanes)
    operations, place = span_columns(shown.operations, lanes)
    kernels, _ = span_columns(shown.kernels, lanes, place)
    for columns, table, parents in ((operations, shown.operations, None), (kernels, shown.kernels, place)):
        lane = np.repeat(np.arange(lanes), np.diff(columns["offset"]))
        start = np.zeros(len(lane), np.int64)
        for row in range(len(lane)):
            first = row == columns["offset"][lane[row]]
            start[row] = (0 if first else start[row - 1] + columns["length"][row - 1]) + columns["gap"][row]
        order = np.lexsort((table.end_ns, table.start_ns, table.lane))
        assert lane.tolist() == table.lane[order].tolist()
        assert start.tolist() == table.start_ns[order].tolist()
        parent = np.cumsum(columns["parent"])
        expected = table.parent[order] if parents is None else parents[table.parent[order]]
        assert parent.tolist() == expected.tolist()
        back = np.arange(len(lane)) - columns["back"]
        begun = columns["back"] != 0
        assert (order[back[begun]] == table.predecessor[order][begun]).all()
        assert begun.tolist() == (table.predecessor[order] >= 0).tolist()


def test_the_page_is_one_small_file_that_fetches_nothing(tmp_path: Path) -> None:
    trace = with_jitter(pipeline_trace(8, 400, layers=4))
    figure = timeline(trace, title="a </script> <plan>", headline={"MFU": "41 %"}, memory_capacity_bytes=80 * GIB)
    path = tmp_path / "timeline.html"
    figure.write_html(path)
    page = path.read_text(encoding="utf-8")
    count = len(trace.spans) + len(trace.kernels())
    assert count > 100_000
    assert path.stat().st_size < 3_000_000 * count / 500_000
    assert "://" not in page
    assert not re.search(r"<(script|img|iframe|link)[^>]*(src|href)=", page)
    assert "default-src 'none'" in page
    assert "<title>a &lt;/script&gt; &lt;plan&gt;</title>" in page
    assert page.count("</script>") == 3
    assert "plotly" not in page.lower()
    facts, columns = read_page(path)
    assert (facts["title"], facts["headline"], facts["count"]) == ("a </script> <plan>", [["MFU", "41 %"]], count)
    busy = columns["operations_kind"] < len(KINDS)
    assert busy.sum() + (columns["kernels_kind"] < len(KINDS)).sum() == count
    assert (facts["memory"]["capacity"], facts["memory"]["fullest"]) == (80 * GIB, 0)
    assert [rank["peak"] for rank in facts["memory"]["ranks"]][:2] == [48 * GIB, 47 * GIB]
    write_timeline(figure, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page


@needs_browser
def test_a_browser_cuts_every_window_without_losing_time(tmp_path: Path) -> None:
    trace = with_jitter(pipeline_trace(4, 24, layers=8))
    timeline(trace, title="a plan", memory_capacity_bytes=80 * GIB).write_html(tmp_path / "t.html")
    found = browse(
        tmp_path / "t.html",
        tmp_path,
        """const { page, view } = simpar, areas = {};
        for (const pixels of [300, 1200, 40000]) {
          areas[pixels] = page.lanes.map((_, lane) => simpar.cut(lane, pixels));
        }
        const text = (id) => document.getElementById(id).textContent;
        const [error, legend, scale] = ["title", "legend", "scale"].map(text);
        return { areas, drawn: view.rectangles, error, legend, scale };""",
    )
    assert found["error"] == "a plan"
    assert found["drawn"] > 100
    assert f"{len(trace.spans) + len(trace.kernels()):,} spans" in found["scale"]
    assert "bubble: warm-up" in found["legend"]
    operations, kernels = trace.spans, trace.kernels()
    sizes = []
    for lanes in found["areas"].values():
        sizes.append(sum(len(rectangles) for rectangles in lanes))
        for lane, rectangles in enumerate(lanes):
            area: dict[str, float] = defaultdict(float)
            for kind, start, end, low, high, *_, table in rectangles:
                whole = 1.0 if table == "kernels" and low < 0.65 and trace.lanes[lane].stream == "compute" else None
                # kernels under their operation share the lower part of its lane
                share = (high - low) / 0.64 if whole else min(1.0, (high - low) / (0.34 if low == 0.66 else 1.0))
                area[DRAWN_KINDS[kind]] += (end - start) * share
            for kind, busy in busy_of(operations if has(operations, lane) else kernels, lane).items():
                assert area[kind] == pytest.approx(busy, rel=1e-6), (lane, kind)
    assert sizes == sorted(sizes)  # the wider, the more detail


def has(spans: Spans, lane: int) -> bool:
    return bool((spans.lane == lane).any())


def busy_of(spans: Spans, lane: int) -> dict[str, int]:
    mine = spans.lane == lane
    return {
        KINDS[kind]: int(spans.duration_ns[mine & (spans.kind == kind)].sum()) for kind in np.unique(spans.kind[mine])
    }


@needs_browser
def test_pointer_keys_and_legend_do_what_they_say(tmp_path: Path) -> None:
    timeline(pipeline_trace(4, 8), memory_capacity_bytes=80 * GIB).write_html(tmp_path / "t.html")
    found = browse(
        tmp_path / "t.html",
        tmp_path,
        """const { page, view } = simpar, lanes = document.getElementById("lanes"), answer = {};
        const frame = () => new Promise((done) => setTimeout(done, 40));
        const box = lanes.getBoundingClientRect();
        const at = (type, x, y) => lanes.dispatchEvent(
          new PointerEvent(type, { clientX: box.left + x, clientY: box.top + y, pointerId: 1 }));
        const { operations } = page.tables;
        const message = Array.from(operations.before).findIndex((b, i) => b >= 0 && operations.kind[i] === 0);
        const lane = page.lanes[page.laneOf("operations", message)];
        const middle = (operations.start[message] + operations.end[message]) / 2;
        at("pointermove", view.x(middle), view.y(lane.y + 0.1 * lane.h));
        answer.tip = document.getElementById("tip").innerText;
        answer.hover = [view.hover.row === message, view.hover.table];
        window.dispatchEvent(new KeyboardEvent("keydown", { key: "w" }));
        answer.zoomed = (view.to - view.from) / page.end;
        window.dispatchEvent(new KeyboardEvent("keydown", { key: "0" }));
        answer.whole = [view.from, view.to === page.end];
        const before = page.lanes.reduce((sum, _, i) => sum + simpar.cut(i, 1000).length, 0);
        document.querySelector("#legend button").click();
        answer.fewer = page.lanes.reduce((sum, _, i) => sum + simpar.cut(i, 1000).length, 0) < before;
        document.getElementById("path").click();
        document.getElementById("theme").click();
        answer.path = view.path;
        answer.surface = getComputedStyle(document.documentElement).getPropertyValue("--surface");
        await frame();
        const group = page.groups[2];
        answer.rank = view.memoryRank;
        lanes.setPointerCapture = () => {};
        at("pointerdown", 20, view.y((group.top + group.bottom) / 2));
        at("pointerup", 20, view.y((group.top + group.bottom) / 2));
        answer.other = view.memoryRank;
        return answer;""",
    )
    assert re.search(r"^forward .*\nstage 1 · GPU 8 ×64 · compute\n.*\nmicrobatch 0 · chunk 0\n", found["tip"])
    assert found["hover"] == [True, "operations"]
    assert found["zoomed"] == pytest.approx(0.7)
    assert found["whole"] == [0, True]
    assert found["fewer"]
    assert found["path"] is False
    assert found["surface"].strip() == "#111418"
    assert (found["rank"], found["other"]) == (0, 16)


@needs_browser
@pytest.mark.parametrize("known", [False, True])
def test_the_link_panel_shows_what_the_figure_shows(tmp_path: Path, known: bool) -> None:
    trace = pipeline_trace(4, 8)
    use = np.random.default_rng(3).random((len(trace.lanes), len(KINDS))) * 1e-12
    trace = replace(trace, traffic=lambda: use) if known else trace
    timeline(trace).write_html(tmp_path / "t.html")
    found = browse(
        tmp_path / "t.html",
        tmp_path,
        """const { page } = simpar, shares = linkShares(page, 0, page.end, 40);
        return [page.linkWord, Object.fromEntries([...shares].map(([name, share]) => [name, [...share]]))];""",
    )
    # the page's bins end between nanoseconds, so all times in picoseconds
    edges = np.round(np.linspace(0, 1000 * trace.step_ns, 41)).astype(np.int64)
    tables = tuple(
        replace(t, start_ns=1000 * t.start_ns, duration_ns=1000 * t.duration_ns) for t in (trace.spans, trace.kernels())
    )
    shares = link_share(tables, trace.lanes, edges, 1000 * use) if known else busy_share(tables, trace.lanes, edges)
    assert found[0] == ("used" if known else "busy")
    assert set(found[1]) == set(shares) == {"tp", "pp", "dp"}
    for name, share in shares.items():
        assert found[1][name] == pytest.approx(share.tolist(), rel=1e-5, abs=1e-9)


@needs_browser
def test_streams_and_pipelines_fold_and_come_back(tmp_path: Path) -> None:
    one = pipeline_trace(4, 8)
    timeline(one, memory_capacity_bytes=80 * GIB).write_html(tmp_path / "t.html")
    script = """const { page, view } = simpar, lanes = document.getElementById("lanes"), answer = {};
        lanes.setPointerCapture = () => {};
        const box = lanes.getBoundingClientRect();
        const press = (x, y) => ["pointerdown", "pointerup"].forEach((type) => lanes.dispatchEvent(
          new PointerEvent(type, { clientX: box.left + x, clientY: box.top + y, pointerId: 1 })));
        const shown = () => page.lanes.filter((lane) => lane.h && !view.folds.hides(lane.y)).map((lane) => lane.where);
        answer.all = shown();
        answer.total = view.folds.total;
        const group = page.groups[1], triangle = () => press(9, (view.y(group.top) + view.y(group.bottom)) / 2 - 7);
        triangle();
        answer.one = shown();
        answer.less = view.folds.total;
        // what is under the pointer is what is drawn there
        const met = (lane) => under(view, view.gutter + 50, view.y(lane.y + 0.4 * lane.h)).lane;
        answer.under = page.lanes.map((lane, index) => !lane.h || view.folds.hides(lane.y) || met(lane) === index);
        triangle();
        answer.back = shown();
        document.getElementById("streams").click();
        answer.none = shown();
        window.dispatchEvent(new KeyboardEvent("keydown", { key: "f" }));
        answer.again = shown();
        return answer;"""
    found = browse(tmp_path / "t.html", tmp_path, script)
    rows = place(scene(one).lanes, scene(one).used)
    whole = set(found["all"])
    assert found["total"] == pytest.approx(rows.total)
    assert whole - set(found["one"]) == {t for t in whole if "stage 1 " in t and "compute" not in t}
    fold = rows.stream_stretches(one.lanes)[1]
    assert found["less"] == pytest.approx(rows.total - (fold[1] - fold[0]))
    assert all(found["under"])
    assert found["back"] == found["again"] == found["all"]
    assert set(found["none"]) == {text for text in whole if text.endswith("compute")}


@needs_browser
def test_a_pipeline_folds_below_its_title_and_what_does_not_fit_opens_folded(tmp_path: Path) -> None:
    several = of_several_pipelines(pipeline_trace(4, 8), 4)
    timeline(several).write_html(tmp_path / "t.html")
    script = """const { page, view } = simpar, lanes = document.getElementById("lanes"), answer = {};
        lanes.setPointerCapture = () => {};
        const box = lanes.getBoundingClientRect();
        const shown = () => page.lanes.filter((lane) => lane.h && !view.folds.hides(lane.y)).map((lane) => lane.where);
        answer.opened = shown();
        const [, title, next] = page.titles, gap = view.y(next.top) - view.y(title.top);
        const at = { clientX: box.left + 40, clientY: box.top + view.y(title.top + 0.45), pointerId: 1 };
        for (const type of ["pointerdown", "pointerup"]) lanes.dispatchEvent(new PointerEvent(type, at));
        answer.folded = shown();
        answer.closer = [gap, view.y(next.top) - view.y(title.top), view.unit];
        return answer;"""
    found = browse(tmp_path / "t.html", tmp_path, script)
    assert len(found["opened"]) == 16
    assert all(text.endswith("compute") for text in found["opened"])
    assert len(found["folded"]) == 12
    before, after, unit = found["closer"]
    assert after < before
    assert after < 2.5 * unit  # the title and the gap to the next


def of_several_pipelines(trace: Trace, count: int) -> Trace:
    """The trace with its ranks ``count`` times, as ranks that are not folded."""
    lanes = len(trace.lanes)
    copies = tuple(replace(lane, rank=lane.rank + copy, replicas=1) for copy in range(count) for lane in trace.lanes)

    def repeated(spans: Spans) -> Spans:
        columns = {name: np.tile(getattr(spans, name), count) for name in Spans.__dataclass_fields__}
        columns["lane"] += np.repeat(np.arange(count), len(spans)) * lanes
        for name in ("parent", "predecessor"):
            columns[name][:] = -1
        order = np.argsort(columns["start_ns"], kind="stable")
        return Spans(**{name: column[order] for name, column in columns.items()})

    return replace(trace, lanes=copies, spans=repeated(trace.spans), expand=None)


def test_folds_lie_inside_of_what_they_fold() -> None:
    several = of_several_pipelines(pipeline_trace(3, 4), 2)
    shown = scene(several)
    rows = place(shown.lanes, shown.used)
    for group, (top, bottom) in zip(rows.groups, rows.stream_stretches(shown.lanes), strict=True):
        assert top == pytest.approx(group.top + 1.0)  # below the compute lane
        assert bottom == group.bottom
    first, second = rows.title_stretches
    assert first[0] < rows.groups[0].top + 1e-9
    assert first[1] == rows.groups[2].bottom < rows.titles[1][1] < second[0]
    assert second[1] == rows.total


@needs_browser
def test_a_comparison_and_an_empty_trace_open_too(tmp_path: Path) -> None:
    first = pipeline_trace(3, 4)
    compare(first, with_jitter(first), title="both").write_html(tmp_path / "both.html")
    facts, columns = read_page(tmp_path / "both.html")
    pairs = len(columns["error"])
    # on the middle stage, both messages of a microbatch lie on one lane, and count as one
    assert pairs == len(first.spans) - 4
    assert [step["label"].split(" step ")[0] for step in facts["steps"]] == ["predicted", "measured"]
    assert [step["at"] for step in facts["steps"]] == [first.step_ns] * 2
    script = """const { view } = simpar, title = document.getElementById("title").textContent;
        return [title, view.rectangles > 0, !!view.panels.errors];"""
    assert browse(tmp_path / "both.html", tmp_path, script) == ["both", True, True]
    empty = replace(first, spans=empty_spans(), expand=None, memory=replace(first.memory, **{
        name: np.zeros(0, np.int64) for name in ("time_ns", "rank", "category", "delta_bytes")
    }))  # fmt: skip
    timeline(empty, title="nothing").write_html(tmp_path / "empty.html")
    assert browse(tmp_path / "empty.html", tmp_path, script) == ["nothing", False, False]


@needs_browser
@pytest.mark.parametrize("prefers", ["light", "dark"])
@pytest.mark.parametrize("asked", [False, True])
def test_a_page_opens_as_the_reader_s_system_prefers_and_can_be_turned(
    asked: bool, prefers: str, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    timeline(pipeline_trace(), dark=asked).write_html(path)
    found = browse(
        path,
        tmp_path,
        """const style = document.documentElement.style, body = getComputedStyle(document.body), seen = [];
        const names = Object.keys(simpar.view.colours).filter((name) => typeof simpar.view.colours[name] === "string");
        for (let turn = 0; turn < 3; turn++) {
          seen.push([body.backgroundColor, simpar.view.colours.surface, style.colorScheme]);
          document.getElementById("theme").click();
        }
        for (const name of names) style.removeProperty(`--${name}`);  // as before the script has run
        return { seen, before: body.backgroundColor };""",
        prefers=prefers,
    )
    light, dark = ["rgb(255, 255, 255)", "#FFFFFF", "light"], ["rgb(17, 20, 24)", "#111418", "dark"]
    first, second = (light, dark) if prefers == "light" and not asked else (dark, light)
    assert found == {"seen": [first, second, first], "before": first[0]}
