"""From a measured run to the job that describes it, and what had to be assumed on the way."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from simpar.errors import FrameworkError, RunsError
from simpar.framework.framework import Framework, framework
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import device
from simpar.hardware.torus import usual_shape
from simpar.job import Job
from simpar.model.presets import preset, preset_names
from simpar.model.transformer import Transformer
from simpar.model.work import DTYPE_BYTES
from simpar.plan.plan import Overlap, Plan
from simpar.validation.runs import Run

_SHAPE = ("layers", "hidden", "heads", "vocab")
_UNKNOWN_FRAMEWORK = "megatron-core"
_FLAT_TPUS = ("tpu-v5e", "tpu-v6e")  # 2D tori
_LARGEST_FLAT_SLICE = 256
_POLICIES = {"none": "none", "selective": "selective", "full": "full", "minimal": "selective"}


class Described(NamedTuple):
    """A job, and in words what the run's source did not say."""

    job: Job
    assumptions: tuple[str, ...]


def describe(run: Run, software: Framework | None = None) -> Described:
    """The job of a run; ``software`` stands in for the framework that the row names.

    Raises:
        SimparError: a job cannot describe it; the message says why.
    """
    notes: list[str] = []
    if run.seq_len is None:
        raise RunsError("the row does not state seq_len, without which a step has no size; fill it in")
    software = software or _framework(run, notes)
    cluster, model = _cluster(run, notes), _model(run, software, notes)
    job = Job(model=model, cluster=cluster, plan=_plan(run, model, software, cluster, notes))
    return Described(job, tuple(notes))


def _framework(run: Run, notes: list[str]) -> Framework:
    try:
        return framework(run.framework)
    except FrameworkError:
        notes.append(f"framework '{run.framework}' is not described: taken as {_UNKNOWN_FRAMEWORK}")
        return framework(_UNKNOWN_FRAMEWORK)


def _cluster(run: Run, notes: list[str]) -> Cluster:
    if _is_tpu(run):
        return _slices(run)
    local = next(n for n in range(min(run.gpus_per_node, run.num_gpus), 0, -1) if run.num_gpus % n == 0)
    if local != min(run.gpus_per_node, run.num_gpus):
        notes.append(f"{run.num_gpus} GPUs do not fill nodes of {run.gpus_per_node}: taken as nodes of {local}")
    fields: dict[str, Any] = {"device": run.gpu, "nodes": run.num_gpus // local, "gpus_per_node": local}
    if fields["nodes"] > 1:
        fields["fabric"] = _fabric(run, local, notes)
    return Cluster.model_validate(fields)


def _is_tpu(run: Run) -> bool:
    return device(run.gpu).name.startswith("tpu-")


def _slices(run: Run) -> Cluster:
    """TPU slices in their usual shape; tensor parallelism takes an axis of its length where there is one."""
    name = device(run.gpu).name
    flat = name in _FLAT_TPUS
    most = _LARGEST_FLAT_SLICE if flat else run.num_gpus
    slices = run.slices or max(1, run.num_gpus // most)
    shape = list(usual_shape(run.num_gpus // slices, 2, 16) if flat else usual_shape(run.num_gpus // slices, 3, 4))
    if run.tp in shape:  # as JAX assigns devices to a mesh
        shape.remove(run.tp)
        shape.append(run.tp)
    sizes = [*([slices] if slices > 1 else []), *shape]
    return Cluster.parse(f"{name}:{'x'.join(map(str, sizes))}")


def _fabric(run: Run, local: int, notes: list[str]) -> Mapping[str, Any]:
    """The catalog's fabric of that kind, at the rate that the row states."""
    kind, gbps = run.fabric.lower(), run.nic_gbps_per_gpu
    name = device(run.gpu).name
    if "efa" in kind:
        base = "efa-p4de" if name.startswith("a100") else "efa-p6" if name.startswith("b") else "efa-p5"
    elif "roce" in kind:
        base = "roce200"
    elif "tcpx" in kind:
        base = "tcpxo-a3mega"
    elif "slingshot" in kind:
        base = "slingshot11-polaris"
    elif "ethernet" in kind and (gbps or 25) < 50:
        base = "ethernet25"
    elif "omni" in kind or "opa" in kind:
        base = "edr100"
    else:
        base = "ndr400" if gbps is None or gbps > 200 else "hdr200"
        if "infiniband" not in kind:
            notes.append(f"fabric '{run.fabric}' is not in the catalog: taken as {base}")
    if gbps is None:
        notes.append(f"the source does not state the network's rate: taken as that of {base}")
        return {"base": base}
    return {"base": base, "nic_gbps": gbps, "nics_per_node": local}


def _model(run: Run, software: Framework, notes: list[str]) -> Transformer:
    """Gated models in the style of Llama, others in that of GPT; the preset of that name where a row has no sizes."""
    missing = [name for name in _SHAPE if getattr(run, name) is None]
    if len(missing) == len(_SHAPE) and run.model in preset_names():
        notes.append(f"the row does not state the sizes of {run.model}: taken as the preset's")
        return preset(run.model)
    if missing:
        raise RunsError(
            f"the row does not state {', '.join(missing)}, without which there is no model; fill them in, or leave "
            "all sizes open and name a preset (see 'simpar models')"
        )
    fields: dict[str, Any] = {
        "name": run.model,
        "layers": run.layers,
        "hidden": run.hidden,
        "heads": run.heads,
        "kv_heads": run.kv_heads,
        "head_dim": run.head_dim,
        "ffn_hidden": run.ffn_hidden,
        "gated_mlp": run.gated_mlp,
        "vocab": run.vocab,
        "tied_embeddings": run.tied_embeddings,
    }
    if not run.gated_mlp:
        fields |= {
            "position": "learned",
            "max_positions": run.seq_len,
            "norm": "layernorm",
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "dropout": software.trains_with_dropout,
        }
    if run.experts is not None:
        fields["moe"] = _experts(run)
    return Transformer(**fields)


def _experts(run: Run) -> Mapping[str, Any]:
    """Every n-th layer has experts where they are a whole fraction 1/n, else all behind the first dense ones."""
    share = run.moe_layer_fraction or 1.0
    every = round(1.0 / share)
    is_periodic = abs(every * share - 1.0) < 1e-6
    return {
        "experts": run.experts,
        "top_k": run.top_k or 1,
        "ffn_hidden": run.moe_ffn_hidden or run.ffn_hidden,
        "shared_ffn_hidden": run.shared_expert_ffn or 0,
        "pattern": "D" * (every - 1) + "E" if is_periodic else "E",
        "first_dense": 0 if is_periodic else round((run.layers or 1) * (1.0 - share)),
    }


def _plan(run: Run, model: Transformer, software: Framework, cluster: Cluster, notes: list[str]) -> Plan:
    interleaved = run.vpp > 1 and run.pp > 1
    fields: dict[str, Any] = {
        "framework": software,
        "compile": bool(run.compiled),
        "tp": run.tp,
        "pp": run.pp,
        "cp": run.cp,
        "ep": run.ep,
        "etp": run.etp if model.moe is not None else None,
        "dp": None if _is_tpu(run) else run.dp,  # MaxText counts all devices
        "vpp": run.vpp if interleaved else 1,
        "schedule": "interleaved" if interleaved else "1f1b",
        "zero": run.zero,
        "sequence_parallel": bool(run.sequence_parallel) and run.tp > 1,
        "global_batch": run.global_batch,
        "grad_accum": run.grad_accum,
        "micro_batch": _micro_batch(run, notes),
        "seq_len": run.seq_len,
        "precision": _precision(run, notes),
        "recompute": _recompute(run, notes),
        "attention": _attention(run, cluster, notes),
        "overlap": Overlap(tp="pipelined" if run.tp_overlap else None),
    }
    if run.grad_bytes:
        fields["grad_dtype"] = "fp32" if run.grad_bytes == 4 else "fp16" if run.precision == "fp16" else "bf16"
    if run.zero and run.fsdp_shard and run.dp and run.fsdp_shard < run.dp * run.cp:
        fields["dp_shard"] = run.fsdp_shard
    if run.zero == 3 and run.reshard_after_forward is not None:
        fields["reshard_after_forward"] = run.reshard_after_forward
    if run.recompute == "full" and run.recompute_fraction is not None and run.recompute_fraction < 1:
        layers = model.layers / (run.pp * fields["vpp"])
        fields["recompute_layers"] = max(1, round(run.recompute_fraction * layers))
    return Plan(**fields)


def _precision(run: Run, notes: list[str]) -> str:
    leading = next((dtype for dtype in DTYPE_BYTES if run.precision.startswith(dtype)), run.precision)
    if leading != run.precision:
        notes.append(f"precision '{run.precision}' is taken as {leading}")
    return leading


def _micro_batch(run: Run, notes: list[str]) -> int:
    if run.micro_batch is not None and run.micro_batch == int(run.micro_batch) and not _is_tpu(run):
        return int(run.micro_batch)
    replicas = run.num_gpus // (run.tp * run.pp * run.cp)
    if run.global_batch and replicas:
        return max(1, run.global_batch // (replicas * (run.grad_accum or 1)))
    notes.append("the source does not state the micro-batch: taken as 1")
    return 1


def _recompute(run: Run, notes: list[str]) -> str:
    if run.recompute is None:
        notes.append("the source does not say what is recomputed: taken as none")
        return "none"
    if run.recompute not in _POLICIES:
        notes.append(f"recomputation policy '{run.recompute}' is not known: taken as full")
    return _POLICIES.get(run.recompute, "full")


def _attention(run: Run, cluster: Cluster, notes: list[str]) -> str:
    if run.attention is None:
        return "auto"
    if run.attention != "unfused" and run.attention not in set(cluster.device.attention_kernel_speed):
        notes.append(f"attention '{run.attention}' does not run on {cluster.device.name}: taken as its newest kernel")
        return "auto"
    return run.attention
