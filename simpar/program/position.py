"""Where a rank stands among stages and replicas, and what it holds there."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from simpar.plan.layout import Layout
from simpar.program.unit import Chunk, Held, Unit
from simpar.schedule.schedule import Schedule


@dataclass(frozen=True)
class Position:
    """One rank of a program.

    Attributes:
        layout: the plan laid over model and cluster.
        schedule: order of the pipeline's passes.
        chunks: the units of all virtual stages.
        stage: pipeline rank.
        replica: data-parallel index.
        tp_rank: tensor-parallel index.
        folded: whether it stands for all other ranks of its stage.
        stands_for: replicas of which it is one, and which all run what it runs.
    """

    layout: Layout
    schedule: Schedule
    chunks: Sequence[Chunk]
    stage: int
    replica: int
    tp_rank: int
    folded: bool
    stands_for: int = 1

    @property
    def rank(self) -> int:
        """Global rank."""
        return self.layout.rank(self.stage, self.replica, self.tp_rank)

    @cached_property
    def copies(self) -> range:
        """The ranks that it stands for, as distances: those of a stage follow each other."""
        return range(self.layout.plan.tp * self.layout.replicas if self.folded else 1)

    # ---- what it holds ----------------------------------------------------------------------------------------------

    @cached_property
    def held(self) -> tuple[int, ...]:
        """Its virtual stages."""
        return self.schedule.stages_of(self.stage)

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Those of its virtual stages."""
        return tuple(placed.unit for stage in self.held for placed in self.chunks[stage])

    @cached_property
    def parameters(self) -> Held:
        """All parameters."""
        return sum((unit.held for unit in self.units), Held())

    @cached_property
    def trained(self) -> Held:
        """Parameters that get a gradient."""
        return sum((unit.trained for unit in self.units), Held())

    def trains(self, stage: int) -> bool:
        """Whether anything runs backward on a virtual stage: not on those before the first that has a gradient."""
        return stage % self.schedule.depth >= self._trained_from

    @cached_property
    def _trained_from(self) -> int:
        """The first virtual stage that trains anything."""
        training = (stage for stage, chunk in enumerate(self.chunks) if any(p.unit.has_backward for p in chunk))
        return next(training, len(self.chunks))

    # ---- who else holds it ------------------------------------------------------------------------------------------

    @property
    def ends(self) -> set[int]:
        """The pipeline ranks of the first and of the last virtual stage."""
        return {self.schedule.rank_of_stage[0], self.schedule.rank_of_stage[-1]}

    @property
    def shares_embedding(self) -> bool:
        """Whether this rank and another one hold a copy each of a tied embedding that is trained."""
        embedding, head = self.chunks[0][0].unit, self.chunks[-1][-1].unit
        tied = embedding.name == "embedding" and embedding.has_backward and head.tied_parameters > 0
        return tied and len(self.ends) > 1 and self.stage in self.ends

    @property
    def mirror(self) -> int:
        """The pipeline rank that holds the other copy of its stages, where a schedule has two; else this one."""
        schedule = self.schedule
        return schedule.rank_of_stage[(self.held[0] + schedule.depth) % schedule.stages]

    @property
    def meets_other_gradients(self) -> bool:
        """Whether another stage adds to its gradients once all passes have run."""
        return self.shares_embedding or self.mirror != self.stage
