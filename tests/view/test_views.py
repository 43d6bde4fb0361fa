"""Bars, memory, roofline and tornado of a result: what they draw is what the result says."""

import importlib.util
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from browser import browsing

from simpar.cli.app import main
from simpar.errors import JobError
from simpar.result import Result
from simpar.simulation import simulate
from simpar.trace.export import OutputError
from simpar.trace.trace import KERNEL_KINDS, KINDS
from simpar.units import GIB
from simpar.view import figure as files
from simpar.view.breakdown import breakdown_bars
from simpar.view.figure import write_figure
from simpar.view.memory_stages import memory_stages
from simpar.view.roofline import points, roofline
from simpar.view.tornado import swings, tornado
from simpar.view.views import VIEWS, view

JOB = {
    "model": {"base": "llama3-8b", "name": "llama3-8b", "layers": 8},
    "cluster": "h100-sxm:2x8",
    "plan": {"tp": 2, "pp": 2, "zero": 1, "sequence_parallel": True, "global_batch": 16, "seq_len": 4096},
}


@pytest.fixture(scope="module")
def result() -> Result:
    return simulate(JOB)


def test_the_bars_of_a_rank_add_up_to_the_step(result: Result) -> None:
    figure = breakdown_bars(result.ranks)
    upper = [bar for bar in figure.data if bar.xaxis == "x"]
    for place in range(len(result.ranks)):
        assert sum(bar.x[place] for bar in upper) == pytest.approx(result.step_time_s, rel=1e-9)
    lower = [bar for bar in figure.data if bar.xaxis == "x2"]
    carried = sum(sum(rank.exposed_s.values()) + sum(rank.hidden_s.values()) for rank in result.ranks)
    assert sum(sum(bar.x) for bar in lower) == pytest.approx(carried)


def test_memory_bars_reach_the_peak_and_the_line_the_capacity(result: Result) -> None:
    capacity = result.job.cluster.device.memory_bytes
    figure = memory_stages(result.footprints, capacity_bytes=capacity)
    for place, footprint in enumerate(result.footprints):
        assert sum(bar.y[place] for bar in figure.data) == pytest.approx(footprint.peak_bytes / GIB)
    assert figure.layout.shapes[0].y0 == capacity / GIB
    assert any(note.text.startswith("capacity") for note in figure.layout.annotations)


def test_memory_above_the_capacity_stands_out(result: Result) -> None:
    figure = memory_stages(result.footprints, capacity_bytes=GIB)
    loud = [note for note in figure.layout.annotations if note.font.color == "#C8102E"]
    assert len(loud) == len(result.footprints) + 1


def test_points_of_the_roofline_hold_all_work_and_time(result: Result) -> None:
    found = points(result.trace)
    kernels = result.trace.kernels()
    weight = np.array([lane.replicas for lane in result.trace.lanes])[kernels.lane]
    mine = np.isin(kernels.kind, [KINDS.index(kind) for kind in KERNEL_KINDS]) & (kernels.nbytes > 0)
    assert sum(p.flop * p.launches for p in found) == pytest.approx(float((weight * kernels.flop)[mine].sum()))
    assert sum(p.seconds for p in found) == pytest.approx(float((weight * kernels.duration_ns)[mine].sum()) * 1e-9)
    assert sum(p.share for p in found) == pytest.approx(1.0)
    device = result.job.cluster.device
    assert all(p.flop_per_s <= device.peak("bf16") for p in found if p.flop)
    assert all(p.bytes_per_s <= device.memory_bytes_per_s for p in found if not p.flop)


def test_the_roof_bends_where_peak_and_bandwidth_meet(result: Result) -> None:
    figure = roofline(result.trace, peaks_flop_per_s={"bf16": 1e15}, memory_bytes_per_s=2e12)
    roof = figure.data[0]
    assert roof.x[1] == 500
    assert roof.y == (roof.x[0] * 2, 1000, 1000)


def test_a_trace_without_kernels_says_so(result: Result) -> None:
    figure = roofline(replace(result.trace, expand=None), peaks_flop_per_s={}, memory_bytes_per_s=1e12)
    assert figure.layout.title.subtitle.text == "this trace has no kernels to show"


def test_a_tornado_is_widest_above_and_brackets_the_step(result: Result) -> None:
    found = swings(result, change=0.1, most=3)
    widths = [swing.worse_s - swing.better_s for swing in found]
    assert widths == sorted(widths, reverse=True)
    for swing in found:
        assert swing.better_s <= result.step_time_s <= swing.worse_s
        assert swing.worse_s <= 1.1 * result.step_time_s * (1 + 1e-6)  # one part of the machine, 10 % slower
    figure = tornado(result, change=0.1, most=1)
    assert [bar.name for bar in figure.data] == ["10% better", "10% worse"]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in VIEWS if kind != "tornado"])
def test_every_view_has_heading_and_surface(result: Result, kind: str, dark: bool) -> None:
    figure = result.view(kind, dark=dark)
    assert "llama3-8b on 16 h100-sxm" in figure.layout.title.text
    assert figure.layout.paper_bgcolor == ("#111418" if dark else "#FFFFFF")
    assert not [trace for trace in figure.data if trace.type.endswith("gl")]  # WebGL is not everywhere


def test_a_view_that_there_is_not_is_named(result: Result) -> None:
    with pytest.raises(JobError, match=r"there is no view 'rooflin'; did you mean 'roofline'\?; take one of timeline"):
        view(result, "rooflin")


def test_pages_and_other_endings(result: Result, tmp_path: Path) -> None:
    write_figure(result.view("memory"), tmp_path / "memory.html")
    page = (tmp_path / "memory.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in page
    write_figure(result.timeline(), tmp_path / "timeline.html")
    assert 'id="columns"' in (tmp_path / "timeline.html").read_text(encoding="utf-8")
    with pytest.raises(JobError, match=r"'\.bmp' is no format of a view; end the name with \.html, \.png"):
        write_figure(result.view("memory"), tmp_path / "memory.bmp")
    with pytest.raises(OutputError, match="there is no folder"):
        write_figure(result.view("memory"), tmp_path / "none" / "memory.html")


@pytest.mark.parametrize("window", [100, 500, 3000])
def test_a_page_fills_the_window_within_reason(result: Result, tmp_path: Path, window: int) -> None:
    figure = result.view("tornado")
    meant = figure.layout.height
    write_figure(figure, tmp_path / "tornado.html")
    assert figure.layout.height == meant  # notebooks show it as it was
    with browsing(offline=True) as tab:
        tab.set_viewport_size({"width": 1000, "height": window})
        tab.goto((tmp_path / "tornado.html").as_uri())
        tab.wait_for_selector(".main-svg")
        drawn = tab.evaluate("document.querySelector('.main-svg').getBoundingClientRect().height")
    assert drawn == pytest.approx(min(max(window, meant), 3 * meant), abs=1)


def test_a_picture_without_kaleido_says_what_to_install(monkeypatch: pytest.MonkeyPatch, result: Result) -> None:
    class Without:
        def to_image(self, **_: object) -> bytes:
            raise ValueError("Image export requires the Kaleido package")

    with pytest.raises(JobError, match=r"pip install 'simpar\[images\]'"):
        files.picture(Without(), "png")
    if importlib.util.find_spec("kaleido") is None:
        with pytest.raises(JobError, match=r"pip install 'simpar\[images\]'"):
            files.picture(result.view("memory"), "png")

    class Blind:
        def to_image(self, **_: object) -> bytes:
            raise RuntimeError("no Chrome\nat all")

    with pytest.raises(JobError, match=r"kaleido cannot draw the picture \(no Chrome\); install chromium"):
        files.picture(Blind(), "png")


def test_a_picture_is_one(result: Result, tmp_path: Path) -> None:
    pytest.importorskip("kaleido", reason="needs kaleido")
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("needs chromium or google-chrome on the path")
    write_figure(result.view("memory"), tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").read_text(encoding="utf-8").startswith("<svg")


def test_the_command_draws_a_view(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: gpt2\ncluster: h100-sxm:8\nplan: {global_batch: 8}\n", encoding="utf-8")
    assert main(["view", str(job), "--kind", "breakdown", "--html", str(tmp_path / "b.html")]) == 0
    assert (tmp_path / "b.html").stat().st_size > 100_000
    assert main(["view", str(job), "--kind", "cake", "--html", str(tmp_path / "c.html")]) == 2
    assert "--kind 'cake': there is no such view; take one of timeline, schedule" in capsys.readouterr().err
    assert main(["view", str(job), "--html", str(tmp_path / "c.txt")]) == 2
    assert "is no format of a view" in capsys.readouterr().err


def test_a_notebook_shows_a_view_without_the_button_that_sends_it(
    result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr("plotly.io.show", lambda figure, *_, **options: shown.append(options))
    for kind in VIEWS:
        if kind != "tornado":
            result.view(kind)._ipython_display_()
    assert len(shown) == len(VIEWS) - 1
    assert all(options["config"]["showSendToCloud"] is False for options in shown)
