"""Changes that make a plan fit: their peaks are those of the simulated step."""

import pytest
from synthetic import small_transformer

from simpar import Cluster, Plan, simulate
from simpar.program.relief import fitting


@pytest.mark.parametrize(
    "change",
    [
        {"zero": 1},
        {"zero": 3},
        {"pp": 2, "dp": None},
        {"pp": 4, "dp": None, "recompute": "full"},
        {"pp": 2, "dp": None, "schedule": "gpipe"},
        {"pp": 2, "dp": None, "schedule": "interleaved", "vpp": 2},
        {"zero": 3, "offload": "both"},
    ],
)
def test_many_microbatches_hold_no_more_than_a_few(change):
    model, cluster = small_transformer(), Cluster.parse("h100-sxm:1x4")
    plan = Plan(global_batch=96, seq_len=256)
    (relief,) = fitting(model, cluster, plan, [change])
    whole = simulate({"model": model, "cluster": cluster, "plan": plan.replace(**change)})
    assert relief.peak_bytes == whole.peak_memory_bytes
    assert relief.change == {name: value for name, value in change.items() if getattr(plan, name) != value}
