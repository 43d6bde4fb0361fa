"""A pipeline schedule as data: the order of forward and backward actions of each rank, without time."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, cast, get_args

from simpar.errors import PlanError

Op = Literal["F", "B", "I", "W"]
OPS: tuple[Op, ...] = get_args(Op)

_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


class Action(NamedTuple):
    """One pass of one microbatch through one virtual stage.

    Its text is torch's: ``2F0`` is the forward pass of microbatch 0 through stage 2.

    Attributes:
        op: ``F`` forward; ``B`` full backward; ``I`` and ``W`` the two halves of a backward that is split
            into the gradient of the input and the gradient of the weights.
        stage: virtual stage, counted over the whole pipeline.
        microbatch: microbatch, from 0.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """The action that ``text`` names.

        >>> Action.parse("2F0")
        Action(op='F', stage=2, microbatch=0)

        Raises:
            PlanError: ``text`` is no action.
        """
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                f"'{text}' is not an action; write stage, one of F B I W, and microbatch without spaces, such as 2F0"
            )
        stage, op, microbatch = match.groups()
        return cls(cast(Op, op), int(stage), int(microbatch))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The orders of all ranks of one pipeline.

    Nothing is checked here, so that a wrong schedule can be read, looked at and reported;
    :func:`simpar.schedule.validate` checks.

    Attributes:
        name: name of the schedule, for messages and views.
        ranks: the order of each pipeline rank.
        microbatches: microbatches of a step.
        rank_of_stage: pipeline rank that holds each virtual stage.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    microbatches: int
    rank_of_stage: tuple[int, ...]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return len(self.rank_of_stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The virtual stages that ``rank`` holds, in order; their positions are its chunks."""
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)

    def chunk_of(self, stage: int) -> int:
        """Position of ``stage`` among the stages of its rank."""
        return self.stages_of(self.rank_of_stage[stage]).index(stage)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """``warmup`` forwards, then one forward and one backward in turn, then the backwards that are left.

    Every schedule of one rank that keeps its forwards and its backwards in a fixed order each has this form.
    """
    order = list(forwards[:warmup])
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        order += (forward, backward)
    order += backwards[len(forwards) - warmup :]
    return tuple(order)


def require_counts(name: str, **counts: int) -> None:
    """Refuses counts below 1.

    Raises:
        PlanError: a count is below 1.
    """
    for what, count in counts.items():
        if count < 1:
            raise PlanError(f"schedule '{name}' has {what}={count}, but needs at least 1; set {what}=1 or more")
