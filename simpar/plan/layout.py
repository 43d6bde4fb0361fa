"""A plan laid over a model and a cluster: every rule of the field checked, everything left open filled in."""

from dataclasses import dataclass

from simpar.errors import PlanError
from simpar.hardware.cluster import Cluster
from simpar.hardware.device import Device
from simpar.model.module import ModuleModel
from simpar.model.transformer import Transformer
from simpar.model.work import AttentionKernel
from simpar.plan.partition import samples_to_microbatches
from simpar.plan.plan import Plan, Precision, StateDType
from simpar.units import MIB

Model = Transformer | ModuleModel
_DEFAULT_SEQ_LEN = 4096
_DDP_BUCKET_BYTES = 25 * MIB  # torch DistributedDataParallel(bucket_cap_mb=25), gradients in fp32
_MEGATRON_BUCKET = 40_000_000  # parameters; Megatron-Core DistributedDataParallelConfig: max(40 M, 1 M · dp)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan with nothing left open; ranks count tensor-parallel first, then data, then pipeline (Megatron's order).

    Attributes:
        plan: the plan as given.
        dp: data-parallel degree.
        shard: ranks over which ZeRO shards; ``dp // shard`` groups of them are replicas of each other.
        microbatches: microbatches per step and replica.
        global_batch: samples per step.
        seq_len: tokens per sample (1 for a module).
        precision: dtype of compute.
        grad_dtype: dtype of gradients.
        attention: kernel of the attention core.
        launch_s: host seconds per launch.
        bucket_parameters: parameters per gradient bucket.
        buckets_first_chunk_only: whether the other chunks are one bucket each.
        clips_gradients: whether the optimizer scales gradients by their norm.
        keeps_gradients: whether gradients live in buffers that each step zeroes (Megatron-LM), rather than being freed
            (``zero_grad(set_to_none=True)``, the default of modules and of FSDP2).
    """

    plan: Plan
    dp: int
    shard: int
    microbatches: int
    global_batch: int
    seq_len: int
    precision: Precision
    grad_dtype: StateDType
    attention: AttentionKernel
    launch_s: float
    bucket_parameters: int
    buckets_first_chunk_only: bool
    clips_gradients: bool
    keeps_gradients: bool

    @property
    def overlaps_messages(self) -> bool:
        """Whether a stage computes while its messages are under way."""
        plan = self.plan
        if plan.overlap.p2p is None:
            return plan.schedule == "interleaved" or plan.stage_sync == "condition_variable"
        return plan.overlap.p2p

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.plan.micro_batch * self.seq_len

    def rank(self, stage: int, replica: int = 0, shard: int = 0) -> int:
        """Global rank of pipeline rank ``stage``, data-parallel index ``replica``, tensor-parallel index ``shard``."""
        return shard + self.plan.tp * (replica + self.dp * stage)


def lay_out(plan: Plan, model: Model, cluster: Cluster) -> Layout:
    """Checks a plan against its model and cluster, and fills in what it leaves open.

    Raises:
        PlanError: the first rule that the plan breaks, with the values and a mend.
    """
    dp = _data_parallel(plan, cluster)
    shard = _shard(plan, dp)
    if isinstance(model, Transformer):
        _check_transformer(plan, model)
        seq_len = plan.seq_len or min(model.max_positions or _DEFAULT_SEQ_LEN, _DEFAULT_SEQ_LEN)
        _check_sequence(plan, seq_len)
    else:
        _check_module(plan, model)
        seq_len = 1
    global_batch, microbatches = _batch(plan, dp)
    device = cluster.device
    precision = _precision(plan, model)
    device.gemm_fit(precision)
    if plan.collective_algorithm.startswith("nvls") and not cluster.node_link.nvls:
        raise PlanError(
            f"collective_algorithm '{plan.collective_algorithm}' needs a switch that reduces (NVLS), which "
            f"the node link of {device.name} has not; set collective_algorithm=auto, ring or tree"
        )
    attention: AttentionKernel = _fastest_attention(device) if plan.attention == "auto" else plan.attention
    if attention != "unfused" and attention not in device.attention_kernel_speed:
        raise PlanError(
            f"attention '{attention}' does not run on {device.name}, which has "
            f"{', '.join(sorted(device.attention_kernel_speed))}; set attention=auto"
        )
    return Layout(
        plan=plan,
        dp=dp,
        shard=shard,
        microbatches=microbatches,
        global_batch=global_batch,
        seq_len=seq_len,
        precision=precision,
        grad_dtype=plan.grad_dtype or "fp32",
        attention=attention,
        launch_s=device.launch_s if plan.launch_s is None else plan.launch_s,
        bucket_parameters=plan.bucket_parameters or _bucket_parameters(model, dp),
        buckets_first_chunk_only=plan.bucket_parameters is None and isinstance(model, Transformer),
        clips_gradients=isinstance(model, Transformer) if plan.clip_gradients is None else plan.clip_gradients,
        keeps_gradients=isinstance(model, Transformer) and plan.zero < 3,
    )


def _precision(plan: Plan, model: Model) -> Precision:
    if isinstance(model, Transformer):
        return plan.precision or "bf16"
    if plan.precision not in (None, model.dtype):
        raise PlanError(
            f"precision {plan.precision} is not that of {model.name}, which was traced in {model.dtype}; "
            f"set precision={model.dtype}, or trace the module in {plan.precision}"
        )
    return model.dtype


def _bucket_parameters(model: Model, dp: int) -> int:
    """Megatron-Core's rule for transformers, DistributedDataParallel's for other modules."""
    return max(_MEGATRON_BUCKET, 1_000_000 * dp) if isinstance(model, Transformer) else _DDP_BUCKET_BYTES // 4


def _fastest_attention(device: Device) -> AttentionKernel:
    return max(device.attention_kernel_speed, key=lambda kernel: device.attention_kernel_speed[kernel])


def _data_parallel(plan: Plan, cluster: Cluster) -> int:
    gpus, model_parallel = cluster.gpus, plan.tp * plan.pp
    if gpus % model_parallel:
        raise PlanError(
            f"tp {plan.tp} × pp {plan.pp} = {model_parallel} does not divide the cluster's {gpus} GPUs; "
            f"choose degrees whose product divides {gpus}"
        )
    dp = gpus // model_parallel
    if plan.dp is not None and plan.dp != dp:
        raise PlanError(
            f"dp {plan.dp} × tp {plan.tp} × pp {plan.pp} = {plan.dp * model_parallel} ranks, "
            f"but the cluster has {gpus} GPUs; set dp={dp}"
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


def _check_transformer(plan: Plan, model: Transformer) -> None:
    tp = plan.tp
    for what, count in (("heads", model.heads), ("ffn_hidden", model.ffn_hidden)):
        if count % tp:
            raise PlanError(
                f"tp {tp} does not divide the {count} {what} of {model.name}; set tp to a divisor of {count}"
            )
    if model.kv_heads % tp and tp % model.kv_heads:
        raise PlanError(
            f"tp {tp} neither divides nor is a multiple of the {model.kv_heads} kv_heads of {model.name}; "
            f"set tp to a divisor of {model.kv_heads}"
        )
    if plan.sequence_parallel and tp == 1:
        raise PlanError(
            "sequence_parallel shards over the tensor-parallel group, but tp is 1; raise tp or switch it off"
        )
    if plan.recompute_layers is not None and plan.recompute_layers > model.layers:
        raise PlanError(
            f"recompute_layers {plan.recompute_layers} is more than the {model.layers} layers of {model.name}; "
            "set recompute_layers lower or drop it to recompute all"
        )
    if model.max_positions and model.position == "learned" and plan.seq_len and plan.seq_len > model.max_positions:
        raise PlanError(
            f"seq_len {plan.seq_len} is longer than the {model.max_positions} learned positions of {model.name}; "
            f"set seq_len to at most {model.max_positions}"
        )


def _check_sequence(plan: Plan, seq_len: int) -> None:
    if plan.sequence_parallel and seq_len % plan.tp:
        raise PlanError(
            f"sequence_parallel splits seq_len {seq_len} over tp {plan.tp}, which does not divide it; "
            f"set seq_len to a multiple of {plan.tp}"
        )


def _check_module(plan: Plan, model: ModuleModel) -> None:
    if plan.tp > 1:
        raise PlanError(f"tp {plan.tp} needs a transformer description, but {model.name} is a traced module; set tp=1")
    if plan.seq_len is not None:
        raise PlanError(f"seq_len {plan.seq_len} has no meaning for the module {model.name}; drop it")
    if plan.recompute == "selective":
        raise PlanError(f"recompute 'selective' needs a transformer description, not {model.name}; set recompute=full")
