"""The units of a traced module on one rank: its layers as they were traced, without tensor parallelism."""

from simpar.model.module import ModuleModel
from simpar.model.work import kernel_kind
from simpar.plan.layout import Layout
from simpar.program.body import Body
from simpar.program.unit import Unit


def module_units(model: ModuleModel, layout: Layout) -> tuple[Unit, ...]:
    """One unit per layer of the module, for one microbatch."""
    batch = layout.plan.micro_batch
    full = layout.plan.recompute == "full"
    units = []
    for index, layer in enumerate(model.layers):
        forward, backward = Body(), Body(phase="recompute")
        for kernel in layer.forward(batch):
            for body in (forward, backward) if full else (forward,):
                body.run(kernel, f"{layer.name} {kernel_kind(kernel)}")
        backward.phase = "backward"
        for kernel in layer.backward(batch):
            backward.run(kernel, f"{layer.name} {kernel_kind(kernel)} grad")
        kept = layer.activation_bytes(batch)
        entry = model.layers[index - 1].output_bytes(batch) if index else 0
        units.append(
            Unit(
                name=layer.name,
                parameters=layer.parameters,
                forward=forward.block(layer.name),
                backward=backward.block(layer.name),
                activation_bytes=entry if full else kept,
                transient_bytes=kept if full else 0,
            )
        )
    return tuple(units)
