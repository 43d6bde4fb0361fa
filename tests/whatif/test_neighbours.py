"""Jobs that share a fabric: no effect where no link is shared, and what shared links must cost."""

import pytest

from simpar.errors import JobError
from simpar.hardware.cluster import Cluster
from simpar.job import Job
from simpar.model.presets import preset
from simpar.whatif.neighbours import simulate_together

MODEL = preset("gpt2").replace(layers=2)
APART = None
INTERLEAVED = [node * 4 + gpu for node in (0, 2, 1, 3) for gpu in range(4)]


def cluster(placement: list[int] | None, oversubscription: float = 1.0) -> Cluster:
    fabric = {"base": "ndr400", "pod_nodes": 2, "oversubscription": oversubscription}
    return Cluster(device="h100-sxm", nodes=4, gpus_per_node=4, fabric=fabric, placement=placement)


def job(**plan: object) -> Job:
    return Job(model=MODEL, cluster="h100-sxm:2x4", plan={"launch_s": 0.0, **plan})


def test_jobs_in_pods_of_their_own_do_not_notice_each_other():
    found = simulate_together([job(), job(tp=2, pp=2, global_batch=16)], cluster(APART, 8))
    assert found.slowdowns == pytest.approx([1.0, 1.0])


def test_jobs_that_share_full_uplinks_do_not_wait():
    found = simulate_together([job(), job()], cluster(INTERLEAVED))
    assert found.slowdowns == pytest.approx([1.0, 1.0])


def test_equal_jobs_share_what_uplinks_there_are():
    alone, both = (
        simulate_together(jobs, place)
        for jobs, place in (
            ([job()], Cluster(device="h100-sxm", nodes=2, gpus_per_node=4)),
            ([job(), job()], cluster(INTERLEAVED, 8)),
        )
    )
    assert both.together_s[0] == both.together_s[1] > both.alone_s[0] > alone.alone_s[0]
    # two jobs on uplinks of one: as one job on uplinks of half the width
    halved = simulate_together([job(), job()], cluster(INTERLEAVED, 16))
    assert both.together_s[0] == pytest.approx(halved.alone_s[0], rel=1e-3)


def test_short_steps_are_repeated_beside_long_ones():
    found = simulate_together([job(), job(pp=2, global_batch=64)], cluster(APART))
    assert found.alone_s[1] > 2 * found.alone_s[0]
    assert found.slowdowns == pytest.approx([1.0, 1.0], rel=0.02)
    ends = found.trace.step_s
    assert ends == pytest.approx(found.alone_s[1], rel=1.0)


@pytest.mark.parametrize(
    ("jobs", "message"),
    [
        ([job()], "jobs of 8 GPUs do not make up the cluster's 16"),
        ([job(), job(launch_s=1e-6)], "jobs that run together must agree in launch_s"),
    ],
)
def test_jobs_that_do_not_fit_together_say_so(jobs, message):
    with pytest.raises(JobError, match=message):
        simulate_together(jobs, cluster(APART))
