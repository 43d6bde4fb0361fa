"""A plan laid over a model and a cluster: every rule of the field checked, everything left open filled in."""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from statistics import NormalDist
from typing import Any, Literal

from simpar.errors import PlanError
from simpar.framework.framework import Framework, OperationName, Pass, framework
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import Device
from simpar.model.module import ModuleModel
from simpar.model.transformer import Transformer
from simpar.model.work import AttentionKernel
from simpar.plan.kinds import check_expert_samples, check_experts, check_kinds
from simpar.plan.offload import check_hosts
from simpar.plan.partition import samples_to_microbatches
from simpar.plan.placement import stage_devices
from simpar.plan.plan import Overlap, Plan, Precision, StateDType
from simpar.plan.rules import check_module, check_sequence, check_transformer
from simpar.plan.samples import StepSamples, step_samples
from simpar.plan.sync import ParameterServer, worker_gpus

Model = Transformer | ModuleModel
_DEFAULT_SEQ_LEN = 4096
_MEGATRON_BUCKET = 40_000_000  # parameters; Megatron-Core DistributedDataParallelConfig: max(40 M, 1 M · dp)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A plan with nothing left open.

    Ranks count tensor-parallel first, then context, then data, then pipeline (Megatron's order).

    Attributes:
        plan: the plan as given.
        framework: the training software.
        overlap: which communication runs beside compute, nothing left open but ``p2p``.
        dp: data-parallel degree, over which the batch is split.
        etp: expert-tensor-parallel degree.
        has_experts: whether some layers have experts.
        shard: ranks over which ZeRO shards; ``dp // shard`` groups of them are replicas of each other.
        microbatches: microbatches per step and replica.
        global_batch: samples per step.
        seq_len: tokens per sample (1 for a module).
        precision: dtype of compute.
        grad_dtype: dtype in which gradients are kept.
        reduce_dtype: dtype in which replicas reduce them; tied embeddings, copies of a model and parameter servers get
            them as they are kept.
        attention: kernel of the attention core.
        launch_s: host seconds per launch.
        ring_extra_s: latency of each pass of a tensor-parallel ring beyond that of the network.
        layer_split: how layers are spread over stages.
        loss_kernel: kind of cross entropy.
        bucket_parameters: parameters per gradient bucket.
        buckets_first_chunk_only: whether the other chunks are one bucket each.
        clips_gradients: whether the optimizer scales gradients by their norm.
        keeps_gradients: whether gradients live in buffers that each step zeroes (Megatron-LM), rather than being freed
            (``zero_grad(set_to_none=True)``, the default of modules and of FSDP2).
        samples: those of the step, where they differ in length.
        stage_devices: what each pipeline rank runs on; empty where all are alike.
    """

    plan: Plan
    framework: Framework
    overlap: Overlap
    dp: int
    etp: int
    has_experts: bool
    shard: int
    microbatches: int
    global_batch: int
    seq_len: int
    precision: Precision
    grad_dtype: StateDType
    reduce_dtype: StateDType
    attention: AttentionKernel
    launch_s: float
    ring_extra_s: float
    layer_split: Literal["uniform", "balanced", "greedy"] | tuple[int, ...]
    loss_kernel: Literal["unfused", "fused"]
    bucket_parameters: int
    buckets_first_chunk_only: bool
    clips_gradients: bool
    keeps_gradients: bool
    samples: StepSamples | None = None
    stage_devices: tuple[Device, ...] = ()

    @property
    def server(self) -> ParameterServer | None:
        """The parameter servers, if any."""
        return self.plan.sync if isinstance(self.plan.sync, ParameterServer) else None

    @property
    def reducing(self) -> int:
        """Replicas that add up their gradients in every step: all, but for periodic synchronisation."""
        if self.plan.sync_every == 1:
            return self.replicas
        return self.shard if self.plan.zero else 1

    @property
    def steps(self) -> int:
        """Steps that one simulation covers: a round of periodic synchronisation, or some asynchronous steps."""
        return self.server.simulated_steps if self.server is not None else self.plan.sync_every

    @property
    def step_tokens(self) -> int:
        """Tokens of a step without padding; of a module, samples."""
        return self.samples.tokens if self.samples is not None else self.global_batch * self.seq_len

    @property
    def overlaps_messages(self) -> bool:
        """Whether a stage computes while its messages are under way."""
        plan = self.plan
        if self.overlap.p2p is None:
            return plan.schedule not in ("gpipe", "1f1b") or plan.stage_sync == "condition_variable"
        return self.overlap.p2p

    @property
    def replicas(self) -> int:
        """Ranks of a stage and tensor-parallel index, which hold the same weights: data- and context-parallel ones."""
        return self.dp * self.plan.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks over which the routed experts of a layer are spread."""
        return self.plan.ep * self.etp

    @property
    def experts_span_replicas(self) -> bool:
        """Whether ranks that share a layer's experts reach beyond a tensor-parallel group, so that replicas wait."""
        return self.plan.tp % self.expert_ranks != 0

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that hold the same experts."""
        return self.plan.tp * self.replicas // self.expert_ranks

    @property
    def expert_shard(self) -> int:
        """Ranks over which ZeRO shards experts: as many replicas of the sharded states as for other parameters."""
        return self.expert_replicas // (self.replicas // self.shard)

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one rank."""
        return self.plan.micro_batch * self.seq_len // self.plan.cp

    def rank(self, stage: int, replica: int = 0, shard: int = 0) -> int:
        """Global rank of pipeline rank ``stage``, index ``replica`` among replicas, tensor-parallel index ``shard``."""
        return shard + self.plan.tp * (replica + self.replicas * stage)

    def operation(self, name: OperationName, *, backward: bool) -> Pass:
        """Traffic and launches of a memory-bound operation, as the framework (compiled or not) runs it."""
        known = self._operations
        found = known.get((name, backward))
        if found is None:
            operation = self.framework.operations[name]
            one = operation.backward if backward else operation.forward
            factor = self.traffic
            if name in ("loss", "fused_loss"):
                factor /= self.framework.traffic_factor
            found = known[name, backward] = Pass(nbytes=one.nbytes * factor, launches=self.launches(one.launches))
        return found

    @cached_property
    def _operations(self) -> dict[tuple[OperationName, bool], Pass]:
        """Those that were asked for: a layer asks for few, many times."""
        return {}

    @cached_property
    def traffic(self) -> float:
        """Traffic of memory-bound kernels over what they must read and write."""
        return self.framework.traffic(compiled=self.plan.compile)

    def launches(self, count: float) -> int:
        """Kernels that the host launches where the framework lists ``count``."""
        return self.framework.launches(count, compiled=self.plan.compile)


def lay_out(plan: Plan, model: Model, cluster: Cluster) -> Layout:
    """Checks a plan against its model and cluster, and fills in what it leaves open.

    Raises:
        PlanError: the first rule that the plan breaks, with the values and a mend.
    """
    software = plan.framework or framework("megatron-core" if isinstance(model, Transformer) else "pytorch")
    if not isinstance(model, Transformer):
        software = software.replace(traffic_factor=1.0)  # a traced module's kernels were counted one by one
    dp = _data_parallel(plan, cluster)
    shard = _shard(plan, dp * plan.cp)
    if isinstance(model, Transformer):
        check_transformer(plan, model)
        check_experts(plan, model, dp, dp * plan.cp // shard)
        check_kinds(plan, model)
        seq_len = sequence_length(plan, model)
        check_sequence(plan, seq_len)
    else:
        check_module(plan, model)
        seq_len = 1
    global_batch, microbatches = _batch(plan, dp)
    samples = _samples(plan, model, dp, microbatches, seq_len)
    if samples is not None:
        seq_len = max(max(lengths) for lengths in samples.padded)
    check_hosts(plan, cluster)
    device = cluster.device
    precision = _precision(plan, model)
    for kind in cluster.devices:
        kind.gemm_fit(precision)
    if plan.collective_algorithm.startswith("nvls") and (cluster.graph is not None or not cluster.node_link.nvls):
        lacking = f"the node link of {device.name}" if cluster.graph is None else "a graph of one's own"
        raise PlanError(
            f"collective_algorithm '{plan.collective_algorithm}' needs a switch that reduces (NVLS), which "
            f"{lacking} has not; set collective_algorithm=auto, ring or tree"
        )
    attention = _attention(plan, software, cluster)
    if attention != "unfused" and not any(attention in kind.attention_kernel_speed for kind in cluster.devices):
        kernels = (
            f"{kind.name}, which has {', '.join(sorted(kind.attention_kernel_speed))}" for kind in cluster.devices
        )
        raise PlanError(f"attention '{attention}' does not run on {', nor on '.join(kernels)}; set attention=auto")
    grad_dtype = plan.grad_dtype or software.grad_dtype.get(precision, "fp32")
    reduce_dtype = plan.grad_dtype or software.reduce_dtype.get(precision, grad_dtype)
    if plan.grad_compression == "fp16" and reduce_dtype != "fp32":
        raise PlanError(
            f"grad_compression 'fp16' saves nothing where gradients travel in {reduce_dtype}; drop it, or take int8"
        )
    buckets = _buckets(plan, software, model, dp * plan.cp)
    has_experts = isinstance(model, Transformer) and model.moe is not None
    return Layout(
        plan=plan,
        framework=software,
        overlap=_overlap(plan, software),
        dp=dp,
        etp=(plan.etp or plan.tp) if has_experts else 1,
        has_experts=has_experts,
        shard=shard,
        microbatches=microbatches,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        grad_dtype=grad_dtype,
        reduce_dtype=reduce_dtype,
        attention=attention,
        launch_s=_launch_s(plan, software, cluster, dp),
        ring_extra_s=software.cross_node_step_s * (plan.tp - 1) if plan.tp > cluster.gpus_per_node else 0.0,
        layer_split=plan.layer_split or software.layer_split,
        loss_kernel=plan.loss_kernel or software.loss_kernel,
        bucket_parameters=buckets[0],
        buckets_first_chunk_only=buckets[1],
        clips_gradients=isinstance(model, Transformer) if plan.clip_gradients is None else plan.clip_gradients,
        keeps_gradients=isinstance(model, Transformer) and plan.zero < 3 and software.keeps_gradients,
        samples=samples,
        stage_devices=stage_devices(plan, dp, precision, cluster),
    )


def sequence_length(plan: Plan, model: Transformer) -> int:
    """Tokens per sample: the plan's, else the model's longest, up to a usual length."""
    return plan.seq_len or min(model.max_positions or _DEFAULT_SEQ_LEN, _DEFAULT_SEQ_LEN)


def _attention(plan: Plan, software: Framework, cluster: Cluster) -> AttentionKernel:
    """The plan's kernel, else the framework's where a device has it, else the newest that is fastest on one of them.

    Of several kinds of devices, each runs this one, or its own fastest where it does not have it
    (:func:`simpar.cost.kernel.runnable`), in whatever order the kinds are listed.
    """
    if plan.attention != "auto":
        return plan.attention
    usual = software.attention
    if usual == "unfused" or any(usual in kind.attention_kernel_speed for kind in cluster.devices):
        assert usual is not None, "no device has a kernel without a name"
        return usual
    return max(kind.fastest_attention for kind in cluster.devices)


def _overlap(plan: Plan, software: Framework) -> Overlap:
    """What the plan leaves open, the framework decides, and then what most do."""
    usual: dict[str, Any] = {"grad_reduce": True, "param_gather": True, "tp": "bulk", "ep": False}
    usual.update({str(name): value for name, value in software.overlap.items()})
    if plan.stage_sync == "condition_variable":
        usual.pop("p2p", None)  # stages that both wait for the end of their own message would never end
    return Overlap(**{name: usual.get(name) if value is None else value for name, value in plan.overlap})


def _launch_s(plan: Plan, software: Framework, cluster: Cluster, dp: int) -> float:
    """Host time per launch of a rank.

    Where tensor-parallel ranks wait for each other in every layer, the slowest of them counts: n normal variables have
    their maximum about Φ⁻¹((n - 3/8) / (n + 1/4)) deviations above the mean (Blom 1958).
    """
    if plan.launch_s is not None:
        return plan.launch_s
    launch_s = cluster.device.launch_s if software.launch_s is None else software.launch_s
    if plan.tp == 1:
        return launch_s
    if plan.pp > 1 and cluster.nodes > 1 and plan.tp * plan.cp * dp >= cluster.gpus_per_node:
        launch_s += software.cross_node_launch_s * plan.tp
    slowest = NormalDist().inv_cdf((plan.tp - 0.375) / (plan.tp + 0.25))
    return launch_s * (1.0 + software.lockstep_spread * slowest)


def _precision(plan: Plan, model: Model) -> Precision:
    if isinstance(model, Transformer):
        return plan.precision or "bf16"
    if plan.precision not in (None, model.dtype):
        raise PlanError(
            f"precision {plan.precision} is not that of {model.name}, which was traced in {model.dtype}; "
            f"set precision={model.dtype}, or trace the module in {plan.precision}"
        )
    return model.dtype


def _buckets(plan: Plan, software: Framework, model: Model, replicas: int) -> tuple[int, bool]:
    """Parameters per gradient bucket, and whether only the first chunk of the first stage is cut into buckets."""
    if plan.bucket_parameters is not None:
        return plan.bucket_parameters, False
    if software.bucket == "megatron-core":
        return max(_MEGATRON_BUCKET, 1_000_000 * replicas), True
    return (software.bucket_parameters or max(model.parameters, 1)), False


def _samples(plan: Plan, model: Model, dp: int, microbatches: int, seq_len: int) -> StepSamples | None:
    """The step's samples, where the plan has a data set of its own."""
    if plan.data is None:
        return None
    if not isinstance(model, Transformer):
        raise PlanError(
            f"data gives samples a length in tokens, which means nothing to the module {model.name}; drop it"
        )
    multiple = plan.data.multiple
    if (plan.cp > 1 and multiple % (2 * plan.cp)) or (plan.sequence_parallel and multiple // plan.cp % plan.tp):
        parts = 2 * plan.cp * (plan.tp if plan.sequence_parallel else 1)
        raise PlanError(
            f"data.multiple {multiple} leaves sequences that tp {plan.tp} and cp {plan.cp} cannot divide evenly; set "
            f"it to a multiple of {parts}"
        )
    longest = seq_len if plan.seq_len is not None else model.max_positions
    found = step_samples(plan.data, dp=dp, micro_batch=plan.micro_batch, microbatches=microbatches, longest=longest)
    check_expert_samples(plan, model, found)
    return found


def _data_parallel(plan: Plan, cluster: Cluster) -> int:
    gpus = worker_gpus(plan, cluster)
    degrees = {"tp": plan.tp, "cp": plan.cp, "pp": plan.pp}
    model_parallel = prod(degrees.values())
    shown = " × ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1 or name != "cp")
    if gpus % model_parallel:
        raise PlanError(
            f"{shown} = {model_parallel} does not divide the cluster's {gpus} GPUs; "
            f"choose degrees whose product divides {gpus}"
        )
    dp = gpus // model_parallel
    if plan.dp is not None and plan.dp != dp:
        raise PlanError(
            f"dp {plan.dp} × {shown} = {plan.dp * model_parallel} ranks, but the cluster has {gpus} GPUs; set dp={dp}"
        )
    local = cluster.gpus_per_node
    if local % plan.tp and plan.tp % local:
        raise PlanError(
            f"tp {plan.tp} neither divides nor is a multiple of the {local} GPUs of a node, so some groups would "
            f"straddle nodes; set tp to a divisor of {local}"
        )
    return dp


def _shard(plan: Plan, dp: int) -> int:
    shard = plan.dp_shard or dp
    if dp % shard:
        raise PlanError(f"dp_shard {shard} does not divide dp {dp}; set dp_shard to a divisor of {dp}")
    if plan.dp_shard is not None and plan.dp_shard != dp and plan.zero == 0:
        raise PlanError(f"dp_shard {shard} has no meaning with zero 0, which shards nothing; set zero to 1, 2 or 3")
    return shard


def _batch(plan: Plan, dp: int) -> tuple[int, int]:
    """Samples per step, microbatches per replica."""
    if plan.global_batch is None:
        microbatches = plan.grad_accum or 1
        return microbatches * plan.micro_batch * dp, microbatches
    microbatches = samples_to_microbatches(plan.global_batch, dp, plan.micro_batch)
    if plan.grad_accum is not None and plan.grad_accum != microbatches:
        raise PlanError(
            f"grad_accum {plan.grad_accum} × micro_batch {plan.micro_batch} × dp {dp} = "
            f"{plan.grad_accum * plan.micro_batch * dp} samples, but global_batch is {plan.global_batch}; "
            f"set grad_accum={microbatches} or drop it"
        )
    return plan.global_batch, microbatches
