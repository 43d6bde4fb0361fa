"""Changes of a plan that make it fit: each is tried by lowering it and adding up its memory, without a clock."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from simpar.errors import PlanError
from simpar.hardware.cluster import Cluster
from simpar.plan.layout import Layout, Model, lay_out
from simpar.plan.plan import Plan
from simpar.program.footprint import footprints, fullest, host_bytes
from simpar.program.lower import lower
from simpar.schedule.registry import shortened
from simpar.units import format_bytes

_MOST_PARTS = 1024  # into which a microbatch is cut to make a job fit
_TIGHT = 0.98  # of a device's memory, assumed: allocators need some, too

Change = Mapping[str, Any]
"""New values of a plan's fields."""


class Relief(NamedTuple):
    """A change that makes a plan fit.

    Attributes:
        change: fields that differ, with their new values.
        peak_bytes: what the fullest rank then needs.
        capacity_bytes: what its device has.
    """

    change: dict[str, Any]
    peak_bytes: int
    capacity_bytes: int

    @property
    def need(self) -> str:
        """What it needs in words, and whether that is nearly all there is.

        >>> Relief({}, 2**30, 2**34).need, Relief({}, 79 * 2**30, 80 * 2**30).need
        ('1 GiB', '79 GiB, tight')
        """
        return format_bytes(self.peak_bytes) + (", tight" if self.peak_bytes > _TIGHT * self.capacity_bytes else "")

    @property
    def in_python(self) -> str:
        """The change as fields of a plan.

        >>> Relief({"zero": 3, "dp": None}, 2**30, 2**34).in_python
        'zero=3 without dp (1 GiB)'
        """
        words = (f"{name}={value}" if value is not None else f"without {name}" for name, value in self.change.items())
        return f"{' '.join(words)} ({self.need})"

    @property
    def on_command_line(self) -> str:
        """The change as flags that every command with a job takes.

        >>> Relief({"sequence_parallel": True, "dp": None}, 2**30, 2**34).on_command_line
        '--set plan.sequence_parallel=true --set plan.dp=null (1 GiB)'
        """
        words = {True: "true", False: "false", None: "null"}
        typed = {
            name: words[value] if value is None or isinstance(value, bool) else value
            for name, value in self.change.items()
        }
        return f"{' '.join(f'--set plan.{name}={value}' for name, value in typed.items())} ({self.need})"


def fitting(model: Model, cluster: Cluster, plan: Plan, changes: Iterable[Change]) -> Iterator[Relief]:
    """Those of the changes with which a plan keeps to all rules and fits devices and hosts.

    Of changes that lead to the same plan only the first is tried.
    """
    tried = [plan]
    for change in changes:
        try:
            changed = plan.replace(**change)
            if changed in tried:
                continue
            tried.append(changed)
            layout = _shortened(lay_out(changed, model, cluster), model, cluster)
            program = lower(model, cluster, layout)
            worst, device = fullest(footprints(program), layout, cluster)
            on_host = host_bytes(program, layout, cluster)
        except (PlanError, ValueError):
            continue  # this change breaks another rule
        if worst.peak_bytes <= device.memory_bytes and (not on_host or on_host <= cluster.host.device.memory_bytes):
            differs = {name: value for name, value in change.items() if getattr(plan, name) != value}
            yield Relief(differs, worst.peak_bytes, device.memory_bytes)


def _shortened(layout: Layout, model: Model, cluster: Cluster) -> Layout:
    """The same with the fewest microbatches that hold all that they ever hold."""
    plan = layout.plan
    few, group = shortened(plan.schedule, plan.pp, layout.microbatches, plan.microbatch_group)
    if layout.samples is not None or few == layout.microbatches:
        return layout
    return lay_out(plan.replace(global_batch=None, grad_accum=few, microbatch_group=group), model, cluster)


def usual_changes(plan: Plan) -> Iterator[Change]:
    """Changes that save memory, roughly by what they cost in time."""
    if plan.dp_shard is not None:
        yield {"dp_shard": None}
    if plan.zero < 1:
        yield {"zero": 1}
    if plan.recompute == "none":
        yield {"recompute": "selective"}
    parts = [n for n in range(2, min(plan.micro_batch, _MOST_PARTS) + 1) if plan.micro_batch % n == 0]
    smaller = [plan.micro_batch // n for n in parts]
    for micro_batch in smaller:
        # as many samples as before
        more = None if plan.global_batch is not None else (plan.grad_accum or 1) * (plan.micro_batch // micro_batch)
        yield {"micro_batch": micro_batch, "grad_accum": more}
        if micro_batch == 1 and plan.recompute != "full":
            yield {"micro_batch": 1, "grad_accum": more, "recompute": "full"}
    if plan.tp > 1 and not plan.sequence_parallel:
        yield {"sequence_parallel": True}
    if plan.recompute != "full":
        yield {"recompute": "full", "zero": max(plan.zero, 1)}
    for zero in (2, 3):
        if plan.zero < zero:
            yield {"zero": zero}
    for factor in (2, 4, 8, 16):
        yield {
            "tp": plan.tp * factor,
            "sequence_parallel": True,
            "dp": None,
            "dp_shard": None,
            "zero": max(plan.zero, 1),
        }
        yield {"pp": plan.pp * factor, "dp": None, "dp_shard": None, "zero": max(plan.zero, 1)}
        yield {
            "tp": min(plan.tp * factor, 8),
            "pp": plan.pp * factor,
            "sequence_parallel": True,
            "dp": None,
            "dp_shard": None,
            "zero": max(plan.zero, 1),
            "recompute": "full",
        }
    yield {"zero": 3, "recompute": "full"}
    if plan.offload == "none":
        yield {"offload": "optimizer", "zero": max(plan.zero, 1)}
        yield {"offload": "optimizer", "zero": 3, "recompute": "full"}


def most_frugal(plan: Plan, gpus_per_node: int) -> Iterator[Change]:
    """Changes that save all the memory they can, and then more of it on hosts; each for several degrees of ``tp``."""
    degrees = [tp for tp in range(1, gpus_per_node + 1) if gpus_per_node % tp == 0]
    for offload in dict.fromkeys((plan.offload, "optimizer", "activations", "both")):
        for tp in degrees:
            change = {"tp": tp, "sequence_parallel": tp > 1, "micro_batch": 1, "zero": 3, "recompute": "full"}
            yield {**change, "offload": offload}
