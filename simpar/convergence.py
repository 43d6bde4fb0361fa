"""Time to a target loss against the batch size: what scaling out is worth beyond tokens per second.

The model is that of McCandlish, Kaplan, Amodei and the OpenAI Dota team, An Empirical Model of Large-Batch Training
(2018), arXiv:1812.06162: to reach a given loss, training with a batch of B examples takes

    S = S_min (1 + B_crit / B) steps    and    E = E_min (1 + B / B_crit) examples,  E_min = S_min B_crit,

two forms of one trade-off, (S / S_min - 1)(E / E_min - 1) = 1. At B_crit training takes twice the least steps and twice
the least examples. B_crit is about the gradient-noise scale, which grows while the loss falls; here it is one number
for the whole run. S_min and B_crit belong to a model, its data, its learning rates and a target, and are measured, not
predicted; :func:`gradient_noise_scale` gives an estimate from the gradients of two batch sizes.
"""

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from typing import Any

from simpar.economics import S_PER_HOUR
from simpar.errors import JobError, PlanError
from simpar.job import Job
from simpar.plan.layout import lay_out
from simpar.search.sweep import sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToTarget:
    """What one batch size takes to reach the target.

    Attributes:
        batch: samples of a step.
        batch_tokens: tokens of a step (samples for a module).
        step_time_s: seconds of a step.
        steps: optimizer steps.
        tokens: to train on.
        hours: wall time.
        gpus: GPUs of the cluster.
        gpu_hours: GPUs times hours.
        tokens_per_s: speed, for comparison.
        cost: in the currency of the cluster's price; None without one.
    """

    batch: int
    batch_tokens: int
    step_time_s: float
    steps: float
    tokens: float
    hours: float
    gpus: int
    gpu_hours: float
    tokens_per_s: float
    cost: float | None

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def steps_to_target(batch_tokens: float, *, critical_batch_tokens: float, minimum_steps: float) -> float:
    """Optimizer steps to the target with batches of so many tokens: S_min (1 + B_crit / B).

    >>> steps_to_target(4e6, critical_batch_tokens=4e6, minimum_steps=10_000)
    20000.0
    """
    return minimum_steps * (1 + critical_batch_tokens / batch_tokens)


def time_to_target(
    job: Job | Mapping[str, Any],
    *,
    critical_batch_tokens: float,
    minimum_steps: float,
    batches: Iterable[int],
    executor: Executor | None = None,
    workers: int | None = 1,
) -> tuple[TimeToTarget, ...]:
    """Simulates a step with each batch size, and multiplies by the steps that it takes to the target.

    Args:
        job: the job, or its fields; its global batch and its gradient accumulation are replaced.
        critical_batch_tokens: B_crit, in tokens (samples for a module).
        minimum_steps: S_min, the steps that even the largest batch would take.
        batches: samples of a step, each a multiple of the micro-batch times dp.
        executor: where to run; left open, in this process or in ``workers`` ones of this machine.
        workers: processes, or tasks that the executor gets at a time.

    Returns:
        One record per batch size, in the order given.

    Raises:
        JobError: no batches, or a number that is not positive.
        PlanError: a batch that the plan cannot run, or that does not fit.

    >>> job = {"model": "gpt2", "cluster": "h100-sxm:4"}
    >>> few, many = time_to_target(job, critical_batch_tokens=1e6, minimum_steps=5000, batches=(4, 256))
    >>> few.steps > many.steps and few.tokens < many.tokens
    True
    """
    job = Job.model_validate(job)
    for name, value in (("critical_batch_tokens", critical_batch_tokens), ("minimum_steps", minimum_steps)):
        if not 0 < value < float("inf"):
            raise JobError(f"{name}={value:g} must be positive; measure it, or take it from a published run")
    chosen = list(batches)
    if not chosen:
        raise JobError("batches is empty; give the samples of a step, such as (256, 512, 1024)")
    first = job.replace(plan=job.plan.replace(grad_accum=None, global_batch=None))
    varied = sweep(first, {"plan.global_batch": chosen}, allow_oom=False, executor=executor, workers=workers)
    seq_len = lay_out(first.plan, first.model, first.cluster).seq_len
    found = []
    for batch, row in zip(chosen, varied.rows, strict=True):
        if "error" in row:
            raise PlanError(f"global_batch {batch}: {row['error']}")
        tokens = batch * seq_len
        steps = steps_to_target(tokens, critical_batch_tokens=critical_batch_tokens, minimum_steps=minimum_steps)
        hours = steps * row["step_time_s"] / S_PER_HOUR
        price = job.cluster.price_per_hour
        found.append(
            TimeToTarget(
                batch=batch,
                batch_tokens=tokens,
                step_time_s=row["step_time_s"],
                steps=steps,
                tokens=steps * tokens,
                hours=hours,
                gpus=job.cluster.gpus,
                gpu_hours=hours * job.cluster.gpus,
                tokens_per_s=row["tokens_per_s"],
                cost=None if price is None else price * hours,
            )
        )
    return tuple(found)


def gradient_noise_scale(small: tuple[float, float], large: tuple[float, float]) -> float:
    """The simple noise scale tr(Σ) / |G|² from the squared norms of gradients at two batch sizes.

    Since E|G_B|² = |G|² + tr(Σ)/B, two batch sizes give both unknowns without bias (the paper's appendix A.1). The
    norms should be means over many steps: the ratio of single ones is biased and noisy.

    Args:
        small: batch size, in whatever B_crit shall be counted, and mean squared norm of its gradient.
        large: the same of a larger batch, such as that of all data-parallel ranks together.

    Raises:
        JobError: the sizes are not two different ones, or the norms leave no gradient behind the noise.

    >>> gradient_noise_scale((10, 1 + 500 / 10), (1000, 1 + 500 / 1000))
    500.0
    """
    (few, noisy), (many, calm) = small, large
    if not 0 < few < many:
        raise JobError(
            f"batch sizes {few:g} and {many:g} must be positive, the first the smaller; give two that differ"
        )
    squared = (many * calm - few * noisy) / (many - few)
    trace = (noisy - calm) / (1 / few - 1 / many)
    if squared <= 0 or trace < 0:
        raise JobError(
            f"squared norms {noisy:g} and {calm:g} leave no gradient behind the noise; take means over more steps"
        )
    return trace / squared
