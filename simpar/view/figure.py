"""What all plotted views share: heading, fonts and surfaces, and files of a figure by the ending of their name."""

from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from simpar.errors import JobError
from simpar.trace.export import write_whole
from simpar.view.layout import FONT, add_heading
from simpar.view.page import write_page
from simpar.view.palette import Palette

PICTURES = (".png", ".svg", ".pdf", ".webp", ".jpg")
"""Endings of pictures, which kaleido draws."""

_WORDS, _HEAD_PX, _LINE_PX, _FOOT_PX = 150, 62, 18, 56
_PICTURE_PX = 1280


def dress(
    figure: go.Figure,
    colours: Palette,
    *,
    title: str,
    subtitle: str = "",
    height: int = 520,
    above: int = 0,
    below: int = 0,
) -> go.Figure:
    """Sets heading, colours and margins of a figure.

    Args:
        figure: gets them in place.
        colours: light or dark.
        title: heading.
        subtitle: text below it; its lines are broken where they are long.
        height: of the plot itself, in pixels.
        above: pixels between heading and plot for a legend or panel titles.
        below: pixels below the plot beyond those of an axis.
    """
    lines = [part for line in subtitle.splitlines() for part in wrap(line, _WORDS)]
    add_heading(figure, escape(title), "<br>".join(escape(line) for line in lines), colours)
    top = _HEAD_PX + _LINE_PX * max(len(lines) - 1, 0) + above
    figure.update_layout(
        template=colours.template,
        paper_bgcolor=colours.surface,
        plot_bgcolor=colours.surface,
        font={"color": colours.text, "family": FONT, "size": 12},
        hoverlabel={"align": "left", "font": {"family": FONT, "size": 12}},
        margin={"l": 60, "r": 30, "t": top, "b": _FOOT_PX + below},
        height=height + top + _FOOT_PX + below,
    )
    axis = {"gridcolor": colours.line, "zerolinecolor": colours.line, "automargin": True, "title_font_size": 12}
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure


def legend_above(colours: Palette) -> dict[str, Any]:
    """A legend in a row between heading and plot; :func:`dress` makes room with ``above``."""
    return {
        "orientation": "h",
        "x": 0,
        "xanchor": "left",
        "y": 1.0,
        "yanchor": "bottom",
        "font": {"size": 12, "color": colours.text},
        "itemsizing": "constant",
        "traceorder": "normal",
    }


def legend_beside(colours: Palette) -> dict[str, Any]:
    """A legend in a column at the right, for panels that have titles above them."""
    return {
        "x": 1.01,
        "xanchor": "left",
        "y": 1.0,
        "yanchor": "top",
        "font": {"size": 12, "color": colours.text},
        "itemsizing": "constant",
        "traceorder": "normal",
    }


def write_figure(figure: go.Figure, path: str | Path, *, title: str = "simpar") -> None:
    """Writes a figure as a page (``.html``), or as a picture where kaleido is installed.

    Raises:
        JobError: another ending, or a picture without kaleido or without a browser for it.
        OutputError: the file cannot be written.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".html":
        # a timeline writes the page that holds every span
        if getattr(figure, "contents", None) is not None:
            figure.write_html(path)
        else:
            write_page(figure, path, title=title)
        return
    if suffix not in PICTURES:
        raise JobError(f"{path}: '{suffix}' is no format of a view; end the name with .html, {', '.join(PICTURES)}")
    write_whole(path, picture(figure, suffix.removeprefix(".")))


def picture(figure: go.Figure, format_: str) -> bytes:
    """A figure as PNG, SVG, ...; kaleido draws it with the browser of this machine.

    Raises:
        JobError: kaleido or its browser is missing.
    """
    try:
        return bytes(figure.to_image(format=format_, width=_PICTURE_PX, scale=1 if format_ in ("svg", "pdf") else 2))
    except (ImportError, ValueError, RuntimeError) as error:
        # which of these plotly raises depends on its version
        if "requires the kaleido package" in str(error).lower():
            raise JobError(
                "pictures need kaleido, which is not installed; pip install 'simpar[images]', or write .html"
            ) from None
        if not isinstance(error, RuntimeError):
            raise
        # kaleido finds no browser
        reason = str(error).strip().splitlines()[0]
        raise JobError(f"kaleido cannot draw the picture ({reason}); install chromium, or write .html") from None
