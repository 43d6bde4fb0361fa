"""The lower bound of a step's time: its busiest pipeline rank, its stream of data parallelism, or its host."""

import numpy as np
import numpy.typing as npt

from simpar.plan.layout import Layout
from simpar.plan.offload import offloads_optimizer
from simpar.program.unit import Held
from simpar.search.host_time import HostTime
from simpar.search.stages import Cut
from simpar.search.transfers import Load, Transfers
from simpar.units import ns

IntArray = npt.NDArray[np.int64]


class StepTime:
    """The bound of one plan's step time, in ns; arrays are per virtual stage (or pipeline rank, where they say so)."""

    def __init__(self, transfers: Transfers, layout: Layout, cut: Cut) -> None:
        self._transfers = transfers
        self._layout = layout
        self._shape = cut.shape
        self._cut = cut
        self._microbatches = layout.microbatches // cut.shape.schedule.copies
        plan, forward, backward = layout.plan, cut.forward, cut.backward
        opened = self._opens_all
        self._opened_forward, self._opened_backward = cut.total(forward.opened), cut.total(backward.opened)
        self._forward = self._opened_forward if opened or plan.zero == 3 else cut.total(forward.alone)
        self._backward = self._opened_backward if opened or plan.zero >= 2 else cut.total(backward.alone)

    @property
    def _opens_all(self) -> bool:
        """Whether the engine may run every kernel by itself, as it does with groups beyond a leaf switch."""
        fabric = self._transfers.cluster.fabric
        return fabric is not None and fabric.pod_nodes is not None

    def bound_ns(self) -> float:
        """Nanoseconds of the step."""
        pp, ranks, m = self._layout.plan.pp, self._shape.rank_of_stage, self._microbatches
        to_next = self._transfers.messages_ns(self._layout, self._cut)
        back = to_next if self._cut.units.all_trained else np.zeros_like(to_next)
        # the first pass of a chunk and the last one may run beside gathers and reductions, kernel by kernel
        passes = (m - 1) * (self._forward + self._backward) + self._opened_forward + self._opened_backward
        sends = np.zeros_like(passes)
        if not self._layout.overlaps_messages:
            sends = m * (to_next + np.concatenate(([0], back[:-1])))
        before = self._gated(self._sums_before(self._opened_forward + to_next))
        after = self._sums_before(self._opened_backward + back)
        if not self._layout.overlaps_messages:  # the last gradient that a stage sends is among its sends
            after -= np.concatenate(([0], back[:-1]))
        if self._shape.splits_backward:  # the weight gradients of other stages need not come after
            after = np.zeros_like(after)
        # where a program has several steps, one may fill while the one before it drains
        before, after = before // self._layout.steps, after // self._layout.steps
        start, drain = least(before, ranks, pp), least(after, ranks, pp)
        busy, sent = np.bincount(ranks, passes, pp), np.bincount(ranks, sends, pp)
        ends = [
            (start + busy + sent + drain).max(),
            (before + passes + sends + after).max(),
            np.bincount(ranks, m * self._cut.total(self._cut.units.launches), pp).max() * ns(self._layout.launch_s),
        ]
        if offloads_optimizer(self._layout.plan):
            ends.append(self._hosts_ns(start + busy + sent))
        suspects = {0, min(1, pp - 1), pp - 1, int((start + busy).argmax())} if self._reduces else ()
        ends += [float(start[rank]) + self._occupied_ns(rank, busy[rank], sent[rank]) for rank in suspects]
        return float(max(ends))

    def _hosts_ns(self, passed: IntArray) -> float:
        """With the optimizer on hosts, whose ranks have run all passes after ``passed`` nanoseconds at the earliest."""
        layout, cut, shape = self._layout, self._cut, self._shape
        # gradients of a pass leave unit by unit, the first ones as it begins
        last = np.zeros(layout.plan.pp)
        np.maximum.at(last, shape.rank_of_stage, self._opened_backward)
        # what other stages add to stays on the device until the end
        meets = shape.schedule.copies > 1 or any(unit.tied_parameters for unit in cut.units.units)
        times = self._microbatches if layout.plan.zero >= 2 and not meets else 1
        hosts = HostTime(self._transfers.cluster, layout, cut.trained_per_rank, times)
        return hosts.bound_ns(float((passed - last).max()))

    @property
    def _reduces(self) -> bool:
        """Whether gradients are added up over replicas in a way that is known here."""
        layout = self._layout
        several = layout.replicas > 1 or (layout.has_experts and layout.expert_replicas > 1)
        return several and layout.plan.grad_compression == "none"

    def _sums_before(self, times: IntArray) -> IntArray:
        """Per virtual stage, the sum over those before it in its model."""
        rows = times.reshape(self._shape.schedule.copies, -1)
        sums = rows.cumsum(axis=1) - rows
        return sums.ravel()

    def _gated(self, before: IntArray) -> IntArray:
        """When each stage is reached at the earliest: a first pass ends only once its gathered weights are there."""
        layout, cut = self._layout, self._cut
        if layout.plan.zero not in (1, 2) or not self._reduces or not layout.overlap.param_gather:
            return before
        rank = int(self._shape.rank_of_stage[0])
        arrives = max(self._transfers.gather(layout, rank, kind).time_ns for kind in _kinds(cut.trained_of(0)))
        gate = max(int(arrives) - int(self._opened_forward[0]), 0)
        reached = before.reshape(self._shape.schedule.copies, -1).copy()
        reached[0] += gate
        return reached.ravel()

    def _occupied_ns(self, rank: int, busy: float, sent: float) -> float:
        """From the first pass of a rank to the end of its reductions, of whichever kind of parameters ends last.

        Gathers and reductions of a kind follow each other on one stream, and set back the passes beside which they run.
        What may have been gathered before the first pass does not count, and a wait for a message counts only once.
        """
        held = np.flatnonzero(self._shape.rank_of_stage == rank)
        if self._layout.plan.zero == 3:
            apart = busy + sent + self._turning_ns(rank)
            return max(apart, *(self._beside_ns(each, rank, busy, sent) for each in self._sharded(rank)))
        chunks = zip(*(_kinds(self._cut.trained_of(stage)) for stage in held.tolist()), strict=True)
        reductions = [[self._transfers.reduction(self._layout, rank, each) for each in kind] for kind in chunks]
        if self._layout.plan.zero < 2 or not self._layout.overlap.grad_reduce:
            # all that is sure: the last pass ends with the reduction of its own gradients after it began
            last = float(self._opened_backward[held].max()) + sent / self._microbatches
            return busy + sent - last + max(min(each.time_ns for each in kind) for kind in reductions)
        m = self._microbatches
        streams = [Load(m * sum(r.time_ns for r in kind), m * sum(r.setback_ns for r in kind)) for kind in reductions]
        return max(self._beside_ns(stream, rank, busy, sent) for stream in streams)

    def _beside_ns(self, stream: Load, rank: int, busy: float, sent: float) -> float:
        """A stream and the passes beside it, which it sets back but while they wait for collectives and messages.

        Either these count only as much as the rate of compute beside them (see ``beside_ns``), or the stream only as
        far as it takes longer than they do.
        """
        rate = self._transfers.cluster.device.compute_rate_during_collectives
        forward, backward = self._cut.forward, self._cut.backward
        path = self._passes_ns(forward.beside, backward.beside, rank) + rate * sent
        waits = self._passes_ns(forward.collectives, backward.collectives, rank) + sent
        beyond = max(1.0 - waits / stream.time_ns, 0.0) if stream.time_ns else 0.0
        return max(stream.time_ns, busy + sent + beyond * stream.setback_ns, path + stream.setback_ns)

    def _passes_ns(self, forward: IntArray, backward: IntArray, rank: int) -> float:
        """All passes of a rank."""
        times = self._cut.total(forward) + self._cut.total(backward)
        return float(self._microbatches * self._cut.per_rank(times)[rank])

    def _turning_ns(self, rank: int) -> float:
        """Under ZeRO-3, what the compute stream waits for between a backward pass and the next pass of the rank.

        The gather of the unit with which a pass begins is queued behind the reduction with which the one before ended.
        """
        layout, transfers = self._layout, self._transfers
        chunks = [self._cut.chunk_of(int(stage)) for stage in np.flatnonzero(self._shape.rank_of_stage == rank)]
        trained = [[unit.trained.dense for unit in units if unit.has_backward] for units in chunks]
        if not all(trained):
            return 0.0
        reduced = min(transfers.reduction(layout, rank, Held(dense)).time_ns for dense in {each[0] for each in trained})
        firsts, lasts = [units[0].trained.dense for units in chunks], [each[-1] for each in trained]
        # what nobody gathers waits for nothing
        waits = {dense: transfers.gather(layout, rank, Held(dense)).time_ns for dense in {*firsts, *lasts}}
        waits = {dense: reduced + time if reduced and time else 0.0 for dense, time in waits.items()}
        forward, fresh_forward, fresh_backward = transfers.turns(layout, rank)
        if layout.plan.reshard_after_forward:
            given_back = np.array([len(units) > 1 for units in chunks])
            fresh_forward = np.where(given_back, forward, fresh_forward)
        before_forward = np.array([waits[dense] for dense in firsts])
        before_backward = np.array([waits[dense] for dense in lasts])
        return float(fresh_forward @ before_forward + fresh_backward @ before_backward)

    def _sharded(self, rank: int) -> list[Load]:
        """The streams of both kinds under ZeRO-3: reductions of every unit and microbatch, and gathers.

        Where forward gives a unit back, it is gathered for every pass; else each of its backward passes takes away what
        the next pass must gather again. The very first gather may be over when the rank's first pass begins.
        """
        m = self._microbatches
        times, setbacks = [0.0, 0.0], [0.0, 0.0]
        for (trained, is_last), count in self._cut.pieces(rank).items():
            given_back = self._layout.plan.reshard_after_forward and not is_last
            gathers = (2 * m if given_back else m) - 1
            for number, kind in enumerate(_kinds(trained)):
                reduction = self._transfers.reduction(self._layout, rank, kind)
                gather = self._transfers.gather(self._layout, rank, kind)
                times[number] += count * (m * reduction.time_ns + gathers * gather.time_ns)
                setbacks[number] += count * (m * reduction.setback_ns + gathers * gather.setback_ns)
        return [Load(*both) for both in zip(times, setbacks, strict=True)]


def _kinds(held: Held) -> tuple[Held, Held]:
    """Parameters by who else holds them: those outside experts, those of experts."""
    return Held(dense=held.dense), Held(experts=held.experts)


def least(values: IntArray, ranks: IntArray, pp: int) -> IntArray:
    """Per pipeline rank, the least of its virtual stages' values."""
    found = np.full(pp, np.iinfo(np.int64).max)
    np.minimum.at(found, ranks, values)
    return found
