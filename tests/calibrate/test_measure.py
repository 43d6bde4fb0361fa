"""How items are timed, on devices whose clocks the test moves; and how rounds are kept."""

import json
import math
import os
import re
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from calibrate.errors import MeasurementError
from calibrate.fit import fit_profile
from calibrate.measure.fitted import doubts, misfits
from calibrate.measure.interference import Rates, measure_rates
from calibrate.measure.journal import Journal, rounds_done
from calibrate.measure.kernels import KernelBench, Pool
from calibrate.measure.launch import measure_launch_s
from calibrate.measure.plan import CollectiveItem, InterferenceItem, Item, KernelItem, LaunchItem, UpdateItem
from calibrate.measure.timer import CpuTimer, CudaTimer, check_cores, check_devices, cores_of
from calibrate.rounds import DOUBTFUL, doubt, doubtful, outliers, settle, spread
from calibrate.samples import InterferenceSample, KernelSample, Measurements, UpdateSample
from calibrate.tables import read_any, read_measurements
from simpar.hardware.device import device
from simpar.model.work import Attention, Gemm, GroupedGemm, MemoryBound

torch = pytest.importorskip("torch")

LAUNCH_S, QUEUE = 10e-6, 1000


class VirtualGpu:
    """A host that launches and a device that executes in order, each with a clock of its own; nothing really waits."""

    def __init__(self, l2: int = 50 * 2**20) -> None:
        self.host = self.device = 0.0
        self.l2 = l2
        self.longest_queue = 0
        self._queued = 0
        self.chosen: list[tuple[int, int]] = []

    def put(self, duration_s: float) -> None:
        self.host += LAUNCH_S
        self.device = max(self.device, self.host) + duration_s
        self._queued += 1
        self.longest_queue = max(self.longest_queue, self._queued)

    def drain(self) -> None:
        self.host = max(self.host, self.device)
        self._queued = 0

    @property
    def cuda(self):
        gpu = self

        class Event:
            def __init__(self, *, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(gpu.device, gpu.host)

            def synchronize(self) -> None:
                gpu.drain()

            def elapsed_time(self, other: "Event") -> float:
                return (other.at - self.at) * 1e3

        return SimpleNamespace(
            Event=Event,
            is_available=lambda: True,
            device_count=lambda: 2,
            set_device=lambda index: gpu.chosen.append((threading.get_ident(), index)),
            Stream=object,
            stream=nullcontext,
            get_device_properties=lambda index: SimpleNamespace(L2_cache_size=gpu.l2),
            synchronize=gpu.drain,
            _sleep=lambda cycles: gpu.put(cycles / 2e9),
        )


def virtual_timer(gpu: VirtualGpu) -> CudaTimer:
    return CudaTimer(0, 1, gpu.cuda, torch.device("cpu"))


@pytest.mark.parametrize("kernel_s", [1e-6, 3e-6, 50e-6, 5e-3])
def test_a_gpu_s_burst_holds_the_device_so_that_no_launch_is_in_the_time(kernel_s):
    gpu = VirtualGpu()
    assert virtual_timer(gpu).burst([lambda: gpu.put(kernel_s)] * 200) == [pytest.approx(kernel_s, rel=1e-6)]


def test_without_holding_it_one_would_time_the_launches():
    gpu = VirtualGpu()
    timer = virtual_timer(gpu)
    start = timer.mark()
    for _ in range(200):
        gpu.put(1e-6)
    end = timer.mark()
    timer.settle(end)
    assert timer.between_s(start, end) / 200 == pytest.approx(LAUNCH_S, rel=0.01)


def bench_with(gpu: VirtualGpu, kernel_s: float, made: list[object], monkeypatch) -> KernelBench:
    def prepare(kernel, allocate, *, transposed=False):
        made.append((kernel, transposed))
        return lambda: gpu.put(kernel_s)

    monkeypatch.setattr("calibrate.measure.kernels.prepare", prepare)
    return KernelBench(virtual_timer(gpu))


def test_a_long_burst_never_overflows_the_device_s_queue(monkeypatch):
    gpu = VirtualGpu()
    bench = bench_with(gpu, 2e-6, [], monkeypatch)
    assert bench.measure_s(KernelItem(MemoryBound(2**20), burst_s=1.0)) == pytest.approx(2e-6, rel=1e-3)
    assert gpu.longest_queue < QUEUE


@pytest.mark.parametrize(
    ("nbytes", "sets"), [(2**20, 12), (20 * 2**20, 5), (100 * 2**20, 3)]
)  # 50 MiB of cache are displaced twice over: by 12 buffers at most, by 3 at least
def test_buffers_rotate_until_the_cache_has_forgotten_them(nbytes, sets, monkeypatch):
    made: list[object] = []
    bench_with(VirtualGpu(), 1e-4, made, monkeypatch).measure_s(KernelItem(MemoryBound(nbytes)))
    assert len(made) == sets


def test_a_sustained_burst_lasts_as_long_as_it_should(monkeypatch):
    gpu = VirtualGpu()
    bench_with(gpu, 4e-3, [], monkeypatch).measure_s(KernelItem(Gemm(8, 8, 8), burst_s=1.5))
    assert gpu.device == pytest.approx(1.5, rel=0.05)


def test_a_thread_s_stream_is_on_the_gpu_of_its_process():
    gpu = VirtualGpu()
    timer = CudaTimer(1, 2, gpu.cuda, torch.device("cpu"))

    def other() -> None:
        with timer.stream():
            pass

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    (main, first), (beside, second) = gpu.chosen
    assert main != beside  # torch begins every thread on GPU 0
    assert (first, second) == (1, 1)


def test_fewer_gpus_than_ranks_is_one_sentence():
    with pytest.raises(MeasurementError, match=r"^4 ranks need 4 GPUs, but torch sees 2 here; use --ranks 2, or mea"):
        CudaTimer(0, 4, VirtualGpu().cuda, torch.device("cpu"))
    check_devices(2, 2)


def test_too_many_ranks_for_the_cores_is_one_sentence():
    with pytest.raises(MeasurementError, match=r"^9 ranks are too many for 2 CPU cores, .* at most 8; use --ranks 2$"):
        check_cores(9, 2)
    check_cores(8, 2)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_are_pinned_to_cores_of_their_own(count, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4, 6, 8, 10})
    parts = [cores_of(index, count) for index in range(count)]
    assert set().union(*parts) == {0, 2, 4, 6, 8, 10}
    assert sum(map(len, parts)) == 6
    assert cores_of(0, 7) is None


def test_pinning_holds_only_while_it_is_asked_for():
    timer = CpuTimer(0, 1)
    before = os.sched_getaffinity(0)
    with timer.pinned():
        assert os.sched_getaffinity(0) <= before
    assert os.sched_getaffinity(0) == before


def test_before_each_call_of_a_cpu_s_burst_a_product_takes_the_caches(monkeypatch):
    timer, order = CpuTimer(0, 1), []
    monkeypatch.setattr(timer, "_between", lambda: order.append("product"))
    timer.burst([lambda: order.append("call")] * 3)
    assert order == ["product", "call"] * 3
    assert timer.apart_s > 0


def test_a_burst_counts_by_its_mean_and_all_ranks_repeat_as_often(monkeypatch):
    made: list[object] = []
    gpu = VirtualGpu()
    bench = bench_with(gpu, 1e-3, made, monkeypatch)
    heard: list[float] = []

    def agree(estimate_s: float) -> float:
        heard.append(estimate_s)
        return 2e-3  # another rank is slower

    bench._agree = agree
    times = iter([[1e-3, 1e-3], [1e-3, 1e-3, 10e-3]])
    monkeypatch.setattr(bench._timer, "burst", lambda calls: next(times))
    assert bench.measure_s(KernelItem(Gemm(8, 8, 8), transposed=None, burst_s=6e-3)) == pytest.approx(4e-3)
    assert heard == [1e-3]
    assert [transposed for _, transposed in made[:4]] == [False, True, False, True]


def test_a_cpu_s_burst_times_each_call():
    times = CpuTimer(0, 1).burst([lambda: time.sleep(0.002), lambda: time.sleep(0.02)])
    assert times[0] >= 0.002
    assert times[1] >= 0.02


@pytest.mark.parametrize(
    "kernel",
    [
        Gemm(64, 64, 64, "fp32", 1, 4),
        MemoryBound(2**16, "norm"),
        Attention(1, 16, 16, 2, 2, 8, dtype="fp32", backward=True),
        GroupedGemm(70, 16, 32, 4, "fp32", 4),
        GroupedGemm(32, 16, 70, 4, "fp32", 8, "k"),
    ],
)
def test_kernels_really_run(kernel):
    assert 0 < KernelBench(CpuTimer(0, 1)).measure_s(KernelItem(kernel, burst_s=0.001)) < 1.0


def test_launches_and_optimizer_steps_really_run():
    assert 0 < measure_launch_s(CpuTimer(0, 1)) < 0.01
    assert 0 < KernelBench(CpuTimer(0, 1)).optimizer_s(1000) < 1.0


def test_a_pool_hands_out_what_overlaps_nothing_until_it_is_reset():
    pool = Pool(torch.device("cpu"))
    first, second = pool.allocate((3, 5)), pool.allocate((1 << 17,))
    first.zero_()
    assert first.shape == (3, 5)
    assert second.count_nonzero() > 100_000
    pool.reset()
    pool.allocate((3, 5)).fill_(7.0)
    big = pool.allocate((1 << 16,), "bf16")
    assert big.dtype == torch.bfloat16
    assert second.data_ptr() != first.data_ptr()


class SharedClock:
    """Compute and communication whose seconds are virtual, and longer while the other one is at it."""

    def __init__(self, compute_slowdown: float, communication_slowdown: float) -> None:
        self._factors = (compute_slowdown, communication_slowdown)
        self._local = threading.local()
        self._main = threading.get_ident()
        self._beside = threading.Event()

    def mark(self) -> float:
        return getattr(self._local, "now", 0.0)

    def settle(self, mark: float) -> None:
        """Virtual time does not wait."""

    def between_s(self, start: float, end: float) -> float:
        return end - start

    @contextmanager
    def stream(self):
        self._beside.set()
        yield
        self._beside.clear()

    def compute(self) -> None:
        time.sleep(1e-4)
        self._local.now = self.mark() + (self._factors[0] if self._beside.is_set() else 1.0) * 1e-3

    def communicate(self) -> None:
        other = threading.get_ident() != self._main
        time.sleep(2e-3 if other else 0.0)
        self._local.now = self.mark() + (self._factors[1] if other else 1.0) * 1e-3


@pytest.mark.parametrize(("compute", "communication"), [(2.0, 4.0), (1.0, 1.0), (5.0, 1.25)])
def test_interference_is_speed_beside_over_speed_alone(compute, communication):
    clock = SharedClock(compute, communication)
    rates = measure_rates(clock, clock.compute, clock.communicate, collectives=30)
    assert rates.compute == pytest.approx(1 / compute, rel=0.15)  # some products begin before the other thread does
    assert rates.collective == pytest.approx(1 / communication)


def test_what_fails_beside_is_raised():
    clock = SharedClock(1.0, 1.0)
    calls = iter(range(100))

    def communicate() -> None:
        if next(calls) == 12:
            raise RuntimeError("connection lost")

    with pytest.raises(RuntimeError, match="connection lost"):
        measure_rates(clock, clock.compute, communicate, collectives=10)


FACTS = {"host": "a", "torch": "2.13.0", "ranks": "2"}
ITEMS: tuple[Item, ...] = (
    KernelItem(Gemm(64, 500, 784, "fp32", 1, 4), transposed=True),
    KernelItem(Attention(1, 64, 64, 2, 2, 64, backward=True, dtype="fp32")),
    KernelItem(MemoryBound(4096, "norm")),
    CollectiveItem("all_reduce", 1024, (0, 1)),
    CollectiveItem("all_reduce", 1024, (0, 2), 2),
    LaunchItem(),
    UpdateItem(1000),
)
BESIDE = InterferenceItem(ITEMS[0], ITEMS[3])


def written(path, rounds, *, resume=False, facts=FACTS):
    with Journal(path, facts, stack="torch/2.13.0", communication="gloo/torch/2.13.0", resume=resume) as journal:
        for factor in rounds:
            for number, item in enumerate(ITEMS, 1):
                journal.add(item, number * factor)
            journal.add(BESIDE, Rates(0.5, 0.75))
    return read_measurements(path)


def test_every_kind_of_item_comes_back_as_it_was_measured(tmp_path):
    found = written(tmp_path / "p.measurements.jsonl", (1.0,))
    assert [s.kernel for s in found.kernels] == [item.kernel for item in ITEMS[:3]]
    assert [s.time_s for s in found.kernels] == [1.0, 2.0, 3.0]
    assert [(s.op, s.nbytes, s.ranks, s.nodes, s.time_s) for s in found.collectives] == [
        ("all_reduce", 1024, 2, 1, 4.0), ("all_reduce", 1024, 2, 2, 5.0),
    ]  # fmt: skip
    assert found.launch_s == (6.0,)
    assert found.updates == (UpdateSample("adamw", 1000, 7.0, "p.measurements.jsonl"),)
    assert found.interference == (InterferenceSample(0.5, 0.75, "p.measurements.jsonl"),)
    assert found.provenance == FACTS
    assert {s.source for s in (*found.kernels, *found.collectives)} == {"p.measurements.jsonl"}
    assert rounds_done(found, (*ITEMS, BESIDE)) == dict.fromkeys((*ITEMS, BESIDE), 1)


def test_the_median_of_the_rounds_counts_and_their_spread_is_kept(tmp_path):
    found = settle(written(tmp_path / "raw.jsonl", (1.8, 2.0, 2.2, 2.2, 2.0, 1.8)))  # as fast in either half
    assert [s.time_s for s in found.kernels] == [2.0, 4.0, 6.0]
    assert [s.time_s for s in found.collectives] == [8.0, 10.0]
    assert found.launch_s == pytest.approx((10.8, 12.0, 13.2, 13.2, 12.0, 10.8))
    logs = np.log([0.9, 1.0, 1.1, 1.1, 1.0, 0.9])
    student = 2.015 / 1.645  # of five degrees of freedom, from a printed table
    assert found.kernel_spread == found.collective_spread == pytest.approx(student * logs.std(ddof=1), rel=1e-3)
    assert read_any(tmp_path / "raw.jsonl") == found  # as ``calibrate fit`` reads it


def test_two_rounds_tell_no_spread_and_items_of_a_class_that_differ_do_not_add_one(tmp_path):
    assert settle(written(tmp_path / "raw", (1.0, 1.2))).kernel_spread == 0.0
    against = [[1.0, 1.5, 2.0, 1.5], [2.0, 1.5, 1.0, 1.5], [1.5, 1.5, 1.5, 1.5]]
    assert spread([against]) == pytest.approx(0.0, abs=1e-12)
    assert spread([[one] for one in against]) > 0.1  # classes of their own see the machine at moments of their own


def test_the_spread_is_that_of_a_machine_whose_speed_is_drawn_anew():
    rng = np.random.default_rng(11)
    classes = [
        [[size * math.exp(level) for level in levels] for size in (1.0, 20.0, 3.0)]
        for levels in 0.15 * rng.standard_normal((6, 400))
    ]
    assert spread(classes) == pytest.approx(0.15, rel=0.03)


def test_a_machine_that_slows_down_over_the_run_is_spread_more_than_one_that_goes_to_and_fro():
    to_and_fro, slower = [1.0, 1.5] * 4, [1.0] * 4 + [1.5] * 4
    assert np.std(to_and_fro) == np.std(slower)
    calm, drifting = spread([[to_and_fro]]), spread([[slower]])
    student = 1.895 / 1.645  # of seven degrees of freedom
    assert calm == pytest.approx(student * np.log(to_and_fro).std(ddof=1), rel=1e-3)
    assert drifting**2 == pytest.approx(calm**2 + student**2 * math.log(1.5) ** 2 / 2, rel=1e-3)


@pytest.mark.parametrize("rounds", [3, 4, 8, 20])
def test_a_later_moment_lies_in_the_interval_as_often_as_it_says(rounds):
    rng = np.random.default_rng(rounds)
    drawn = np.exp(0.2 * rng.standard_normal((3000, rounds + 1)))
    inside = [abs(math.log(one[-1] / np.median(one[:-1]))) < 1.645 * spread([[one[:-1].tolist()]]) for one in drawn]
    assert 0.88 < np.mean(inside) < 0.96


def test_medians_are_doubted_by_how_far_medians_of_other_rounds_lie_off():
    rng = np.random.default_rng(2)
    drawn = np.exp(0.3 * rng.standard_normal((4000, 15)))
    real = np.log(np.median(drawn, axis=1)).std()  # of medians of fifteen
    assert doubt(drawn.tolist()) == pytest.approx(real, rel=0.1)
    assert doubt([[1.0, 1.0]]) == math.inf
    outlier = [1.0, 1.01, 0.99, 1.0, 1.0, 60.0]
    assert doubt([outlier, outlier]) < 0.01 < DOUBTFUL


def test_classes_whose_rounds_do_not_agree_are_named(tmp_path):
    with Journal(tmp_path / "raw", FACTS) as journal:
        for factor in (1.0, 2.0, 4.0, 8.0):
            journal.add(ITEMS[0], 1.0)
            journal.add(ITEMS[2], factor)
            journal.add(ITEMS[3], factor)
    raw = read_measurements(tmp_path / "raw")
    found = doubtful(raw)
    assert found.keys() == {"norm kernels", "all_reduce"}
    (note,) = doubts(raw)
    assert note.startswith("the machine was not quiet enough to measure well, and some times are known badly: norm ker")
    assert f"norm kernels to ±{found['norm kernels']:.0%}, all_reduce to ±" in note
    assert doubts(written(tmp_path / "calm", (1.0, 1.01, 1.0))) == []
    assert "by too few rounds to say how well" in doubts(written(tmp_path / "short", (1.0, 1.01)))[0]


def test_a_journal_keeps_what_its_device_has_instead_of_the_catalog_s(tmp_path):
    measured = device("cpu").replace(sms=1, peak_flop_per_s={"bf16": 8e10, "fp32": 8e10})
    with Journal(tmp_path / "raw", FACTS, base=measured):
        pass
    sheet = read_measurements(tmp_path / "raw").datasheet
    assert (sheet["name"], sheet["sms"], sheet["peak_flop_per_s"]["fp32"]) == ("cpu", 1, 8e10)


def test_rounds_far_above_the_median_are_reported(tmp_path):
    found = outliers(written(tmp_path / "raw", (1.0, 1.0, 1.4, 3.0)))
    assert (found.slow, found.rounds) == (5, 20)  # a round of five items, of four
    assert found.worst == pytest.approx(3.0 / 1.2)
    assert outliers(written(tmp_path / "raw", (1.0, 1.4))).slow == 0


def test_a_class_that_its_fit_does_not_describe_is_named():
    # five kernels of one class, two of them disturbed in every round: no overhead and no bandwidth fit them all
    times = (17e-6, 21e-6, 110e-6, 39e-3, 178e-3)
    sizes = (2**16, 2**19, 2**22, 2**24, 2**25)
    kernels = tuple(
        KernelSample(MemoryBound(nbytes, "elementwise"), seconds, "log")
        for nbytes, seconds in zip(sizes, times, strict=True)
    )
    (said,) = misfits(fit_profile(Measurements(kernels=kernels), device("cpu")).accuracy)
    assert re.match(r"memory_bound\.elementwise fits its own 5 points badly \(off by \d+% in the median, by \d+%", said)
    assert said.endswith("calibrate again when the machine is quieter")
    quiet = tuple(replace(sample, time_s=1e-6 + sample.kernel.nbytes / 1e10) for sample in kernels)
    assert not misfits(fit_profile(Measurements(kernels=quiet), device("cpu")).accuracy)


def test_a_resumed_journal_goes_on_behind_half_a_line(tmp_path):
    path = tmp_path / "raw"
    written(path, (1.0,))
    with path.open("a") as file:
        file.write('{"kernel": "gemm", "m": 64')
    found = written(path, (2.0,), resume=True)
    assert rounds_done(found, ITEMS) == dict.fromkeys(ITEMS, 2)


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"torch": "2.14.0"}, "raw was measured with torch 2.13.0, but here it is 2.14.0; measure anew without --res"),
        ({"host": "b"}, "raw was measured with host a, but here it is b"),
        ({"cuda": "13.0"}, "raw was measured with cuda none, but here it is 13.0"),
        ({"ranks": "4"}, "raw was measured with ranks 2, but here it is 4"),
    ],
)
def test_measurements_of_another_machine_or_version_do_not_mix(tmp_path, facts, text):
    path = tmp_path / "raw"
    written(path, (1.0,))
    before = path.read_text()
    with pytest.raises(MeasurementError, match=rf"^{text}"):
        written(path, (1.0,), resume=True, facts={**FACTS, **facts})
    assert path.read_text() == before


def test_every_line_is_on_disk_as_soon_as_it_is_measured(tmp_path):
    path = tmp_path / "raw"
    with Journal(path, FACTS) as journal:
        journal.add(ITEMS[0], 1.0)
        assert json.loads(path.read_text().splitlines()[1])["time_s"] == 1.0


def test_a_journal_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(
        MeasurementError, match=r"^cannot write '.*/nowhere/raw': No such file or directory; choose ano"
    ):
        Journal(tmp_path / "nowhere" / "raw", FACTS)
