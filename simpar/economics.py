"""Money and energy of a step, and of a training run: arithmetic on what a step takes.

Power of a device is interpolated between idle and its board limit by the share of the step in which it computes. That
is an upper estimate for large models: an 8-GPU H100 node that trains was measured at 76 % of its rating (Newkirk et
al. 2025, arXiv:2506.14551). Nothing here counts failures, restarts, checkpoints or idle reservations.
"""

from dataclasses import asdict, dataclass
from typing import Any

from simpar.errors import ClusterError
from simpar.hardware.cluster import Cluster

S_PER_HOUR = 3600.0
J_PER_KWH = 3.6e6
S_PER_DAY = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run of so many tokens.

    Attributes:
        tokens: to be trained on (samples for a module).
        steps: optimizer steps.
        time_s: wall time.
        gpu_hours: GPUs times hours.
        energy_kwh: of the whole cluster; None without a power model.
        price: in the currency of the cluster's price; None without one.
    """

    tokens: float
    steps: float
    time_s: float
    gpu_hours: float
    energy_kwh: float | None
    price: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a step costs.

    Attributes:
        busy_fraction: share of the step in which GPUs compute, mean of all.
        gpu_w: mean power of a GPU; None if its device has no power model.
        cluster_w: mean power of the whole cluster, with what stands around the GPUs.
        step_energy_j: of the whole cluster.
        step_price: in the currency of the cluster's price; None without one.
        tokens_per_kwh: tokens (samples for a module) a kWh.
        tokens_per_price: tokens for one unit of the currency.
        run: a training run, if tokens were given.
    """

    busy_fraction: float
    gpu_w: float | None
    cluster_w: float | None
    step_energy_j: float | None
    step_price: float | None
    tokens_per_kwh: float | None
    tokens_per_price: float | None
    run: Run | None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def cost(
    cluster: Cluster, *, step_s: float, busy_fraction: float, step_tokens: float, tokens: float | None = None
) -> Cost:
    """Money and energy of a step that takes ``step_s`` on the whole cluster.

    Args:
        cluster: its price, its devices' power, and what stands around them.
        step_s: seconds of a step.
        busy_fraction: share of it in which GPUs compute.
        step_tokens: tokens of a step.
        tokens: of a training run; None leaves it out.

    Raises:
        ClusterError: ``tokens`` is not positive.
    """
    if tokens is not None and not 0 < tokens < float("inf"):
        raise ClusterError(f"tokens={tokens:g} must be positive; give those of a training run, such as 15e12")
    gpu_w = _gpu_w(cluster, busy_fraction)
    cluster_w = None if gpu_w is None else cluster.gpus * (gpu_w + cluster.overhead_w_per_gpu) * cluster.pue
    step_energy_j = None if cluster_w is None else cluster_w * step_s
    price = cluster.price_per_hour
    step_price = None if price is None else price * step_s / S_PER_HOUR
    return Cost(
        busy_fraction=busy_fraction,
        gpu_w=gpu_w,
        cluster_w=cluster_w,
        step_energy_j=step_energy_j,
        step_price=step_price,
        tokens_per_kwh=step_tokens * J_PER_KWH / step_energy_j if step_energy_j else None,
        tokens_per_price=step_tokens / step_price if step_price else None,
        run=None
        if tokens is None
        else Run(
            tokens=tokens,
            steps=(steps := tokens / step_tokens),
            time_s=steps * step_s,
            gpu_hours=steps * step_s * cluster.gpus / S_PER_HOUR,
            energy_kwh=None if step_energy_j is None else steps * step_energy_j / J_PER_KWH,
            price=None if step_price is None else steps * step_price,
        ),
    )


def _gpu_w(cluster: Cluster, busy_fraction: float) -> float | None:
    """Mean power of a GPU, over all kinds that the cluster has."""
    kinds = [(group.device.power, group.count) for group in cluster.groups] or [(cluster.device.power, cluster.nodes)]
    total = 0.0
    for power, nodes in kinds:
        if power is None:
            return None
        total += nodes * (power.idle_w + (power.max_w - power.idle_w) * busy_fraction)
    return total / cluster.nodes
