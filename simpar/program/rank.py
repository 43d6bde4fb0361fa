"""The instructions of one rank, in host order: the passes of its schedule, and what each of them runs and holds.

Messages between stages (:mod:`simpar.program.messages`), data parallelism (:mod:`simpar.program.data_parallel`) and the
end of a step (:mod:`simpar.program.step_end`) write their own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import ClassVar, Literal

from simpar.plan.offload import offloads_activations, offloads_optimizer
from simpar.program.data_parallel import DataParallel, FullySharded, Replicated, Runner
from simpar.program.groups import Groups
from simpar.program.ir import Alloc, Operation, RankProgram, Run
from simpar.program.messages import Messages
from simpar.program.offload import HostActivations, HostUpdate, UnitPass
from simpar.program.operations import Part
from simpar.program.parameter_server import Keys, Served
from simpar.program.position import Position
from simpar.program.sized import Sized
from simpar.program.states import host_states, resident
from simpar.program.step_end import StepEnd
from simpar.program.writer import Writer
from simpar.schedule.schedule import Action

Opening = Literal["all", "beside", "none"]
"""Which runs are simulated kernel by kernel: all, those beside which data-parallel traffic may run, or none."""


@dataclass(frozen=True, slots=True)
class Common:
    """What ranks of a program share.

    Attributes:
        by_length: what microbatches run, by sequence length.
        opening: which runs are simulated kernel by kernel.
        keys: what parameter servers keep; None without them.
    """

    by_length: Mapping[int, Sized]
    opening: Opening
    keys: Keys | None


class Rank:
    """Writes the instructions of one rank.

    Args:
        common: what it shares with the other ranks.
        position: where it stands.
    """

    def __init__(self, common: Common, position: Position) -> None:
        layout, stage = position.layout, position.stage
        self._common = common
        self._position = position
        self._layout = layout
        self._schedule = position.schedule
        self._held = position.held
        usual = common.by_length[layout.seq_len]
        lengths = layout.samples and layout.samples.padded[position.replica // layout.plan.cp]
        self._sized = [common.by_length[length] for length in lengths] if lengths else [usual] * layout.microbatches
        order = self._schedule.ranks[stage]
        self._firsts = {next(a for a in order if a.op == "F" and a.stage == v) for v in self._held}
        self._lasts = {next(a for a in reversed(order) if a.op in ("B", "W") and a.stage == v) for v in self._held}
        self._writer = writer = Writer()
        groups = Groups(layout, stage, position.replica, position.tp_rank, folded=position.folded)
        on_host, waits = offloads_optimizer(layout.plan), position.meets_other_gradients
        host = HostUpdate(layout, writer, position.copies, waits=waits) if on_host else None
        on_host = offloads_activations(layout.plan)
        self._host_activations = HostActivations(writer, position.copies) if on_host else None
        self._data = self._strategy(groups, host)
        self._messages = Messages(position, self._sized, writer)
        self._end = StepEnd(position, usual.operations, groups, writer, data=self._data, host=host)

    def _strategy(self, groups: Groups, host: HostUpdate | None) -> DataParallel | Served:
        keys, position = self._common.keys, self._position
        chunks = [position.chunks[v] for v in self._held]
        if keys is not None:
            return Served(keys, self._writer, chunks, replica=position.replica, tp_rank=position.tp_rank)
        strategy: type[Replicated] | type[FullySharded] = FullySharded if self._layout.plan.zero == 3 else Replicated
        return strategy(self._layout, groups, self._writer, chunks, host)

    def program(self, context_bytes: int) -> RankProgram:
        """The rank's program; ``context_bytes`` are what the device's runtime takes."""
        position = self._position
        for step in range(self._layout.steps):
            self._add_passes(step)
            self._end.add(is_last=step == self._layout.steps - 1)
        activations = 0 if self._host_activations is None else self._host_activations.most_bytes
        return RankProgram(
            rank=position.rank,
            stage=position.stage,
            replicas=len(position.copies) * position.stands_for,
            resident=resident(position, self._common.keys, context_bytes),
            instructions=tuple(self._writer.instructions),
            host_bytes=activations + host_states(position),
        )

    # ---- passes -----------------------------------------------------------------------------------------------------

    def _add_passes(self, step: int) -> None:
        """All passes of a step."""
        self._messages.begin_step(step)
        if self._host_activations is not None:
            self._host_activations.begin_step(list(self._unit_passes()))
        self._data.begin_step()
        for turn in self._schedule.turns(self._position.stage):
            if len(turn) == 2 and self._overlaps(*turn):
                self._pair(*turn)
                continue
            for action in turn:
                self._pass[action.op](self, action)

    def _forward(self, action: Action) -> None:
        self._begin_forward(action)
        run, chunk = self._runner(action, "forward"), self._held.index(action.stage)
        self._data.forward(run, chunk, first=action in self._firsts)
        self._messages.send_output(action)

    def _backward(self, action: Action) -> None:
        if not self._position.trains(action.stage):
            return
        self._messages.receive_gradient(action)
        run, chunk = self._runner(action, "backward"), self._held.index(action.stage)
        self._data.backward(run, chunk, action.microbatch, last=action in self._lasts)
        self._end_backward(action)

    def _input_gradient(self, action: Action) -> None:
        """The half of a backward pass for which another stage waits; it leaves what the weight gradient needs."""
        if not self._position.trains(action.stage):
            return
        self._messages.receive_gradient(action)
        self._data.backward_input(self._runner(action, "backward_input"), self._held.index(action.stage))
        self._end_backward(action)

    def _weight_gradient(self, action: Action) -> None:
        if not self._position.trains(action.stage):
            return
        run, chunk = self._runner(action, "backward_weight"), self._held.index(action.stage)
        self._data.backward_weight(run, chunk, action.microbatch, last=action in self._lasts)
        self._writer.add(Alloc("activations", -self._of(action).deferred[action.stage]))

    _pass: ClassVar = {"F": _forward, "B": _backward, "I": _input_gradient, "W": _weight_gradient}

    def _overlaps(self, forward: Action, backward: Action) -> bool:
        """Whether a pair that the schedule overlaps can be one run: no gathers and reductions come between."""
        return self._position.trains(backward.stage) and self._data.is_quiet(
            first=forward in self._firsts, last=backward in self._lasts
        )

    def _pair(self, forward: Action, backward: Action) -> None:
        self._begin_forward(forward)
        self._messages.receive_gradient(backward)
        first, second = self._of(forward).operations, self._of(backward).operations
        operation = first.pair(forward.stage, backward.stage, second)
        whole = len(second.chunks[backward.stage])
        self._add_run(operation, backward, second.transient_bytes(backward.stage, 0, whole), beside=False)
        self._messages.send_output(forward)
        self._end_backward(backward)

    def _begin_forward(self, action: Action) -> None:
        """Its input comes, and memory for what it keeps is taken."""
        self._messages.receive_input(action)
        if self._host_activations is None:
            self._writer.add(Alloc("activations", self._of(action).activations[action.stage]))

    def _end_backward(self, action: Action) -> None:
        """Memory is given back, but for what a weight gradient still needs, and the gradient of the input goes on."""
        this = self._of(action)
        left = this.deferred[action.stage] if action.op == "I" else 0
        if self._host_activations is None:
            self._writer.add(Alloc("activations", left - this.activations[action.stage]))
        self._messages.send_gradient(action)

    def _of(self, action: Action) -> Sized:
        """What a microbatch of that length runs."""
        return self._sized[action.microbatch]

    # ---- runs of units ----------------------------------------------------------------------------------------------

    def _runner(self, action: Action, part: Part) -> Runner:
        return partial(self._run, action, part)

    def _run(self, action: Action, part: Part, first: int, last: int, *, beside: bool) -> None:
        """Units of a virtual stage, one part of them; one by one where their activations come and go."""
        if self._host_activations is None:
            self._run_units(action, part, first, last, beside=beside)
            return
        for unit in range(first, last) if part == "forward" else reversed(range(first, last)):
            moves = self._activations_of(action, unit) > 0
            if moves:
                self._host_activations.before()
            self._run_units(action, part, unit, unit + 1, beside=beside)
            if moves:
                self._host_activations.after()

    def _activations_of(self, action: Action, unit: int) -> int:
        """Bytes that a unit keeps for its backward pass."""
        placed = self._of(action).operations.chunks[action.stage][unit].unit
        return placed.activation_bytes if placed.has_backward else 0

    def _unit_passes(self) -> Iterator[UnitPass]:
        """The passes of all units that keep anything, in the order in which they will run."""
        for action in self._schedule.ranks[self._position.stage]:
            chunk = self._of(action).operations.chunks[action.stage]
            units = range(len(chunk))
            for unit in units if action.op == "F" else reversed(units):
                nbytes = self._activations_of(action, unit)
                if nbytes:
                    layer = chunk[unit].layer
                    yield UnitPass(action.op == "F", action.stage, action.microbatch, unit, nbytes, layer)

    def _run_units(self, action: Action, part: Part, first: int, last: int, *, beside: bool) -> None:
        operations = self._of(action).operations
        operation = operations.units(action.stage, part, first, last)
        if operation.blocks:
            holds = part in ("backward", "backward_input")
            transient = operations.transient_bytes(action.stage, first, last) if holds else 0
            if self._layout.framework.records_streams and part in ("forward", "backward"):
                transient = max(transient, self._queued_bytes(action, backward=part == "backward"))
            self._add_run(operation, action, transient, beside=beside)

    def _queued_bytes(self, action: Action, *, backward: bool) -> int:
        """What collectives in the launch queue hold.

        Without a pipeline the host never waits. In one it does before each backward pass, and on all but the first
        virtual stage before each forward pass, too. There it is ahead by the passes that begin the step, of which some
        hold nothing (``unqueued_passes`` of the framework).
        """
        operations = self._of(action).operations
        if self._layout.plan.pp == 1:
            return operations.queued_bytes(action.stage, 1, backward=backward)
        if backward or action.stage:
            return 0
        order = self._schedule.ranks[self._position.stage]
        ahead = sum(1 for _ in takewhile(lambda each: each.op == "F" and each.stage == 0, order))
        return operations.queued_bytes(0, max(0, ahead - self._layout.framework.unqueued_passes), backward=False)

    def _add_run(self, operation: Operation, action: Action, transient_bytes: int, *, beside: bool) -> None:
        """Opened where data-parallel traffic may run beside it on the same links."""
        chunk = self._held.index(action.stage) if len(self._held) > 1 else -1
        opened = self._common.opening == "all" or (beside and self._common.opening == "beside")
        self._writer.add(Run(operation, action.microbatch, chunk, transient_bytes, opened))
