"""Framework descriptions: the catalog is whole, files are checked, and what they say reaches the program."""

import pytest
import yaml

from simpar import Plan, simulate
from simpar.errors import FrameworkError, PlanError
from simpar.framework.framework import OPERATIONS, framework, framework_names, load_framework
from simpar.hardware.cluster import Cluster
from simpar.job import Job, read_model
from simpar.model.work import MemoryBound
from simpar.plan.layout import lay_out
from simpar.program.ir import Collective, Launch, Run, Sync
from simpar.program.lower import lower

MODEL = read_model("llama3-8b").replace(layers=4)
CLUSTER = Cluster.parse("h100-sxm:1x8")


def program(**plan):
    plan = Plan(**{"seq_len": 2048, "zero": 1, **plan})
    return lower(MODEL, CLUSTER, lay_out(plan, MODEL, CLUSTER))


def layer_launches(direction: int, **plan):
    """What the host launches for a layer, forward or backward, without collectives."""
    runs = [i for i in program(**plan).ranks[0].instructions if isinstance(i, Run)]
    phase = ("forward", "backward")[direction]
    operations = [run.operation for run in runs if run.operation.phase == phase]
    block = next(b for o in operations for b, layer in zip(o.blocks, o.layers, strict=True) if layer >= 0)
    return sum(i.launches for i in block.body if isinstance(i, Launch))


@pytest.mark.parametrize("name", framework_names())
def test_every_framework_of_the_catalog_describes_all_operations_and_says_where_from(name):
    found = framework(name)
    assert found.name == name
    assert set(found.operations) == set(OPERATIONS)
    assert "operations" in found.sources
    for field, entry in found.fitted.items():
        assert entry.relative_sd > 0, field
        assert "rows" in entry.rows, field
    assert simulate(Job(model=MODEL, cluster=CLUSTER, plan={"framework": name, "zero": 1})).step_time_s > 0


# kernels of a llama layer without tensor parallelism, as read off the frameworks' code; a launch is a kernel
@pytest.mark.parametrize(
    ("name", "forward", "backward"), [("nanotron", 41, 68), ("megatron-core", 23, 39), ("torchtitan", 41, 63)]
)
def test_a_layer_launches_as_many_kernels_as_were_counted(name, forward, backward):
    assert layer_launches(0, framework=name) == pytest.approx(forward, abs=2)
    assert layer_launches(1, framework=name) == pytest.approx(backward, abs=4)


def casts(**plan):
    """Bytes of the kernels that only cast, by operand."""
    runs = [i for i in program(**plan).ranks[0].instructions if isinstance(i, Run)]
    found = {}
    for block in (b for run in runs for b in run.operation.blocks):
        for i in block.body:
            if isinstance(i, Launch) and i.name.endswith("cast"):
                found[i.name] = found.get(i.name, 0) + i.kernel.nbytes
    return found


def test_linear_layers_cast_their_operands_where_no_kernel_before_them_does():
    assert casts(framework="torchtitan") == casts(framework="megatron-core", precision="fp8") == {}
    found = casts(framework="torchtitan", precision="fp8", micro_batch=1)
    software, layers, tokens = framework("torchtitan"), 4, 2048
    widths = {  # Llama-3 8B: 32 heads of 128 and 8 of keys and values, an inner width of 14,336; the head stays in bf16
        "qkv input": 4096,
        "qkv output grad": 6144,
        "attention output input": 4096,
        "attention output output grad": 4096,
        "mlp up input": 4096,
        "mlp up output grad": 2 * 14336,
        "mlp down input": 14336,
        "mlp down output grad": 4096,
    }
    per_element = 6 * software.traffic_factor
    assert sum(found.values()) == pytest.approx(layers * tokens * sum(widths.values()) * per_element, rel=1e-6)
    assert len(found) == len(widths)


def test_a_compiled_model_launches_fewer_kernels_that_move_less():
    eager, compiled = ({"framework": "torchtitan", "compile": compiled} for compiled in (False, True))
    assert layer_launches(0, **compiled) < 0.7 * layer_launches(0, **eager)

    def moved(plan):
        blocks = {b for i in program(**plan).ranks[0].instructions if isinstance(i, Run) for b in i.operation.blocks}
        kernels = [i.kernel for b in blocks if b.name == "layer" for i in b.body if isinstance(i, Launch)]
        return sum(k.nbytes for k in kernels if isinstance(k, MemoryBound))

    assert moved(compiled) == pytest.approx(0.6 * moved(eager), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "micro_batch", "seq_len", "kernels"),
    [
        ("megatron-lm-2021", 2, 2048, 1),
        ("megatron-lm-2021", 1, 2048, 5),  # 2 heads of a rank are no multiple of 4
        ("megatron-lm-2021", 2, 4096, 5),
        ("megatron-core", 1, 4096, 4),
        ("megatron-core", 2, 4096, 1),
        ("pytorch", 1, 4096, 1),
    ],
)
def test_scores_that_the_fused_softmax_does_not_take_run_through_separate_kernels(name, micro_batch, seq_len, kernels):
    plan = Plan(framework=name, tp=8, micro_batch=micro_batch, seq_len=seq_len, attention="unfused")
    model = MODEL.replace(heads=16, kv_heads=8)
    found = lower(model, CLUSTER, lay_out(plan, model, CLUSTER))
    blocks = {b for i in found.ranks[0].instructions if isinstance(i, Run) for b in i.operation.blocks}
    launches = {i.name: i for b in blocks for i in b.body if isinstance(i, Launch)}
    scores = micro_batch * 2 * seq_len**2
    factor = framework(name).traffic_factor
    nbytes = {1: (4, 6), 4: (28, 32), 5: (36, 40)}[kernels]
    for label, each in zip(("softmax", "softmax grad"), nbytes, strict=True):
        assert launches[label].launches == kernels
        assert launches[label].kernel.nbytes == pytest.approx(factor * each * scores, rel=1e-6)


def test_gradients_travel_in_the_dtype_that_the_framework_has_for_that():
    held = lay_out(Plan(framework="megatron-deepspeed"), MODEL, CLUSTER)
    told = lay_out(Plan(framework="megatron-deepspeed", grad_dtype="fp32"), MODEL, CLUSTER)
    assert (held.grad_dtype, held.reduce_dtype) == ("fp32", "bf16")
    assert (told.grad_dtype, told.reduce_dtype) == ("fp32", "fp32")

    def reduced(name):
        found = (i for i in program(framework=name, zero=0).ranks[0].instructions if isinstance(i, Collective))
        return sum(i.nbytes for i in found if i.name == "gradients")

    assert reduced("megatron-lm-2021") == 2 * reduced("megatron-deepspeed") > 0


def test_what_a_plan_leaves_open_the_framework_decides_and_what_it_states_counts_more():
    old = lay_out(Plan(framework="megatron-lm-2021", precision="fp16"), MODEL, CLUSTER)
    assert (old.overlap.grad_reduce, old.grad_dtype, old.loss_kernel) == (False, "fp16", "unfused")
    told = lay_out(
        Plan(
            framework="megatron-lm-2021",
            precision="fp16",
            grad_dtype="fp32",
            loss_kernel="fused",
            overlap={"grad_reduce": True},
            launch_s=1e-6,
        ),
        MODEL,
        CLUSTER,
    )
    assert (told.overlap.grad_reduce, told.grad_dtype, told.loss_kernel) == (True, "fp32", "fused")
    assert told.launch_s == 1e-6


def test_tensor_parallel_hosts_wait_for_their_slowest():
    spread = framework("nanotron").replace(lockstep_spread=0.5, launch_s=1e-5, cross_node_launch_s=0.0)
    by_tp = {tp: lay_out(Plan(tp=tp, framework=spread), MODEL, CLUSTER).launch_s for tp in (1, 2, 8)}
    assert by_tp[1] == 1e-5
    # the expected maximum of 2 and of 8 standard normal variables: 0.564 and 1.424
    assert by_tp[2] == pytest.approx(1e-5 * (1 + 0.5 * 0.564), rel=0.02)
    assert by_tp[8] == pytest.approx(1e-5 * (1 + 0.5 * 1.424), rel=0.02)


def test_a_host_that_waits_for_messages_cannot_launch_ahead():
    plan = {"pp": 4, "global_batch": 8, "launch_s": 40e-6, "framework": "megatron-core"}
    ahead = simulate(Job(model=MODEL, cluster=Cluster.parse("h100-sxm:1x4"), plan=plan))
    waiting = framework("megatron-core").replace(host_waits_for_messages=True)
    synced = simulate(Job(model=MODEL, cluster=Cluster.parse("h100-sxm:1x4"), plan={**plan, "framework": waiting}))
    assert synced.step_time_s > 1.01 * ahead.step_time_s
    assert not any(isinstance(i, Sync) for i in program(framework="megatron-core", pp=4, tp=2).ranks[0].instructions)
    assert any(isinstance(i, Sync) for i in program(framework=waiting, pp=4, tp=2).ranks[0].instructions)


def test_a_framework_from_a_file_takes_over_what_its_base_says(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"base": "nanotron", "name": "mine", "title": "mine", "launch_s": 5e-6}))
    mine = load_framework(path)
    assert (mine.name, mine.launch_s, mine.layer_split) == ("mine", 5e-6, "greedy")
    assert Plan(framework=str(path)).framework == mine
    assert Plan(framework={"base": "nanotron", "launch_s": 5e-6}).framework.launch_s == 5e-6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\n  y: z", "is not valid YAML"),
        ("- 1", "must be a mapping of framework fields; start with 'name: ...'"),
        ("base: nanotronn", "base 'nanotronn' is none of the catalog; did you mean 'nanotron'?; give one of"),
        ("base: nanotron\noperations: []", "operations: should be a mapping"),
        ("base: nanotron\nlaunch: 1", "launch: unknown key"),
        ("base: nanotron\nlaunch_s: -1", "launch_s: -1"),
        ("base: nanotron\noperations: {norm: [1, 2]}", "in short form has 4 numbers"),
        ("name: x\ntitle: x\noperations: {}", "operations lack norm"),
        ("base: nanotron\nbucket: whole", "bucket_parameters belongs to bucket 'size'; give both, or neither"),
        ("base: nanotron\nfitted: {speed: {relative_sd: 0.1, rows: '9 rows'}}", "which is no field of a framework"),
    ],
)
def test_bad_files_name_file_and_field(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(FrameworkError) as caught:
        load_framework(path)
    assert message in str(caught.value)
    assert "bad.yaml" in str(caught.value) or "unknown framework" in message


def test_a_missing_file_and_an_unknown_name_are_told():
    with pytest.raises(FrameworkError, match="cannot be read"):
        load_framework("nowhere.yaml")
    with pytest.raises(PlanError, match=r"unknown framework 'megatorn'; did you mean 'megatron'\?"):
        Plan(framework="megatorn")
