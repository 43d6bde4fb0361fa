"""The live page in a browser: it simulates, tells mistakes beside their fields, compares, and shares by address."""

import builtins
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from browser import browsing

from simpar.cli.app import main
from simpar.errors import JobError

FIRST = {
    "model": "gpt2",
    "cluster": "h100-sxm:1x8",
    "tp": 1,
    "pp": 2,
    "seq_len": 1024,
    "global_batch": 64,
    "sequence_parallel": False,
}


@pytest.fixture
def address() -> Iterator[str]:
    pytest.importorskip("dash", reason="needs dash")
    from werkzeug.serving import make_server  # noqa: PLC0415 - an extra

    from simpar.view.app import HOST, build  # noqa: PLC0415

    server = make_server(HOST, 0, build(FIRST).server, threaded=True)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://{HOST}:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.filterwarnings("default")  # of flask and dash
def test_the_page_simulates_compares_and_shares(address: str) -> None:
    with browsing(offline=False) as tab:

        def put(name: str, value: object) -> None:
            box = tab.locator(f"#field-{name} input").first
            box.fill(str(value))
            box.press("Enter")

        tab.goto(address)
        frame = tab.frame_locator("iframe")
        frame.locator("#title", has_text="gpt2 on 8 h100-sxm · pp=2 dp=4").wait_for()
        put("tp", 3)
        tab.locator("#field-tp .error", has_text="does not divide").wait_for()
        assert "there is a mistake" in tab.locator("#said").inner_text()
        put("tp", 2)
        frame.locator("#title", has_text="tp=2 pp=2 dp=2").wait_for()
        assert tab.locator("#field-tp .error").inner_text() == ""
        tab.click("#keep")
        tab.locator("#kept-text", has_text="A: gpt2").wait_for()
        tab.locator("#field-micro_batch [role=slider]").focus()
        tab.keyboard.press("ArrowRight")
        tab.locator("#figures", has_text="step against A").wait_for()
        tab.get_by_text("A and B").click()
        frame.locator("#title").wait_for()
        tab.wait_for_url("**view=A+and+B")
        shared = tab.url
        assert "micro_batch=2" in shared
        tab.goto("about:blank")
        tab.goto(shared)
        tab.locator("#kept-text", has_text="tp=2 pp=2 dp=2").wait_for()
        assert tab.locator("#field-micro_batch input").first.input_value() == "2"
        with tab.expect_download() as got:
            tab.click("#yaml")
        job = yaml.safe_load(Path(got.value.path()).read_text(encoding="utf-8"))
        assert (job["model"], job["plan"]["micro_batch"], job["plan"]["tp"]) == ("gpt2", 2, 2)
        with tab.expect_download() as got:
            tab.click("#html")
        assert 'id="columns"' in Path(got.value.path()).read_text(encoding="utf-8")
        put("cluster", "h100-sxm:2x8")  # its NICs have 400 Gb/s: 25 four times doubled
        tab.locator("#field-nic_gbps input[placeholder='400']").first.wait_for()
        tab.locator("#field-nic_gbps [role=slider][aria-valuenow='4']").wait_for()
        assert tab.locator("#field-nic_gbps input").first.input_value() == ""
        tab.locator("#dark input").check()
        tab.wait_for_function("getComputedStyle(document.body).backgroundColor === 'rgb(17, 20, 24)'")


@pytest.mark.parametrize(("screen", "asked"), [(True, True), (False, True), (True, False)])
def test_the_page_is_served_and_opened_where_there_is_a_screen(
    monkeypatch: pytest.MonkeyPatch, screen: bool, asked: bool
) -> None:
    app = pytest.importorskip("simpar.view.app", reason="needs dash")
    opened: list[str] = []
    told: list[str] = []
    makes, servers = app.make_server, []
    monkeypatch.setattr(
        app, "make_server", lambda *args, **options: servers.append(makes(*args, **options)) or servers[0]
    )
    monkeypatch.setattr(app.webbrowser, "open", opened.append)
    monkeypatch.setattr(app.sys, "platform", "linux")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setenv("DISPLAY", ":0") if screen else monkeypatch.delenv("DISPLAY", raising=False)

    def visit(address: str) -> None:
        told.append(address)
        threading.Thread(target=look, args=(address,)).start()

    def look(address: str) -> None:
        with urlopen(address) as answer:
            told.append(answer.read().decode())
        servers[0].shutdown()

    app.serve(port=0, browser=asked, began=visit)
    assert told[0].startswith("http://127.0.0.1:")
    assert "<html" in told[1]
    assert opened == [told[0]] * (screen and asked)


def test_a_port_that_is_taken_is_refused() -> None:
    app = pytest.importorskip("simpar.view.app", reason="needs dash")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(JobError, match=f"port {port} of 127.0.0.1 cannot be taken .*; choose another with --port"):
            app.serve(port=port)


def test_the_command_without_dash_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name.partition(".")[0] == "dash":
            raise ModuleNotFoundError("No module named 'dash'", name="dash")
        return find(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.delitem(sys.modules, "simpar.view.app", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["app"]) == 2
    assert "simpar app needs dash, which is not installed; pip install 'simpar[app]'" in capsys.readouterr().err
