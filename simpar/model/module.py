"""Any ``torch.nn.Module`` as a job, and perceptrons without torch: layers of kernels affine in the batch.

The values here know nothing of torch; :mod:`simpar.model.tracing`, which :func:`trace_module` imports when it
is called, does the recording.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from simpar.errors import ModelError, nearest
from simpar.model.work import DTYPE_BYTES, DType, Gemm, Kernel, MemoryBound

if TYPE_CHECKING:
    import torch

Activation = Literal["relu", "gelu", "silu", "tanh", "sigmoid"]
Loss = Literal["mse", "cross_entropy"]


_BATCH_FIRST = "make the batch dimension 0 of every input (batch_first=True in torch's attention and recurrent modules)"


@dataclass(frozen=True, slots=True)
class Affine:
    """A whole number ``base + slope · batch``."""

    base: int
    slope: int

    def at(self, batch: int) -> int:
        """Its value at a batch size."""
        return self.base + self.slope * batch


@dataclass(frozen=True, slots=True)
class KernelForm:
    """A kernel whose extents may grow with the batch.

    Attributes:
        kernel: the kernel at batch 1.
        extents: names of the kernel's fields that depend on the batch, with their dependence.
    """

    kernel: Kernel
    extents: tuple[tuple[str, Affine], ...] = ()

    def at(self, batch: int) -> Kernel:
        """The kernel at a batch size."""
        changes: dict[str, Any] = {name: extent.at(batch) for name, extent in self.extents}
        return dataclasses.replace(self.kernel, **changes)


@dataclass(frozen=True, slots=True)
class ModuleLayer:
    """One layer of a module: the unit that a pipeline stage is made of.

    Attributes:
        name: its path inside the module.
        parameters: number of parameters; one that several layers share is counted in the first of them.
        trainable_parameters: those of them that get a gradient.
        forward_forms: kernels of the forward pass, in order.
        backward_forms: kernels of the backward pass, in order.
        saved_bytes: activations kept for the backward pass; see :meth:`activation_bytes`.
        sent_bytes: what the next layer receives; see :meth:`output_bytes`.
    """

    name: str
    parameters: int
    trainable_parameters: int
    forward_forms: tuple[KernelForm, ...]
    backward_forms: tuple[KernelForm, ...]
    saved_bytes: Affine
    sent_bytes: Affine

    def forward(self, batch: int) -> tuple[Kernel, ...]:
        """Kernels of the forward pass over ``batch`` samples."""
        return tuple(form.at(batch) for form in self.forward_forms)

    def backward(self, batch: int) -> tuple[Kernel, ...]:
        """Kernels of the backward pass over ``batch`` samples."""
        return tuple(form.at(batch) for form in self.backward_forms)

    def activation_bytes(self, batch: int) -> int:
        """Bytes that autograd keeps from this layer's forward until its backward.

        Parameters and buffers are left out. A tensor that two layers keep is counted in the first; the
        model's input and the loss's target count as well.
        """
        return self.saved_bytes.at(batch)

    def output_bytes(self, batch: int) -> int:
        """Bytes that the next layer receives, as a pipeline would send them; the last layer: the output.

        Tensors that skip over the next layer are not in this number.
        """
        return self.sent_bytes.at(batch)


@dataclass(frozen=True, slots=True)
class ModuleModel:
    """A model as its layers' kernels, at any batch size.

    Attributes:
        name: what reports call it.
        layers: the layers in the order in which they first run.
        dtype: dtype of the parameters (of most of them).
    """

    name: str
    layers: tuple[ModuleLayer, ...]
    dtype: DType

    @property
    def parameters(self) -> int:
        """All parameters, shared ones counted once."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def trainable_parameters(self) -> int:
        """Parameters that get a gradient."""
        return sum(layer.trainable_parameters for layer in self.layers)

    def step_flop(self, batch: int) -> float:
        """FLOP of the forward and backward kernels over ``batch`` samples, the loss's included."""
        kernels = (kernel for layer in self.layers for kernel in (*layer.forward(batch), *layer.backward(batch)))
        return sum(kernel.work.flop for kernel in kernels)


def trace_module(
    module: "torch.nn.Module",
    sample_inputs: Any,
    *,
    loss: "Callable[..., torch.Tensor] | None" = None,
    target: "torch.Tensor | None" = None,
    name: str | None = None,
) -> ModuleModel:
    """Records what a training step of a module runs, without memory and without touching the module.

    A copy with its tensors on the meta device runs forward, loss and backward at three batch sizes; the sizes
    of all kernels must be affine in the batch, which is dimension 0 of the inputs. A layer is a direct child
    that has parameters (children of a ``Sequential`` or ``ModuleList`` among them count as direct); children
    without parameters, functional calls between children and the loss belong to the layer that ran last. A
    module without such children is one layer. ``scaled_dot_product_attention`` and dropout are recorded as
    the fused kernels that a GPU runs. The module's train/eval mode and dtype are kept.

    Args:
        module: the module; it stays as it is.
        sample_inputs: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
            Tensors whose dimension 0 equals that of the first one carry the batch.
        loss: called with the module's output, and with ``target`` if that is given. Without a loss the
            backward pass starts from gradients of the output.
        target: what the loss compares with; its dimension 0 is the batch.
        name: what to call the model; the module's class if not given.

    Raises:
        ModelError: torch is missing, the module cannot run on the meta device (its control flow depends on
            values), or its work is not affine in the batch.
    """
    try:
        from simpar.model import tracing  # noqa: PLC0415 - torch is wanted only here
    except ImportError as error:
        raise ModelError(
            f"tracing a torch module needs torch, which cannot be imported ({error});"
            " install simpar[calibrate], or describe the model as mlp(...) or Transformer"
        ) from error
    return tracing.trace(module, sample_inputs, loss=loss, target=target, name=name)


def fit_affine(values: Sequence[int], batches: Sequence[int]) -> Affine | None:
    """The affine function through values at three or more batch sizes, or None if there is none."""
    slope, rest = divmod(values[1] - values[0], batches[1] - batches[0])
    fitted = Affine(values[0] - slope * batches[0], slope)
    fits = all(fitted.at(batch) == value for batch, value in zip(batches, values, strict=True))
    return fitted if rest == 0 and fits else None


def fit_bytes(values: Sequence[int], batches: Sequence[int], where: str) -> Affine:
    """The affine byte count through the counts at each batch size.

    Raises:
        ModelError: there is none.
    """
    fitted = fit_affine(values, batches)
    if fitted is None:
        raise ModelError(
            f"{where}: {', '.join(map(str, values))} bytes at batch {', '.join(map(str, batches))} are not"
            f" affine in the batch; {_BATCH_FIRST}"
        )
    return fitted


def fit_kernels(traces: Sequence[Sequence[Kernel]], batches: Sequence[int], where: str) -> tuple[KernelForm, ...]:
    """The kernel forms through the kernels that were recorded at each batch size.

    Raises:
        ModelError: the batches ran different kernels, or an extent is not affine in the batch.
    """
    if any([type(k) for k in trace] != [type(k) for k in traces[0]] for trace in traces):
        raise ModelError(
            f"{where} runs other kernels at other batch sizes ({', '.join(map(str, batches))}), but a step"
            " must run the same ones; trace a module whose control flow does not depend on the batch"
        )
    return tuple(_fit_kernel(kernels, batches, where) for kernels in zip(*traces, strict=True))


def _fit_kernel(kernels: Sequence[Kernel], batches: Sequence[int], where: str) -> KernelForm:
    extents = []
    for field in dataclasses.fields(kernels[0]):
        values = [getattr(kernel, field.name) for kernel in kernels]
        if all(value == values[0] for value in values):
            continue
        extent = fit_affine(values, batches) if all(isinstance(value, int) for value in values) else None
        if extent is None:
            raise ModelError(
                f"{where}: {type(kernels[0]).__name__}.{field.name} is {', '.join(map(str, values))} at batch"
                f" {', '.join(map(str, batches))}, which is not affine in the batch; {_BATCH_FIRST}"
            )
        extents.append((field.name, extent))
    flop = [round(kernel.work.flop) for kernel in kernels]
    if fit_affine(flop, batches) is None:
        raise ModelError(
            f"{where}: {type(kernels[0]).__name__} does {', '.join(map(str, flop))} FLOP at batch"
            f" {', '.join(map(str, batches))}, which is not affine in the batch: samples meet each other;"
            f" {_BATCH_FIRST}"
        )
    form = KernelForm(kernels[0], tuple(extents))
    return KernelForm(form.at(1), form.extents)


@dataclass(frozen=True, slots=True)
class _ActivationRule:
    """What autograd does for an activation: which tensor it keeps, and how the kernel reaches memory."""

    keeps_input: bool
    memory_class: Literal["elementwise", "activation"]


_ACTIVATIONS: dict[str, _ActivationRule] = {
    "relu": _ActivationRule(keeps_input=False, memory_class="elementwise"),
    "gelu": _ActivationRule(keeps_input=True, memory_class="activation"),
    "silu": _ActivationRule(keeps_input=True, memory_class="activation"),
    "tanh": _ActivationRule(keeps_input=False, memory_class="activation"),
    "sigmoid": _ActivationRule(keeps_input=False, memory_class="activation"),
}


def mlp(
    sizes: str,
    *,
    activation: Activation = "relu",
    loss: Loss | None = "mse",
    dtype: DType = "fp32",
    name: str | None = None,
) -> ModuleModel:
    """A perceptron such as ``784-500-10``: linear layers with bias, an activation between them, and a loss.

    The kernels are those that :func:`trace_module` records for the same ``torch.nn.Sequential``, but torch is
    not needed.

    Args:
        sizes: widths from input to output, joined by ``-``.
        activation: what stands between two linear layers.
        loss: mean squared error against a target of the output's shape, cross entropy against int64 class
            labels, or None.
        dtype: dtype of parameters and activations.
        name: what to call the model; ``mlp:`` and the sizes if not given.

    Raises:
        ModelError: the sizes cannot be read, or the activation, loss or dtype is unknown.

    >>> mlp("784-500-10").parameters
    397510
    """
    widths = _parse_sizes(sizes)
    for word, value, known in (
        ("activation", activation, get_args(Activation)),
        ("loss", loss, (*get_args(Loss), None)),
        ("dtype", dtype, get_args(DType)),
    ):
        if value not in known:
            names = [str(option) for option in known]
            raise ModelError(
                f"mlp: {word} '{value}' is unknown{nearest(str(value), names)}; choose one of {', '.join(names)}"
            )
    layers = tuple(_mlp_layer(index, widths, activation, loss, dtype) for index in range(len(widths) - 1))
    return ModuleModel(name=name or f"mlp:{sizes}", layers=layers, dtype=dtype)


def _parse_sizes(sizes: str) -> list[int]:
    parts = sizes.split("-")
    if len(parts) < 2 or not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise ModelError(
            f"mlp: '{sizes}' is not a chain of layer widths; write at least two positive whole numbers joined"
            " by '-', as in '784-500-10'"
        )
    return [int(part) for part in parts]


def _gemm(m: Affine | int, n: int, k: Affine | int, dtype: DType) -> KernelForm:
    given = {"m": m, "k": k}
    extents = tuple((name, value) for name, value in given.items() if isinstance(value, Affine))
    ones = {name: value.at(1) if isinstance(value, Affine) else value for name, value in given.items()}
    return KernelForm(Gemm(ones["m"], n, ones["k"], dtype, out_bytes=DTYPE_BYTES[dtype]), extents)


def _moved(
    base: int, slope: int, memory_class: Literal["elementwise", "activation", "norm"] = "elementwise"
) -> KernelForm:
    nbytes = Affine(base, slope)
    return KernelForm(MemoryBound(nbytes.at(1), memory_class), (("nbytes", nbytes),))


def _mlp_layer(index: int, widths: list[int], activation: Activation, loss: Loss | None, dtype: DType) -> ModuleLayer:
    inner, outer, first, last = widths[index], widths[index + 1], index == 0, index == len(widths) - 2
    size, batch, rule = DTYPE_BYTES[dtype], Affine(0, 1), _ACTIVATIONS[activation]
    row = outer * size
    forward = [_gemm(batch, outer, inner, dtype)]
    backward = [] if first else [_gemm(batch, inner, outer, dtype)]
    backward += [
        _gemm(outer, inner, batch, dtype),
        _moved(row, row),
    ]  # weights, then the bias: a sum over the batch
    # a linear layer keeps its input, which is there already if an activation kept it as its own output
    saved = Affine(0, inner * size if first or rule.keeps_input else 0)
    if last:
        loss_forward, loss_backward, kept = _loss_forms(loss, outer, size)
        forward, backward = forward + loss_forward, loss_backward + backward
        saved = Affine(saved.base + kept.base, saved.slope + kept.slope)
    else:
        forward.append(_moved(0, 2 * row, rule.memory_class))
        backward.insert(0, _moved(0, 3 * row, rule.memory_class))
        saved = Affine(saved.base, saved.slope + row)
    parameters = inner * outer + outer
    return ModuleLayer(
        name=str(2 * index),  # as Sequential(Linear, activation, Linear, ...) numbers them
        parameters=parameters,
        trainable_parameters=parameters,
        forward_forms=tuple(forward),
        backward_forms=tuple(backward),
        saved_bytes=saved,
        sent_bytes=Affine(0, row),
    )


def _loss_forms(loss: Loss | None, width: int, size: int) -> tuple[list[KernelForm], list[KernelForm], Affine]:
    """Forward kernels, backward kernels and kept bytes of a mean loss over rows of ``width`` elements."""
    row, label = width * size, 8
    if loss is None:
        return [], [], Affine(0, 0)
    if loss == "mse":
        return [_moved(size, 2 * row)], [_moved(size, 3 * row)], Affine(0, 2 * row)
    forward = [_moved(0, 2 * row, "norm"), _moved(2 * size, label + size)]
    backward = [_moved(2 * size, row + label), _moved(0, 3 * row, "norm")]
    return forward, backward, Affine(size, row + label)
