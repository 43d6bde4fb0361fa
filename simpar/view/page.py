"""Figures as files that open anywhere: one HTML page with all inside, which asks no network for anything.

plotly.js is some 4.8 MB of text; the page carries it (and the figure) gzipped in base64, and the browser
unpacks it with ``DecompressionStream``, which every current browser has, also for files on disk. A content
security policy in the page forbids it to load or send anything.
"""

import base64
import gzip
import json
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from simpar.trace.export import write_whole

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline'; \
style-src 'unsafe-inline'; img-src data: blob:; form-action 'none'; base-uri 'none'">
<title>{title}</title>
<style>
html, body {{ margin: 0; background: {surface}; color: {text}; font-family: system-ui, sans-serif; }}
#figure {{ width: 100%; min-width: 640px; height: clamp({height}px, 100vh, {tallest}px); }}
#message {{ padding: 2em; }}
</style>
</head>
<body>
<div id="message">Loading …</div>
<div id="figure"></div>
<script type="text/plain" id="library">{library}</script>
<script type="text/plain" id="content">{content}</script>
<script>
const unpack = async (id) => {{
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}};
(async () => {{
  const library = document.createElement("script");
  library.textContent = await unpack("library");
  document.head.append(library);
  const figure = JSON.parse(await unpack("content"));
  delete figure.layout.height; // the figure takes that of its place
  await Plotly.newPlot("figure", figure.data, figure.layout, {config});
  document.getElementById("message").remove();
}})().catch((problem) => {{
  document.getElementById("message").textContent = "This page needs a current browser: " + problem;
}});
</script>
</body>
</html>
"""

_DEFAULT_HEIGHT = 600
_STRETCH = 3  # a figure fills the window, but bars so many times as high as they were meant to be are enough

CONFIG = {
    "scrollZoom": True,
    "displaylogo": False,
    "showSendToCloud": False,  # plotly 7 shows a button that sends the chart to a server unless told not to
    "responsive": True,
    "modeBarButtonsToRemove": ["select2d", "lasso2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "svg", "filename": "simpar"},
}
"""How plotly.js behaves in every page."""


class View(go.Figure):  # type: ignore[misc]  # plotly has no types
    """A figure whose files are whole: they need no network, and share nothing."""

    def write_html(self, file: Any, *args: Any, **kwargs: Any) -> None:
        """Writes one HTML file that opens anywhere.

        Options of plotly's own ``write_html`` lead to plotly's page, without the button that sends it to a server.
        """
        if args or kwargs:
            kwargs["config"] = {**CONFIG, **kwargs.get("config", {})}
            super().write_html(file, *args, **kwargs)
        else:
            write_page(self, file)

    def show(self, *args: Any, **kwargs: Any) -> None:
        """Shows the figure, without the button that sends it to a server."""
        kwargs["config"] = {**CONFIG, **kwargs.get("config", {})}
        super().show(*args, **kwargs)

    def _ipython_display_(self) -> None:
        """What a notebook does with the last value of a cell."""
        self.show()


def write_page(figure: go.Figure, path: str | Path, *, title: str = "simpar") -> None:
    """Writes ``figure`` as one self-contained HTML file of some 2 MB, whole or not at all.

    The page takes its background from the figure's. The figure fills the window: it is at least as high as its layout
    says, and at most three times that.

    Raises:
        OutputError: if the folder of ``path`` does not exist or the file cannot be written.
    """
    layout = figure.layout
    height = int(layout.height or _DEFAULT_HEIGHT)
    page = _PAGE.format(
        title=escape(title),
        surface=escape(layout.paper_bgcolor or "#FFFFFF"),
        text=escape(layout.font.color or "#1D2530"),
        height=height,
        tallest=_STRETCH * height,
        config=json.dumps(CONFIG),
        library=_packed(get_plotlyjs()),
        content=_packed(figure.to_json()),
    )
    write_whole(path, page.encode())


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode("ascii")
