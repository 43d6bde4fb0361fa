"""Periodic synchronisation: replicas train apart for some steps and then average their parameters.

Local SGD (Stich 2019) averages; DiLoCo (Douillard et al. 2023) takes the mean change of the parameters as the gradient
of an outer optimizer with Nesterov momentum.
"""

from simpar.model.work import DTYPE_BYTES, MemoryBound
from simpar.plan.layout import Layout
from simpar.program.groups import Groups
from simpar.program.ir import Collective, Launch
from simpar.program.writer import Writer


def average(layout: Layout, groups: Groups, writer: Writer, parameters: int) -> None:
    """Averages ``parameters`` parameters of a rank (its shard of them, with ZeRO) over all replicas."""
    apart = layout.replicas // layout.reducing
    if apart == 1 or not parameters:
        return
    own = -(-parameters // layout.reducing)
    width, weight = DTYPE_BYTES[layout.plan.optimizer_dtype], DTYPE_BYTES[layout.precision]
    group = groups.dense.all if layout.reducing == 1 else groups.dense.replicas
    is_nesterov = layout.plan.outer_optimizer == "nesterov"
    if is_nesterov:
        # the change: the parameters of the last round and the present ones are read, their difference is written
        writer.add(Launch(MemoryBound(3 * width * own), "outer gradient", "optimizer"))
    done = writer.after([Collective("all_reduce", float(width * own), group, "average parameters")])
    assert done is not None, "there is a collective"
    writer.wait(done)
    # the change is read, momentum and last parameters are updated, the present ones written; or just divided
    traffic = (width * 6 if is_nesterov else width * 2) + weight
    writer.add(Launch(MemoryBound(traffic * own), "outer update", "optimizer"))


def outer_state_bytes(layout: Layout, parameters: int) -> int:
    """What the outer optimizer keeps: momentum and the parameters of the last round."""
    if layout.plan.sync_every == 1 or layout.plan.outer_optimizer != "nesterov":
        return 0
    return 2 * DTYPE_BYTES[layout.plan.optimizer_dtype] * -(-parameters // layout.reducing)
