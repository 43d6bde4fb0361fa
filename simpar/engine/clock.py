"""The clock of a run: a SimPy environment that counts whole nanoseconds."""

from collections.abc import Callable

import simpy


class Clock(simpy.Environment):
    """An environment whose time is an integer."""

    @property
    def ns(self) -> int:
        """The present, in nanoseconds."""
        return self._now  # type: ignore[return-value]  # only ever moved by whole nanoseconds

    def after(self, delay_ns: int, callback: Callable[[simpy.Event], None]) -> None:
        """Calls back after a delay."""
        timeout = self.timeout(delay_ns)
        assert timeout.callbacks is not None
        timeout.callbacks.append(callback)
