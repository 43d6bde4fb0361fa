"""Where the critical path's time goes, against the breakdown of the trace and times by hand."""

import pytest

from simpar.sensitivity.attribution import GEMM, HOST, INTERFERENCE, MEMORY, OPTIMIZER, path_time
from simpar.sensitivity.step import Dependence
from simpar.simulation import simulate


def found(job: object) -> tuple[dict[str, float], object]:
    result = simulate(job, allow_oom=True)  # type: ignore[arg-type]
    return {kind: spent * 1e-9 for kind, spent in path_time(Dependence(result)).items()}, result


def test_on_one_device_it_is_the_breakdown() -> None:
    path, result = found({"model": "gpt2", "cluster": "h100-sxm:1x1", "plan": {"micro_batch": 16, "launch_s": 0.0}})
    (rank,) = result.ranks  # type: ignore[attr-defined]
    assert path[GEMM] == pytest.approx(rank.compute_s["gemm"])
    assert path["attention"] == pytest.approx(rank.compute_s["attention"])
    assert path[MEMORY] == pytest.approx(sum(rank.compute_s[k] for k in ("elementwise", "activation", "norm")))
    assert path[OPTIMIZER] == pytest.approx(rank.optimizer_s)
    assert set(path) == {GEMM, "attention", MEMORY, OPTIMIZER}


def test_data_parallel_steps_split_what_they_wait_for_into_latency_and_streaming() -> None:
    path, result = found({"model": "gpt2", "cluster": "h100-sxm:4x8", "plan": {"micro_batch": 4, "launch_s": 0.0}})
    (rank,) = result.ranks  # type: ignore[attr-defined]
    assert path["dp latency"] > 0
    # what is on the path runs from its start; what the rank waits for may have begun beside compute
    assert path["dp latency"] + path["dp streaming"] >= rank.exposed_s["dp"] - 1e-9


def test_a_faster_network_takes_its_time_off_the_streaming_only() -> None:
    job = {"model": "gpt2", "cluster": "h100-sxm:4x8", "plan": {"micro_batch": 4, "launch_s": 0.0}}
    quick = {**job, "cluster": {"base": "h100-sxm:4x8", "fabric": {"nic_gbps": 800}}}
    (slow_path, _), (quick_path, _) = found(job), found(quick)
    assert quick_path["dp streaming"] < slow_path["dp streaming"]
    assert quick_path[GEMM] == slow_path[GEMM]


def test_a_launch_bound_step_is_the_host_s() -> None:
    path, result = found({"model": "gpt2", "cluster": "h100-sxm:1x1", "plan": {"seq_len": 64, "launch_s": 1e-3}})
    assert path[HOST] > 0.99 * result.step_time_s  # type: ignore[attr-defined]


def test_compute_that_collectives_slow_is_a_kind_of_its_own() -> None:
    job = {"model": "llama3-8b", "cluster": "h100-sxm:4x8", "plan": {"zero": 3, "seq_len": 4096}}
    path, result = found(job)
    (rank,) = result.ranks  # type: ignore[attr-defined]
    assert path[INTERFERENCE] == pytest.approx(rank.interference_s, rel=0.05)


def test_messages_of_a_pipeline_are_one_stream() -> None:
    job = {"model": "llama3-8b", "cluster": "h100-sxm:2x8", "plan": {"tp": 4, "pp": 4, "zero": 1, "grad_accum": 8}}
    path, result = found(job)
    assert {"pp latency", "pp streaming", "tp latency", "tp streaming"} <= set(path)
    assert round(sum(path.values()) * 1e9) == result.trace.step_ns  # type: ignore[attr-defined]


def test_waits_inside_operations_go_to_the_streams_that_are_waited_for() -> None:
    # experts' all-to-alls and the collectives of tensor parallelism meet in the same operations
    plan = {"tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True, "zero": 1, "grad_accum": 8, "launch_s": 0.0}
    path, result = found({"model": "mixtral-8x7b", "cluster": "h100-sxm:1x8", "plan": plan})
    (rank,) = result.ranks  # type: ignore[attr-defined]
    spent = {stream: path[f"{stream} latency"] + path[f"{stream} streaming"] for stream in ("tp", "ep")}
    assert sum(spent.values()) == pytest.approx(rank.exposed_s["tp"] + rank.exposed_s["ep"], rel=0.01)
    for stream in ("tp", "ep"):
        assert 0.9 < spent[stream] / rank.exposed_s[stream] < 1.1
