"""How fast a timeline opens and moves in headless Chromium, and how large its file is.

    python benchmarks/timeline.py [--spans 100000 500000] [--jitter 0.05]

The trace is a simulated Llama-3.1-70B step with as many microbatches as it takes; every kernel is shortened by a random
part of up to ``--jitter``, so that lengths do not repeat (a measured trace). Needs playwright (``pip install
playwright``) and Chromium (``--chromium``, else the one on the path).

Printed: spans, file size, seconds from navigation to the first whole picture, and for a drag and for a zoom the median
and the 95th percentile of the time between frames with the frames a second that this is.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import simpar
from simpar.trace.trace import Spans, Trace
from simpar.view.timeline import timeline

_FRAMES = """() => {
  window.frames_ms = [];
  let last = performance.now();
  const next = (now) => {
    window.frames_ms.push(now - last);
    last = now;
    window.watching = requestAnimationFrame(next);
  };
  window.watching = requestAnimationFrame(next);
}"""
_STOP = "() => { cancelAnimationFrame(window.watching); return window.frames_ms.slice(2); }"


def trace_of(spans: int, jitter: float) -> Trace:
    """A step with at least so many spans."""
    microbatches = 8
    while True:
        plan = {"tp": 8, "pp": 4, "zero": 1, "sequence_parallel": True, "seq_len": 4096}
        plan |= {"global_batch": microbatches * 16}
        trace = simpar.simulate({"model": "llama3.1-70b", "cluster": "h100-sxm:64x8", "plan": plan}).trace
        kernels = trace.kernels()
        if len(kernels) + len(trace.spans) >= spans:
            break
        microbatches = max(microbatches + 1, int(microbatches * spans / (len(kernels) + len(trace.spans))) + 1)
    shrunk = 1 - jitter * np.random.default_rng(1).random(len(kernels))
    changed: Spans = replace(kernels, duration_ns=(kernels.duration_ns * shrunk).astype(np.int64))
    return replace(trace, expand=lambda: changed)


def measure(page: Any, path: Path) -> dict[str, Any]:
    """Opens a file, drags, and zooms."""
    page.goto(path.as_uri())
    page.wait_for_selector("body.ready", timeout=60_000)
    opened = page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done(performance.now())))")
    box = page.locator("#lanes").bounding_box()
    x, y = box["x"] + 0.6 * box["width"], box["y"] + 40
    page.evaluate("() => { const { view } = simpar, w = view.to - view.from; simpar.show(0.3 * w, 0.9 * w); }")
    page.mouse.move(x, y)
    page.evaluate(_FRAMES)
    page.mouse.down()
    for step in range(60):
        page.mouse.move(x - 6 * step, y)
    page.mouse.up()
    pan = page.evaluate(_STOP)
    page.evaluate(_FRAMES)
    for step in range(40):
        page.mouse.wheel(0, -120 if step < 20 else 120)
    page.wait_for_timeout(100)
    return {"open_s": opened / 1000, "pan_ms": pan, "zoom_ms": page.evaluate(_STOP)}


def frames_text(name: str, frames: Sequence[float]) -> str:
    """Median and 95th percentile."""
    ordered = sorted(frames)
    median, late = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{name} {median:.1f} ms median, {late:.1f} ms p95 ({1000 / statistics.mean(ordered):.0f} frames/s)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line per size."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--spans", type=int, nargs="+", default=[100_000, 500_000])
    parser.add_argument("--jitter", type=float, default=0.05)
    parser.add_argument("--chromium", default=shutil.which("chromium") or shutil.which("google-chrome"))
    options = parser.parse_args(arguments)
    try:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - nothing else here needs it
    except ImportError:
        print("this needs playwright; pip install playwright", file=sys.stderr)
        return 1
    if not options.chromium:
        print("this needs Chromium; name it with --chromium", file=sys.stderr)
        return 1
    with sync_playwright() as play, tempfile.TemporaryDirectory() as folder:
        browser = play.chromium.launch(executable_path=options.chromium, args=["--no-sandbox", "--disable-gpu"])
        for spans in options.spans:
            path = Path(folder) / f"{spans}.html"
            trace = trace_of(spans, options.jitter)
            timeline(trace, title=f"{spans:,} spans").write_html(path)
            context = browser.new_context(viewport={"width": 1400, "height": 900}, offline=True)
            found = measure(context.new_page(), path)
            context.close()
            count = len(trace.spans) + len(trace.kernels())
            print(
                f"{count:,} spans: {path.stat().st_size / 1e6:.2f} MB, open {found['open_s']:.2f} s, "
                f"{frames_text('pan', found['pan_ms'])}, {frames_text('zoom', found['zoom_ms'])}"
            )
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
