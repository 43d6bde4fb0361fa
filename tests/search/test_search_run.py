"""The search: the best of all, exactly; what it reports; and that nothing is lost on the way."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from synthetic import small_transformer

import simpar
from simpar.errors import JobError, PlanError
from simpar.job import read_model
from simpar.schedule import build, to_csv
from simpar.search.found import Found, group, pareto
from simpar.search.journal import Journal
from simpar.search.run import search
from simpar.search.unsearched import unsearched

FIELDS = {"global_batch": 16, "seq_len": 512, "workers": 1}
CHOICES = {"micro_batch": [1, 2], "recompute": ["none", "full"], "zero": [0, 1, 3], "pp": [1, 2], "vpp": [1, 3]}


def small(**changes):
    return search("gpt2", "h100-sxm:4", **{**FIELDS, "choices": CHOICES, "top": 3, **changes})


@pytest.fixture(scope="module")
def everything():
    return small(prune=False)


def test_the_best_is_the_best_of_the_exhaustive_run(everything):
    found = small()
    assert found.counts.pruned > 0
    assert everything.counts.pruned == 0
    assert everything.counts.opened == everything.counts.families > found.counts.opened
    assert found.counts.valid == everything.counts.valid
    assert found.counts.simulated < everything.counts.simulated
    assert found.found[:3] == everything.found[:3]  # with their intervals
    assert {f.plan["cp"] for f in everything.found} == {1, 2, 4}


def test_so_it_is_with_experts():
    fields = {
        "plan": {"seq_len": 256},
        "global_batch": 8,
        "choices": {"recompute": ["none"], "zero": [0, 1, 3], "micro_batch": [1, 2]},
        "workers": 1,
        "top": 4,
    }
    model = small_transformer(moe={"experts": 4, "top_k": 2, "ffn_hidden": 256}, layers=2)
    found, everything = (search(model, "h100-sxm:4", **fields, prune=prune) for prune in (True, False))
    assert found.found[:4] == everything.found[:4]
    assert found.counts.simulated < everything.counts.simulated
    assert {f.plan["ep"] for f in everything.found} == {1, 2, 4}
    assert {(f.plan["tp"], f.plan["etp"]) for f in everything.found} == {(1, 1), (2, 1), (2, 2), (4, 1), (4, 4)}


def test_so_it_is_with_samples_of_several_lengths():
    # of which nothing is known before the simulation
    data = {"lengths": [100, 500, 300, 200] * 4, "multiple": 8}
    fields = {"plan": {"data": data}, "choices": {**CHOICES, "cp": [1], "zero": [1], "recompute": ["none"]}}
    found, everything = (small(**fields, prune=prune) for prune in (True, False))
    assert found.found[:3] == everything.found[:3]


def test_the_counts_add_up(everything):
    for counts in (small().counts, everything.counts):
        ends = counts.invalid + counts.too_large + counts.pruned + counts.simulated
        assert ends == counts.enumerated == everything.counts.enumerated
        assert counts.simulated <= counts.bounded <= counts.enumerated


def test_a_front_that_is_asked_for_is_that_of_the_exhaustive_run(everything):
    found = small(whole_front=True)
    assert [f.plan for f in found.front()] == [f.plan for f in everything.front()]
    assert len(found.front()) > 1


def test_each_row_is_what_simulate_says(everything):
    best = everything.best
    result = simpar.simulate(everything.job(best))
    assert (best.step_time_s, best.memory_bytes) == (result.step_time_s, result.peak_memory_bytes)
    assert best.low_s < best.step_time_s < best.high_s
    assert best.bound_s <= best.step_time_s
    assert everything.records()[0]["tp"] == best.plan["tp"]


def test_what_does_not_fit_is_no_plan():
    few = {"pp": [1, 2], "vpp": [1], "micro_batch": [1], "recompute": ["none"], "zero": [0, 1]}
    found = search("llama3-8b", "h100-sxm:8", global_batch=8, seq_len=4096, workers=1, top=1, choices=few)
    assert found.counts.too_large > 0
    assert all(f.memory_bytes <= 80 * 2**30 for f in found.found)


def test_clusters_are_compared_by_gpus_and_cost():
    priced = [{"base": f"h100-sxm:{n}", "price_per_gpu_hour": 3.6} for n in (2, 4)]
    found = search("gpt2", priced, **FIELDS, choices={**CHOICES, "zero": [0], "pp": [1]}, top=1)
    assert {f.gpus for f in found.front()} == {2, 4}
    best = found.best
    assert best.cost_per_step == pytest.approx(best.step_time_s * best.gpus * 1e-3)


def test_fields_of_the_plan_hold_for_all():
    found = small(plan={"tp": 2, "precision": "fp16"})
    assert {f.plan["tp"] for f in found.found} == {2}
    assert found.job(found.best).plan.precision == "fp16"


def test_any_executor_finds_the_same(everything):
    with ThreadPoolExecutor(2) as executor:
        found = small(executor=executor, workers=2)
    assert found.best.plan == everything.best.plan


def test_processes_find_the_same_and_say_how_far_they_are(everything):
    told = []
    found = small(workers=2, progress=lambda *what: told.append(what))
    assert found.best == everything.best
    assert {what for what, _, _ in told} == {"families", "plans", "simulated"}
    last = {what: (done, total) for what, done, total in told}
    assert all(done == total for done, total in last.values())
    assert last["simulated"] == (found.counts.simulated, found.counts.simulated)
    assert any(done < total for what, done, total in told if what == "simulated")


def test_an_interrupted_search_goes_on(tmp_path: Path, everything):
    output = tmp_path / "search.jsonl"

    class EnoughError(Exception):
        pass

    def stop(what: str, done: int, total: int) -> None:
        if what == "plans" and len(output.read_text().splitlines()) > 4:
            raise EnoughError

    with pytest.raises(EnoughError):
        small(output=output, progress=stop, prune=False)  # the whole space, so that much is left to do
    before = output.read_text().splitlines()
    output.write_text(output.read_text() + '{"plan": {"tp": 1, "cut o')  # as a crash in the middle of a line leaves it
    found = small(output=output, resume=True, prune=False)
    assert found.found == everything.found
    assert found.counts.resumed == len(before) - 1
    lines = output.read_text().splitlines()
    assert lines[: len(before)] == before
    assert all(json.loads(line) for line in lines)


def test_a_search_that_has_ended_is_answered_by_its_file(tmp_path: Path, monkeypatch):
    fields = {"output": tmp_path / "search.jsonl", "choices": {**CHOICES, "rank_order": ["tp-dp-pp"]}}
    first = small(**fields)
    text = fields["output"].read_text()
    with monkeypatch.context() as broken:
        broken.setattr(import_module("simpar.search.run"), "answer", lambda *_: pytest.fail("was asked again"))
        again = small(**fields, resume=True)
    assert again == replace(first, counts=replace(first.counts, resumed=first.counts.simulated))
    assert again.groups() == first.groups()
    assert fields["output"].read_text() == text
    # another question of the same plans is worked out, with what is known
    for other in ({"top": 1}, {"top": 5}, {"whole_front": True}):
        found = small(**fields, **other, resume=True)
        assert (
            found.found[: other.get("top", 3)] == small(**other, choices=fields["choices"]).found[: other.get("top", 3)]
        )
        assert found.counts.resumed > 0
    assert small(**fields, resume=True) == again


@pytest.mark.parametrize("resume", [False, True])
def test_a_file_that_was_cut_off_before_any_answer_is_begun_anew(tmp_path: Path, resume: bool):
    path, question = tmp_path / "search.jsonl", {"search": {"model": "gpt2", "plan": [1, 2]}, "simpar": "1"}
    with Journal(path, question, resume=False):
        whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with Journal(path, question, resume=resume) as journal:
            assert journal.records == []
        assert path.read_bytes() == whole
    for other in (b"precious", b'{"questions', b'{"question": {}}\n', b"\n"):
        path.write_bytes(other)
        with pytest.raises(JobError), Journal(path, question, resume=resume):
            pass
        assert path.read_bytes() == other


def test_a_file_of_another_search_is_refused(tmp_path: Path):
    output = tmp_path / "search.jsonl"
    small(output=output, choices={**CHOICES, "zero": [0], "tp": [4]})
    with pytest.raises(JobError, match="exists already; resume it"):
        small(output=output)
    with pytest.raises(JobError, match="was made with another search; choose another name"):
        small(output=output, resume=True)
    (tmp_path / "other.txt").write_text("something\n")
    with pytest.raises(JobError, match="is not a file of this command"):
        small(output=tmp_path / "other.txt", resume=True)
    with pytest.raises(JobError, match="cannot be written"):
        small(output=tmp_path / "no" / "such.jsonl")


def test_what_cannot_be_searched_is_said():
    with pytest.raises(PlanError, match="'micro_bach' is not a field of a plan; did you mean 'micro_batch'"):
        small(choices={"micro_bach": [1]})
    with pytest.raises(PlanError, match="tp is given no value"):
        small(choices={"tp": []})
    with pytest.raises(PlanError, match="no combination of the choices makes a plan for gpt2 on 4 GPUs"):
        search("gpt2", "h100-sxm:4", global_batch=7, workers=1, choices={"tp": [1], "cp": [1], "pp": [1]})
    with pytest.raises(JobError, match="workers=0 cannot work"):
        small(workers=0)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tp": ["two"]}, "tp: 'two' should be a whole number"),
        ({"tp": [1, True]}, "tp: true should be a whole number"),
        ({"recompute": ["none", "ful"]}, "recompute: 'ful' should be 'none', 'selective' or 'full'"),
        ({"cp_method": ["ringg"]}, "cp_method: 'ringg' should be 'ring'"),
        ({"schedule": ["zb-h1", "foo"]}, "schedule: schedule 'foo' is not known"),
        ({"schedule": ["zb-h1", "no.csv"]}, "schedule file 'no.csv' cannot be read"),
        ({"recompute": "none"}, r"recompute: 'none' is no list of values to choose from; write \['none'\]"),
        ({"tp": 2}, r"tp: 2 is no list of values to choose from; write \[2\]"),
        ({"framework": ["torchtitan"]}, "framework is no choice of a search: plans share the framework; sweep it"),
        ({"overlap": [{"p2p": True}]}, "overlap is no choice of a search: plans share it; sweep its fields"),
        ({"sync": ["parameter_server"]}, "sync is no choice of a search: plans share it"),
        ({"global_batch": [8, 16]}, "global_batch is no choice of a search: plans share the batch; sweep it"),
        ({"seq_len": [512]}, "seq_len is no choice of a search"),
    ],
)
def test_a_choice_that_is_none_is_said(choices, message):
    with pytest.raises(PlanError, match=message) as caught:
        small(choices={**CHOICES, **choices})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("as_plan", [dict, lambda fields: simpar.Plan(**fields)])
@pytest.mark.parametrize(
    ("field", "fixed", "values"), [("tp", 2, [1]), ("zero", 1, [1, 3]), ("cp_method", "ring", ["ring"])]
)
def test_a_field_is_fixed_or_chosen_not_both(as_plan, field, fixed, values):
    choices = {name: each for name, each in CHOICES.items() if name != field}
    message = rf"{field}: choices \[.*\] cannot go with plan {field}={fixed}, which fixes it for all plans; drop one"
    with pytest.raises(PlanError, match=message):
        small(plan=as_plan({field: fixed}), choices={**choices, field: values})


@pytest.mark.parametrize("top", [0, -1])
def test_no_plan_is_not_searched_for(top: int):
    with pytest.raises(PlanError, match=f"top={top} finds nothing; give 1 or more"):
        small(top=top)


def test_equal_values_count_once_and_lists_are_values(tmp_path: Path):
    few = {"tp": [1], "cp": [1], "pp": [2], "micro_batch": [1], "schedule": ["1f1b"], "recompute": ["none"]}
    few |= {"zero": [0, 0], "layer_split": [[6, 6], (5, 7), [6, 6]]}
    output = tmp_path / "search.jsonl"
    found = small(choices=few, output=output)
    assert found.counts.enumerated == 2
    assert {f.plan["layer_split"] for f in found.found} == {(6, 6), (5, 7)}
    again = small(choices=few, output=output, resume=True)
    assert (again.counts.resumed, again.found) == (2, found.found)


def test_a_search_for_more_plans_adds_the_intervals_that_an_earlier_one_left_out(tmp_path: Path):
    output, choices = tmp_path / "search.jsonl", {**CHOICES, "cp": [1], "recompute": ["none"], "tp": [1, 2]}
    fields = {"choices": choices, "prune": False}
    before = small(**fields, top=1, output=output)
    assert any(f.low_s is None for f in before.found[:6])
    for more in ({"top": 6}, {"top": 6, "whole_front": True}):
        again = small(**fields, **more, output=output, resume=True)
        assert again.counts.resumed > 0
        assert again.found == small(**fields, **more).found


def test_a_file_of_another_module_of_the_same_name_is_refused(tmp_path: Path):
    wide, narrow = (read_model(f"mlp:64-{width}-10") for width in (4096, 32))
    narrow = replace(narrow, name=wide.name)
    fields = {"global_batch": 64, "workers": 1, "top": 1, "output": tmp_path / "search.jsonl"}
    search(wide, "h100-sxm:2", **fields)
    assert search(wide, "h100-sxm:2", **fields, resume=True).counts.resumed > 0
    with pytest.raises(JobError, match="was made with another search"):
        search(narrow, "h100-sxm:2", **fields, resume=True)


def test_a_file_of_another_schedule_of_the_same_name_is_refused(tmp_path: Path):
    path = tmp_path / "mine.csv"
    few = {"tp": [1], "cp": [1], "pp": [2], "micro_batch": [4], "schedule": [str(path)], "recompute": ["none"]}
    fields = {"choices": few, "output": tmp_path / "search.jsonl"}
    path.write_text(to_csv(build("gpipe", pp=2, microbatches=2)))
    assert small(**fields).found
    path.write_text(to_csv(build("1f1b", pp=2, microbatches=2)))
    with pytest.raises(JobError, match="was made with another search"):
        small(**fields, resume=True)


def test_nodes_that_serve_take_no_part_in_degrees():
    plan = {"sync": {"on": "nodes"}}
    found = search(
        "gpt2", "h100-sxm:3x4", plan=plan, choices={"recompute": ["none"], "cp": [1]}, **{**FIELDS, "top": 1}
    )
    tp, pp = (found.best.plan[name] for name in ("tp", "pp"))
    assert 8 % (tp * pp) == 0  # of 12, one node of 4 serves
    assert found.best.step_time_s == simpar.simulate(found.job(found.best)).step_time_s


def found(step_s: float, memory: int, low: float = 0.0, high: float = 0.0, gpus: int = 1) -> Found:
    return Found(
        plan={"memory": memory},
        step_time_s=step_s,
        low_s=low or step_s,
        high_s=high or step_s,
        memory_bytes=memory,
        gpus=gpus,
        tokens_per_s=1.0,
        mfu=0.5,
    )


def test_groups_are_what_overlaps_with_their_fastest():
    plans = [found(1.0, 1, 0.9, 1.1), found(1.15, 1, 1.05, 1.3), found(1.25, 1, 1.2, 1.3)]
    assert [len(members) for members in group(plans)] == [2, 1]


def test_the_front_keeps_what_nothing_beats():
    plans = [found(1.0, 9), found(2.0, 5), found(3.0, 7), found(4.0, 5), found(2.0, 5), found(5.0, 9, gpus=0)]
    assert [(f.step_time_s, f.memory_bytes) for f in pareto(plans)] == [(1.0, 9), (2.0, 5), (5.0, 9)]


def test_a_table_of_it_is_pandas():
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = small(top=1).to_dataframe()
    assert isinstance(frame, pd.DataFrame)
    assert {"tp", "step_time_s", "memory_bytes"} <= set(frame.columns)


def test_the_public_name_is_the_function_whatever_was_imported():
    assert simpar.search is search
    assert simpar.sweep.__module__ == "simpar.search.sweep"


# ---- where nothing fits ---------------------------------------------------------------------------------------------


def test_where_nothing_fits_what_was_left_out_is_named():
    few = {"micro_batch": [1], "pp": [1], "cp": [1], "recompute": ["full"], "zero": [3]}
    fields = {"model": "llama3-70b", "cluster": "h100-sxm:1x8", "global_batch": 8, "seq_len": 4096, "workers": 1}
    found = search(**fields, choices=few)
    assert not found.found
    (way,) = unsearched(found)
    assert way.fields == {"offload": "optimizer"}
    assert str(way).startswith("--choose offload=none,optimizer (as zero=3 recompute=full offload=optimizer: ")
    with_it = search(**fields, choices={**few, "offload": ["none", "optimizer"]}, top=1)
    assert with_it.best.plan["offload"] == "optimizer"
    plan = found.jobs[0].plan.replace(**way.relief.change)
    result = simpar.simulate(found.jobs[0].replace(plan=plan))
    assert result.peak_memory_bytes == way.relief.peak_bytes


def test_what_a_job_says_is_to_be_set_and_what_is_chosen_to_be_chosen():
    fields = {"model": "llama3-8b", "cluster": "h100-sxm:8", "global_batch": 8, "seq_len": 4096, "workers": 1}
    few = {"micro_batch": [1], "pp": [1], "tp": [1], "cp": [1], "recompute": ["full"], "zero": [0]}
    found = search(**fields, plan={"offload": "none"}, choices=few)
    assert not found.found
    assert [way.fields for way in unsearched(found)] == [{"zero": 3}]
    big = {**fields, "model": "llama3-70b", "choices": {**few, "zero": [3]}}
    for plan, word in (({"offload": "none"}, "--set plan."), ({}, "--choose offload=none,")):
        (way,) = unsearched(search(**big, plan=plan))
        assert str(way).startswith(f"{word.replace('plan.', 'plan.offload=')}optimizer ")


@pytest.mark.parametrize(
    ("line", "change", "text"),
    [
        (1, lambda _: [1], "is no answer of a search"),
        (1, lambda _: {}, "is no answer of a search (plan: Field required)"),
        (1, lambda answer: {**answer, "mfu": None}, "mfu is None: "),
        (1, lambda answer: {**answer, "step_time_s": -1.0}, "step_time_s is -1.0: "),
        (1, lambda answer: {**answer, "cluster": 5}, "cluster 5 is none of the 1"),
        (1, lambda answer: {**answer, "more": 1}, "more is 1: Extra inputs are not permitted"),
        (-1, lambda ended: {**ended, "found": []}, "0 plans are listed, but "),
        (-1, lambda ended: {**ended, "counts": {}}, "counts."),
        (0, lambda _: {"question": 5}, "is not a file of this command"),
    ],
)
def test_lines_that_no_search_has_written_are_refused_by_number(tmp_path: Path, line, change, text):
    path = tmp_path / "plans.jsonl"
    few = {**FIELDS, "choices": {**CHOICES, "tp": [1], "pp": [1]}, "output": path}
    search("gpt2", "h100-sxm:4", **few)
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(change(json.loads(lines[line])))
    path.write_text("\n".join(lines) + "\n")
    before = path.read_bytes()
    with pytest.raises(JobError) as caught:
        search("gpt2", "h100-sxm:4", **few, resume=True)
    assert text in str(caught.value)
    assert line == 0 or f"plans.jsonl:{line % len(lines) + 1}: " in str(caught.value)
    assert path.read_bytes() == before


def test_a_line_that_is_no_json_is_refused_by_number(tmp_path: Path):
    path = tmp_path / "plans.jsonl"
    few = {**FIELDS, "choices": {**CHOICES, "tp": [1], "pp": [1]}, "output": path}
    search("gpt2", "h100-sxm:4", **few)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n")
    with pytest.raises(JobError, match=r"plans.jsonl:2: is no JSON; remove that line"):
        search("gpt2", "h100-sxm:4", **few, resume=True)
