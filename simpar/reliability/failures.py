"""Failures and how a run survives them, as a description."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from simpar.description import Description
from simpar.economics import S_PER_DAY, S_PER_HOUR
from simpar.errors import JobError, SimparError

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]

_MOST_FAILURES = 100_000  # of one run; a comparison of intervals makes a hundred runs


class Failures(Description):
    """How often a cluster fails, and what checkpoints and restarts cost.

    Attributes:
        gpus: GPUs of the job.
        gpus_per_node: of a node.
        mtbf_gpu_h: hours between two failures of one GPU, whatever fails with it counted.
        mtbf_node_h: hours between two failures of one node, beside those of its GPUs; at least one of both is given.
        checkpoint_s: how long training stands still for a checkpoint.
        restart_s: from a failure until training goes on: finding out, replacing, starting, loading the checkpoint.
        days: wall time of the run.
    """

    error_type: ClassVar[type[SimparError]] = JobError

    gpus: Annotated[int, Field(ge=1)]
    gpus_per_node: Annotated[int, Field(ge=1)] = 8
    mtbf_gpu_h: Positive | None = None
    mtbf_node_h: Positive | None = None
    checkpoint_s: NonNegative
    restart_s: NonNegative
    days: Positive

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mtbf_gpu_h is None and self.mtbf_node_h is None:
            raise ValueError("no time between failures is given; give mtbf_gpu_h (such as 50000) or mtbf_node_h")
        expected = self.days * S_PER_DAY / self.mtbf_s
        if expected > _MOST_FAILURES:
            raise ValueError(
                f"{expected:.2g} failures in {self.days:g} days are more than can be simulated; check the hours "
                "between failures, or take fewer days"
            )
        return self

    @property
    def mtbf_s(self) -> float:
        """Seconds between failures of the whole job; rates of parts add up, since one failure stops all."""
        per_hour = 0.0
        if self.mtbf_gpu_h is not None:
            per_hour += self.gpus / self.mtbf_gpu_h
        if self.mtbf_node_h is not None:
            per_hour += self.gpus / self.gpus_per_node / self.mtbf_node_h
        return S_PER_HOUR / per_hour

    @property
    def wall_s(self) -> float:
        """Wall time of the run."""
        return self.days * S_PER_DAY

    def check_interval(self, interval_s: float) -> None:
        """Refuses an interval between checkpoints that has no meaning.

        Raises:
            JobError: it is not positive.
        """
        if not 0 < interval_s < float("inf"):
            raise JobError(f"interval_s={interval_s:g} must be positive; give the training between two checkpoints")
