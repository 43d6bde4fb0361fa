"""Times one kernel once: a burst of calls on rotating buffers, as torch runs them."""

from collections.abc import Callable
from itertools import cycle, islice
from math import ceil
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from calibrate.errors import MeasurementError
from calibrate.measure.plan import KernelItem
from calibrate.measure.timer import Timer
from calibrate.replay.kernels import prepare, torch_dtype
from simpar.model.work import DType, Gemm

if TYPE_CHECKING:
    import torch

_SETS = (3, 12)  # of buffers; at least as many as a replay rotates
_ALIGNED = 64  # elements; views into the pool begin where allocations would
_REPEATS = (2, 2000)


class KernelBench:
    """Buffers and calls of one process.

    Args:
        timer: of this process.
        agree: returns the mean of all ranks' values at the moment when the last one has given its own.
    """

    def __init__(self, timer: Timer, agree: Callable[[float], float] = float) -> None:
        self._timer, self._agree = timer, agree
        self.buffers = Pool(timer.device)

    def measure_s(self, item: KernelItem) -> float:
        """Seconds of one execution, as the mean of a burst: what many of them add up to, pauses of the device included.

        All ranks begin the burst together and repeat as often, so that each has the machine as it is in a step.

        Raises:
            MeasurementError: the device has not enough memory for the kernel.
        """
        import torch  # noqa: PLC0415

        torch.set_float32_matmul_precision("high" if _is_tf32(item) else "highest")
        try:
            calls = self._calls(item)
            # the first call of a round warms up, the next one tells how many fit into the burst
            estimate_s = self._agree(max(self._timer.burst([next(calls) for _ in range(2)])[-1], 1e-7))
            least, most = _REPEATS
            repeats = min(max(least, ceil(item.burst_s / (estimate_s + self._timer.apart_s))), most)
            times: list[float] = []
            while repeats > 0:  # a long burst may not fit the device's queue at once
                part = min(repeats, self._timer.queued)
                times.append(fmean(self._timer.burst(list(islice(calls, part)))))
                repeats -= part
        except torch.OutOfMemoryError:
            raise MeasurementError(
                f"the device has too little free memory for {item.kernel}; end other work on it or measure with --quick"
            ) from None
        return median(times)

    def optimizer_s(self, parameters: int) -> float:
        """Seconds of one AdamW step over so many fp32 parameters in one tensor, gradients included."""
        import torch  # noqa: PLC0415

        weight, gradient, first, second = ([torch.zeros(parameters, device=self._timer.device)] for _ in range(4))
        count = [torch.zeros((), device=self._timer.device)]
        options: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}

        def step() -> None:
            # what torch.optim.AdamW(fused=True) runs; the class itself would load torch's compiler first
            count[0] += 1
            torch._fused_adamw_(
                weight, gradient, first, second, [], count, lr=1e-3, amsgrad=False, maximize=False, **options
            )

        step()
        return fmean(self._timer.burst([step] * 5))

    def _calls(self, item: KernelItem) -> Any:
        wanted = ceil(2 * self._timer.cache_bytes / max(1.0, item.kernel.work.nbytes))
        sets = min(max(_SETS[0], wanted), _SETS[1])
        self.buffers.reset()
        ways = [False, True] if item.transposed is None else [item.transposed]
        return cycle(
            prepare(item.kernel, self.buffers.allocate, transposed=way)
            for _, way in zip(range(ceil(sets / len(ways)) * len(ways)), cycle(ways), strict=False)
        )


class Pool:
    """Random numbers that kernels share one after the other, so that rounds neither fill memory nor draw anew."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device
        self._numbers: dict[Any, torch.Tensor] = {}
        self._used: dict[Any, int] = {}

    def reset(self) -> None:
        """All numbers are free again."""
        self._used.clear()

    def allocate(self, shape: tuple[int, ...], dtype: DType = "fp32") -> "torch.Tensor":
        """A tensor of random numbers that overlaps none that was allocated since the last reset."""
        import torch  # noqa: PLC0415

        kind = torch_dtype(dtype)
        size = 1
        for length in shape:
            size *= length
        start = self._used.get(kind, 0)
        end = start + size
        self._used[kind] = ceil(end / _ALIGNED) * _ALIGNED
        there = self._numbers.get(kind)
        if there is None or end > there.numel():
            # what was handed out before lives on in its views
            self._numbers[kind] = there = torch.randn(max(end, 1 << 16), device=self._device).to(kind)
        return there[start:end].view(shape).detach()


def _is_tf32(item: KernelItem) -> bool:
    return isinstance(item.kernel, Gemm) and item.kernel.dtype == "tf32"
