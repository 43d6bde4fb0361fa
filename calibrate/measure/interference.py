"""How much compute and communication slow each other down: each alone, then both at once, in the same second."""

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from calibrate.measure.timer import Timer

_AT_ONCE = 2  # marks in flight: the device always has work, and the host notices soon that it should stop


class Rates(NamedTuple):
    """Speed beside the other over speed alone, at most 1.

    Attributes:
        compute: of compute during collectives.
        collective: of collectives during compute.
    """

    compute: float
    collective: float


def measure_rates(
    timer: Timer, compute: Callable[[], Any], communicate: Callable[[], Any], *, collectives: int, batch: int = 1
) -> Rates:
    """One round; every rank of the group calls this with the same number of collectives.

    Compute is repeated on the calling thread for as long as the collectives take, so that neither has time alone.

    Args:
        timer: of this process.
        compute: one product.
        communicate: one collective, waited for on its stream.
        collectives: repetitions of it.
        batch: products that are issued between looks at the flag.
    """
    alone_s = _communicate(timer, communicate, collectives)
    until = perf_counter() + collectives * alone_s
    compute_alone_s = _compute(timer, compute, lambda: perf_counter() >= until, batch)
    over = threading.Event()
    outcome: list[float | BaseException] = []

    def other() -> None:
        try:
            with timer.stream():
                outcome.append(_communicate(timer, communicate, collectives))
        except BaseException as error:  # raised below, in the caller's thread
            outcome.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    compute_beside_s = _compute(timer, compute, over.is_set, batch)
    thread.join()
    beside = outcome[0]
    if isinstance(beside, BaseException):
        raise beside
    return Rates(min(1.0, compute_alone_s / compute_beside_s), min(1.0, alone_s / beside))


def _communicate(timer: Timer, call: Callable[[], Any], count: int) -> float:
    start = timer.mark()
    for _ in range(count):
        call()
    end = timer.mark()
    timer.settle(end)
    return timer.between_s(start, end) / count


def _compute(timer: Timer, call: Callable[[], Any], done: Callable[[], bool], batch: int) -> float:
    start = end = timer.mark()
    flying: deque[Any] = deque()
    count = 0
    while not count or not done():
        for _ in range(batch):
            call()
        count += batch
        end = timer.mark()
        flying.append(end)
        if len(flying) > _AT_ONCE:
            timer.settle(flying.popleft())
    timer.settle(end)
    return timer.between_s(start, end) / count
