"""The pieces of a replay one by one: kernels, sizes of transfers, a CPU's streams, the CUDA adapter, the clock."""

import threading
from types import SimpleNamespace

import pytest
from devices import FakeCudaAdapter, current_stream, fake_cuda

from calibrate.replay import CudaAdapter, ReplayError
from calibrate.replay.clock import offset_ns
from calibrate.replay.cpu import CpuAdapter, take_over
from calibrate.replay.executor import Communicators, Transfers, elements
from calibrate.replay.kernels import Kernels, halves, prepare
from calibrate.replay.steps import Communicator, Letter, Way, pair
from simpar.model.work import Attention, Gemm, MemoryBound
from simpar.program.ir import COMPUTE, Collective, Group, Launch

torch = pytest.importorskip("torch")


class Recording:
    """Hands out tensors and keeps them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __call__(self, shape, dtype="fp32"):
        self.tensors.append(Kernels(torch.device("cpu")).allocate(shape, dtype))
        return self.tensors[-1]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gemm_that_stores_computes_the_product(batch, transposed):
    made = Recording()
    prepare(Gemm(4, 5, 6, "fp32", batch=batch, out_bytes=4), made, transposed=transposed)()
    a, b, c = made.tensors
    assert a.shape[-2:] == (4, 6)
    assert b.shape[-2:] == ((5, 6) if transposed else (6, 5))
    torch.testing.assert_close(c, a @ (b.mT if transposed else b))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_gemm_that_reads_and_writes_its_result_adds_to_it(batch):
    made = Recording()
    call = prepare(Gemm(4, 5, 6, "fp32", batch=batch, out_bytes=8), made)
    a, b, c = made.tensors
    before = c.clone()
    call()
    torch.testing.assert_close(c, before + 1e-3 * (a @ b))


def test_a_gemm_with_a_wide_accumulator_adds_in_fp32():
    made = Recording()
    call = prepare(Gemm(4, 5, 6, "bf16", out_bytes=8), made)
    a, b, _, total = made.tensors
    assert total.dtype == torch.float32
    assert a.dtype == torch.bfloat16
    before = total.clone()
    call()
    torch.testing.assert_close(total, before + (a @ b).float())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_softmax_of_the_scores_that_a_query_may_see(causal, window):
    seen = {}
    kernel = Attention(2, 8, 8, 4, 2, 16, causal=causal, dtype="fp32", window=window)
    original = torch.nn.functional.scaled_dot_product_attention

    def spy(*tensors, **options):
        seen["out"] = original(*tensors, **options)
        return seen["out"]

    made = Recording()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        prepare(kernel, made)()
    query, key, value = made.tensors
    distance = torch.arange(8)[:, None] - torch.arange(8)[None, :]
    visible = (distance >= 0) if causal else torch.ones(8, 8, dtype=torch.bool)
    if window is not None:
        visible = visible & (distance < window) & (distance > -window)
    scores = query @ key.repeat_interleave(2, dim=1).mT / 4.0
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    torch.testing.assert_close(seen["out"], weights @ value.repeat_interleave(2, dim=1), rtol=1e-4, atol=1e-5)


def test_attention_backward_runs_autograd_as_often_as_asked():
    made = Recording()
    call = prepare(Attention(1, 8, 8, 2, 2, 16, backward=True, dtype="fp32"), made)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
        call()
    names = [event.key for event in profile.key_averages() if "attention" in event.key and "backward" in event.key]
    assert names
    assert all(tensor.requires_grad for tensor in made.tensors)


@pytest.mark.parametrize("memory_class", ["elementwise", "activation", "norm"])
@pytest.mark.parametrize("nbytes", [0, 8, 4096, 80_000, 1_234_568])
def test_a_memory_bound_kernel_reads_and_writes_its_bytes(nbytes, memory_class):
    made = Recording()
    prepare(MemoryBound(nbytes, memory_class), made)()
    (source,) = made.tensors
    moved = 2 * source.numel() * source.element_size()
    assert halves(MemoryBound(nbytes, memory_class)) == tuple(source.shape)
    # a norm works on whole rows: what does not fill one of its rows is left out
    assert max(nbytes, 8) * (0.99 if memory_class == "norm" else 1.0) - 8 < moved <= max(nbytes, 8)


def test_launches_of_one_shape_take_turns_on_buffers():
    kernels = Kernels(torch.device("cpu"))
    launch = Launch(Gemm(8, 8, 8, "fp32", out_bytes=4), "product")
    calls = [kernels.call(launch) for _ in range(7)]
    assert len(set(map(id, calls))) == 3
    assert calls[0] is calls[3] is calls[6]
    # a weight gradient of the same shape reads its operands otherwise
    assert kernels.call(launch._replace(phase="backward")) not in calls


@pytest.mark.parametrize(
    ("nbytes", "parts", "expected"), [(16, 2, 4), (20, 2, 6), (1, 1, 1), (0, 3, 3), (4e6, 1, 10**6)]
)
def test_transfers_carry_their_bytes_rounded_up_to_equal_parts(nbytes, parts, expected):
    assert elements(nbytes, parts) == expected


@pytest.mark.parametrize(
    ("op", "function", "moved"),
    [
        ("all_reduce", "all_reduce", [4800]),
        ("broadcast", "broadcast", [4800]),
        ("all_gather", "all_gather", [4800, 1600]),
        ("reduce_scatter", "reduce_scatter", [1600, 4800]),
        ("all_to_all", "all_to_all", [4800, 4800]),
    ],
)
def test_collectives_move_their_bytes_in_their_group(op, function, moved):
    group = Group("dp", (3, 5, 7))
    # output first, then input; nccl-tests counts the larger of the two
    transfers = Transfers(Kernels(torch.device("cpu")), {Communicator("dp", (3, 5, 7)): "the group"})
    call = transfers.collective(Collective(op, 4800.0, group))
    assert call.func.__name__.startswith(function)
    assert [t.numel() * t.element_size() for t in call.args if isinstance(t, torch.Tensor)] == moved
    assert call.keywords == {"group": "the group", "async_op": True}
    assert [a for a in call.args if not isinstance(a, torch.Tensor)] == ([3] if op == "broadcast" else [])


def test_messages_move_their_bytes_between_their_ranks():
    way = Way(2, 6, "pp_forward")
    transfers = Transfers(Kernels(torch.device("cpu")), {pair(way): "the pair"})
    letter = Letter(way, 4, 1000.0)
    for call, name, peer in ((transfers.send(letter), "isend", 6), (transfers.receive(letter), "irecv", 2)):
        assert call.func.__name__ == name
        assert call.args[0].numel() * call.args[0].element_size() == 1000
        assert call.args[1:] == (peer,)
        assert call.keywords == {"group": "the pair", "tag": 4}


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="this torch has NCCL")
def test_a_missing_back_end_is_an_error():
    with pytest.raises(ReplayError, match="was built without the communication back end 'nccl'; install a build that"):
        Communicators((), "nccl", 1, 1.0)


# ---- a CPU's streams ------------------------------------------------------------------------------------------------


def test_streams_run_in_order_and_wait_for_events():
    adapter = CpuAdapter(0, 1)
    compute, other = adapter.stream(COMPUTE), adapter.stream("dp")
    seen: list[str] = []
    marks = {}

    def issue() -> None:
        marks["first"] = adapter.launch(compute, lambda: seen.append("first"))
        ready = adapter.record(compute)
        adapter.launch(compute, lambda: seen.append("beside"))
        adapter.wait(other, ready)
        marks["other"] = adapter.launch(other, lambda: seen.append("other"))
        done = adapter.record(other)
        adapter.wait(compute, done)
        marks["last"] = adapter.launch(compute, lambda: seen.append("last"))

    for _ in range(3):
        seen.clear()
        adapter.run(issue, lambda: seen.append("begin"))
        assert seen[:2] == ["begin", "first"]
        assert seen[-1] == "last"
        assert sorted(seen[2:4]) == ["beside", "other"]
        times = {name: [adapter.read_ns(mark) for mark in pair] for name, pair in marks.items()}
        assert times["first"][1] <= times["other"][0] <= times["other"][1] <= times["last"][0]


def test_the_compute_stream_does_itself_what_it_would_only_wait_for():
    adapter = CpuAdapter(0, 1)
    compute, tp, dp = (adapter.stream(name) for name in (COMPUTE, "tp", "dp"))
    threads: dict[str, int] = {}

    def work(name: str):
        return lambda: threads.update({name: threading.get_ident()})

    def exchange(stream, name: str, *, beside: bool) -> None:
        adapter.wait(stream, adapter.record(compute))
        adapter.launch(stream, work(name))
        done = adapter.record(stream)
        if beside:
            adapter.launch(compute, work(f"beside {name}"))
        adapter.wait(compute, done)

    def issue() -> None:
        exchange(tp, "awaited", beside=False)
        exchange(tp, "awaited too", beside=False)
        exchange(tp, "overlapped", beside=True)
        exchange(dp, "of another stream", beside=False)

    adapter.run(issue, lambda: None)
    here = threading.get_ident()
    assert {name for name, thread in threads.items() if thread != here} == {"overlapped"}
    assert len(threads) == 5


def test_a_stream_that_overlaps_keeps_all_of_its_work():
    adapter = CpuAdapter(0, 1)
    compute, dp = adapter.stream(COMPUTE), adapter.stream("dp")
    adapter.launch(dp, lambda: None)  # under way before the compute stream gets anywhere
    adapter.wait(dp, adapter.record(compute))
    adapter.launch(dp, lambda: None)
    adapter.wait(compute, adapter.record(dp))
    before = list(compute.items), list(dp.items)
    take_over(compute, [dp])
    assert (compute.items, dp.items) == before


def test_a_failure_of_any_stream_ends_the_step():
    adapter = CpuAdapter(0, 1)
    compute, dp = adapter.stream(COMPUTE), adapter.stream("dp")

    def fail() -> None:
        raise ArithmeticError("no")

    def issue() -> None:
        adapter.launch(dp, fail)
        done = adapter.record(dp)
        adapter.wait(compute, done)
        adapter.launch(compute, lambda: None)

    with pytest.raises(ArithmeticError, match="no"):
        adapter.run(issue, lambda: None)


# ---- the CUDA adapter -----------------------------------------------------------------------------------------------


class Log:
    """A ``torch.cuda`` that only writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.now_ms = 0.0
        log = self

        class Event:
            def __init__(self, enable_timing=False):
                self.timed, self.ms = enable_timing, 0.0

            def record(self, stream="default"):
                log.now_ms += 1.0
                self.ms = log.now_ms
                log.calls.append(("record timed" if self.timed else "record", stream))

            def synchronize(self):
                log.calls.append(("event synchronize",))

            def elapsed_time(self, other):
                return other.ms - self.ms

        class Entered:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                log.calls.append(("enter", self.stream))

            def __exit__(self, *error):
                log.calls.append(("leave", self.stream))

        class Stream(str):
            __slots__ = ()

            def wait_event(self, event):
                log.calls.append(("wait", self))

        names = iter(("s0", "s1", "s2"))
        self.cuda = SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: 2,
            set_device=lambda index: log.calls.append(("device", str(index))),
            Stream=lambda: Stream(next(names)),
            Event=Event,
            stream=Entered,
            synchronize=lambda: log.calls.append(("synchronize",)),
        )


def test_the_cuda_adapter_asks_for_streams_and_events_in_this_order():
    log = Log()
    adapter = CudaAdapter(1, 2, log.cuda)
    assert adapter.device == torch.device("cuda", 1)
    assert adapter.backend == "nccl"
    compute, dp = adapter.stream(COMPUTE), adapter.stream("dp")
    work = SimpleNamespace(wait=lambda: log.calls.append(("join",)))
    marks = []

    def issue() -> None:
        marks.append(adapter.launch(compute, lambda: log.calls.append(("kernel",))))
        adapter.wait(dp, adapter.record(compute))
        marks.append(adapter.launch(dp, lambda: log.calls.append(("collective",)) or work))

    adapter.run(issue, lambda: log.calls.append(("begin",)))
    launched = [("record timed", "s0"), ("enter", "s0"), ("kernel",), ("leave", "s0"), ("record timed", "s0")]
    assert log.calls == [
        ("device", "1"),
        ("synchronize",),
        ("record timed", "default"),
        ("event synchronize",),
        ("begin",),
        *launched,
        ("record", "s0"),
        ("wait", "s1"),
        # a collective's work is joined while its stream is the current one, so that the stream waits and not the host
        *[("record timed", "s1"), ("enter", "s1"), ("collective",), ("join",), ("leave", "s1"), ("record timed", "s1")],
        ("synchronize",),
    ]
    (start, end), (begun, done) = marks
    # each event of the log is a millisecond after the last one
    assert [adapter.read_ns(m) - adapter.read_ns(start) for m in (end, begun, done)] == [
        1_000_000,
        3_000_000,
        4_000_000,
    ]


def test_the_cuda_adapter_makes_its_timed_events_once():
    log = Log()
    adapter = CudaAdapter(0, 1, log.cuda)
    compute = adapter.stream(COMPUTE)
    found = []
    for _ in range(3):
        adapter.run(lambda: found.append(adapter.launch(compute, lambda: None)), lambda: None)
    assert all(first is again for pair in found[1:] for first, again in zip(found[0], pair, strict=True))


@pytest.mark.parametrize("cuda", [fake_cuda(1), fake_cuda(8, available=False)], ids=["one device", "no driver"])
def test_fewer_gpus_than_ranks_is_an_error(cuda):
    with pytest.raises(ReplayError, match=r"2 ranks need 2 GPUs, but torch sees [01] here; use a smaller cluster"):
        CudaAdapter(0, 2, cuda)


def test_the_stand_in_for_cuda_lets_the_host_run_ahead():
    adapter = FakeCudaAdapter(0, 1)
    compute, dp = adapter.stream(COMPUTE), adapter.stream("dp")
    gate, seen = threading.Event(), []

    def issue() -> None:
        adapter.launch(compute, lambda: seen.append(("slow", gate.wait(), current_stream() is compute)) and None)
        adapter.wait(dp, adapter.record(compute))
        adapter.launch(dp, lambda: seen.append(("after", True, current_stream() is dp)))
        seen.append(("issued", True, True))
        gate.set()

    adapter.run(issue, lambda: None)
    assert seen == [("issued", True, True), ("slow", True, True), ("after", True, True)]


# ---- the clock ------------------------------------------------------------------------------------------------------


def test_the_offset_of_a_clock_comes_from_the_fastest_round_trip():
    delays = iter([(900, 100), (50, 50), (10, 700)])  # there and back
    state = {"now": 1000}

    def exchange() -> int:
        there, back = next(delays)
        state["now"] += there
        theirs = state["now"] + 123_456
        state["now"] += back
        return theirs

    assert offset_ns(exchange, lambda: state["now"], rounds=3) == 123_456
