"""What the timeline says about a rectangle under the cursor."""

from dataclasses import dataclass
from html import escape

from simpar.trace.trace import Spans
from simpar.units import NS_PER_S, US, format_bytes, format_time
from simpar.view.level_of_detail import Rectangles
from simpar.view.palette import BUBBLES_FROM, DRAWN_KINDS, label
from simpar.view.scene import Scene

_RATES = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1.0, "FLOP"))


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """The unit of the time axis: its name, its length, and the decimals that resolve a span of the trace."""

    name: str
    ns: float
    decimals: int

    def position(self, ns: float) -> str:
        """A point in time, without the unit."""
        return f"{ns / self.ns:,.{self.decimals}f}"


def time_unit(span_ns: float) -> TimeUnit:
    """The unit for an axis of ``span_ns``: µs below 2 ms, ms below 2 s, else s.

    >>> time_unit(1.5e6).name, time_unit(3e8).name, time_unit(5e9).name
    ('µs', 'ms', 's')
    """
    if span_ns < 2e6:
        return TimeUnit("µs", 1e3, 2)
    if span_ns < 2e9:
        return TimeUnit("ms", 1e6, 3)
    return TimeUnit("s", 1e9, 6)


def hover_texts(shown: Scene, drawn: Rectangles, unit: TimeUnit) -> list[str]:
    """One text per rectangle, as lines separated by ``<br>``."""
    return [_text(shown, drawn, row, unit) for row in range(len(drawn))]


def _text(shown: Scene, drawn: Rectangles, row: int, unit: TimeUnit) -> str:
    start, duration = int(drawn.start_ns[row]), int(drawn.duration_ns[row])
    kind, span = int(drawn.kind[row]), int(drawn.span[row])
    name = label(DRAWN_KINDS[kind])
    took = format_time(duration * float(drawn.height[row]) / NS_PER_S)
    lines = [
        f"<b>{name}</b>  {took}" + ("" if span >= 0 else f" of {format_time(duration / NS_PER_S)}"),
        escape(shown.where(int(drawn.lane[row]))),
        f"{unit.position(start)} → {unit.position(start + duration)} {unit.name}",
    ]
    if span < 0:
        lines.append(f"{int(drawn.count[row]):,} spans merged, {100 * float(drawn.busy[row]):.0f} % busy")
    elif kind >= BUBBLES_FROM:
        table, at = _row_of(shown, span)
        lines += [f"waits for {escape(shown.names[table.name[at]])}"] if table.name[at] >= 0 else []
    else:
        lines += _span_lines(shown, span, name)
    return "<br>".join(lines)


def _row_of(shown: Scene, span: int) -> tuple[Spans, int]:
    """The table that holds a span, and the row in it."""
    count = len(shown.operations)
    return (shown.operations, span) if span < count else (shown.kernels, span - count)


def _span_lines(shown: Scene, span: int, kind: str) -> list[str]:
    spans, row = _row_of(shown, span)
    name = shown.names[spans.name[row]] if spans.name[row] >= 0 else ""
    what = [escape(name)] if name.replace("_", " ") not in ("", kind.replace("-", " ")) else []
    for field, value in (
        ("microbatch", int(spans.microbatch[row])),
        ("chunk", int(spans.chunk[row])),
        ("layer", int(spans.layer[row])),
    ):
        what += [f"{field} {value}"] if value >= 0 else []
    seconds = float(spans.duration_ns[row]) / NS_PER_S
    nbytes, flop = float(spans.nbytes[row]), float(spans.flop[row])
    lines = [" · ".join(what)] if what else []
    if nbytes > 0:
        lines.append(format_bytes(nbytes) + (f" · {_three_digits(nbytes / seconds / 1e9)} GB/s" if seconds else ""))
    if flop > 0:
        lines.append(_flop_text(flop) + (f" · {_three_digits(flop / seconds / 1e12)} TFLOP/s" if seconds else ""))
    return lines


def _three_digits(value: float) -> str:
    """Three digits or the whole number, never an exponent for large values."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _flop_text(flop: float) -> str:
    size, name = next(step for step in _RATES if flop >= step[0] or step[0] == 1.0)
    return f"{_three_digits(flop / size)} {name}"


def step_text(step_ns: int) -> str:
    """The label of the line at the end of the step.

    >>> step_text(36_712_000)
    'step 36.7 ms'
    """
    return f"step {format_time(step_ns / NS_PER_S)}"


def pixel_text(end_ns: int, pixels: int) -> str:
    """How much time one pixel of the plot shows at full zoom-out.

    >>> pixel_text(14_400_000, 1200)
    '1 px = 12 µs'
    """
    return f"1 px = {format_time(max(end_ns / pixels / NS_PER_S, US * 1e-3))}"
