"""The host's time for one launch: many tiny kernels in a row, without waiting for any."""

from statistics import median
from time import perf_counter

from calibrate.measure.timer import Timer

_BATCH, _BATCHES = 20, 20  # fewer launches than a device's queue holds, or the host would wait for the device


def measure_launch_s(timer: Timer) -> float:
    """Seconds of the host for one launch of an elementwise kernel: the median of some batches."""
    import torch  # noqa: PLC0415

    tiny = torch.zeros(1, device=timer.device)
    times = []
    for _ in range(_BATCHES):
        start = perf_counter()
        for _ in range(_BATCH):
            torch.mul(tiny, 1.0, out=tiny)
        times.append((perf_counter() - start) / _BATCH)
    timer.synchronize()
    return median(times)
