"""A headless browser that may reach nothing but this machine, or a reason why there is none."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
