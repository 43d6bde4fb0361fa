"""Units: the one place where prefixes become numbers, and numbers become text.

GB is 1e9 and GiB is 2**30, as vendors and allocators mean them. Network rates are Gb/s at the door and bytes/s inside.
The simulator's clock counts whole nanoseconds, so that ties at a queue never flip on the last digit of a float.
"""

KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
KIB, MIB, GIB = 2**10, 2**20, 2**30
TFLOP = 10**12
US = 1e-6
MS = 1e-3
NS_PER_S = 10**9


def ns(seconds: float) -> int:
    """Whole nanoseconds nearest to ``seconds``."""
    return round(seconds * NS_PER_S)


def gbps(gigabits_per_second: float) -> float:
    """Bytes per second of a network rate given in Gb/s, as NICs are sold.

    >>> gbps(400) / GB
    50.0
    """
    return gigabits_per_second * 1e9 / 8


def _scaled(value: float, steps: tuple[tuple[float, str], ...]) -> str:
    for size, unit in steps:
        # what three digits round up to a unit is written in it: neither 1e+03 M nor 1,000 M
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}" if abs(value) < 999.5 * size else f"{value / size:,.0f} {unit}"
    size, unit = steps[-1]
    return f"{value / size:.3g} {unit}"


def format_time(seconds: float) -> str:
    """Seconds as a person writes them.

    >>> format_time(0.0123), format_time(2.5e-6), format_time(12.3456)
    ('12.3 ms', '2.5 µs', '12.3 s')
    """
    return _scaled(seconds, ((1.0, "s"), (MS, "ms"), (US, "µs"), (1e-9, "ns")))


def format_duration(seconds: float) -> str:
    """Long times as a person writes them.

    >>> format_duration(330), format_duration(11_124), format_duration(12.3456)
    ('5.5 min', '3.09 h', '12.3 s')
    """
    return _scaled(seconds, ((3600.0, "h"), (60.0, "min"))) if seconds >= 120 else format_time(seconds)


def format_bytes(count: float) -> str:
    """Bytes with binary prefixes, as allocators report them.

    >>> format_bytes(80 * GIB), format_bytes(1536)
    ('80 GiB', '1.5 KiB')
    """
    return _scaled(count, ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B")))


def format_count(value: float) -> str:
    """Large counts with decimal prefixes: parameters, tokens.

    >>> format_count(70.6e9), format_count(999.9e6), format_count(8192)
    ('70.6 B', '1 B', '8.19 k')
    """
    return _scaled(value, ((TB, "T"), (GB, "B"), (MB, "M"), (KB, "k"), (1, ""))).rstrip()
