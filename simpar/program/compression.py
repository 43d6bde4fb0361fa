"""Gradient compression: what goes over the wire, and the kernels that it takes before and after.

Kernels are memory-bound; their traffic is counted per gradient from what each method must read and write, in the dtype
in which gradients are kept (``width`` bytes):

* ``fp16`` (torch's ``fp16_compress_hook``): reads and casts to 2 bytes, all-reduces those, casts back.
* ``int8`` (ZeRO++'s quantized gradients, Wang et al. 2023, section 3.3): a scale in fp32 per block of 256. Each rank
  gets everyone's part of its share by an all-to-all, sums the parts in full precision, quantizes the sum, and all ranks
  gather it: the bytes of an all-reduce in 8 bits, and each gradient is rounded twice instead of once per hop.
* ``topk`` with error feedback (Aji & Heafield 2017; Lin et al. 2018): the residual is added and kept; the largest are
  found by a radix select of four passes (8 of 32 bits each, as ``torch.topk`` does) and a fifth that collects them;
  values and 4-byte indices of all ranks are gathered, and added up one by one.
"""

from dataclasses import dataclass

from simpar.model.work import DTYPE_BYTES, MemoryBound
from simpar.plan.layout import Layout
from simpar.program.ir import Collective, Group, Launch
from simpar.program.writer import Writer

_BLOCK = 256  # gradients that share a scale: the default of bitsandbytes and of ZeRO++
_SCALE_BYTES, _INDEX_BYTES = 4, 4
_SELECT_PASSES = 5
_DEFAULT_RATIO = 0.01  # Lin et al. go down to 0.001 after a warm-up


@dataclass(frozen=True, slots=True)
class Compression:
    """How one gradient bucket is packed, exchanged and unpacked.

    Attributes:
        method: ``none``, ``fp16``, ``int8`` or ``topk``.
        width: bytes of a gradient as it is kept.
        ratio: share of the gradients that ``topk`` sends.
    """

    method: str
    width: int
    ratio: float

    @classmethod
    def of(cls, layout: Layout) -> "Compression":
        """The plan's."""
        plan = layout.plan
        return cls(plan.grad_compression, DTYPE_BYTES[layout.grad_dtype], plan.compression_ratio or _DEFAULT_RATIO)

    def kept(self, parameters: int) -> int:
        """Gradients that ``topk`` sends: at least one."""
        return max(1, round(self.ratio * parameters))

    def wire_bytes(self, parameters: int) -> int:
        """Bytes of one rank's packed gradients."""
        match self.method:
            case "fp16":
                return 2 * parameters
            case "int8":
                return parameters + _SCALE_BYTES * -(-parameters // _BLOCK)
            case "topk":
                return self.kept(parameters) * (self.width + _INDEX_BYTES)
            case _:
                return self.width * parameters

    def state_bytes(self, parameters: int) -> int:
        """Bytes that are kept from step to step: what ``topk`` did not send."""
        return self.width * parameters if self.method == "topk" else 0

    def pack(self, parameters: int) -> list[Launch]:
        """Kernels before the exchange."""
        read = self.width * parameters
        match self.method:
            case "fp16" | "int8":
                passes = 2 if self.method == "int8" else 1  # the largest of a block comes first
                return [_launch(passes * read + self.wire_bytes(parameters), "compress gradients")]
            case "topk":
                return [
                    _launch(3 * read, "add residual"),
                    _launch(_SELECT_PASSES * read + self.wire_bytes(parameters), "select largest", _SELECT_PASSES),
                    _launch(2 * self.kept(parameters) * self.width, "clear residual"),
                ]
            case _:
                return []

    def exchange(self, parameters: int, group: Group, microbatch: int) -> list[Collective]:
        """The first (and but for ``int8`` the only) collective of a bucket."""
        wire = float(self.wire_bytes(parameters))
        match self.method:
            case "int8":
                return [Collective("all_to_all", wire, group, "gradients", microbatch)]
            case "topk":
                return [Collective("all_gather", wire * len(group.ranks), group, "gradients", microbatch)]
            case _:
                return [Collective("all_reduce", wire, group, "gradients", microbatch)]

    def sum_parts(self, parameters: int, ranks: int) -> list[Launch]:
        """Kernels between the two exchanges of ``int8``: a rank reads all parts of its share, and packs the sum."""
        if self.method != "int8":
            return []
        wire = self.wire_bytes(parameters)
        return [_launch(wire + wire // ranks, "sum compressed parts")]

    def exchange_sums(self, parameters: int, group: Group, microbatch: int) -> list[Collective]:
        """The second collective of ``int8``."""
        if self.method != "int8":
            return []
        return [Collective("all_gather", float(self.wire_bytes(parameters)), group, "gradients", microbatch)]

    def unpack(self, parameters: int, ranks: int) -> list[Launch]:
        """Kernels after the exchange; ``topk`` adds what each of ``ranks`` sent into a cleared gradient."""
        match self.method:
            case "fp16" | "int8":
                return [_launch(self.wire_bytes(parameters) + self.width * parameters, "decompress gradients")]
            case "topk":
                added = ranks * (self.wire_bytes(parameters) + 2 * self.kept(parameters) * self.width)
                return [_launch(self.width * parameters + added, "decompress gradients", ranks + 1)]
            case _:
                return []


def _launch(nbytes: int, name: str, launches: int = 1) -> Launch:
    return Launch(MemoryBound(nbytes), name, "optimizer", launches)


class Exchange:
    """The compressed gradients of one rank on their way, bucket by bucket.

    The sums between the two halves of ``int8`` are made by compute; so as not to stop it, the second half of a bucket
    starts when the next bucket is ready.
    """

    def __init__(self, compression: Compression, group: Group, writer: Writer) -> None:
        self._compression, self._group, self._writer = compression, group, writer
        self._halfway: tuple[int, int, int] | None = None  # parameters, microbatch and event of the first half
        self._underway: list[tuple[int, int]] = []  # parameters, and event of the end

    def start(self, parameters: int, microbatch: int) -> None:
        """Packs a bucket and sends it."""
        self._go_on()
        writer = self._writer
        writer.add(*self._compression.pack(parameters))
        done = writer.after(self._compression.exchange(parameters, self._group, microbatch))
        assert done is not None, "there is a collective"
        self._halfway = (parameters, microbatch, done)

    def finish(self) -> None:
        """Waits for all buckets and unpacks them."""
        self._go_on()
        for parameters, done in self._underway:
            self._writer.wait(done)
            self._writer.add(*self._compression.unpack(parameters, len(self._group.ranks)))
        self._underway = []

    def _go_on(self) -> None:
        if self._halfway is None:
            return
        parameters, microbatch, done = self._halfway
        self._halfway = None
        second = self._compression.exchange_sums(parameters, self._group, microbatch)
        if second:
            self._writer.wait(done)
            self._writer.add(*self._compression.sum_parts(parameters, len(self._group.ranks)))
            done = self._writer.after(second) or done
        self._underway.append((parameters, done))
