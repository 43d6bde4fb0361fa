"""A headless browser that may reach nothing but this machine, by playwright or by its command alone."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@contextmanager
def browsing(*, offline: bool) -> Iterator[Any]:
    """A page of playwright; errors of its scripts fail the test."""
    if CHROMIUM is None:
        pytest.skip("needs chromium or google-chrome on the path")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": 1400, "height": 900}, offline=offline)
        page, wrong = context.new_page(), []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
        page.on("request", lambda asked: None if local(asked.url) else wrong.append(asked.url))
        try:
            yield page
        finally:
            browser.close()
        assert not wrong


def local(url: str) -> bool:
    return url.startswith(("file:", "data:", "blob:", "about:", "http://127.0.0.1:"))


def browse(path: Path, folder: Path, script: str, *, prefers: str = "light") -> Any:
    """What a script returns in the opened page, on a system that prefers light or dark pages."""
    probe = folder / "probe.html"
    asked = f"""<script>(async () => {{
      while (!window.simpar) await new Promise((done) => setTimeout(done, 5));
      const answer = await (async () => {{ {script} }})();
      document.body.dataset.answer = JSON.stringify(answer);
    }})().catch((problem) => {{ document.body.dataset.answer = JSON.stringify(String(problem)); }});</script></body>"""
    probe.write_text(path.read_text(encoding="utf-8").replace("</body>", asked), encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
        f"--blink-settings=preferredColorScheme={int(prefers == 'light')}", "--virtual-time-budget=20000",
        "--window-size=1440,900", "--dump-dom", probe.as_uri(),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answer = re.search(r'data-answer="([^"]*)"', ran.stdout)
    assert answer, ran.stdout[-2000:]
    return json.loads(html.unescape(answer[1]))
