"""How hard streams work their links, walked from the program, against what the network booked on the clock."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from simpar.result import Result
from simpar.simulation import simulate
from simpar.trace.trace import KINDS, Trace
from simpar.trace.utilisation import link_line, link_share

MODEL = {"base": "llama3-8b", "name": "llama3-8b", "layers": 4}


def run(cluster: str, faults: dict[str, Any] | None = None, **plan: Any) -> Result:
    job = {"model": MODEL, "cluster": cluster, "plan": {"seq_len": 2048, **plan}, "faults": faults or {}}
    return simulate(job, allow_oom=True)


def needed_s(trace: Trace) -> dict[tuple[int, str], float]:
    """Seconds of links at full capacity, by rank and communicator."""
    use, found = trace.link_s_per_byte(), defaultdict(float)
    assert use is not None
    assert use.shape == (len(trace.lanes), len(KINDS))
    for table in (trace.spans, trace.kernels()):
        for index, lane in enumerate(trace.lanes):
            rows = table.lane == index
            if lane.stream != "compute":
                found[lane.rank, link_line(lane.stream)] += float(
                    (table.nbytes[rows] * use[index, table.kind[rows]]).sum()
                )
    return dict(found)


def booked_s(trace: Trace, name: str) -> float:
    return next((x.nbytes / x.capacity_bytes_per_s for x in trace.links if x.name == name), 0.0)


@pytest.mark.parametrize(
    ("cluster", "plan", "streams", "link"),
    [
        # the norm of the gradients is an all-reduce of the dp stream in every job
        ("h100-sxm:1x8", {"tp": 8, "global_batch": 4, "sequence_parallel": True}, "tp dp", "gpu0>"),
        ("h100-sxm:1x8", {"tp": 2, "zero": 1, "global_batch": 16, "sequence_parallel": True}, "tp dp", "gpu0<"),
        ("h100-sxm:1x8", {"zero": 3, "global_batch": 16}, "dp", "gpu0<"),
        ("h100-sxm:4x1", {"zero": 1, "global_batch": 16}, "dp", "nic0>"),
        ("h100-sxm:4x1", {"pp": 4, "global_batch": 8}, "pp dp", "nic0>"),
        ("h100-sxm:4x1", {"pp": 4, "global_batch": 8}, "pp dp", "nic1>"),
        ("h100-sxm:2x8", {"tp": 8, "pp": 2, "global_batch": 8}, "tp dp", "gpu8>"),
    ],
)
def test_streams_need_of_a_link_what_it_carried(cluster: str, plan: dict[str, Any], streams: str, link: str) -> None:
    trace = run(cluster, **plan).trace
    needed = needed_s(trace)
    total = sum(needed[int(link[3:-1]), stream] for stream in streams.split())
    assert total == pytest.approx(booked_s(trace, link), rel=1e-9)
    assert total > 0


def test_of_two_tiers_the_busier_counts() -> None:
    trace = run("h100-sxm:2x8", zero=3, global_batch=16).trace
    tiers = [booked_s(trace, "gpu0>"), booked_s(trace, "nic0>")]
    assert min(tiers) > 0
    assert needed_s(trace)[0, "dp"] == pytest.approx(max(tiers), rel=1e-6)


def test_a_slow_link_is_used_more() -> None:
    plan = {"zero": 1, "global_batch": 16}
    whole, half = (run("h100-sxm:4x1", faults, **plan).trace for faults in (None, {"slow_links": {"nic0": 0.5}}))
    assert needed_s(half)[0, "dp"] == pytest.approx(2 * needed_s(whole)[0, "dp"], rel=1e-9)


@pytest.mark.parametrize(
    "plan",
    [
        {"tp": 2, "pp": 2, "zero": 1, "global_batch": 32, "sequence_parallel": True},
        {"zero": 3, "dp_shard": 4, "global_batch": 32},  # shards within nodes, replicas across them
        {"zero": 2, "offload": "both", "global_batch": 32},
    ],
    ids=str,
)
def test_shares_of_bins_add_up_and_stay_below_one(plan) -> None:
    trace = run("h100-sxm:2x8", **plan).trace
    use = trace.link_s_per_byte()
    assert use is not None
    edges = np.linspace(0, trace.step_ns, 400).astype(np.int64)
    shares = link_share((trace.spans, trace.kernels()), trace.lanes, edges, use)
    needed = needed_s(trace)
    replicas = {lane.rank: lane.replicas for lane in trace.lanes}
    for name, share in shares.items():
        ranks = {rank: seconds for (rank, stream), seconds in needed.items() if stream == name}
        mean = sum(replicas[r] * s for r, s in ranks.items()) / sum(replicas[r] for r in ranks)
        assert (share * np.diff(edges)).sum() * 1e-9 == pytest.approx(mean, rel=1e-9)
        assert (share >= 0).all()
        assert share.max() <= 1 + 1e-9
