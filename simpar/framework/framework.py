"""What a training framework does that costs time: kernels it launches, traffic they move, what it overlaps.

A framework is data (``catalog/*.yaml``, one file each, with a source per entry). It fills in what a plan leaves open,
and tells lowering how many kernels an operation takes and what they move. Facts come from the framework's code and
papers; the few constants that were fitted to measured steps are listed under ``fitted`` with rows and uncertainty.
No times are computed here.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import yaml
from pydantic import Field, model_validator

from simpar.description import Description
from simpar.errors import FrameworkError, SimparError, nearest
from simpar.reading import read_text, read_yaml

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]

OperationName = Literal[
    "norm",
    "residual",
    "dropout",
    "qk_norm",
    "rope",
    "transpose",
    "activation",
    "gated_activation",
    "router",
    "permute",
    "embedding",
    "loss",
    "fused_loss",
]
OPERATIONS: tuple[OperationName, ...] = OperationName.__args__  # type: ignore[attr-defined]


class Pass(Description):
    """One direction of an operation.

    Attributes:
        nbytes: traffic per element of 2-byte activations, read and written.
        launches: kernels that the host launches.
    """

    nbytes: NonNegative
    launches: Count = 1


class Operation(Description):
    """Memory-bound kernels around the products of a layer, in both directions.

    The elements are those of the residual stream (``norm``, ``residual``, ``dropout``, ``embedding``), of queries and
    keys (``qk_norm``, ``rope``), of queries, keys and values (``transpose``), of the MLP's inner width (``activation``,
    ``gated_activation``), a router's scores (``router``), rows that are sorted by expert (``permute``), and logits
    (``loss``, ``fused_loss``).
    """

    forward: Pass
    backward: Pass

    @model_validator(mode="before")
    @classmethod
    def _read_short(cls, data: Any) -> Any:
        """``[4, 1, 6, 2]`` is 4 bytes in 1 launch forward, 6 bytes in 2 launches backward."""
        if isinstance(data, (list, tuple)):
            if len(data) != 4:
                raise ValueError(
                    f"an operation in short form has 4 numbers (bytes and launches forward, then backward), not "
                    f"{len(data)}; write it as [4, 1, 6, 2]"
                )
            forward, backward = data[:2], data[2:]
            return {
                "forward": {"nbytes": forward[0], "launches": forward[1]},
                "backward": {"nbytes": backward[0], "launches": backward[1]},
            }
        return data


class SoftmaxKernel(Description):
    """The kernel that scales, masks and normalises the scores of unfused attention, and what runs where it does not.

    Attributes:
        rows_multiple: sequences times heads of a rank must be a multiple of this.
        longest: the most keys that it takes; None for any number.
        otherwise: separate kernels in its place; elements are scores.
        kept: bytes per score that these keep of their result for backward.
    """

    rows_multiple: Annotated[int, Field(ge=1)] = 1
    longest: Annotated[int, Field(ge=1)] | None = None
    otherwise: Operation
    kept: NonNegative

    def takes(self, rows: int, keys: int) -> bool:
        """Whether it runs on scores of so many sequences times heads, of so many keys."""
        return rows % self.rows_multiple == 0 and (self.longest is None or keys <= self.longest)


class Optimizer(Description):
    """The update beyond the kernels that every framework needs.

    Attributes:
        extra_bytes: traffic per parameter of the shard beyond what :func:`simpar.cost.memory.optimizer_traffic` counts.
        launches_per_tensor: kernels per parameter tensor: below 1 for fused multi-tensor updates.
        tensors_per_layer: parameter tensors of a layer.
        shard_copy_s: host seconds to copy one rank's part of one tensor between it and the flat buffer of a collective,
            where the distributed optimizer shards tensor by tensor; 0 where buffers are flat from the start.
        waits_for_shards: whether backward waits for each bucket's reduce-scatter with ZeRO-1; all-reduces still run
            beside it.
    """

    extra_bytes: NonNegative = 0.0
    launches_per_tensor: NonNegative = 0.0
    tensors_per_layer: Count = 9
    shard_copy_s: NonNegative = 0.0
    waits_for_shards: bool = False


class Kept(Description):
    """What eager kernels keep for backward beyond what fused ones do, in bytes per element.

    Attributes:
        residual: of the residual stream.
        qk: of queries and keys.
        ffn: of the MLP's inner width.
    """

    residual: NonNegative = 0.0
    qk: NonNegative = 0.0
    ffn: NonNegative = 0.0


class Peak(Description):
    """What a framework's own figure of its peak memory is; the CUDA context is in none of them.

    Attributes:
        counts: ``allocated``, what tensors take (``torch.cuda.max_memory_allocated``), or ``reserved``, what PyTorch's
            allocator has got from the driver for them (``max_memory_reserved``).
        of: the pipeline stage: the ``fullest``, or the ``first``, where rank 0 writes the figure.
        fragmentation: what the allocator reserves beyond what is allocated, relative to activations: these come and go
            in other sizes all the time, while states keep their places.
    """

    error_type: ClassVar[type[SimparError]] = FrameworkError

    counts: Literal["allocated", "reserved"] = "allocated"
    of: Literal["fullest", "first"] = "fullest"
    fragmentation: NonNegative = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.fragmentation and self.counts == "allocated":
            raise ValueError(
                f"fragmentation {self.fragmentation:g} belongs to a peak that counts 'reserved', not 'allocated'; "
                "set counts: reserved, or drop it"
            )
        return self


class Fitted(Description):
    """Where a fitted constant comes from.

    Attributes:
        relative_sd: standard deviation of its logarithm.
        rows: those that it was fitted to, in words.
    """

    relative_sd: NonNegative
    rows: str


class Framework(Description):
    """One training framework, as its code and its published steps describe it.

    Attributes:
        name: name in the catalog, such as ``megatron-core``.
        title: what reports call it.
        about: which releases, and what they ran.
        operations: kernels and traffic of every memory-bound operation.
        layer_launches: kernels of a layer that move next to nothing (views that copy, casts, seeds, small reductions)
            as ``[forward, backward]``.
        attention_launches: kernels of a fused attention core as ``[forward, backward]``.
        expert_launches: kernels that the host launches for a product over the experts of a rank: ``one`` grouped
            kernel, or ``each`` expert's own.
        softmax_kernel: what the fused softmax of unfused attention takes; None if it takes all.
        attention: attention kernel where a plan leaves it ``auto``; None takes the device's newest.
        loss_kernel: ``unfused`` or ``fused`` cross entropy.
        fp8_cast_bytes: traffic per element where a kernel of its own casts what enters a linear layer, or the gradient
            of its output, to fp8; 0 where kernels before it do so. Casts of experts' rows are counted apart. Those of
            weights are not counted, although torchao makes them: of each weight once forward, and with row-wise scales
            once more backward (``float8_linear.py``), or of shards where these are gathered in fp8.
        trains_with_dropout: whether its GPT recipes drop activations by default.
        vocab_multiple: the vocabulary is padded to a multiple of this ...
        vocab_multiple_times_tp: ... times the tensor-parallel degree.
        grad_dtype: dtype in which gradients are kept, by precision.
        reduce_dtype: dtype in which replicas reduce them, by precision, where it is another; casts are not counted, and
            tied embeddings, copies of a model and parameter servers get them as they are kept.
        grad_accumulation: ``fused`` into the weight-gradient product (read, add, write in the gradient's dtype), or
            ``separate`` (the product writes compute precision; a further kernel adds it).
        keeps_compute_gradients: gradients in compute precision stay allocated beside the accumulated ones.
        keeps_compute_shard: with ZeRO-3, a shard of the weights in compute precision stays beside the one in fp32.
        records_streams: tensors of asynchronous collectives are held until the GPU is done with them, while the host
            runs ahead (:mod:`simpar.program.queue`).
        unqueued_passes: of the forward passes with which the first stage of a pipeline begins a step, as many as show
            nothing of that in its peak (an empirical term; 0 for most).
        extra_activations: kept for backward.
        peak: what its own figure of peak memory is.
        overlap: what runs beside compute unless the plan says otherwise: fields of :class:`simpar.plan.plan.Overlap`.
        bucket: gradient buckets: ``megatron-core`` (max(40 M, 1 M · dp) parameters, and but for the first chunk of the
            first stage one per chunk), ``size`` (``bucket_parameters`` each), ``whole`` (one for all gradients).
        bucket_parameters: for ``size``.
        layer_split: how layers are spread over stages unless the plan says otherwise.
        keeps_gradients: gradients live in buffers that each step zeroes.
        optimizer: the update.
        launch_s: host seconds per kernel launch; None takes the device's.
        lockstep_spread: relative spread of the host time of a layer between tensor-parallel ranks. Each layer waits for
            the slowest of them, which costs this times the expected maximum of as many standard normal variables.
        host_waits_for_messages: the host synchronizes with the device at each pipeline message, so it never runs ahead
            over microbatches.
        cross_node_launch_s: host seconds added to each launch per tensor-parallel rank where pipeline messages leave
            the node (an empirical term; 0 for most).
        cross_node_step_s: seconds added to each step of a ring of tensor-parallel ranks that leaves the node (an
            empirical term; 0 for most).
        traffic_factor: traffic of memory-bound kernels over what ``operations`` says; the loss is left out, a few
            passes over logits too large for any cache, whose bytes its code tells exactly.
        compiled_traffic: the same again where the model is compiled (``plan.compile``).
        compiled_launches: launches where the model is compiled, over those listed.
        residual_80: four fifths of measured step times lie within a factor exp(±this) of the prediction; None where no
            steps of this framework were measured.
        residual_80_experts: the same for models with experts; None where it is that of all models.
        fitted: the constants that were fitted.
        sources: where each entry comes from, by field.
    """

    error_type: ClassVar[type[SimparError]] = FrameworkError

    name: str = Field(min_length=1)
    title: str = Field(min_length=1)
    about: str = ""
    operations: dict[OperationName, Operation]
    layer_launches: tuple[Count, Count] = (0, 0)
    attention_launches: tuple[Count, Count] = (1, 3)
    expert_launches: Literal["one", "each"] = "one"
    softmax_kernel: SoftmaxKernel | None = None
    attention: Literal["unfused", "flash1", "flash2", "flash3"] | None = None
    loss_kernel: Literal["unfused", "fused"] = "unfused"
    fp8_cast_bytes: NonNegative = 0.0
    trains_with_dropout: bool = False
    vocab_multiple: Annotated[int, Field(ge=1)] = 128
    vocab_multiple_times_tp: bool = True
    grad_dtype: dict[Literal["bf16", "fp16", "tf32", "fp32", "fp8"], Literal["bf16", "fp16", "fp32"]] = Field(
        default_factory=dict
    )
    reduce_dtype: dict[Literal["bf16", "fp16", "tf32", "fp32", "fp8"], Literal["bf16", "fp16", "fp32"]] = Field(
        default_factory=dict
    )
    grad_accumulation: Literal["fused", "separate"] = "fused"
    keeps_compute_gradients: bool = False
    keeps_compute_shard: bool = False
    records_streams: bool = False
    unqueued_passes: Count = 0
    extra_activations: Kept = Kept()
    peak: Peak = Peak()
    overlap: dict[Literal["grad_reduce", "param_gather", "tp", "p2p", "ep"], Any] = Field(default_factory=dict)
    bucket: Literal["megatron-core", "size", "whole"] = "megatron-core"
    bucket_parameters: Annotated[int, Field(ge=1)] | None = None
    layer_split: Literal["uniform", "balanced", "greedy"] = "uniform"
    keeps_gradients: bool = True
    optimizer: Optimizer = Optimizer()
    launch_s: NonNegative | None = None
    lockstep_spread: NonNegative = 0.0
    host_waits_for_messages: bool = False
    cross_node_launch_s: NonNegative = 0.0
    cross_node_step_s: NonNegative = 0.0
    traffic_factor: Positive = 1.0
    compiled_traffic: Positive = 1.0
    compiled_launches: Positive = 1.0
    residual_80: NonNegative | None = None
    residual_80_experts: NonNegative | None = None
    fitted: dict[str, Fitted] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if missing := [name for name in OPERATIONS if name not in self.operations]:
            raise ValueError(f"operations lack {', '.join(missing)}; give bytes and launches of each")
        if (self.bucket == "size") != (self.bucket_parameters is not None):
            raise ValueError("bucket_parameters belongs to bucket 'size'; give both, or neither")
        if unknown := [name for name in self.fitted if name not in type(self).model_fields]:
            raise ValueError(f"fitted names '{unknown[0]}', which is no field of a framework; name a field")
        return self

    def traffic(self, *, compiled: bool) -> float:
        """Traffic of memory-bound kernels over what :attr:`operations` says."""
        return self.traffic_factor * (self.compiled_traffic if compiled else 1.0)

    def launches(self, count: float, *, compiled: bool) -> int:
        """Kernels that the host launches where ``count`` are listed."""
        return max(1, round(count * self.compiled_launches)) if compiled and count else round(count)


ALIASES: Mapping[str, str] = {
    "composer": "llm-foundry",
    "ddp": "pytorch",
    "fms-fsdp": "pytorch",
    "fsdp2": "pytorch",
    "jax": "maxtext",
    "mcore": "megatron-core",
    "megatron": "megatron-core",
    "megatron-bridge": "megatron-core",
    "megatron-lm": "megatron-core",
    "nemo": "megatron-core",
}
"""Other names that :func:`framework` understands: short ones, and software built on a framework of the catalog."""


def framework(name: str) -> Framework:
    """The catalog's framework of that name or alias.

    >>> framework("nemo").title
    'Megatron-Core'

    Raises:
        FrameworkError: no such framework; the message names the nearest one.
    """
    canonical = ALIASES.get(name.lower(), name.lower())
    if canonical not in framework_names():
        known = [*framework_names(), *ALIASES]
        raise FrameworkError(
            f"unknown framework '{name}'{nearest(name, known)} (known: {', '.join(framework_names())}; others from a "
            "YAML file)"
        )
    return _catalog_framework(canonical)


@cache
def framework_names() -> tuple[str, ...]:
    """Names of the catalog's frameworks, sorted, without aliases."""
    folder = files("simpar.framework") / "catalog"
    return tuple(sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")))


def read_framework(value: Any) -> Any:
    """What a plan may write for a framework: a name, the path of a YAML file, or a mapping with a ``base``.

    Raises:
        FrameworkError: it is none of these.
    """
    if isinstance(value, str):
        is_file = value.endswith((".yaml", ".yml"))
        return load_framework(value) if is_file else framework(value)
    if isinstance(value, Mapping) and "base" in value:
        base = framework(str(value["base"]))
        return base.replace(**{key: change for key, change in value.items() if key != "base"})
    return value


def load_framework(path: str | Path) -> Framework:
    """Reads a framework from a YAML file; a ``base`` in it names one of the catalog, whose other fields it takes.

    Raises:
        FrameworkError: the file cannot be read or describes no framework; the message names file and field.
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise FrameworkError(f"{path}: cannot be read ({error.strerror}); give the path of a YAML file") from None
    return _parse(text, str(path))


@cache  # package data never changes while a process runs
def _catalog_framework(name: str) -> Framework:
    text = (files("simpar.framework") / "catalog" / f"{name}.yaml").read_text(encoding="utf-8")
    return _parse(text, f"{name}.yaml")


def _parse(text: str, origin: str) -> Framework:
    try:
        data = read_yaml(text)
    except yaml.YAMLError as error:
        raise FrameworkError(f"{origin}: is not valid YAML ({' '.join(str(error).split())}); mend its syntax") from None
    if not isinstance(data, dict):
        raise FrameworkError(f"{origin}: must be a mapping of framework fields; start with 'name: ...'")
    base = data.pop("base", None)
    if base is not None:
        try:
            inherited = dict(framework(str(base)))
        except FrameworkError:
            raise FrameworkError(
                f"{origin}: base '{base}' is none of the catalog{nearest(str(base), framework_names())}; "
                f"give one of {', '.join(framework_names())}"
            ) from None
        changed = data.get("operations", {})
        if isinstance(changed, dict):  # what else it may be, the model refuses
            data["operations"] = {**inherited["operations"], **changed}
        data = {**inherited, **data}
    try:
        return Framework.model_validate(data)
    except SimparError as error:
        raise FrameworkError(f"{origin}: {error}") from None
