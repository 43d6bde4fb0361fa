"""What a rank keeps on its host, and when it goes there and comes back: orders of copies, events and host work.

Gradients leave bucket by bucket (with ZeRO-3 unit by unit) as they are reduced, the host's processor updates its own
states, and updated parameters come back piece by piece while it goes on (ZeRO-Offload, Ren et al. 2021,
arXiv:2101.06840, section 4; Megatron-Core's ``overlap_cpu_optimizer_d2h_h2d``, the default of its
``HybridDeviceOptimizer``). The norm of gradients is the host's, too, as in FSDP2 with ``CPUOffloadPolicy``. The next
step waits for all of it.

Activations leave unit by unit behind their forward pass, and are fetched one unit before their backward pass
(Transformer Engine's ``cpu_offload``: a unit may run while the one before it leaves, then it waits).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from simpar.cost.memory import optimizer_traffic, weight_bytes
from simpar.model.work import DTYPE_BYTES
from simpar.plan.layout import Layout
from simpar.program.ir import Alloc, HostOp, HostWork
from simpar.program.operations import shard_of
from simpar.program.unit import Held
from simpar.program.writer import Writer

CPU = "cpu"
GRADIENTS, PARAMETERS = "host_gradients", "host_parameters"
ACTIVATIONS_OUT, ACTIVATIONS_IN = "host_out", "host_in"
BEFORE_NORM = ("cast gradients", "unscale gradients", "grad norm")

_MOST_PIECES = 64  # of a bucket or unit: more of them would hide next to nothing more

Copies = range | tuple[int, ...]


class _Piece(NamedTuple):
    """Parameters of a rank's shard that are updated together, and the event of their gradients' arrival."""

    parameters: int
    arrived: int


class HostUpdate:
    """The optimizer of one rank, on its host.

    Args:
        layout: the plan laid over model and cluster.
        writer: of the rank's program.
        copies: the ranks that it stands for.
        waits: gradients stay on the device until the end of the step, because other stages add to them there.
    """

    def __init__(self, layout: Layout, writer: Writer, copies: Copies, *, waits: bool) -> None:
        self._layout = layout
        self._writer = writer
        self._copies = copies
        self._waits = waits
        self._waiting: dict[Hashable, Held] = {}
        self._pieces: dict[Hashable, list[_Piece]] = {}

    def gradients(self, key: Hashable, held: Held, after: Iterable[int], microbatch: int) -> int | None:
        """Takes the reduced gradients of ``held``, once the events ``after`` are there.

        Args:
            key: of these parameters; where they come again, for another microbatch, the host adds up.
            held: the parameters, before ZeRO shards them.
            after: events of their reductions, beside what compute did so far.
            microbatch: the one that brings them.

        Returns:
            The event of their arrival on the host; None if there are none, or they wait.
        """
        if self._waits:
            self._waiting[key] = held
            return None
        return self._take(key, held, after, microbatch)

    def _take(self, key: Hashable, held: Held, after: Iterable[int], microbatch: int) -> int | None:
        writer, width = self._writer, DTYPE_BYTES[self._layout.grad_dtype]
        share = shard_of(held, self._layout)
        if not share:
            return None
        for event in (writer.record(), *after):
            writer.wait(event, GRADIENTS)
        again, pieces = key in self._pieces, []
        for count in _cut(share, min(-(-held.total // self._layout.bucket_parameters), _MOST_PIECES)):
            self._work(GRADIENTS, "copy_out", count * width, "gradients", microbatch)
            arrived = writer.record(GRADIENTS)
            if again:
                writer.wait(arrived, CPU)
                self._work(CPU, "update", 3 * count * width, "add gradients", microbatch)
            pieces.append(_Piece(count, arrived))
        self._pieces[key] = pieces
        return writer.record(GRADIENTS)

    def norm(self) -> int | None:
        """Adds up the norm of all gradients on the host; the event of its end, None where nothing is trained."""
        if self._layout.clips_gradients:
            for piece in self._all():
                self._writer.wait(piece.arrived, CPU)
                self._pass(piece, "grad norm", lambda kernel: kernel in BEFORE_NORM)
        return self._writer.record(CPU) if self._pieces else None

    def send_waiting(self) -> None:
        """Sends the gradients that had to wait for other stages, which have added theirs by now."""
        for key, held in self._waiting.items():
            self._take(key, held, (), -1)
        self._waiting = {}

    def update(self, after: int | None) -> None:
        """Updates once ``after`` is there, and lets compute wait for the updated parameters."""
        writer, layout = self._writer, self._layout
        if after is not None:
            writer.wait(after, CPU)
        clips = layout.clips_gradients
        for piece in self._all():
            if not clips:
                writer.wait(piece.arrived, CPU)
            self._pass(piece, layout.plan.optimizer, lambda kernel: not clips or kernel not in BEFORE_NORM)
            writer.wait(writer.record(CPU), PARAMETERS)
            self._work(PARAMETERS, "copy_in", piece.parameters * weight_bytes(layout.precision), "parameters")
        if self._pieces:
            writer.wait(writer.record(PARAMETERS))
        self._pieces = {}

    def _all(self) -> Iterator[_Piece]:
        return (piece for pieces in self._pieces.values() for piece in pieces)

    def _pass(self, piece: _Piece, name: str, takes: Callable[[str], bool]) -> None:
        """What those of the optimizer's kernels move that ``takes`` says, as one pass over a piece."""
        plan, layout = self._layout.plan, self._layout
        traffic = optimizer_traffic(
            piece.parameters,
            precision=layout.precision,
            grad_dtype=layout.grad_dtype,
            optimizer=plan.optimizer,
            optimizer_dtype=plan.optimizer_dtype,
            clips=layout.clips_gradients,
        )
        self._work(CPU, "update", sum(nbytes for kernel, nbytes in traffic.items() if takes(kernel)), name)

    def _work(self, stream: str, op: HostOp, nbytes: int, name: str, microbatch: int = -1) -> None:
        self._writer.add(HostWork(stream, op, float(nbytes), name, microbatch, copies=self._copies))


class UnitPass(NamedTuple):
    """A unit runs forward or backward for a microbatch; ``nbytes`` are its activations, ``layer`` the model's."""

    is_forward: bool
    stage: int
    microbatch: int
    unit: int
    nbytes: int
    layer: int

    @property
    def key(self) -> tuple[int, int, int]:
        """Whose activations these are."""
        return self.stage, self.microbatch, self.unit


class HostActivations:
    """The activations of one rank, on its host between forward and backward pass.

    Those of a unit whose backward pass follows at once stay on the device.

    Args:
        writer: of the rank's program.
        copies: the ranks that it stands for.

    Attributes:
        most_bytes: that the host ever holds.
    """

    def __init__(self, writer: Writer, copies: Copies) -> None:
        self._writer = writer
        self._copies = copies
        self._passes: Sequence[UnitPass] = ()
        self._at = 0
        self._stay: frozenset[tuple[int, int, int]] = frozenset()
        self._left: dict[tuple[int, int, int], int] = {}  # on the host, from this event on
        self._leaving: list[UnitPass] = []  # whose memory on the device is not given back yet
        self._arriving: dict[tuple[int, int, int], int] = {}
        self._held = self.most_bytes = 0

    def begin_step(self, passes: Sequence[UnitPass]) -> None:
        """Learns in which order the units will run, those without activations left out."""
        self._passes, self._at = passes, 0
        self._stay = frozenset(one.key for one, then in pairwise(passes) if one.is_forward and one.key == then.key)

    def before(self) -> None:
        """Makes room for, or waits for, the activations of the next pass, and fetches those of the one behind it."""
        this = self._passes[self._at]
        self._give_back(len(self._leaving) - 1)
        if this.is_forward:
            self._writer.add(Alloc("activations", this.nbytes))
        elif this.key not in self._stay:
            if this.key not in self._arriving:
                self._fetch(this)
            self._writer.wait(self._arriving.pop(this.key))
            done = [each.key for each in self._leaving]
            if this.key in done:  # it has left before it came
                self._give_back(done.index(this.key) + 1)
        then = self._passes[self._at + 1] if self._at + 1 < len(self._passes) else None
        if then is not None and not then.is_forward and then.key not in self._stay:
            self._fetch(then)

    def after(self) -> None:
        """The pass has run: its activations leave, or are not needed any more."""
        this, writer = self._passes[self._at], self._writer
        self._at += 1
        if not this.is_forward:
            writer.add(Alloc("activations", -this.nbytes))
        elif this.key not in self._stay:
            writer.wait(writer.record(), ACTIVATIONS_OUT)
            writer.add(self._copy(ACTIVATIONS_OUT, "copy_out", this))
            self._left[this.key] = writer.record(ACTIVATIONS_OUT)
            self._leaving.append(this)
            self._held += this.nbytes
            self.most_bytes = max(self.most_bytes, self._held)

    def _give_back(self, count: int) -> None:
        """Waits until the first ``count`` that leave have left."""
        for each in self._leaving[: max(count, 0)]:
            self._writer.wait(self._left[each.key])
            self._writer.add(Alloc("activations", -each.nbytes))
        del self._leaving[: max(count, 0)]

    def _fetch(self, this: UnitPass) -> None:
        writer = self._writer
        writer.add(Alloc("activations", this.nbytes))
        writer.wait(writer.record(), ACTIVATIONS_IN)
        writer.wait(self._left[this.key], ACTIVATIONS_IN)
        writer.add(self._copy(ACTIVATIONS_IN, "copy_in", this))
        self._arriving[this.key] = writer.record(ACTIVATIONS_IN)
        self._held -= this.nbytes

    def _copy(self, stream: str, op: HostOp, this: UnitPass) -> HostWork:
        return HostWork(stream, op, float(this.nbytes), "activations", this.microbatch, this.layer, self._copies)


def _cut(count: int, parts: int) -> list[int]:
    """``count`` in nearly equal parts, none of them empty.

    >>> _cut(10, 3), _cut(2, 5)
    ([3, 3, 4], [1, 1])
    """
    parts = min(parts, count)
    return [count * (i + 1) // parts - count * i // parts for i in range(parts)]
