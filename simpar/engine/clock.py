"""The clock of a run: a SimPy environment that counts whole nanoseconds and runs streams as coroutines.

A stream waits for a length of time (it yields an int) or for a :class:`Signal`. SimPy's own processes put every
hand-over between two of them into the event queue; streams hand over several times in the same instant, so here only
what takes time is an event, and who waits for a signal goes on in the instant in which it fires, in order of waiting.
"""

from collections import deque
from collections.abc import Callable, Generator
from heapq import heappush
from typing import Any

import simpy
from simpy.events import NORMAL


class Signal:
    """Something that happens once, with a value for those who wait."""

    _waiting: "list[Callable[[Any], None]] | None" = None

    def then(self, callback: Callable[[Any], None]) -> None:
        """Calls back with the value when the signal fires."""
        if self._waiting is None:
            self._waiting = [callback]
        else:
            self._waiting.append(callback)


Stream = Generator["int | Signal", Any, None]
"""A coroutine that yields nanoseconds to pass, or signals to wait for."""


class _Running:
    """A stream in progress: called when what it waits for is there."""

    __slots__ = ("_clock", "_send")

    def __init__(self, clock: "Clock", stream: Stream) -> None:
        self._clock = clock
        self._send = stream.send

    def __call__(self, value: Any) -> None:
        try:
            request = self._send(value)
        except StopIteration:
            return
        if type(request) is int:
            _Due(self._clock, request, self)
        else:
            request.then(self)  # type: ignore[union-attr]  # what is no delay is a signal


class _Due(simpy.Event):
    """A timeout that carries what to call as its value, and has no list of callbacks of its own: half the cost."""

    def __init__(self, clock: "Clock", delay_ns: int, callback: Callable[[Any], None]) -> None:
        assert delay_ns >= 0, "time goes forward"
        self.env = clock
        self.callbacks = _CALLBACKS  # type: ignore[assignment]  # nobody adds to it
        self._value = callback
        self._ok = True
        heappush(clock._queue, (clock._now + delay_ns, NORMAL, next(clock._eid), self))  # as Environment.schedule


def _elapse(timeout: simpy.Event) -> None:
    """Time has passed: calls what waited for it, and then all that this lets go on in the same instant."""
    clock: Clock = timeout.env  # type: ignore[assignment]  # only clocks have such timeouts
    clock.ns = clock._now  # type: ignore[assignment]  # only ever moved by whole nanoseconds
    timeout._value(None)  # what to call, see _Due
    ready = clock._ready
    while ready:
        waiting, value = ready.popleft()
        for callback in waiting:
            callback(value)


_CALLBACKS = [_elapse]


class Clock(simpy.Environment):
    """An environment whose time is an integer.

    Attributes:
        ns: the present, in nanoseconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ns = 0
        self._ready: deque[tuple[list[Callable[[Any], None]], Any]] = deque()

    def start(self, stream: Stream) -> None:
        """Runs a stream from now on."""
        self.after(0, _Running(self, stream))

    def after(self, delay_ns: int, callback: Callable[[Any], None]) -> None:
        """Calls back after a delay."""
        _Due(self, delay_ns, callback)

    def fire(self, signal: Signal, value: Any = None) -> None:
        """It happened: all who wait go on, before time does."""
        if signal._waiting is not None:
            self._ready.append((signal._waiting, value))
            signal._waiting = None
