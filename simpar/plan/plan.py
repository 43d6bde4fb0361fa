"""How a job is spread over the cluster: parallel degrees, batch, recomputation, precision, overlap.

A plan is checked twice: field by field when it is built, and against model and cluster by :mod:`simpar.plan.layout`,
which also fills in what was left open (``dp``, ``global_batch``).
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from simpar.description import Description

Positive = Annotated[int, Field(ge=1)]
Precision = Literal["bf16", "fp16", "tf32", "fp32", "fp8"]
StateDType = Literal["bf16", "fp16", "fp32"]


class Overlap(Description):
    """Which communication runs beside compute.

    Attributes:
        grad_reduce: reduce gradients bucket by bucket during the last backward pass (DDP, Megatron
            ``--overlap-grad-reduce``); otherwise all of them after it.
        param_gather: gather updated parameters during the next forward pass (Megatron ``--overlap-param-gather``),
            and prefetch the next layer's parameters with ZeRO-3 / FSDP; otherwise each gather is waited for.
        tp: ``bulk`` hides backward tensor-parallel collectives behind the weight-gradient GEMM (Megatron's default);
            ``pipelined`` also splits forward GEMMs to hide their own collectives (userbuffers, async TP); ``none``
            hides nothing.
        p2p: go on computing while a message to the next stage is under way; otherwise a stage waits for the end of its
            own sends. Left open, as Megatron-LM: only with the interleaved schedule (and with rendezvous).
    """

    grad_reduce: bool = True
    param_gather: bool = True
    tp: Literal["none", "bulk", "pipelined"] = "bulk"
    p2p: bool | None = None


class Plan(Description):
    """One way to run a training step.

    Attributes:
        tp: tensor-parallel degree.
        pp: pipeline-parallel degree.
        dp: data-parallel degree; left open, it becomes GPUs / (tp · pp).
        dp_shard: ranks over which ZeRO shards (HSDP when smaller than ``dp``); left open, all of ``dp``.
        zero: 0 replicates everything (DDP), 1 shards optimizer states (distributed optimizer), 2 gradients too,
            3 parameters too (FSDP).
        reshard_after_forward: with ``zero=3``, free gathered parameters after forward and gather them again.
        sequence_parallel: shard activations outside tensor-parallel regions along the sequence.
        schedule: pipeline schedule.
        vpp: model chunks (virtual stages) per pipeline rank, for ``interleaved``.
        layer_split: ``uniform``, ``balanced`` by cost, or layers per virtual stage.
        stage_sync: ``message_passing`` (sender goes on, receiver has a buffer) or ``condition_variable`` (a transfer
            starts when both sides are there).
        stage_buffer: microbatches that a receiver buffers per direction; left open, as many as come.
        micro_batch: samples per microbatch and replica.
        global_batch: samples per step; left open, ``micro_batch · grad_accum · dp``.
        grad_accum: microbatches per step and replica.
        seq_len: tokens per sample; left open, the model's maximum, at most 4,096.
        recompute: ``none``, ``selective`` (attention core), ``full`` (whole layers).
        recompute_layers: with ``full``, only so many layers of each virtual stage.
        precision: dtype of compute and of the weights it reads; left open, bf16 for transformers, and for other modules
            the dtype in which they were traced (no other is possible there).
        grad_dtype: dtype in which gradients are kept and reduced; left open, fp32.
        optimizer_dtype: dtype of optimizer states and of the master weights.
        attention: kernel of the attention core; ``auto`` takes the device's newest.
        loss_kernel: ``unfused`` (several passes over the logits) or ``fused`` cross entropy.
        optimizer: update rule.
        clip_gradients: scale gradients by their global norm before the update; left open, transformers do and other
            modules do not.
        overlap: which communication runs beside compute.
        collective_algorithm: ``auto`` takes the fastest admissible one.
        bucket_parameters: parameters per gradient bucket; left open, as Megatron-Core: max(40 M, 1 M · dp) in the first
            chunk of the first stage and one bucket in each other one. Modules take DDP's 25 MiB.
        launch_s: host seconds per kernel launch; left open, the device's.
    """

    tp: Positive = 1
    pp: Positive = 1
    dp: Positive | None = None
    dp_shard: Positive | None = None
    zero: Literal[0, 1, 2, 3] = 0
    reshard_after_forward: bool = True
    sequence_parallel: bool = False
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    vpp: Positive = 1
    layer_split: Literal["uniform", "balanced"] | tuple[Annotated[int, Field(ge=0)], ...] = "uniform"
    stage_sync: Literal["message_passing", "condition_variable"] = "message_passing"
    stage_buffer: Positive | None = None
    micro_batch: Positive = 1
    global_batch: Positive | None = None
    grad_accum: Positive | None = None
    seq_len: Positive | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_layers: Positive | None = None
    precision: Precision | None = None
    grad_dtype: StateDType | None = None
    optimizer_dtype: StateDType = "fp32"
    attention: Literal["auto", "unfused", "flash1", "flash2", "flash3"] = "auto"
    loss_kernel: Literal["unfused", "fused"] = "unfused"
    optimizer: Literal["adam", "sgd", "momentum"] = "adam"
    clip_gradients: bool | None = None
    overlap: Overlap = Overlap()
    collective_algorithm: Literal["auto", "ring", "tree", "nvls", "nvls_tree"] = "auto"
    bucket_parameters: Positive | None = None
    launch_s: Annotated[float, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.vpp > 1 and self.schedule != "interleaved":
            raise ValueError(
                f"vpp {self.vpp} needs schedule 'interleaved', not '{self.schedule}'; set schedule=interleaved or vpp=1"
            )
        if self.schedule == "interleaved" and self.pp == 1:
            raise ValueError("schedule 'interleaved' needs pp of at least 2, not 1; set schedule=1f1b or raise pp")
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
        if not isinstance(self.layer_split, str) and len(self.layer_split) != self.pp * self.vpp:
            raise ValueError(
                f"layer_split names {len(self.layer_split)} stages, but pp {self.pp} × vpp {self.vpp} = "
                f"{self.pp * self.vpp}; name one layer count per virtual stage"
            )
        return self
