"""The units of a traced module on one rank: its layers as they were traced, without tensor parallelism."""

from simpar.model.module import KernelForm, ModuleModel
from simpar.model.work import Gemm, kernel_kind
from simpar.plan.layout import Layout
from simpar.program.body import Body
from simpar.program.unit import Unit


def module_units(model: ModuleModel, layout: Layout) -> tuple[Unit, ...]:
    """One unit per layer of the module, for one microbatch.

    A split backward keeps all that autograd saved until the weight half has run.
    """
    batch = layout.plan.micro_batch
    full = layout.plan.recompute == "full"
    units = []
    for index, layer in enumerate(model.layers):
        forward, backward, inputs = Body(), Body(phase="recompute"), Body(phase="recompute")
        for kernel in layer.forward(batch):
            for body in (forward, backward, inputs) if full else (forward,):
                body.run(kernel, f"{layer.name} {kernel_kind(kernel)}")
        backward.phase = inputs.phase = "backward"
        weights = Body(phase="weight_grad")
        for form, kernel in zip(layer.backward_forms, layer.backward(batch), strict=True):
            for body in (backward, weights if _is_weight_gradient(form) else inputs):
                body.run(kernel, f"{layer.name} {kernel_kind(kernel)} grad")
        kept = layer.activation_bytes(batch)
        entry = model.layers[index - 1].output_bytes(batch) if index else 0
        units.append(
            Unit(
                name=layer.name,
                parameters=layer.parameters,
                frozen_parameters=layer.parameters - layer.trainable_parameters,
                forward=forward.block(layer.name),
                backward=backward.block(layer.name),
                backward_input=inputs.block(layer.name),
                backward_weight=weights.block(layer.name),
                activation_bytes=entry if full else kept,
                deferred_bytes=kept,
                transient_bytes=kept if full else 0,
            )
        )
    return tuple(units)


def _is_weight_gradient(form: KernelForm) -> bool:
    """A product that sums over the batch: no sample has a gradient of its own in it."""
    return isinstance(form.kernel, Gemm) and {name for name, _ in form.extents} == {"k"}
