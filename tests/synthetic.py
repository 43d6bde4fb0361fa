"""Devices, clusters, models and programs whose times are round numbers, so that a test can state them exactly.

On :func:`ideal_device` a memory-bound kernel takes one nanosecond per byte, and on :func:`ideal_cluster` a link carries
one byte per nanosecond; whatever else costs time is zero unless a test asks for it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from simpar.hardware.cluster import Cluster, Fabric, NodeLink
from simpar.hardware.device import AttentionBackwardFit, AttentionFit, Device, GemmFit, MemoryFit
from simpar.model.module import Affine, KernelForm, ModuleLayer, ModuleModel
from simpar.model.transformer import Transformer
from simpar.model.work import Gemm, MemoryBound
from simpar.plan.plan import Plan
from simpar.program.ir import COMPUTE, Instruction, Launch, Program, RankProgram, Record, Recv, Send, Wait
from simpar.schedule.schedule import Action, Schedule
from simpar.trace.trace import Trace

BYTE_PER_NS = 1e9
INFINITE = 1e24
WEIGHT_PRODUCT = Gemm(1280, 1280, 64, out_bytes=0)
"""A product that sums over the batch."""


def ideal_device(**changes: Any) -> Device:
    """One nanosecond per byte; products limited by a peak of 1 TFLOP/s; no overheads, no launches."""
    gemm = GemmFit(peak_efficiency=1.0, bandwidth_efficiency=1.0, overhead_s=0.0)
    memory = MemoryFit(bandwidth_efficiency=1.0, overhead_s=0.0)
    fields: dict[str, Any] = {
        "name": "ideal",
        "title": "ideal device",
        "peak_flop_per_s": dict.fromkeys(("bf16", "fp16", "fp32"), 1e12),
        "memory_bytes": 80 * 10**9,
        "memory_bytes_per_s": BYTE_PER_NS,
        "sms": 100,
        "gemm": dict.fromkeys(("bf16", "fp16", "fp32"), gemm),
        "attention": {64: AttentionFit(efficiency=1.0, overhead_s=0.0, bandwidth_efficiency=1.0)},
        "attention_kernel": "flash2",
        "attention_kernel_speed": {"flash2": 1.0},
        "attention_backward": AttentionBackwardFit(efficiency_ratio={64: 1.0}),
        "memory_bound": dict.fromkeys(("elementwise", "activation", "norm"), memory),
        "launch_s": 0.0,
        "context_bytes": 0,
        "compute_rate_during_collectives": 1.0,
    }
    return Device(**{**fields, **changes})


def ideal_cluster(
    nodes: int = 1,
    gpus_per_node: int = 8,
    *,
    bytes_per_s: float = BYTE_PER_NS,
    nic_bytes_per_s: float | None = None,
    latency_s: float = 0.0,
    device: Device | None = None,
    **fabric: Any,
) -> Cluster:
    """Links of ``bytes_per_s`` per direction inside and between nodes, every message and collective ``latency_s``."""
    link = NodeLink(
        kind="nvlink",
        nominal_bytes_per_s=bytes_per_s,
        bandwidth_bytes_per_s=bytes_per_s,
        base_latency_s=latency_s,
        step_latency_s=0.0,
        copy_fraction=0.0,
        smoothness=1.0,
        p2p_latency_s=latency_s,
        peer_latency_s=0.0,
    )
    between = Fabric(
        nic_gbps=(nic_bytes_per_s or bytes_per_s) * 8 / 1e9,
        efficiency=1.0,
        ring_intra_step_s=0.0,
        ring_step_s=0.0,
        tree_level_s=0.0,
        smoothness=1.0,
        tree_smoothness=1.0,
        p2p_latency_s=0.0,
        **fabric,
    )
    return Cluster(
        device=device or ideal_device(),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        node_link=link,
        fabric=between if nodes > 1 else None,
    )


def even_model(
    layers: int, *, forward: int, backward: int, parameters: int = 0, sent: int = 0, kept: int = 0
) -> ModuleModel:
    """Layers that each take so many nanoseconds on the ideal device, per microbatch of one sample."""

    def layer(index: int) -> ModuleLayer:
        return ModuleLayer(
            name=f"layer {index}",
            parameters=parameters,
            trainable_parameters=parameters,
            forward_forms=(KernelForm(MemoryBound(forward)),),
            backward_forms=(KernelForm(MemoryBound(backward)),),
            saved_bytes=Affine(0, kept),
            sent_bytes=Affine(0, sent),
        )

    return ModuleModel("even", tuple(layer(i) for i in range(layers)), "bf16")


def split_model(
    layers: int, *, forward: int, input_gradient: int, parameters: int = 0, sent: int = 0, kept: int = 0
) -> ModuleModel:
    """Layers whose backward has two halves: nanoseconds for the input, :data:`WEIGHT_PRODUCT` for weights."""
    halves = (
        KernelForm(MemoryBound(input_gradient)),
        KernelForm(WEIGHT_PRODUCT, (("k", Affine(0, WEIGHT_PRODUCT.k)),)),
    )
    model = even_model(layers, forward=forward, backward=0, parameters=parameters, sent=sent, kept=kept)
    return replace(model, layers=tuple(replace(layer, backward_forms=halves) for layer in model.layers))


def small_transformer(**changes: Any) -> Transformer:
    """Four layers that eight tensor-parallel ranks can share."""
    fields: dict[str, Any] = {
        "name": "small",
        "layers": 4,
        "hidden": 512,
        "heads": 8,
        "gated_mlp": True,
        "ffn_hidden": 1024,
        "vocab": 4096,
        "tied_embeddings": False,
        "max_positions": 1024,
    }
    return Transformer(**{**fields, **changes})


def job(model: Any, cluster: Cluster, **plan: Any) -> dict[str, Any]:
    """A job for :func:`simpar.simulate`."""
    return {"model": model, "cluster": cluster, "plan": Plan(**plan)}


# ---- programs by hand -----------------------------------------------------------------------------------------------


def work(duration_ns: int, name: str = "work") -> Launch:
    """A kernel of so many nanoseconds on the ideal device."""
    return Launch(MemoryBound(duration_ns), name)


def program(ranks: Mapping[int, Iterable[Instruction]], **fields: Any) -> Program:
    """Ranks with their instructions; every rank is a stage of its own."""
    programs = tuple(RankProgram(rank, rank, 1, (), tuple(body)) for rank, body in ranks.items())
    return Program(**{"ranks": programs, "launch_s": 0.0, **fields})


def pipeline(
    schedule: Schedule, *, forward: int, backward: int, weight: int = 0, nbytes: float = 0.0, **fields: Any
) -> Program:
    """The program of a pipeline whose virtual stages take ``forward`` and ``backward`` nanoseconds.

    Of a backward pass that is split, ``weight`` is the second half. Pairs that overlap run as one.
    """
    cost = {"F": forward, "B": backward, "I": backward - weight, "W": weight}
    ranks: dict[int, list[Instruction]] = {}
    for rank in range(schedule.pp):
        body = ranks[rank] = []
        for turn in schedule.turns(rank):
            for action in turn:
                source = schedule.before(action.stage) if action.op == "F" else schedule.after(action.stage)
                if source is not None and action.op != "W" and schedule.rank_of_stage[source] != rank:
                    body.append(Recv(schedule.rank_of_stage[source], _message(action)))
            body += (work(cost[action.op], str(action)) for action in turn)
            for action in turn:
                target = schedule.after(action.stage) if action.op == "F" else schedule.before(action.stage)
                if target is not None and action.op != "W" and schedule.rank_of_stage[target] != rank:
                    stream = "pp_forward" if action.op == "F" else "pp_backward"
                    tag = _message(action)._replace(stage=target)
                    body += (
                        Record(COMPUTE, str(action)),
                        Wait(stream, str(action)),
                        Send(stream, schedule.rank_of_stage[target], nbytes, tag, action.microbatch),
                    )
    return program(ranks, **fields)


def _message(action: Action) -> Action:
    """What an action receives: an input, or the gradient of an output, however the next stage made it."""
    return action if action.op == "F" else action._replace(op="B")


# ---- reading traces -------------------------------------------------------------------------------------------------


def lane_spans(trace: Trace, rank: int, stream: str = COMPUTE) -> list[tuple[str, int, int]]:
    """Name, start and end of every span of a lane, in order."""
    lane = next(i for i, x in enumerate(trace.lanes) if x.rank == rank and x.stream == stream)
    spans = trace.spans
    rows = [i for i in range(len(spans)) if spans.lane[i] == lane]
    return [(trace.names[spans.name[i]], int(spans.start_ns[i]), int(spans.end_ns[i])) for i in rows]


def columns(trace: Trace) -> dict[str, Any]:
    """Everything in a trace that two equal runs must agree on, in plain lists."""
    tables = {"spans": trace.spans, "kernels": trace.kernels(), "memory": trace.memory}
    found: dict[str, Any] = {
        f"{table}.{name}": getattr(values, name).tolist()
        for table, values in tables.items()
        for name in values.__dataclass_fields__
    }
    return {**found, "step": trace.step_ns, "lanes": trace.lanes, "names": trace.names, "links": trace.links}
