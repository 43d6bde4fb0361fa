"""Job files: what they may say, and what is said about their mistakes."""

import json
from pathlib import Path

import pytest

from simpar.cli.jobfile import load_job, parse_change, read_draft
from simpar.cli.schema import job_schema
from simpar.errors import JobError, PlanError
from simpar.hardware.device import device
from simpar.hardware.profile import Profile
from simpar.job import Job
from simpar.model.module import ModuleModel, mlp
from simpar.model.presets import preset
from simpar.model.transformer import Transformer
from simpar.plan.sync import ParameterServer
from simpar.simulation import simulate

LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
GOOD = "model: llama3-8b\ncluster: h100-sxm:1x8\n"
SHIPPED = Path(__file__).parent.parent.parent / "scenarios" / "jobs"


@pytest.fixture(autouse=True)
def _in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(text: str | bytes, name: str = "job.yaml") -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def mistakes(text: str | bytes) -> str:
    path = written(text)
    with pytest.raises(JobError) as caught:
        read_and_check(path)
    return str(caught.value)


def read_and_check(path: Path) -> None:
    draft = read_draft(path)
    draft.lay_out(draft.job())


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_jobs_run(path: Path) -> None:
    result = simulate(load_job(path))
    assert result.fits
    assert f"{result.job.cluster.gpus}x" in path.stem
    assert path.stem.startswith(result.job.model.name)


def test_there_are_shipped_jobs() -> None:
    assert len(list(SHIPPED.glob("*.yaml"))) == 2


def test_a_preset_may_be_changed() -> None:
    job = load_job(written("model: {base: llama3-70b, layers: 40}\ncluster: h100:8\n"))
    assert job.model == preset("llama3-70b").replace(layers=40, name="llama3-70b with layers=40")


def test_a_preset_of_any_capitals_is_meant() -> None:
    assert load_job(written("model: Llama3-8B\ncluster: h100:8\n")).model == preset("llama3-8b")


def test_a_folder_with_the_name_of_a_preset_does_not_hide_it() -> None:
    Path("llama3-8b").mkdir()
    assert load_job(written(GOOD)).model == preset("llama3-8b")


def test_a_model_of_fields() -> None:
    fields = "{name: tiny, layers: 4, hidden: 256, heads: 4, gated_mlp: false, vocab: 1000, tied_embeddings: true}"
    model = load_job(written(f"model: {fields}\ncluster: h100:8\n")).model
    assert isinstance(model, Transformer)
    assert (model.layers, model.ffn_hidden) == (4, 1024)


def test_a_perceptron() -> None:
    model = load_job(written("model: mlp:784-500-10\ncluster: cpu:2\n")).model
    assert isinstance(model, ModuleModel)
    assert model == mlp("784-500-10")


@pytest.mark.parametrize("form", ["configs/config.json", "configs", "{base: configs/config.json, layers: 16}"])
def test_paths_are_relative_to_the_file(form: str) -> None:
    written(json.dumps(LLAMA_CONFIG), "deep/configs/config.json")
    model = load_job(written(f"model: {form}\ncluster: h100:8\n", "deep/job.yaml")).model
    assert isinstance(model, Transformer)
    assert (model.layers, model.hidden) == (16, 2048)


@pytest.mark.parametrize(
    "form", ["box.json:1x2", "{base: 'box.json:1x2', nodes: 1}", "{profile: box.json, gpus_per_node: 2}"]
)
def test_profiles_are_relative_to_the_file(form: str) -> None:
    profile = Profile(name="box", device=device("cpu"))
    written(profile.to_json(), "deep/box.json")
    cluster = load_job(written(f"model: llama3-8b\ncluster: {form}\n", "deep/job.yaml")).cluster
    assert (cluster.device.name, cluster.gpus) == ("cpu", 2)


def test_a_cluster_may_be_changed_in_parts() -> None:
    text = "model: llama3-8b\ncluster: {base: 'h100-sxm:4x8', nodes: 2, fabric: {nic_gbps: 800}}\n"
    cluster = load_job(written(text)).cluster
    assert cluster.fabric is not None
    assert (cluster.gpus, cluster.fabric.nic_gbps, cluster.fabric.ring_step_s) == (16, 800, 8.87e-6)


@pytest.mark.parametrize("part", ["device", "node_link", "fabric", "host"])
def test_a_part_changes_in_the_fields_that_are_named_and_in_no_other(part: str) -> None:
    whole = load_job(written("model: llama3-8b\ncluster: h100-sxm:2x8\n")).cluster
    before = dict(getattr(whole, part))
    for field, value in before.items():
        if not isinstance(value, float) or value in (0.0, 1.0):  # which may be the least that there is
            continue
        changed = load_job("job.yaml", {f"cluster.{part}.{field}": value * 0.875}).cluster
        after = dict(getattr(changed, part))
        assert {name for name in before if before[name] != after[name]} == {field}
        assert {name for name in dict(whole) if getattr(whole, name) != getattr(changed, name)} <= {part}


def test_a_change_reaches_the_parts_of_a_part() -> None:
    path = written("model: llama3-8b\ncluster: h100-sxm:2x8\n")
    whole, changed = (load_job(path, change).cluster for change in ({}, {"cluster.device.peak_flop_per_s.bf16": 5e14}))
    assert changed.device.peak_flop_per_s == {**whole.device.peak_flop_per_s, "bf16": 5e14}
    assert (changed.node_link, changed.fabric) == (whole.node_link, whole.fabric)


def test_a_key_that_yaml_takes_for_a_truth_value_is_a_field() -> None:
    plan = "plan: {sequence_parallel: on, tp: 2, sync: {on: hosts, servers: 1}}\n"
    job = load_job(written(GOOD + plan))
    assert isinstance(job.plan.sync, ParameterServer)
    assert (job.plan.sync.on, job.plan.sequence_parallel) == ("hosts", True)
    assert parse_change("plan.sync={on: nodes}")[1] == {"on": "nodes"}


def _nested_aliases(depth: int) -> str:
    lines = ["model:", "- &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"- &a{level} [{', '.join([f'*a{level - 1}'] * 8)}]" for level in range(1, depth)]
    return "\n".join([*lines, "cluster: h100:8\n"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (_nested_aliases(20), "its aliases stand for more than 1,000,000 values"),
        ("model: &m {base: *m}\ncluster: h100:8\n", "an alias stands inside of what it stands for"),
        ("model: gpt2\ncluster: &c\n  base: *c\n", "an alias stands inside of what it stands for"),
        ("model: gpt2\ncluster: &c [[*c]]\n", "an alias stands inside of what it stands for"),
    ],
)
def test_aliases_that_stand_for_too_much_are_refused_at_once(text: str, message: str) -> None:
    assert mistakes(text).startswith(f"job.yaml: cannot be understood as YAML ({message})")


def test_aliases_that_stand_for_little_are_written_out() -> None:
    assert (
        load_job(written("model: {base: &b llama3-8b, name: *b, layers: 4}\ncluster: h100:8\n")).model.name
        == "llama3-8b"
    )
    assert mistakes(_nested_aliases(3)).startswith("job.yaml: model: ")


def test_a_plan_may_be_empty() -> None:
    assert load_job(written(GOOD + "plan:\n")).plan.tp == 1


def test_overrides_replace_what_the_file_says() -> None:
    path = written(GOOD + "plan: {tp: 8, zero: 1}\n")
    job = load_job(path, {"plan.tp": 4, "model.layers": 16, "cluster.nodes": 2, "plan.overlap.tp": "none"})
    assert (job.plan.tp, job.plan.zero, job.cluster.gpus, job.plan.overlap.tp) == (4, 1, 16, "none")
    assert isinstance(job.model, Transformer)
    assert (job.model.layers, job.model.hidden) == (16, 4096)


@pytest.mark.parametrize(
    "cluster", ["h100:4x8", "{device: h100, nodes: 4}", "{device: h100, nodes: 4, fabric: ndr400}"]
)
def test_overrides_reach_parts_that_follow_from_the_device(cluster: str) -> None:
    path = written(f"model: llama3-8b\ncluster: {cluster}\n")
    fabric = load_job(path, {"cluster.fabric.pod_nodes": 2, "cluster.fabric.oversubscription": 3}).cluster.fabric
    assert fabric is not None
    assert (fabric.nic_gbps, fabric.pod_nodes, fabric.oversubscription) == (400, 2, 3)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plan.tp=4", 4),
        ("plan.sequence_parallel=true", True),
        ("plan.layer_split=[20, 20]", [20, 20]),
        ("plan.dp=null", None),
        ("plan.schedule=1f1b", "1f1b"),
        ("plan.note=a=b", "a=b"),
        ("plan.tp=010", 10),
        ("plan.tp=0x10", 16),
        ("plan.tp=1_000", 1000),
        ("plan.tp=1:30", "1:30"),
        ("plan.tp=1e3", 1000.0),
        ("plan.launch_s=5e-6", 5e-6),
        ("plan.launch_s=.5", 0.5),
        ("plan.note=1.2.3", "1.2.3"),
    ],
)
def test_values_are_typed_as_yaml_types_them(text: str, value: object) -> None:
    path, got = parse_change(text)
    assert ".".join(path) == text.partition("=")[0]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan.tp", "--set 'plan.tp': is not a field and its value; write it as in --set plan.tp=4"),
        ("plan..tp=4", "--set 'plan..tp=4': is not a field and its value; write it as in --set plan.tp=4"),
        ("=4", "--set '=4': is not a field and its value; write it as in --set plan.tp=4"),
        ("tp=4", "--set 'tp=4': 'tp' is not a section of a job; did you mean 'plan.tp'?"),
        ("paln.tp=4", "--set 'paln.tp=4': 'paln' is not a section of a job; start with plan, model or cluster"),
    ],
)
def test_malformed_changes(text: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        parse_change(text)
    assert str(caught.value) == message


def test_a_change_that_is_no_yaml() -> None:
    with pytest.raises(JobError, match=r"--set 'plan\.tp=\{': '\{' is not YAML \(.*\); quote it"):
        parse_change("plan.tp={")


def test_a_change_below_a_number() -> None:
    with pytest.raises(JobError) as caught:
        read_draft(written(GOOD + "plan: {tp: 8}\n"), [(("plan", "tp", "x"), 1)])
    assert str(caught.value) == "command line: plan.tp.x: plan.tp is a number, which has no fields; set it whole"


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("tp: 3", "plan.tp: 3 × pp 1 = 3 does not divide the cluster's 8 GPUs; choose degrees whose product divides 8"),
        ("tp: eight", "plan.tp: 'eight' should be a whole number"),
        ("tp: 1.5", "plan.tp: 1.5 should be a whole number"),
        ("tp: true", "plan.tp: true should be a whole number"),
        ("tp: 1:30", "plan.tp: '1:30' should be a whole number"),
        ("launch_s: 1e400", "plan.launch_s: inf should be a finite number"),
        ("launch_s: .nan", "plan.launch_s: nan should be a finite number"),
        ("tp: 0", "plan.tp: 0 should be greater than or equal to 1"),
        ("tp: [8]", "plan.tp: should be a whole number, not a list"),
        ("tpp: 8", "plan.tpp: unknown key; did you mean 'tp'?"),
        ("overlap: {grad_reduc: true}", "plan.overlap.grad_reduc: unknown key; did you mean 'grad_reduce'?"),
        ("recompute: al", "plan.recompute: 'al' should be 'none', 'selective' or 'full'"),
        (
            "precision: bf61",
            "plan.precision: 'bf61' should be 'bf16', 'fp16', 'tf32', 'fp32' or 'fp8'; did you mean 'bf16'?",
        ),
        ("sequence_parallel: maybe", "plan.sequence_parallel: 'maybe' should be true or false"),
        (
            "layer_split: three",
            "plan.layer_split: 'three' should be 'uniform', 'balanced' or 'greedy' or a list; did you mean 'greedy'?",
        ),
        ("layer_split: [1, x]", "plan.layer_split.1: 'x' should be a whole number"),
        ("global_batch: 3", "plan.global_batch: 3 is not a multiple of dp 8 × micro-batch 1 = 8; set global_batch=8"),
    ],
)
def test_a_wrong_plan_is_one_line_with_file_and_field(plan: str, message: str) -> None:
    assert mistakes(GOOD + f"plan: {{{plan}}}\n") == f"job.yaml: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "plan: {vpp: 2}\n", "job.yaml: plan.schedule: '1f1b' always has 1 chunk (vpp) a rank, not 2; drop vpp"),
        (GOOD + "plan: {recompute_layers: 2}\n", "job.yaml: plan.recompute_layers: 2 needs recompute 'full'"),
        ("", "job.yaml: is empty, but a job is a mapping with the sections model, cluster, plan"),
        ("[1]", "job.yaml: holds a list, but a job is a mapping with the sections model, cluster, plan"),
        ("model: [\n", "job.yaml: line 2, column 1: is not valid YAML: "),
        ("model: x\nplan:\n\ttp: 3\n", "job.yaml: line 3, column 1: is not valid YAML: found character"),
        (GOOD + "model: gpt2\n", "job.yaml: line 3, column 1: is not valid YAML: the key 'model' stands here a second"),
        (b"\xff\xfe\x00", "job.yaml: is not text in UTF-8; give a job file in YAML"),
        ("model: 2024-13-45\n", "job.yaml: cannot be understood as YAML (month must be in 1..12)"),
        ("modle: x\n" + GOOD, "job.yaml: modle: unknown key; did you mean 'model'?"),
        ("cluster: h100:8\n", "job.yaml: model: missing; write such as model: llama3-70b, or give --model"),
        ("model: lama3-8b\ncluster: h100:8\n", "job.yaml: model: unknown model 'lama3-8b'; did you mean 'llama3-8b'?"),
        ("model: 5\ncluster: h100:8\n", "job.yaml: model: 5 is not a model; give a preset"),
        ("model: no.json\ncluster: h100:8\n", "job.yaml: model: no.json: cannot be read (No such file or directory)"),
        (
            "model: {layers: 4, hidden: x}\ncluster: h100:8\n",
            "job.yaml: model: name, heads, gated_mlp, vocab and tied_embeddings are missing\n"
            "job.yaml: model.hidden: 'x' should be a whole number",
        ),
        (
            "model: {base: gpt2, layrs: 4}\ncluster: h100:8\n",
            "job.yaml: model.layrs: unknown key; did you mean 'layers'?",
        ),
        (
            "model: {base: 'mlp:4-4', layers: 4}\ncluster: cpu:2\n",
            "job.yaml: model: base 'mlp:4-4' is not a transformer",
        ),
        ("model: gpt2\ncluster: h1000:8\n", "job.yaml: cluster: unknown device 'h1000'; did you mean 'h100'?"),
        ("model: gpt2\ncluster: h100:0x8\n", "job.yaml: cluster.nodes: 0 should be greater than or equal to 1"),
        ("model: gpt2\ncluster: [h100]\n", "job.yaml: cluster: should be a mapping of fields, not a list"),
        (
            "model: gpt2\ncluster: {base: 'h100:2x8', fabric: {nic_gbps: fast}}\n",
            "job.yaml: cluster.fabric.nic_gbps: 'fast' should be a number",
        ),
        ("model: gpt2\ncluster: v100:8\n", "job.yaml: plan.precision: device 'v100-sxm-32gb' does not compute in bf16"),
        (
            "model: {base: gpt2, layers: 1000000000000}\ncluster: h100:8\n",
            "job.yaml: model.layers: 1,000,000,000,000 layers are more than the 10,000 that can be simulated",
        ),
        (
            GOOD + "plan: {global_batch: 8000000000000000000}\n",
            "job.yaml: plan: 1,000,000,000,000,000,000 microbatches on 1 virtual stages are",
        ),
    ],
)
def test_a_wrong_file_names_file_and_field(text: str | bytes, message: str) -> None:
    assert mistakes(text).startswith(message)


def test_mistakes_are_short() -> None:
    wrong = "\n".join(f"  {name}: [wrong]" for name in ("tp", "pp", "dp", "zero", "vpp", "seq_len", "schedule"))
    more = "\n".join(f"  {name}: [wrong]" for name in ("recompute", "precision", "attention", "optimizer"))
    lines = mistakes(f"{GOOD}plan:\n{wrong}\n{more}\n").splitlines()
    assert len(lines) == 9
    assert lines[-1] == "job.yaml: 3 more problems"
    assert max(map(len, lines)) < 120
    assert not any("pydantic" in line or "input" in line for line in lines)


def test_missing_files_and_folders() -> None:
    with pytest.raises(JobError, match=r"^no\.yaml: there is no such file; give the path of a job file in YAML$"):
        load_job("no.yaml")
    Path("folder").mkdir()
    with pytest.raises(JobError, match=r"^folder: is a folder, not a job file; name a YAML file in it$"):
        load_job("folder")


def test_mistakes_of_the_command_line_are_not_blamed_on_the_file() -> None:
    draft = read_draft(written(GOOD + "plan: {tp: 8}\n"), [(("plan", "tp"), 3)])
    with pytest.raises(JobError, match=r"^command line: plan\.tp: 3 × pp 1"):
        draft.lay_out(draft.job())


def test_errors_of_the_whole_plan_stay_with_the_plan() -> None:
    draft = read_draft(written(GOOD))
    assert str(draft.explain(PlanError("9 stages are too many"))) == "job.yaml: plan: 9 stages are too many"


def test_python_callers_get_the_same_forms() -> None:
    job = Job.model_validate({"model": {"base": "gpt2", "layers": 2}, "cluster": {"base": "h100:8", "nodes": 1}})
    assert isinstance(job.model, Transformer)
    assert job.model.layers == 2
    with pytest.raises(JobError, match="model: nothing is not a model"):
        Job.model_validate({"model": "", "cluster": "h100:8"})


def test_the_schema_describes_every_field() -> None:
    schema = json.loads(json.dumps(job_schema()))
    plan = schema["$defs"]["Plan"]["properties"]
    assert set(plan) == set(Job.model_fields["plan"].annotation.model_fields)  # type: ignore[union-attr]
    for name in ("Plan", "Overlap", "Transformer", "Cluster", "NodeLink", "Fabric", "Device"):
        bare = [field for field, of in schema["$defs"][name]["properties"].items() if not of.get("description")]
        assert not bare, name
    assert plan["tp"]["description"] == "tensor-parallel degree."
    assert set(schema["properties"]) == {"model", "cluster", "plan", "faults"}
    assert "llama3-70b" in schema["properties"]["model"]["anyOf"][0]["examples"]


def test_the_schema_refers_only_to_what_it_defines() -> None:
    text = json.dumps(job_schema())
    named = {part.split('"')[0] for part in text.split('"$ref": "#/$defs/')[1:]}
    assert named
    assert named <= set(job_schema()["$defs"])
