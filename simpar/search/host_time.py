"""What hosts do for a plan that keeps its optimizer there, as a lower bound: the traffic of their memory.

Every copy and every pass of the processor goes through the memory of the host (``ram`` in the engine), which all ranks
on it share; so their bytes over its rate undercut whatever order the engine finds.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simpar.cost.memory import optimizer_traffic, weight_bytes
from simpar.hardware.cluster import Cluster
from simpar.hardware.host_ways import host_memory, host_of
from simpar.model.work import DTYPE_BYTES
from simpar.plan.layout import Layout
from simpar.program.offload import BEFORE_NORM
from simpar.program.unit import Held

IntArray = npt.NDArray[np.int64]


class HostTime:
    """Nanoseconds of hosts' memory for one plan.

    Args:
        cluster: the machines, ranks in their usual places.
        layout: the plan, which offloads its optimizer.
        trained: parameters by pipeline rank, before ZeRO shards them.
        times: how often gradients leave; but for the first time, the host adds them up.
    """

    def __init__(self, cluster: Cluster, layout: Layout, trained: Sequence[Held], times: int) -> None:
        plan = layout.plan
        shards = (layout.shard, layout.expert_shard) if plan.zero else (1, 1)
        parameters = [held.dense / shards[0] + held.experts / shards[1] for held in trained]
        grad = DTYPE_BYTES[layout.grad_dtype]
        moved = optimizer_traffic(
            1,
            precision=layout.precision,
            grad_dtype=layout.grad_dtype,
            optimizer=plan.optimizer,
            optimizer_dtype=plan.optimizer_dtype,
            clips=layout.clips_gradients,
        )
        self._clips = layout.clips_gradients
        self._arriving = times * grad + 3 * (times - 1) * grad  # bytes a parameter: copied out, and added up
        self._norm = sum(moved.get(kernel, 0) for kernel in BEFORE_NORM)
        self._update = sum(moved.values()) - self._norm + weight_bytes(layout.precision)
        self._ns_per_byte = self._least_on_a_host(cluster, layout, np.array(parameters))

    @staticmethod
    def _least_on_a_host(cluster: Cluster, layout: Layout, parameters: npt.NDArray[np.float64]) -> float:
        """For a byte a parameter, the nanoseconds of the host that has least to do."""
        ranks = layout.plan.tp * layout.replicas * layout.plan.pp
        gpus = np.arange(ranks) if cluster.placement is None else np.array(cluster.placement)
        hosts = host_of(cluster, gpus).reshape(layout.plan.pp, -1)
        names, number = np.unique(hosts, return_inverse=True)
        held = np.bincount(number.ravel(), np.repeat(parameters, hosts.shape[1]), len(names))
        return float(held.min()) / host_memory(cluster, 0).capacity_bytes_per_s * 1e9

    def bound_ns(self, begin_ns: float) -> float:
        """Nanoseconds of the step, where some stage has not all of its gradients before ``begin_ns``.

        Clipped gradients are scaled by a norm over all stages, so that no rank updates anything before.
        """
        whole = self._arriving + self._norm + self._update
        after_all = begin_ns + self._ns_per_byte * self._update if self._clips else 0.0
        return max(self._ns_per_byte * whole, after_all)
