"""Places a model's units on the virtual stages of a pipeline."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from simpar.cost.kernel import kernel_s, runnable
from simpar.errors import PlanError
from simpar.hardware.device import Device
from simpar.model.layer import LayerKind
from simpar.model.module import ModuleModel
from simpar.model.transformer import Transformer
from simpar.plan.layout import Layout, Model
from simpar.plan.partition import partition
from simpar.program.ir import Launch
from simpar.program.module import module_units
from simpar.program.transformer import TransformerParts
from simpar.program.unit import Chunk, Placed, Unit
from simpar.schedule.schedule import Schedule


def place(
    model: Model, layout: Layout, schedule: Schedule, *, without_experts: bool = False
) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    """Units of every virtual stage, and the bytes that leave each one forward; as often as the schedule holds it.

    Args:
        model: the model.
        layout: the plan laid over it.
        schedule: its stages.
        without_experts: leave experts, their router and their shared parts out of the layers that have some.
    """
    if isinstance(model, ModuleModel):
        chunks, boundary_bytes = _place_module(model, layout, schedule)
    else:
        # a rank that holds the first and the last stage needs a tied embedding once only
        ends_meet = schedule.rank_of_stage[0] == schedule.rank_of_stage[-1]
        chunks, boundary_bytes = _place_transformer(
            model, layout, schedule, ends_meet=ends_meet, without_experts=without_experts
        )
    return chunks * schedule.copies, boundary_bytes * schedule.copies


def _place_module(model: ModuleModel, layout: Layout, schedule: Schedule) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    units = module_units(model, layout)
    ranges = partition(len(units), schedule.depth, split=layout.layer_split, speeds=_speeds(units, layout, schedule))
    for stage, layers in enumerate(ranges):
        if not layers:
            raise PlanError(
                f"layer_split gives stage {stage} none of the {len(units)} layers of {model.name}, which has no "
                "embedding or head to do there; set layer_split=uniform, or lower pp or vpp"
            )
    chunks = tuple(tuple(Placed(units[i], i) for i in layers) for layers in ranges)
    return chunks, tuple(model.layers[layers[-1]].output_bytes(layout.plan.micro_batch) for layers in ranges)


def _place_transformer(
    model: Transformer, layout: Layout, schedule: Schedule, *, ends_meet: bool, without_experts: bool
) -> tuple[tuple[Chunk, ...], tuple[int, ...]]:
    plan, stages = layout.plan, schedule.depth
    parts = TransformerParts(model, layout)
    embedding = parts.embedding().frozen() if plan.frozen_layers else parts.embedding()
    head = parts.head(shares_embedding=model.tied_embeddings and ends_meet)
    made: dict[tuple[LayerKind, str, bool], Unit] = {}

    frozen = plan.frozen_layers or 0

    def layer(index: int, recompute: str) -> Unit:
        kind, is_frozen = model.layer_kind(index), index < frozen
        if without_experts and kind.mlp == "experts":
            kind = replace(kind, mlp="none")
        key = (kind, recompute, is_frozen)
        if key not in made:
            unit = parts.layer(kind, recompute)
            made[key] = unit.frozen() if is_frozen else unit
        return made[key]

    units = [embedding, *(layer(index, plan.recompute) for index in range(model.layers)), head]
    if layout.layer_split == "greedy":  # an embedding has no product, so it weighs nothing
        first, last = 0.0, float(model.vocab * model.hidden)
        costs = [float(model.layer_weights(model.layer_kind(index))) for index in range(model.layers)]
    else:
        flop = {unit: max(_flop(unit), 1.0) for unit in dict.fromkeys(units)}
        first, *costs, last = (flop[unit] for unit in units)
    ranges = partition(
        model.layers,
        stages,
        split=layout.layer_split,
        layer_cost=costs,
        first_cost=first,
        last_cost=last,
        speeds=_speeds(units, layout, schedule),
    )
    if (plan.recompute_layers or 0) > max(map(len, ranges)):
        raise PlanError(
            f"recompute_layers {plan.recompute_layers} is more than the {max(map(len, ranges))} layers of the largest "
            "stage; set recompute_layers lower or drop it to recompute all"
        )
    chunks = []
    for stage, layers in enumerate(ranges):
        placed = [Placed(layer(index, _recompute(layout, position)), index) for position, index in enumerate(layers)]
        if stage == 0:
            placed.insert(0, Placed(embedding, -1))
        if stage == stages - 1:
            placed.append(Placed(head, -1))
        chunks.append(tuple(placed))
    return tuple(chunks), (parts.boundary_bytes,) * stages


def _speeds(units: Iterable[Unit], layout: Layout, schedule: Schedule) -> list[float]:
    """Speeds of the virtual stages at all kernels of the model; of one that two ranks hold, the slower rank's."""
    if not layout.stage_devices:
        return []
    counts = Counter(units)
    seconds = {
        device.name: sum(_unit_s(unit, device) * count for unit, count in counts.items())
        for device in layout.stage_devices
    }
    on = [1.0 / seconds[layout.stage_devices[rank].name] for rank in schedule.rank_of_stage]
    return [min(on[stage :: schedule.depth]) for stage in range(schedule.depth)]


def _unit_s(unit: Unit, device: Device) -> float:
    launches = (i for block in (unit.forward, unit.backward) for i in block.body if isinstance(i, Launch))
    return sum(kernel_s(runnable(launch.kernel, device), device) for launch in launches)


def _recompute(layout: Layout, position: int) -> str:
    plan = layout.plan
    partial = plan.recompute == "full" and plan.recompute_layers is not None
    return "none" if partial and position >= (plan.recompute_layers or 0) else plan.recompute


def _flop(unit: Unit) -> float:
    return unit.forward.work.flop + unit.backward.work.flop
