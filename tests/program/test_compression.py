"""Gradient compression: bytes counted by hand, order of instructions, and what it saves."""

import pytest

import simpar
from simpar.errors import SimparError
from simpar.plan.layout import lay_out
from simpar.program.compression import Compression
from simpar.program.ir import Collective, Launch, Wait
from simpar.program.lower import lower

SLOW = {"device": "a100-sxm-80gb", "nodes": 4, "gpus_per_node": 1, "fabric": "ethernet25"}


def job(**plan):
    return simpar.Job(model="gpt2", cluster=SLOW, plan={"seq_len": 512, "bucket_parameters": 20_000_000, **plan})


def instructions(**plan):
    found = job(**plan)
    return lower(found.model, found.cluster, lay_out(found.plan, found.model, found.cluster)).ranks[0].instructions


def sent(result):
    """Bytes that leave a GPU."""
    return next(link.nbytes for link in result.trace.links if link.name == "nic0>")


def test_bytes_on_the_wire():
    model = job().model
    trained = model.replace(vocab=model.padded_vocab(128)).parameters  # as Megatron pads
    plain, half, eighth, top = (
        sent(simpar.simulate(job(grad_compression=method))) for method in ("none", "fp16", "int8", "topk")
    )
    assert plain == pytest.approx(2 * 3 / 4 * 4 * trained, rel=1e-5)
    assert half == pytest.approx(plain / 2, rel=1e-6)
    # a byte each, and four for 256; what is exchanged all-to-all and gathered is each three quarters of that
    assert eighth == pytest.approx(2 * 3 / 4 * trained * (1 + 4 / 256), rel=1e-4)
    # everybody's 1 %, each with a place, goes around the ring
    assert top == pytest.approx(3 * 0.01 * trained * 8, rel=1e-4)


@pytest.mark.parametrize("ratio", [1e-3, 0.1, 1.0])
def test_topk_sends_the_share_that_it_is_told(ratio):
    found = Compression("topk", 4, ratio)
    assert found.kept(1_000_000) == round(ratio * 1_000_000)
    assert found.wire_bytes(1_000_000) == 8 * found.kept(1_000_000)
    assert found.kept(1) == 1


def test_packing_comes_before_and_unpacking_after_the_exchange():
    found = instructions(grad_compression="fp16")
    packed = [n for n, i in enumerate(found) if isinstance(i, Launch) and i.name == "compress gradients"]
    exchanged = [n for n, i in enumerate(found) if isinstance(i, Collective) and i.name == "gradients"]
    unpacked = [n for n, i in enumerate(found) if isinstance(i, Launch) and i.name == "decompress gradients"]
    assert len(packed) == len(exchanged) == len(unpacked) > 1
    assert all(a < b for a, b in zip(packed, exchanged, strict=True))
    assert max(exchanged) < min(unpacked)
    assert all(isinstance(found[n - 1], Wait) for n in unpacked)


def test_the_second_half_of_a_bucket_starts_when_the_next_is_ready():
    found = [i for i in instructions(grad_compression="int8") if isinstance(i, (Collective, Launch))]
    order = [i.op if isinstance(i, Collective) else i.name for i in found if i.name != "copy shards"]
    first = order.index("all_to_all")
    expected = ["all_to_all", "sum compressed parts", "all_gather", "compress gradients", "all_to_all"]
    assert order[first : first + 5] == expected
    assert order.count("all_to_all") == order.count("all_gather")


def test_without_overlap_all_is_packed_behind_the_backward_pass():
    plan = {"grad_compression": "topk", "overlap": {"grad_reduce": False}}
    found = instructions(**plan)
    assert simpar.simulate(job(**plan)).step_time_s > simpar.simulate(job(grad_compression="topk")).step_time_s
    assert len([i for i in found if isinstance(i, Collective) and i.op == "all_gather"]) == 1


def test_a_slow_network_gains_and_a_fast_one_pays():
    gain = [simpar.simulate(job(grad_compression=m)).step_time_s for m in ("none", "fp16", "topk")]
    assert gain[0] > gain[1] > gain[2]
    fast = simpar.Job(model="gpt2", cluster="h100-sxm:1x2", plan={"seq_len": 512, "launch_s": 0.0})
    packed = fast.replace(plan=fast.plan.replace(grad_compression="topk"))
    assert simpar.simulate(packed).step_time_s > simpar.simulate(fast).step_time_s


def test_kernels_are_counted_as_compute():
    found = simpar.simulate(job(grad_compression="int8")).ranks[0]
    plain = simpar.simulate(job()).ranks[0]
    assert found.compute_s["elementwise"] > plain.compute_s["elementwise"]


def test_what_was_not_sent_is_kept():
    trained = job().model.parameters
    held = [
        simpar.simulate(job(grad_compression=method)).footprints[0].by_category["gradients"]
        for method in ("none", "topk")
    ]
    assert held[1] - held[0] == pytest.approx(4 * trained, rel=1e-3)


def test_folded_equals_unfolded():
    for method in ("fp16", "int8", "topk"):
        times = [simpar.simulate(job(grad_compression=method), fold=fold).step_time_s for fold in (True, False)]
        assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_servers_take_compressed_gradients():
    plan = {"sync": {"servers": 1, "on": "nodes"}, "overlap": {"grad_reduce": False}}
    plain, packed = (sent(simpar.simulate(job(**plan, grad_compression=m))) for m in ("none", "fp16"))
    assert packed == pytest.approx(plain / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"compression_ratio": 0.1}, "compression_ratio 0.1 belongs to grad_compression 'topk', not 'none'; drop one"),
        ({"grad_compression": "int8", "zero": 1}, "but zero 1 spreads them; set zero=0 and ep=1"),
        ({"grad_compression": "topk", "compression_ratio": 0.0}, "compression_ratio: 0.0 should be greater than 0"),
        ({"grad_compression": "fp16", "grad_dtype": "bf16"}, "grad_compression 'fp16' saves nothing"),
    ],
)
def test_what_cannot_be_says_what_to_change(plan, message):
    with pytest.raises(SimparError) as error:
        simpar.simulate(job(**plan))
    assert message in str(error.value)
