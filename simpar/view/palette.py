"""Colours of the views: one per kind of span, in a light and a dark set, and the surfaces around them.

The colours of kinds that can share a lane differ by at least 35 (light) or 26 (dark) in CIE76, seen with
normal vision and with the three dichromacies of Machado, Oliveira and Fernandes (2009, severity 1). Bubbles are to stay
behind: their colours differ by 16 from each other and by 21 from the kinds beside them. A test computes this again.
"""

from dataclasses import dataclass
from types import MappingProxyType

from simpar.trace.bubbles import BUBBLE_CAUSES
from simpar.trace.trace import KINDS, MEMORY_CATEGORIES
from simpar.trace.utilisation import communicator

DRAWN_KINDS = (*KINDS, *BUBBLE_CAUSES)
"""What rectangles show: kinds of spans, and behind them the causes of bubbles."""

BUBBLES_FROM = len(KINDS)
"""The first of ``DRAWN_KINDS`` that is a cause of bubbles."""

_LIGHT_BUBBLES = dict(zip(BUBBLE_CAUSES, ("#DBDEED", "#A3A7BC", "#D8C3B9", "#EA4B8B", "#8BC27E"), strict=True))
_DARK_BUBBLES = dict(zip(BUBBLE_CAUSES, ("#293037", "#495764", "#5E483E", "#600068", "#248C6D"), strict=True))

_LIGHT = MappingProxyType(
    {
        "forward": "#0A48D6",
        "backward": "#B75C34",
        "weight_grad": "#EEBF3C",
        "recompute": "#4FB4F3",
        "optimizer": "#643181",
        "gemm": "#2B37FB",
        "attention": "#C3250F",
        "elementwise": "#F9B811",
        "activation": "#35B6FB",
        "norm": "#640C1F",
        "all_reduce": "#881056",
        "all_gather": "#2FDDFA",
        "reduce_scatter": "#6512D6",
        "all_to_all": "#D59984",
        "broadcast": "#B20305",
        "shift": "#217BC3",
        "p2p": "#B9DD4B",
        "copy": "#9C849C",
        **_LIGHT_BUBBLES,
    }
)
_DARK = MappingProxyType(
    {
        **_LIGHT,
        "forward": "#2F62F0",
        "optimizer": "#F2D6F7",
        "gemm": "#4C5CFF",
        "attention": "#D8402A",
        "activation": "#47FA9D",
        "norm": "#9C67B7",
        "all_reduce": "#D0478F",
        "reduce_scatter": "#8A4BF0",
        "broadcast": "#E01E1E",
        "shift": "#660081",
        "copy": "#6C90E4",
        **_DARK_BUBBLES,
    }
)

_MEMORY = MappingProxyType(
    dict(zip(MEMORY_CATEGORIES, ("#3B5BA5", "#E0A030", "#7A4A8C", "#3AAFA9", "#C76B98", "#8A8F98"), strict=True))
)


def _families(kinds: MappingProxyType[str, str]) -> MappingProxyType[str, str]:
    """Communicators have the colours of what they mostly carry; streams that run beside those of dp have others."""
    carried = {"tp": "all_gather", "cp": "shift", "ep": "all_to_all", "pp": "p2p", "dp": "reduce_scatter"}
    carried |= {"dp_experts": "all_reduce", "dp_replicas": "elementwise", "dp_expert_replicas": "norm"}
    carried |= {"host": "copy", "cpu": "optimizer"}
    return MappingProxyType({name: kinds[kind] for name, kind in carried.items()})


@dataclass(frozen=True, slots=True)
class Palette:
    """What a view needs to know about colour.

    Attributes:
        template: name of the plotly template to start from.
        surface: behind the plot and the page.
        text: titles and labels.
        faint: secondary text and tick labels.
        line: separators and grid.
        alarm: limits that should not be crossed.
        accent: what is chosen.
        kinds: colour by kind of span, and by cause of bubbles.
        memory: colour by category of memory.
        families: colour by communicator, and by stream where one differs from the others of its communicator.
        ramp: first, middle and last colour of a series of like lines (one per stage).
    """

    template: str
    surface: str
    text: str
    faint: str
    line: str
    alarm: str
    accent: str
    kinds: MappingProxyType[str, str]
    memory: MappingProxyType[str, str]
    families: MappingProxyType[str, str]
    ramp: tuple[str, str, str]

    def family(self, stream: str) -> str:
        """The colour of a stream, or else of its communicator."""
        return self.families.get(stream) or self.families.get(communicator(stream), self.faint)

    def ramp_at(self, fraction: float) -> str:
        """The colour of the line at ``fraction`` of the series, from 0 to 1."""
        first, middle, last = self.ramp
        return between(first, middle, 2 * fraction) if fraction < 0.5 else between(middle, last, 2 * fraction - 1)


LIGHT = Palette(
    "plotly_white",
    "#FFFFFF",
    "#1D2530",
    "#5B6573",
    "#E3E6EB",
    "#C8102E",
    "#0A48D6",
    _LIGHT,
    _MEMORY,
    _families(_LIGHT),
    ("#3B2A8C", "#1F9E89", "#D9A300"),
)
DARK = Palette(
    "plotly_dark",
    "#111418",
    "#E8EBEF",
    "#9AA4B1",
    "#2A3038",
    "#FF5D5D",
    "#6FA0FF",
    _DARK,
    _MEMORY,
    _families(_DARK),
    ("#8F8BFF", "#2FC4A8", "#F4D35E"),
)


def palette(dark: bool) -> Palette:
    """The dark or the light palette."""
    return DARK if dark else LIGHT


def label(kind: str) -> str:
    """A kind as the legend writes it.

    >>> label("weight_grad"), label("all_reduce"), label("warm-up")
    ('weight grad', 'all-reduce', 'bubble: warm-up')
    """
    if kind in BUBBLE_CAUSES:
        return f"bubble: {kind}"
    return kind.replace("_", "-" if kind.startswith(("all_", "reduce_")) else " ")


def readable_on(colour: str) -> str:
    """Black or white, whichever stands out more on ``colour`` (WCAG 2 relative luminance).

    >>> readable_on("#0A48D6"), readable_on("#B9DD4B")
    ('#FFFFFF', '#111418')
    """
    return "#FFFFFF" if _luminance(colour) < 0.22 else "#111418"


def shade(colour: str, chunk: int, chunks: int, surface: str) -> str:
    """The colour of one of several model chunks of a rank: the later the chunk, the nearer to the surface.

    >>> shade("#0A48D6", 0, 2, "#FFFFFF"), shade("#0A48D6", 1, 2, "#FFFFFF")
    ('#0A48D6', '#6C91E6')
    """
    return between(colour, surface, 0.4 * chunk / (chunks - 1)) if chunk > 0 else colour


def between(first: str, last: str, fraction: float) -> str:
    """The colour at ``fraction`` of the way from ``first`` to ``last``.

    >>> between("#000000", "#FFFFFF", 0.5)
    '#808080'
    """
    mixed = (round(a + (b - a) * fraction) for a, b in zip(_channels(first), _channels(last), strict=True))
    return "#" + "".join(f"{channel:02X}" for channel in mixed)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _luminance(colour: str) -> float:
    red, green, blue = (
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in _channels(colour))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
