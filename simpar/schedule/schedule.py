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
            shown = text[:40]
            raise PlanError(
                f"'{shown}' is not an action; write stage, one of F B I W, and microbatch without spaces, such as 2F0"
            )
        stage, op, microbatch = match.groups()
        return cls(cast(Op, op), int(stage), int(microbatch))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The orders of all ranks of one pipeline.

    A bidirectional schedule holds two ``copies`` of the model: the first half of the virtual stages is one of them, the
    second half the other, each with its own share of the microbatches, so no microbatch meets both.

    Nothing is checked here, so that a wrong schedule can be read, looked at and reported;
    :func:`simpar.schedule.validate` checks.

    Attributes:
        name: name of the schedule, for messages and views.
        ranks: the order of each pipeline rank.
        microbatches: microbatches of a step.
        rank_of_stage: pipeline rank that holds each virtual stage.
        copies: models in the pipeline, each with equally many stages and microbatches.
        overlapped: forwards that share the GPU with the backward behind them in their rank's order, so that one
            computes while the other communicates (torch's ``OVERLAP_F_B``).
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    microbatches: int
    rank_of_stage: tuple[int, ...]
    copies: int = 1
    overlapped: frozenset[Action] = frozenset()

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return len(self.rank_of_stage)

    @property
    def depth(self) -> int:
        """Virtual stages that a microbatch passes."""
        return self.stages // self.copies

    def before(self, stage: int) -> int | None:
        """The virtual stage that hands its output to ``stage``; None for the first of a model."""
        return stage - 1 if stage % self.depth else None

    def after(self, stage: int) -> int | None:
        """The virtual stage that takes the output of ``stage``; None for the last of a model."""
        return stage + 1 if (stage + 1) % self.depth else None

    def microbatches_of(self, stage: int) -> range:
        """The microbatches that pass ``stage``: those of its copy of the model."""
        share = self.microbatches // self.copies
        first = stage // self.depth * share
        return range(first, first + share)

    def goes_round(self, stage: int) -> bool:
        """Whether the output of ``stage`` goes to the next rank, behind the last to the first, rather than back up."""
        return self.rank_of_stage[stage + 1] == (self.rank_of_stage[stage] + 1) % self.pp

    def turns(self, rank: int) -> list[tuple[Action, ...]]:
        """What a rank runs at once: single actions, and pairs that overlap."""
        turns: list[tuple[Action, ...]] = []
        for action in self.ranks[rank]:
            if turns and turns[-1][-1] in self.overlapped:
                turns[-1] = (*turns[-1], action)
            else:
                turns.append((action,))
        return turns

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


def require_chunks(name: str, chunks: int, *, alone: str) -> None:
    """Refuses a schedule of several chunks with one; ``alone`` is what that would be.

    Raises:
        PlanError: there is one chunk only.
    """
    if chunks == 1:
        raise PlanError(
            f"schedule '{name}' needs at least 2 chunks (vpp) a rank, not 1; raise vpp or take schedule '{alone}'"
        )


def v_shape(pp: int) -> tuple[int, ...]:
    """Ranks of 2 pp stages that go down the ranks and come back."""
    return (*range(pp), *reversed(range(pp)))
