"""How a job is spread over the cluster: parallel degrees, batch, recomputation, precision, overlap.

A plan is checked twice: field by field when it is built, and against model and cluster by :mod:`simpar.plan.layout`,
which also fills in what was left open (``dp``, ``global_batch``).
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from simpar.description import Description
from simpar.errors import PlanError, SimparError
from simpar.framework.framework import Framework, read_framework
from simpar.plan.offload import Offload, check_offload
from simpar.plan.samples import Data
from simpar.plan.sync import OuterOptimizer, ParameterServer, check_sync, read_sync
from simpar.schedule.registry import SCHEDULES, chunks_per_rank, takers, takes, unknown

Positive = Annotated[int, Field(ge=1)]
Precision = Literal["bf16", "fp16", "tf32", "fp32", "fp8"]
StateDType = Literal["bf16", "fp16", "fp32"]


ScheduleName = Literal[
    "gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-1p", "zb-v", "dualpipe", "dualpipev"
]
ScheduleFile = Annotated[str, Field(pattern=r"\.csv$")]


def _name_schedule(value: object) -> object:
    """One sentence for a schedule that is neither a name nor a file."""
    if isinstance(value, str) and not value.endswith(".csv") and value not in SCHEDULES:
        raise ValueError(unknown(value))
    return value


class Overlap(Description):
    """Which communication runs beside compute; what is left open, the framework decides.

    Attributes:
        grad_reduce: reduce gradients bucket by bucket during the last backward pass (DDP, Megatron
            ``--overlap-grad-reduce``); otherwise all of them after it.
        param_gather: gather updated parameters during the next forward pass (Megatron ``--overlap-param-gather``),
            and prefetch the next layer's parameters with ZeRO-3 / FSDP; otherwise each gather is waited for.
        tp: ``bulk`` hides backward tensor-parallel collectives behind the weight-gradient GEMM (Megatron's default);
            ``pipelined`` also splits forward GEMMs to hide their own collectives (userbuffers, async TP); ``none``
            hides nothing.
        p2p: go on computing while a message to the next stage is under way; otherwise a stage waits for the end of its
            own sends. Left open, with every schedule but gpipe and 1f1b, as Megatron-LM and torch (and with
            rendezvous).
        ep: run shared experts beside the all-to-alls of the routed ones (Megatron ``--moe-shared-expert-overlap``).
    """

    error_type: ClassVar[type[SimparError]] = PlanError

    grad_reduce: bool | None = None
    param_gather: bool | None = None
    tp: Literal["none", "bulk", "pipelined"] | None = None
    p2p: bool | None = None
    ep: bool | None = None


class Plan(Description):
    """One way to run a training step.

    Attributes:
        framework: the training software, by name, as a YAML file or as fields: kernels, their traffic, host time, and
            what this plan leaves open. Left open itself, ``megatron-core`` for transformers and ``pytorch`` for other
            modules.
        compile: whether the model is compiled (``torch.compile``), which fuses small kernels.
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        cp: context-parallel degree: each sequence is split over so many ranks.
        cp_method: ``ring`` passes keys and values around beside attention (Liu et al. 2023; TransformerEngine ``p2p``),
            ``all_gather`` collects them before it (Llama 3), ``all_to_all`` trades sequence for heads (Ulysses). Pieces
            are dealt out zigzag, so that causal work is even.
        ep: expert-parallel degree: the experts of a layer are spread over so many of the ``tp · cp · dp`` ranks.
        etp: expert-tensor-parallel degree: each expert is split over so many ranks; left open, ``tp``.
        expert_skew: how unevenly tokens choose experts, as the exponent of a power law (0 is balanced); every rank then
            takes as long as the fullest one. Where an auxiliary loss balances 64 experts, the fullest got 1.5 to 1.7
            times the mean (Wang et al. 2024, arXiv:2408.15664, MaxVio), which is an exponent of 0.13 to 0.17.
        expert_capacity: tokens that an expert takes at most, relative to its even share; left open, the model's.
        dp: data-parallel degree; left open, it becomes GPUs / (tp · cp · pp).
        dp_shard: ranks over which ZeRO shards (HSDP when smaller than ``dp``); left open, all of ``dp``.
        rank_order: which dimensions' indices count first on the GPUs: ``tp-dp-pp``, or ``tp-pp-dp`` (Megatron's
            ``--use-tp-pp-dp-mapping``), which puts the stages of a replica side by side.
        zero: 0 replicates everything (DDP), 1 shards optimizer states (distributed optimizer), 2 gradients too,
            3 parameters too (FSDP).
        reshard_after_forward: with ``zero=3``, free gathered parameters after forward and gather them again.
        sequence_parallel: shard activations outside tensor-parallel regions along the sequence.
        schedule: pipeline schedule, or the path of a ``.csv`` file in the text form of ``torch.distributed.pipelining``
            (a row per pipeline rank, cells such as ``2F0``).
        vpp: model chunks (virtual stages) per pipeline rank, for ``interleaved``, ``looped-bfs`` and ``zb-1p``; other
            schedules decide it themselves.
        microbatch_group: microbatches that go through a chunk in a row (``interleaved``, ``zb-1p``; Megatron-Core's
            ``microbatch_group_size_per_vp_stage``); left open, as many as make equal groups of at least ``pp``.
        layer_split: ``uniform``, ``balanced`` by cost, ``greedy`` (nanotron: layers go to a stage until it has its
            share of the parameters), or layers per virtual stage; left open, the framework's.
        stage_sync: ``message_passing`` (sender goes on, receiver has a buffer) or ``condition_variable`` (a transfer
            starts when both sides are there).
        stage_buffer: microbatches that a receiver buffers per direction; left open, as many as come.
        micro_batch: samples per microbatch and replica.
        global_batch: samples per step; left open, ``micro_batch · grad_accum · dp``.
        grad_accum: microbatches per step and replica.
        seq_len: tokens per sample; left open, the model's maximum, at most 4,096.
        recompute: ``none``, ``selective`` (attention core), ``full`` (whole layers).
        recompute_layers: with ``full``, only so many layers of each virtual stage.
        offload: what lies in the memory of hosts: ``optimizer`` states, which the host's processor then updates
            (DeepSpeed's ``offload_optimizer``, Megatron's ``--optimizer-cpu-offload``), ``activations`` between their
            passes (Transformer Engine's ``cpu_offload``, Megatron's ``--cpu-offloading-num-layers``), ``both`` or
            ``none``. Copies run beside compute as far as the links to the hosts (``cluster.host``) let them.
        frozen_layers: the embedding and so many of the first layers are not trained (a frozen encoder): they run
            forward only, and have no gradients and no optimizer states.
        precision: dtype of compute and of the weights it reads; left open, bf16 for transformers, and for other modules
            the dtype in which they were traced (no other is possible there).
        grad_dtype: dtype in which gradients are kept and reduced; left open, those of the framework, else fp32.
        optimizer_dtype: dtype of optimizer states and of the master weights.
        attention: kernel of the attention core; ``auto`` takes the framework's, or the device's newest.
        loss_kernel: ``unfused`` (several passes over the logits) or ``fused`` cross entropy; left open, the
            framework's.
        optimizer: update rule.
        clip_gradients: scale gradients by their global norm before the update; left open, transformers do and other
            modules do not.
        overlap: which communication runs beside compute.
        sync: how replicas agree on their parameters: ``all_reduce`` (and what ``zero`` makes of it) or
            ``parameter_server``, also as fields: :class:`simpar.plan.sync.ParameterServer`.
        sync_every: replicas (with ``zero``, the groups that shard) train apart for so many steps and then average
            their parameters (local SGD, Stich 2019; DiLoCo, Douillard et al. 2023). Times are those of a step, on the
            mean of such a round.
        outer_optimizer: what happens then: ``average``, or a step of ``nesterov`` along the mean change (DiLoCo).
        grad_compression: how gradients travel: ``fp16``; ``int8`` with a scale per block of 256, exchanged all-to-all
            so that sums are made in full precision (ZeRO++, Wang et al. 2023); ``topk`` sends the ``compression_ratio``
            largest with their places and keeps the rest for the next step (Aji & Heafield 2017, Lin et al. 2018).
        compression_ratio: share of the gradients that ``topk`` keeps; left open, 1 %.
        data: samples of different lengths and who gets which: :class:`simpar.plan.samples.Data`; longer ones than
            ``seq_len`` are cut.
        collective_algorithm: ``auto`` takes the fastest that the library has; others that are only taken when named:
            ``halving_doubling``, ``hierarchical``, ``reduce_broadcast`` (:mod:`simpar.cost.all_reduce`).
        bucket_parameters: parameters per gradient bucket; left open, the framework's rule. Modules take DDP's 25 MiB.
        launch_s: host seconds per kernel launch; left open, the framework's, else the device's.
    """

    error_type: ClassVar[type[SimparError]] = PlanError

    framework: Annotated[Framework | None, BeforeValidator(read_framework)] = None
    compile: bool = False
    tp: Positive = 1
    pp: Positive = 1
    cp: Positive = 1
    cp_method: Literal["ring", "all_gather", "all_to_all"] = "ring"
    ep: Positive = 1
    etp: Positive | None = None
    expert_skew: Annotated[float, Field(ge=0)] = 0.0
    expert_capacity: Annotated[float, Field(gt=0)] | None = None
    dp: Positive | None = None
    dp_shard: Positive | None = None
    rank_order: Literal["tp-dp-pp", "tp-pp-dp"] = "tp-dp-pp"
    zero: Literal[0, 1, 2, 3] = 0
    reshard_after_forward: bool = True
    sequence_parallel: bool = False
    schedule: Annotated[ScheduleName | ScheduleFile, BeforeValidator(_name_schedule)] = "1f1b"
    vpp: Positive = 1
    microbatch_group: Positive | None = None
    layer_split: Literal["uniform", "balanced", "greedy"] | tuple[Annotated[int, Field(ge=0)], ...] | None = None
    stage_sync: Literal["message_passing", "condition_variable"] = "message_passing"
    stage_buffer: Positive | None = None
    micro_batch: Positive = 1
    global_batch: Positive | None = None
    grad_accum: Positive | None = None
    seq_len: Positive | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: Positive | None = None
    offload: Offload = "none"
    frozen_layers: Positive | None = None
    precision: Precision | None = None
    grad_dtype: StateDType | None = None
    optimizer_dtype: StateDType = "fp32"
    attention: Literal["auto", "unfused", "flash1", "flash2", "flash3"] = "auto"
    loss_kernel: Literal["unfused", "fused"] | None = None
    optimizer: Literal["adam", "sgd", "momentum"] = "adam"
    clip_gradients: bool | None = None
    overlap: Overlap = Overlap()
    sync: Annotated[Literal["all_reduce"] | ParameterServer, BeforeValidator(read_sync)] = "all_reduce"
    sync_every: Positive = 1
    outer_optimizer: OuterOptimizer | None = None
    grad_compression: Literal["none", "fp16", "int8", "topk"] = "none"
    compression_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    data: Data | None = None
    collective_algorithm: Literal[
        "auto", "ring", "tree", "nvls", "nvls_tree", "sharp", "halving_doubling", "hierarchical", "reduce_broadcast"
    ] = "auto"
    bucket_parameters: Positive | None = None
    launch_s: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        chunks = chunks_per_rank(self.schedule, self.vpp)
        if self.recompute_layers is not None and self.recompute != "full":
            raise ValueError(
                f"recompute_layers {self.recompute_layers} needs recompute 'full', not '{self.recompute}'; "
                "set recompute=full"
            )
        if self.stage_sync == "condition_variable" and self.stage_buffer is not None:
            raise ValueError(
                f"stage_buffer {self.stage_buffer} has no meaning with stage_sync 'condition_variable', "
                "which hands over without a buffer; drop one of the two"
            )
        if self.stage_sync == "condition_variable" and self.overlap.p2p is False:
            raise ValueError(
                "stage_sync 'condition_variable' with overlap.p2p=false deadlocks: two stages would wait for each "
                "other to take a message; set overlap.p2p=true or stage_sync=message_passing"
            )
        stages = self.pp * chunks
        if isinstance(self.layer_split, tuple) and len(self.layer_split) != stages and not self.is_read:
            raise ValueError(
                f"layer_split names {len(self.layer_split)} stages, but pp {self.pp} × {chunks} chunks (vpp) = "
                f"{stages}; name one layer count per virtual stage"
            )
        self._check_pipeline(chunks)
        check_sync(self)
        check_offload(self)
        return self

    def _check_pipeline(self, chunks: int) -> None:
        """Refuses what only a pipeline could use, or another schedule."""
        if self.pp == 1 and (chunks > 1 or self.schedule not in ("gpipe", "1f1b")) and not self.is_read:
            raise ValueError(f"schedule '{self.schedule}' needs pp of at least 2, not 1; set schedule=1f1b or raise pp")
        if self.pp == 1 and self.stage_sync == "condition_variable":
            raise ValueError(
                "stage_sync 'condition_variable' has no meaning with pp 1, where no stage hands over to another; "
                "drop it or raise pp"
            )
        if self.pp == 1 and self.stage_buffer is not None:
            raise ValueError(
                f"stage_buffer {self.stage_buffer} has no meaning with pp 1, where no stage hands over to another; "
                "drop it or raise pp"
            )
        if self.microbatch_group is not None and not takes(self.schedule, "group"):
            raise ValueError(
                f"microbatch_group {self.microbatch_group} has no meaning with schedule '{self.schedule}'; "
                f"drop it or take schedule {takers('group')}"
            )

    @property
    def is_read(self) -> bool:
        """Whether the schedule is read from a file."""
        return self.schedule.endswith(".csv")
