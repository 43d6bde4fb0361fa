"""Bytes of model states against the tables of the papers that define them."""

import pytest

from simpar.cost.memory import has_master, host_state_bytes, optimizer_traffic, state_bytes, weight_bytes
from simpar.units import GB

MIXED = {"precision": "fp16", "grad_dtype": "fp16", "optimizer": "adam", "optimizer_dtype": "fp32"}


@pytest.mark.parametrize(("zero", "expected_gb"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_s_table_of_7_5_billion_parameters_on_64_ranks(zero, expected_gb):
    # Rajbhandari et al. 2020, figure 1: 2 + 2 + 12 bytes a parameter. With ZeRO-3 the table also shards an fp16 copy
    # of the weights (2 bytes) beside the fp32 master; we hold the shard in fp32 only, as FSDP does.
    states = state_bytes(7_500_000_000, **MIXED, zero=zero, shard=64)
    total = sum(states.values()) / GB + (7.5 * 2 / 64 if zero == 3 else 0)
    assert total == pytest.approx(expected_gb, abs=0.05)


@pytest.mark.parametrize(
    ("precision", "grad", "optimizer", "optimizer_dtype", "per_parameter"),
    [
        ("bf16", "fp32", "adam", "fp32", 2 + 4 + 12),
        ("bf16", "bf16", "adam", "fp32", 2 + 2 + 12),
        ("bf16", "bf16", "adam", "bf16", 2 + 2 + 4),
        ("fp8", "fp32", "adam", "fp32", 2 + 4 + 12),
        ("fp32", "fp32", "adam", "fp32", 4 + 4 + 8),
        ("fp32", "fp32", "momentum", "fp32", 4 + 4 + 4),
        ("fp32", "fp32", "sgd", "fp32", 4 + 4),
        ("bf16", "fp32", "sgd", "fp32", 2 + 4 + 4),
    ],
)
def test_bytes_per_parameter(precision, grad, optimizer, optimizer_dtype, per_parameter):
    states = state_bytes(
        1000,
        precision=precision,
        grad_dtype=grad,
        optimizer=optimizer,
        optimizer_dtype=optimizer_dtype,
        zero=0,
        shard=8,
    )
    assert sum(states.values()) == 1000 * per_parameter


def test_shards_are_rounded_up_so_that_all_of_them_hold_everything():
    for shard in (3, 7, 64):
        states = state_bytes(1001, **MIXED, zero=2, shard=shard)
        assert states["gradients"] * shard >= 2002 > (states["gradients"] - 1) * shard
        assert states["weights"] == 2002


def test_more_sharding_never_takes_more():
    totals = [sum(state_bytes(10**6, **MIXED, zero=zero, shard=8).values()) for zero in range(4)]
    assert totals == sorted(totals, reverse=True)
    by_shard = [sum(state_bytes(10**6, **MIXED, zero=3, shard=shard).values()) for shard in (1, 2, 8, 64)]
    assert by_shard == sorted(by_shard, reverse=True)


def test_fp8_reads_weights_in_bf16_and_only_finer_states_need_a_master():
    assert [weight_bytes(p) for p in ("fp8", "bf16", "fp16", "tf32", "fp32")] == [2, 2, 2, 4, 4]
    assert has_master("bf16", "fp32")
    assert has_master("fp8", "fp32")
    assert not has_master("bf16", "bf16")
    assert not has_master("fp32", "fp32")


def test_an_adam_step_moves_its_states_twice():
    traffic = optimizer_traffic(10, precision="fp32", grad_dtype="fp32", optimizer="adam", optimizer_dtype="fp32")
    # gradient once, two moments and the weights read and written
    assert traffic["adam"] == 10 * (4 + 4 * 2 * 3)
    assert "cast weights" not in traffic
    momentum = optimizer_traffic(10, precision="fp32", grad_dtype="fp32", optimizer="momentum", optimizer_dtype="fp32")
    assert momentum["momentum"] == 10 * (4 + 4 * 2 * 2)


def test_clipping_reads_gradients_twice_and_writes_them_once():
    sizes = {"precision": "bf16", "grad_dtype": "fp32", "optimizer": "adam", "optimizer_dtype": "fp32"}
    clipped = optimizer_traffic(10, **sizes)
    plain = optimizer_traffic(10, **sizes, clips=False)
    assert sum(clipped.values()) - sum(plain.values()) == 10 * 4 * 3
    assert set(clipped) - set(plain) == {"grad norm", "clip gradients"}


def test_a_master_copy_works_on_gradients_of_its_own_dtype():
    sizes = {"precision": "fp16", "optimizer": "adam", "optimizer_dtype": "fp32"}
    traffic = optimizer_traffic(1, grad_dtype="fp16", **sizes)
    # Megatron-LM with fp16: copy 2 + 4, unscale 8, norm 4, clip 8, Adam 4 + 24, copy back 4 + 2
    assert sum(traffic.values()) == 6 + 8 + 4 + 8 + 28 + 6
    assert sum(optimizer_traffic(1, grad_dtype="fp32", **sizes).values()) == 8 + 4 + 8 + 28 + 6


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adam", "momentum", "sgd"])
def test_what_leaves_the_device_is_on_the_host(zero, optimizer):
    fields = {**MIXED, "optimizer": optimizer, "zero": zero, "shard": 8 if zero else 1}
    device = state_bytes(8000, **fields)
    spared = sum(device.values()) - sum(state_bytes(8000, **fields, offloaded=True).values())
    share = 8000 // fields["shard"]
    host = host_state_bytes(
        share, **{name: MIXED[name] for name in ("grad_dtype", "optimizer_dtype")}, optimizer=optimizer
    )
    # gradients that the device keeps for the reduction, and weights in compute precision, are in both places
    both = (2 if zero < 2 else 0) + (2 if zero == 3 else 0)
    assert host - spared == both * share
