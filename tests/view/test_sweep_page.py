"""The page of a sweep: small, whole, and a browser that opens every plan's timeline in it."""

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, browse, browsing

from simpar.cli.app import main
from simpar.errors import JobError
from simpar.job import Job
from simpar.search.run import search
from simpar.search.sweep import Sweep, sweep
from simpar.view.sweep_page import write_plans, write_search_page, write_sweep_page

JOB = Job.model_validate(
    {
        "model": {"base": "gpt2", "layers": 4},
        "cluster": "h100-sxm:1x8",
        "plan": {"zero": 1, "recompute": "full", "global_batch": 32, "seq_len": 512},
    }
)
VARY = {"plan.schedule": ["gpipe", "1f1b", "zb-h1"], "plan.pp": [2, 4, 3], "plan.micro_batch": [1, 2, 4, 8]}


@pytest.fixture(scope="module")
def swept() -> Sweep:
    return sweep(JOB, VARY, workers=1)


@pytest.fixture(scope="module")
def page(swept: Sweep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "sweep.html"
    write_sweep_page(JOB, VARY, swept.rows, path)
    return path


def contents(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    text = path.read_text(encoding="utf-8")
    packed, columns = re.search(r'id="contents">([^<]*)<', text), re.search(r'id="columns">([^<]*)<', text)
    assert packed
    assert columns
    return json.loads(zlib.decompress(base64.b64decode(packed[1]))), json.loads(columns[1])


def test_thirty_six_plans_are_one_small_file_that_fetches_nothing(page: Path, swept: Sweep) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(swept.rows) == 36
    assert page.stat().st_size < 1_000_000
    assert "://" not in text.replace("http://www.w3.org/2000/svg", "")  # the name of SVG, which nobody fetches
    assert "default-src 'none'" in text
    facts, columns = contents(page)
    timed = [n for n, row in enumerate(swept.rows) if "error" not in row]
    assert [int(row) for row in facts["timelines"]] == [int(row) for row in columns] == timed
    assert [row["plan"] for row in facts["rows"]] == [[row[field] for field in VARY] for row in swept.rows]
    for n in timed:
        assert facts["rows"][n]["step_time_s"] == swept.rows[n]["step_time_s"]
        steps = facts["timelines"][str(n)]["steps"]
        assert steps[0]["at"] * 1e-9 == pytest.approx(swept.rows[n]["step_time_s"])


def test_a_browser_opens_chooses_filters_and_turns_dark(page: Path, swept: Sweep) -> None:
    with browsing(offline=True) as tab:
        tab.goto(page.as_uri())
        tab.wait_for_function("window.simpar")
        frame = tab.frame_locator("#timeline")
        frame.locator("body.ready").wait_for()
        fastest = min((row["step_time_s"], n) for n, row in enumerate(swept.rows) if row.get("fits"))
        chosen = tab.evaluate("simpar.page.state.chosen")
        assert swept.rows[chosen]["step_time_s"] == fastest[0]
        other = next(n for n, row in enumerate(swept.rows) if row["plan.schedule"] == "zb-h1" and "error" not in row)
        tab.locator(f"#rows tr[data-row='{other}']").click()
        frame.locator("#title", has_text="zb-h1").wait_for()
        assert "chosen" in tab.locator(f"#plot circle[data-row='{other}']").get_attribute("class")
        tab.locator("#selectors select").first.select_option(label="gpipe")
        frame.locator("#title", has_text="gpipe").wait_for()
        assert tab.locator("#rows tr").count() == 12
        tab.locator("#rows tr", has_text="does not divide").first.click()
        assert "does not divide" in tab.locator("#none").inner_text()
        tab.click("#reset")
        assert tab.locator("#rows tr").count() == 36
        tab.click("#lines")
        timed = sum("error" not in row for row in swept.rows)
        assert tab.locator("#plot path.line").count() == timed
        tab.click("#theme")
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 20, 24)"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome on the path")
@pytest.mark.parametrize("prefers", ["light", "dark"])
def test_page_and_timeline_open_as_the_reader_s_system_prefers_and_turn_together(
    page: Path, prefers: str, tmp_path: Path
) -> None:
    seen = browse(
        page,
        tmp_path,
        """const pause = () => new Promise((done) => setTimeout(done, 5)), frame = document.getElementById("timeline");
        const seen = [], surface = (inside) => getComputedStyle(inside.body).backgroundColor;
        for (let turn = 0; turn < 3; turn++) {
          while (!frame.contentDocument?.body?.classList.contains("ready")) await pause();
          seen.push([surface(document), surface(frame.contentDocument)]);
          frame.contentDocument.body.classList.remove("ready");  // until it is filled anew
          document.getElementById("theme").click();
        }
        return seen;""",
        prefers=prefers,
    )
    light, dark = ["rgb(255, 255, 255)"] * 2, ["rgb(17, 20, 24)"] * 2
    assert seen == ([light, dark, light] if prefers == "light" else [dark, light, dark])


def test_what_timelines_leave_out_for_size_is_said(tmp_path: Path) -> None:
    fields = {"plan.tp": [1, 2]}
    rows = sweep(JOB, fields, workers=1).rows
    write_sweep_page(JOB, fields, rows, tmp_path / "tp.html")
    told = contents(tmp_path / "tp.html")[0]["timelines"]
    assert told["0"]["notes"] == []
    assert told["1"]["notes"] == ["left out for size: tp inside layers ('simpar simulate --timeline' shows all)"]


def test_labels_of_parallel_axes_keep_away_from_the_edge(page: Path, tmp_path: Path) -> None:
    edges = browse(
        page,
        tmp_path,
        """document.getElementById("lines").click();
        const plot = document.getElementById("plot");
        const ends = [...plot.querySelectorAll("text")].map((text) => text.getBoundingClientRect().right);
        return [Math.max(...ends), plot.getBoundingClientRect().right];""",
    )
    assert edges[0] < edges[1] - 4


def test_only_the_best_of_many_plans_have_timelines(swept: Sweep, tmp_path: Path) -> None:
    path, seen = tmp_path / "few.html", []
    rows = [row for row in swept.rows if "error" not in row]
    write_plans(
        rows, lambda _: JOB, path, title="few", most=2, notes=["a note"], progress=lambda *told: seen.append(told)
    )
    facts, columns = contents(path)
    assert len(columns) == 2
    assert facts["notes"] == ["a note", "timelines of the best 2"]
    assert seen == [(0, 2), (1, 2)]


def test_a_page_without_figures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no plan has a step time, so there is no page to write"):
        write_plans([{"tp": 3, "error": "no"}], lambda _: JOB, tmp_path / "none.html", title="none")


def test_a_search_has_a_page_too(tmp_path: Path) -> None:
    found = search("gpt2", "h100-sxm:4", global_batch=64, choices={"recompute": ["none"]}, top=2, workers=1)
    write_search_page(found, tmp_path / "search.html")
    facts, _ = contents(tmp_path / "search.html")
    assert facts["notes"][0] == str(found.counts)
    assert len(facts["rows"]) == len(found.found)


def test_plans_of_a_search_are_called_by_what_changes_something(tmp_path: Path) -> None:
    choices = {"recompute": ["none"], "micro_batch": [8], "tp": [1, 2], "vpp": [1, 2], "pp": [1, 2], "zero": [0, 1]}
    found = search("gpt2", "h100-sxm:4", global_batch=64, choices=choices, prune=False, workers=1)
    write_search_page(found, tmp_path / "search.html")
    texts = [row["text"] for row in contents(tmp_path / "search.html")[0]["rows"]]
    assert len(set(texts)) == len(texts)
    words = {word for text in texts for word in text.split()}
    assert "tp=2" in words
    assert not words & {f"{degree}=1" for degree in ("tp", "pp", "cp", "ep", "etp", "vpp")}


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    words = "sweep --model gpt2 --cluster h100-sxm:4 --set plan.global_batch=16 --vary plan.tp=1,2 --workers 1 --json"
    assert main([*words.split(), "--html", str(tmp_path / "s.html")]) == 0
    assert len(contents(tmp_path / "s.html")[1]) == 2


@pytest.mark.parametrize("words", ["sweep --vary plan.tp=1,2", "search --global-batch 16"])
def test_a_page_that_cannot_be_written_is_told_before_the_work(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--model", "gpt2", "--cluster", "h100-sxm:4", "--html", str(tmp_path / "none" / "s.html")]
    assert main([*words.split(), *job]) == 2
    assert "--html: cannot write" in capsys.readouterr().err
