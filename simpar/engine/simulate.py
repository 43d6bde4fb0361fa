"""Runs a program on the clock: one environment per run, no state outside it."""

from functools import partial

from simpar.engine.costs import Costs
from simpar.engine.execution import Execution
from simpar.engine.noise import Noise
from simpar.engine.pricing import Pricing
from simpar.engine.record import build_trace
from simpar.engine.rows import Recorder
from simpar.engine.traffic import link_s_per_byte
from simpar.faults.description import Faults
from simpar.hardware.cluster import Cluster
from simpar.program.ir import Program
from simpar.trace.trace import Trace
from simpar.units import ns


def execute(program: Program, cluster: Cluster, faults: Faults | None = None) -> Trace:
    """Simulates one step.

    Args:
        program: what the ranks run.
        cluster: where they run it.
        faults: what is slow or random there.

    Returns:
        The trace; equal programs on equal clusters give equal traces.

    Raises:
        DeadlockError: ranks wait for each other; the message names each and what it waits for.
    """
    if program.placement is not None:
        cluster = cluster.replace(placement=program.placement)
    ranks = (rank.rank for rank in program.ranks)
    costs = Costs(cluster, program.algorithm, ranks, faults, guests=program.guests)
    launch_ns = ns(program.launch_s)
    noise = Noise(faults, launch_ns) if faults is not None and faults.jitter.spread else None
    recorder = Recorder()
    price = Pricing(costs, recorder, launch_ns).operation
    execution = Execution(program, costs, recorder, launch_ns=launch_ns, price=price, noise=noise)
    step_ns = execution.run()
    execution.book_block_traffic()
    traffic = partial(link_s_per_byte, program, costs)
    return build_trace(recorder, execution.lanes, execution.network, program.ranks, step_ns, traffic)
