"""The fields of the live page: jobs, messages beside fields, addresses, job files."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simpar.errors import JobError
from simpar.job import Job
from simpar.view.what_if import DEFAULTS, from_job, from_query, job_fields, outcome, to_query, to_yaml

SMALL = {
    **DEFAULTS,
    "model": "gpt2",
    "cluster": "h100-sxm:1x8",
    "tp": 1,
    "pp": 1,
    "seq_len": 1024,
    "sequence_parallel": False,
}


def test_fields_become_a_job_that_is_simulated() -> None:
    found = outcome(SMALL)
    assert not found.errors
    assert found.result is not None
    assert found.result.layout.global_batch == 128


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"tp": 3}, "tp", "tp 3"),
        ({"model": "gpt9"}, "model", "unknown model 'gpt9'"),
        ({"cluster": "h100-sxm"}, "cluster", ""),
        ({"cluster": "b9000:1x8"}, "cluster", ""),
        ({"micro_batch": -1}, "micro_batch", ""),
        ({"micro_batch": None}, "micro_batch", "is empty; give a value"),
        ({"nic_gbps": -5}, "nic_gbps", ""),
        ({"model": ""}, "model", "is empty; give a value"),
    ],
)
def test_a_mistake_stands_beside_its_field(change: dict[str, object], field: str, text: str) -> None:
    found = outcome({**SMALL, **change})
    assert found.result is None
    assert list(found.errors) == [field]
    assert text in found.errors[field]


def test_a_plan_that_does_not_fit_is_shown_all_the_same() -> None:
    found = outcome({**DEFAULTS, "model": "llama3-70b", "cluster": "h100-sxm:1x8", "tp": 8, "pp": 1, "zero": 0})
    assert found.result is not None
    assert not found.result.fits


def test_bandwidth_changes_the_fabric_alone() -> None:
    fields = job_fields({**DEFAULTS, "nic_gbps": 800})
    job = Job.model_validate(fields)
    assert job.cluster.fabric is not None
    assert job.cluster.fabric.nic_gbps == 800
    assert job.cluster.nodes == 16


values = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4, 8]),
        "micro_batch": st.sampled_from([1, 2, None]),
        "nic_gbps": st.sampled_from([None, 200, 400.5]),
        "schedule": st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
        "sequence_parallel": st.booleans(),
        "model": st.sampled_from(["gpt2", "a & b=c?", "llama3-8b"]),
    }
)


@given(values, st.none() | values, st.sampled_from(["", "memory", "A and B"]))
def test_an_address_leads_back(given_: dict[str, object], kept: dict[str, object] | None, view: str) -> None:
    now = {**DEFAULTS, **given_}
    before = None if kept is None else {**DEFAULTS, **kept}
    assert from_query(to_query(now, before, view)) == (now, before, view)


def test_what_an_address_garbles_is_as_by_default() -> None:
    values, kept, view = from_query("?tp=many&pp=1e999&unknown=1&seq_len=nan")
    assert (values, kept, view) == (DEFAULTS, None, "")


def test_a_job_file_leads_back() -> None:
    for change in ({}, {"nic_gbps": 800, "tp": 1, "zero": 0}):
        now = {**SMALL, **change}
        assert from_job(yaml.safe_load(to_yaml(now))) == now


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"plan": {"overlap": {}}}, "the page has no field for overlap"),
        ({"cluster": {"device": "h100-sxm", "nodes": 2}}, "the page knows clusters by name"),
        ({"model": {"layers": 2}}, "the page knows models by name"),
    ],
)
def test_a_job_file_with_more_than_the_page_has_is_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(JobError, match=text):
        from_job(fields)
