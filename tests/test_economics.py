"""Money and energy: sums by hand, and a training run by the FLOP that it takes."""

import json
from pathlib import Path
from typing import Any

import pytest

from simpar.economics import cost
from simpar.errors import ClusterError
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import Power, device
from simpar.job import Job
from simpar.simulation import simulate
from simpar.units import TFLOP

PRICED = Cluster(device="h100-sxm", nodes=2, price_per_gpu_hour=3.0, overhead_w_per_gpu=200.0, pue=1.25)


def test_by_hand() -> None:
    found = cost(PRICED, step_s=1800.0, busy_fraction=0.5, step_tokens=1000.0, tokens=10_000.0)
    assert found.gpu_w == 70 + 630 * 0.5
    assert found.cluster_w == 16 * (385 + 200) * 1.25
    assert found.step_energy_j == 16 * 585 * 1.25 * 1800
    assert found.step_price == 3 * 16 / 2
    assert found.tokens_per_price == pytest.approx(1000 / 24)
    assert found.tokens_per_kwh == pytest.approx(1000 / (11.7 / 2))  # 11.7 kW for half an hour
    assert found.run is not None
    assert (found.run.steps, found.run.time_s, found.run.gpu_hours) == (10, 18_000, 80)
    assert found.run.energy_kwh == pytest.approx(58.5)
    assert found.run.price == pytest.approx(240)


def test_a_run_takes_what_its_flop_take_at_that_utilisation() -> None:
    # second derivation: 6 N D FLOP (and attention's) over what the cluster reaches
    job = Job(model="llama3-8b", cluster="h100-sxm:4x8", plan={"zero": 3, "seq_len": 8192, "recompute": "full"})
    result = simulate(job)
    run = result.cost(tokens=15e12).run
    assert run is not None
    tokens = result.layout.global_batch * result.layout.seq_len
    flop = 15e12 * result.model_flop / tokens
    assert run.time_s == pytest.approx(flop / (result.mfu * 32 * 989 * TFLOP))
    assert 6 * 8.03e9 < result.model_flop / tokens < 8 * 8.03e9
    assert run.time_s == pytest.approx(15e12 / result.tokens_per_s)


def test_a_busy_device_draws_its_limit_and_an_idle_one_its_least() -> None:
    free = PRICED.replace(overhead_w_per_gpu=0.0, pue=1.0)
    assert cost(free, step_s=1, busy_fraction=1, step_tokens=1).gpu_w == 700
    assert cost(free, step_s=1, busy_fraction=0, step_tokens=1).gpu_w == 70


def test_of_several_kinds_of_devices_the_mean_counts() -> None:
    nodes = [{"device": "h100-sxm", "count": 3}, {"device": "a100-sxm-80gb", "count": 1}]
    mixed = Cluster(nodes=nodes, gpus_per_node=8, fabric="ndr400")
    assert cost(mixed, step_s=1, busy_fraction=1, step_tokens=1).gpu_w == (3 * 700 + 400) / 4
    unknown = Cluster(nodes=[{"device": "h100-sxm", "count": 1}, {"device": "mi300x", "count": 1}], fabric="ndr400")
    assert cost(unknown, step_s=1, busy_fraction=1, step_tokens=1).gpu_w is None


def test_of_several_kinds_each_has_its_price_or_that_of_the_cluster() -> None:
    def step_price(prices: tuple[float | None, float | None], usual: float | None) -> float | None:
        kinds = zip(("h100-sxm", "a100-sxm-80gb"), (3, 1), prices, strict=True)
        nodes = [{"device": name, "count": n, "price_per_gpu_hour": price} for name, n, price in kinds]
        mixed = Cluster(nodes=nodes, gpus_per_node=8, fabric="ndr400", price_per_gpu_hour=usual)
        return cost(mixed, step_s=1800.0, busy_fraction=1, step_tokens=1).step_price

    assert step_price((4.0, 1.5), None) == (24 * 4.0 + 8 * 1.5) / 2
    assert step_price((4.0, None), 2.0) == (24 * 4.0 + 8 * 2.0) / 2
    assert step_price((None, 0.0), 2.0) == 24 * 2.0 / 2
    assert step_price((None, None), 2.0) == 32 * 2.0 / 2
    assert step_price((4.0, None), None) is None


def test_prices_of_kinds_reach_tables_and_commands(said: Any) -> None:
    nodes = "[{device: h100-sxm, count: 1, price_per_gpu_hour: 4.0}, {device: a100-sxm-80gb, count: 1}]"
    Path("mixed.yaml").write_text(
        f"model: gpt2\ncluster: {{nodes: {nodes}, gpus_per_node: 8, fabric: ndr400, price_per_gpu_hour: 1.0}}\n",
        encoding="utf-8",
    )
    (row,) = json.loads(said("sweep", "mixed.yaml", "--vary", "plan.tp=1", "--workers", "1", "--json").out)
    assert row["cost_per_step"] == pytest.approx(row["step_time_s"] / 3600 * 40)


def test_the_busy_fraction_is_what_the_breakdown_leaves() -> None:
    job = {"model": "llama3-8b", "cluster": "h100-sxm:1x8", "plan": {"tp": 2, "pp": 4, "zero": 1, "grad_accum": 4}}
    result = simulate(job)
    waiting = sum(
        rank.replicas * (rank.bubble_s + rank.host_wait_s + sum(rank.exposed_s.values())) for rank in result.ranks
    ) / sum(rank.replicas for rank in result.ranks)
    assert result.busy_fraction == pytest.approx(1 - waiting / result.step_time_s)


def test_without_a_price_there_is_no_money_and_without_power_no_energy() -> None:
    unpriced = simulate({"model": "gpt2", "cluster": "cpu:1x2", "plan": {"seq_len": 64, "precision": "fp32"}})
    found = unpriced.cost(tokens=1e9)
    assert (found.step_price, found.tokens_per_price, found.gpu_w, found.tokens_per_kwh) == (None,) * 4
    assert found.run is not None
    assert (found.run.price, found.run.energy_kwh) == (None, None)
    assert unpriced.to_dict()["cost"]["run"] is None


@pytest.mark.parametrize("tokens", [0, -1, float("inf"), float("nan")])
def test_tokens_that_make_no_run_are_a_sentence(tokens: float) -> None:
    with pytest.raises(ClusterError, match=rf"tokens={tokens:g} must be positive; give those of a training run"):
        cost(PRICED, step_s=1, busy_fraction=1, step_tokens=1, tokens=tokens)


def test_a_device_that_idles_above_its_limit_is_a_sentence() -> None:
    with pytest.raises(ClusterError, match="idle_w=800 exceeds max_w=700; both are watts of one device"):
        Power(idle_w=800, max_w=700)


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm"])
def test_power_in_the_catalog_has_a_source(name: str) -> None:
    found = device(name)
    assert found.power is not None
    assert 0.05 < found.power.idle_w / found.power.max_w < 0.2
    assert "datasheet" in found.sources["power"]
    assert "idle" in found.sources["power"]
