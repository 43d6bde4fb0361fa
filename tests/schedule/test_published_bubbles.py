"""Bubble rates that Qi et al. 2024 (arXiv:2401.10241, table 5) published, from the stage times that they measured
(table 9), by the events of the engine; the largest pipelines by the schedules' own timetable, which agrees with them.

The rate is (cost - m(F + I + W)) / cost, where the cost is the longest time of a rank between its own begin and its own
end.
"""

import csv
from pathlib import Path

import pytest
from synthetic import ideal_cluster, lane_spans, pipeline

from simpar.engine.simulate import execute
from simpar.schedule import Schedule, build, timetable

TIMES = Path(__file__).parents[2] / ".." / "shared" / "data" / "runs" / "component_times.csv"
RUNS = TIMES.with_name("runs.csv")
# model: ranks and chunks of 1F1B-I; per number of microbatches the rates of 1F1B, 1F1B-I, ZB-H1, ZB-H2
PUBLISHED = {
    "1.5B": (
        (8, 3),
        {
            24: (0.2431, 0.1055, 0.1585, 0.1083),
            32: (0.1985, 0.0818, 0.1242, 0.0837),
            64: (0.1240, 0.0443, 0.0674, 0.0444),
        },
    ),
    "6.2B": (
        (8, 4),
        {
            24: (0.2347, 0.0808, 0.1323, 0.0698),
            32: (0.1898, 0.0628, 0.1045, 0.0559),
            64: (0.1091, 0.0320, 0.0554, 0.0294),
        },
    ),
    "14.6B": (
        (16, 3),
        {
            48: (0.2552, 0.1104, 0.1397, 0.0672),
            64: (0.2082, 0.0852, 0.1088, 0.0516),
            128: (0.1251, 0.0445, 0.0576, 0.0266),
        },
    ),
    "28.3B": (
        (32, 2),
        {
            96: (0.2646, 0.1493, 0.1421, 0.0641),
            128: (0.2168, 0.1164, 0.1106, 0.0490),
            256: (0.1352, 0.0624, 0.0594, 0.0257),
        },
    ),
}
CASES = [(model, m) for model, (_, rates) in PUBLISHED.items() for m in rates]


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        pytest.skip(f"the published measurements ({path.name}) are not beside the repository")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _stage_ns(model: str, m: int) -> tuple[int, int, int, int]:
    """Forward, input gradient, weight gradient and message."""
    rows = [row for row in _rows(TIMES) if row["variant"].startswith(f"{model} m={m} ")]
    found = {row["quantity"].split()[0]: round(float(row["value"]) * 1e6) for row in rows}
    return found["T_F"], found["T_B"], found["T_W"], found["T_comm"]


def _cost_ns(schedule: Schedule, times: tuple[int, int, int, int], chunks: int = 1) -> int:
    forward, gradient, weight, message = times
    parts = {
        "forward": forward // chunks,
        "backward": (gradient + weight) // chunks,
        "weight": weight // chunks,
    }
    if schedule.pp * schedule.microbatches > 1024:
        table = timetable(schedule, **parts, transfer=message)
        return max(max(table[a].end for a in o) - min(table[a].start for a in o) for o in schedule.ranks)
    program = pipeline(schedule, **parts)
    cluster = ideal_cluster(gpus_per_node=schedule.pp, bytes_per_s=1e24, latency_s=message * 1e-9)
    trace = execute(program, cluster)
    costs = []
    for rank in range(schedule.pp):
        spans = lane_spans(trace, rank)
        costs.append(max(end for _, _, end in spans) - min(start for _, start, _ in spans))
    return max(costs)


@pytest.mark.parametrize(("model", "m"), CASES)
def test_bubble_rates_to_all_their_digits(model: str, m: int) -> None:
    (pp, _), rates = PUBLISHED[model]
    times = _stage_ns(model, m)
    for name, published in zip(("1f1b", "zb-h1", "zb-h2"), (rates[m][0], *rates[m][2:]), strict=True):
        cost = _cost_ns(build(name, pp=pp, microbatches=m), times)
        assert round(1 - m * sum(times[:3]) / cost, 4) == published


@pytest.mark.parametrize(("model", "m"), CASES)
def test_interleaved_bubble_rates_with_equal_chunks(model: str, m: int) -> None:
    """The paper does not say how it cut the times of a stage into chunks; equal parts come within half a point."""
    (pp, chunks), rates = PUBLISHED[model]
    times = _stage_ns(model, m)
    cost = _cost_ns(build("interleaved", pp=pp, microbatches=m, chunks=chunks), times, chunks)
    assert 1 - m * sum(times[:3]) / cost == pytest.approx(rates[m][1], abs=0.005)


@pytest.mark.parametrize(("model", "m"), [case for case in CASES if case[0] != "1.5B"])
def test_the_measured_steps_of_1f1b_take_as_long(model: str, m: int) -> None:
    """Stage times came from other runs, and the optimizer is not among them."""
    (pp, _), _ = PUBLISHED[model]
    (measured,) = {
        float(row["step_time_s"])
        for row in _rows(RUNS)
        if row["source"] == "zero_bubble"
        and row["model"].endswith(f" {model}")
        and (int(row["pp"]), int(row["grad_accum"]), row["vpp"], row["peak_mem_gib"] != "") == (pp, m, "1", True)
    }
    cost = _cost_ns(build("1f1b", pp=pp, microbatches=m), _stage_ns(model, m))
    assert cost * 1e-9 == pytest.approx(measured, rel=0.1)
