"""Samples of different lengths: every one on exactly one rank, and steps as long as their fullest replica needs."""

import math
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simpar
from simpar.errors import PlanError, SimparError
from simpar.plan.samples import Data, Lengths, owners, step_samples

MODEL = "llama3.2-1b"


def job(cluster="h100-sxm:1x4", **plan):
    return simpar.Job(model=MODEL, cluster=cluster, plan={"seq_len": 2048, "launch_s": 0.0, **plan})


@given(st.integers(0, 500), st.integers(1, 40), st.sampled_from(["block", "ring"]))
def test_each_sample_has_one_owner_and_shares_differ_by_at_most_one(samples, dp, partition):
    parts = owners(samples, dp, partition)
    assert sorted(sample for part in parts for sample in part) == list(range(samples))
    assert len(parts) == dp
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_money_buys_tokens_and_no_padding():
    cluster = {"device": "h100-sxm", "gpus_per_node": 4, "price_per_gpu_hour": 2.0}
    result = simpar.simulate(job(cluster, data={"lengths": [100, 2000, 300, 400], "multiple": 2048}))
    paid = 4 * 2.0 * result.step_time_s / 3600
    assert result.cost().tokens_per_price == pytest.approx((100 + 2000 + 300 + 400) / paid)
    assert result.cost(tokens=2800.0).run.steps == pytest.approx(1)


def test_blocks_are_runs_and_rings_are_dealt_out():
    assert [list(part) for part in owners(6, 2, "block")] == [[0, 1, 2], [3, 4, 5]]
    assert [list(part) for part in owners(6, 2, "ring")] == [[0, 2, 4], [1, 3, 5]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), min_size=12, max_size=60), st.sampled_from(["block", "ring"]), st.integers(1, 64))
def test_an_epoch_runs_every_sample_once(lengths, partition, multiple):
    dp, micro_batch, microbatches = 2, 2, 3
    steps = len(lengths) // (dp * micro_batch * microbatches)
    seen = []
    for step in range(steps):
        data = Data(lengths=tuple(lengths), partition=partition, multiple=multiple, step=step)
        found = step_samples(data, dp=dp, micro_batch=micro_batch, microbatches=microbatches)
        seen += found.lengths
        for padded, replica in zip(found.padded, found.samples, strict=True):
            assert all(length % multiple == 0 for length in padded)
            assert all(
                max(batch) <= length < max(batch) + multiple for batch, length in zip(replica, padded, strict=True)
            )
        assert 0 <= found.padding < 1
        assert found.imbalance >= -1e-12
    assert len(seen) == steps * dp * micro_batch * microbatches
    if len(lengths) == len(seen):
        assert sorted(seen) == sorted(lengths)


def test_equal_lengths_are_the_job_without_a_data_set():
    plain = simpar.simulate(job(grad_accum=3, seq_len=1024))
    same = simpar.simulate(job(grad_accum=3, data={"lengths": [1024] * 12}))
    assert same.trace.step_ns == plain.trace.step_ns
    assert same.tokens_per_s == pytest.approx(plain.tokens_per_s)
    assert same.model_flop == pytest.approx(plain.model_flop)
    assert len(same.ranks) == len(plain.ranks) == 1


def test_the_fullest_replica_sets_the_pace():
    lengths = [2048, 512, 512, 512]
    found = simpar.simulate(job(data={"lengths": lengths}))
    longest = simpar.simulate(job(seq_len=2048))
    shortest = simpar.simulate(job(seq_len=512))
    assert shortest.step_time_s < found.step_time_s == pytest.approx(longest.step_time_s, rel=0.02)
    waits = [rank.bubble_s for rank in found.ranks]
    assert len(found.ranks) == 2  # the three short ones are alike
    assert [rank.replicas for rank in found.ranks] == [1, 3]
    assert waits[1] > waits[0] + 0.5 * (longest.step_time_s - shortest.step_time_s)
    assert found.layout.step_tokens == sum(lengths)


@pytest.mark.parametrize(
    "plan",
    [{}, {"zero": 3}, {"zero": 1, "grad_accum": 2}, {"tp": 2}, {"pp": 2, "grad_accum": 2, "layer_split": "balanced"}],
)
def test_folded_equals_unfolded(plan):
    lengths = [300, 1900, 300, 300, 300, 1900, 300, 700]
    found = job(cluster="h100-sxm:1x4", data={"lengths": lengths}, **plan)
    folded, unfolded = (simpar.simulate(found, fold=fold) for fold in (True, False))
    assert folded.trace.step_ns == unfolded.trace.step_ns
    assert sum(rank.replicas for rank in folded.ranks) == sum(rank.replicas for rank in unfolded.ranks) == 4
    assert len(folded.ranks) <= len(unfolded.ranks)


def test_a_sorted_data_set_is_uneven_by_blocks_only():
    lengths = {"samples": 512, "mean": 500, "longest": 2048, "order": "sorted", "seed": 3}
    block, ring = (
        [
            simpar.simulate(job(grad_accum=2, data={"lengths": lengths, "partition": p, "step": step}))
            for step in (0, 20, 40, 63)
        ]
        for p in ("block", "ring")
    )
    for one, other in zip(block, ring, strict=True):
        assert one.layout.samples.imbalance > 0.5
        assert other.layout.samples.imbalance < 0.1
        assert one.bubble_fraction > other.bubble_fraction
    speeds = [sum(r.layout.step_tokens for r in each) / sum(r.step_time_s for r in each) for each in (block, ring)]
    assert speeds[1] > 1.1 * speeds[0]


def test_the_report_says_how_uneven_it_is():
    found = simpar.simulate(job(data={"lengths": [2000, 100, 100, 100]}))
    said = next(text for text in found.warnings if text.startswith("samples of"))
    loads = [2048, 128, 128, 128]
    assert f"samples of 100 to 2,000 tokens: the fullest replica has {max(loads) / fmean(loads) - 1:.1%} more" in said
    assert f"{1 - 2300 / sum(loads):.1%} of the tokens are padding" in said


def test_draws_are_reproducible_and_as_told():
    fields = {"samples": 20_000, "mean": 600, "spread": 0.7, "longest": 100_000}
    drawn = Lengths(**fields).draw()
    assert drawn == Lengths(**fields).draw() != Lengths(**fields, seed=1).draw()
    assert fmean(drawn) == pytest.approx(600, rel=0.03)
    logs = [math.log(length) for length in drawn]
    middle = fmean(logs)
    assert math.sqrt(fmean((each - middle) ** 2 for each in logs)) == pytest.approx(0.7, rel=0.03)
    even = Lengths(distribution="uniform", samples=5000, shortest=10, longest=20).draw()
    assert (min(even), max(even)) == (10, 20)


def test_lengths_from_a_file(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("100\n200\n\n300 400\n", encoding="utf-8")
    assert Data(lengths=str(path)).read() == (100, 200, 300, 400)


@pytest.mark.parametrize(("text", "message"), [("12\n-3\n", "entry 2: '-3' is no positive whole number; mend it")])
def test_a_file_with_something_else(tmp_path, text, message):
    path = tmp_path / "lengths.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SimparError) as error:
        Data(lengths=str(path)).read()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"lengths": "/nowhere/x.txt"}}, "lengths file '/nowhere/x.txt' cannot be read (No such file"),
        (
            {"data": {"lengths": [100] * 7}, "grad_accum": 2},
            "7 samples has 0 whole steps of 8, but step 0 is asked for",
        ),
        ({"data": {"lengths": [100] * 9, "step": 2}}, "has 2 whole steps of 4, but step 2 is asked for; set data.step"),
        ({"data": {"lengths": [0, 1]}}, "should be greater than or equal to 1"),
        ({"data": {"lengths": {"samples": 9, "shortest": 9, "longest": 3}}}, "shortest 9 exceeds longest 3; swap them"),
        ({"data": {"lengths": [9] * 4, "partition": "rings"}}, "'rings' should be 'block' or 'ring'"),
        (
            {"data": {"lengths": [9] * 4, "multiple": 3}, "tp": 2, "sequence_parallel": True},
            "data.multiple 3 leaves sequences that tp 2 and cp 1 cannot divide evenly; set it to a multiple of 4",
        ),
    ],
)
def test_what_cannot_be_says_what_to_change(changes, message):
    with pytest.raises(SimparError) as error:
        simpar.simulate(job(**changes))
    assert message in str(error.value)


def test_modules_have_no_tokens():
    plan = {"data": {"lengths": [5, 5]}}
    with pytest.raises(PlanError, match="means nothing to the module mlp:8-8; drop it"):
        simpar.simulate(simpar.Job(model="mlp:8-8", cluster="cpu:1x2", plan=plan))


SHARED = [{"ep": 2}, {"ep": 4, "grad_accum": 2}, {"etp": 2}, {"tp": 2, "ep": 2, "sequence_parallel": True}]


@pytest.mark.parametrize("plan", SHARED, ids=str)
def test_replicas_that_share_experts_need_samples_of_one_length(plan):
    def experts(**data):
        fields = {"seq_len": 2048, "data": {"lengths": {"samples": 64, "mean": 300.0, "longest": 2048}, **data}, **plan}
        return simpar.Job(model={"base": "mixtral-8x7b", "layers": 2}, cluster="h100-sxm:1x4", plan=fields)

    with pytest.raises(
        PlanError, match=r"^data gives replicas microbatches of different lengths, but with ep"
    ) as caught:
        simpar.simulate(experts(), allow_oom=True)
    padded = int(str(caught.value).rpartition("=")[2])
    assert simpar.simulate(experts(multiple=padded), allow_oom=True).step_time_s > 0  # the mend works
    apart = simpar.Job.model_validate(experts()).plan.replace(ep=1, etp=plan.get("tp", 1))
    assert simpar.simulate(dict(experts()) | {"plan": apart}, allow_oom=True).step_time_s > 0
